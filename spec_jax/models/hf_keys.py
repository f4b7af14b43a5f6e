"""The keys that config.json may have: what each family reads, and what changes no number.

Another key might change what a model computes, so a checkpoint with it is refused.
"""

import functools
import tomllib
from collections.abc import Collection
from pathlib import Path

from spec_jax.errors import CheckpointError
from spec_jax.models.family import Config


def check_keys(model_type: str, config: Config) -> None:
    """Refuses a config with keys that might change numbers; what is null or false is off.

    Raises:
      CheckpointError: it has such keys; the message names them.
    """
    harmless, read = _table()
    refuse_others(
        config, harmless | read[model_type], f"settings that are not known for {model_type}"
    )


def refuse_others(settings: Config, names: Collection[str], what: str) -> None:
    """Refuses settings that have other names, unless they are null or false.

    Raises:
      CheckpointError: there are some; the message names them, and calls them `what`.
    """
    others = {
        key: value
        for key, value in settings.items()
        if key not in names and value is not None and value is not False
    }
    if others:
        raise CheckpointError(
            f"the checkpoint's config has {what}: {str(others)[:300]}. They may change what the "
            "model computes; remove them if they do not."
        )


@functools.cache
def _table() -> tuple[frozenset[str], dict[str, frozenset[str]]]:
    """The keys without an effect, and by `model_type` those that are read."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    harmless = frozenset().union(*table["harmless"].values())
    return harmless, {family: frozenset(names) for family, names in table["read"].items()}
