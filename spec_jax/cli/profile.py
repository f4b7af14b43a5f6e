"""`spec-jax profile`: where does the time of a round go?"""

import dataclasses
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from spec_jax import distributed
from spec_jax.benchmarking.profiling import COSTLY, Profile, profile
from spec_jax.cli.decoding_options import ProfileOptions
from spec_jax.cli.loading import job_summary, load
from spec_jax.cli.screen import Screen, plain_table
from spec_jax.engine.requests import Request
from spec_jax.llm import LLM, Prompt


def run(options: ProfileOptions, texts: Sequence[str]) -> int:
    """Records a trace and prints where the time went; returns the exit code."""
    assert options.output is not None
    with Screen(json_lines=options.json) as screen:
        llm = load(options, screen)
        times = profile(
            llm.engine,
            _Requests(llm, options, texts),
            options.output,
            options.rounds,
            screen.progress,
        )
        profiled = job_summary(options, llm) | {"platform": llm.engine.target.platform}
        if options.json:
            screen.record(profiled | times.as_dict())
            return 0
        line = ", ".join(f"{name} {value}" for name, value in profiled.items())
        screen.show(line, "", _table(times), "", _in_words(times))
        if times.rounds < options.rounds:
            screen.note(
                f"{options.rounds} rounds were requested, but the text had ended; --ignore-eos or "
                "more --max-tokens decode on"
            )
        screen.note(
            f"to look at the trace, open {times.viewable} at https://ui.perfetto.dev, or run "
            f"`xprof --logdir {times.directory}` (pip install xprof; TensorBoard shows it, too)"
        )
    return 0


class _Requests:
    """Makes the same requests at each call; none is shared, as a grammar advances with its own."""

    def __init__(self, llm: LLM, options: ProfileOptions, texts: Sequence[str]):
        self._llm, self._sampling = llm, options.sampling
        self._prompts: list[Prompt] = list(texts)
        if options.chat:
            chats = [[{"role": "user", "content": text}] for text in texts]
            self._prompts = [llm.encode_chat(chat) for chat in chats]
        self._first = self._make()
        distributed.agree(
            {
                "prompts": [request.prompt_token_ids for request in self._first],
                "sampling parameters": options.sampling,
                "speculation": options.speculative,
                "rounds": options.rounds,
            }
        )

    def __call__(self) -> list[Request]:
        pairs = zip(self._make(), self._first, strict=True)
        return [dataclasses.replace(request, key=first.key) for request, first in pairs]

    def _make(self) -> list[Request]:
        return [self._llm.request(each, self._sampling, i) for i, each in enumerate(self._prompts)]


def _table(times: Profile) -> Table:
    table = plain_table(["region, its most expensive ops"], ("ms", "ms a round", "share"))
    for region in times.regions:
        a_round = times.milliseconds_per_round(region)
        table.add_row(
            Text(region.name, style="bold"),
            f"{1e3 * region.seconds:.2f}",
            "" if a_round is None else f"{a_round:.3f}",
            f"{region.seconds / times.seconds:.1%}",
        )
        for cost in region.costs[:COSTLY] if region.name != "host" else ():
            kind = f", {cost.kind}" if cost.kind else ""
            each = cost.seconds / times.rounds if times.rounds and a_round is not None else None
            table.add_row(
                Text(f"  {cost.name}{kind}"),
                f"{1e3 * cost.seconds:.2f}",
                "" if each is None else f"{1e3 * each:.3f}",
                f"{cost.seconds / times.seconds:.1%}",
            )
    return table


def _in_words(times: Profile) -> str:
    """What the table is of."""
    rows = f" of {times.rows} rows" if times.rows > 1 else ""
    return (
        f"{times.rounds} rounds{rows} gave {times.tokens} tokens in {1e3 * times.seconds:.1f} ms, "
        f"prefill included; {1e3 * times.seconds_unrecorded:.1f} ms without the profiler."
    )
