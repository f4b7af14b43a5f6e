"""Grammars under speculation: what is drafted never lets anything through."""

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.decoding.state import ERROR, LENGTH, STOP
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import Request
from spec_jax.testing import tiny_model
from tests.grammars import random_grammars
from tests.harness import completions, drive, finish, request
from tests.often import often
from tests.text.test_grammar import COMPILER, ENDS, ROWS, TOKENIZER

TARGET = tiny_model(0, vocab_size=ROWS, embed_size=16, num_layers=1)
LOOKAHEAD, TOKENS, BATCH = 3, 96, 50
# The draft model is the target, but knows no grammar; what is likely is sometimes allowed.
LIKELY = {i: 6.0 for text in '{}[]":,-0123456789abctruefalsn' for i in TOKENIZER.encode(text)}
METHODS = ("draft_model", "draft_model as a tree", "prompt_lookup")
PROMPT = TOKENIZER.encode('{"a": true, "b": [1, 2], "c": "ab"} abc {"a":"abc","b":"é"}')


@functools.cache
def engine_of(method: str) -> Engine:
    drafts = 3 if method.endswith("tree") else 1
    drafter = {
        "none": lambda: NoDraft(0),
        "draft_model": lambda: DraftModel(TARGET, LOOKAHEAD, drafts),
        "prompt_lookup": lambda: PromptLookup(LOOKAHEAD, 3),
    }[method.split()[0]]()
    return Engine(TARGET, drafter, Constant(drafter.lookahead), "token", max_model_len=256)


def row(params: dict, seed: int) -> Request:
    """A request whose grammar starts afresh; odd seeds are sampled."""
    sampling = SamplingParams(
        max_tokens=TOKENS,
        temperature=seed % 2,
        logit_bias=LIKELY,
        structured_outputs=params or None,
    )
    grammar = COMPILER.compile(sampling.structured_outputs, ENDS) if params else None
    made = request(PROMPT, sampling, stop_token_ids=ENDS, max_len=256, seed=seed)
    return dataclasses.replace(made, grammar=grammar)


def decode(method: str, requests) -> tuple[list[list[int]], np.ndarray, int]:
    """Their tokens, why they ended, and how many drafted tokens were kept."""
    batch = finish(engine_of(method).start(requests))
    kept = int(batch.view.counters.accepted[: len(requests)].sum())
    return completions(batch, requests), batch.view.finish, kept


def violations(method: str, grammars) -> tuple[list[str], int, int]:
    """What is wrong, how many rows ended whole, and how many drafted tokens were kept."""
    wrong, whole, kept = [], 0, 0
    numbered = enumerate(grammars)
    while several := list(itertools.islice(numbered, BATCH)):
        requests = [row(each.params, i) for i, each in several]
        tokens, ends, accepted = decode(method, requests)
        kept += accepted
        for (i, each), made, generated, end in zip(several, requests, tokens, ends, strict=False):
            text = TOKENIZER.decode([t for t in generated if t not in ENDS])
            if end == STOP:
                whole += 1
                right = each.accepts(text)
            else:
                right = end == LENGTH and is_viable(made.sampling, generated)
            if not right:
                wrong.append(f"{i}: {each.params} {text!r} {end}")
    return wrong, whole, kept


def is_viable(sampling: SamplingParams, generated: list[int]) -> bool:
    """Whether a separate grammar reads the tokens and knows how to go on."""
    grammar = COMPILER.compile(sampling.structured_outputs, ENDS)
    grammar.advance(generated)
    return grammar.error is None and bool(grammar.masks(()).any())


@pytest.mark.parametrize("method", often(METHODS, [*METHODS][:1]))
def test_random_grammars_are_never_violated(method):
    grammars = random_grammars(BATCH, seed=METHODS.index(method))
    wrong, whole, kept = violations(method, grammars)
    assert wrong == [] and whole > 0.9 * BATCH and kept > BATCH / 5


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS)
def test_a_thousand_random_grammars_are_never_violated(method):
    wrong, whole, kept = violations(method, random_grammars(1000, seed=7))
    print(f"{method}: {whole} of 1000 ended whole, {kept} drafted tokens kept")
    assert wrong == [] and whole > 900 and kept > 200


@pytest.mark.slow
@pytest.mark.parametrize("method", often(METHODS, [*METHODS][:1]))
def test_rows_with_a_grammar_join_and_leave_beside_rows_without(method):
    random = np.random.default_rng(5)
    several = [each.params if i % 3 else {} for i, each in enumerate(random_grammars(9, seed=5))]

    def rows():  # grammars advance with their rows
        return [row(params, i) for i, params in enumerate(several)]

    expected = [drive(engine_of(method), [each], 1, max)[0] for each in rows()]
    for _ in range(2):
        choose = lambda low, high: int(random.integers(low, high + 1))  # noqa: E731
        assert drive(engine_of(method), rows(), 4, choose) == expected


@functools.cache
def greedy(method: str, free: int) -> list[list[int]]:
    """Tokens of greedy rows with grammars, and of some without after them."""
    several = [each.params for each in random_grammars(40, seed=3)] + [{}] * free
    found, ends, _ = decode(method, [row(params, 2 * i) for i, params in enumerate(several)])
    assert ERROR not in ends
    return found


@pytest.mark.parametrize("method", often(METHODS, METHODS[:1]))
def test_greedy_tokens_are_plain_decodings(method):
    """With and without neighbours that have no grammar; the batches share their programs."""
    assert greedy("none", 4)[:40] == greedy("none", 0)
    for free in (0, 4):
        assert greedy(method, free) == greedy("none", free)
