"""A model as the loop sees it: static structure, arrays, and the calls that decoding makes."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from spec_jax.kernels import PackedWeight, take_outputs
from spec_jax.models.attention import AttentionMask
from spec_jax.models.blocks import Block
from spec_jax.models.cache import CrossAttentionCache, KVCache, StateSize
from spec_jax.models.compiling import CompilerOptions, compiler_options
from spec_jax.models.config import LayerConfig, LongRopeScaling, TransformerConfig
from spec_jax.models.mixers import new_cache
from spec_jax.models.output import TargetOutput
from spec_jax.models.source import EncoderInput
from spec_jax.models.streaming import resident
from spec_jax.models.transformer import Transformer
from spec_jax.pytree import pytree, static
from spec_jax.sharding import HOST_MEMORY, Placement

_STREAMED = re.compile(r"blocks\.(\d+)\.(?!cross\.(?:key|value)\.)")
"""Weights that every call reads; an encoder's output is made keys and values of once."""


@pytree
class Model:
    """A model as the loop sees it: a static graph definition and a pytree of arrays.

    Attributes:
      graphdef: structure of the NNX module; static under jit.
      params: its arrays.
      config: its shape; static under jit.
      placement: how it lies on devices; static under jit.
      attention: how attention is computed, a name of `attention.BACKENDS`; the fastest by default.
        Training asks for `dense`, since only that has a gradient.
      rounds_cache: whether keys and values are kept in 8 bits.
    """

    graphdef: Any = static()
    params: Any
    config: TransformerConfig = static()
    placement: Placement = static(default=Placement.single_device())
    attention: str | None = static(default=None)
    rounds_cache: bool = static(default=False)

    @classmethod
    def abstract(
        cls,
        config: TransformerConfig,
        *,
        dtype: DTypeLike,
        placement: Placement = Placement.single_device(),
    ) -> "Model":
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

    def abstractly_placed(self, placement: Placement) -> "Model":
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
    ) -> "Model":
        """A model with random weights, made on the devices that hold them."""

        def weights() -> Any:
            return nnx.state(Transformer(config, dtype=dtype, rngs=nnx.Rngs(seed)))

        shape = cls.abstract(config, dtype=dtype, placement=placement)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, shape.params)
        params = shape.jit(weights, out_shardings=shardings)() if placement.mesh else weights()
        return dataclasses.replace(shape, params=params)

    def place(self, placement: Placement) -> "Model":
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

    def with_weights(self, weights: Mapping[str, Any]) -> "Model":
        """The same model with the named arrays replaced."""
        params = _each(self.params, lambda name, leaf: weights.get(name, leaf.get_value()))
        return dataclasses.replace(self, params=params)

    def with_resident(self, layers: int) -> "Model":
        """The same model, with the weights of its first blocks in device memory as well."""
        if self.placement.streamed_from is None:
            return self
        blocks = tuple(f"blocks.{i}." for i in range(layers))
        wanted = {name: each for name, each in self.weights.items() if name.startswith(blocks)}
        return self.with_weights(self.jit(resident)(wanted))

    def with_max_length(self, context: int) -> "Model":
        """The same model for contexts of at most so many tokens, which LongRoPE depends on."""
        if not isinstance(self.config.rotated.scaling, LongRopeScaling):
            return self
        context = min(context, self.config.max_position)
        config = dataclasses.replace(self.config, max_position=context)
        shape = Model.abstract(config, dtype=self.dtype, placement=self.placement)
        return dataclasses.replace(self, graphdef=shape.graphdef, config=config)

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of its plain weights; a norm's always is."""
        return self.weights["final_norm.weight"].dtype

    @property
    def is_packed(self) -> bool:
        """Whether native code multiplies its weights."""
        return isinstance(self.weights["embed.weight"], PackedWeight)

    def unpacked(self) -> "Model":
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
        """What it runs on: `cpu`, `gpu` or `tpu`."""
        return self.placement.platform

    @property
    def compiler_options(self) -> CompilerOptions:
        """The compiler options of every program that runs the model."""
        # Native products leave float32 to XLA.
        return compiler_options(self.platform, jnp.float32 if self.is_packed else self.dtype)

    def jit(self, function: Callable, **options: Any) -> Any:
        """`jax.jit` of a function for the model's devices, with `compiler_options`.

        Args:
          function: what to compile; the model itself is an argument of it, if it reads weights.
          **options: as of `jax.jit`.
        """
        return jax.jit(function, compiler_options=self.compiler_options, **options)

    def new_cache(self, batch: int, capacity: int, headroom: int | None = None) -> KVCache:
        """An empty cache of the model's shape and dtype; arguments as for `StateSize`."""
        dtype = jnp.int8 if self.rounds_cache else self._wide_dtype
        return new_cache(self.config, StateSize(batch, capacity, dtype, headroom, self.placement))

    def encode(
        self, source: EncoderInput, *, shared: bool = False
    ) -> tuple[CrossAttentionCache, EncoderInput]:
        """What the decoder's layers see of a source, for a cache's `encoded`.

        Args:
          source: what the encoder reads.
          shared: take the output of the target's encoder, which the source holds, for its own.

        Returns:
          It, and the source with the encoder's output.
        """
        module, hidden = self.module, source.hidden if shared else None
        lengths = jnp.asarray(source.lengths)
        if hidden is None:
            hidden = module.encode(
                jnp.asarray(source.values), lengths, backend=self._backend, placement=self.placement
            )
        found = module.cross_attention_kv(hidden, lengths, placement=self.placement)
        layers = jax.tree.map(lambda each: each.astype(self._wide_dtype), found.layers)
        encoded = dataclasses.replace(found, layers=layers)
        return encoded, dataclasses.replace(source, hidden=hidden)

    def prefill(
        self,
        tokens: Int[Array, "batch tokens"],
        cache: KVCache,
        num_tokens: Int[Array, " batch"] | None = None,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Writes the tokens' keys and values, without logits: what a prompt needs.

        Arguments as for `score`.
        """
        module = self.module
        _, features, cache = self._run(
            module,
            module.embed_tokens(tokens),
            cache,
            num_tokens=num_tokens,
            feature_layers=tuple(feature_layers),
        )
        return TargetOutput(None, features, cache)

    @property
    def _wide_dtype(self) -> DTypeLike:
        """Of arrays that the loop updates."""
        # XLA:CPU updates a bfloat16 array through a float32 copy of the whole array.
        return jnp.float32 if self.platform == "cpu" else self.dtype

    def new_states(self, batch: int, capacity: int) -> Float[Array, "batch capacity embed"]:
        """A buffer for the hidden states of the last layer at each token."""
        states = jnp.zeros((batch, capacity, self.config.embed_size), self._wide_dtype)
        return self.placement.pin(states, "batch", "length", "embed")

    def score(
        self,
        tokens: Int[Array, "batch tokens"],
        cache: KVCache,
        mask: AttentionMask | None = None,
        at: Sequence[int] | None = None,
        num_tokens: Int[Array, " batch"] | None = None,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Float32 logits after the new tokens, and the cache with them.

        Args:
          tokens: token ids.
          cache: keys and values of everything before the tokens.
          mask: the tokens' positions and what they see; by default they continue the texts.
          at: the tokens whose logits and features are wanted (static); all by default.
          num_tokens: how many tokens of each row are real, without a `mask`; padding after them
            is not written. All by default.
          feature_layers: which features to return, see `TargetOutput` (static).
        """
        module = self.module
        x, features, cache = self._run(
            module,
            module.embed_tokens(tokens),
            cache,
            mask,
            num_tokens,
            feature_layers=tuple(feature_layers),
        )
        if at is not None:
            x = x[:, np.array(at)]
            features = None if features is None else features[:, np.array(at)]
        return TargetOutput(self.logits(x), features, cache)

    def with_outputs(self, ids: Sequence[int]) -> "Model":
        """The same model with a smaller head: its output j is the logit of token `ids[j]`.

        A layout must be able to shard the outputs as it shards the vocabulary.
        """
        config = dataclasses.replace(self.config, tied_head=False)
        name = "embed" if self.config.tied_head else "head"
        whole = self.weights[f"{name}.weight"]
        kept = take_outputs(whole, jnp.asarray(np.array(ids, np.int32)))
        if isinstance(kept, jax.Array):
            kept = jax.device_put(kept, self.placement.sharding("embed", "vocab"))
        shape = Model.abstract(config, dtype=self.dtype, placement=self.placement)
        return shape.with_weights({**self.weights, "head.weight": kept})

    def run_first_layers(
        self, tokens: Int[Array, "batch tokens"], cache: KVCache, layers: int
    ) -> tuple[Float[Array, "batch tokens embed"], KVCache]:
        """Runs new tokens through the first `layers` (static) blocks, and writes their caches."""
        module = self.module
        x, _, cache = self._run(module, module.embed_tokens(tokens), cache, last=layers)
        return x, cache

    def logits(self, x: Float[Array, "batch tokens embed"]) -> Float[Array, "batch tokens vocab"]:
        """Float32 logits of the hidden states of any layer, through the model's own head."""
        module = self.module
        padded = self._not_alone(x)
        logits = module.logits(module.final_norm(padded))
        return self.placement.pin(logits, "batch", None, "vocab")[:, : x.shape[1]]

    def run_remaining_layers(
        self,
        x: Float[Array, "batch tokens embed"],
        cache: KVCache,
        layers: int,
        feature_layers: Sequence[int] = (),
    ) -> TargetOutput:
        """Logits of tokens that `run_first_layers` has read; writes the caches of the other layers.

        `cache.lengths` are the tokens' positions, unchanged since `run_first_layers`.
        """
        x, features, cache = self._run(
            self.module, x, cache, first=layers, feature_layers=tuple(feature_layers)
        )
        return TargetOutput(self.logits(x), features, cache)

    @property
    def _backend(self) -> str | None:
        return self.attention or ("native" if self.is_packed else None)

    @property
    def module(self) -> Transformer:
        return nnx.merge(self.graphdef, self.params)

    def _run(
        self,
        module: Transformer,
        x: Array,
        cache: KVCache,
        mask: AttentionMask | None = None,
        num_tokens: Array | None = None,
        **layers: Any,
    ) -> tuple[Array, Array | None, KVCache]:
        count = x.shape[1]
        if mask is None:
            x = self._not_alone(x)
            if num_tokens is None and x.shape[1] > count:
                num_tokens = jnp.full((x.shape[0],), count, jnp.int32)
            mask = AttentionMask.following(cache, x.shape[1], num_tokens)
        out, features, cache = module.run(
            x, cache, mask, backend=self._backend, placement=self.placement, **layers
        )
        return out[:, :count], None if features is None else features[:, :count], cache

    def _not_alone(self, x: Array) -> Array:
        """A single bfloat16 row beside a throw-away token.

        XLA:CPU has no one-row bfloat16 product, and widens every weight to float32 for it. XLA:GPU
        multiplies two rows with tensor cores in two thirds of the time that it takes for one
        (benchmarks/LOG.md); but of sparse experts a second token may choose others.
        """
        alone = x.shape[0] * x.shape[1] == self.placement.num_shards("batch")
        alone = alone and self.dtype == jnp.bfloat16
        slow = self.platform == "gpu" and self.config.experts is None
        if alone and (slow or (self.platform == "cpu" and not self.is_packed)):
            return jnp.pad(x, ((0, 0), (0, 1), (0, 0)))
        return x


def _abstract_blocks(config: TransformerConfig, dtype: DTypeLike) -> list[Block]:
    def made(layer: LayerConfig) -> Block:
        return Block(config, layer, dtype=dtype, rngs=nnx.Rngs(0))

    shapes = {layer: nnx.eval_shape(functools.partial(made, layer)) for layer in config.kinds}
    return [nnx.clone(shapes[layer]) for layer in config.layers]


def param_sharding(placement: Placement, name: str, param: nnx.Variable) -> NamedSharding | None:
    """The sharding of a weight; one without logical axes (a norm's) is replicated."""
    axes = param.get_metadata().get("axes", ())
    sharding = placement.sharding(*axes)
    first, streamed = placement.streamed_from, _STREAMED.match(name)
    # A vector is not worth a copy of its own in every call.
    if first is None or streamed is None or int(streamed[1]) < first or len(axes) < 2:
        return sharding
    return sharding and sharding.with_memory_kind(HOST_MEMORY)


def _each(params: Any, function: Callable[[str, nnx.Variable], Any]) -> Any:
    """The same variables with other values, of their names and themselves."""
    leaves = nnx.to_flat_state(params)
    return nnx.from_flat_state(
        [(path, leaf.replace(function(_name(path), leaf))) for path, leaf in leaves]
    )


def _name(path: tuple) -> str:
    return ".".join(map(str, path))
