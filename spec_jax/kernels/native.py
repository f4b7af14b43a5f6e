"""The library of native code on CPU: builds the sources in `cpu/` and loads them.

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from filelock import FileLock

from spec_jax.config import cache_directory

SWITCH = "SPEC_JAX_NATIVE"
"""Environment variable: 0 turns native code off, a name such as avx2 chooses a variant."""
PRODUCT, EXPERT_PRODUCT = "spec_jax_product", "spec_jax_expert_product"
ATTENTION, WRITE_AND_ATTEND = "spec_jax_attention", "spec_jax_write_and_attend"
NORM, NORM_OF_SUM = "spec_jax_norm", "spec_jax_norm_of_sum"
GATE = "spec_jax_gate"
WARP, LIKELIEST, DRAW = "spec_jax_warp", "spec_jax_likeliest", "spec_jax_draw"
_SOURCES = Path(__file__).with_name("cpu")
_PREBUILT = Path(__file__).with_name("prebuilt")
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


def loaded() -> ctypes.CDLL | None:
    """The library, for functions that Python calls; None if `available` has not loaded it."""
    return _LIBRARY[0] if _LIBRARY else None


_LOADED: list[str | None] = []
"""Empty before the first use; then why the library cannot be loaded, or None if it is loaded."""
_LIBRARY: list[ctypes.CDLL] = []


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
            PRODUCT: library.SpecJaxProduct,
            EXPERT_PRODUCT: library.SpecJaxExpertProduct,
            ATTENTION: library.SpecJaxAttention,
            WRITE_AND_ATTEND: library.SpecJaxWriteAndAttend,
            NORM: library.SpecJaxNorm,
            NORM_OF_SUM: library.SpecJaxNormOfSum,
            GATE: library.SpecJaxGate,
            WARP: library.SpecJaxWarp,
            LIKELIEST: library.SpecJaxLikeliest,
            DRAW: library.SpecJaxDraw,
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
    _LIBRARY.append(library)
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
    library = _PREBUILT / f"{variant.name}-{_digest(variant)}.so"
    try:
        return ctypes.CDLL(str(library)) if _is_whole(library) else None
    except OSError:  # it was built for a later C library
        return None


def _built(on_progress: Callable[[str], object] | None) -> Path:
    """The library for this processor, built unless it is in the cache."""
    variant = _variant()
    folder = cache_directory() / "native"
    library = folder / f"{variant.name}-{_digest(variant, jax.__version__)}.so"
    if _is_whole(library):
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock", timeout=_BUILD_SECONDS):
            if not _is_whole(library):
                if library.exists():
                    warnings.warn(
                        f"the native code in {library} was damaged, and is compiled again",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                elif on_progress:
                    on_progress("compiling native code for this CPU, once")
                for abandoned in folder.glob("building-*"):  # by a process that was killed
                    shutil.rmtree(abandoned, ignore_errors=True)
                _build(variant, library)
    except (OSError, TimeoutError) as error:
        raise _Unavailable(f"{folder} cannot be written ({error}); set SPEC_JAX_CACHE") from None
    return library


def _is_whole(library: Path) -> bool:
    """Whether a library is there and has its checksum: to load a truncated one ends the process."""
    try:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        return _checksum_of(library).read_text() == digest
    except (OSError, ValueError):
        return False


def _checksum_of(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _build(variant: _Variant, library: Path) -> None:
    """Compiles the source and moves the result into place."""
    compiler, is_zig = _compiler()
    architecture = _ZIG[variant.architecture] if is_zig else variant.architecture
    flags = [*_FLAGS, f"-march={architecture}", *variant.flags]
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
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
        checksum = made.with_suffix(".sha256")
        checksum.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        os.replace(checksum, _checksum_of(library))
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
