"""Whisper models in CTranslate2's format: `model.bin`, `config.json` and `tokenizer.json`.

The file's variables are shown under the names and in the shapes of Hugging Face's checkpoints, so
that one table of weights serves both. CTranslate2's `python/ctranslate2/specs/model_spec.py`
defines model.bin: version, name, revision, count, then for each variable its
name, rank, dimensions, type and bytes, and last the aliases.
"""

import math
import mmap
import re
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import tokenizers

from spec_jax.checkpoints.files import damaged
from spec_jax.checkpoints.gguf_header import Reader
from spec_jax.errors import CheckpointError
from spec_jax.models.family import Slices, Stored
from spec_jax.text.tokenizer import Tokenizer

MODEL = "model.bin"
_VERSION, _SPEC = 6, "WhisperSpec"
_DTYPES = [np.float32, np.int8, np.int16, np.int32, np.float16, ml_dtypes.bfloat16]
_INTEGERS = (np.int8, np.int16, np.int32)
_STORED: dict[Any, Stored] = {np.float16: "float16", ml_dtypes.bfloat16: "bfloat16"}
_MAX_NAME_BYTES, _MAX_RANK, _MAX_VARIABLES = 512, 4, 1 << 14
_SETTINGS = {
    "decoder/pre_norm": 1,
    "decoder/activation": 3,  # the exact GELU
    "decoder/alibi": 0,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
}
"""The settings of all Whisper models, which the block stack computes."""

_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(self_attention|attention|ffn)/(\w+)/(\w+)")
_NORMS = {
    "self_attention": "self_attn_layer_norm",
    "attention": "encoder_attn_layer_norm",
    "ffn": "final_layer_norm",
}
_LINEARS = {
    ("self_attention", "linear_0"): ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attention", "linear_1"): ("self_attn.out_proj",),
    ("attention", "linear_0"): ("encoder_attn.q_proj",),
    ("attention", "linear_1"): ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    ("attention", "linear_2"): ("encoder_attn.out_proj",),
    ("ffn", "linear_0"): ("fc1",),
    ("ffn", "linear_1"): ("fc2",),
}
_OTHERS = {
    "embeddings/weight": "embed_tokens.weight",
    "position_encodings/encodings": "embed_positions.weight",
}
_LEAVES = {"gamma": "weight", "beta": "bias"}


class Variable(NamedTuple):
    """A variable's place in the file."""

    shape: tuple[int, ...]
    dtype: Any
    offset: int


class Ctranslate2Directory:
    """The tensors of a Whisper model in CTranslate2's format.

    Attributes:
      path: the directory.
      shapes: shape of every tensor by Hugging Face's name; matrices are [out, in].

    Raises:
      CheckpointError: model.bin is truncated or damaged, or holds another kind of model.
    """

    def __init__(self, path: Path):
        self.path, self._file = path, path / MODEL
        try:
            with (
                self._file.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            ):
                self.variables, settings = _read_header(data)
        except (ValueError, OverflowError) as error:
            raise damaged(
                self._file, f"it does not read as a CTranslate2 model ({error})"
            ) from None
        for name, value in _SETTINGS.items():
            if settings.get(name, value) != value:
                raise CheckpointError(
                    f"{self._file}: {name} is {settings[name]}; spec-jax supports {value} only."
                )
        if _STORED.keys() <= {each.dtype for each in self.variables.values()}:
            # A converter writes one of the two; a wrong byte makes the other, of the same size.
            raise damaged(self._file, "some weights are float16 and others bfloat16")
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._rows: dict[str, tuple[str, slice]] = {}  # of a variable
        for name, variable in self.variables.items():
            self._add(name, variable.shape)
        self._settings = settings

    @property
    def config(self) -> dict[str, Any]:
        """The shape, with the keys of a Hugging Face config.json."""
        try:
            vocab_size, d_model = self.shapes["model.decoder.embed_tokens.weight"]
            _, bins, _ = self.shapes["model.encoder.conv1.weight"]
            config: dict[str, Any] = {
                "vocab_size": vocab_size,
                "d_model": d_model,
                "num_mel_bins": bins,
                "decoder_start_token_id": _start_token(self.path),
            }
            for stack, positions in (("encoder", "source"), ("decoder", "target")):
                prefix = f"model.{stack}"
                layers = {name.split(".")[3] for name in self.shapes if f"{prefix}.layers." in name}
                (num_positions, _) = self.shapes[f"{prefix}.embed_positions.weight"]
                config |= {
                    f"{stack}_layers": len(layers),
                    f"{stack}_attention_heads": self._settings[f"{stack}/num_heads"],
                    f"{stack}_ffn_dim": self.shapes[f"{prefix}.layers.0.fc1.weight"][0],
                    f"max_{positions}_positions": num_positions,
                }
        except KeyError as error:
            raise damaged(self._file, f"it has no {error}") from None
        except ValueError:
            raise damaged(self._file, "a weight has another number of dimensions") from None
        heads = [config[f"{stack}_attention_heads"] for stack in ("encoder", "decoder")]
        if heads[0] != heads[1]:  # a wrong number changes no shape, but every text
            raise damaged(self._file, f"encoder and decoder have {heads} heads")
        return config

    @property
    def stored(self) -> Stored:
        """How the largest tensor is stored."""
        largest = max(self.variables.values(), key=lambda each: np.prod(each.shape))
        return "quantized" if largest.dtype == np.int8 else _STORED.get(largest.dtype, "float32")

    def read(self, name: str, part: Slices = ()) -> np.ndarray:
        """A tensor, or a part of it; 8-bit weights become float32."""
        variable, rows = self._rows[name]
        array = self._map(variable)[rows]
        if array.dtype == np.int8:
            scales = self._map(f"{variable}_scale")[rows].astype(np.float32)
            array = array.astype(np.float32) / scales.reshape(-1, *[1] * (array.ndim - 1))
        return array[part]

    def read_quantized(self, name: str) -> None:
        """None: quantized matrices are dequantized."""

    def _map(self, name: str) -> np.ndarray:
        variable = self.variables[name]
        return np.memmap(self._file, variable.dtype, "r", variable.offset, variable.shape)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        """Adds the tensors of one variable."""
        if name.endswith("_scale"):
            return
        self._check_numbers(name)
        for tensor, rows in _parts(name, shape):
            if tensor in self.shapes:
                raise damaged(self._file, f"it holds {tensor} twice")
            if tensor.endswith("k_proj.bias"):
                # Whisper's keys have no bias; a fused bias is 0 there.
                if np.any(np.asarray(self._map(name)[rows], np.float32)):
                    raise CheckpointError(
                        f"{self._file}: {name} has a bias of keys, which is not 0."
                    )
                continue
            self._rows[tensor] = name, rows
            self.shapes[tensor] = (rows.stop - rows.start, *shape[1:])

    def _check_numbers(self, name: str) -> None:
        """Refuses integers of other sizes, and 8-bit weights without valid scales."""
        variable = self.variables[name]
        if variable.dtype in _INTEGERS[1:]:
            raise CheckpointError(
                f"{self._file}: {name} is stored as {variable.dtype.__name__}; convert the model "
                "with `--quantization float16` or `int8`."
            )
        if variable.dtype == np.int8:
            scale = self.variables.get(f"{name}_scale")
            if scale is None or scale.shape != variable.shape[:1] or scale.dtype in _INTEGERS:
                raise damaged(self._file, f"{name} has no scale for each of its rows")
            scales = self._map(f"{name}_scale").astype(np.float32)
            if not (np.isfinite(scales) & (scales > 0)).all():
                raise damaged(self._file, f"the scales of {name} are not all positive numbers")


def read_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a directory.

    Raises:
      CheckpointError: there is no tokenizer.json, or it is damaged.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(
            f"{file} is missing; copy it from the Hugging Face repository of the same model."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no error class
        raise damaged(file, f"it is not a tokenizer ({error})") from None
    end = backend.token_to_id("<|endoftext|>")
    return Tokenizer(backend, eos_token_ids=() if end is None else (end,))


def _start_token(path: Path) -> int:
    tokens = read_tokenizer(path).added_tokens
    return next((i for i, token in tokens.items() if token == "<|startoftranscript|>"), 1)


def _parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, slice]]:
    """Hugging Face's names of a variable's parts, and their rows."""
    rows = slice(0, shape[0] if shape else 1)
    if layer := _LAYER.fullmatch(name):
        stack, number, module, kind, leaf = layer.groups()
        prefix, leaf = f"model.{stack}.layers.{number}", _LEAVES.get(leaf, leaf)
        if kind == "layer_norm":
            return [(f"{prefix}.{_NORMS[module]}.{leaf}", rows)]
        names = _LINEARS.get((module, kind))
        if names is None or rows.stop % len(names):
            raise CheckpointError(f"a CTranslate2 Whisper model has no variable {name!r} {shape}.")
        size = rows.stop // len(names)
        return [
            (f"{prefix}.{each}.{leaf}", slice(i * size, (i + 1) * size))
            for i, each in enumerate(names)
        ]
    stack, _, tail = name.partition("/")
    if tail in _OTHERS:
        return [(f"model.{stack}.{_OTHERS[tail]}", rows)]
    *modules, leaf = tail.split("/")
    return [(".".join(["model", stack, *modules, _LEAVES.get(leaf, leaf)]), rows)]


def _read_header(data: mmap.mmap) -> tuple[dict[str, Variable], dict[str, int]]:
    """The variables of a file, and its scalars; all sizes are checked against the file."""
    reader = Reader(data)

    def text() -> str:
        size = reader.scalar("H")
        if not 0 < size <= _MAX_NAME_BYTES:
            raise ValueError(f"a name of {size} bytes")
        return reader.bytes(size).rstrip(b"\0").decode()

    def count() -> int:
        number = reader.scalar("I")
        if number > _MAX_VARIABLES:
            raise ValueError(f"{number} entries are declared; at most {_MAX_VARIABLES} are read")
        return number

    version = reader.scalar("I")
    if version != _VERSION:
        raise ValueError(f"version {version}; this reads version {_VERSION}")
    spec = text()
    if spec != _SPEC:
        raise ValueError(f"it is a {spec}; this reads {_SPEC}")
    reader.scalar("I")  # the specification's revision
    variables: dict[str, Variable] = {}
    settings: dict[str, int] = {}
    for _ in range(count()):
        name, rank = text(), reader.scalar("B")
        if rank > _MAX_RANK:
            raise ValueError(f"{name!r} has {rank} dimensions")
        shape = reader.numbers("I", rank)
        kind, size = reader.scalar("B"), reader.scalar("I")
        if kind >= len(_DTYPES):
            raise ValueError(f"{name!r} is of the unknown type {kind}")
        dtype, begin = _DTYPES[kind], reader.position
        if not 0 < math.prod(shape) * np.dtype(dtype).itemsize == size:
            raise ValueError(f"{name!r} of shape {shape} takes {size} bytes at {begin}")
        reader.skip(size)
        if name in variables or name in settings:
            raise ValueError(f"{name!r} is there twice")
        if shape:
            variables[name] = Variable(shape, dtype, begin)
        else:
            settings[name] = int(np.frombuffer(data[begin : begin + size], dtype)[0])
    for _ in range(count()):  # other names of variables, such as the tied head's
        text()
        text()
    if reader.position != len(data):
        raise ValueError(f"{len(data) - reader.position} bytes follow its end")
    variables.pop("decoder/alignment_heads", None)  # for timestamps of words
    return variables, settings
