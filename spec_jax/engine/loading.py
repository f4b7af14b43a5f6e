"""From the arguments of `LLM` to its models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spec_jax import checkpoints
from spec_jax.checkpoints.packing import Packing
from spec_jax.config import LoadingOptions, SpeculativeConfig, check_integer
from spec_jax.engine.offloading import layout_to_offload, offloaded
from spec_jax.errors import ConfigError
from spec_jax.kernels import native
from spec_jax.models.config import TransformerConfig
from spec_jax.sharding import Layout, Placement


@dataclasses.dataclass
class Loader:
    """Loads target and draft as the arguments of `LLM` say."""

    layout: Layout | None
    options: LoadingOptions
    on_progress: Callable[[str], None] | None
    _draft: tuple[tuple[str, str], checkpoints.Checkpoint] | None = None

    def target(self, reference: str) -> checkpoints.Checkpoint:
        """Loads the target."""
        offload = self.options.offload, self.options.resident_layers

        def place(config: TransformerConfig) -> Placement:
            return offloaded(self._place("target", config), config, *offload)

        return self._load(reference, self.options.quantization, place)

    def draft(
        self,
        config: SpeculativeConfig,
        reference: str,
        target: checkpoints.Checkpoint,
        max_model_len: int,
    ) -> checkpoints.Checkpoint:
        """The draft for a target, which was loaded from `reference`; the last one is kept."""
        assert config.draft is not None  # SpeculativeConfig has checked it
        option = self.options.quantization
        quantization = config.draft_quantization or option
        if config.draft == reference and quantization in (option, target.quantization):
            return target

        def place(config: TransformerConfig) -> Placement:
            return self._place("draft", config)

        key = config.draft, quantization
        if self._draft is None or self._draft[0] != key:
            draft = self._load(*key, place, target)
            model = draft.model.with_max_length(max_model_len)
            self._draft = key, dataclasses.replace(draft, model=model)
        return self._draft[1]

    def _place(self, role: str, config: TransformerConfig) -> Placement:
        if self.layout is None:
            return Placement.single_device()
        return self.layout.place(role, config.axis_sizes)

    def _load(
        self,
        reference: str,
        quantization: str,
        place: Callable[[TransformerConfig], Placement],
        target: checkpoints.Checkpoint | None = None,
    ) -> checkpoints.Checkpoint:
        on_cpu = self.layout is None and jax.default_backend() == "cpu"
        is_native = on_cpu and native.available(self.on_progress)
        if self.options.activations == "int8" and not is_native:
            here = native.description() if on_cpu else "for one CPU device alone"
            raise ConfigError(
                f"activations is 'int8', which needs native code, and that is {here}; use float32."
            )
        checkpoint = checkpoints.load(
            reference,
            dtype=self.options.dtype,
            packing=Packing(quantization, is_native, self.options.activations),
            place=place,
            target=target,
            on_progress=self.on_progress,
        )
        model = dataclasses.replace(
            checkpoint.model, rounds_cache=self.options.kv_cache_dtype == "int8"
        )
        return dataclasses.replace(checkpoint, model=model)


def layout_of(layout: Any, tensor_parallel_size: int | None, offload: str) -> Layout | None:
    """The layout that arguments of `LLM` ask for; None is JAX's first device.

    Raises:
      ConfigError: two arguments contradict each other, or a layout file is wrong.
    """
    if tensor_parallel_size is not None:
        check_integer("tensor_parallel_size", tensor_parallel_size, 1)
    if tensor_parallel_size not in (None, 1):
        if layout is not None:
            raise ConfigError(
                f"tensor_parallel_size is {tensor_parallel_size} and layout is {layout}; give "
                "one of the two."
            )
        layout = Layout.tensor_parallel(tensor_parallel_size)
    if layout is not None and not isinstance(layout, Layout):
        layout = Layout.read(layout)
    return layout_to_offload(layout) if offload == "host" else layout


def context_of(checkpoint: checkpoints.Checkpoint, max_model_len: int | None) -> int:
    """Tokens of the longest prompt and completion together.

    Raises:
      ConfigError: `max_model_len` is more than the model was made for.
    """
    config = checkpoint.model.config
    context = config.max_position
    if max_model_len is not None and max_model_len > context and not config.relative_buckets:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {checkpoint.name} was made for a context "
            f"of {context} tokens; give at most {context}."
        )
    return max_model_len or context
