"""Native code on CPU: builds the sources in `cpu/`, loads them and calls them from programs.

A wheel may bring the library for each kind of processor (`prebuild`). Otherwise it is built once
for each version of the source, at its first use, and kept in the cache folder. Without it XLA
computes the same, but slower: its products copy each weight before they read it, and quantized
weights are widened to float32 in memory.
"""

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from filelock import FileLock
from jaxtyping import Array, Bool, Float, Int

from spec_jax.config import cache_directory
from spec_jax.kernels.packed_weight import OFFSETS, PackedWeight

SWITCH = "SPEC_JAX_NATIVE"
"""Environment variable: 0 turns native code off, a name such as avx2 chooses a variant."""
_SOURCES = Path(__file__).with_name("cpu")
_PREBUILT = Path(__file__).with_name("prebuilt")
_PRODUCT, _ATTENTION = "spec_jax_product", "spec_jax_attention"
_EXPERT_PRODUCT, _NORM = "spec_jax_expert_product", "spec_jax_norm"
_WARP = "spec_jax_warp"
_FORMATS = {"float32": 0, "bfloat16": 1, "int8": 2}
_FORMATS |= {"int4": 3, "uint4": 3, "int5": 4, "uint5": 4, "int6": 5}
_FLAGS = ("-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-shared", "-ffp-contract=fast")
_BUILD_SECONDS = 300
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Variant:
    """A kind of processor: the features it must have, and the compiler's flags for it."""

    name: str
    features: frozenset[str]
    architecture: str
    flags: tuple[str, ...] = ()


_VARIANTS = {
    "x86_64": (
        _Variant(
            "avx512-bf16",
            _AVX512 | {"avx512_bf16", "avx512_vnni"},
            "x86-64-v4",
            ("-mavx512bf16", "-mavx512vnni"),
        ),
        _Variant("avx512-vnni", _AVX512 | {"avx512_vnni"}, "x86-64-v4", ("-mavx512vnni",)),
        _Variant("avx512", _AVX512, "x86-64-v4"),
        _Variant("avx2-vnni", _AVX2 | {"avx_vnni"}, "x86-64-v3", ("-mavxvnni",)),
        _Variant("avx2", _AVX2, "x86-64-v3"),
        _Variant("x86-64", frozenset(), "x86-64"),
    ),
    "aarch64": (
        _Variant("neon-dotprod", frozenset({"asimddp"}), "armv8.2-a+dotprod"),
        _Variant("neon", frozenset(), "armv8-a"),
    ),
}
_ZIG = {
    "x86-64-v4": "x86_64_v4",
    "x86-64-v3": "x86_64_v3",
    "x86-64": "x86_64",
    "armv8.2-a+dotprod": "generic+dotprod",
    "armv8-a": "generic",
}
"""Architectures in zig's words."""
_VARIANTS["amd64"], _VARIANTS["arm64"] = _VARIANTS["x86_64"], _VARIANTS["aarch64"]


class _Unavailable(Exception):
    """Why there is no native code."""


def products(
    x: Float[Array, "rows in"], weights: Sequence[PackedWeight]
) -> list[Float[Array, "rows _"]]:
    """The rows times each weight, in one call.

    Args:
      x: float32. Products with bfloat16 weights round it to bfloat16, and products with weights
        whose `activations` are int8 round it to 8 bits, once for all weights.
      weights: packed weights of one signature.
    """
    return _products(_PRODUCT, [x], weights)


def expert_products(
    x: Float[Array, "rows in"],
    experts: Int[Array, " rows"],
    weights: Sequence[PackedWeight],
) -> list[Float[Array, "rows _"]]:
    """Each row times its expert's matrix of each stack; the stacks are of one format.

    The matrices of a chosen expert are read once, and other matrices are not read.

    Args:
      x: the same as for `products`.
      experts: each row's expert.
      weights: packed stacks of the same number of matrices; all have scales and minima, or none.
    """
    return _products(_EXPERT_PRODUCT, [x, experts], weights)


def _products(target: str, inputs: list[Array], weights: Sequence[PackedWeight]) -> list[Array]:
    first, rows = weights[0], inputs[0].shape[0]
    parts = [
        [weight.values, *(part for part in weight.scaling if part is not None)]
        for weight in weights
    ]
    call = _call(
        target,
        [jax.ShapeDtypeStruct((rows, weight.shape[1]), jnp.float32) for weight in weights],
    )
    outputs = call(
        *inputs,
        *(part for each in parts for part in each),
        format=_FORMATS[first.format],
        integers=first.activations == "int8",
        offset=OFFSETS.get(first.format, 0),
        scales=first.scales is not None,
        minima=first.minima is not None,
        units=first.scale_units is not None,
        half=first.scales is not None and first.scales.dtype == jnp.float16,
    )
    return list(outputs)


def attention(
    queries: Float[Array, "batch kv_heads rows head_dim"],
    keys: Float[Array, "batch kv_heads slots head_dim"],
    values: Float[Array, "batch kv_heads slots head_dim"],
    positions: Int[Array, "batch tokens"],
    start: Int[Array, " batch"],
    context_lengths: Int[Array, " batch"],
    tree_mask: Bool[Array, "tokens num_recent"] | None,
    depths: Int[Array, " num_recent"] | None,
    slopes: Float[Array, " heads"],
    *,
    cap: float | None,
    window: int | None,
    ring: bool,
) -> Float[Array, "batch kv_heads rows head_dim"]:
    """Attention in float32 over the slots that some token sees; other slots are not read.

    `positions` to `depths` are fields of `models.attention.AttentionMask`, `slopes` to `window` of
    `models.attention.ScoreOptions`, and `ring` of `models.cache.KVState`.

    Args:
      queries: scaled queries; one head follows another, each with a row for each token.
      keys: the cache's keys, with the keys of the new tokens.
      values: the cache's values, with the values of the new tokens.
      positions: the position of each new token.
      start: the index of each row's first new token.
      context_lengths: how many tokens all new tokens see.
      tree_mask: which tokens after the context each new token sees, or None.
      depths: how far these tokens are from the text's end, or None.
      slopes: by how much a head's scores fall with the distance to a token.
      cap: the bound of the scores, or None.
      window: how many tokens back a token sees, or None for all.
      ring: whether the slots are a ring.
    """
    if tree_mask is None or depths is None:
        tree_mask = jnp.zeros((positions.shape[1], 0), bool)
        depths = jnp.zeros((0,), jnp.int32)
    call = _call(_ATTENTION, jax.ShapeDtypeStruct(queries.shape, jnp.float32))
    return call(
        queries,
        keys,
        values,
        positions,
        start,
        context_lengths,
        tree_mask,
        depths,
        slopes,
        cap=np.float32(cap or 0),
        window=window or 0,
        ring=ring,
    )


def norm(
    x: Float[Array, "rows size"],
    weight: Float[Array, " size"],
    bias: Float[Array, " size"] | None,
    *,
    eps: float,
    centered: bool,
) -> Float[Array, "rows size"]:
    """RMS norm of rows, or layer norm if `centered`, in float32.

    A row is the same, bit for bit, whatever rows are beside it.
    """
    if bias is None:
        bias = jnp.zeros((0,), jnp.float32)
    call = _call(_NORM, jax.ShapeDtypeStruct(x.shape, jnp.float32))
    return call(x, weight, bias, eps=np.float32(eps), centered=centered)


def warp(
    logits: Float[Array, "rows vocab"],
    temperature: Float[Array, " rows"],
    top_k: Int[Array, " rows"],
    top_p: Float[Array, " rows"],
    min_p: Float[Array, " rows"],
) -> Float[Array, "rows vocab"]:
    """Logits of rows to probabilities, in float32; see `sampling.probabilities.warp`.

    A row is the same, bit for bit, whatever rows are beside it.
    """
    call = _call(_WARP, jax.ShapeDtypeStruct(logits.shape, jnp.float32))
    return call(logits, temperature, top_k.astype(jnp.int32), top_p, min_p)


def _call(target: str, result: Any) -> Callable[..., Any]:
    """A function of the library, for programs."""
    if not available():
        raise RuntimeError(f"native code is needed and cannot be loaded: {description()}")
    return jax.ffi.ffi_call(target, result)


def available(on_progress: Callable[[str], object] | None = None) -> bool:
    """Whether this machine's CPU has native code; builds and loads it when needed.

    Warns once, with the remedy, if native code is not off and cannot be loaded.

    Args:
      on_progress: called with a line of text before a build, which takes time.
    """
    with _LOCK:
        return _load(on_progress) is None


def description() -> str:
    """Which native code is in use, or why none is, as users read it."""
    with _LOCK:
        why = _load(None)
    return why or _variant().name


_LOADED: list[str | None] = []
"""Empty before the first use; then why the library cannot be loaded, or None if it is loaded."""


def _load(on_progress: Callable[[str], object] | None) -> str | None:
    """Loads the library for this process, once; returns why that failed, if it did."""
    if not _LOADED:
        _LOADED.append(_try_to_load(on_progress))
    return _LOADED[0]


def _try_to_load(on_progress: Callable[[str], object] | None) -> str | None:
    if os.environ.get(SWITCH) == "0":
        return f"off ({SWITCH} is 0)"
    try:
        library = _open_shipped() or ctypes.CDLL(str(_built(on_progress)))
        handlers = {
            _PRODUCT: library.SpecJaxProduct,
            _EXPERT_PRODUCT: library.SpecJaxExpertProduct,
            _ATTENTION: library.SpecJaxAttention,
            _NORM: library.SpecJaxNorm,
            _WARP: library.SpecJaxWarp,
        }
    except (_Unavailable, OSError, AttributeError) as error:
        warnings.warn(
            f"products on this CPU are XLA's, which are slower than native ones: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return f"none: {error}"
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(handler), platform="cpu")
    return None


def prebuild(folder: Path) -> None:
    """Builds the library for each kind of this machine's processors, for a wheel.

    XLA's interface of such libraries is stable, so one that was built beside an earlier jax serves
    a later one.

    Raises:
      RuntimeError: there is no compiler, or it fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        for variant in _variants():
            _build(variant, folder / f"{variant.name}-{_digest(variant)}.so")
    except _Unavailable as error:
        raise RuntimeError(f"native code cannot be built: {error}") from None


def _digest(variant: _Variant, *versions: str) -> str:
    """Names the sources, flags and versions of a library."""
    sources = [path.read_text(encoding="utf-8") for path in sorted(_SOURCES.iterdir())]
    ingredients = [*sources, *_FLAGS, *variant.flags, *versions, platform.system()]
    return hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]


def _open_shipped() -> ctypes.CDLL | None:
    """The library that came with the package, if this system can load it."""
    variant = _variant()
    try:
        return ctypes.CDLL(str(_PREBUILT / f"{variant.name}-{_digest(variant)}.so"))
    except OSError:  # there is none, or it was built for a later C library
        return None


def _built(on_progress: Callable[[str], object] | None) -> Path:
    """The library for this processor, built unless it is in the cache."""
    variant = _variant()
    folder = cache_directory() / "native"
    library = folder / f"{variant.name}-{_digest(variant, jax.__version__)}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=_BUILD_SECONDS):
            if not library.is_file():
                if on_progress:
                    on_progress("compiling native code for this CPU, once")
                _build(variant, library)
    except (OSError, TimeoutError) as error:
        raise _Unavailable(f"{folder} cannot be written ({error}); set SPEC_JAX_CACHE") from None
    return library


def _build(variant: _Variant, library: Path) -> None:
    """Compiles the source and moves the result into place."""
    compiler, is_zig = _compiler()
    architecture = _ZIG[variant.architecture] if is_zig else variant.architecture
    flags = [*_FLAGS, f"-march={architecture}", *variant.flags]
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        made = Path(folder) / library.name
        include = f"-isystem{jax.ffi.include_dir()}"
        sources = map(str, sorted(_SOURCES.glob("*.cpp")))
        command = [*compiler, *flags, include, *sources, "-o", str(made)]
        # Zig also builds the C++ library, and keeps it in its cache.
        zig_cache = dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), f"{folder}/zig")
        try:
            result = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=_BUILD_SECONDS,
                check=False,
                env=os.environ | zig_cache,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _Unavailable(f"{compiler[0]} does not run ({error})") from None
        if result.returncode or not made.is_file():
            messages = result.stderr.strip().splitlines() or ["no message"]
            raise _Unavailable(f"{compiler[0]} cannot build them ({messages[0]})")
        os.replace(made, library)


def _compiler() -> tuple[list[str], bool]:
    """The command of a C++ compiler, the system's or zig's from PyPI, and whether it is zig's."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return [path], False
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"], True
    raise _Unavailable(
        "there is no C++ compiler; install one (such as g++) or run `pip install ziglang`"
    )


def _variants() -> tuple[_Variant, ...]:
    """The kinds of processors that a machine like this one may have, the ablest first."""
    machine = platform.machine().lower()
    if platform.system() not in ("Linux", "Darwin") or machine not in _VARIANTS:
        raise _Unavailable(f"they are not written for {platform.system()} on {machine}")
    return _VARIANTS[machine]


def _variant() -> _Variant:
    name, features = os.environ.get(SWITCH), cpu_features()
    variants = {each.name: each for each in _variants() if each.features <= features}
    if name and name not in variants:
        raise _Unavailable(f"{SWITCH} is {name!r}; this machine has {', '.join(variants)}")
    return variants[name] if name else next(iter(variants.values()))


@functools.cache
def cpu_features() -> frozenset[str]:
    """The features of this machine's CPU, in Linux's words; empty on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "feat")))
    return frozenset(next(flags, "").split())
