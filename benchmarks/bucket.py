"""What reading weights from an object store on this machine costs, in processor time.

    python -m benchmarks.bucket

The store is a process of this machine, so that no network is measured.
"""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import ml_dtypes
import numpy as np

from spec_jax.checkpoints import locate
from spec_jax.checkpoints.bucket import BLOCK
from spec_jax.checkpoints.safetensors_files import SafetensorsFiles
from spec_jax.checkpoints.weights import _transposed
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.object_store import serve

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "head_dim": 256, "vocab_size": 8192}
SHAPE = CONFIG | SIZES | {"num_key_value_heads": 4, "num_hidden_layers": 8}
BF16 = np.dtype(ml_dtypes.bfloat16)


def serve_model(address, done) -> None:
    """A store with one model, in a separate process."""
    with tempfile.TemporaryDirectory() as scratch, serve() as store:
        folder = write_directory(Path(scratch) / "large", SHAPE, llama_tensors(SHAPE, BF16))
        for file in folder.iterdir():
            store.objects[f"models/large/{file.name}"] = file.read_bytes()
        address.put(store.address)
        done.wait()


def show(name: str, read: Callable[[], Iterable[np.ndarray]]) -> list[np.ndarray]:
    """Prints megabytes a second of processor time."""
    begin = time.process_time()
    arrays = list(read())
    size, seconds = sum(each.nbytes for each in arrays) / 1e6, time.process_time() - begin
    print(f"{name}: {size:.0f} MB, {size / seconds:.0f} MB a CPU second")
    return arrays


def main() -> None:
    """Measures each way of reading once."""
    context = multiprocessing.get_context("spawn")
    address, done = context.Queue(), context.Event()
    process = context.Process(target=serve_model, args=(address, done))
    process.start()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
        os.environ |= {"AWS_ENDPOINT_URL": address.get(), "SPEC_JAX_CACHE": cache}
        files = SafetensorsFiles(locate("s3://models/large", print)[1])
        matrices = {name: shape for name, shape in files.shapes.items() if len(shape) == 2}
        stored = files.bucket["model.safetensors"]
        starts = range(0, stored.size - BLOCK, BLOCK)
        raw = (np.frombuffer(stored.read(at, at + BLOCK), np.uint8) for at in starts)
        show("ranges", lambda: raw)
        tensors = show("whole tensors", lambda: map(files.read, files.shapes))
        rows = (files.read(name, (slice(0, n // 4),)) for name, (n, _) in matrices.items())
        show("a quarter of the rows", lambda: rows)
        every = slice(None)
        columns = (files.read(name, (every, slice(0, n // 4))) for name, (_, n) in matrices.items())
        show("a quarter of the columns", lambda: columns)
        show("turning", lambda: (_transposed(each, BF16) for each in tensors))
        numbers = [each.view(np.uint16) for each in tensors]
        show("turning at once", lambda: (np.array(each.T, order="C") for each in numbers))
    done.set()
    process.join()


if __name__ == "__main__":
    main()
