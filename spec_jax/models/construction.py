"""The weights of a model: their shapes, where they lie on devices, and models made of them."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from spec_jax.kernels import PackedWeight, take_outputs
from spec_jax.models.blocks import Block
from spec_jax.models.compiling import CompilerOptions, compiler_options
from spec_jax.models.config import LayerConfig, TransformerConfig
from spec_jax.models.rotary import LongRopeScaling
from spec_jax.models.streaming import resident
from spec_jax.models.transformer import Transformer
from spec_jax.pytree import pytree, static
from spec_jax.sharding import HOST_MEMORY, Placement

_STREAMED = re.compile(r"blocks\.(\d+)\.(?!cross\.(?:key|value)\.)")
"""Weights that every call reads; cross-attention computes keys and values once a prompt."""


@pytree
class ModelWeights:
    """The weights of a model, real or abstract, and everything that is made of them.

    Attributes:
      graphdef: structure of the NNX module; static under jit.
      params: its arrays.
      config: its shape; static under jit.
      placement: how it lies on devices; static under jit.
    """

    graphdef: Any = static()
    params: Any
    config: TransformerConfig = static()
    placement: Placement = static(default=Placement.single_device())

    @classmethod
    def abstract(
        cls,
        config: TransformerConfig,
        *,
        dtype: DTypeLike,
        placement: Placement = Placement.single_device(),
    ) -> Self:
        """A model's shapes and shardings: its params are `jax.ShapeDtypeStruct`.

        One block of each kind is traced and repeated, since tracing takes time that grows with the
        square of the layers: seconds for eighty.
        """
        one = dataclasses.replace(
            config.resized(1), encoder=config.encoder and config.encoder.resized(1)
        )
        module = nnx.eval_shape(lambda: Transformer(one, dtype=dtype, rngs=nnx.Rngs(0)))
        for part, shape in ((module, config), (module.encoder, config.encoder)):
            if part is not None and shape is not None:
                part.blocks, part.config = nnx.List(_abstract_blocks(shape, dtype)), shape
        graphdef, params = nnx.split(module)
        return cls(graphdef=graphdef, params=params, config=config).abstractly_placed(placement)

    def abstractly_placed(self, placement: Placement) -> Self:
        """An abstract model with the shardings of a placement."""

        def placed(name: str, leaf: nnx.Variable) -> jax.ShapeDtypeStruct:
            sharding = param_sharding(placement, name, leaf)
            return jax.ShapeDtypeStruct(
                leaf.get_value().shape, leaf.get_value().dtype, sharding=sharding
            )

        return dataclasses.replace(self, params=_each(self.params, placed), placement=placement)

    @classmethod
    def random(
        cls,
        config: TransformerConfig,
        *,
        seed: int = 0,
        dtype: DTypeLike = jnp.float32,
        placement: Placement = Placement.single_device(),
    ) -> Self:
        """A model with random weights, made on the devices that hold them."""

        def weights() -> Any:
            return nnx.state(Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed)))

        shape = cls.abstract(config, dtype=dtype, placement=placement)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shape.params)
        params = shape.jit(weights, out_shardings=shardings)() if placement.mesh else weights()
        return dataclasses.replace(shape, params=params)

    def place(self, placement: Placement) -> Self:
        """The same weights, moved to the devices of the placement."""
        params = _each(
            self.params,
            lambda name, leaf: jax.device_put(
                leaf.get_value(), param_sharding(placement, name, leaf)
            ),
        )
        return dataclasses.replace(self, params=params, placement=placement)

    def replicated(self, table: np.ndarray) -> jax.Array:
        """A table replicated over the model's devices, so that no call has to send it."""
        return self.placement.put(table, *(None,) * table.ndim)

    @property
    def weights(self) -> dict[str, Any]:
        """Its arrays by name, such as `blocks.0.mlp.up.weight`."""
        leaves = nnx.to_flat_state(self.params)
        return {_name(path): leaf.get_value() for path, leaf in leaves}

    def with_weights(self, weights: Mapping[str, Any]) -> Self:
        """The same model with the named arrays replaced."""
        params = _each(self.params, lambda name, leaf: weights.get(name, leaf.get_value()))
        return dataclasses.replace(self, params=params)

    def with_resident(self, layers: int) -> Self:
        """The same model, with the weights of its first blocks in device memory as well."""
        if self.placement.streamed_from is None:
            return self
        blocks = tuple(f"blocks.{i}." for i in range(layers))
        weights = {name: each for name, each in self.weights.items() if name.startswith(blocks)}
        return self.with_weights(self.jit(resident)(weights))

    def with_max_length(self, context: int) -> Self:
        """The same model for contexts of up to `context` tokens, which LongRoPE depends on."""
        if not isinstance(self.config.rotated.scaling, LongRopeScaling):
            return self
        context = min(context, self.config.max_position)
        config = dataclasses.replace(self.config, max_position=context)
        shape = type(self).abstract(config, dtype=self.dtype, placement=self.placement)
        return dataclasses.replace(self, graphdef=shape.graphdef, config=config)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of its plain weights, such as norms."""
        return self.weights["final_norm.weight"].dtype

    @property
    def is_packed(self) -> bool:
        """Whether native code multiplies its weights."""
        return isinstance(self.weights["embed.weight"], PackedWeight)

    def unpacked(self) -> Self:
        """The same model with plain arrays of its dtype as weights."""
        return self.with_weights(
            {
                name: weight.dequantize().astype(self.dtype)
                for name, weight in self.weights.items()
                if not isinstance(weight, jax.Array)
            }
        )

    @property
    def platform(self) -> str:
        """The platform of its devices: `cpu`, `gpu` or `tpu`."""
        return self.placement.platform

    @property
    def compiler_options(self) -> CompilerOptions:
        """The compiler options of every program that runs the model."""
        # Native products leave float32 to XLA.
        return compiler_options(self.platform, jnp.float32 if self.is_packed else self.dtype)

    def jit(self, function: Callable, **options: Any) -> Any:
        """`jax.jit` of a function for the model's devices, with `compiler_options`.

        Args:
          function: the function; if it reads weights, the model is one of its arguments.
          **options: the options of `jax.jit`.
        """
        return jax.jit(function, compiler_options=self.compiler_options, **options)

    def with_outputs(self, ids: Sequence[int]) -> Self:
        """The same model with a smaller head: its output j is the logit of token `ids[j]`.

        A layout must be able to shard the outputs as it shards the vocabulary.
        """
        config = dataclasses.replace(self.config, tied_head=False)
        name = "embed" if self.config.tied_head else "head"
        table = self.weights[f"{name}.weight"]
        head = take_outputs(table, np.array(ids, np.int32))
        if isinstance(head, jax.Array):
            head = jax.device_put(head, self.placement.sharding("embed", "vocab"))
        shape = type(self).abstract(config, dtype=self.dtype, placement=self.placement)
        return shape.with_weights({**self.weights, "head.weight": head})


def _abstract_blocks(config: TransformerConfig, dtype: DTypeLike) -> list[Block]:
    def block(layer: LayerConfig) -> Block:
        return Block(config, layer, dtype=dtype, rngs=nnx.Rngs(0))

    shapes = {layer: nnx.eval_shape(functools.partial(block, layer)) for layer in config.kinds}
    return [nnx.clone(shapes[layer]) for layer in config.layers]


def param_sharding(placement: Placement, name: str, param: nnx.Variable) -> NamedSharding | None:
    """The sharding of a weight; one without logical axes (a norm's) is replicated."""
    axes = param.get_metadata().get("axes", ())
    sharding = placement.sharding(*axes)
    first, streamed = placement.streamed_from, _STREAMED.match(name)
    # A vector is not worth a copy in every call.
    if first is None or streamed is None or int(streamed[1]) < first or len(axes) < 2:
        return sharding
    return sharding and sharding.with_memory_kind(HOST_MEMORY)


def _each(params: Any, function: Callable[[str, nnx.Variable], Any]) -> Any:
    """The same variables with other values: a function of their names and themselves."""
    leaves = nnx.to_flat_state(params)
    return nnx.from_flat_state(
        [(path, leaf.replace(function(_name(path), leaf))) for path, leaf in leaves]
    )


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
