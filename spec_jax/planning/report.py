"""The figures of a plan."""

import dataclasses
from typing import Any

from spec_jax.checkpoints.recipe import Published
from spec_jax.checkpoints.shape import Shape
from spec_jax.config import SamplingParams
from spec_jax.models.sizes import parameter_count
from spec_jax.planning.compiled import Program
from spec_jax.planning.cost import Terms
from spec_jax.sharding import Layout


@dataclasses.dataclass(frozen=True)
class Replicated:
    """An axis that the layout would split into more shards than the model's size allows.

    Attributes:
      role: `target` or `draft`.
      axis: the logical axis.
      size: the model's.
      asked: the layout's number of shards.
      num_shards: the number it gets.
    """

    role: str
    axis: str
    size: int
    asked: int
    num_shards: int


@dataclasses.dataclass(frozen=True)
class Section:
    """One program of a plan, on each chip.

    Attributes:
      weight_bytes: the weights that a chip holds; of those in host memory, two blocks.
      host_bytes: the weights in host memory that a chip copies.
      cache_bytes: its part of the caches.
      temporary_bytes: what the logits and probabilities of a round take, an estimate.
      collectives: kind -> count, computed.
      collective_bytes: bytes that these sum or send.
      terms: the parts of the projected time; None if the layout has no figures of the chip.
      seconds: the projected time.
      program: the compiler's figures, if requested.
    """

    weight_bytes: int
    host_bytes: int
    cache_bytes: int
    temporary_bytes: int
    collectives: dict[str, int]
    collective_bytes: int
    terms: Terms | None
    seconds: float | None
    program: Program | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Compiled, or else computed; None if the compiler found it too large to compile."""
        if self.program is None:
            return self.weight_bytes + self.cache_bytes + self.temporary_bytes
        return self.program.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """As JSON; the compiler's figures replace computed ones."""
        compiled = self.program.as_dict() if self.program else None
        return {
            "memory_bytes_per_chip": self.memory_bytes,
            "collectives": compiled["collectives"] if compiled else self.collectives,
            "projected_seconds": self.seconds,
            "computed": {
                "weight_bytes": self.weight_bytes,
                "host_bytes": self.host_bytes,
                "cache_bytes": self.cache_bytes,
                "temporary_bytes": self.temporary_bytes,
                "collectives": self.collectives,
                "collective_bytes": self.collective_bytes,
                "seconds": dataclasses.asdict(self.terms) if self.terms else None,
            },
            "compiled": compiled,
        }


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Reading prompts as long as the context, all rows at once, on each chip.

    Attributes:
      block: tokens of each row that are read at a time.
      chunks: how often.
      held_bytes: weights and caches, which it makes.
      temporary_bytes: temporaries, an estimate.
      joining_bytes: caches of the rows that are read together while others decode, which exist
        beside the batch's until they join it.
      seconds: the projected time; None if the layout has no figures of the chip.
      program: the compiler's figures, if requested.
    """

    block: int
    chunks: int
    held_bytes: int
    temporary_bytes: int
    joining_bytes: int
    seconds: float | None
    program: Program | None = None

    @property
    def memory_bytes(self) -> int | None:
        """Compiled, or else estimated; None if the compiler found it too large to compile."""
        if self.program is None:
            return self.held_bytes + self.temporary_bytes
        return self.program.memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "memory_bytes_per_chip": self.memory_bytes,
            "projected_seconds": self.seconds,
            "block": self.block,
            "chunks": self.chunks,
            "joining_bytes": self.joining_bytes,
            "computed": {
                "held_bytes": self.held_bytes,
                "temporary_bytes": self.temporary_bytes,
            },
            "compiled": self.program.as_dict() if self.program else None,
        }


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target and its draft on a layout; every time is a projection.

    Attributes:
      target: the target's shape.
      draft: the draft's.
      layout: the layout.
      dtype: of weights and, but on CPU, caches.
      quantization: of matrices.
      offload: where the matrices of the target's blocks lie: `host`, or `none` for on the chips.
      resident_layers: how many of its blocks, the first ones, lie on the chips all the same.
      batch: rows, as they are padded.
      capacity: KV slots of a row: the context and the room that a round needs.
      num_speculative_tokens: draft tokens of a round (K).
      acceptance: the probability that a draft token is accepted; an assumption.
      parameters: how rows sample.
      target_call: one token of each row.
      scoring: K + 1 tokens of each row.
      draft_step: one token of each row, by the draft.
      sampling: drawing and verification of a round, of which only the all-reduces count.
      round: K draft steps, the first of which reads two tokens, scoring, and sampling.
      prefill: prefill of both models for prompts as long as the context.
      replicated: axes that are not sharded as the layout says.
      tokens_per_round: tokens that a round emits on average.
      speedup: over plain decoding; None if the layout has no figures of the chip.
      best: the K of the largest speed-up, and that speed-up.
    """

    target: Shape
    draft: Shape
    layout: Layout
    dtype: str
    quantization: str
    offload: str
    resident_layers: int
    batch: int
    capacity: int
    num_speculative_tokens: int
    acceptance: float
    parameters: SamplingParams
    target_call: Section
    scoring: Section
    draft_step: Section
    sampling: Section
    round: Section
    prefill: Prefill
    replicated: tuple[Replicated, ...]
    tokens_per_round: float
    speedup: float | None
    best: tuple[int, float] | None

    @property
    def published(self) -> list[tuple[str, Published, Section]]:
        """Figures of this very layout: role, what was published, and the section it belongs to."""
        sections = {"target": self.target_call, "draft": self.draft_step}
        return [
            (role, shape.published, sections[role])
            for role, shape in (("target", self.target), ("draft", self.draft))
            if shape.published and shape.published.layout == self.layout.name
        ]

    @property
    def compile_seconds(self) -> float | None:
        """Tracing and compiling in all, if that was asked for."""
        sections = (self.target_call, self.scoring, self.draft_step, self.round, self.prefill)
        seconds = [each.program.compile_seconds for each in sections if each.program]
        return sum(seconds) if seconds else None

    @property
    def seconds_to_first_token(self) -> float | None:
        """Prefill and a round; None without figures of the chip."""
        if self.prefill.seconds is None or self.round.seconds is None:
            return None
        return self.prefill.seconds + self.round.seconds

    @property
    def memory_bytes(self) -> int | None:
        """Bytes of the larger of round and prefill on a chip; None if one was refused as too large.

        What is not compiled is an estimate.
        """
        round, prefill = self.round.memory_bytes, self.prefill.memory_bytes
        return None if round is None or prefill is None else max(round, prefill)

    @property
    def fits(self) -> bool | None:
        """Whether every program fits in a chip's memory; None without figures of the chip."""
        if self.memory_bytes is None:
            return False
        return self.layout.chip and self.memory_bytes <= self.layout.chip.memory

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        chip = self.layout.chip
        return {
            "projection": True,
            "target": _model_as_dict(self.target),
            "draft": _model_as_dict(self.draft),
            "layout": self.layout.name,
            "devices": self.layout.size,
            "chip": dataclasses.asdict(chip) if chip else None,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "offload": self.offload,
            "resident_layers": self.resident_layers,
            "batch": self.batch,
            "capacity": self.capacity,
            "num_speculative_tokens": self.num_speculative_tokens,
            "acceptance": self.acceptance,
            "temperature": self.parameters.temperature,
            "top_k": self.parameters.top_k,
            "top_p": self.parameters.top_p,
            "target_call": self.target_call.as_dict(),
            "scoring": self.scoring.as_dict(),
            "draft_step": self.draft_step.as_dict(),
            "sampling": self.sampling.as_dict(),
            "round": self.round.as_dict(),
            "prefill": self.prefill.as_dict(),
            "seconds_to_first_token": self.seconds_to_first_token,
            "tokens_per_round": self.tokens_per_round,
            "speedup": self.speedup,
            "best_num_speculative_tokens": self.best[0] if self.best else None,
            "best_speedup": self.best[1] if self.best else None,
            "replicated": [dataclasses.asdict(each) for each in self.replicated],
            "compile_seconds": self.compile_seconds,
            "memory_bytes_per_chip": self.memory_bytes,
            "fits": self.fits,
        }


def _model_as_dict(shape: Shape) -> dict[str, Any]:
    published = shape.published
    return {
        "name": shape.name,
        "parameters": parameter_count(shape.config),
        "published": published.model_dump() if published else None,
    }
