"""The figures of a plan."""

import dataclasses
from typing import Any

from spec_jax.checkpoints.recipe import Published
from spec_jax.checkpoints.shape import Shape
from spec_jax.config import SamplingParams
from spec_jax.models.sizes import parameter_count
from spec_jax.planning.compiled import CompiledProgram
from spec_jax.planning.cost import Exchange, Terms, count_by_kind, exchanged_bytes
from spec_jax.sharding import Layout

CALLS = ("target_call", "scoring", "draft_step", "sampling", "round")
"""The calls of a plan."""


@dataclasses.dataclass(frozen=True)
class Replicated:
    """An axis that the layout would split into more shards than the model's size allows."""

    role: str
    axis: str
    size: int
    requested: int
    num_shards: int


@dataclasses.dataclass(frozen=True)
class CallPlan:
    """One program of a plan, on each chip.

    Attributes:
      weight_bytes: weights in the chip's memory; of offloaded weights, two blocks.
      host_bytes: offloaded weights, which the chip copies from host memory.
      cache_bytes: the chip's part of the caches.
      temporary_bytes: logits and probabilities of a round, an estimate.
      exchanges: collectives, computed.
      terms: the parts of the projected `seconds`; None without figures of the chip.
      program: the compiler's figures, if requested.
    """

    weight_bytes: int = 0
    host_bytes: int = 0
    cache_bytes: int = 0
    temporary_bytes: int = 0
    exchanges: tuple[Exchange, ...] = ()
    terms: Terms | None = None
    seconds: float | None = None
    program: CompiledProgram | None = None

    @property
    def collectives(self) -> dict[str, int]:
        """Kind -> count."""
        return count_by_kind(self.exchanges)

    @property
    def collective_bytes(self) -> int:
        """Bytes that the collectives sum or send."""
        return exchanged_bytes(self.exchanges)

    @property
    def computed_bytes(self) -> int:
        """Memory without the compiler's figures."""
        return self.weight_bytes + self.cache_bytes + self.temporary_bytes

    @property
    def memory_bytes(self) -> int | None:
        """Compiled, or else computed; None if the compiler found the program too large."""
        return self.program.memory_bytes if self.program else self.computed_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON; the compiler's figures replace computed ones."""
        compiled = self.program.as_dict() if self.program else None
        sizes = ("weight_bytes", "host_bytes", "cache_bytes", "temporary_bytes")
        return {
            "memory_bytes_per_chip": self.memory_bytes,
            "collectives": compiled["collectives"] if compiled else self.collectives,
            "projected_seconds": self.seconds,
            "computed": {
                **_values(self, *sizes, "collectives", "collective_bytes"),
                "seconds": dataclasses.asdict(self.terms) if self.terms else None,
            },
            "compiled": compiled,
        }


@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """Prefill of prompts as long as the context, all rows at once, on each chip.

    Attributes:
      block: tokens of each row in a chunk.
      held_bytes: weights and the caches that prefill makes.
      temporary_bytes: temporaries, an estimate.
      joining_bytes: caches of the rows that are prefilled while others decode, which exist beside
        the batch's until they are inserted.
      seconds: the projected time; None if the layout has no figures of the chip.
      program: the compiler's figures, if requested.
    """

    block: int
    chunks: int
    held_bytes: int
    temporary_bytes: int
    joining_bytes: int
    seconds: float | None
    program: CompiledProgram | None = None

    @property
    def computed_bytes(self) -> int:
        """Memory without the compiler's figures."""
        return self.held_bytes + self.temporary_bytes

    @property
    def memory_bytes(self) -> int | None:
        """Compiled, or else estimated; None if the compiler found the program too large."""
        return self.program.memory_bytes if self.program else self.computed_bytes

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "memory_bytes_per_chip": self.memory_bytes,
            "projected_seconds": self.seconds,
            **_values(self, "block", "chunks", "joining_bytes"),
            "computed": _values(self, "held_bytes", "temporary_bytes"),
            "compiled": self.program.as_dict() if self.program else None,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target and its drafting on a layout; every time is a projection.

    Attributes:
      draft: the draft model's shape; None for methods without one.
      dtype: of weights and, but on CPU, caches.
      offload: `host` if the target's blocks lie in host memory, else `none`.
      resident_layers: how many blocks, the first ones, stay on the chips with `host`.
      method: how tokens are drafted.
      exit_layers: the target's first layers, which draft by `early_exit`; otherwise 0.
      batch: rows, padded.
      capacity: KV slots of a row: the context and the headroom of a round.
      acceptance: the assumed probability that a draft token is accepted.
      parameters: how rows sample.
      target_call: one token of each row.
      scoring: K + 1 tokens of each row; by `early_exit` in the layers that have not drafted.
      draft_step: one token of each row, by the model or the layers that draft, if any do.
      sampling: drawing and verification of a round; only collectives count.
      round: the draft steps, scoring, and sampling. A draft model's first step reads two tokens;
        early layers read the last draft token, too.
      replicated: axes that are not sharded as the layout says.
      tokens_per_round: tokens that a round emits on average.
      speedup: over plain decoding; None for it, or if the layout has no figures of the chip.
      best: the K of the largest speed-up, and that speed-up.
    """

    target: Shape
    draft: Shape | None
    layout: Layout
    dtype: str
    quantization: str
    offload: str
    resident_layers: int
    method: str
    exit_layers: int
    batch: int
    capacity: int
    num_speculative_tokens: int
    acceptance: float
    parameters: SamplingParams
    target_call: CallPlan
    scoring: CallPlan
    draft_step: CallPlan | None
    sampling: CallPlan
    round: CallPlan
    prefill: PrefillPlan
    replicated: tuple[Replicated, ...]
    tokens_per_round: float
    speedup: float | None
    best: tuple[int, float] | None

    @property
    def calls(self) -> dict[str, CallPlan]:
        """The calls that there are, by name."""
        calls = {name: getattr(self, name) for name in CALLS}
        return {name: call for name, call in calls.items() if call is not None}

    @property
    def title(self) -> str:
        """The target and what drafts for it."""
        return title_of(self.target, self.draft, self.method, self.exit_layers)

    @property
    def published(self) -> list[tuple[str, Published, CallPlan]]:
        """Published figures for this layout: role, figures, and the call that they measure."""
        models = (("target", self.target, self.target_call), ("draft", self.draft, self.draft_step))
        return [
            (role, shape.published, call)
            for role, shape, call in models
            if shape and call and shape.published and shape.published.layout == self.layout.name
        ]

    @property
    def compile_seconds(self) -> float | None:
        """Tracing and compiling in all, if requested."""
        parts = (*self.calls.values(), self.prefill)
        seconds = [part.program.compile_seconds for part in parts if part.program]
        return sum(seconds) if seconds else None

    @property
    def seconds_to_first_token(self) -> float | None:
        """Prefill and a round; None without figures of the chip."""
        if self.prefill.seconds is None or self.round.seconds is None:
            return None
        return self.prefill.seconds + self.round.seconds

    @property
    def memory_bytes(self) -> int | None:
        """The larger of round and prefill on a chip; None if the compiler refused one of them.

        Programs that are not compiled are estimated.
        """
        round, prefill = self.round.memory_bytes, self.prefill.memory_bytes
        return None if round is None or prefill is None else max(round, prefill)

    @property
    def fits(self) -> bool | None:
        """Whether every program fits in a chip's usable memory; None without figures of it."""
        if self.memory_bytes is None:
            return False
        return self.layout.chip and self.memory_bytes <= self.layout.chip.usable

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        chip, (best, best_speedup) = self.layout.chip, self.best or (None, None)
        settings = (
            *("method", "exit_layers", "dtype", "quantization", "offload", "resident_layers"),
            *("batch", "capacity"),
            *("num_speculative_tokens", "acceptance"),
        )
        figures = "tokens_per_round", "speedup", "compile_seconds", "fits"
        return {
            "projection": True,
            "target": _model_as_dict(self.target),
            "draft": self.draft and _model_as_dict(self.draft),
            "layout": self.layout.name,
            "devices": self.layout.size,
            "chip": dataclasses.asdict(chip) if chip else None,
            **_values(self, *settings),
            **_values(self.parameters, "temperature", "top_k", "top_p"),
            **{name: self.calls[name].as_dict() if name in self.calls else None for name in CALLS},
            "prefill": self.prefill.as_dict(),
            **_values(self, "seconds_to_first_token", *figures),
            "best_num_speculative_tokens": best,
            "best_speedup": best_speedup,
            "replicated": [dataclasses.asdict(each) for each in self.replicated],
            "memory_bytes_per_chip": self.memory_bytes,
        }


def title_of(target: Shape, draft: Shape | None, method: str, exit_layers: int) -> str:
    """The target and what drafts for it."""
    if draft is not None:
        return f"{target.name} with {draft.name}"
    if method == "early_exit":
        layers = f"{exit_layers} layer{'s' if exit_layers > 1 else ''}"
        return f"{target.name} with its first {layers}"
    return target.name + (" with prompt lookup" if method == "prompt_lookup" else "")


def _values(record: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _model_as_dict(shape: Shape) -> dict[str, Any]:
    published = shape.published
    return {
        "name": shape.name,
        "parameters": parameter_count(shape.config),
        "published": published.model_dump() if published else None,
    }
