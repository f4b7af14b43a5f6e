"""The static shapes of a batch: what programs are compiled for."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from spec_jax.sampling.parameters import SamplingFeatures

NO_FEATURES = SamplingFeatures()
MIN_CAPACITY = 256
MIN_BLOCK, MAX_BLOCK = 32, 512
CPU_BLOCK = 128
"""The largest block on CPU, where time grows with the tokens of a block, padding included."""
CPU_TOKENS_A_BLOCK = 8
"""How many tokens take as long on CPU as a block does beside its tokens."""
TOKENS_AT_ONCE = 256
"""Tokens that an accelerator reads in about the time of one, because it reads its weights once.

Prompts of entering rows are read together up to this many. On CPU the time grows with the tokens.
"""
SHORT_PROMPT = 512
"""Tokens of a prompt that joins a batch in rows of this capacity, a multiple of every block."""
CHUNK_BYTES = 2**27
"""Bytes that the residual stream of what prefill reads at a time may take on a device."""
MIN_CHUNK = 64
"""A chunk of fewer tokens of a row would be attended to densely, see `attention.fastest`."""


@dataclasses.dataclass(frozen=True)
class BatchShape:
    """The static shapes of a batch; with its name, the key of a compiled program.

    All sizes come from ladders of coarse steps, so that few programs exist.

    Attributes:
      batch: rows: a power of two, or the next multiple of the batch's num_shards in the layout.
      capacity: tokens a row has room for, K + 1 past its end included: a power of two, or the
        whole context.
      block: tokens of a prompt that are read at a time, a power of two; see `prompt_block`.
      stops: stop tokens a row has room for.
      bad_words: bad words a row has room for, and tokens of each.
      features: the steps of sampling that some row needs.
      logprobs: how many of the likeliest tokens are kept beside each one; None if no
        log-probabilities are.
      prompt_logprobs: whether log-probabilities of prompts are kept too.
      source: the shape of a padded source; empty without an encoder.
      ring_block: the block that ring caches have room for; 0 if no cache depends on a block.
    """

    batch: int
    capacity: int
    block: int
    stops: int = 8
    bad_words: tuple[int, int] = (64, 8)
    features: SamplingFeatures = NO_FEATURES
    logprobs: int | None = None
    prompt_logprobs: bool = False
    source: tuple[int, ...] = ()
    ring_block: int = 0

    def __or__(self, other: "BatchShape") -> "BatchShape":
        """The smallest shape that holds rows of both; rings keep the block of the first."""
        block = self.ring_block or max(self.block, other.block)
        logprobs = [each for each in (self.logprobs, other.logprobs) if each is not None]
        return BatchShape(
            batch=max(self.batch, other.batch),
            capacity=max(self.capacity, other.capacity),
            block=block,
            stops=max(self.stops, other.stops),
            bad_words=_largest(self.bad_words, other.bad_words),
            features=self.features | other.features,
            logprobs=max(logprobs, default=None),
            prompt_logprobs=self.prompt_logprobs or other.prompt_logprobs,
            source=_largest(self.source, other.source) if self.source else other.source,
            ring_block=self.ring_block,
        )

    @property
    def of_prefill(self) -> "BatchShape":
        """The part that decides how prompts are read: all but the parameters of sampling."""
        return dataclasses.replace(self, stops=0, bad_words=(0, 0), features=NO_FEATURES)

    @property
    def of_rounds(self) -> "BatchShape":
        """The part that decides how rounds are decoded: all but how prompts are read."""
        return dataclasses.replace(self, block=0, prompt_logprobs=False)

    @property
    def of_rows(self) -> "BatchShape":
        """The part that decides how rows are moved: the shapes of all arrays."""
        return dataclasses.replace(self.of_rounds, features=NO_FEATURES)


def _largest(one: tuple[int, ...], other: tuple[int, ...]) -> tuple:
    return tuple(map(max, one, other)) if other else one


def power_of_two(least: int, low: int = 1) -> int:
    """The smallest power of two that is at least `least` and `low`."""
    return max(low, 1 << (least - 1).bit_length() if least > 1 else 1)


def prompt_block(platform: str, longest: int, rows: int, embed_size: int) -> int:
    """Tokens of each prompt that prefill reads at a time, a power of two.

    On CPU it is the block that reads the longest prompt fastest, padding included. It is smaller
    the more rows are read together: what a chunk takes beside the caches grows with both, but not
    with the capacity, since the scores of `blocked` attention are bounded on their own.

    Args:
      platform: of the target.
      longest: tokens of the longest prompt.
      rows: rows that a device reads together.
      embed_size: width of the residual stream, which is float32.
    """
    block = min(power_of_two(longest - 1, MIN_BLOCK), MAX_BLOCK)
    if platform == "cpu":
        sizes = [MIN_BLOCK]
        while sizes[-1] < CPU_BLOCK:
            sizes.append(2 * sizes[-1])
        block = min(sizes, key=lambda size: -(-(longest - 1) // size) * (size + CPU_TOKENS_A_BLOCK))
    while block > MIN_CHUNK and 4 * rows * block * embed_size > CHUNK_BYTES:
        block //= 2
    return block


def tokens_between_rounds(platform: str) -> int:
    """Tokens of each shard's prompts that are read between rounds; one block may have more."""
    return CPU_BLOCK if platform == "cpu" else TOKENS_AT_ONCE


def source_shape(sources: Sequence[np.ndarray | None]) -> tuple[int, ...]:
    """The shape that the sources of requests are padded to; empty if there are none."""
    shapes = [source.shape for source in sources if source is not None]
    longest = max((shape[0] for shape in shapes), default=0)
    if not shapes or len(shapes[0]) == 2:
        return shapes[0] if shapes else ()
    return (power_of_two(longest, MIN_BLOCK),)
