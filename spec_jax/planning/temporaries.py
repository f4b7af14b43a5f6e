"""Estimates of what programs take beside weights and caches; only the compiler knows it.

They count the large arrays that live at one time. Against programs of libtpu 0.0.42.1, see
`tests/planning/test_tpu.py`.
"""

from spec_jax.models.attention import KEY_BLOCK, SCORES, fastest
from spec_jax.planning.cost import Cache, Weights

FLOAT32 = 4


def of_prefill(
    weights: tuple[Weights, Weights], caches: tuple[Cache, Cache], block: int, platform: str
) -> int:
    """Bytes of a chunk of `block` tokens of each row, on each chip; the models read in turn."""
    return max(
        _of_chunk(each, cache, block, platform) for each, cache in zip(weights, caches, strict=True)
    )


def of_round(target: Weights, draft: Weights, rows: int, lookahead: int) -> int:
    """Bytes of a round's logits and probabilities, on each chip, and of the rows' logit biases.

    Args:
      target: its weights, of which only the shards count.
      draft: likewise.
      rows: of a chip.
      lookahead: draft tokens of a round (K).
    """
    vocab = target.config.vocab_size
    scored = (lookahead + 1) * vocab // target.shards("vocab")
    drafted = lookahead * vocab // draft.shards("vocab")
    # Logits, p and the residual; q and what it is made from.
    return FLOAT32 * rows * (3 * scored + 2 * drafted + vocab)


def _of_chunk(weights: Weights, cache: Cache, block: int, platform: str) -> int:
    config, tokens = weights.config, cache.rows * block
    heads = config.num_heads // weights.shards("heads")
    kv_heads = config.num_kv_heads // weights.shards("kv_heads")
    hidden = (1 + config.gated_mlp) * config.mlp_size // weights.shards("mlp")
    # The residual stream, a norm of it, and what attention and MLP add; the MLP's hidden layer, or
    # queries and outputs of the heads.
    streams = tokens * (4 * config.embed_size + max(hidden, 2 * heads * config.head_dim))
    slots = max(cache.slots)
    if fastest(platform, block, slots) == "dense":
        scores = 2 * tokens * heads * slots + 2 * cache.rows * kv_heads * slots * config.head_dim
    else:
        count = heads // kv_heads * block
        scores = 2 * cache.rows * kv_heads * count * min(KEY_BLOCK, max(1, SCORES // count))
    return FLOAT32 * (streams + scores)
