"""What the engine compiles, and how often."""

import pytest

from spec_jax.config import SamplingParams
from spec_jax.engine import batch_shape
from spec_jax.models.model import Model
from spec_jax.testing import tiny_model
from tests import quick
from tests.harness import METHODS, finish, make_engine, request
from tests.often import often

DEEP = tiny_model(0, num_layers=8, max_position=8192)


IN_PLACE = [*METHODS, "other, varying"]


@pytest.mark.slow
@pytest.mark.parametrize("method", often(IN_PLACE, ["early_exit"]))
def test_caches_are_updated_in_place(method, monkeypatch):
    """In a long context the caches are all that counts: copies of them would show."""
    monkeypatch.setattr(Model, "compiler_options", quick.OPTIMIZED)
    engine = make_engine(method, DEEP, DEEP, lookahead=2, max_len=8192)
    batch = engine.start([request([1, 2, 3], SamplingParams(max_tokens=4000), max_len=4003)])
    one = batch.state.cache.layers[0].keys.nbytes
    batch.advance(1)
    needed, taken = engine.memory()
    assert needed > 16 * one  # keys and values of eight layers
    assert taken - needed < 10 * one  # what the attention of one layer needs, not of each


def test_prompts_of_many_rows_are_read_in_smaller_chunks(monkeypatch):
    """What reading takes beside caches does not grow with the rows: four times as much before."""
    target = tiny_model(0, max_position=2048)
    monkeypatch.setattr(Model, "compiler_options", quick.OPTIMIZED)
    monkeypatch.setattr(batch_shape, "CHUNK_BYTES", 4 * 4 * 128 * target.config.embed_size)
    engine, temporaries = make_engine("prompt_lookup", target, max_len=2048), []
    for rows, block in ((4, 128), (8, 64)):
        asked = [request([1] * 600, SamplingParams(max_tokens=5), max_len=605)] * rows
        assert engine.open(asked, rows).prefill_shape.block == block
        program, _ = engine.prefill(asked)
        temporaries.append(program.compiled.memory_analysis().temp_size_in_bytes)
    assert temporaries[1] < 1.3 * temporaries[0]


def test_a_short_prompt_reads_little_padding_beside_a_long_one():
    """On CPU it takes the time of a block."""
    engine = make_engine("prompt_lookup", tiny_model(0, max_position=2048), max_len=2048)
    sampling = SamplingParams(max_tokens=5)
    asked = [request([1] * tokens, sampling, max_len=1605) for tokens in (1600, 16)]
    assert engine.open(asked, 1).prefill_shape.block == 128
    assert batch_shape.prompt_block("tpu", 1600, 1, 32) == 512
    # Tokens that are read, padding included: 32, 64, 5 * 32, 5 * 64, 4 * 128.
    for tokens, block in ((1, 32), (40, 64), (150, 32), (300, 64), (500, 128)):
        assert batch_shape.prompt_block("cpu", tokens, 1, 32) == block


def test_joining_rows_are_read_in_chunks_of_their_own_size(monkeypatch):
    monkeypatch.setattr(batch_shape, "CHUNK_BYTES", 2**16)
    engine = make_engine("prompt_lookup", tiny_model(0, max_position=2048), max_len=2048)
    asked = [request([1] * 600, SamplingParams(max_tokens=5), max_len=605)] * 17
    together, alone = engine.open(asked[:16], 16), engine.open(asked, 16)
    assert together.prefill_shape.block < alone.prefill_shape.block
    assert (together.together, alone.together) == (16, 1)


def test_a_bucket_is_compiled_once_and_others_on_their_own():
    engine = make_engine("prompt_lookup", tiny_model(0))

    def traces_of(*sizes, stop_token_ids=(), bad_words=(), min_tokens=0):
        before = engine.traces
        params = SamplingParams(max_tokens=5, min_tokens=min_tokens)
        requests = [
            request([1] * size, params, stop_token_ids=stop_token_ids, bad_words=bad_words)
            for size in sizes
        ]
        finish(engine.start(requests))
        return engine.traces - before

    assert traces_of(3) == 2  # the reading of prompts and the loop
    assert traces_of(30) == traces_of(2, stop_token_ids=(1, 2, 3)) == 0
    assert traces_of(3, bad_words=[[1, 2], [3]]) == 1  # a loop that looks at what stands before
    assert traces_of(3, bad_words=[[1, 2], [3]], min_tokens=3) == traces_of(3, min_tokens=3) == 0
    assert traces_of(3, bad_words=[[1]] * 65) == 1  # room for more words, in the loop only
    assert traces_of(3, bad_words=[[2]] * 8) == traces_of(3) == 0
    assert traces_of(3, 9) == 2
    assert traces_of(9, 30) == 0
    assert traces_of(60) == 1  # a wider block of the prompt, the same loop
    assert traces_of(3) == 0
