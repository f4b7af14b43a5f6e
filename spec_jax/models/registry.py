"""Every model family spec-jax knows: one row each."""

import contextlib
from collections.abc import Callable

from spec_jax.errors import CheckpointError
from spec_jax.models import (
    bloom,
    codegen,
    falcon,
    gemma,
    gemma2,
    gemma3,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    opt,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
    stablelm,
    starcoder2,
    t5,
    whisper,
)
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Family

_MODULES = (
    *(bloom, codegen, falcon, gemma, gemma2, gemma3, gpt2, gpt_bigcode, gpt_neox, granite, llama),
    *(mistral, mixtral, olmo2, opt, phi3, qwen2, qwen3, qwen3_moe, smollm3, stablelm, starcoder2),
    *(t5, whisper),
)
FAMILIES: tuple[Family, ...] = tuple(module.FAMILY for module in _MODULES)


def family_of_hf(model_type: str | None) -> Family:
    """The family whose config.json has this `model_type`.

    Raises:
      CheckpointError: there is none; the message lists all.
    """
    if model_type == "gemma3":
        raise CheckpointError(
            "model_type is 'gemma3', a model of text and images; spec-jax reads the text-only "
            "'gemma3_text' (270M and 1B), and of larger ones a .gguf file, which holds the text "
            "model alone."
        )
    return _find(model_type, "model_type", lambda family: family.model_type)


def family_of_shape(config: TransformerConfig) -> Family:
    """A family that models of this shape can be written as.

    Raises:
      CheckpointError: there is none.
    """
    for family in FAMILIES:
        with contextlib.suppress(CheckpointError):
            if family.config_from_hf(family.config_to_hf(config)) == config:
                return family
    names = ", ".join(family.model_type for family in FAMILIES)
    raise CheckpointError(
        f"spec-jax can write models of the families {names} only; {config} fits none of them."
    )


def family_of_gguf(architecture: str | None) -> Family:
    """The family whose GGUF files have this `general.architecture`.

    Raises:
      CheckpointError: there is none; the message lists all.
    """
    return _find(architecture, "general.architecture", lambda family: family.gguf_architecture)


def _find(value: str | None, key: str, of: Callable[[Family], str | None]) -> Family:
    families = {name: family for family in FAMILIES if (name := of(family)) is not None}
    if value not in families:
        names = ", ".join(sorted(families))
        raise CheckpointError(f"unknown architecture: {key} is {value!r}; spec-jax knows {names}.")
    return families[value]
