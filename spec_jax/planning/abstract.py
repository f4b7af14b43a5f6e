"""Caches and states that are shapes and shardings, without a byte of data."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from spec_jax.checkpoints.packing import is_quantized
from spec_jax.checkpoints.shape import Shape
from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.base import Drafter
from spec_jax.engine.batch_shape import BatchShape, prompt_block
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.errors import ConfigError
from spec_jax.kernels import INT4, INT8, QuantizedForm, QuantizedWeight
from spec_jax.models.cache import KVCache, StateSize
from spec_jax.models.config import TransformerConfig
from spec_jax.models.mixers import new_cache
from spec_jax.models.model import Model
from spec_jax.sharding import HOST_MEMORY, Layout, Placement

GREEDY = SamplingParams()
_ROUNDED = {"int8": INT8, "int4": INT4}


def stand_ins(layout: Layout) -> Sequence[Any]:
    """Abstract devices for the layout's shardings; nothing can run on them."""
    return jax.devices("cpu")[:1] * layout.size


def abstract_model(
    config: TransformerConfig,
    dtype: DTypeLike,
    quantization: str,
    placement: Placement,
    forms: Mapping[str, QuantizedForm] | None = None,
) -> Model:
    """A model's shapes and shardings; `gguf` keeps matrices in their `forms`, if there are any."""
    model = _unplaced(config, jnp.dtype(dtype)).abstractly_placed(placement)
    weights = model.weights
    if quantization in _ROUNDED:
        names = [name for name, weight in weights.items() if is_quantized(name, weight.shape)]
        forms = dict.fromkeys(names, _ROUNDED[quantization])
    elif quantization == "none" or forms is None:
        return model
    quantized = {
        name: QuantizedWeight.abstract(weights[name], form) for name, form in forms.items()
    }
    return model.with_weights(quantized)


def check_forms(quantization: str, target: Shape) -> None:
    """Refuses the quantization of a file that is not a .gguf file; a draft may be another.

    Raises:
      ConfigError: the target is not.
    """
    if quantization == "gguf" and target.forms is None:
        raise ConfigError(
            f"quantization is 'gguf', but {target.name} is not a .gguf file; use int8 or int4, "
            "which round its weights."
        )


@functools.lru_cache(maxsize=4)
def _unplaced(config: TransformerConfig, dtype: jnp.dtype) -> Model:
    """A model's shapes; a search asks for the same ones on many layouts."""
    return Model.abstract(config, dtype=dtype)


def parameters_per_chip(params: Any) -> int:
    """The weights that a chip holds of a model, or of a part of it."""

    def count(part: Any) -> int:
        if not isinstance(part, QuantizedWeight):
            return _per_chip(part)
        # Bytes hold two weights of 4 bits each.
        return _per_chip(part.values) * (2 if part.values.dtype == jnp.uint8 else 1)

    leaves = jax.tree.leaves(params, is_leaf=lambda part: isinstance(part, QuantizedWeight))
    return sum(map(count, leaves))


def abstract_cache(
    model: Model, batch: int, capacity: int, dtype: DTypeLike, headroom: int | None = None
) -> KVCache:
    """The abstract cache of a model, with its shardings; arguments like `StateSize`."""
    cache = jax.eval_shape(
        lambda: new_cache(model.config, StateSize(batch, capacity, dtype, headroom))
    )
    return placed(model, cache)


def plan_shape(
    target: Model, drafter: Drafter, batch: int, context: int, platform: str
) -> BatchShape:
    """The static shapes that an engine would choose for rows that may fill the context."""
    policy = Constant(drafter.lookahead)
    engine = Engine(target, drafter, policy, max_model_len=context)
    request = Request(
        prompt_token_ids=range(context),
        sampling=SamplingParams(),
        key=np.zeros((2,), np.uint32),
        stop_token_ids=(),
        max_length=context,
    )
    shape = engine.plan([request] * batch)
    # Stand-ins are CPU devices, whatever they stand for.
    rows = shape.batch // target.placement.num_shards("batch")
    block = prompt_block(platform, context, rows, target.config.embed_size)
    return dataclasses.replace(shape, block=block)


def abstract_tokens(model: Model, batch: int, tokens: int) -> jax.ShapeDtypeStruct:
    """The tokens of one call."""
    return placed(model, jax.ShapeDtypeStruct((batch, tokens), jnp.int32))


def placed(model: Model, tree: Any) -> Any:
    """A batch's arrays with shardings: KV caches, the only arrays with four axes, or rows."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        entries = ("batch", "kv_heads", "length", None)
        axes = entries if leaf.ndim == 4 else ("batch", *(None,) * (leaf.ndim - 1))
        return leaf.update(sharding=model.placement.sharding(*axes))

    return jax.tree.map(place, tree)


def bytes_per_chip(tree: Any) -> int:
    """Bytes of a tree's arrays on one device; replicated arrays count on each device."""
    return sum(_per_chip(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def host_bytes_per_chip(tree: Any) -> int:
    """Bytes of the arrays in host memory on one device."""
    leaves = jax.tree.leaves(tree)
    return bytes_per_chip([leaf for leaf in leaves if leaf.sharding.memory_kind == HOST_MEMORY])


def _per_chip(leaf: Any) -> int:
    """The elements of an array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape))
