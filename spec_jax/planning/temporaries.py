"""Estimates of what programs take beside weights and caches; only the compiler knows it.

They count the large arrays that live at one time. Estimated and compiled temporaries in MiB, for
models of few layers (libtpu 0.0.42.1; caches for 2,048 tokens of Chinchilla and 8,192 of Llama):

| target, draft, layout, batch | prefill | round |
| --- | --- | --- |
| Chinchilla 70B and 4B, v4-16, 1 | 72, 32 | 119, 31 |
| Chinchilla 70B and 4B, v4-16, 8 | 576, 519 | 191, 124 |
| Llama 8B and 1B, v5e-8, 64 | 688, 277 | 978, 1039 |

So they are mostly too large, since a TPU keeps arrays that are small enough beside its main memory.
"""

from collections.abc import Sequence

from spec_jax.models.attention import MAX_KEY_BLOCK, MAX_SCORES, fastest
from spec_jax.planning.cost import FLOAT32, Cache, Weights


def of_prefill(models: Sequence[tuple[Weights, Cache]], block: int, platform: str) -> int:
    """Bytes of a chunk of `block` tokens of each row, on each chip; the models read in turn."""
    return max(_of_chunk(*each, block, platform) for each in models)


def of_round(
    models: Sequence[tuple[Weights, Cache]],
    drafting: Weights | None,
    lookahead: int,
    platform: str,
) -> int:
    """Bytes of a round of K = `lookahead` draft tokens, on each chip.

    `models` are in memory, the target first; `drafting` has the distributions of drafted tokens.
    """
    target, cache = models[0]
    rows, vocab = cache.rows, target.config.vocab_size
    scored = (lookahead + 1) * vocab // target.shards("vocab")
    drafted = lookahead * vocab // drafting.shards("vocab") if drafting else 0
    # Logits, p and the residual; q and what it is made from; the logit biases.
    numbers = rows * (3 * scored + 2 * drafted + vocab)
    if platform == "cpu":
        return FLOAT32 * numbers
    # A loop keeps embeddings and heads in another layout.
    tables = sum(weights.table + weights.head for weights, _ in models)
    return tables + FLOAT32 * (numbers + max(_widened(*each) for each in models))


def _widened(weights: Weights, cache: Cache) -> int:
    """Keys and values of a layer that `dense` attention reads as float32."""
    kv_heads = weights.config.num_kv_heads // weights.shards("kv_heads")
    return 2 * cache.rows * kv_heads * max(cache.slots) * weights.config.head_dim


def _of_chunk(weights: Weights, cache: Cache, block: int, platform: str) -> int:
    config, tokens = weights.config, cache.rows * block
    heads = weights.heads
    kv_heads = config.num_kv_heads // weights.shards("kv_heads")
    hidden = (1 + config.gated_mlp) * config.mlp_size // weights.shards("mlp")
    # The residual stream, a norm of it, and what attention and MLP add; the MLP's hidden layer, or
    # queries and outputs of the heads.
    streams = tokens * (4 * config.embed_size + max(hidden, 2 * heads * config.head_dim))
    slots = max(cache.slots)
    if fastest(platform, block, slots) == "dense":
        scores = 2 * tokens * heads * slots + _widened(weights, cache)
    else:
        count = heads // kv_heads * block
        scores = 2 * cache.rows * kv_heads * count * min(MAX_KEY_BLOCK, max(1, MAX_SCORES // count))
    return FLOAT32 * (streams + scores)
