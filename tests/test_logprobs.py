"""Log-probabilities are the target's own, whatever drafts and however tokens are drawn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, ConfigError, Layout, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints import Checkpoint
from spec_jax.decoding.logprobs import Logprobs
from spec_jax.decoding.prefill import LOGITS_AT_ONCE
from spec_jax.engine.request_builder import RequestBuilder
from spec_jax.engine.requests import RequestInput
from spec_jax.models.model import Model
from spec_jax.testing import tiny_model
from spec_jax.text.tokenizer import Tokenizer
from tests.checkpoints.tiny import TOKENS, byte_tokenizer, write_directory
from tests.often import often

PROMPTS = ["the inn in the", "the end", "an inn", "the end of the end"]
METHODS = {
    "none": {"method": "none"},
    "prompt_lookup": {"method": "prompt_lookup"},
    "tree": {"method": "prompt_lookup", "num_drafts": 3, "num_speculative_tokens": 3},
    "prefix_batch": {"method": "prompt_lookup", "scoring": "prefix_batch"},
    "early_exit": {"method": "early_exit", "early_exit_layers": 1},
    "confidence": {
        "method": "early_exit",
        "early_exit_layers": 1,
        "draft_length_policy": "confidence",
        "verification": "block",
    },
    "suffix": {"method": "suffix"},
    "recycle": {"method": "recycle"},
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """Two rows at a time, so that others join."""
    model = write_directory(tmp_path_factory.mktemp("model") / "tiny")
    return LLM(model, max_num_seqs=2, dtype="float32")


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    top = logits.max(-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def teacher_forced(llm, ids):
    """What the target says after each token of a text that it reads at once, in float64."""
    padded = np.zeros((1, llm.max_model_len), np.int32)
    padded[0, : len(ids)] = ids
    return log_softmax(_score(llm.engine.target.unpacked(), padded)[: len(ids)])


@jax.jit
def _score(target, tokens):
    return target.score(tokens, target.new_cache(*tokens.shape))[0][0]


def check_places(llm, token_ids, places, wanted, count):
    assert len(places) == len(token_ids) == len(wanted)
    for token, found, row in zip(token_ids, places, wanted, strict=True):
        assert abs(found[token].logprob - row[token]) < 1e-4
        likelier = row > row[token]
        near = abs(row - row[token]) < 1e-4
        assert likelier[~near].sum() < found[token].rank <= (likelier | near).sum()
        by_rank = sorted(found.values(), key=lambda logprob: logprob.rank)[:count]
        top = np.sort(row)[::-1][:count]
        np.testing.assert_allclose([logprob.logprob for logprob in by_rank], top, atol=1e-4)
        assert found[token].decoded_token == llm.tokenizer.decode([token], False)


def check(llm, output, count):
    for each in output.outputs:
        rows = teacher_forced(llm, [*output.prompt_token_ids, *each.token_ids])
        wanted = rows[len(output.prompt_token_ids) - 1 : -1]
        check_places(llm, each.token_ids, each.logprobs, wanted, count)
        total = sum(row[token] for row, token in zip(wanted, each.token_ids, strict=True))
        assert abs(each.cumulative_logprob - total) < 1e-3


def check_prompt(llm, output, count):
    first, *places = output.prompt_logprobs
    assert first is None
    ids = output.prompt_token_ids
    check_places(llm, ids[1:], places, teacher_forced(llm, ids)[:-1], count)


@pytest.mark.parametrize("temperature", often([0.0, 1.2], [1.2]))
@pytest.mark.parametrize("method", often(METHODS, ["tree"]))
def test_they_are_the_targets(llm, method, temperature):
    """Also under penalties and bans, of which they know nothing."""
    params = SamplingParams(
        max_tokens=12,
        temperature=temperature,
        repetition_penalty=1.4,
        allowed_token_ids=range(2, 200),
        logprobs=3,
        seed=5,
        n=2,
    )
    speculative = llm.with_speculation(SpeculativeConfig(**METHODS[method]))
    for output in speculative.generate(PROMPTS, params):
        assert [each.index for each in output.outputs] == [0, 1]
        assert len({each.token_ids for each in output.outputs}) == (2 if temperature else 1)
        check(llm, output, 3)


@pytest.mark.slow
def test_on_a_mesh(llm, tmp_path):
    sharded = LLM(write_directory(tmp_path / "tiny"), layout=Layout.tensor_parallel(2))
    sharded = sharded.with_speculation(SpeculativeConfig(method="prompt_lookup"))
    check(llm, sharded.generate(PROMPTS[0], SamplingParams(max_tokens=8, logprobs=2))[0], 2)


@pytest.mark.slow
def test_rows_with_and_without(llm):
    params = [SamplingParams(max_tokens=6, logprobs=count) for count in (None, 0, 5, None)]
    found = llm.generate(PROMPTS, params)
    assert [each.outputs[0].logprobs is None for each in found] == [True, False, False, True]
    assert {len(place) for place in found[1].outputs[0].logprobs} == {1}
    assert {len(place) for place in found[2].outputs[0].logprobs} <= {5, 6}
    plain = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert [each.token_ids for each in plain] == [each.token_ids for each in found]
    assert plain[0].outputs[0].cumulative_logprob is None


LONG = "the end of the end " * 7
"""A prompt of several blocks, after which rows with short prompts read their last one again."""


@pytest.mark.parametrize("method", often(METHODS, ["tree"]))
def test_those_of_prompts_are_the_targets(llm, method):
    """They change nothing else, and rows beside them that want none get none."""
    speculation = SpeculativeConfig(**METHODS[method])
    speculative = llm.with_speculation(speculation)
    free = SamplingParams(max_tokens=8, temperature=1.2, top_k=5, logprobs=1, seed=5, n=2)
    asks = dataclasses.replace(free, prompt_logprobs=3)
    prompts = ["an", "the inn in the", LONG, "the end"]
    found = speculative.generate(prompts, [asks, free, asks, asks])
    assert found[1].prompt_logprobs is None
    for output in (found[0], *found[2:]):
        check_prompt(llm, output, 3)
    for output in found:
        check(llm, output, 1)
    # A new one, since method suffix drafts from what it has generated before.
    same = llm.with_speculation(speculation).generate(prompts, free)
    assert [each.outputs[1].token_ids for each in same] == [
        each.outputs[1].token_ids for each in found
    ]


def test_a_prompt_that_fills_the_context(llm):
    """The last place of its last block is where the caches end."""
    ids = np.random.default_rng(0).integers(3, 200, llm.max_model_len - 1).tolist()
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    check_prompt(llm, output, 0)
    assert output.as_dict()["prompt_logprobs"][0] is None


@pytest.mark.slow
def test_those_of_prompts_on_a_mesh(llm, tmp_path):
    sharded = LLM(write_directory(tmp_path / "tiny"), layout=Layout.tensor_parallel(2))
    for output in sharded.generate(["an", LONG], SamplingParams(max_tokens=2, prompt_logprobs=2)):
        check_prompt(llm, output, 2)


def test_only_few_logits_of_a_prompt_are_made_at_once(llm, monkeypatch):
    seen = []

    def logits(model, x, num_tokens=None, whole=Model.logits):
        seen.append(x.shape[1])
        return whole(model, x, num_tokens)

    monkeypatch.setattr(Model, "logits", logits)
    fresh = llm.with_speculation(SpeculativeConfig())
    ids = fresh.tokenizer.encode(LONG)
    assert len(ids) > 2 * LOGITS_AT_ONCE
    fresh.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert max(seen) == LOGITS_AT_ONCE


def test_the_prompt_of_an_encoder_has_none_and_a_sound_is_never_cut():
    model = tiny_model(vocab_size=len(TOKENS), encoder_layers=1)
    tokenizer = Tokenizer(byte_tokenizer(), eos_token_ids=[0])
    builder = RequestBuilder(Checkpoint(model, tokenizer, (0,), "tiny"), 64, 0)
    with pytest.raises(ConfigError, match="prompt_logprobs is 1, but an encoder reads"):
        builder.request([5, 6], SamplingParams(prompt_logprobs=1), 0)
    start = RequestInput([1], source=np.zeros((4,), np.int32))
    with pytest.raises(ConfigError, match="truncate_prompt_tokens is 1, but audio"):
        builder.request(start, SamplingParams(truncate_prompt_tokens=1), 0)


@pytest.mark.parametrize("drafts", [1, 3])
def test_of_a_large_vocabulary(drafts):
    """Against float64, at the place of the draft that was kept."""
    random = np.random.default_rng(0)
    vocab, steps = 131_072, 2
    logits = (12 * random.standard_normal((2, 1 + steps * drafts, vocab))).astype(np.float32)
    tokens = random.integers(0, vocab, (2, 8)).astype(np.int32)
    chosen, lengths = np.array([drafts - 1, 0]), np.array([2, 4])
    empty = Logprobs.zeros(2, 8, 4)
    path = np.stack([0 * chosen, *(1 + step * drafts + chosen for step in range(steps))], axis=1)
    along = jnp.asarray(np.take_along_axis(logits, path[..., None], axis=1))
    found = empty.add(along, jnp.asarray(tokens), jnp.asarray(lengths, jnp.int32))
    for row in range(2):
        for step in range(steps + 1):
            at = 0 if step == 0 else 1 + (step - 1) * drafts + chosen[row]
            place, wanted = lengths[row] + step, log_softmax(logits[row, at])
            mine = wanted[tokens[row, place]]
            assert abs(found.chosen[row, place] - mine) < 2e-5 * max(1, abs(mine))
            assert found.ranks[row, place] == (wanted > mine).sum() + 1
            order = np.argsort(-logits[row, at], kind="stable")[:4]
            assert found.top_ids[row, place].tolist() == order.tolist()
            np.testing.assert_allclose(found.top[row, place], wanted[order], rtol=2e-5, atol=1e-6)
