"""Whisper's rules of timestamps at every drafted place, against the rules as OpenAI states them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.sampling.parameters import BatchSampling
from spec_jax.sampling.processors import MAX_INITIAL_TIMESTAMP, History, process

TEXT, END, NO_TIMESTAMPS = 12, 12, 13
"""Ids of text, the end of the text, the token that asks for none, and then timestamps."""
FIRST, VOCAB = 14, 14 + 70
PLACES, ROWS = 5, 12
PROMPT = [3, NO_TIMESTAMPS - 1, 5]


def expected(logits, said):
    """The rules for one place, as `openai/whisper` applies them to the tokens `said` so far."""
    logits = logits.astype(np.float64).copy()
    logits[NO_TIMESTAMPS] = -np.inf
    last = len(said) >= 1 and said[-1] >= FIRST
    one_before = len(said) < 2 or said[-2] >= FIRST
    if last and one_before:
        logits[FIRST:] = -np.inf
    elif last:
        logits[:END] = -np.inf
    times = [token for token in said if token >= FIRST]
    if times:
        logits[FIRST : times[-1] + (0 if last and not one_before else 1)] = -np.inf
    if not said:
        logits[:FIRST] = -np.inf
        logits[FIRST + MAX_INITIAL_TIMESTAMP + 1 :] = -np.inf
    with np.errstate(divide="ignore"):
        mass = np.log(np.exp(logits[FIRST:]).sum())
    if mass > logits[:FIRST].max():
        logits[:FIRST] = -np.inf
    return logits


def conversation(random, length):
    """Tokens that obey the rules: text between timestamps, in pairs, that do not go back."""
    said, time = [FIRST + int(random.integers(6))], 0
    while len(said) < length:
        said += random.integers(0, TEXT, random.integers(1, 4)).tolist()
        time = max(time, said[0] - FIRST) + int(random.integers(1, 5))
        said += [FIRST + time] * 2
    return said[:length]


class Case:
    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.lengths = random.integers(0, 16, ROWS)
        self.lengths[:2] = 0, 1
        self.texts = [conversation(random, length + PLACES - 1) for length in self.lengths]
        self.logits = random.normal(0, 2, (ROWS, PLACES, VOCAB)).astype(np.float32)
        # Timestamps are due at some places, and at others not.
        self.logits[:, :, FIRST:] += random.choice([-6, -2, 2], (ROWS, PLACES, 1))
        self.first = [FIRST] * ROWS

    def context(self, row, place):
        return self.texts[row][: self.lengths[row] + place]

    def processed(self):
        pairs = list(zip(self.texts, self.lengths, strict=True))
        known = [PROMPT + text[:length] for text, length in pairs]
        tokens = np.zeros((ROWS, 24), np.int32)
        for row, ids in enumerate(known):
            tokens[row, : len(ids)] = ids
        drafted = [text[length:] for text, length in pairs]
        sampling = BatchSampling.stack(
            [SamplingParams()] * ROWS, VOCAB, [[END]] * ROWS, timestamps=self.first
        )
        return np.asarray(
            _processed(
                jnp.asarray(self.logits),
                sampling,
                jnp.asarray(tokens),
                jnp.asarray(self.lengths + len(PROMPT), jnp.int32),
                jnp.asarray(drafted, jnp.int32).reshape(ROWS, PLACES - 1),
            )
        )


@jax.jit
def _processed(logits, sampling, tokens, lengths, drafted):
    prompts = jnp.full_like(lengths, len(PROMPT))
    return process(logits, sampling, History.of(tokens, lengths, prompts, sampling), drafted)


@pytest.mark.parametrize("seed", range(20))
def test_every_drafted_place_obeys_openais_rules(seed):
    case = Case(seed)
    found, due = case.processed(), 0
    for row in range(ROWS):
        for place in range(PLACES):
            said = case.context(row, place)
            rules = expected(case.logits[row, place], said)
            np.testing.assert_array_equal(np.isfinite(found[row, place]), np.isfinite(rules), said)
            kept = np.isfinite(rules)
            np.testing.assert_array_equal(
                found[row, place, kept], case.logits[row, place, kept], said
            )
            due += bool(said) and said[-1] < FIRST and not kept[:FIRST].any()
    assert 0 < due < ROWS * PLACES


def test_rows_without_timestamps_pass_bit_for_bit():
    case = Case(0)
    case.first[::2] = [-1] * (ROWS // 2)
    np.testing.assert_array_equal(case.processed()[::2], case.logits[::2])


@pytest.mark.torch
@pytest.mark.parametrize("seed", range(5))
def test_every_drafted_place_is_as_in_transformers(seed):
    import torch
    from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

    told = types.SimpleNamespace(
        no_timestamps_token_id=NO_TIMESTAMPS,
        eos_token_id=END,
        bos_token_id=END,
        max_initial_timestamp_index=MAX_INITIAL_TIMESTAMP,
    )
    theirs = WhisperTimeStampLogitsProcessor(told, begin_index=len(PROMPT))
    case = Case(seed)
    found = case.processed()
    for row in range(ROWS):
        for place in range(PLACES):
            said = case.context(row, place)
            logits = torch.tensor(case.logits[row, place][None])
            rules = theirs(torch.tensor([PROMPT + said]), logits)[0].numpy()
            np.testing.assert_array_equal(found[row, place], rules, str(said))
