"""A model that is ready to run."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spec_jax.models.model import Model
from spec_jax.text.speech import SpeechTokens
from spec_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Checkpoint:
    """A model that is ready to run.

    Attributes:
      model: the weights and their shape.
      tokenizer: text <-> token ids.
      eos_token_ids: tokens that end a generation.
      name: its name in messages.
      outputs: the target token ids that a draft can propose; None for all.
      quantization: the format of its matrices: `none`, `int8`, `int4` or `gguf`.
      speech: the special tokens of a speech model; None for others.
      sampling: the sampling settings of its files, see `default_sampling_params`.
    """

    model: Model
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    name: str
    outputs: np.ndarray | None = None
    quantization: str = "none"
    speech: SpeechTokens | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
