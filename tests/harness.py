"""Runs tiny models through the engine, as `LLM` does but without text."""

import functools

import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.decoding.lookahead import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine import Engine, Request
from spec_jax.testing import tiny_model

TARGET, DRAFT = tiny_model(0), tiny_model(1)
METHODS = ("none", "self", "other", "prompt_lookup")
"""`self` drafts with the target itself, `other` with a model of other weights."""


@functools.cache
def shared_engine(method, lookahead=4, verification="token"):
    """An engine of the tests' tiny models; sharing it shares what it has compiled."""
    return make_engine(method, TARGET, DRAFT, lookahead=lookahead, verification=verification)


def make_engine(method, target, draft=None, *, lookahead=4, verification="token", max_len=512):
    drafter = {
        "none": lambda: NoDraft(0),
        "self": lambda: DraftModel(target, lookahead),
        "other": lambda: DraftModel(draft, lookahead),
        "prompt_lookup": lambda: PromptLookup(lookahead, 3),
    }[method]()
    return Engine(target, drafter, Constant(lookahead), verification, max_model_len=max_len)


def request(prompt, params=None, *, stop_token_ids=(), bad_words=(), max_len=512, seed=0):
    params = params or SamplingParams(max_tokens=40)
    return Request(
        prompt_token_ids=prompt,
        sampling=params,
        key=np.array([0, seed], np.uint32),
        stop_token_ids=stop_token_ids,
        max_length=min(len(prompt) + params.max_tokens, max_len),
        bad_words=bad_words,
    )


def finish(batch, *, rounds=10_000):
    while batch.running:
        batch.advance(rounds)
    return batch


def completions(batch, requests):
    """The generated tokens of each request."""
    tokens, lengths = np.asarray(batch.state.tokens), np.asarray(batch.state.lengths)
    return [
        tokens[i, len(each.prompt_token_ids) : lengths[i]].tolist()
        for i, each in enumerate(requests)
    ]


def run(engine, requests, *, rounds=10_000):
    return completions(finish(engine.start(requests), rounds=rounds), requests)
