"""Layouts: how the logical axes of a model lie on a mesh of devices.

A layout is data, one TOML file for each topology in the folder `sharding/`, and this module is
its only reader. `sharding/README.md` is the vocabulary.
"""

import dataclasses
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import AxisType, Mesh

from spec_jax.config import check_path
from spec_jax.errors import ConfigError, did_you_mean
from spec_jax.sharding.layout_file import (
    ROLES,
    AllReduceDtype,
    Chip,
    Rule,
    read_fields,
    text_of,
)
from spec_jax.sharding.placement import Placement

AXES = ("batch", "length", "vocab", "embed", "heads", "kv_heads", "mlp", "experts")
"""What a model calls its dimensions."""

_TOGETHER = (
    ("vocab", "embed"),
    ("embed", "heads"),
    ("embed", "kv_heads"),
    ("experts", "embed", "mlp"),
    ("batch", "embed"),
    ("batch", "vocab"),
    ("batch", "heads", "length"),
    ("batch", "kv_heads", "length"),
)
"""Logical axes that meet in one array, which cannot be sharded twice over one mesh axis."""


MAX_DEVICES, MAX_EMULATED = 1 << 17, 1 << 12
"""Devices of the largest mesh, and of the largest that one machine's CPUs stand for."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """Mesh axes and, for target and draft separately, what is sharded over them.

    Attributes:
      name: what to call it in messages.
      mesh: name and size of each mesh axis, the outermost first.
      platform: `cpu`, `gpu` or `tpu`; None takes whatever JAX runs on.
      target: logical axis -> rule, for the target; axes left out are replicated.
      draft: the same for the draft model.
      processes: how many processes share the devices.
      chip: what a device is, or None if nothing is known of it.
      slices: how many TPU slices the devices make, whose networks are joined by the data center's.
        The outermost mesh axis lies across them.
      all_reduce_dtype: `float32`, or `bfloat16` for devices to round what they add after each
        product with weights in bfloat16: half the bytes are sent, and logits are less precise.
    """

    name: str
    mesh: tuple[tuple[str, int], ...]
    platform: str | None
    target: tuple[tuple[str, Rule], ...] = ()
    draft: tuple[tuple[str, Rule], ...] = ()
    processes: int = 1
    chip: Chip | None = None
    slices: int = 1
    all_reduce_dtype: AllReduceDtype = "float32"

    def __post_init__(self) -> None:
        names = [name for name, _ in self.mesh]
        for role in ROLES:
            rules = dict(getattr(self, role))
            for logical, rule in rules.items():
                where = f"layout {self.name}: {role}.{logical}"
                if logical not in AXES:
                    raise ConfigError(
                        f"{where} is not a logical axis.{did_you_mean(logical, AXES)}"
                    )
                for axis in rule.axes:
                    if axis not in names:
                        raise ConfigError(
                            f"{where} names the mesh axis {axis!r}.{did_you_mean(axis, names)}"
                        )
            apart = {*rules} - ({"length"} if _shares_axes(rules) else set())
            for group in _TOGETHER:
                _refuse_repeats(self.name, role, [name for name in group if name in apart], rules)
        most = MAX_EMULATED if self.platform == "cpu" else MAX_DEVICES
        if not 0 < self.size <= most:
            raise ConfigError(
                f"layout {self.name}: its mesh has {self.size:,} devices; expected 1 to {most:,}."
            )
        if self.size % self.processes:
            raise ConfigError(
                f"layout {self.name}: {self.size} devices cannot be shared evenly by "
                f"{self.processes} processes."
            )
        if self.all_reduce_dtype not in get_args(AllReduceDtype):
            raise ConfigError(
                f"layout {self.name}: all_reduce_dtype is {self.all_reduce_dtype!r}; choose one of "
                f"{', '.join(get_args(AllReduceDtype))}."
            )
        if self.slices > 1:
            self._check_slices()

    @property
    def size(self) -> int:
        """Devices in all."""
        return math.prod(size for _, size in self.mesh)

    @classmethod
    def tensor_parallel(cls, num_shards: int, *, draft: bool = True) -> "Layout":
        """Megatron-style tensor parallelism over `num_shards` devices of this machine.

        Heads, MLP and vocabulary are sharded (Shoeybi et al. 2019, arXiv 1909.08053); sizes that
        `num_shards` does not divide are replicated.

        Args:
          num_shards: the number of devices.
          draft: whether the draft is sharded too; otherwise every device holds all of it.
        """
        names = ("heads", "kv_heads", "mlp", "vocab")
        rules = tuple((name, Rule(("model",), replicate=True)) for name in names)
        return cls(
            name=f"tensor_parallel({num_shards})",
            mesh=(("model", num_shards),),
            platform=None,
            target=rules,
            draft=rules if draft else (),
        )

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "Layout":
        """Reads a layout file.

        Raises:
          ConfigError: it does not exist, is not TOML, or a key is unknown, missing or malformed.
        """
        check_path("layout", path)
        return cls(**read_fields(Path(path)))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes it as a layout file, from which `read` makes the same.

        Raises:
          ConfigError: the file cannot be written.
        """
        try:
            Path(path).write_text(text_of(self))
        except OSError as error:
            raise ConfigError(
                f"the layout {path} cannot be written: {error.strerror}; name a file in a folder "
                "that exists and may be written to."
            ) from None

    def place(
        self,
        role: str,
        sizes: Mapping[str, int],
        devices: Sequence[Any] | None = None,
    ) -> Placement:
        """Fits the layout to a model and lays it over devices.

        A mesh axis larger than the number of key/value heads is split in two, the heads along the
        first part and replicated over the second, as Megatron does. The order of the devices does
        not depend on the model, so target and draft share arrays in one program.

        Args:
          role: `target` or `draft`.
          sizes: the size of every logical axis of the model; head axes count heads.
          devices: the devices; by default the devices of all processes, or as many as are needed of
            a single one's.

        Raises:
          ConfigError: a size is not divisible and its rule does not say to replicate it, or there
            are too few devices.
        """
        fitted = _fit(self, role, sizes)
        parts = {}
        for axis, size in self.mesh:
            leading = {part for pieces in fitted.values() for name, part in pieces if name == axis}
            parts[axis] = _split(axis, size, leading)
        axes = {
            logical: tuple(name for axis, size in pieces for name in _leading(parts[axis], size))
            for logical, pieces in fitted.items()
        }
        if _shares_axes(dict(getattr(self, role))):
            kv_axes = dict(getattr(self, role))["kv_heads"].axes
            every = tuple(name for axis in kv_axes for name, _ in parts[axis])
            taken = axes.get("kv_heads", every)
            axes["length"] = tuple(name for name in every if name not in taken)
        names, places = zip(*(part for axis in parts.values() for part in axis), strict=True)
        types = (AxisType.Auto,) * len(names)
        mesh_devices = self._devices(jax.devices() if devices is None else devices)
        mesh = Mesh(mesh_devices.reshape(places), names, axis_types=types)
        return Placement(mesh, tuple(axes.items()), all_reduce_dtype=self.all_reduce_dtype)

    def _check_slices(self) -> None:
        """Raises unless rows, and nothing else, are sharded across the slices."""
        outermost, size = self.mesh[0]
        if self.platform == "gpu":
            raise ConfigError(
                f"layout {self.name}: slices is {self.slices}, but GPUs make none; leave it out."
            )
        for what, number in ((f"mesh.{outermost}", size), ("processes", self.processes)):
            if number % self.slices:
                raise ConfigError(
                    f"layout {self.name}: {what} is {number}, which {self.slices} slices cannot "
                    "share evenly; make it a multiple of them."
                )
        for role in ROLES:
            for logical, rule in getattr(self, role):
                if logical != "batch" and outermost in rule.axes:
                    raise ConfigError(
                        f"layout {self.name}: {role}.{logical} uses the mesh axis {outermost!r}, "
                        "which lies across slices, where every call would wait for the data "
                        "center's network; shard batch over it and nothing else."
                    )

    def _devices(self, devices: Sequence[Any]) -> np.ndarray:
        """The devices in the order that suits their interconnect."""
        if len(devices) < self.size or (len(devices) > self.size and self.processes > 1):
            raise ConfigError(
                f"layout {self.name} is for {self.size} devices, and there are {len(devices)}; "
                "choose the layout of this topology; cpu-2, cpu-4 and cpu-8 emulate devices on "
                "a CPU."
            )
        devices = devices[: self.size]
        if devices[0].platform == "cpu":  # emulated devices have no topology to make the best of
            return np.asarray(devices)
        slices = len({getattr(each, "slice_index", 0) for each in devices})
        if devices[0].platform == "tpu" and slices != self.slices:
            raise ConfigError(
                f"layout {self.name} is for {self.slices} TPU slices, and the devices make "
                f"{slices}; use a layout with slices = {slices}, whose outermost mesh axis is for "
                "the rows."
            )
        names, sizes = zip(*self.mesh, strict=True)
        if self.slices > 1:
            inside = (sizes[0] // self.slices, *sizes[1:])
            across = (self.slices, *(1 for _ in sizes[1:]))
            return create_hybrid_device_mesh(inside, across, devices)
        types = (AxisType.Auto,) * len(names)
        return jax.make_mesh(sizes, names, axis_types=types, devices=devices).devices


Pieces = tuple[tuple[str, int], ...]
"""Mesh axes, and how much of each counted from its outer end."""


def _fit(layout: Layout, role: str, sizes: Mapping[str, int]) -> dict[str, Pieces]:
    """What each logical axis of a model is really sharded over."""
    mesh = dict(layout.mesh)
    fitted: dict[str, Pieces | None] = {}
    rules = dict(getattr(layout, role))
    if _shares_axes(rules):
        del rules["length"]  # it takes what `kv_heads` leaves
    for logical, rule in rules.items():
        num_shards = math.prod(mesh[axis] for axis in rule.axes)
        size = sizes.get(logical, num_shards)  # batch and length are the request's
        pieces: Pieces | None = None
        if size % num_shards == 0:
            pieces = tuple((axis, mesh[axis]) for axis in rule.axes)
        elif logical == "kv_heads":
            pieces = _outer(rule.axes, mesh, size)
        if pieces is None and not rule.replicate:
            raise ConfigError(
                f"layout {layout.name} splits {logical} of the {role} into {num_shards} shards "
                f"({' x '.join(rule.axes)}), which does not divide its {size}; use another layout, "
                f'or write {logical} = {{ axes = {list(rule.axes)!r}, on_indivisible = "replicate" '
                f"}} under [{role}]."
            )
        fitted[logical] = pieces
    # Query heads attend beside their key/value heads: both are sharded, or neither.
    if None in (fitted.get("heads"), fitted.get("kv_heads")):
        fitted |= {"heads": None, "kv_heads": None}
    return {name: pieces for name, pieces in fitted.items() if pieces is not None}


def _shares_axes(rules: Mapping[str, Rule]) -> bool:
    """Whether caches are cut by length over the devices that share a key/value head."""
    length, kv_heads = rules.get("length"), rules.get("kv_heads")
    return length is not None and kv_heads is not None and length.axes == kv_heads.axes


def _outer(axes: Sequence[str], mesh: Mapping[str, int], size: int) -> Pieces | None:
    """The outer part of the axes that has exactly `size` places, or None."""
    pieces = []
    for axis in axes:
        step = math.gcd(size, mesh[axis])
        if step > 1:
            pieces.append((axis, step))
        size //= step
        if step < mesh[axis]:
            break
    return tuple(pieces) if size == 1 else None


def _split(axis: str, size: int, leading: Iterable[int]) -> list[tuple[str, int]]:
    """The parts of a mesh axis: one, or as many as the leading sizes ask for."""
    ends = sorted({*leading, size})
    if len(ends) == 1:
        return [(axis, size)]
    return [
        (f"{axis}_{i}", end // start)
        for i, (start, end) in enumerate(zip([1, *ends], ends, strict=False))
    ]


def _leading(parts: Sequence[tuple[str, int]], size: int) -> list[str]:
    """Names of the first parts, up to `size` places."""
    names = []
    for name, places in parts:
        if size == 1 and names:
            break
        names.append(name)
        size //= places
    return names


def _refuse_repeats(
    layout: str, role: str, group: Sequence[str], rules: Mapping[str, Rule]
) -> None:
    """Raises if one array would be sharded twice over one mesh axis."""
    taken: dict[str, str] = {}
    for logical in group:
        for axis in rules[logical].axes:
            if axis in taken:
                raise ConfigError(
                    f"layout {layout}: {role}.{logical} uses the mesh axis {axis!r}, which "
                    f"{role}.{taken[axis]} uses already in the same array; give it another axis or "
                    "leave it out."
                )
            taken[axis] = logical
