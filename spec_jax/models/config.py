"""The shape of a model, as orthogonal choices: a family is a translation table into this."""

import math
from dataclasses import dataclass
from typing import Literal

from spec_jax.errors import CheckpointError


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3 frequency scaling of rotary embeddings (Llama 3.1, `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071, `rope_type: yarn`).

    Attributes:
      factor: long wavelengths are stretched by it.
      original_max_position: the context before.
      fast: frequencies that turn more often than this within that context are kept.
      slow: those that turn less often are stretched wholly.
      whole: the range between the two is widened to whole frequencies.
      amplitude: rotated queries and keys are multiplied by it.
    """

    factor: float
    original_max_position: int
    fast: float
    slow: float
    whole: bool
    amplitude: float


@dataclass(frozen=True)
class LongRopeScaling:
    """LongRoPE (arXiv 2402.13753, `rope_type: longrope`): a divisor for each rotary frequency.

    The longest context that a model is used with, `max_position`, chooses between two lists of
    divisors for all positions, as in vLLM and llama.cpp. transformers chooses by the length that a
    text has so far, and computes all of it again when it grows past the original context: until
    then it agrees with a model whose context ends there, afterwards with one of a longer context.
    Keys in a cache are rotated once, so no model does both.

    Attributes:
      short: divisors in contexts of up to `original_max_position` tokens.
      long: divisors in longer ones.
      original_max_position: the context before.
      amplitude: rotated queries and keys are multiplied by it, in both.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position: int
    amplitude: float

    def divisors(self, context: int) -> tuple[float, ...]:
        """Those of a context of so many tokens."""
        return self.long if context > self.original_max_position else self.short


@dataclass(frozen=True)
class Experts:
    """Sparse MLPs: each token runs through a few of many experts (arXiv 1701.06538, 2401.04088).

    Attributes:
      count: experts of a layer.
      per_token: how many of them a token chooses, the most probable ones.
      size: hidden width of an expert.
      normed: the weights of a token's experts are divided by their sum; otherwise they are its
        probabilities among all experts.
      dense_layers: layers, counted from 0, that have a dense MLP of `mlp_size` all the same.
    """

    count: int
    per_token: int
    size: int
    normed: bool = True
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= _MOST["mlp_size"]:
                raise CheckpointError(
                    f"model config: experts.{name} is {value!r}; expected an int >= 1 and <= "
                    f"{_MOST['mlp_size']}."
                )
        if self.per_token > self.count:
            raise CheckpointError(
                f"model config: a token chooses {self.per_token} of {self.count} experts; it can "
                "choose no more than there are."
            )


_MOST = {
    "vocab_size": 2**24,
    "embed_size": 2**18,
    "num_layers": 2**11,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "head_dim": 2**14,
    "mlp_size": 2**21,
    "max_position": 2**30,
    "sliding_window": 2**30,
    "global_every": 2**11,
    "unrotated_every": 2**11,
}
"""Far more than any model has: what a damaged file declares must not be allocated."""
_SCALES = (
    *("rope_factor", "rope_theta", "local_rope_theta", "query_pre_attn_scalar"),
    *("embedding_scale", "residual_scale", "logit_scale", "score_cap", "logit_cap"),
)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that decides a decoder's computation; static under jit.

    Attributes:
      vocab_size: rows of the embedding table, padding rows included.
      embed_size: width of the residual stream.
      num_layers: blocks.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads` (GQA).
      head_dim: width of one head.
      mlp_size: hidden width of the MLP.
      max_position: longest context the weights were trained for, or the model is used with.
      norm: root-mean-square norm, or layer norm with a bias.
      norm_eps: the norm's epsilon.
      pre_norms: attention and MLP read normed inputs; OLMo 2 norms only what they give out.
      activation: of the MLP.
      gated_mlp: `down(act(gate(x)) * up(x))` rather than `down(act(up(x)))`.
      rope_theta: base of the rotary embedding.
      learned_positions: a table of positions is added to the embedding.
      rope_fraction: the leading part of each head that is rotated; 0 for learned positions.
      rope_factor: positions are divided by it before the rotation (linear scaling).
      rope_scaling: long-context scaling of the rotary frequencies.
      sliding_window: local layers see this many latest positions, a token's own included; None
        if all layers are global and see the whole context.
      global_every: with a window, every `global_every`-th layer is global; None if all are local.
      local_rope_theta: with a window, the rotary base of the local layers, without scaling; None if
        they use the same as the global layers.
      unrotated_every: every n-th layer does not rotate, so that it knows no positions; None if all
        layers rotate.
      qkv_bias: biases on query, key and value projections.
      key_bias: with them, also on that of the keys, which Whisper's lacks.
      output_bias: bias on the attention's output projection.
      mlp_bias: biases in the MLP.
      experts: the sparse MLPs, which are gated and without biases; None if all are dense.
      qk_norm: an RMS norm over each query and key `head`, or over the whole `projection`, before
        the rotation.
      query_pre_attn_scalar: scores are divided by its square root; `head_dim` by default.
      score_cap: scores become `cap * tanh(score / cap)` before the softmax; None leaves them.
      alibi_scale: heads lower scores by the distance times their slopes (ALiBi) times this; 0 if
        they do not.
      post_norms: the outputs of attention and MLP are normed as well as their inputs (Gemma).
      embedding_norm: the embedding is normed (BLOOM).
      embedding_scale: the residual stream starts as the embedding times this.
      residual_scale: what attention and MLP add to it is multiplied by this.
      logit_scale: logits are multiplied by this.
      logit_cap: then they become `cap * tanh(logit / cap)`; None leaves them.
      parallel_residual: attention and MLP both read the block's input (GPT-NeoX).
      shared_norm: with a parallel residual, they read it through one norm (GPT-J).
      tied_head: the embedding table is the output head.
      head_bias: a bias on the head that is not tied.
      relative_buckets: scores get a learned bias by the bucket of the key's distance (T5), the same
        in all layers; 0 if they do not.
      relative_distance: with buckets, the distance from which on all share the last one.
      encoder: the shape of the encoder whose output every layer also attends to; None for a model
        of one text.
      decoder_start: with an encoder, the tokens that a generation starts from.
      mel_bins: an encoder reads frames of so many features through two convolutions, not tokens
        through the embedding (Whisper); 0 for tokens.
    """

    vocab_size: int
    embed_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    max_position: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    pre_norms: bool = True
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    learned_positions: bool = False
    rope_theta: float = 10000.0
    rope_fraction: float = 1.0
    rope_factor: float = 1.0
    rope_scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None
    sliding_window: int | None = None
    global_every: int | None = None
    local_rope_theta: float | None = None
    unrotated_every: int | None = None
    qkv_bias: bool = False
    key_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None
    qk_norm: Literal["none", "head", "projection"] = "none"
    query_pre_attn_scalar: float | None = None
    score_cap: float | None = None
    alibi_scale: float = 0.0
    post_norms: bool = False
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    parallel_residual: bool = False
    shared_norm: bool = False
    tied_head: bool = False
    head_bias: bool = False
    relative_buckets: int = 0
    relative_distance: int = 128
    encoder: "TransformerConfig | None" = None
    decoder_start: tuple[int, ...] = ()
    mel_bins: int = 0

    def __post_init__(self) -> None:
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is None and name in ("sliding_window", "global_every", "unrotated_every"):
                continue
            if type(value) is not int or not 1 <= value <= most:
                raise CheckpointError(
                    f"model config: {name} is {value!r}; expected an int >= 1 and <= {most}."
                )
        for name in _SCALES:
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and value > 0):
                raise CheckpointError(f"model config: {name} is {value!r}; expected a number > 0.")
        for name in ("norm_eps", "rope_fraction", "alibi_scale"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0:
                raise CheckpointError(f"model config: {name} is {value!r}; expected a number >= 0.")
        for name in ("global_every", "local_rope_theta"):
            value = getattr(self, name)
            if value is not None and self.sliding_window is None:
                raise CheckpointError(
                    f"model config: {name} is {value!r}, but without a sliding_window no layer is "
                    "local; give both or neither."
                )
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"model config: {self.num_kv_heads} KV heads do not divide {self.num_heads} "
                "query heads."
            )
        if self.experts is not None and (self.mlp_bias or not self.gated_mlp):
            raise CheckpointError(
                "model config: experts are gated and have no biases, but mlp_bias is "
                f"{self.mlp_bias} and gated_mlp {self.gated_mlp}."
            )
        if self.rotary_size % 2:
            raise CheckpointError(
                f"model config: {self.rotary_size} rotated dimensions per head; expected an "
                "even number."
            )
        if self.rope_scaling is not None:
            for name, value in vars(self.rope_scaling).items():
                single = not isinstance(value, bool | tuple)
                if single and not (_is_number(value) and value > 0):
                    raise CheckpointError(
                        f"model config: rope_scaling.{name} is {value!r}; expected a number > 0."
                    )
        if isinstance(self.rope_scaling, LongRopeScaling):
            for name in ("short", "long"):
                divisors = getattr(self.rope_scaling, name)
                if 2 * len(divisors) != self.rotary_size or not all(each > 0 for each in divisors):
                    raise CheckpointError(
                        f"model config: LongRoPE's {name} factors are {divisors!r}; expected "
                        f"{self.rotary_size // 2} numbers > 0."
                    )

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each logical axis that a layout may shard; head axes count heads."""
        own = {
            "vocab": self.vocab_size,
            "embed": self.embed_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "mlp": self.mlp_size,
        }
        if self.experts is not None:
            dense = self.mlp_size if len(self.experts.dense_layers) else 0
            own |= {"mlp": math.gcd(self.experts.size, dense), "experts": self.experts.count}
        # A layout shards both stacks alike.
        others = own if self.encoder is None else self.encoder.axis_sizes
        return {axis: math.gcd(size, others.get(axis, size)) for axis, size in own.items()}

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.experts is not None and layer not in self.experts.dense_layers

    def is_local(self, layer: int) -> bool:
        """Whether a layer, counted from 0, sees only the sliding window."""
        if self.sliding_window is None:
            return False
        return self.global_every is None or (layer + 1) % self.global_every > 0

    def is_rotated(self, layer: int) -> bool:
        """Whether a layer, counted from 0, rotates its queries and keys."""
        return self.unrotated_every is None or (layer + 1) % self.unrotated_every > 0

    @property
    def rotary_size(self) -> int:
        """Dimensions of each head that are rotated."""
        return int(self.head_dim * self.rope_fraction)
