"""From the arguments of `LLM` to its models."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spec_jax import checkpoints
from spec_jax.checkpoints.packing import Packing
from spec_jax.config import (
    COPIES,
    DraftModelConfig,
    LoadingOptions,
    SpeculativeConfig,
    check_integer,
)
from spec_jax.engine.draft_models import check_vocabulary, with_frequent_outputs
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
    _opened: tuple[tuple[str, str], checkpoints.OpenCheckpoint] | None = None
    _draft: tuple[tuple[str, str, int | None], checkpoints.Checkpoint] | None = None

    def target(
        self, reference: str, max_model_len: int | None, speculation: SpeculativeConfig
    ) -> tuple[checkpoints.Checkpoint, int]:
        """Loads the target; also returns the tokens of its longest prompt and completion together.

        Weights are read after everything that the other files of target and draft decide.

        Raises:
          ConfigError: `max_model_len` is more than the model was made for.
          VocabularyMismatchError: see `_open_draft`.
        """
        offload = self.options.offload, self.options.resident_layers

        def place(config: TransformerConfig) -> Placement:
            return offloaded(self._place("target", config), config, *offload)

        opened = self._open(reference, self.options.quantization, place, is_draft=False)
        speculation = self._completed(speculation, reference, opened)
        context = _context_of(opened, max_model_len)
        self._open_draft(speculation, reference, opened)
        return self._load(opened), context

    def _load(
        self, opened: checkpoints.OpenCheckpoint, target: checkpoints.Checkpoint | None = None
    ) -> checkpoints.Checkpoint:
        """Loads the weights of the target, or of the draft of a target."""
        checkpoint = opened.load(target)
        rounds = self.options.kv_cache_dtype == "int8"
        model = dataclasses.replace(checkpoint.model, rounds_cache=rounds)
        return dataclasses.replace(checkpoint, model=model)

    def _open_draft(
        self,
        config: SpeculativeConfig,
        reference: str,
        target: checkpoints.Checkpoint | checkpoints.OpenCheckpoint,
    ) -> checkpoints.OpenCheckpoint | None:
        """Reads everything but the weights of the draft for a target, which is at `reference`.

        Returns None without a draft model, or if the target drafts for itself.

        Raises:
          VocabularyMismatchError: the method needs the target's vocabulary, and it has another.
        """
        key = self._draft_key(config, reference, target)
        if key is None:
            return None

        def place(config: TransformerConfig) -> Placement:
            return self._place("draft", config)

        if self._opened is None or self._opened[0] != key:
            self._opened = key, self._open(*key, place, is_draft=True)
        opened = self._opened[1]
        if config.method == "draft_model":
            check_vocabulary(target, opened)
        return opened

    def draft(
        self,
        config: SpeculativeConfig,
        reference: str,
        target: checkpoints.Checkpoint,
        max_model_len: int,
    ) -> checkpoints.Checkpoint:
        """The draft for a target, which was loaded from `reference`; the last one is kept."""
        config = self._completed(config, reference, target)
        key = self._draft_key(config, reference, target)
        if key is None:
            return with_frequent_outputs(target, config)
        size = config.draft_vocab_size if isinstance(config, DraftModelConfig) else None
        if self._draft is None or self._draft[0] != (*key, size):
            opened = self._open_draft(config, reference, target)
            assert opened  # there is a key
            draft = self._load(opened, target)
            self._opened = None  # it holds files
            model = draft.model.with_max_length(max_model_len)
            # The outputs that are left out take no memory.
            draft = with_frequent_outputs(dataclasses.replace(draft, model=model), config)
            self._draft = (*key, size), draft
        return self._draft[1]

    def _completed(
        self,
        config: SpeculativeConfig,
        reference: str,
        target: checkpoints.Checkpoint | checkpoints.OpenCheckpoint,
    ) -> SpeculativeConfig:
        """The config with the draft's place and form, where it leaves them to target or recipe.

        Raises:
          ConfigError: a copy of the target is to draft that takes no less memory than the target.
        """
        if config.draft in COPIES:
            form = COPIES[config.draft]
            if target.quantization not in ("none", "int8") or target.quantization == form:
                raise ConfigError(
                    f"draft is {config.draft!r}, but {target.name} itself is kept in "
                    f"{target.quantization}, and such a copy would hardly be faster; use another "
                    "draft, or a target in more bits (quantization)."
                )
            return dataclasses.replace(config, draft=reference, draft_quantization=form)
        if config.draft is None or config.draft == reference or not self._is_native:
            return config
        form = checkpoints.draft_form(config.draft)
        values = {"draft_quantization": form.quantization, "draft_vocab_size": form.vocab_size}
        changes = {
            name: value
            for name, value in values.items()
            if value is not None and getattr(config, name, value) is None
        }
        return dataclasses.replace(config, **changes)

    @property
    def _is_native(self) -> bool:
        """Whether native code multiplies the weights."""
        return self._is_on_one_cpu and native.available(self.on_progress)

    @property
    def _is_on_one_cpu(self) -> bool:
        return self.layout is None and jax.default_backend() == "cpu"

    def _draft_key(
        self,
        config: SpeculativeConfig,
        reference: str,
        target: checkpoints.Checkpoint | checkpoints.OpenCheckpoint,
    ) -> tuple[str, str] | None:
        """The draft and its quantization; None if there is none, or it is the target."""
        option = self.options.quantization
        quantization = config.draft_quantization or option
        is_target = config.draft == reference and quantization in (option, target.quantization)
        return None if config.draft is None or is_target else (config.draft, quantization)

    def _place(self, role: str, config: TransformerConfig) -> Placement:
        if self.layout is None:
            return Placement.single_device()
        return self.layout.place(role, config.axis_sizes)

    def _open(
        self,
        reference: str,
        quantization: str,
        place: Callable[[TransformerConfig], Placement],
        *,
        is_draft: bool,
    ) -> checkpoints.OpenCheckpoint:
        if self.options.activations == "int8" and not self._is_native:
            here = native.description() if self._is_on_one_cpu else "for one CPU device alone"
            raise ConfigError(
                f"activations is 'int8', which needs native code, and that is {here}; use float32."
            )
        return checkpoints.open_checkpoint(
            reference,
            dtype=self.options.dtype,
            packing=Packing(quantization, self._is_native, self.options.activations),
            place=place,
            is_draft=is_draft,
            on_progress=self.on_progress,
        )


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


def _context_of(target: checkpoints.OpenCheckpoint, max_model_len: int | None) -> int:
    """Tokens of the longest prompt and completion together.

    Raises:
      ConfigError: `max_model_len` is more than the model was made for.
    """
    context = target.config.max_position
    is_bounded = not target.config.relative_buckets
    if max_model_len is not None and max_model_len > context and is_bounded:
        raise ConfigError(
            f"max_model_len is {max_model_len}, but {target.name} was made for a context "
            f"of {context} tokens; give at most {context}."
        )
    return max_model_len or context
