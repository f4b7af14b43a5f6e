"""Damaged entries of the cache of programs are removed, said, and made again."""

import importlib.util
import warnings

import numpy as np
import pytest

from spec_jax.engine.checked_cache import CheckedCache

PROGRAM = bytes(range(256)) * 4


@pytest.fixture
def cache(tmp_path):
    return CheckedCache(str(tmp_path), max_size=2**20)


def entry(cache, key="one"):
    return cache.path / f"{key}-cache"


def test_what_is_put_is_got(cache):
    assert cache.get("one") is None
    cache.put("one", PROGRAM)
    cache.put("empty", b"")
    assert (cache.get("one"), cache.get("empty")) == (PROGRAM, b"")


def damaged(data, random):
    """The bytes after one of several accidents; never the same."""
    at = int(random.integers(len(data)))
    kind = random.integers(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + bytes([data[at] ^ 1 << int(random.integers(8))]) + data[at + 1 :]
    if kind == 2:
        return data + b"x"
    return bytes(len(data))


def test_300_damaged_entries_are_made_again(cache):
    random = np.random.default_rng(0)
    for _ in range(300):
        cache.put("one", PROGRAM)
        entry(cache).write_bytes(damaged(entry(cache).read_bytes(), random))
        with pytest.warns(RuntimeWarning, match="was damaged, and is compiled again"):
            assert cache.get("one") is None
        assert not entry(cache).exists()
        cache.put("one", PROGRAM)
        assert cache.get("one") == PROGRAM


@pytest.mark.parametrize("begin", [b"\x78\x9c", b"\x28\xb5\x2f\xfd"])
def test_entries_of_jax_itself_are_replaced_in_silence(cache, begin):
    entry(cache).write_bytes(begin + PROGRAM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.get("one") is None
        cache.put("one", PROGRAM)
    assert cache.get("one") == PROGRAM


def test_an_entry_without_its_time_stops_no_other(cache, monkeypatch):
    """What a process leaves that was killed between the two files."""
    spec = importlib.util.find_spec("jax._src.lru_cache")  # tests/quick.py has changed the class
    unchanged = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unchanged)
    evict = unchanged.LRUCache._evict_if_needed
    monkeypatch.setattr("jax._src.lru_cache.LRUCache._evict_if_needed", evict)
    cache.put("one", PROGRAM)
    (cache.path / "one-atime").unlink()
    cache.put("two", PROGRAM)
    assert (cache.get("one"), cache.get("two")) == (None, PROGRAM)
