"""Runs tiny models through the engine, as `LLM` does but without text."""

import functools

import jax.numpy as jnp
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant, Heuristic
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.early_exit import EarlyExit
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.recycle import TokenRecycling
from spec_jax.drafters.suffix import SuffixLookup
from spec_jax.drafters.universal_vocabulary import UniversalVocabulary
from spec_jax.engine.engine import Engine
from spec_jax.engine.methods import Drafting
from spec_jax.engine.requests import Request
from spec_jax.engine.suffix_index import SuffixIndex
from spec_jax.evaluation.decoding import drive as drive
from spec_jax.evaluation.decoding import generated as completions
from spec_jax.evaluation.statistics import pearson
from spec_jax.testing import tiny_model
from tests.feature_drafter import FeatureDrafter

TARGET, DRAFT = tiny_model(0), tiny_model(1)


def _tree(target, draft, lookahead):
    return Drafting(DraftModel(draft, lookahead, num_drafts=3))


def _reduced(target, draft, lookahead):
    """A draft model whose head has lost every third of its outputs."""
    vocab = target.config.vocab_size
    kept = [token for token in range(vocab) if token % 3 != 1]
    columns = np.full(vocab, -1, np.int32)
    columns[kept] = np.arange(len(kept))
    return Drafting(DraftModel(draft.with_outputs(kept), lookahead, columns=jnp.asarray(columns)))


def _lookup_tree(target, draft, lookahead):
    return Drafting(PromptLookup(lookahead, 3, num_drafts=3))


def _suffix(target, draft, lookahead):
    """Looks in one output of another request, which goes on from most pairs of tokens."""
    index = SuffixIndex(capacity=64)
    index.add("", np.random.default_rng(0).integers(0, target.config.vocab_size, 48).tolist())

    def inputs(requests, shape):
        return index.arrays([each.sampling.namespace for each in requests], shape.batch)

    return Drafting(SuffixLookup(lookahead), inputs=inputs)


def _universal_vocabulary(target, draft, lookahead):
    """A drafter of other ids: the target's last three tokens are 0, 3 and 2 of its tokens."""
    vocab, own_vocab = target.config.vocab_size, target.config.vocab_size + 3
    own_ids = np.random.default_rng(0).permutation(own_vocab).astype(np.int32)
    to_drafter = own_ids[:vocab].copy()
    to_drafter[-3:] = -1
    spelling = np.zeros((vocab, 3), np.int32)
    spelling[:, 0] = own_ids[:vocab]
    spelling[-2], spelling[-1, :2] = own_ids[[0, vocab, 0]], own_ids[[vocab + 1, 2]]
    lengths = np.array([1] * (vocab - 3) + [0, 3, 2], np.int32)

    def inputs(requests, shape):
        tokens = np.zeros((shape.batch, 2 * shape.capacity), np.int32)
        own_lengths = np.ones((shape.batch,), np.int32)
        for row, each in enumerate(requests):
            spelt = [spelling[token, : lengths[token]] for token in each.prompt_token_ids]
            ids = np.concatenate(spelt)
            tokens[row, : len(ids)], own_lengths[row] = ids, max(1, len(ids))
        return tokens, own_lengths

    model = tiny_model(7, vocab_size=own_vocab, embed_size=16, num_layers=1)
    arrays = (jnp.asarray(each) for each in (to_drafter, spelling, lengths))
    return Drafting(UniversalVocabulary(model, *arrays, lookahead), inputs=inputs)


def _recycle(target, draft, lookahead):
    """Begins with an output of another request, so that it drafts from the first round on."""
    text = np.random.default_rng(0).integers(0, target.config.vocab_size, 48)

    def inputs(requests, shape):
        return np.tile(text.astype(np.int32), (shape.batch, 1))

    return Drafting(TokenRecycling(lookahead), inputs=inputs)


DRAFTINGS = {
    "none": lambda target, draft, lookahead: Drafting(NoDraft()),
    "self": lambda target, draft, lookahead: Drafting(DraftModel(target, lookahead)),
    "other": lambda target, draft, lookahead: Drafting(DraftModel(draft, lookahead)),
    "tree": _tree,
    "reduced": _reduced,
    "prompt_lookup": lambda target, draft, lookahead: Drafting(PromptLookup(lookahead, 3)),
    "lookup_tree": _lookup_tree,
    "suffix": _suffix,
    "recycle": _recycle,
    "early_exit": lambda target, draft, lookahead: Drafting(EarlyExit(target, lookahead, 1)),
    "universal_vocabulary": _universal_vocabulary,
    "features": lambda target, draft, lookahead: Drafting(FeatureDrafter.random(target, lookahead)),
}
"""How each method is built from a target, a draft model and K: a new drafter's row in the battery.

`self` drafts with the target itself, `other` with a model of other weights, `tree` with three
drafts of it and `reduced` with two thirds of its vocabulary; `lookup_tree` takes three matches.
`features` stands for the drafters that read the target's features (tests/feature_drafter.py).
"""
METHODS = ("none", "self", "other", "prompt_lookup", "early_exit")
"""What the tests of single features run; `other, varying` lets K vary from round to round."""


@functools.cache
def shared_engine(method, lookahead=4, verification="token"):
    """An engine of the tests' tiny models; sharing it shares what it has compiled."""
    return make_engine(method, TARGET, DRAFT, lookahead=lookahead, verification=verification)


def make_engine(
    method,
    target,
    draft=None,
    *,
    lookahead=4,
    policy=None,
    verification="token",
    scoring="block",
    max_len=512,
):
    """An engine of one of `DRAFTINGS`."""
    method, _, varying = method.partition(", ")
    policy = policy or (Heuristic(lookahead, start=2) if varying else Constant(lookahead))
    drafting = DRAFTINGS[method](target, draft, lookahead)
    return Engine(
        target,
        drafting.drafter,
        policy,
        verification,
        scoring=scoring,
        max_model_len=max_len,
        inputs=drafting.inputs,
        host=drafting.host,
    )


def request(
    prompt, params=None, *, stop_token_ids=(), bad_words=(), max_len=512, seed=0, source=None
):
    params = params or SamplingParams(max_tokens=40)
    return Request(
        prompt_token_ids=prompt,
        sampling=params,
        key=np.array([0, seed], np.uint32),
        stop_token_ids=stop_token_ids,
        max_length=min(len(prompt) + params.max_tokens, max_len),
        bad_words=bad_words,
        source=None if source is None else np.array(source, np.int32),
    )


def finish(batch, *, rounds=10_000):
    while batch.running:
        batch.advance(rounds)
    return batch


def run(engine, requests, *, rounds=10_000):
    return completions(finish(engine.start(requests), rounds=rounds), requests)


def chi_square(observed, probabilities):
    """The p-value of counts against exact probabilities."""
    return pearson("", observed, probabilities).p_value
