"""Drafting methods, one per file, behind the protocol in `base`; and the parts of a drafter.

A drafter outside the package needs no other names (docs/drafter.md). It is a `pytree` and a
subclass of `Drafter`. Its `propose` returns a `Draft`, whose `probs` are exactly the distributions
that the tokens were drawn from: `probabilities` makes them from logits with the request's
temperature, truncation, penalties and bans; `draw` draws tokens from them; `autoregress` does both
token by token.
"""

from spec_jax.drafters.autoregressive import autoregress
from spec_jax.drafters.base import (
    Committed,
    Context,
    Draft,
    Drafter,
    DrafterPrompt,
    PartialForward,
    PromptBlock,
)
from spec_jax.pytree import pytree, static
from spec_jax.sampling.draw import draw
from spec_jax.sampling.probabilities import probabilities
from spec_jax.sampling.processors import History

__all__ = [
    "Committed",
    "Context",
    "Draft",
    "Drafter",
    "DrafterPrompt",
    "History",
    "PartialForward",
    "PromptBlock",
    "autoregress",
    "draw",
    "probabilities",
    "pytree",
    "static",
]
