"""A roofline model of decoding: bytes and collectives of a call, and the least time they take.

Everything here is a *projection* from the data sheet's memory, arithmetic and links, without
software overhead and without any factor fitted to a measurement.
"""

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import DTypeLike

from spec_jax.models.cache import slots_of_layer
from spec_jax.models.model import Model
from spec_jax.planning.abstract import bytes_per_chip, host_bytes_per_chip, parameters_per_chip
from spec_jax.sharding import Chip

TPU_HOP_SECONDS = 1e-6
"""From one chip to the next over a TPU's interconnect (ASTRA-sim's figure for v3)."""
GPU_EXCHANGE_SECONDS = 8e-6
"""A small all-reduce within a node on NVLink; 8 to 30 microseconds are reported."""
FLOAT32 = 4
TPU_FLOAT32_PASSES = 6
"""bfloat16 passes that a float32 product of full precision takes on a TPU."""
MAX_LOOKAHEAD = 16
"""How far `best_lookahead` looks."""


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a call, each among `num_chips` chips.

    Attributes:
      what: the data that is summed or sent.
      bytes: of each on every chip, before sending.
      kind: `all-reduce`, `all-gather` or `all-to-all`.
    """

    what: str
    count: int
    bytes: int
    num_chips: int
    kind: str = "all-reduce"


@dataclass(frozen=True)
class Terms:
    """The parts of a call's time, in seconds.

    Attributes:
      weights: reading the weights from memory.
      cache: reading the key/value cache, all of its capacity.
      compute: arithmetic, which overlaps with reading memory.
      latency: the collectives' latency, independent of their size.
      transfer: bytes of the collectives over the links.
      stream: copying weights from host memory, which overlaps with all of the others.
    """

    weights: float = 0.0
    cache: float = 0.0
    compute: float = 0.0
    latency: float = 0.0
    transfer: float = 0.0
    stream: float = 0.0

    @property
    def total(self) -> float:
        """Memory or arithmetic, whichever takes longer, plus the collectives; or the copies."""
        memory = self.weights + self.cache
        return max(max(memory, self.compute) + self.latency + self.transfer, self.stream)

    def __add__(self, other: "Terms") -> "Terms":
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Terms(*(mine + theirs for mine, theirs in pairs))


@dataclass(frozen=True)
class Cache:
    """A chip's part of a key/value cache: KV slots of a row in each layer, and bytes of each."""

    rows: int
    slots: tuple[int, ...]
    slot_bytes: int

    @property
    def bytes(self) -> int:
        """Of all layers, and the rows' lengths."""
        return self.rows * (sum(self.slots) * self.slot_bytes + 4)

    def bytes_up_to(self, seen: int | None) -> int:
        """Bytes of the first `seen` tokens of each row, or of all."""
        if seen is None:
            return self.bytes
        return self.rows * sum(min(seen, each) for each in self.slots) * self.slot_bytes


class Weights:
    """An abstract model's weights on each chip, which its calls share.

    Attributes:
      dtype: of plain weights.
      bytes: of all weights of a chip.
      streamed: bytes of each block in host memory.
      table: bytes of the embedding.
      head: bytes of the head, 0 if it is tied.
      head_weights: number of weights of the head.
      stacks: bytes of the experts.
      multiplied: number of weights that every token is multiplied with.
    """

    def __init__(self, model: Model):
        config = self.config = model.config
        self.placement, self.dtype = model.placement, model.dtype
        params = model.params
        head, blocks = params["embed" if config.tied_head else "head"], params["blocks"]
        self.bytes = bytes_per_chip(params)
        self.streamed = tuple(host_bytes_per_chip(blocks[i]) for i in range(config.num_layers))
        self.table = bytes_per_chip(params["embed"])
        self.head = 0 if config.tied_head else bytes_per_chip(head)
        self.head_weights = parameters_per_chip(head)
        stacks = [weight for name, weight in model.weights.items() if ".expert_" in name]
        self.stacks = bytes_per_chip(stacks)
        self.multiplied = parameters_per_chip(params)
        if not config.tied_head:
            self.multiplied -= parameters_per_chip(params["embed"])
        if config.experts is not None:
            unused = config.experts.count - config.experts.per_token
            self.multiplied -= parameters_per_chip(stacks) * unused // config.experts.count

    @property
    def held(self) -> int:
        """Bytes in a chip's memory; of the blocks in host memory the two largest at a time."""
        return self.bytes - sum(self.streamed) + sum(sorted(self.streamed)[-2:])

    @functools.cached_property
    def num_shards(self) -> dict[str, int]:
        """The shards of each logical axis that is cut."""
        return {axis: self.placement.num_shards(axis) for axis, _ in self.placement.axes}

    def shards(self, axis: str) -> int:
        """The number of shards of a logical axis."""
        return self.num_shards.get(axis, 1)

    @property
    def heads(self) -> int:
        """Query heads of a chip; for a part of the slots, all that use its key/value heads."""
        axis = "heads" if self.shards("length") == 1 else "kv_heads"
        return self.config.num_heads // self.shards(axis)

    @functools.cached_property
    def sparse_layers(self) -> int:
        """Layers with experts."""
        return sum(layer.mlp == "experts" for layer in self.config.layers)

    def cache(self, batch: int, capacity: int, headroom: int, dtype: DTypeLike) -> Cache:
        """Its key/value cache; arguments like `StateSize`."""
        config, heads = self.config, self.config.num_kv_heads // self.shards("kv_heads")
        slots = (slots_of_layer(layer, capacity, headroom) for layer in config.layers)
        return Cache(
            batch // self.shards("batch"),
            tuple(-(-each // self.shards("length")) for each in slots),
            2 * heads * config.head_dim * jnp.dtype(dtype).itemsize,
        )


@dataclass(frozen=True)
class Call:
    """One call of a model, on each chip.

    Attributes:
      weight_bytes: the weights that a chip holds in its memory; of those in host memory, the two
        largest blocks' worth that it holds at a time.
      host_bytes: the weights that it copies from host memory.
      cache_bytes: its part of the cache.
      weight_bytes_read: the weights it reads; of the embedding only the tokens' rows, and of
        experts as many as the tokens choose on average, if each chooses evenly.
      cache_bytes_read: of the cache.
      flops: floating-point operations.
      exchanges: its collectives.
      dtype: of the weights.
    """

    weight_bytes: int
    host_bytes: int
    cache_bytes: int
    weight_bytes_read: int
    cache_bytes_read: int
    flops: int
    exchanges: tuple[Exchange, ...]
    dtype: jnp.dtype

    @classmethod
    def of(cls, weights: Weights, cache: Cache, tokens: int, *, seen: int | None = None) -> "Call":
        """A call over `tokens` new tokens of each row.

        `seen` are the slots of a row that are read, in a chunk of a prompt, which needs no logits
        either; None reads all.
        """
        config = weights.config
        rows = cache.rows * tokens
        looked_up = rows * config.embed_size * weights.dtype.itemsize
        read, multiplied = weights.bytes, weights.multiplied
        if not config.tied_head:
            read += looked_up - weights.table
        if seen is not None:
            multiplied -= weights.head_weights
            read -= weights.table - looked_up if config.tied_head else weights.head
        if config.experts is not None:
            # The rows of chips beside which the experts lie are gathered for them.
            placement, choosing = weights.placement, rows
            gathered = set(placement.mesh_axes("experts")) & set(placement.mesh_axes("batch"))
            if placement.mesh is not None:
                choosing *= math.prod(placement.mesh.shape[axis] for axis in gathered)
            unread = (1 - config.experts.per_token / config.experts.count) ** choosing
            read -= round(weights.stacks * unread)
        slots = sum(each if seen is None else min(each, seen) for each in cache.slots)
        heads = weights.heads
        scores = rows * heads * config.head_dim * slots
        # Activations are float32; the embedding is looked up in the weights' dtype.
        layers = config.num_layers
        experts = weights.shards("experts") * weights.shards("mlp")

        def summed(*inputs: str) -> int:
            dtype = weights.placement.all_reduce_dtype_of(weights.dtype, *inputs)
            return rows * config.embed_size * dtype.itemsize

        exchanges = (
            Exchange("embedding", 1, looked_up, weights.shards("vocab")),
            *_of_parts(weights, rows * heads),
            Exchange("attention", layers, summed("heads"), weights.shards("heads")),
            Exchange("MLP", layers - weights.sparse_layers, summed("mlp"), weights.shards("mlp")),
            Exchange("experts", weights.sparse_layers, summed("experts", "mlp"), experts),
        )
        return cls(
            weight_bytes=weights.held,
            host_bytes=sum(weights.streamed),
            cache_bytes=cache.bytes,
            weight_bytes_read=read,
            cache_bytes_read=cache.bytes_up_to(seen),
            # A multiplication and an addition for each weight; queries with keys, and values.
            flops=2 * rows * multiplied + 4 * scores,
            exchanges=tuple(each for each in exchanges if each.count and each.num_chips > 1),
            dtype=weights.dtype,
        )

    def terms(self, platform: str | None, chip: Chip) -> Terms:
        """The parts of its time on a chip."""
        passes = TPU_FLOAT32_PASSES if platform == "tpu" and self.dtype == jnp.float32 else 1
        latency, transfer = exchange_seconds(self.exchanges, platform, chip)
        return Terms(
            weights=self.weight_bytes_read / chip.bandwidth,
            cache=self.cache_bytes_read / chip.bandwidth,
            compute=passes * self.flops / chip.flops,
            latency=latency,
            transfer=transfer,
            stream=self.host_bytes / (chip.host or math.inf),
        )


def count_by_kind(exchanges: Iterable[Exchange]) -> dict[str, int]:
    """Kind -> how many there are."""
    counts: Counter[str] = Counter()
    for each in exchanges:
        counts[each.kind] += each.count
    return dict(counts)


def exchanged_bytes(exchanges: Iterable[Exchange]) -> int:
    """Bytes that the exchanges sum or send, on each chip."""
    return sum(each.count * each.bytes for each in exchanges)


def exchange_seconds(
    exchanges: Iterable[Exchange], platform: str | None, chip: Chip
) -> tuple[float, float]:
    """Seconds of latency, and of bytes over the links.

    On a TPU a sum uses the links of all dimensions of the slice, in both directions at once: a part
    of the data begins in each dimension. An all-to-all takes half of an all-reduce's hops, and the
    links in the middle of the longest dimension, of d chips, carry most of it: each of them d / 4
    of what a chip holds.
    """
    latency = transfer = 0.0
    for each in exchanges:
        there_and_back = exchange_latency(platform, chip, each.num_chips)
        # Each byte is sent once to be summed and once to be spread.
        sent = 2 * (each.num_chips - 1) / each.num_chips * each.bytes
        dimensions = _dimensions(chip.topology or "", each.num_chips) if platform == "tpu" else []
        if each.kind == "all-to-all":
            if dimensions:
                there_and_back /= 2
            sent = max(dimensions) / 4 * each.bytes if dimensions else sent / 2
        elif dimensions:
            sent /= 2 * max(1, sum(size > 1 for size in dimensions))
        latency += each.count * there_and_back
        transfer += each.count * sent / chip.link
    return latency, transfer


def exchange_latency(platform: str | None, chip: Chip, num_chips: int) -> float:
    """Seconds of a very small all-reduce, there and back.

    On a TPU the sum is formed along each dimension of the slice in turn and spread again the same
    way, as its compiled programs show, and each step is a hop to the neighbour. Links that close a
    ring are not assumed, since small slices have none. Other platforms are NVLink.
    """
    if platform != "tpu":
        return GPU_EXCHANGE_SECONDS
    hops = sum(size - 1 for size in _dimensions(chip.topology or "", num_chips))
    return 2 * hops * TPU_HOP_SECONDS


def _dimensions(topology: str, num_chips: int) -> list[int]:
    """The extent in each dimension of a slice of `num_chips` neighbouring chips."""
    parts = []
    for size in reversed([int(size) for size in re.findall(r"\d+", topology.partition(":")[2])]):
        parts.append(math.gcd(num_chips, size))
        num_chips //= parts[-1]
    return [*parts, num_chips]


def tokens_per_round(acceptance: float, lookahead: int) -> float:
    """Tokens that a round emits on average if each draft token is accepted with this probability.

    Leviathan et al. 2023 (arXiv 2211.17192), equation 1.
    """
    return sum(acceptance**i for i in range(lookahead + 1))


def speedup(
    acceptance: float, lookahead: int, plain: float, round_seconds: Callable[[int], float]
) -> float:
    """How much faster than plain decoding rounds of `lookahead` draft tokens are.

    `plain` is the seconds of a target call, and `round_seconds` gives the seconds of a round for K.
    """
    return tokens_per_round(acceptance, lookahead) * plain / round_seconds(lookahead)


def best_lookahead(acceptance: float, plain: float, round_seconds: Callable[[int], float]) -> int:
    """The K with the largest speed-up; arguments like `speedup`."""
    return max(
        range(1, MAX_LOOKAHEAD + 1),
        key=lambda k: speedup(acceptance, k, plain, round_seconds),
    )


def _of_parts(weights: Weights, rows: int) -> tuple[Exchange, ...]:
    """What attention over caches that are cut by length exchanges, for `rows` of queries."""
    layers, parts = weights.config.num_layers, weights.shards("length")
    size = rows * weights.config.head_dim * FLOAT32
    gathered = weights.shards("heads") > weights.shards("kv_heads")
    return (
        Exchange("queries", layers * gathered, size // parts, parts, "all-gather"),
        Exchange("best scores", layers, rows * FLOAT32, parts),
        Exchange("sums of values", layers, size + rows * FLOAT32, parts),
    )
