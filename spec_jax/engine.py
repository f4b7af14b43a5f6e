"""Runs batches on the device: pads them into buckets, compiles once per bucket, keeps the time."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.decoding import loop
from spec_jax.decoding.lookahead import Lookahead
from spec_jax.decoding.sampling import BatchSampling
from spec_jax.decoding.state import RUNNING, STOP, DecodeState
from spec_jax.drafters.base import Drafter
from spec_jax.models.transformer import Model

MIN_CAPACITY = 256
MIN_BLOCK, MAX_BLOCK = 32, 512
PREFILL, DECODE = "the reading of prompts", "the decoding loop"
"""The programs of a bucket, as progress names them."""


@dataclasses.dataclass(frozen=True)
class Request:
    """One row of a batch: token ids, how to sample them, and what ends them."""

    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    key: np.ndarray
    stop_token_ids: Sequence[int]
    max_length: int
    bad_words: Sequence[Sequence[int]] = ()


@dataclasses.dataclass(frozen=True)
class Bucket:
    """The static shapes of a batch; requests of one bucket share compiled programs.

    Attributes:
      batch: rows, a power of two, or the next multiple of the layout's ways to share them.
      capacity: tokens a row has room for, K + 1 past its end included: a power of two, or the
        whole context.
      block: width that prompts are read in, a power of two.
      stops: stop tokens a row has room for.
    """

    batch: int
    capacity: int
    block: int
    stops: int


def _power_of_two(least: int, low: int = 1) -> int:
    return max(low, 1 << (least - 1).bit_length() if least > 1 else 1)


class Engine:
    """Compiled prefill and decode programs of one target, drafter and set of static choices."""

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        lookahead: Lookahead,
        verification: str,
        *,
        max_model_len: int,
        on_progress: Callable[[str], None] | None = None,
    ):
        self.target, self.drafter, self.lookahead = target, drafter, lookahead
        self.verification = verification
        self.max_model_len = max_model_len
        self.traces = 0
        """How many programs were traced so far: constant after warm-up inside a bucket."""
        self.compile_seconds = 0.0
        """Seconds spent compiling so far."""
        self._on_progress = on_progress or (lambda message: None)
        self._programs: dict[Any, Any] = {}

    def bucket(self, requests: Sequence[Request]) -> Bucket:
        """The smallest bucket that holds the requests."""
        reserve = self.drafter.lookahead + 1
        # One throw-away entry beside a single bfloat16 row (see Model.score).
        longest = max(request.max_length for request in requests) + reserve + 1
        whole = -(-(self.max_model_len + reserve + 1) // MAX_BLOCK) * MAX_BLOCK
        capacity = min(_power_of_two(longest, MIN_CAPACITY), whole)
        prompt = max(len(request.prompt_token_ids) for request in requests)
        ways = 1 if self.target.placement is None else self.target.placement.ways("batch")
        return Bucket(
            batch=-(-_power_of_two(len(requests)) // ways) * ways,
            capacity=capacity,
            block=min(_power_of_two(prompt - 1, MIN_BLOCK), MAX_BLOCK),
            stops=_power_of_two(max(len(request.stop_token_ids) for request in requests), 4),
        )

    def start(self, requests: Sequence[Request]) -> "Batch":
        """Reads the prompts; the batch then decodes with `Batch.advance`."""
        bucket = self.bucket(requests)
        arrays = self._put(_pad(requests, bucket))
        params = [request.sampling for request in requests]
        params += [SamplingParams(max_tokens=1)] * (bucket.batch - len(requests))
        sampling = BatchSampling.stack(
            params,
            self.target.config.vocab_size,
            [request.stop_token_ids for request in requests],
            [request.bad_words for request in requests],
        )
        sampling = self._put(sampling)
        compiled_before = self.compile_seconds
        prefill = self._program(
            (PREFILL, bucket), self._start, (self.target, self.drafter, arrays), (bucket.block,)
        )
        begin = time.perf_counter()
        state = jax.block_until_ready(prefill(self.target, self.drafter, arrays))
        prefill_seconds = time.perf_counter() - begin
        decode = self._program(
            (DECODE, (bucket.batch, bucket.capacity, bucket.stops, sampling.bad_words.shape)),
            self._decode,
            (self.target, self.drafter, state, sampling, np.int32(0)),
            donate=(2,),
            # What comes out of one call goes into the next.
            out_shardings=jax.tree.map(lambda leaf: leaf.sharding, state),
        )
        return Batch(
            size=len(requests),
            state=state,
            _advance=lambda state, rounds: decode(
                self.target, self.drafter, state, sampling, np.int32(rounds)
            ),
            prefill_seconds=prefill_seconds,
            compile_seconds=self.compile_seconds - compiled_before,
        )

    def _put(self, tree: Any) -> Any:
        """Arrays of one entry a row, on the target's devices."""
        placement = self.target.placement
        if placement is None:
            return jax.tree.map(jnp.asarray, tree)

        def put(leaf: Any) -> jax.Array:
            return placement.put(np.asarray(leaf), "batch", *(None,) * (leaf.ndim - 1))

        return jax.tree.map(put, tree)

    def memory(self) -> tuple[int, int]:
        """(bytes of weights and caches, bytes that the largest decoding program takes in all)."""
        needed = taken = 0
        for (name, _), program in self._programs.items():
            if name == DECODE:
                size = program.memory_analysis()
                outputs = size.output_size_in_bytes - size.alias_size_in_bytes
                arguments = size.argument_size_in_bytes
                taken = max(taken, arguments + outputs + size.temp_size_in_bytes)
                needed = max(needed, arguments)
        return needed, taken

    def _start(self, target: Model, drafter: Drafter, arrays: dict, block: int) -> DecodeState:
        self.traces += 1
        return loop.start(target, drafter, self.lookahead, block=block, **arrays)

    def _decode(self, target: Model, drafter: Drafter, state, sampling, rounds) -> DecodeState:
        self.traces += 1
        return loop.decode(
            target, drafter, self.lookahead, self.verification, state, sampling, rounds
        )

    def _program(
        self,
        key: Any,
        function: Callable,
        args: tuple,
        static: tuple = (),
        donate: tuple = (),
        out_shardings: Any = None,
    ):
        """The compiled program for `key`, compiled now if this is the first use."""
        if key not in self._programs:
            self._on_progress(f"compiling {key[0]}")
            begin = time.perf_counter()
            numbers = tuple(range(len(args), len(args) + len(static)))
            jitted = jax.jit(
                function,
                static_argnums=numbers,
                donate_argnums=donate,
                out_shardings=out_shardings,
            )
            options = compiler_options(self.target)
            self._programs[key] = jitted.lower(*args, *static).compile(compiler_options=options)
            self.compile_seconds += time.perf_counter() - begin
        return self._programs[key]


@dataclasses.dataclass(frozen=True)
class View:
    """The host's copy of what requests want to know of a state; arrays are NumPy's.

    Attributes:
      tokens: int32 [batch, length], prompt and output.
      lengths: int32 [batch].
      finish: int32 [batch], RUNNING or why the row ended.
      counters: what the rounds did.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    finish: np.ndarray
    counters: Any


@dataclasses.dataclass
class Batch:
    """A batch being decoded, and what the host last saw of it.

    Attributes:
      size: requests; rows past it are padding.
      state: the device's state; replaced, never shared, since its buffers are donated.
      prefill_seconds: reading the prompts.
      compile_seconds: compilation this batch had to wait for.
      decode_seconds: all rounds so far.
    """

    size: int
    state: DecodeState
    _advance: Callable[[DecodeState, int], DecodeState]
    prefill_seconds: float
    compile_seconds: float
    decode_seconds: float = 0.0
    _view: View | None = None

    def advance(self, max_rounds: int) -> None:
        """Decodes for at most `max_rounds` rounds, or until all rows have finished."""
        begin = time.perf_counter()
        self.state = jax.block_until_ready(self._advance(self.state, max_rounds))
        self.decode_seconds += time.perf_counter() - begin
        self._view = None

    def stop(self, rows: Sequence[int]) -> None:
        """Ends rows whose stop string the host has found."""
        finish = self.view.finish.copy()
        finish[list(rows)] = STOP
        sharding = self.state.finish.sharding
        ended = jax.make_array_from_callback(finish.shape, sharding, lambda part: finish[part])
        self.state = dataclasses.replace(self.state, finish=ended)
        self._view = None

    @property
    def view(self) -> View:
        """The state as it is now, copied to the host at the first look."""
        if self._view is None:
            state = self.state
            seen = (state.tokens, state.lengths, state.finish, state.counters)
            self._view = View(*distributed.to_host(seen))
        return self._view

    @property
    def running(self) -> bool:
        """Whether any row still decodes."""
        return bool((self.view.finish == RUNNING).any())


def _pad(requests: Sequence[Request], bucket: Bucket) -> dict[str, np.ndarray]:
    """Left-aligned arrays of the requests; padding rows hold one token and start finished."""
    tokens = np.zeros((bucket.batch, bucket.capacity), np.int32)
    lengths = np.ones((bucket.batch,), np.int32)
    max_lengths = np.ones((bucket.batch,), np.int32)
    stops = np.full((bucket.batch, bucket.stops), -1, np.int32)
    keys = np.zeros((bucket.batch, 2), np.uint32)
    for row, request in enumerate(requests):
        ids = request.prompt_token_ids
        tokens[row, : len(ids)] = ids
        lengths[row], max_lengths[row] = len(ids), request.max_length
        stops[row, : len(request.stop_token_ids)] = request.stop_token_ids
        keys[row] = request.key
    return {
        "tokens": tokens,
        "lengths": lengths,
        "max_lengths": max_lengths,
        "stop_token_ids": stops,
        "keys": keys,
    }


def compiler_options(target: Model) -> dict[str, str | bool] | None:
    """Options that the measured programs want; see benchmarks/LOG.md.

    On CPU, XLA hands float32 products of several rows to YNNPACK, which repacks the weight at
    every call; Eigen's take the time of one row. Products of one row are LLVM's, which takes
    vectors of 256 bits unless told otherwise. For bfloat16 YNNPACK is the only native kernel.
    """
    if target.platform == "cpu" and target.dtype == jnp.float32:
        return {
            "xla_cpu_experimental_ynn_fusion_type": "",
            "xla_cpu_prefer_vector_width": "512",
        }
    return None
