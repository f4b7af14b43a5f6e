"""What sampling and verification add to a round: small all-reduces over the vocabulary's shards.

A place is a distribution that a token is drawn or verified with: one for each draft token, and the
K + 1 of the target, which are computed together. The counts are those of programs compiled for a
TPU v4-16 (libtpu 0.0.42.1, `tests/planning/test_tpu.py`); the compiler joins some.
"""

from spec_jax.planning.cost import Exchange, Weights
from spec_jax.sampling.parameters import SamplingFeatures

GREEDY = 2
"""At each place: the largest logit, and its index."""
DRAWN = 8
"""At each draft token of a batch that samples: softmax, and two races of a draw."""
VERIFIED = 10
"""At the target's places together: softmax, what was drafted, the residual and its draw."""
TOP_K = 32
"""Beside them: a bisection over the bits of a float32."""
TOP_P = 37
"""Likewise, and two softmaxes for top_p and min_p."""


def sampling_exchanges(
    target: Weights, draft: Weights, rows: int, lookahead: int, features: SamplingFeatures
) -> tuple[Exchange, ...]:
    """The all-reduces of a round that are of neither model's calls.

    Penalties and grammars add none.

    Args:
      target: its weights, of which only the shards count.
      draft: likewise.
      rows: of a chip.
      lookahead: draft tokens of a round (K).
      features: what the batch's rows ask for.
    """
    cuts = TOP_K * features.top_k + TOP_P * features.top_p
    drawn, verified = (DRAWN, VERIFIED) if features.random else (GREEDY, GREEDY)
    exchanges = (
        Exchange("drawing", lookahead * (drawn + cuts), 4 * rows, draft.shards("vocab")),
        Exchange(
            "verification", verified + cuts, 4 * rows * (lookahead + 1), target.shards("vocab")
        ),
    )
    return tuple(each for each in exchanges if each.num_chips > 1)
