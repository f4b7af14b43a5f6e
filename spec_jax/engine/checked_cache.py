"""JAX's folder of compiled programs, with a checksum in each entry.

JAX writes entries in place and keeps one that it cannot read: a process that is killed while it
writes, or a disk that fails, would cost every later process a warning and a compilation.
"""

import hashlib
import warnings
from typing import Any

from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

_MAGIC = b"spec-jax-1\n"
_DIGEST_BYTES = hashlib.sha256().digest_size
_WITHOUT_CHECKSUM = b"\x78", b"\x28\xb5\x2f\xfd"
"""How zlib's and Zstandard's data begin: entries of JAX itself."""


class CheckedCache(LRUCache):
    """Removes entries that are damaged, so that their programs are compiled and kept again."""

    def get(self, key: str) -> bytes | None:
        """The program kept under a key, or None if there is none that is undamaged."""
        entry = super().get(key)
        if entry is None:
            return None
        begin = len(_MAGIC) + _DIGEST_BYTES
        if entry[:begin] == _MAGIC + hashlib.sha256(entry[begin:]).digest():
            return entry[begin:]
        self._remove(key)
        if not entry.startswith(_WITHOUT_CHECKSUM):
            warnings.warn(
                f"a compiled program in {self.path} was damaged, and is compiled again",
                RuntimeWarning,
                stacklevel=2,
            )
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program under a key, unless one is there."""
        super().put(key, _MAGIC + hashlib.sha256(value).digest() + value)

    def _evict_if_needed(self, **sizes: Any) -> None:
        try:
            super()._evict_if_needed(**sizes)
        except FileNotFoundError:  # a process was killed between an entry and its time
            for entry in self.path.glob("*-cache"):
                key = entry.name.removesuffix("-cache")
                if not (self.path / f"{key}-atime").exists():
                    self._remove(key)
            super()._evict_if_needed(**sizes)

    def _remove(self, key: str) -> None:
        for suffix in ("cache", "atime"):
            (self.path / f"{key}-{suffix}").unlink(missing_ok=True)


def check_entries(folder: str, max_bytes: int) -> None:
    """Makes JAX use a `CheckedCache` if its folder of programs is this one."""
    of_jax = compilation_cache.get_file_cache

    def get_file_cache(path: str) -> Any:
        return (CheckedCache(path, max_size=max_bytes), path) if path == folder else of_jax(path)

    compilation_cache.get_file_cache = get_file_cache
