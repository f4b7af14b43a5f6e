"""Layers whose states are not rolled back by a length: they decode as recomputation does."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.rows import insert_rows
from spec_jax.errors import ConfigError
from spec_jax.models.config import LayerConfig
from spec_jax.models.model import Model
from spec_jax.models.prefill import prefill
from spec_jax.testing import tiny_model
from tests.harness import drive, make_engine, request, run
from tests.models.recurrent_layers import ConvolutionConfig
from tests.often import often

K, CAPACITY, HEADROOM = 3, 64, 8
LAYERS = {
    "convolution": (ConvolutionConfig(), ConvolutionConfig(kernel=4)),
    "delta": (LayerConfig(kind="gated_delta", rotary=None),) * 2,
    "mixed": (ConvolutionConfig(), LayerConfig(), LayerConfig(kind="gated_delta"), LayerConfig()),
}


@functools.cache
def model(kind: str, seed: int = 0) -> Model:
    config = dataclasses.replace(tiny_model().config, layers=LAYERS[kind])
    random = Model.random(config, seed=seed)
    scale = {"embed.weight": 50.0}
    return random.with_weights(
        {name: weight * scale.get(name, 1.0) for name, weight in random.weights.items()}
    )


def texts(rows: int, length: int) -> jax.Array:
    random = np.random.default_rng(3)
    return jnp.asarray(random.integers(0, 16, (rows, length)), jnp.int32)


@functools.cache
def recomputed(kind: str):
    """Logits of all positions of a text that is read at once, into an empty cache."""
    run = jax.jit(lambda model, tokens: model.score(tokens, model.new_cache(*tokens.shape)).logits)
    return lambda tokens: np.asarray(run(model(kind), tokens))


@functools.cache
def compiled(kind: str):
    score = jax.jit(lambda model, *args: model.score(args[0], args[1], num_tokens=args[2])[::2])
    return functools.partial(score, model(kind))


def close(logits, expected):
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", often([*LAYERS], ["mixed"]))
def test_rollback_at_every_accepted_count(kind):
    """Each round scores K + 1 tokens, of which the text continues with `accepted` others."""
    tokens, score = texts(K + 2, CAPACITY), compiled(kind)
    expected = recomputed(kind)(tokens)
    wrong = (tokens + 1) % 16
    cache = model(kind).new_cache(K + 2, CAPACITY, headroom=HEADROOM)
    length = np.zeros(K + 2, np.int32)
    for turn in range(12):
        accepted = (np.arange(K + 2, dtype=np.int32) + turn) % (K + 2)  # 0 to K + 1 of the K + 1
        order = np.arange(K + 1)[None]
        at = length[:, None] + order
        right = np.take_along_axis(np.asarray(tokens), at, axis=1)
        refused = np.take_along_axis(np.asarray(wrong), at, axis=1)
        scored = np.where(order < accepted[:, None], right, refused)
        logits, cache = score(jnp.asarray(scored), cache, jnp.full(K + 2, K + 1, jnp.int32))
        for row in range(K + 2):
            close(logits[row, : accepted[row]], expected[row, length[row] :][: accepted[row]])
        length = length + accepted
        cache = cache.commit(jnp.asarray(length))
    assert length.max() > 2 * HEADROOM


@pytest.mark.parametrize("kind", often([*LAYERS], ["mixed"]))
def test_tentative_calls_are_taken_back(kind):
    """A draft model's steps: one token a call, and lengths that move back after the last."""
    tokens, score = texts(2, CAPACITY), compiled(kind)
    expected = recomputed(kind)(tokens)
    cache = model(kind).new_cache(2, CAPACITY, headroom=HEADROOM)
    one = jnp.ones(2, jnp.int32)
    for length in range(0, 24, 2):
        for i in range(K + 1):
            step = tokens[:, length + i : length + i + 1]
            step = step if i < 2 else (step + 1) % 16  # two are accepted, the others refused
            cache = cache.with_lengths(jnp.full(2, length + i, jnp.int32))
            logits, cache = score(step, cache, one)
            if i < 2:
                close(logits[:, 0], expected[:, length + i])
        cache = cache.commit(jnp.full(2, length + 2, jnp.int32))


@pytest.mark.parametrize("kind", often([*LAYERS], ["mixed"]))
def test_padding_and_rounds_without_drafts(kind):
    """Rows with 0 to K + 1 real tokens in one call; what stands after them leaves no trace."""
    tokens, score = texts(K + 2, CAPACITY), compiled(kind)
    expected = recomputed(kind)(tokens)
    cache = model(kind).new_cache(K + 2, CAPACITY, headroom=HEADROOM)
    length = np.zeros(K + 2, np.int32)
    for turn in range(9):
        count = (np.arange(K + 2, dtype=np.int32) * (turn % 3) + turn) % (K + 2)
        at = length[:, None] + np.arange(K + 1)[None]
        real = np.arange(K + 1)[None] < count[:, None]
        padded = np.where(real, np.take_along_axis(np.asarray(tokens), at, axis=1), 7)
        logits, cache = score(jnp.asarray(padded), cache, jnp.asarray(count))
        for row in range(K + 2):
            close(logits[row, : count[row]], expected[row, length[row] :][: count[row]])
        length = length + count
        cache = cache.commit(jnp.asarray(length))


@pytest.mark.parametrize("kind", often([*LAYERS], ["mixed"]))
def test_prefill_in_blocks_and_insertion(kind):
    """Prompts of several lengths, then rows that take the slots of others with longer texts."""
    tokens, score = texts(4, CAPACITY), compiled(kind)
    expected = recomputed(kind)(tokens)
    ends = jnp.asarray([1, 8, 23, 40], jnp.int32)

    @jax.jit
    def read(model, tokens, ends):
        cache = model.new_cache(*tokens.shape, headroom=HEADROOM)
        return prefill(model, tokens, ends, cache, HEADROOM)

    cache = read(model(kind), tokens, ends)
    following = jnp.take_along_axis(tokens, ends[:, None] + jnp.arange(K + 1)[None], axis=1)
    count = jnp.full(4, K + 1, jnp.int32)
    logits, after = score(following, cache, count)
    for row in range(4):
        close(logits[row], expected[row, int(ends[row]) :][: K + 1])
    # Rows 0 and 1 are inserted into slots 3 and 0 of the batch, which has scored in the meantime.
    slots = jnp.asarray([[3, 0]], jnp.int32)
    rows = jax.tree.map(lambda leaf: leaf[:2], cache)
    batch = insert_rows(after, slots, rows)
    order = np.asarray([1, 1, 2, 0])
    begin = jnp.asarray([8, 8, 23, 1], jnp.int32)
    following = jnp.take_along_axis(tokens[order], begin[:, None] + jnp.arange(K + 1)[None], axis=1)
    logits, _ = score(following, batch, count)
    for slot in (0, 2, 3):
        row = order[slot]
        close(logits[slot], expected[row, int(begin[slot]) :][: K + 1])


def step_by_step(kind: str, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, each from the whole text that is read anew."""
    ids = list(prompt)
    for _ in range(count):
        padded = jnp.asarray([ids + [0] * (CAPACITY - len(ids))], jnp.int32)
        ids.append(int(recomputed(kind)(padded)[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


ENGINES = ("none", "self", "other, varying", "prompt_lookup", "early_exit")


@pytest.mark.parametrize("method", often(ENGINES, ["prompt_lookup"]))
def test_greedy_tokens_of_the_engine(method):
    """Target and draft have layers of all kinds; five requests share three slots."""
    engine = make_engine(method, model("mixed"), model("mixed", 1), max_len=CAPACITY)
    prompts = [texts(1, n)[0].tolist() for n in (3, 1, 17, 9, 30)]
    requests = [
        request(prompt, SamplingParams(max_tokens=20), max_len=CAPACITY) for prompt in prompts
    ]
    expected = [step_by_step("mixed", prompt, 20) for prompt in prompts]
    assert run(engine, requests) == expected
    shared = drive(engine, requests, 3, lambda low, high: high)
    assert [ids for ids, _ in shared] == expected


def test_trees_are_refused():
    engine = make_engine("tree", model("mixed"), model("mixed", 1), max_len=CAPACITY)
    with pytest.raises(ConfigError, match="one after another"):
        run(engine, [request([1, 2, 3])])
