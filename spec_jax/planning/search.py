"""Searches batch, draft layout, K, quantization and context for the fastest that fits."""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from spec_jax.checkpoints.shape import Shape
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError
from spec_jax.planning import cost
from spec_jax.planning.abstract import GREEDY
from spec_jax.planning.pair import Pair, check_context, check_drafting
from spec_jax.planning.plan_figures import title_of
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import Layout, Rule

MAX_ROWS = 1024
"""How far batches are doubled that are not given."""
LOOKAHEADS = tuple(range(1, cost.MAX_LOOKAHEAD + 1))


class Candidate(NamedTuple):
    """One way to run a pair; every time is a projection, and memory an estimate, on each chip.

    Attributes:
      draft_chips: chips that hold one copy of the draft together.
      is_given: whether it is the layout that the search was started with.
      context: tokens of prompt and completion together.
      tokens_per_second: of all rows together.
      speedup: over plain decoding of the same batch.
      seconds_to_first_token: prefill of prompts as long as the context, and a round.
      round_bytes: weights, caches and temporaries of a round.
      prefill_bytes: weights, caches and temporaries of prefill.
      memory: usable bytes of a chip.
    """

    layout: Layout
    draft_chips: int
    is_given: bool
    quantization: str
    context: int
    batch: int
    num_speculative_tokens: int
    round_seconds: float
    tokens_per_second: float
    speedup: float
    seconds_to_first_token: float
    round_bytes: int
    prefill_bytes: int
    memory: float

    @property
    def too_large(self) -> tuple[str, ...]:
        """The programs that do not fit."""
        sizes = {"round": self.round_bytes, "prefill": self.prefill_bytes}
        return tuple(name for name, size in sizes.items() if size > self.memory)

    @property
    def key(self) -> tuple[str, int, int]:
        """Candidates are compared with candidates of the same key."""
        return self.quantization, self.context, self.batch

    @property
    def rank(self) -> tuple[bool, float]:
        """Larger is better: fitting candidates come first, then tokens a second."""
        return not self.too_large, self.tokens_per_second

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return self._asdict() | {
            "layout": self.layout.name,
            "fits": not self.too_large,
            "too_large": list(self.too_large),
        }


@dataclasses.dataclass(frozen=True)
class Search:
    """The candidates of a search, for an assumed acceptance of draft tokens.

    `rounded_sums` are the best ones with `all_reduce_dtype` bfloat16, which changes the model's
    distribution by rounding; empty if sums are rounded already, or cannot be.
    """

    target: Shape
    draft: Shape | None
    layout: Layout
    method: str
    exit_layers: int
    acceptance: float
    candidates: tuple[Candidate, ...]
    rounded_sums: tuple[Candidate, ...] = ()

    @property
    def title(self) -> str:
        """The target and what drafts for it."""
        return title_of(self.target, self.draft, self.method, self.exit_layers)

    @property
    def groups(self) -> list[list[Candidate]]:
        """The candidates by quantization, context and batch."""
        groups: dict[tuple, list[Candidate]] = defaultdict(list)
        for each in self.candidates:
            groups[each.key].append(each)
        return list(groups.values())

    @property
    def best(self) -> list[Candidate]:
        """The best of each group."""
        return [max(group, key=lambda each: each.rank) for group in self.groups]

    @property
    def given(self) -> list[Candidate]:
        """The best of each group with the given layout."""
        groups = [[each for each in group if each.is_given] for group in self.groups]
        return [max(group, key=lambda each: each.rank) for group in groups]

    @property
    def excess(self) -> list[float]:
        """The relative excess of time a token on the given layout, for each group."""
        pairs = zip(self.best, self.given, strict=True)
        return [best.tokens_per_second / other.tokens_per_second - 1 for best, other in pairs]

    @property
    def rounded_gain(self) -> list[float]:
        """How much faster the best of each group is with rounded sums, relative."""
        pairs = zip(self.best, self.rounded_sums, strict=bool(self.rounded_sums))
        return [other.tokens_per_second / best.tokens_per_second - 1 for best, other in pairs]

    @property
    def largest(self) -> dict[tuple[str, int], int]:
        """(quantization, context) -> the most rows that fit, 0 if not even the least do."""
        rows: dict[tuple[str, int], int] = defaultdict(int)
        for each in self.best:
            key = each.quantization, each.context
            rows[key] = max(rows[key], 0 if each.too_large else each.batch)
        return dict(rows)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the best K of each draft layout."""
        ranked = sorted(self.candidates, key=lambda each: each.rank)
        best_lookaheads = {(*each.key, each.layout.name): each for each in ranked}
        return {
            "projection": True,
            "target": self.target.name,
            "draft": self.draft and self.draft.name,
            "method": self.method,
            "layout": self.layout.name,
            "acceptance": self.acceptance,
            "best": [each.as_dict() for each in self.best],
            "given": [each.as_dict() for each in self.given],
            "given_excess": self.excess,
            "bfloat16_sums": [each.as_dict() for each in self.rounded_sums],
            "largest_batch": [
                {"quantization": quantization, "context": context, "batch": batch}
                for (quantization, context), batch in self.largest.items()
            ],
            "candidates": [each.as_dict() for each in best_lookaheads.values()],
        }


def search(
    target: Shape,
    draft: Shape | None,
    layout: Layout,
    *,
    method: str = "draft_model",
    early_exit_layers: int | None = None,
    acceptance: float = 0.8,
    batches: Sequence[int] = (),
    contexts: Sequence[int] = (),
    lookaheads: Sequence[int] = LOOKAHEADS,
    quantizations: Sequence[str] = ("none",),
    sampling: SamplingParams = GREEDY,
    dtype: str = "bfloat16",
) -> Search:
    """Tries every combination.

    Args:
      target: the target's shape.
      draft: the draft model's; None for the other methods.
      layout: tells the chips and where the target lies; a draft model is tried elsewhere, too.
      method: see `make_plan`.
      early_exit_layers: see `make_plan`.
      acceptance: the probability that a draft token is accepted.
      batches: rows; by default doubled until nothing fits.
      contexts: tokens of prompt and completion together; the target's own by default.
      lookaheads: draft tokens of a round (K).
      quantizations: of the matrices.
      sampling: how rows sample.
      dtype: of weights and caches.

    Raises:
      ConfigError: the layout has no figures of its chip, or does not fit the target.
    """
    chip, features = layout.chip, SamplingFeatures.of([sampling])
    if chip is None:
        raise ConfigError(
            f"layout {layout.name} has no figures of its chip, by which to search; add [chip], or "
            "choose another layout, such as tpu-v5e-8."
        )
    if layout.platform == "gpu" and (quantized := [q for q in quantizations if q != "none"]):
        raise ConfigError(
            f"quantization is {quantized[0]!r}, but on GPUs it is not known how fast quantized "
            "matrices are read; search without --quantization, or plan without --search."
        )
    for context in contexts:
        check_context(context, target)
    exits = check_drafting(target, draft, method, early_exit_layers)
    lookaheads = lookaheads if method != "none" else (0,)

    @functools.cache
    def pair_on(layout: Layout, quantization: str) -> Pair:
        options = {"method": method, "exit_layers": exits}
        return Pair.of(target, draft, layout, dtype, quantization, **options)

    def tried(on: Layout, quantization: str, context: int, batch: int, lookahead: int) -> Candidate:
        job = pair_on(on, quantization).job(batch, context, lookahead, features)
        round, plain, prefill = job.round, job.target_call, job.prefill
        assert round.seconds and plain.seconds and prefill.seconds is not None
        assert round.memory_bytes and prefill.memory_bytes  # nothing is compiled
        emitted, mesh = cost.tokens_per_round(acceptance, lookahead), dict(on.mesh)
        return Candidate(
            on,
            draft_chips=math.prod(mesh[axis] for axis in _axes(on, "draft")),
            is_given=on is layout,
            quantization=quantization,
            context=context,
            batch=job.shapes.batch,
            num_speculative_tokens=lookahead,
            round_seconds=round.seconds,
            tokens_per_second=job.shapes.batch * emitted / round.seconds,
            speedup=emitted * plain.seconds / round.seconds,
            seconds_to_first_token=prefill.seconds + round.seconds,
            round_bytes=round.memory_bytes,
            prefill_bytes=prefill.memory_bytes,
            memory=chip.usable,
        )

    candidates: list[Candidate] = []
    layouts = [layout] if draft is None else list(draft_layouts(layout))
    for job in itertools.product(quantizations, contexts or (target.config.max_position,)):
        shards = pair_on(layout, job[0]).weights.shards("batch")
        for batch in batches or (shards << i for i in range((MAX_ROWS // shards).bit_length())):
            some = [tried(each, *job, batch, k) for each in layouts for k in lookaheads]
            candidates += some
            if not batches and all(each.too_large for each in some):
                break
    results = Search(target, draft, layout, method, exits, acceptance, tuple(candidates))
    if dtype != "bfloat16" or layout.all_reduce_dtype == "bfloat16":
        return results
    rounded = (
        tried(
            dataclasses.replace(best.layout, all_reduce_dtype="bfloat16"),
            *best.key,
            best.num_speculative_tokens,
        )
        for best in results.best
    )
    return dataclasses.replace(results, rounded_sums=tuple(rounded))


def draft_layouts(layout: Layout) -> Iterator[Layout]:
    """The given layout first, then others with the draft on 1, 2, 4, .. of a row's chips.

    The target lies as before. A layout that does not cut all of the target's axes alike is not
    varied.
    """
    yield layout
    rules, mesh = dict(layout.target), dict(layout.mesh)
    axes = _axes(layout, "target")
    sharded = {name: rule for name, rule in rules.items() if name != "batch"}
    if not sharded or any(rule.axes != axes for rule in sharded.values()):
        return
    total = math.prod(mesh[axis] for axis in axes)
    others = tuple(each for each in layout.mesh if each[0] not in axes)
    batch = [(name, rule) for name, rule in layout.target if name == "batch"]
    for chips in (2**i for i in range(total.bit_length()) if total % 2**i == 0):
        inner = (("outer", total // chips), ("inner", chips))
        parts = inner if 1 < chips < total else (("model", total),)
        names = tuple(name for name, _ in parts)
        cut = [(name, Rule(names, replicate=rule.replicate)) for name, rule in sharded.items()]
        of_draft = [(name, Rule(names[-1:], replicate=True)) for name in sharded if chips > 1]
        varied = dataclasses.replace(
            layout,
            name=f"{layout.name}-draft-on-{chips}",
            mesh=(*others, *parts),
            target=(*batch, *cut),
            draft=(*batch, *of_draft),
        )
        if not _alike(varied, layout):
            yield varied


def _axes(layout: Layout, role: str) -> tuple[str, ...]:
    """The mesh axes of the heads, or of whatever else than the rows is cut."""
    rules = dict(getattr(layout, role))
    rule = rules.get("heads") or next((rules[name] for name in rules if name != "batch"), None)
    return rule.axes if rule else ()


def _alike(one: Layout, other: Layout) -> bool:
    """Whether the draft of two layouts lies on as many neighbouring chips."""
    first, second = (
        [(name, [dict(each.mesh)[axis] for axis in rule.axes]) for name, rule in each.draft]
        for each in (one, other)
    )
    return first == second
