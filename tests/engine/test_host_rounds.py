"""Rounds that need the host: which masks a draft's tokens get."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from spec_jax import StructuredOutputsParams
from spec_jax.decoding.state import RUNNING
from spec_jax.drafters.base import Draft
from spec_jax.engine.host_rounds import HostRounds
from spec_jax.text.grammar import Grammar
from tests.text.test_grammar import COMPILER, ENDS, ROWS, TOKENIZER, ids_of


@dataclasses.dataclass
class Rows:
    """A state with what the host reads of it."""

    tokens: jnp.ndarray
    lengths: jnp.ndarray
    prompt_lengths: jnp.ndarray
    finish: jnp.ndarray


class Rounds:
    """The compiled pieces of a round: a draft, and the masks that it is verified with."""

    def __init__(self, draft: Draft):
        compiler = SimpleNamespace(put=lambda tree: tree, vocab_size=ROWS)
        self.models, self.draft, self.masks = SimpleNamespace(compiler=compiler), draft, None

    def propose(self, state: Rows) -> tuple[Draft, Rows]:
        return self.draft, state

    def finish(self, state: Rows, draft: Draft, masks: np.ndarray) -> Rows:
        self.masks = masks
        return state


def grammar() -> Grammar:
    return COMPILER.compile(StructuredOutputsParams(choice=["pqx", "pqy", "rsz"]), ENDS)


def test_each_of_several_drafts_is_masked_after_its_own_tokens():
    p, q, r, s, x, y, z = (TOKENIZER.encode(letter)[0] for letter in "pqrsxyz")
    steps = [[p, r], [q, s], [x, z]]  # of two drafts
    draft = Draft(jnp.array([np.ravel(steps)]), None, jnp.array([3]), num_drafts=2)
    rounds, one = Rounds(draft), jnp.array([1])
    state = Rows(jnp.array([[p, 0, 0, 0, 0]]), one, one, jnp.array([RUNNING]))
    HostRounds(rounds, [grammar()], None).advance(state, 1)
    allowed = [ids_of(mask) for mask in rounds.masks[0]]
    assert allowed[:5] == [[p, r], [q], [s], [x, y], [z]]
    assert allowed[5:] == [sorted(ENDS)] * 2
