"""Layout files: one TOML file a topology, in the folder `sharding/`."""

import dataclasses
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from spec_jax.errors import ConfigError, did_you_mean


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a cost model needs to know of a device.

    Attributes:
      name: the maker's name for it.
      memory: bytes of device memory.
      bandwidth: bytes per second between memory and compute.
      flops: bfloat16 floating-point operations per second.
      link: bytes per second and direction to the neighbouring device.
      topology: the name of the whole topology for ahead-of-time compilation, or None.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    topology: str | None = None


@dataclasses.dataclass(frozen=True)
class Rule:
    """Where one logical axis goes.

    Attributes:
      axes: the mesh axes it is sharded over, the outermost first.
      replicate: whether a size that they do not divide is replicated; otherwise it is refused.
    """

    axes: tuple[str, ...]
    replicate: bool = False


ROLES = ("target", "draft")

_KEYS = ("platform", "processes", "mesh", "chip", *ROLES)
_CHIP = {
    "name": "name",
    "memory_gib": "memory",
    "memory_gb_per_s": "bandwidth",
    "bf16_tflops": "flops",
    "link_gb_per_s": "link",
    "topology": "topology",
}
_UNITS = {"memory": 2**30, "bandwidth": 1e9, "flops": 1e12, "link": 1e9}


def read_fields(file: Path) -> dict[str, Any]:
    """The fields of the `Layout` that a file holds.

    Raises:
      ConfigError: it does not exist, is no TOML, or a key is unknown, missing or malformed.
    """
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not a TOML file: {error}.") from None
    except OSError as error:
        raise ConfigError(
            f"the layout {file} cannot be read: {error.strerror}; layouts are .toml files such "
            "as sharding/cpu-8.toml."
        ) from None
    _known(file, "", values, _KEYS)
    platform = values.get("platform")
    if platform not in ("cpu", "gpu", "tpu"):
        raise ConfigError(f"{file}: platform is {platform!r}; write cpu, gpu or tpu.")
    mesh = _table(file, "mesh", values.get("mesh"))
    if not mesh:
        raise ConfigError(f"{file}: [mesh] names no axis; write one, such as model = 8.")
    sizes = {name: _count(file, f"mesh.{name}", size) for name, size in mesh.items()}
    return {
        "name": file.stem,
        "mesh": tuple(sizes.items()),
        "platform": platform,
        "processes": _count(file, "processes", values.get("processes", 1)),
        "chip": _chip(file, _table(file, "chip", values["chip"])) if "chip" in values else None,
        "target": _rules(file, "target", values.get("target", {})),
        "draft": _rules(file, "draft", values.get("draft", {})),
    }


def _rules(file: Path, role: str, value: Any) -> tuple[tuple[str, Rule], ...]:
    rules = []
    for logical, entry in _table(file, role, value).items():
        where, policy = f"{role}.{logical}", "error"
        if isinstance(entry, dict):
            _known(file, f"{where}.", entry, ("axes", "on_indivisible"))
            entry, policy = entry.get("axes"), entry.get("on_indivisible", policy)
        axes = [entry] if isinstance(entry, str) else entry
        if not isinstance(axes, list) or not axes or not all(isinstance(a, str) for a in axes):
            raise ConfigError(
                f"{file}: {where} is {entry!r}; write a mesh axis, or a list of them."
            )
        if policy not in ("error", "replicate"):
            raise ConfigError(
                f"{file}: {where}.on_indivisible is {policy!r}; write error or replicate."
            )
        rules.append((logical, Rule(tuple(axes), replicate=policy == "replicate")))
    return tuple(rules)


def _chip(file: Path, values: Mapping[str, Any]) -> Chip:
    _known(file, "chip.", values, _CHIP)
    found: dict[str, Any] = {}
    for key, field in _CHIP.items():
        value = values.get(key)
        if field in _UNITS:
            number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            if not number:
                raise ConfigError(f"{file}: chip.{key} is {value!r}; write a number above 0.")
            value = float(value * _UNITS[field])
        elif not isinstance(value, str) and (value is not None or field == "name"):
            raise ConfigError(f"{file}: chip.{key} is {value!r}; write a text.")
        found[field] = value
    return Chip(**found)


def _table(file: Path, key: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{file}: {key} is {value!r}; write a table [{key}].")
    return value


def _count(file: Path, key: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{file}: {key} is {value!r}; write a whole number of at least 1.")
    return value


def _known(file: Path, table: str, values: Iterable[str], known: Iterable[str]) -> None:
    for key in values:
        if key not in known:
            raise ConfigError(f"{file}: unknown key {table + key!r}.{did_you_mean(key, known)}")
