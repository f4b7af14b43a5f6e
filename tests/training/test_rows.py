"""Files of training data: whole or not there, and read back as they were."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from spec_jax.errors import CheckpointError
from spec_jax.training import rows as module
from spec_jax.training.rows import RowFiles, TrainingRows, bytes_per_token, write_rows


def some_rows(count: int, seed: int = 0) -> TrainingRows:
    random = np.random.default_rng(seed)
    return TrainingRows(
        tokens=random.integers(0, 99, (count, 6), np.int32),
        begins=random.integers(1, 3, count).astype(np.int32),
        lengths=random.integers(3, 7, count).astype(np.int32),
        states=random.standard_normal((count, 6, 4)).astype(ml_dtypes.bfloat16),
        normalisers=random.standard_normal((count, 6)).astype(np.float32),
    )


def test_rows_of_several_files_are_read_as_one_collection(tmp_path):
    pieces = [some_rows(3, 0), some_rows(2, 1)]
    for i, piece in enumerate(pieces):
        write_rows(tmp_path / f"{i}.safetensors", piece)
    files = RowFiles([tmp_path / "0.safetensors", tmp_path / "1.safetensors"])
    assert len(files) == 5
    found = files.take([4, 0, 3])
    for field in dataclasses.fields(TrainingRows):
        each = [getattr(piece, field.name) for piece in pieces]
        wanted = np.stack([each[1][1], each[0][0], each[1][0]])
        assert getattr(found, field.name).dtype == wanted.dtype
        np.testing.assert_array_equal(getattr(found, field.name), wanted)
    np.testing.assert_array_equal(
        files.column("lengths"), np.concatenate([piece.lengths for piece in pieces])
    )


def test_a_row_takes_the_announced_room(tmp_path):
    rows = some_rows(50)
    write_rows(tmp_path / "a.safetensors", rows)
    size = (tmp_path / "a.safetensors").stat().st_size
    assert size == pytest.approx(rows.tokens.size * bytes_per_token(4), rel=0.3)


def test_a_full_disk_leaves_no_half_written_file(tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(OSError, match="No space left"):
        write_rows(tmp_path / "a.safetensors", some_rows(2))
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_file_is_named_with_the_remedy(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"damaged .*delete"):
        RowFiles([tmp_path / "a.safetensors"])
