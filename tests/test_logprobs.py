"""Log-probabilities are the target's own, whatever drafts and however tokens are drawn."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, Layout, SamplingParams, SpeculativeConfig
from spec_jax.decoding.logprobs import Logprobs
from spec_jax.drafters.base import Draft
from tests.checkpoints.tiny import write_directory
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


def expected(llm, output, token_ids):
    """What the target says of a text that it reads at once, in float64 from its logits on."""
    target = llm.engine.target.unpacked()
    ids = [*output.prompt_token_ids, *token_ids]
    cache = target.new_cache(1, 64)
    logits = target.score(jnp.asarray([ids], jnp.int32), cache)[0][0]
    return log_softmax(logits)[len(output.prompt_token_ids) - 1 : -1]


def check(llm, output, count):
    for each in output.outputs:
        wanted = expected(llm, output, each.token_ids)
        assert each.logprobs is not None and len(each.logprobs) == len(each.token_ids)
        for token, found, row in zip(each.token_ids, each.logprobs, wanted, strict=True):
            assert abs(found[token].logprob - row[token]) < 1e-4
            likelier = row > row[token]
            near = abs(row - row[token]) < 1e-4
            assert likelier[~near].sum() < found[token].rank <= (likelier | near).sum()
            by_rank = sorted(found.values(), key=lambda logprob: logprob.rank)[:count]
            top = np.sort(row)[::-1][:count]
            np.testing.assert_allclose([logprob.logprob for logprob in by_rank], top, atol=1e-4)
            assert found[token].decoded_token == llm.tokenizer.decode([token], False)
        total = sum(row[token] for row, token in zip(wanted, each.token_ids, strict=True))
        assert abs(each.cumulative_logprob - total) < 1e-3


@pytest.mark.parametrize("temperature", [0.0, 1.2])
@pytest.mark.parametrize("method", often(METHODS, ["tree", "confidence"]))
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


def test_on_a_mesh(llm, tmp_path):
    sharded = LLM(write_directory(tmp_path / "tiny"), layout=Layout.tensor_parallel(2))
    sharded = sharded.with_speculation(SpeculativeConfig(method="prompt_lookup"))
    check(llm, sharded.generate(PROMPTS[0], SamplingParams(max_tokens=8, logprobs=2))[0], 2)


def test_rows_with_and_without(llm):
    params = [SamplingParams(max_tokens=6, logprobs=count) for count in (None, 0, 5, None)]
    found = llm.generate(PROMPTS, params)
    assert [each.outputs[0].logprobs is None for each in found] == [True, False, False, True]
    assert {len(place) for place in found[1].outputs[0].logprobs} == {1}
    assert {len(place) for place in found[2].outputs[0].logprobs} <= {5, 6}
    plain = llm.generate(PROMPTS, SamplingParams(max_tokens=6))
    assert [each.token_ids for each in plain] == [each.token_ids for each in found]
    assert plain[0].outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("drafts", [1, 3])
def test_of_a_large_vocabulary(drafts):
    """Against float64, at the place of the draft that was kept."""
    random = np.random.default_rng(0)
    vocab, steps = 131_072, 2
    logits = (12 * random.standard_normal((2, 1 + steps * drafts, vocab))).astype(np.float32)
    tokens = random.integers(0, vocab, (2, 8)).astype(np.int32)
    chosen, lengths = np.array([drafts - 1, 0]), np.array([2, 4])
    draft = Draft(
        tokens=jnp.zeros((2, steps * drafts), jnp.int32),
        probs=None,
        lengths=jnp.full((2,), steps, jnp.int32),
        drafts=drafts,
    )
    empty = Logprobs.zeros(2, 8, 4)
    arrays = (jnp.asarray(each, jnp.int32) for each in (chosen, tokens, lengths))
    found = empty.add(jnp.asarray(logits), draft, *arrays)
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
