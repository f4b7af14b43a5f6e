"""The definition of a model family, and helpers of its translation functions."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from spec_jax.errors import CheckpointError
from spec_jax.kernels import Quantized
from spec_jax.models.config import TransformerConfig

Config = Mapping[str, Any]
"""A checkpoint's description of its shape: config.json, or the metadata of a GGUF file."""

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]

HF_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of activations -> ours."""

Slices = tuple[slice, ...]
"""A part of an array, by its leading dimensions; the full array if there are none."""

Stored = Literal["float32", "float16", "bfloat16", "quantized"]
"""How a checkpoint stores most of its numbers."""


@runtime_checkable
class TensorStore(Protocol):
    """The tensors of a checkpoint, by name, read in parts."""

    @property
    def path(self) -> Path:
        """The file or directory they lie in."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor; matrices are [out, in]."""
        ...

    @property
    def stored(self) -> Stored:
        """How the largest tensor is stored."""
        ...

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """A tensor, or a part of it, as a floating-point array."""
        ...

    def read_quantized(self, name: str) -> Quantized | None:
        """A matrix as it is stored, if that is quantized; None otherwise."""
        ...


@dataclass(frozen=True)
class Part:
    """Where a checkpoint stores a weight that is more than a tensor under another name.

    Attributes:
      name: the module in the checkpoint, with `{}` for the layer's number, and a second one for the
        number of an expert.
      rows: which rows of the stored tensor (its output features) are the weight, in our order; by
        default all.
      total: rows of the stored tensor, if it has more than the weight.
      turned: matrices are stored [in, out].
      minus_one: the weight minus one is stored.
      taps: matrices are stored as convolutions over this many steps, [out, in, taps]; ours have the
        inputs of one channel side by side.
      each: a stack is stored as one tensor for each expert.
      bare: the tensor has the module's name, without `.weight`.
    """

    name: str
    rows: Callable[[TransformerConfig], np.ndarray] | None = None
    total: Callable[[TransformerConfig], int] | None = None
    turned: bool = False
    minus_one: bool = False
    taps: int = 1
    each: bool = False
    bare: bool = False

    @property
    def rearranges(self) -> bool:
        """Whether the stored tensor differs from the weight in more than its name."""
        return replace(self, each=False, bare=False) != Part(self.name)

    def stored_shape(self, shape: tuple[int, ...], config: TransformerConfig) -> tuple[int, ...]:
        """The shape of the stored tensor, if ours has this one with outputs first."""
        if len(shape) == 3:
            return shape[0], *self.stored_shape(shape[1:], config)
        outputs = self.total(config) if self.total else shape[0]
        if self.taps > 1 and len(shape) == 2:
            return outputs, shape[1] // self.taps, self.taps
        return (*shape[:0:-1], outputs) if self.turned else (outputs, *shape[1:])

    def take(self, stored: np.ndarray, config: TransformerConfig) -> np.ndarray:
        """Our weight, outputs first, of the stored tensor."""
        if stored.ndim == 3 and self.taps == 1 and self.rearranges:
            return np.stack([self.take(each, config) for each in stored])
        ours = stored.T if self.turned else stored
        if stored.ndim == 3 and self.taps > 1:
            ours = stored.reshape(len(stored), -1)
        if self.rows is not None:
            ours = ours[self.rows(config)]
        return ours.astype(np.float32) + 1 if self.minus_one else ours

    def give(
        self, ours: np.ndarray, config: TransformerConfig, stored: np.ndarray | None
    ) -> np.ndarray:
        """The stored tensor with our weight in its place; None makes the tensor."""
        if self.minus_one:
            ours = ours.astype(np.float32) - 1
        if self.rows is None:
            return ours.T if self.turned else ours.reshape(self.stored_shape(ours.shape, config))
        if stored is None:
            stored = np.zeros(self.stored_shape(ours.shape, config), ours.dtype)
        (stored.T if self.turned else stored)[self.rows(config)] = ours
        return stored


def fused(
    name: str,
    sizes: Callable[[TransformerConfig], Sequence[int]],
    which: int,
    *,
    turned: bool = False,
    bare: bool = False,
) -> Part:
    """One of several weights that are stored as one, one after another.

    Args:
      name: see `Part`.
      sizes: output features of each.
      which: the weight's place among them.
      turned: see `Part`.
      bare: see `Part`.
    """

    def rows(config: TransformerConfig) -> np.ndarray:
        ends = np.cumsum(sizes(config))
        return np.arange(ends[which] - sizes(config)[which], ends[which])

    return Part(name, rows, lambda config: sum(sizes(config)), turned, bare=bare)


def in_qkv(part: Callable[[int], Part]) -> "WeightTable":
    """Where query (0), key (1) and value (2) lie in one tensor."""
    names = ("query", "key", "value")
    return {f"blocks.{{}}.attention.{name}": part(which) for which, name in enumerate(names)}


def grouped(name: str) -> Callable[[int], Part]:
    """Query (0), key (1) or value (2), where each key/value head follows its query heads."""

    def total(config: TransformerConfig) -> int:
        return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim

    def part(which: int) -> Part:
        def rows(config: TransformerConfig) -> np.ndarray:
            heads = np.arange(total(config)).reshape(config.num_kv_heads, -1, config.head_dim)
            return np.split(heads, [-2, -1], axis=1)[which].ravel()

        return Part(name, rows, total)

    return part


def attention_names(ours: str, theirs: str, names: Sequence[str]) -> "WeightTable":
    """The checkpoint's names of query, key, value and output."""
    parts = zip(("query", "key", "value", "output"), names, strict=True)
    return {f"{ours}.{part}": f"{theirs}.{name}" for part, name in parts}


def qkv_sizes(config: TransformerConfig) -> tuple[int, int, int]:
    """Output features of query, key and value."""
    width = config.num_kv_heads * config.head_dim
    return config.num_heads * config.head_dim, width, width


def halves(num_heads: int, head_dim: int, rotary_size: int) -> np.ndarray:
    """The rows of a projection in our order, if the stored heads rotate neighbouring features.

    In our heads, features that are rotated together are half a rotation apart.
    """
    rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)
    pairs = rows[:, :rotary_size].reshape(num_heads, -1, 2).swapaxes(1, 2)
    return np.concatenate([pairs.reshape(num_heads, -1), rows[:, rotary_size:]], axis=1).ravel()


WeightTable = Mapping[str, str | Part]
"""Our modules -> the checkpoint's modules, `{}` standing for the layer's number.

A module's `weight` and `bias` are called so on both sides. Matrices lie [out, in] in
checkpoints and [in, out] here; the loader transposes them.
"""


def stored_as(table: WeightTable, name: str) -> tuple[Part, str]:
    """Where a checkpoint stores one of our weights, and the name of its tensor there."""
    module, _, leaf = name.rpartition(".")
    layer = next((part for part in module.split(".") if part.isdigit()), "")
    entry = table[re.sub(r"\.\d+\.", ".{}.", module)]
    part = entry if isinstance(entry, Part) else Part(entry)
    # The number of an expert stays open.
    return part, part.name.format(layer, "{}") + ("" if part.bare else f".{leaf}")


@dataclass(frozen=True)
class Family:
    """One model architecture: its config's translation and where its weights lie.

    Attributes:
      model_type: `model_type` in config.json.
      hf_class: its class in transformers, `architectures` in config.json.
      config_from_hf: translates config.json.
      fields_to_hf: its inverse, for shapes of this family.
      hf_weights: modules in safetensors files, or a function that lists them for a shape.
      gguf_architecture: `general.architecture` in GGUF files, if this family reads them.
      gguf_as: the family whose architecture GGUF files of these models name, if another one.
      config_from_gguf: translates GGUF metadata; tensors complete them.
      gguf_weights: modules in GGUF files, or a function that lists them for a shape.
      fused_experts: modules in safetensors files that store all experts of a layer in one tensor,
        if such files exist.
      buffers: endings of tensors that hold no weights and are skipped.
      prefix: the beginning of all names, which some checkpoints leave out.
    """

    model_type: str
    hf_class: str
    config_from_hf: Callable[[Config], TransformerConfig]
    fields_to_hf: Callable[[TransformerConfig], dict[str, Any]]
    hf_weights: WeightTable | Callable[[TransformerConfig], WeightTable]
    gguf_architecture: str | None = None
    gguf_as: str | None = None
    config_from_gguf: Callable[[Config, TensorStore], TransformerConfig] | None = None
    gguf_weights: WeightTable | Callable[[TransformerConfig], WeightTable] | None = None
    fused_experts: WeightTable | None = None
    buffers: tuple[str, ...] = ("rotary_emb.inv_freq", "rope_freqs.weight")
    prefix: str = ""

    def config_to_hf(self, config: TransformerConfig) -> dict[str, Any]:
        """The config.json of a model of this shape, the inverse of `config_from_hf`."""
        names = {"architectures": [self.hf_class], "model_type": self.model_type}
        return {**self.fields_to_hf(config), **names}

    def gguf_weights_of(self, config: TransformerConfig) -> WeightTable:
        """`gguf_weights` of a shape."""
        assert self.gguf_weights is not None  # it reads GGUF files
        return _table_of(self.gguf_weights, config)

    def hf_weights_of(
        self, config: TransformerConfig, tensors: TensorStore | None = None
    ) -> WeightTable:
        """`hf_weights` of a shape, as the names of these tensors have them."""
        table = _table_of(self.hf_weights, config)
        names = [] if tensors is None else tensors.shapes
        if self.fused_experts and any(name.endswith(".experts.gate_up_proj") for name in names):
            table = {**table, **self.fused_experts}
        if not names or not self.prefix or any(name.startswith(self.prefix) for name in names):
            return table

        def shorter(entry: str | Part) -> str | Part:
            if isinstance(entry, Part):
                return replace(entry, name=entry.name.removeprefix(self.prefix))
            return entry.removeprefix(self.prefix)

        return {ours: shorter(entry) for ours, entry in table.items()}


def _table_of(
    table: WeightTable | Callable[[TransformerConfig], WeightTable], config: TransformerConfig
) -> WeightTable:
    return table if isinstance(table, Mapping) else table(config)


def get(config: Config, name: str, default: Any = None) -> Any:
    """A value of a checkpoint's config; null counts as absent, and no default as required."""
    value = config.get(name)
    if value is None:
        if default is None:
            raise CheckpointError(f"the checkpoint's config has no {name!r}, which is required.")
        return default
    # A list has one value per layer.
    if isinstance(value, list | tuple) and not isinstance(default, list | tuple):
        raise CheckpointError(
            f"the checkpoint's config has {name} = {value!r}, one value per layer; every layer "
            "must have the same."
        )
    return value


def number(config: Config, name: str, default: float | None = None) -> float:
    """A number of a checkpoint's config."""
    value = get(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CheckpointError(f"the checkpoint's config has {name} = {value!r}; expected a number.")
    return float(value)


def integer(config: Config, name: str, default: int | None = None) -> int:
    """A size of a checkpoint's config."""
    value = get(config, name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise CheckpointError(
            f"the checkpoint's config has {name} = {value!r}; expected an integer >= 1."
        )
    return value


def require(config: Config, name: str, supported: Any, default: Any) -> None:
    """Refuses a config whose `name` is neither absent nor the one supported value."""
    value = config.get(name, default)
    if value is not None and value != supported:
        raise CheckpointError(
            f"the checkpoint's config has {name} = {value!r}; spec-jax supports {supported!r} only."
        )


def hf_activation(config: Config, default: str, key: str = "hidden_act") -> Activation:
    """The MLP's activation under our name."""
    name = get(config, key, default)
    if name not in HF_ACTIVATIONS:
        raise CheckpointError(
            f"the checkpoint's config has {key} = {name!r}; supported: {', '.join(HF_ACTIVATIONS)}."
        )
    return HF_ACTIVATIONS[name]


def activation_to_hf(config: TransformerConfig) -> str:
    """The MLP's activation under Hugging Face's name."""
    return {"gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, config.activation)


def window(config: Config, name: str, max_position: int) -> int | None:
    """The sliding window that a config names, or None if it is no shorter than the context."""
    size = integer(config, name) if config.get(name) else max_position
    return size if size < max_position else None


_TYPES: dict[str, Any] = {field.name: field.type for field in fields(TransformerConfig)}


def read_fields(config: Config, names: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """Arguments of `TransformerConfig.of` that config.json stores as they are.

    Args:
      config: config.json.
      names: fields -> their keys in config.json.
      **defaults: values of fields whose key is absent or null; without one the key is required. As
        many key/value heads as query heads, which share the width, need no key, and flags are off.
    """
    values: dict[str, Any] = {}
    for field in dict.fromkeys((*names, "num_kv_heads", "head_dim")):
        default = defaults.get(field)
        if field == "num_kv_heads":
            default = default or values["num_heads"]
        elif field == "head_dim":
            default = default or values["embed_size"] // values["num_heads"]
        key = names.get(field)
        if key is None:
            values[field] = default
        elif field == "activation":
            values[field] = hf_activation(config, defaults[field], key)
        elif _TYPES.get(field) is bool:
            values[field] = bool(get(config, key, bool(default)))
        else:
            values[field] = (number if _TYPES.get(field) is float else integer)(
                config, key, default
            )
    return values


def write_fields(config: TransformerConfig, names: Mapping[str, str]) -> dict[str, Any]:
    """The keys of config.json that `read_fields` reads."""
    return {
        key: activation_to_hf(config) if field == "activation" else getattr(config, field)
        for field, key in names.items()
    }
