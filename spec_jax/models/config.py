"""The shape of a model, as orthogonal choices: a family is a translation table into this."""

import dataclasses
import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

from spec_jax.errors import CheckpointError
from spec_jax.models.checks import MAX_SIZES, check_positive, check_size, is_number
from spec_jax.models.rotary import LongRopeScaling, RopeScaling, RotaryConfig, YarnScaling

_SCALES = (
    *("query_pre_attn_scalar", "embedding_scale", "residual_scale", "logit_scale"),
    *("score_cap", "logit_cap"),
)


@dataclass(frozen=True)
class Experts:
    """Sparse MLPs: each token runs through a few of many experts (arXiv 1701.06538, 2401.04088).

    Attributes:
      count: experts of a layer.
      per_token: how many of them a token chooses, the most probable ones.
      size: hidden width of an expert.
      normed: the weights of a token's experts are divided by their sum; otherwise they are its
        probabilities among all experts.
    """

    count: int
    per_token: int
    size: int
    normed: bool = True

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "size"):
            value = getattr(self, name)
            check_size(f"experts.{name}", value, MAX_SIZES["mlp_size"])
        if self.per_token > self.count:
            raise CheckpointError(
                f"model config: a token chooses {self.per_token} of {self.count} experts; it can "
                "choose no more than there are."
            )


@dataclass(frozen=True)
class LayerConfig:
    """One layer of the stack: the choices in which layers of one model differ.

    Attributes:
      kind: the mixer, a name of `mixers.MIXERS`. A kind with options has a subclass.
      window: how many latest positions a token sees, itself included; None for all.
      rotary: how queries and keys are rotated; None if they are not.
      mlp: one dense MLP, or the sparse ones of `TransformerConfig.experts`.
    """

    kind: str = "attention"
    window: int | None = None
    rotary: RotaryConfig | None = RotaryConfig()
    mlp: Literal["dense", "experts"] = "dense"


def layer_stack(
    num_layers: int,
    *,
    rope_theta: float = 10000.0,
    rope_fraction: float = 1.0,
    rope_factor: float = 1.0,
    rope_scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None,
    sliding_window: int | None = None,
    global_every: int | None = None,
    local_rope_theta: float | None = None,
    unrotated_every: int | None = None,
    is_sparse: bool = False,
    dense_layers: tuple[int, ...] = (),
) -> tuple[LayerConfig, ...]:
    """The layers of a model that a configuration file describes by rules of repetition.

    Args:
      num_layers: layers.
      rope_theta: as in `RotaryConfig`, of all layers, or of the global ones.
      rope_fraction: `fraction` of the same layers; 0 if no layer rotates.
      rope_factor: `factor` of the same layers.
      rope_scaling: `scaling` of the same layers.
      sliding_window: positions that local layers see; None if all layers are global.
      global_every: with a window, every n-th layer is global; None if all are local.
      local_rope_theta: with a window, the rotary base of the local layers, whose positions are then
        not scaled; None if they rotate as the global layers do.
      unrotated_every: every n-th layer does not rotate; None if all do.
      is_sparse: MLPs are sparse.
      dense_layers: with `is_sparse`, the layers, counted from 0, whose MLP is dense.
    """
    check_size("num_layers", num_layers)
    for name, value in (
        ("sliding_window", sliding_window),
        ("global_every", global_every),
        ("unrotated_every", unrotated_every),
    ):
        if value is not None:
            check_size(name, value)
    for name, value in (("global_every", global_every), ("local_rope_theta", local_rope_theta)):
        if value is not None and sliding_window is None:
            raise CheckpointError(
                f"model config: {name} is {value!r}, but without a sliding_window no layer is "
                "local; give both or neither."
            )
    if not is_number(rope_fraction) or rope_fraction < 0:
        raise CheckpointError(
            f"model config: rope_fraction is {rope_fraction!r}; expected a number >= 0."
        )
    wide = local = None
    if rope_fraction:
        wide = local = RotaryConfig(rope_theta, rope_fraction, rope_factor, rope_scaling)
        if local_rope_theta is not None:
            check_positive("local_rope_theta", local_rope_theta)
            local = RotaryConfig(local_rope_theta, rope_fraction)

    def is_nth(layer: int, every: int | None) -> bool:
        return every is not None and (layer + 1) % every == 0

    def layer(number: int) -> LayerConfig:
        is_local = sliding_window is not None and not is_nth(number, global_every)
        rotary = None if is_nth(number, unrotated_every) else local if is_local else wide
        return LayerConfig(
            window=sliding_window if is_local else None,
            rotary=rotary,
            mlp="experts" if is_sparse and number not in dense_layers else "dense",
        )

    kinds: dict[LayerConfig, LayerConfig] = {}
    layers = (layer(number) for number in range(num_layers))
    return tuple(kinds.setdefault(each, each) for each in layers)


LAYER_OPTIONS = tuple(inspect.signature(layer_stack).parameters)
"""Arguments of `TransformerConfig.of` that `layer_stack` takes."""


@dataclass(frozen=True)
class TransformerConfig:
    """Everything that decides a decoder's computation; static under jit.

    Attributes:
      vocab_size: rows of the embedding table, padding rows included.
      embed_size: width of the residual stream.
      layers: each layer of the stack; `of` makes them from rules.
      num_heads: query heads.
      num_kv_heads: key and value heads; divides `num_heads` (GQA).
      head_dim: width of one head.
      mlp_size: hidden width of the MLP.
      max_position: longest context the weights were trained for, or the model is used with.
      norm: root-mean-square norm, or layer norm with a bias.
      norm_eps: the norm's epsilon.
      pre_norms: attention and MLP read normed inputs; OLMo 2 norms only their outputs.
      activation: of the MLP.
      gated_mlp: `down(act(gate(x)) * up(x))` rather than `down(act(up(x)))`.
      learned_positions: a table of positions is added to the embedding.
      qkv_bias: biases on query, key and value projections.
      key_bias: with them, the key projection has one too; Whisper's has none.
      output_bias: bias on the attention's output projection.
      mlp_bias: biases in the MLP.
      experts: the sparse MLPs, which are gated and without biases, of the layers that have them.
      qk_norm: an RMS norm over each query and key `head`, or over the whole `projection`, before
        the rotation.
      query_pre_attn_scalar: scores are divided by its square root; `head_dim` by default.
      score_cap: scores become `cap * tanh(score / cap)` before the softmax; None leaves them.
      alibi_scale: heads lower scores by the distance times their slopes (ALiBi) times this; 0 for
        no ALiBi.
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
        in all layers; 0 for none.
      relative_distance: with buckets, the distance from which on all share the last one.
      encoder: the shape of the encoder whose output every layer also attends to; None for a model
        of one text.
      decoder_start: with an encoder, the tokens that a generation starts from.
      mel_bins: features of a frame, if the encoder reads frames through two convolutions (Whisper);
        0 if it reads tokens through the embedding.
    """

    vocab_size: int
    embed_size: int
    layers: tuple[LayerConfig, ...]
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
        sizes = ("vocab_size", "embed_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "mlp_size", "max_position"):
            check_size(name, getattr(self, name))
        for name in _SCALES:
            if (value := getattr(self, name)) is not None:
                check_positive(name, value)
        for name in ("norm_eps", "alibi_scale"):
            value = getattr(self, name)
            if not is_number(value) or value < 0:
                raise CheckpointError(f"model config: {name} is {value!r}; expected a number >= 0.")
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
        for layer in self.kinds:
            if layer.rotary is not None:
                layer.rotary.check(self.head_dim)
            if layer.mlp == "experts" and self.experts is None:
                raise CheckpointError("model config: a layer has experts, but the model has none.")

    def __hash__(self) -> int:
        # Of a few fields: programs are looked up by it at every call.
        sizes = self.vocab_size, self.embed_size, self.num_heads, self.head_dim, self.mlp_size
        return hash((*sizes, len(self.layers)))

    @classmethod
    def of(cls, **options: Any) -> "TransformerConfig":
        """A config whose layers are given by the rules of `layer_stack`.

        Args:
          **options: the fields except `layers`, and the arguments of `layer_stack`.
        """
        rules = {name: options.pop(name) for name in LAYER_OPTIONS if name in options}
        is_sparse = options.get("experts") is not None
        return cls(**options, layers=layer_stack(**rules, is_sparse=is_sparse))

    def resized(self, num_layers: int) -> "TransformerConfig":
        """The same model with another number of layers, which repeat in the same order."""
        copies = -(-num_layers // self.num_layers)
        return dataclasses.replace(self, layers=(self.layers * copies)[:num_layers])

    @property
    def num_layers(self) -> int:
        """Layers of the stack."""
        return len(self.layers)

    @property
    def kinds(self) -> tuple[LayerConfig, ...]:
        """The different layers, in the order of their first."""
        return tuple(dict.fromkeys(self.layers))

    @property
    def sliding_window(self) -> int | None:
        """The window of local layers; None if all layers see the whole context."""
        return next((layer.window for layer in self.kinds if layer.window), None)

    @property
    def rotary(self) -> RotaryConfig | None:
        """How the layers rotate, or the global layers where local ones differ."""
        rotated = sorted((each for each in self.kinds if each.rotary), key=lambda x: bool(x.window))
        return rotated[0].rotary if rotated else None

    @property
    def rotated(self) -> RotaryConfig:
        """`rotary` of a model whose layers rotate, as files with rotary positions name it."""
        return self.rotary or RotaryConfig()

    @property
    def has_dense_mlp(self) -> bool:
        """Whether any layer has a dense MLP."""
        return any(layer.mlp == "dense" for layer in self.kinds)

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Size of each logical axis that a layout may shard; head axes count heads."""
        sizes = {
            "vocab": self.vocab_size,
            "embed": self.embed_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "mlp": self.mlp_size,
        }
        if self.experts is not None:
            dense = self.mlp_size if self.has_dense_mlp else 0
            sizes |= {"mlp": math.gcd(self.experts.size, dense), "experts": self.experts.count}
        # A layout shards both stacks alike.
        others = sizes if self.encoder is None else self.encoder.axis_sizes
        return {axis: math.gcd(size, others.get(axis, size)) for axis, size in sizes.items()}
