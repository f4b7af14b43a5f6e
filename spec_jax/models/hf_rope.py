"""Rotary positions as Hugging Face's config.json has them, both ways."""

import math
from collections.abc import Collection, Mapping
from typing import Any

from spec_jax.errors import CheckpointError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Config, get, integer, number
from spec_jax.models.hf_keys import refuse_others
from spec_jax.models.rotary import LongRopeScaling, RopeScaling, YarnScaling


def rope_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Rotary settings as `hf_rope` reads them."""
    rotary = config.rotated
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": rotary.theta}
    scaling = rotary.scaling
    if isinstance(scaling, YarnScaling):
        rope |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_position,
            "beta_fast": scaling.fast,
            "beta_slow": scaling.slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.amplitude,
        }
    elif isinstance(scaling, LongRopeScaling):
        rope |= {
            "rope_type": "longrope",
            "short_factor": list(scaling.short),
            "long_factor": list(scaling.long),
            "original_max_position_embeddings": scaling.original_max_position,
            "attention_factor": scaling.amplitude,
        }
    elif scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        }
    elif rotary.factor != 1.0:
        rope |= {"rope_type": "linear", "factor": rotary.factor}
    return {"rope_theta": rotary.theta, "rope_parameters": rope}


ORIGINAL = "original_max_position_embeddings"
"""Hugging Face's name of the context before it was extended."""

HF_ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""Hugging Face's names of the ways to scale rotary positions that are read.

`dynamic` changes the frequencies at every length past `max_position_embeddings`, and none before.
Keys in a cache are rotated once, so contexts end there.
"""

_KEYS = frozenset(
    {
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", ORIGINAL),
        *("low_freq_factor", "high_freq_factor", "short_factor", "long_factor"),
        *("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
        "finetuned",  # changes no number
    }
)


def check_rope_keys(settings: Config, names: Collection[str] = _KEYS) -> None:
    """Refuses settings that might change numbers, as `check_keys` does; null or false is off.

    Raises:
      CheckpointError: there are others than these names.
    """
    refuse_others(settings, names, "rotary settings that are not known")


def rope_settings(config: Config) -> Config:
    """`rope_parameters` (transformers 5), in whose place `rope_scaling` stands where it is given.

    Raises:
      CheckpointError: in that place it would change more than how positions are scaled.
    """
    settings, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling")
    if not scaling or not settings:
        return scaling or settings
    named = {**config, **scaling}
    lost = [name for name in settings if name not in ("type", "rope_type") and name not in named]
    if lost:
        raise CheckpointError(
            f"the checkpoint's config has rope_scaling = {dict(scaling)!r}, beside which "
            f"transformers would ignore {', '.join(lost)} of rope_parameters = {dict(settings)!r}. "
            "Write all settings into rope_parameters, and remove rope_scaling."
        )
    return scaling


def hf_rope(config: Config, *, theta: float = 10000.0, fraction: float = 1.0) -> dict[str, Any]:
    """Rotary settings from `rope_settings`, or from the config itself.

    Args:
      config: config.json.
      theta: the base if the config names none.
      fraction: the rotated part of each head if the config names none.

    Returns:
      `rope_theta`, `rope_fraction`, `rope_factor` and `rope_scaling` of `layer_stack`.

    Raises:
      CheckpointError: the positions are scaled in a way that is not supported.
    """
    settings = rope_settings(config)
    kind = settings.get("rope_type", settings.get("type", "default"))
    differ_by_layer = any(isinstance(value, Mapping) for value in settings.values())
    if kind not in HF_ROPES or differ_by_layer:
        raise CheckpointError(
            f"the checkpoint's config scales rotary positions by {dict(settings)!r}; supported "
            f"rope types: {', '.join(HF_ROPES)}, the same in every layer."
        )
    check_rope_keys(settings)
    rope = {**config, **settings}
    scaling: RopeScaling | YarnScaling | LongRopeScaling | None = None
    if kind == "llama3":
        scaling = RopeScaling(
            factor=number(rope, "factor"),
            low_freq_factor=number(rope, "low_freq_factor"),
            high_freq_factor=number(rope, "high_freq_factor"),
            original_max_position=int(number(rope, "original_max_position_embeddings")),
        )
    elif kind == "yarn":
        scaling = _yarn(rope)
    elif kind == "longrope":
        # Phi-3 has it beside the other settings.
        scaling = _longrope({**rope, ORIGINAL: config.get(ORIGINAL) or settings.get(ORIGINAL)})
    return {
        "rope_theta": number(rope, "rope_theta", theta),
        "rope_fraction": number(rope, "partial_rotary_factor", fraction),
        "rope_factor": number(rope, "factor") if kind == "linear" else 1.0,
        "rope_scaling": scaling,
    }


def _longrope(rope: Config) -> LongRopeScaling:
    def divisors(name: str) -> tuple[float, ...]:
        factors = rope.get(name)
        if not isinstance(factors, list):
            raise CheckpointError(
                f"the checkpoint's config has {name} = {factors!r}; expected a list of numbers."
            )
        return tuple(number({name: each}, name) for each in factors)

    context = integer(rope, "max_position_embeddings")
    original = integer(rope, ORIGINAL, context)
    factor = number(rope, "factor", context / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short=divisors("short_factor"),
        long=divisors("long_factor"),
        original_max_position=original,
        amplitude=number(rope, "attention_factor", default),
    )


def _yarn(rope: Config) -> YarnScaling:
    factor = number(rope, "factor")

    def amplitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    default = amplitude(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = amplitude(number(rope, "mscale")) / amplitude(number(rope, "mscale_all_dim"))
    context = integer(rope, "max_position_embeddings")
    return YarnScaling(
        factor=factor,
        original_max_position=integer(rope, "original_max_position_embeddings", context),
        fast=number(rope, "beta_fast", 32.0),
        slow=number(rope, "beta_slow", 1.0),
        truncate=bool(get(rope, "truncate", True)),
        amplitude=number(rope, "attention_factor", default),
    )
