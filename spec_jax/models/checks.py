"""Checks of the numbers in a model's config, which may come from a damaged file."""

import math

from spec_jax.errors import CheckpointError

MAX_SIZES = {
    "vocab_size": 2**24,
    "embed_size": 2**18,
    "num_layers": 2**11,
    "num_heads": 2**12,
    "num_kv_heads": 2**12,
    "head_dim": 2**14,
    "mlp_size": 2**21,
    "max_position": 2**30,
    "sliding_window": 2**30,
    "global_every": 2**11,
    "unrotated_every": 2**11,
}
"""Far more than any model has: sizes that a damaged file declares must not be allocated."""


def is_number(value: object) -> bool:
    """Whether it is a finite int or float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_size(name: str, value: object, maximum: int | None = None) -> None:
    """Raises CheckpointError unless it is from 1 to `maximum`, or to the one in `MAX_SIZES`."""
    maximum = MAX_SIZES[name] if maximum is None else maximum
    if type(value) is not int or not 1 <= value <= maximum:
        raise CheckpointError(
            f"model config: {name} is {value!r}; expected an int >= 1 and <= {maximum}."
        )


def check_positive(name: str, value: object) -> None:
    """Raises CheckpointError unless it is a number > 0."""
    if not (is_number(value) and value > 0):  # type: ignore[operator]
        raise CheckpointError(f"model config: {name} is {value!r}; expected a number > 0.")
