"""`spec-jax bench`: measures systems side by side, into a file of results."""

from spec_jax import distributed
from spec_jax.benchmarking import prompts
from spec_jax.benchmarking.baselines import check_baseline, prepare_baselines
from spec_jax.benchmarking.measuring import BenchProgress, describe, encode, measure
from spec_jax.benchmarking.results import Results, Setting, Writer
from spec_jax.benchmarking.summary import Measured, summarize
from spec_jax.benchmarking.systems import Runner, grid, prepare
from spec_jax.cli.interrupts import INTERRUPTED, acknowledge
from spec_jax.cli.loading import make_llm
from spec_jax.cli.screen import Screen, minutes_left, plain_table
from spec_jax.cli.tool_options import BenchOptions

_LEGEND = (
    "tokens/s: medians of the repeats. Speed-up: against the fastest plain decoding, and its "
    "range. A call: tokens a target call. Accepted: of drafted tokens. First, token: medians of "
    "requests, to the first token and of each after it. Loop: measured speed-up over what the cost "
    "of calls predicts."
)
_HEADINGS = ("tokens/s", "speed-up", "a call", "accepted", "first, ms", "token, ms", "loop")


def run(options: BenchOptions, screen: Screen) -> int:
    """Measures and prints a table; returns the exit code, 130 after Ctrl-C."""
    for name in options.baseline:
        check_baseline(name)
    configs = grid(
        options.methods,
        options.num_speculative_tokens,
        policies=options.draft_length_policy,
        verifications=options.verification,
        scorings=options.scoring,
        options=options.speculation,
    )
    sets = [prompts.load(name).some(options.num_prompts) for name in options.prompt_set]
    progress = _RunProgress(screen)
    llm = make_llm(
        options.target, screen, seed=options.seed, on_progress=progress.waiting, **options.llm
    )
    encoded = encode(llm, sets, options.max_tokens, screen.note)
    runners: list[Runner] = [*prepare(llm, configs)]
    runners += prepare_baselines(options.baseline, llm, options.target, configs, screen.note)
    header = describe(
        llm,
        runners,
        encoded,
        target=options.target,
        draft=options.speculation.get("draft"),
        options={
            name: str(value)
            for name, value in {**options.llm, **options.speculation}.items()
            if name not in ("draft", "dtype", "quantization", "layout")  # fields of the header
        },
        settings=tuple(_settings(options)),
        batch_sizes=tuple(options.batch_size),
        max_tokens=options.max_tokens,
        ignore_eos=options.ignore_eos,
        repeats=options.repeats,
        seed=options.seed,
        command=options.command,
    )
    writer: Writer | None = None

    def open_file() -> None:
        nonlocal writer
        writer = Writer(options.output, header, resume=options.resume)

    distributed.from_first(open_file)
    interrupted = False
    try:
        measure(header, runners, encoded, writer, progress)
    except KeyboardInterrupt:
        acknowledge()
        interrupted = True
    screen.settle()
    if writer is not None:
        _show(screen, writer.results)
        screen.note(f"{len(writer.results.runs)} runs in {options.output}")
    if interrupted:
        screen.note("interrupted; the same command with --resume continues")
    return INTERRUPTED if interrupted else 0


def _settings(options: BenchOptions) -> dict[Setting, None]:
    """Greedy decoding once, and each temperature with each top-p."""
    return dict.fromkeys(
        Setting(temperature=temperature, top_p=top_p if temperature else 1.0)
        for temperature in options.temperature
        for top_p in options.top_p
    )


class _RunProgress:
    """Progress of the runs, and what is compiled for the run that was shown last."""

    def __init__(self, screen: Screen):
        self._screen = screen
        self._last: BenchProgress | None = None

    def __call__(self, progress: BenchProgress, activity: str = "") -> None:
        self._last = progress
        text = f"{progress.text}{activity}{minutes_left(progress.seconds_left)}"
        self._screen.count(progress.done, progress.total, "runs", text)

    def waiting(self, activity: str) -> None:
        if self._last is None:
            self._screen.progress(activity)
        else:
            self(self._last, f" ({activity})")


def _show(screen: Screen, results: Results) -> None:
    """Prints a table for each set of prompts, way of sampling and batch size."""
    for cell, systems in summarize(results).items():
        screen.show(cell.name, plain_table(["system"], _HEADINGS, map(_row, systems)), "")
    screen.show(_LEGEND)


def _row(each: Measured) -> list[str]:
    rate, efficiency = each.acceptance_rate, each.loop_efficiency
    return [
        each.system.name,
        f"{each.tokens_per_second.median:.1f}",
        "" if each.speedup is None else each.speedup.text(),
        f"{each.tokens_per_call:.2f}",
        "" if rate is None else f"{rate:.0%}",
        f"{1000 * each.first_token_seconds[0]:.1f}",
        f"{1000 * each.seconds_per_output_token[0]:.1f}",
        "" if efficiency is None else f"{efficiency.median:.2f}",
    ]
