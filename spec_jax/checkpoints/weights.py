"""Fills a model with a checkpoint's tensors, one at a time, each device with its own part."""

import abc
import dataclasses
from collections.abc import Collection

import jax
import numpy as np

from spec_jax import distributed
from spec_jax.checkpoints.packed_copy import PackedCopy
from spec_jax.checkpoints.packing import Packing
from spec_jax.errors import CheckpointError
from spec_jax.kernels import Quantized, Weight, quantize
from spec_jax.models.config import TransformerConfig
from spec_jax.models.family import Part, Slices, TensorStore, WeightTable, stored_as
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.text.tokenizer import Tokenizer


class StoredWeights(abc.ABC):
    """A model's weights in files, by spec-jax's names.

    Attributes:
      leaves: shape [in, out], dtype and sharding of every weight as a plain array.
    """

    def __init__(self, leaves: dict[str, jax.ShapeDtypeStruct], packing: Packing):
        self.leaves, self._packing = leaves, packing

    def read(self, names: Collection[str]) -> dict[str, Weight]:
        """Weights on their devices; each process reads the parts of its devices."""
        # The largest first: its temporary copy is freed before the other tensors take memory.
        order = sorted(names, key=lambda name: -self.leaves[name].size)
        return {name: self._read(name) for name in order}

    def _read(self, name: str) -> Weight:
        leaf = self.leaves[name]
        packing = self._packing.of(name, leaf.shape)
        return packing.pack(self.read_rows(name), leaf) if packing else self._array(name)

    def read_rows(self, name: str) -> np.ndarray | Quantized:
        """A complete weight in host memory, [out, in], plain or quantized."""
        leaf = self.leaves[name]
        packing = self._packing.of(name, leaf.shape)
        return packing.rounded(self._rows(name, packing), leaf.dtype)

    @abc.abstractmethod
    def _array(self, name: str) -> Weight:
        """A weight as a plain array on its devices."""

    @abc.abstractmethod
    def _rows(self, name: str, packing: Packing) -> np.ndarray | Quantized:
        """A complete weight in host memory, [out, in], before it is rounded."""


@dataclasses.dataclass(frozen=True)
class StoredModel:
    """A model in files, of which everything but the weights has been read.

    Attributes:
      config: its shape.
      tokenizer: its tokenizer.
      dtype: the dtype of its weights in memory.
      packing: the form of its matrices in memory.
      weights: reads them.
      placement: how they lie on devices.
      copy: keeps packed weights for later processes; None keeps none.
    """

    config: TransformerConfig
    tokenizer: Tokenizer
    dtype: str
    packing: Packing
    weights: StoredWeights
    placement: Placement = Placement.single_device()
    copy: PackedCopy | None = None

    def load(self) -> Model:
        """The model with all of its weights."""
        model = Model.abstract(self.config, dtype=self.dtype, placement=self.placement)
        weights = self.copy and self.copy.read()
        if weights is None:
            weights = self.weights.read(self.weights.leaves)
            if self.copy is not None:
                self.copy.write(weights)
        return model.with_weights(weights)


class TensorWeights(StoredWeights):
    """Weights that a table finds among a checkpoint's tensors; every tensor must be used.

    A process reads only the parts of its devices, except for quantized and fused tensors, and it
    reads one tensor at a time.

    Args:
      config: the model's shape.
      table: where the checkpoint keeps each module's weights.
      tensors: the checkpoint's tensors.
      buffers: suffixes of tensor names that are skipped.
      dtype: every weight is converted to it.
      placement: how the model lies on devices.
      borrowed: names of weights that the checkpoint leaves out.
      outputs: number of outputs of the head; by default the size of the vocabulary.
      packing: the form of matrices in memory; by default plain arrays.

    Raises:
      CheckpointError: a tensor is missing, unexpected, or of the wrong shape.
    """

    def __init__(
        self,
        config: TransformerConfig,
        table: WeightTable,
        tensors: TensorStore,
        *,
        buffers: tuple[str, ...],
        dtype: str,
        placement: Placement = Placement.single_device(),
        borrowed: Collection[str] = (),
        outputs: int | None = None,
        packing: Packing | None = None,
    ):
        abstract = Model.abstract(config, dtype=dtype, placement=placement)
        leaves = {name: leaf for name, leaf in abstract.weights.items() if name not in borrowed}
        if outputs is not None and (head := leaves.get("head.weight")) is not None:
            leaves["head.weight"] = head.update(shape=(head.shape[0], outputs))
        super().__init__(leaves, packing or Packing())
        self._config, self._tensors = config, tensors
        self._places = {
            name: _Place(table, name, leaf.shape, config) for name, leaf in leaves.items()
        }
        # A checkpoint with a tied head may carry a copy of it.
        entry = table["head"]
        skipped = (*buffers, f"{entry.name if isinstance(entry, Part) else entry}.weight")
        expected = {
            name: shape for place in self._places.values() for name, shape in place.expected.items()
        }
        _check_names(tensors, expected, skipped)

    def _array(self, name: str) -> Weight:
        return self._places[name].load(self._tensors, self._config, self.leaves[name])

    def _rows(self, name: str, packing: Packing) -> np.ndarray | Quantized:
        return self._places[name].rows(self._tensors, self._config, packing)


class ArrayWeights(StoredWeights):
    """Weights that are arrays already, of a model with random weights."""

    def __init__(self, model: Model, packing: Packing):
        abstract = Model.abstract(model.config, dtype=model.dtype, placement=model.placement)
        super().__init__(abstract.weights, packing)
        self._weights = model.weights

    def _array(self, name: str) -> Weight:
        return self._weights[name]

    def _rows(self, name: str, packing: Packing) -> np.ndarray:
        return to_rows(self._weights[name])


def to_rows(weight: jax.Array) -> np.ndarray:
    """A plain array [in, out], or a stack of them, in host memory with its outputs first."""
    rows = np.asarray(distributed.to_host(weight))
    return rows.swapaxes(-1, -2) if rows.ndim > 1 else rows


class _Place:
    """The place of one weight in a checkpoint, and how to load it."""

    def __init__(
        self, table: WeightTable, name: str, shape: tuple[int, ...], config: TransformerConfig
    ):
        self.part, tensor = stored_as(table, name)
        self.names = [tensor]
        stored = self.part.stored_shape(_turned(shape), config)
        if self.part.each:
            self.names = [tensor.format(number) for number in range(shape[0])]
            stored = stored[1:]
        self.expected = dict.fromkeys(self.names, stored)

    def load(
        self, tensors: TensorStore, config: TransformerConfig, leaf: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """The weight as a plain array, with each part on its devices."""
        complete = None
        if self.part.rearranges:
            complete = self.part.take(self._read(tensors), config)
        parts: dict[str, np.ndarray] = {}  # devices that hold the same part share its reading

        def read(index: Slices | None) -> np.ndarray:
            if str(index) not in parts:  # slices can be keys in Python 3.12 only
                stored = _turned(index or ())
                part = self._read(tensors, stored) if complete is None else complete[stored]
                parts[str(index)] = _transposed(part, leaf.dtype)
            return parts[str(index)]

        if leaf.sharding is None:
            return jax.device_put(read(None))
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read, dtype=leaf.dtype)

    def _read(self, tensors: TensorStore, part: Slices = ()) -> np.ndarray:
        """The stored tensor, or a part of it; matrices that are stored apart are stacked."""
        if not self.part.each:
            return tensors.read(self.names[0], part)
        names = self.names[part[0]] if part else self.names
        return np.stack([tensors.read(name, part[1:]) for name in names])

    def rows(
        self, tensors: TensorStore, config: TransformerConfig, packing: Packing
    ) -> np.ndarray | Quantized:
        """The complete weight [*stack, out, in]; with `as_stored` quantized as in the file.

        A matrix that is quantized in the file and rounded is never in float32 as a whole.
        """
        if (packing.as_stored or packing.rounds) and not self.part.each:
            quantized = tensors.read_quantized(self.names[0])
            if quantized is not None and (packing.as_stored or quantized.values.ndim == 2):
                quantized = quantized.map(lambda part: self.part.take(part, config))
                return quantized if packing.as_stored else quantize(quantized, packing.bits)
        return self.part.take(self._read(tensors), config)


def _turned(each: tuple) -> tuple:
    """A shape, or an index, with the last two axes exchanged."""
    return (*each[:-2], *each[-2:][::-1])


_ROWS_AT_ONCE = 16


def _transposed(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy with another dtype and the last two axes exchanged, detached from the file."""
    # As integers: NumPy transposes only its own dtypes fast, and bfloat16 is not one of them.
    converted = array.astype(dtype, copy=False)
    integers = converted.view(f"u{converted.itemsize}")
    if integers.ndim < 2:
        return np.array(integers).view(dtype)
    transposed = np.empty(_turned(integers.shape), integers.dtype)
    # A few rows at a time: three times as fast as all of them, which would miss the caches.
    for first in range(0, integers.shape[-2], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        transposed[..., rows] = integers[..., rows, :].swapaxes(-1, -2)
    return transposed.view(dtype)


def _check_names(
    tensors: TensorStore, expected: dict[str, tuple[int, ...]], skipped: tuple[str, ...]
) -> None:
    """Compares names and shapes before reading anything, so that mistakes show at once."""
    missing = [name for name in expected if name not in tensors.shapes]
    if missing:
        raise CheckpointError(
            f"{tensors.path} lacks {len(missing)} of the {len(expected)} tensors that its config "
            f"asks for, such as {missing[0]!r} of shape {expected[missing[0]]}."
        )
    for name, shape in expected.items():
        if tensors.shapes[name] != shape:
            raise CheckpointError(
                f"{tensors.path}: tensor {name!r} has shape {tensors.shapes[name]}, but the config "
                f"asks for {shape}."
            )
    surplus = [
        name for name in tensors.shapes if name not in expected and not name.endswith(skipped)
    ]
    if surplus:
        raise CheckpointError(
            f"{tensors.path} holds {len(surplus)} tensors that its config does not use, such as "
            f"{surplus[0]!r} of shape {tensors.shapes[surplus[0]]}; computing without them would "
            "give wrong results."
        )
