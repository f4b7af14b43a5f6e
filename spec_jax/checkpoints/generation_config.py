"""How a checkpoint asks to be sampled: its generation_config.json."""

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
    """What a model's directory says of sampling, under transformers' names; unchecked."""
    file = path / GENERATION
    said = read_json(file) if file.is_file() else {}
    return {name: said[name] for name in (*_NAMES, "do_sample") if said.get(name) is not None}


def default_sampling_params(name: str, settings: Mapping[str, Any]) -> SamplingParams:
    """The parameters of requests that come without any, as vLLM takes them.

    Args:
      name: of the model, for messages.
      settings: as `sampling_settings` found them.

    Raises:
      CheckpointError: a setting has a value that it cannot have.
    """
    given = {ours: settings[theirs] for theirs, ours in _NAMES.items() if theirs in settings}
    if settings.get("do_sample") is True:
        given.setdefault("temperature", 1.0)  # transformers' default, and vLLM's
    try:
        return SamplingParams(**given)
    except ConfigError as error:
        raise CheckpointError(
            f"{GENERATION} of {name} asks for sampling that is not possible: {error} Correct it, "
            "or use generation_config='none'."
        ) from None
