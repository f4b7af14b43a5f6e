"""The sampling settings of a checkpoint: its generation_config.json."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_jax.checkpoints.files import read_json
from spec_jax.checkpoints.hf_writer import GENERATION
from spec_jax.config import SamplingParams
from spec_jax.errors import CheckpointError, ConfigError

_NAMES = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""transformers' names of the settings that vLLM takes, and ours."""


def sampling_settings(path: Path) -> dict[str, Any]:
    """The sampling settings of a model's directory, under transformers' names; unchecked."""
    file = path / GENERATION
    config = read_json(file) if file.is_file() else {}
    return {name: config[name] for name in (*_NAMES, "do_sample") if config.get(name) is not None}


def default_sampling_params(name: str, settings: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of requests that come without any, as in vLLM.

    Args:
      name: the model's, for messages.
      settings: the result of `sampling_settings`.

    Raises:
      CheckpointError: the value of a setting is not allowed.
    """
    params = {ours: settings[theirs] for theirs, ours in _NAMES.items() if theirs in settings}
    if settings.get("do_sample") is True:
        params.setdefault("temperature", 1.0)  # transformers' default, and vLLM's
    try:
        return SamplingParams(**params)
    except ConfigError as error:
        raise CheckpointError(
            f"{GENERATION} of {name} asks for sampling that is not possible: {error} Correct it, "
            "or use generation_config='none'."
        ) from None
