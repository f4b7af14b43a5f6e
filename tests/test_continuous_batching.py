"""`LLM` with more prompts than rows: refills, counters, failures, threads, abandoned streams."""

import dataclasses
import functools
import gc
import threading
import weakref

import jax
import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.decoding.state import RUNNING
from spec_jax.engine import programs, scheduler
from spec_jax.engine.batch import Batch
from spec_jax.engine.programs import Compiler
from spec_jax.errors import GenerationError
from tests.checkpoints import tiny
from tests.often import often

PROMPTS = ["the thin thing in the", "a", "and then the end of the the the"]
METHODS = ("none", "prompt_lookup")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "target"
    directory = tiny.write_directory(path, tiny.CONFIG, tiny.llama_tensors(tiny.CONFIG))
    return LLM(str(directory), max_num_seqs=4)


@pytest.fixture(scope="module")
def llm_of(plain):
    llms = {"none": plain}

    def llm(method):
        if method not in llms:
            llms[method] = plain.with_speculation(SpeculativeConfig(method=method))
        return llms[method]

    return llm


def params_of(count):
    """Answers of 1 to 40 tokens, every other one sampled."""
    return [
        SamplingParams(max_tokens=1 + 7 * i % 40, temperature=0.9 * (i % 2), seed=i)
        for i in range(count)
    ]


def ids(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("method", often(METHODS, ["prompt_lookup"]))
def test_64_prompts_say_what_each_says_alone_and_nothing_is_traced_on_the_way(llm_of, method):
    llm, params = llm_of(method), params_of(64)
    prompts = [PROMPTS[i % 3][: 1 + i % 20] for i in range(64)]
    alone = {i: llm.generate(prompts[i], params[i])[0] for i in range(0, 64, 9)}
    llm.generate(prompts[:5], dataclasses.replace(params[5], max_tokens=40))
    traces, seconds = llm.engine.traces, llm.engine.compile_seconds
    outputs = llm.generate(prompts, params)
    assert (llm.engine.traces, llm.engine.compile_seconds) == (traces, seconds)
    for i, output in enumerate(outputs):
        assert output.prompt == prompts[i] and output.metrics.compile_seconds == 0
        assert output.metrics.prefill_seconds > 0 and output.metrics.decode_seconds > 0
    assert {i: outputs[i].token_ids for i in alone} == {i: alone[i].token_ids for i in alone}
    streamed = {c.index: c.output for c in llm.stream(prompts, params) if c.output is not None}
    assert [streamed[i].token_ids for i in range(64)] == ids(outputs)


@pytest.mark.parametrize("rounds", ["ROUNDS_PER_STEP", "ROUNDS_PER_CHUNK"])
def test_a_slot_is_refilled_in_the_round_in_which_its_row_finishes(plain, monkeypatch, rounds):
    joined = []

    def insert(batch, requests, insert=Batch.insert, **options):
        view = batch.view if joined else None
        joined.append((requests, view and view.counters.rounds.tolist()))
        return insert(batch, requests, **options)

    monkeypatch.setattr(Batch, "insert", insert)
    lengths = [30, 5, 9, 3, 8]
    params = [SamplingParams(max_tokens=each, ignore_eos=True) for each in lengths]
    llm = plain.with_speculation(SpeculativeConfig())
    monkeypatch.setattr(llm, "max_num_seqs", 2)
    if rounds == "ROUNDS_PER_STEP":
        outputs = llm.generate([PROMPTS[0]] * 5, params)
    else:
        outputs = [c.output for c in llm.stream([PROMPTS[0]] * 5, params) if c.output is not None]
        outputs.sort(key=lambda output: lengths.index(len(output.token_ids)))
    # Slot 0 decodes the long answer; slot 1 all the others, one after another.
    assert [sorted(requests) for requests, _ in joined] == [[0, 1], [1], [1], [1]]
    assert [rounds[0] for _, rounds in joined[1:]] == [5, 14, 17]
    assert [len(output.token_ids) for output in outputs] == lengths
    times = [output.metrics.decode_seconds for output in outputs]
    assert times[0] == pytest.approx(max(times)) and sum(times[1:]) <= times[0] * 1.001


def work(output):
    metrics = output.metrics
    return (
        metrics.rounds,
        metrics.draft_tokens,
        metrics.accepted_tokens,
        metrics.accepted_per_position,
    )


@pytest.mark.parametrize("policy", ["constant", "heuristic", "oracle"])
@pytest.mark.slow
def test_what_is_counted_ends_with_a_stop_string_as_with_a_stop_token(plain, policy):
    """A stop token that comes up once, and the same place named by its text."""
    config = SpeculativeConfig(
        method="prompt_lookup", draft_length_policy=policy, num_speculative_tokens=4
    )
    llm = plain.with_speculation(config)
    letters = {
        token: float("-inf")
        for token in range(tiny.CONFIG["vocab_size"])
        if token >= len(tiny.TOKENS) or not tiny.TOKENS[token].isascii()
    }
    free = SamplingParams(max_tokens=48, ignore_eos=True, logit_bias=letters)
    (whole,) = llm.generate(PROMPTS[2], free)
    compared = 0
    for place, token in enumerate(whole.token_ids):
        text = llm.tokenizer.decode(whole.token_ids[: place + 1])
        stop = text[len(llm.tokenizer.decode(whole.token_ids[:place])) :]
        if token in whole.token_ids[:place] or not stop or stop in text[: -len(stop)]:
            continue
        named = dataclasses.replace(free, stop_token_ids=(token,))
        spelt = dataclasses.replace(free, stop=(stop,))
        by_token, by_text = llm.generate([PROMPTS[2]] * 2, [named, spelt])
        assert by_text.token_ids == by_token.token_ids == whole.token_ids[: place + 1]
        assert work(by_text) == work(by_token)
        assert by_text.metrics.rounds <= len(by_text.token_ids)
        compared += 1
    assert compared >= 3


def test_the_adaptive_policy_learns_from_rows_that_a_stop_string_ends(plain):
    config = SpeculativeConfig(method="prompt_lookup", draft_length_policy="adaptive")
    llm = plain.with_speculation(config)
    (whole,) = llm.generate(PROMPTS[2], SamplingParams(max_tokens=40, ignore_eos=True))
    greedy = llm.engine.cost_profiler.acceptances["greedy"]
    before = greedy.judged
    stop = whole.text[len(whole.text) // 2 :][:3]
    params = SamplingParams(max_tokens=100, ignore_eos=True, stop=stop)
    (output,) = llm.generate(PROMPTS[2], params)
    assert output.finish_reason == "stop" and greedy.judged != before


@pytest.fixture
def failing(monkeypatch):
    """Makes the device fail in the call after this many."""

    def fail_after(calls):
        left = [calls]

        def advance(batch, *args, advance=Batch.advance):
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("the device is gone")
            return advance(batch, *args)

        monkeypatch.setattr(Batch, "advance", advance)

    return fail_after


def test_results_survive_a_later_failure(plain, failing):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 40, 40, 40, 5, 40)]
    prompts = [PROMPTS[0]] * 6
    expected = plain.generate(prompts, params)
    failing(2)  # the first row finishes in the first call, the fifth in the second
    with pytest.raises(
        GenerationError, match=r"after 2 of 6 prompts.*the device is gone"
    ) as caught:
        plain.generate(prompts, params)
    found = caught.value.outputs
    assert [i for i, output in enumerate(found) if output is not None] == [0, 4]
    assert (found[0].token_ids, found[4].token_ids) == (ids(expected)[0], ids(expected)[4])
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_stream_hands_out_what_it_has_before_it_fails(plain, failing):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (3, 40)]
    failing(2)
    chunks = []
    with pytest.raises(RuntimeError, match="the device is gone"):
        chunks.extend(iter_into(chunks, plain.stream(PROMPTS[:2], params)))
    assert [chunk.index for chunk in chunks if chunk.output is not None] == [0]


def iter_into(chunks, stream):
    for chunk in stream:
        chunks.append(chunk)
    return ()


def test_threads_queue_and_streams_of_one_thread_go_on_beside_each_other(plain):
    params = params_of(6)
    expected = ids(plain.generate(PROMPTS * 2, params))
    streams = [plain.stream(PROMPTS * 2, params) for _ in range(2)]
    found = [{}, {}]

    def advance(number):
        chunk = next(streams[number], None)
        if chunk is not None and chunk.output is not None:
            found[number][chunk.index] = chunk.output.token_ids
        return chunk is not None

    said = []
    threads = [
        threading.Thread(target=lambda: said.append(ids(plain.generate(PROMPTS * 2, params))))
        for _ in range(3)
    ]
    assert advance(0)  # the others start while this stream is open
    for thread in threads:
        thread.start()
    while any([advance(0), advance(1)]):
        assert ids(plain.generate(PROMPTS[:1], params[:1])) == expected[:1]  # in the same thread
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert said == [expected] * 3
    assert [[each[i] for i in range(6)] for each in found] == [expected] * 2


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_an_abandoned_stream_frees_its_rows(plain, how, monkeypatch):
    made = []

    def insert(batch, requests, insert=Batch.insert, **options):
        made.append(weakref.ref(batch))
        return insert(batch, requests, **options)

    monkeypatch.setattr(Batch, "insert", insert)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    stream = plain.stream(PROMPTS * 2, params)
    next(stream)
    leaves = [weakref.ref(leaf) for leaf in jax.tree.leaves(made[0]().state.cache)]
    assert all(leaf() is not None for leaf in leaves)
    gc.disable()  # at once, not when the collector comes by
    try:
        if how == "closed":
            stream.close()
        else:
            del stream
        assert made[0]() is None and all(leaf() is None for leaf in leaves)
    finally:
        gc.enable()
    assert len(plain.generate(PROMPTS * 2, params)) == 6


@pytest.mark.parametrize("crowded", [False, True])
def test_programs_that_were_used_last_are_kept(plain, crowded, monkeypatch):
    """Only this many, and on Linux fewer where their memory maps near the system's limit."""
    changed = {"MIN_PROGRAMS": 2, "MAX_MAPS": 0.0} if crowded else {"MAX_PROGRAMS": 2}
    for name, value in changed.items():
        monkeypatch.setattr(programs, name, value)
    compiler = Compiler(plain.engine.target)

    def use(number):
        before = compiler.traces
        compiler.program(("one more", number), lambda x: x + number, (jax.numpy.ones(3),))
        return compiler.traces - before

    assert [use(number) for number in (1, 2, 1, 3, 1, 2)] == [1, 1, 0, 1, 0, 1]


def test_dropped_programs_give_their_memory_maps_back(plain):
    compiler = Compiler(plain.engine.target)
    before = programs.maps_taken()
    if not before:
        pytest.skip("this system does not count memory maps")

    def many(number, x):
        for _ in range(20):  # products are separate kernels, each with its maps
            x = jax.numpy.sin(x @ x) + number
        return x

    for number in range(8):
        function = functools.partial(many, number)
        compiler.program(("many", number), function, (jax.numpy.ones((8, 8)),))
    full = programs.maps_taken()
    compiler.clear()
    assert before < full < 1
    assert programs.maps_taken() < full - (full - before) / 2


@pytest.fixture
def batches(monkeypatch):
    """Every batch that decoded, with its running rows, in the order of its steps."""
    steps = []

    def advance(batch, *args, advance=Batch.advance):
        steps.append((batch, int((batch.view.finish == RUNNING).sum())))
        return advance(batch, *args)

    monkeypatch.setattr(Batch, "advance", advance)
    return steps


def test_two_threads_with_two_streams_each_share_one_batch(plain, batches):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    expected = plain.generate(PROMPTS[0], params)[0].token_ids
    batches.clear()
    together, texts = threading.Barrier(2), []

    def read():
        streams = [plain.stream(PROMPTS[0], params) for _ in range(2)]
        pieces = [next(streams[0]).token_ids]
        together.wait()  # both threads have a stream in the batch
        pieces += [(), *(chunk.token_ids for chunk in streams[0])]
        texts.append(sum(pieces, ()))
        texts.append(sum((chunk.token_ids for chunk in streams[1]), ()))

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert texts == [expected] * 4
    assert max(rows for _, rows in batches) >= 2
    # Rounds are shared: two texts at a time take the steps of little more than one.
    alone = -(-len(expected) // scheduler.ROUNDS_PER_CHUNK)
    assert len(batches) < 4 * alone


def test_streams_of_one_thread_decode_in_one_batch(plain, batches):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    streams = [plain.stream(PROMPTS[0], params) for _ in range(4)]
    texts = [[] for _ in streams]
    while any([iter_one(each, text) for each, text in zip(streams, texts, strict=True)]):
        pass
    assert len({batch for batch, _ in batches}) == 1
    assert max(rows for _, rows in batches) == 4
    assert len({tuple(text) for text in texts}) == 1 and len(texts[0]) == 24


def iter_one(stream, text):
    chunk = next(stream, None)
    if chunk is not None:
        text.extend(chunk.token_ids)
    return chunk is not None


def test_a_stream_that_nobody_reads_stalls_no_other_caller(plain, batches):
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    paused = plain.stream(PROMPTS[0], params)
    first = next(paused)
    (output,) = plain.generate(PROMPTS[1], params)
    assert len(output.token_ids) == 40
    assert len({batch for batch, _ in batches}) == 1  # the paused stream went on beside it
    steps = len(batches)
    chunks = [first, *paused]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 40
    assert len(batches) - steps <= 1  # its text had been decoded


def test_a_sibling_takes_turns(plain, llm_of):
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    other = llm_of("prompt_lookup")
    expected = ids(plain.generate(PROMPTS[:1], params))[0]
    stream, results = plain.stream(PROMPTS[0], params), []
    next(stream)
    thread = threading.Thread(
        target=lambda: results.append(ids(other.generate(PROMPTS[0], params)))
    )
    thread.start()
    rest = list(stream)
    thread.join(timeout=120)
    assert results == [[expected]] and rest[-1].output.token_ids == expected
