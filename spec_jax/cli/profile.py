"""`spec-jax profile`: where does the time of a round go?"""

import dataclasses
from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from spec_jax import distributed
from spec_jax.benchmarking.profiling import COSTLY, Profile, profile
from spec_jax.cli.decoding_options import ProfileOptions
from spec_jax.cli.loading import job_summary, load, prompts_of
from spec_jax.cli.prompts import PromptText
from spec_jax.cli.screen import Screen, plain_table
from spec_jax.engine.requests import Request


def run(options: ProfileOptions, screen: Screen, texts: list[PromptText]) -> int:
    """Records a trace and prints where the time went; returns the exit code."""
    llm = load(options, screen, chat=options.chat)
    prompts = prompts_of(llm, options, texts)

    def make() -> list[Request]:
        return [llm.request(each, options.sampling, i) for i, each in enumerate(prompts)]

    first = make()
    distributed.agree(
        {
            "prompts": [request.prompt_token_ids for request in first],
            "sampling parameters": options.sampling,
            "speculation": options.speculative,
            "rounds": options.rounds,
        }
    )

    def make_again() -> list[Request]:
        # No request is shared by two calls, as a grammar advances with its request.
        pairs = zip(make(), first, strict=True)
        return [dataclasses.replace(request, key=before.key) for request, before in pairs]

    times = profile(llm.engine, make_again, options.output, options.rounds, screen.progress)
    job = job_summary(options, llm) | {"platform": llm.engine.target.platform}
    screen.report(job, times.as_dict(), [_table(times), "", _in_words(times)])
    if options.json:
        return 0
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


def _table(times: Profile) -> Table:
    def row(label: Text, seconds: float, by_round: bool) -> tuple[Text, str, str, str]:
        a_round = f"{1e3 * seconds / times.rounds:.3f}" if by_round and times.rounds else ""
        return label, f"{1e3 * seconds:.2f}", a_round, f"{seconds / times.seconds:.1%}"

    def rows() -> Iterator[tuple[Text, str, str, str]]:
        for region in times.regions:
            by_round = times.milliseconds_per_round(region) is not None
            yield row(Text(region.name, style="bold"), region.seconds, by_round)
            for cost in region.costs[:COSTLY] if region.name != "host" else ():
                kind = f", {cost.kind}" if cost.kind else ""
                yield row(Text(f"  {cost.name}{kind}"), cost.seconds, by_round)

    return plain_table(["region, its most expensive ops"], ("ms", "ms a round", "share"), rows())


def _in_words(times: Profile) -> str:
    rows = f" of {times.rows} rows" if times.rows > 1 else ""
    return (
        f"{times.rounds} rounds{rows} gave {times.tokens} tokens in {1e3 * times.seconds:.1f} ms, "
        f"prefill included; {1e3 * times.seconds_unrecorded:.1f} ms without the profiler."
    )
