"""What is sampled with drafts of another tokenizer has the target's distribution."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.host_draft import HostDraft
from spec_jax.drafters.universal_vocabulary import UniversalVocabulary
from spec_jax.engine.engine import Engine
from spec_jax.engine.universal_text import UniversalText
from spec_jax.testing import ReferenceDecoder, tiny_model
from spec_jax.text.tokenizer import Tokenizer
from spec_jax.text.translation import TextTranslator
from spec_jax.text.vocabulary import VocabularyMap
from tests.decoding.test_sampled import P_VALUE, chi_square
from tests.harness import completions, finish, request
from tests.often import often

ROWS = {"universal_vocabulary": 16384, "universal_text": 4096}  # the host translates each
LENGTH = 3
SETTINGS = {
    "plain": SamplingParams(max_tokens=LENGTH, temperature=1.0),
    "cool": SamplingParams(
        max_tokens=LENGTH, temperature=0.7, top_p=0.9, repetition_penalty=1.3, logit_bias={2: 1.0}
    ),
}


def bpe(*merges: str) -> Tokenizer:
    """Letters, and tokens of two halves: `ab+c` is `abc`."""
    pairs = [tuple(merge.split("+")) for merge in merges]
    tokens = ["c", "b", "a", "d", *(left + right for left, right in pairs)]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=pairs))
    backend.decoder = decoders.Fuse()
    return Tokenizer(backend, eos_token_ids=[])


OURS, THEIRS = bpe("a+b", "c+d", "b+c", "d+a"), bpe("b+c", "a+bc", "d+d", "a+d", "ad+c", "d+a")
VOCAB = OURS.vocab_size
TARGET = tiny_model(0, vocab_size=VOCAB, embed_size=16, num_layers=1)
DRAFT = tiny_model(1, vocab_size=THEIRS.vocab_size, embed_size=16, num_layers=1)
PROMPT = OURS.encode("abcda")


def universal_vocabulary() -> Engine:
    found = VocabularyMap.between(
        OURS,
        THEIRS,
        target_vocab_size=VOCAB,
        drafter_vocab_size=THEIRS.vocab_size,
        target_name="target",
        drafter_name="draft",
    )
    assert 0 < found.coverage < 1 and found.spelling_lengths.max() > 1
    own = TextTranslator(OURS, THEIRS).encode_prompt(PROMPT)

    def prompts(requests, bucket):
        tokens = np.zeros((bucket.batch, 2 * bucket.capacity), np.int32)
        tokens[:, : len(own)] = own
        return tokens, np.full((bucket.batch,), len(own), np.int32)

    drafter = UniversalVocabulary(
        DRAFT,
        jnp.asarray(found.to_drafter),
        jnp.asarray(np.maximum(found.spelling, 0)),
        jnp.asarray(found.spelling_lengths),
        LENGTH,
    )
    return Engine(TARGET, drafter, Constant(LENGTH), max_model_len=256, inputs=prompts)


def universal_text() -> Engine:
    host = functools.partial(UniversalText, DRAFT, TextTranslator(OURS, THEIRS), LENGTH)
    return Engine(TARGET, HostDraft(LENGTH), Constant(LENGTH), max_model_len=256, host=host)


ENGINES = {"universal_vocabulary": universal_vocabulary(), "universal_text": universal_text()}


@pytest.mark.parametrize("setting", often(SETTINGS, ["cool"]))
@pytest.mark.parametrize("method", often(ENGINES, ["universal_text"]))
def test_the_first_tokens_have_the_targets_joint_distribution(method, setting):
    params = SETTINGS[setting]
    requests = [request(PROMPT, params, seed=i, max_len=256) for i in range(ROWS[method])]
    batch = finish(ENGINES[method].start(requests))
    counters = batch.view.counters
    assert 0 < counters.accepted.sum() < counters.drafted.sum()
    rows = completions(batch, requests)
    observed = np.zeros((VOCAB,) * LENGTH)
    np.add.at(observed, tuple(np.array(rows).T), 1)
    joint = ReferenceDecoder(TARGET).joint(PROMPT, LENGTH, params)
    assert chi_square(observed, joint) > P_VALUE
    for axes in [(1, 2), (0, 2), (0, 1)]:
        assert chi_square(observed.sum(axes), joint.sum(axes)) > P_VALUE
