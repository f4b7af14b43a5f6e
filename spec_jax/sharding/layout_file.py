"""Layout files: one TOML file a topology, in the folder `sharding/`."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_jax.config import AtLeast1, Positive, Table, Text
from spec_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Chip:
    """What a cost model needs to know of a device.

    Attributes:
      name: the maker's name for it.
      memory: bytes of device memory.
      usable: bytes of it that programs may take: compilers and allocators keep some.
      bandwidth: bytes per second between memory and compute.
      flops: bfloat16 floating-point operations per second.
      link: bytes per second and direction to the neighbouring device.
      topology: the name of a slice's topology for ahead-of-time compilation, or None.
      host: bytes per second from host memory, or None if that is not known.
    """

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float
    topology: str | None = None
    host: float | None = None
    usable: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "usable", min(self.usable, self.memory))


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
AllReduceDtype = Literal["float32", "bfloat16"]
_LAYOUTS = Path(__file__).with_name("layouts")
"""The layouts that come with spec-jax: a link to the folder `sharding/`, and files in a wheel."""


def _spelt_out(value: Any) -> Any:
    """`"model"` and `["model"]` are short for `{ axes = ["model"] }`."""
    value = value if isinstance(value, dict) else {"axes": value}
    axes = value.get("axes")
    axes = [axes] if isinstance(axes, str) else axes
    if not isinstance(axes, list):
        raise PydanticCustomError("axes", "It should be a mesh axis, or a list of them")
    return {**value, "axes": tuple(axes)}


class _Rule(Table):
    axes: Annotated[tuple[Text, ...], Field(min_length=1)]
    on_indivisible: Literal["error", "replicate"] = "error"


_Rules = dict[str, Annotated[_Rule, BeforeValidator(_spelt_out)]]


class _Chip(Table):
    name: Text
    memory_gib: Positive
    memory_gb_per_s: Positive
    bf16_tflops: Positive
    link_gb_per_s: Positive
    host_gb_per_s: Positive | None = None
    topology: Text | None = None
    usable_gib: Positive | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "_Chip":
        if self.usable_gib is not None and self.usable_gib > self.memory_gib:
            raise ConfigError(
                f"chip.usable_gib is {self.usable_gib:g}, but chip.memory_gib is "
                f"{self.memory_gib:g}; give at most as much."
            )
        return self


class _File(Table):
    platform: Literal["cpu", "gpu", "tpu"]
    processes: AtLeast1 = 1
    slices: AtLeast1 = 1
    all_reduce_dtype: AllReduceDtype = "float32"
    mesh: Annotated[dict[str, AtLeast1], Field(min_length=1)]
    chip: _Chip | None = None
    target: _Rules = Field(default_factory=dict)
    draft: _Rules = Field(default_factory=dict)


def read_fields(file: Path) -> dict[str, Any]:
    """The fields of the `Layout` that a file holds, or a layout that comes with spec-jax.

    Raises:
      ConfigError: it does not exist, is not TOML, or a key is unknown, missing or malformed.
    """
    names = sorted(each.stem for each in _LAYOUTS.glob("*.toml"))
    if str(file) in names and not file.exists():
        file = _LAYOUTS / f"{file}.toml"
    try:
        content = _File.read(file, ConfigError)
    except OSError as error:
        raise ConfigError(
            f"the layout {file} cannot be read: {error.strerror}; layouts are .toml files, or one "
            f"of {', '.join(names)}."
        ) from None
    chip = content.chip
    return {
        "name": file.stem,
        "mesh": tuple(content.mesh.items()),
        "platform": content.platform,
        "processes": content.processes,
        "slices": content.slices,
        "all_reduce_dtype": content.all_reduce_dtype,
        "target": _rules(content.target),
        "draft": _rules(content.draft),
        "chip": chip
        and Chip(
            name=chip.name,
            memory=chip.memory_gib * 2**30,
            bandwidth=chip.memory_gb_per_s * 1e9,
            flops=chip.bf16_tflops * 1e12,
            link=chip.link_gb_per_s * 1e9,
            host=chip.host_gb_per_s and chip.host_gb_per_s * 1e9,
            topology=chip.topology,
            usable=(chip.usable_gib or math.inf) * 2**30,
        ),
    }


def text_of(layout: Any) -> str:
    """A layout as its file has it; `read_fields` gives the same again, but for the name."""
    head = [f'platform = "{layout.platform or "cpu"}"']
    if layout.processes > 1:
        head.append(f"processes = {layout.processes}")
    if layout.slices > 1:
        head.append(f"slices = {layout.slices}")
    if layout.all_reduce_dtype != "float32":
        head.append(f"all_reduce_dtype = {json.dumps(layout.all_reduce_dtype)}")
    parts = {"mesh": [f"{name} = {size}" for name, size in layout.mesh]}
    if chip := layout.chip:
        figures = {
            "memory_gib": chip.memory / 2**30,
            "usable_gib": chip.usable < chip.memory and chip.usable / 2**30,
            "memory_gb_per_s": chip.bandwidth / 1e9,
            "bf16_tflops": chip.flops / 1e12,
            "link_gb_per_s": chip.link / 1e9,
            "host_gb_per_s": chip.host and chip.host / 1e9,
        }
        parts["chip"] = [
            f"name = {json.dumps(chip.name)}",
            *(f"{name} = {value:.12g}" for name, value in figures.items() if value),
            *([f"topology = {json.dumps(chip.topology)}"] if chip.topology else []),
        ]
    for role in ROLES:
        parts[role] = [f"{name} = {_spelt(rule)}" for name, rule in getattr(layout, role)]
    tables = [[f"[{name}]", *lines] for name, lines in parts.items()]
    return "\n\n".join("\n".join(lines) for lines in [head, *tables]) + "\n"


def _spelt(rule: Rule) -> str:
    *outer, last = rule.axes
    axes = json.dumps([*outer, last] if outer else last)
    return f'{{ axes = {axes}, on_indivisible = "replicate" }}' if rule.replicate else axes


def _rules(rules: _Rules) -> tuple[tuple[str, Rule], ...]:
    return tuple(
        (logical, Rule(each.axes, replicate=each.on_indivisible == "replicate"))
        for logical, each in rules.items()
    )
