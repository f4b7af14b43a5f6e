"""`spec-jax plan --search`: the tables of its results."""

from rich.console import RenderableType
from rich.text import Text

from spec_jax.cli.screen import plain_table, visible
from spec_jax.planning import Candidate, Search

_DRAFT_ON = "draft\non"
COLUMNS = (
    *("batch", _DRAFT_ON, "K", "round\nms", "tokens\na\ns", "speed-\nup", "first\ntoken\ns"),
    *("round\nGiB", "prefill\nGiB"),
)
"""Each word has a line, so that a terminal of 60 columns holds the table."""


def report_search(results: Search) -> list[RenderableType]:
    """Of each batch the best draft layout and K, and what the given layout costs."""
    chip = results.layout.chip
    assert chip is not None  # or nothing was searched
    heading = (
        f"{results.title} on {results.layout.name}: "
        f"{results.layout.size} devices of {chip.name} with {chip.usable / 2**30:g} usable GiB"
    )
    shown: list[RenderableType] = [
        Text(visible(heading), "bold"),
        f"Times are projections, if {results.acceptance:g} of drafted tokens are accepted; memory "
        "is an estimate, for one device.",
    ]
    note = "The draft lies on this number of devices; * is the given layout, ! what does not fit."
    shown.append(note if results.draft else "What does not fit has a !.")
    columns = [each for each in COLUMNS if results.draft or each != _DRAFT_ON]
    pairs = list(zip(results.best, results.given, strict=True))
    for (quantization, context), rows in results.largest.items():
        cells = [
            _cells(each, results.draft is not None)
            for best, current in pairs
            if (best.quantization, best.context) == (quantization, context)
            for each in ([best] if current.rank == best.rank else [best, current])
        ]
        largest = f"the largest of these batches that fits has {rows} rows" if rows else "none fits"
        shown += [
            "",
            f"Quantization {quantization}, {context} tokens of context: {largest}.",
            plain_table([], columns, cells, padding=1),
        ]
    gain, of = max(zip(results.rounded_gain, results.best, strict=False), default=(0.0, None))
    if of is not None and gain >= 0.01:
        shown += [
            "",
            f'With all_reduce_dtype = "bfloat16" in the layout, which rounds sums between devices, '
            f"these are up to {100 * gain:.1f} % faster ({_job(of)}).",
        ]
    if results.draft is None:
        return shown
    worst, best = max(zip(results.excess, results.best, strict=True), key=lambda each: each[0])
    last = "No other draft layout is faster than the given one."
    if worst > 0:
        last = (
            f"The given layout takes up to {100 * worst:.1f} % more time a token than the best: "
            f"the draft on {best.draft_chips} devices ({_job(best)})."
        )
    return [*shown, "", last]


def write_best(results: Search, file: str) -> str:
    """Writes the layout of the first row of the table; returns what was done, as a sentence."""
    best = results.best[0]
    best.layout.write(file)
    return f"{file} has the draft on {best.draft_chips} devices ({_job(best)})."


def _cells(each: Candidate, has_draft: bool) -> list[str]:
    sizes = {"round": each.round_bytes, "prefill": each.prefill_bytes}.items()
    return [
        str(each.batch),
        *([f"{each.draft_chips}{'*' if each.is_given else ' '}"] if has_draft else []),
        str(each.num_speculative_tokens),
        f"{1000 * each.round_seconds:.2f}",
        f"{each.tokens_per_second:.0f}",
        f"{each.speedup:.2f}",
        f"{each.seconds_to_first_token:.2f}",
        *(f"{size / 2**30:.2f}{'!' if of in each.too_large else ' '}" for of, size in sizes),
    ]


def _job(each: Candidate) -> str:
    return f"batch {each.batch}, context {each.context}, quantization {each.quantization}"
