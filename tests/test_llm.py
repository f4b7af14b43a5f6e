"""`LLM` on tiny checkpoints: text, streams, stop strings, seeds and mistakes."""

import dataclasses
import itertools

import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints.weights import StoredModel
from spec_jax.errors import ConfigError, RequestError, VocabularyMismatchError
from tests.checkpoints import tiny
from tests.often import often

PROMPTS = ["the thin thing in the", "a", "grüße \U0001f980 and then the end of the the the"]
METHODS = ("none", "prompt_lookup", "draft_model")
GREEDY = SamplingParams(max_tokens=32, ignore_eos=True)
# A random model mostly speaks in halves of characters; these leave it letters.
LETTERS_ONLY = {
    token: float("-inf")
    for token in range(tiny.CONFIG["vocab_size"])
    if token >= len(tiny.TOKENS) or not tiny.TOKENS[token].isascii() or len(tiny.TOKENS[token]) > 3
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    return tiny.write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(directories):
    return LLM(str(directories / "target"), max_num_seqs=4)


@pytest.fixture(scope="module")
def llm_of(directories, plain):
    llms = {"none": plain}

    def llm(method):
        if method not in llms:
            draft = str(directories / "draft") if method == "draft_model" else None
            llms[method] = plain.with_speculation(SpeculativeConfig(method=method, draft=draft))
        return llms[method]

    return llm


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_outputs_say_what_was_decoded(plain, llm_of, method):
    expected = [plain.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    outputs = llm_of(method).generate(PROMPTS, GREEDY)
    for prompt, output, alone in zip(PROMPTS, outputs, expected, strict=True):
        assert (output.prompt, output.token_ids) == (prompt, alone.token_ids)
        assert output.text == plain.tokenizer.decode(output.token_ids) == alone.text
        assert output.finish_reason == "length" and output.error is None
        assert output.usage.prompt_tokens == len(plain.tokenizer.encode(prompt))
        assert output.usage.completion_tokens == len(output.token_ids) == 32
        metrics = output.metrics
        assert metrics.rounds + metrics.accepted_tokens == 32
        assert sum(metrics.accepted_per_position) == metrics.accepted_tokens
        assert (metrics.draft_tokens > 0) == (method != "none")
    ids = [plain.tokenizer.encode(prompt) for prompt in PROMPTS]
    again = llm_of(method).generate(ids, GREEDY)
    assert [each.token_ids for each in again] == [each.token_ids for each in expected]
    assert again[0].prompt is None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", often(METHODS, METHODS[1:2]))
def test_a_stream_is_the_output_in_pieces(llm_of, method, temperature):
    """Also with more prompts than rows in a batch, which follow each other."""
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    params = [
        SamplingParams(max_tokens=8 + 5 * i, temperature=temperature, seed=i)
        for i in range(len(prompts))
    ]
    outputs = llm_of(method).generate(prompts, params)
    chunks = list(llm_of(method).stream(prompts, params))
    for i, output in enumerate(outputs):
        own = [chunk for chunk in chunks if chunk.index == i]
        assert "".join(chunk.text for chunk in own) == output.text
        assert sum((chunk.token_ids for chunk in own), ()) == output.token_ids
        assert [chunk.output is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].output.token_ids == output.token_ids
    assert len(chunks) > len(prompts)


def first_occurrence(tokenizer, token_ids, stop):
    """The fewest tokens whose text holds the string, and the text before it."""
    for count in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:count])
        if stop in text:
            return token_ids[:count], text[: text.index(stop)]
    raise AssertionError(f"{stop!r} is not in the text")


@pytest.mark.parametrize("size", [1, 3, 6])
@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_a_stop_string_ends_a_request_where_it_is_complete(plain, llm_of, method, size):
    letters = SamplingParams(max_tokens=32, ignore_eos=True, logit_bias=LETTERS_ONLY)
    whole = plain.generate(PROMPTS[0], letters)[0]
    middle = len(whole.text) // 2
    stop = whole.text[middle : middle + size]
    expected = first_occurrence(plain.tokenizer, whole.token_ids, stop)
    params = dataclasses.replace(letters, stop=(stop, "never to be seen"))
    other = plain.generate(PROMPTS[1], GREEDY)[0]

    output, neighbour = llm_of(method).generate(PROMPTS[:2], [params, GREEDY])
    assert (output.token_ids, output.text) == expected
    assert output.finish_reason == "stop"
    assert neighbour.token_ids == other.token_ids

    shown = ""
    for chunk in llm_of(method).stream(PROMPTS[0], params):
        shown += chunk.text
        assert expected[1].startswith(shown)
    assert shown == expected[1]


def test_unseeded_requests_differ_and_the_seed_of_the_llm_reproduces_them(directories):
    warm = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)

    def decoded(seed):
        llm = LLM(str(directories / "target"), seed=seed)
        prompts = [PROMPTS[0]] * 2
        return [each.token_ids for _ in range(2) for each in llm.generate(prompts, warm)]

    first = decoded(3)
    assert len(set(first)) == 4
    assert decoded(3) == first
    assert not set(decoded(4)) & set(first)


def test_every_bit_of_a_seed_counts_and_completions_have_seeds_of_their_own(plain):
    warm = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True)
    seeds = (5, 6, 5 + 2**32, 5 + 2**63)
    alone = plain.generate(["a"] * 4, [dataclasses.replace(warm, seed=seed) for seed in seeds])
    texts = [each.token_ids for each in alone]
    (several,) = plain.generate("a", dataclasses.replace(warm, seed=5, n=3))
    first, *others = (each.token_ids for each in several.outputs)
    assert first == texts[0] and len({*texts, *others}) == 6


def test_a_request_with_a_seed_is_reproducible(plain):
    warm = SamplingParams(max_tokens=12, temperature=1.5, ignore_eos=True, seed=11)
    outputs = plain.generate([PROMPTS[0]] * 2, warm) + plain.generate(PROMPTS[0], warm)
    assert len({each.token_ids for each in outputs}) == 1


def test_chat(plain):
    messages = [{"role": "user", "content": "the thing"}]
    (output,) = plain.chat(messages, GREEDY)
    assert output.prompt == plain.tokenizer.apply_chat_template(messages)
    ids = plain.tokenizer.encode_chat(messages)
    assert output.token_ids == plain.generate(ids, GREEDY)[0].token_ids
    assert plain.encode_chat(messages) == ids
    several = plain.chat([messages, messages], GREEDY)
    assert [each.token_ids for each in several] == [output.token_ids] * 2


def test_eos_ends_a_request(plain):
    """Decoding on shows that it was the end-of-sequence token that ended it."""
    eos = plain.eos_token_ids[0]
    params = SamplingParams(max_tokens=32, logit_bias={eos: 4.0})
    (output,) = plain.generate(PROMPTS[0], params)
    assert output.finish_reason == "stop" and output.token_ids[-1] == eos
    assert eos not in output.token_ids[:-1]
    assert plain.tokenizer.token(eos) not in output.text
    on = SamplingParams(max_tokens=32, logit_bias={eos: 4.0}, ignore_eos=True)
    assert plain.generate(PROMPTS[0], on)[0].finish_reason == "length"


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_the_edge_of_the_context_ends_a_request(directories, method):
    draft = str(directories / "draft") if method == "draft_model" else None
    config = SpeculativeConfig(method=method, draft=draft)
    llm = LLM(str(directories / "target"), speculative_config=config, max_model_len=30)
    (output,) = llm.generate(PROMPTS[0], SamplingParams(max_tokens=100, ignore_eos=True))
    assert output.finish_reason == "length" and output.usage.total_tokens == 30


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_bad_words_are_not_spoken(llm_of, plain, method):
    params = SamplingParams(max_tokens=48, ignore_eos=True, logit_bias=LETTERS_ONLY)
    (free,) = plain.generate(PROMPTS[0], params)
    # Words of one token and of several, which come up when nothing forbids them.
    tokens = [plain.tokenizer.token(i).lstrip("Ġ") for i in free.token_ids]
    pairs = [first + second for first, second in itertools.pairwise(tokens)]
    words = [next(filter(str.isalpha, several)) for several in (tokens, pairs)]
    assert all(word in free.text for word in words)
    banned = dataclasses.replace(params, bad_words=words)
    (output,) = llm_of(method).generate(PROMPTS[0], banned)
    for word in words:
        for ids in plain.tokenizer.spellings(word):
            pieces = [output.token_ids[i : i + len(ids)] for i in range(48)]
            assert ids not in pieces
    assert output.token_ids != free.token_ids
    assert output.token_ids == plain.generate(PROMPTS[0], banned)[0].token_ids


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_min_tokens_holds_against_end_tokens_and_stop_strings(llm_of, plain, method):
    eos = plain.eos_token_ids[0]
    eager = SamplingParams(max_tokens=32, logit_bias={eos: 1e4})
    (short,) = llm_of(method).generate(PROMPTS[0], eager)
    assert short.token_ids == (eos,)
    (longer,) = llm_of(method).generate(PROMPTS[0], dataclasses.replace(eager, min_tokens=9))
    assert longer.token_ids[9:] == (eos,) and eos not in longer.token_ids[:9]
    letters = SamplingParams(max_tokens=32, ignore_eos=True, logit_bias=LETTERS_ONLY)
    (free,) = plain.generate(PROMPTS[0], letters)
    # The text ends with the first of the stop strings that ends past the tenth token.
    stops = (free.text[2], free.text[-3:])
    params = dataclasses.replace(letters, stop=stops, min_tokens=10)
    (output,) = llm_of(method).generate(PROMPTS[0], params)
    known = len(plain.tokenizer.decode(free.token_ids[:10]))
    ends = [
        at
        for stop in stops
        for at in range(len(free.text))
        if free.text.startswith(stop, at) and at + len(stop) > known
    ]
    assert output.text == free.text[: min(ends)] and output.finish_reason == "stop"
    assert len(output.token_ids) > 10


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_a_request_without_a_distribution_fails_alone(llm_of, method):
    llm = llm_of(method)
    nothing = dict.fromkeys(range(tiny.CONFIG["vocab_size"]), float("-inf"))
    masked = SamplingParams(max_tokens=32, ignore_eos=True, logit_bias=nothing)
    broken, fine = llm.generate(PROMPTS[:2], [masked, GREEDY])
    assert (broken.finish_reason, broken.token_ids) == ("error", ())
    assert "prompt 0" in broken.error and "logit_bias" in broken.error
    assert fine.error is None and len(fine.token_ids) == 32


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_nothing_is_traced_or_compiled_again_inside_a_shape(llm_of, method):
    llm = llm_of(method)
    llm.generate(PROMPTS, GREEDY)
    warm = SamplingParams(
        max_tokens=17, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, repetition_penalty=1.2
    )
    llm.generate(PROMPTS, warm)  # which steps of sampling there are is part of the shape
    traces, seconds = llm.engine.traces, llm.engine.compile_seconds
    assert traces >= 2 and seconds > 0
    warm = dataclasses.replace(warm, temperature=1.5, top_p=0.8, min_p=0.0, presence_penalty=1.0)
    for prompts in (PROMPTS, [*PROMPTS[::-1], "and in"], ["in", "the", "a thing"]):
        outputs = llm.generate(prompts, warm)
        assert [each.metrics.compile_seconds for each in outputs] == [0] * len(prompts)
    list(llm.stream(PROMPTS, SamplingParams(max_tokens=9, stop="the")))
    assert (llm.engine.traces, llm.engine.compile_seconds) == (traces, seconds)


@pytest.mark.parametrize("method", often(METHODS, ["draft_model"]))
def test_after_a_warm_up_no_text_waits_for_the_compiler(llm_of, method):
    llm = llm_of(method)
    params = SamplingParams(max_tokens=8, temperature=0.7, ignore_eos=True)
    llm.warm_up(params, num_tokens=128)
    seconds = llm.engine.compile_seconds
    text = list(llm.tokenizer.encode("in the"))
    while len(text) < 110:  # a conversation that grows
        (output,) = llm.generate([text], params)
        assert output.error is None and output.metrics.compile_seconds == 0
        text += [*output.token_ids, *range(5, 12)]
    assert llm.engine.compile_seconds == seconds


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "said"),
    [
        ("", GREEDY, RequestError, "prompt 0 is empty"),
        ([[]], GREEDY, RequestError, "at least one token id"),
        (["fine", ""], GREEDY, RequestError, "prompt 1 is empty"),
        ([[5, -1]], GREEDY, RequestError, "-1"),
        ([[5, 10_000]], GREEDY, RequestError, "10000"),
        ("the " * 200, GREEDY, RequestError, "context of 128"),
        (["a", "b"], [GREEDY], ConfigError, "1 sampling_params for 2 prompts"),
        ("a", SamplingParams(logit_bias={10_000: 1.0}), ConfigError, "10000"),
        ("a", SamplingParams(stop_token_ids=[10_000]), ConfigError, "10000"),
    ],
)
def test_a_bad_request_is_refused_at_once(plain, prompt, params, kind, said):
    with pytest.raises(kind, match=said):
        plain.generate(prompt, params)
    with pytest.raises(kind, match=said):
        plain.stream(prompt, params)  # before the first chunk is asked for


@pytest.mark.parametrize("method", ["prompt_lookup", "draft_model"])
def test_a_seed_gives_the_text_of_plain_decoding_whatever_drafts(plain, llm_of, method):
    """Although measured times decide how much is drafted."""
    llm = llm_of(method)
    params = SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=3, ignore_eos=True)
    prompts = ["ab", "abab"]
    expected = [each.token_ids for each in plain.generate(prompts, params)]
    for _ in range(3):
        assert [each.token_ids for each in llm.generate(prompts, params)] == expected


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"quantization": "int2"}, "int2"),
        ({"quantization": "gguf"}, "not a .gguf file"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"max_model_len": 129}, "context of 128"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_a_bad_argument_is_refused(directories, monkeypatch, arguments, said):
    monkeypatch.setattr(StoredModel, "load", None)  # before weights are read
    with pytest.raises(ConfigError, match=said):
        LLM(str(directories / "target"), **arguments)


def test_a_draft_of_another_tokenizer_is_refused(plain, directories, tmp_path, monkeypatch):
    draft = tiny.write_directory(tmp_path / "draft")
    swapped = [*tiny.TOKENS[:5], tiny.TOKENS[6], tiny.TOKENS[5], *tiny.TOKENS[7:]]
    tiny.write_tokenizer(draft, swapped)
    config = SpeculativeConfig(method="draft_model", draft=str(draft))
    monkeypatch.setattr(StoredModel, "load", None)  # neither model's weights are read
    with pytest.raises(VocabularyMismatchError) as caught:
        plain.with_speculation(config)
    with pytest.raises(VocabularyMismatchError, match=r"2 of .* token ids differ"):
        LLM(str(directories / "target"), speculative_config=config)
    message = str(caught.value)
    assert repr(tiny.TOKENS[5]) in message and repr(tiny.TOKENS[6]) in message
    assert "2 of" in message and "prompt_lookup" in message


@pytest.mark.slow
def test_the_context_chooses_the_frequencies_of_longrope(tmp_path):
    """Of target and draft, for short texts too, and so that speculation changes nothing."""
    factors = {"short_factor": [1.0, 1.2, 1.5], "long_factor": [1.5, 4.0, 20.0]}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48, **factors}
    config = tiny.CONFIG | {"rope_parameters": rope | {"rope_theta": 100.0}}
    path = str(tiny.write_directory(tmp_path / "model", config))
    found = {}
    for context in (48, None):
        llm = LLM(path, max_model_len=context)
        assert llm.engine.target.config.max_position == (context or 128)
        config = SpeculativeConfig(method="draft_model", draft=path, draft_quantization="int8")
        speculating = llm.with_speculation(config)
        assert speculating.engine.drafter.model.config.max_position == (context or 128)
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        outputs = [each.generate(PROMPTS, params) for each in (llm, speculating)]
        found[context], again = ([out.token_ids for out in each] for each in outputs)
        assert again == found[context]
    assert found[None] != found[48]
