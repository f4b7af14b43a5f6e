"""`spec-jax plan --search`: the table of what was found."""

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from spec_jax.cli.screen import visible
from spec_jax.planning import Candidate, Search


def report_search(found: Search) -> list[RenderableType]:
    """Of each batch the best draft layout and K, and what the given layout costs."""
    chip = found.layout.chip
    assert chip is not None  # or nothing was searched
    heading = (
        f"{found.target.name} with {found.draft.name} on {found.layout.name}: "
        f"{found.layout.size} devices of {chip.name}, {found.acceptance:g} of drafted tokens "
        "accepted. Every time is a projection; memory is an estimate, for one device."
    )
    lines = ["* the given layout; the draft lies on so many chips together."]
    for (quantization, context), rows in found.largest.items():
        what = f"{context} tokens of context, quantization {quantization}"
        said = f"{rows} rows" if rows else "none"
        lines.append(f"Largest batch that fits, {what}: {said}.")
    slower = [
        (best, excess) for best, excess in zip(found.best, found.excess, strict=True) if excess > 0
    ]
    if not slower:
        lines.append("No other draft layout is faster than that of the given file.")
    for best, excess in slower:
        lines.append(
            f"The given layout takes {100 * excess:.1f} % more time a token than the draft on "
            f"{best.draft_chips} chips ({_job(best)})."
        )
    return [Text(visible(heading), "bold"), "", _table(found), "", *lines]


def write_best(found: Search, file: str) -> str:
    """Writes the layout of the first row of the table; returns what was done, as a sentence."""
    best = found.best[0]
    best.layout.write(file)
    return f"{file} has the draft on {best.draft_chips} chips ({_job(best)})."


def _table(found: Search) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    several = [len({each.key[i] for each in found.best}) > 1 for i in (0, 1)]
    names = ["quantization"] * several[0] + ["context"] * several[1]
    names += ["batch", "draft on", "K", "round, ms", "tokens/s", "speed-up", "first token, s"]
    for name in [*names, "round, GiB", "prefill, GiB", "too large"]:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for best, given in zip(found.best, found.given, strict=True):
        rows = [best] if given.rank == best.rank else [best, given]
        for each in rows:
            cells = [each.quantization] * several[0] + [str(each.context)] * several[1]
            table.add_row(*cells, *_cells(each))
    return table


def _cells(each: Candidate) -> list[str]:
    return [
        str(each.batch),
        f"{each.draft_chips}{'*' if each.is_given else ' '}",
        str(each.num_speculative_tokens),
        f"{1000 * each.round_seconds:.2f}",
        f"{each.tokens_per_second:.0f}",
        f"{each.speedup:.2f}",
        f"{each.seconds_to_first_token:.2f}",
        f"{each.round_bytes / 2**30:.2f}",
        f"{each.prefill_bytes / 2**30:.2f}",
        ", ".join(each.too_large),
    ]


def _job(each: Candidate) -> str:
    return f"batch {each.batch}, context {each.context}, quantization {each.quantization}"
