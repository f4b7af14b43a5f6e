"""What sampling and verification add to a round: small collectives over the vocabulary's shards.

A place is a distribution that a token is drawn or verified with: one for each draft token, and the
K + 1 of the target, which are computed together. The counts were seen in programs compiled for a
TPU v4-16 (libtpu 0.0.42.1, `tests/planning/test_tpu.py`); the compiler joins some.
"""

from spec_jax.planning.cost import Exchange, Weights
from spec_jax.sampling.parameters import SamplingFeatures

GREEDY = 2
"""At each place: the largest logit, and its index."""
SOFTMAX = 4
"""At each place of a batch that samples; none if top-k or top-p bring whole rows together."""
DRAWN = 4
"""At each draft token of a batch that samples: two races of a draw."""
VERIFIED, GATHERED = 2, 2
"""At the target's places together, with `coupled` verification: the sums of a draw and the token of
its block; and all-gathers of the block that each shard would take."""
MOVES = 2
"""All-to-alls of a place's rows for top-k and top-p, there and back."""


def sampling_exchanges(
    target: Weights, draft: Weights | None, rows: int, lookahead: int, features: SamplingFeatures
) -> tuple[Exchange, ...]:
    """The collectives of a round that belong to no call of a model.

    Penalties and grammars add none. Of the weights only the shards count, and None draws no draft;
    `rows` are a chip's.
    """
    softmax = SOFTMAX if features.random and not features.cut else 0
    drawn, verified = (DRAWN, VERIFIED) if features.random else (GREEDY, GREEDY)
    exchanges = []
    for what, turns, count, places, weights in (
        ("drawing", lookahead, drawn + softmax, rows, draft),
        ("verification", 1, verified + softmax, rows * (lookahead + 1), target),
    ):
        if weights is None:
            continue
        shards = weights.shards("vocab")
        exchanges.append(Exchange(what, turns * count, 4 * places, shards))
        if features.random and what == "verification":
            exchanges.append(Exchange(what, GATHERED, 4 * places, shards, "all-gather"))
        if features.cut:
            held = 4 * -(-places // shards) * target.config.vocab_size
            exchanges.append(Exchange(what, turns * MOVES, held, shards, "all-to-all"))
    return tuple(each for each in exchanges if each.num_chips > 1)
