"""What Python code passes by mistake is refused by a typed error before anything is decoded."""

import threading
import time

import numpy as np
import pytest

from spec_jax import LLM, ConfigError, RequestError, SamplingParams, SpecJaxError
from tests.checkpoints import tiny

PARAMS = SamplingParams(max_tokens=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return str(tiny.write_directory(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def llm(path) -> LLM:
    return LLM(path)


@pytest.mark.parametrize(
    "prompts",
    [
        *(5, None, 5.0, {"a"}, b"a", iter(["a"]), np.array(5), {"prompt": 5}, {"prompt": None}),
        *([None], [5.0], [b"a"], [iter("a")], [[]], [[None]], [[1.5]], ["a", ["b"]], [[10**30]]),
        *("", "\ud800", [""], np.zeros((2, 2)), np.array([["a"]])),
    ],
)
def test_prompts(llm, prompts):
    with pytest.raises(RequestError):
        llm.generate(prompts, PARAMS)
    with pytest.raises(RequestError):
        list(llm.stream(prompts, PARAMS))


@pytest.mark.parametrize("params", ["x", "", 5, {"max_tokens": 2}, [None], [PARAMS, PARAMS]])
def test_sampling_params(llm, params):
    with pytest.raises(ConfigError, match="sampling_params"):
        llm.generate(["a"], params)


@pytest.mark.parametrize(
    "messages",
    [5, None, "hi", [5], [[]], {"role": "user", "content": "a"}, [{"role": "user"}]]
    + [[{"role": role, "content": content}] for role, content in (("user", 5), (["user"], "a"))]
    + [[{"role": "user", "content": "a", "tools": object()}]],
)
def test_messages(llm, messages):
    with pytest.raises(RequestError, match="message"):
        llm.chat(messages, PARAMS)


@pytest.mark.parametrize("sounds", [5, None, [5], {"a"}])
def test_sounds(llm, sounds):
    with pytest.raises(SpecJaxError):
        llm.transcribe(sounds)


@pytest.mark.parametrize(
    "arguments",
    [
        *({"max_num_seqs": value} for value in ("8", 2.5, 0, True)),
        *({"max_model_len": value} for value in ("8", 2.5, 0)),
        *({"seed": value} for value in ("8", 2.5, -1, 2**64)),
        *({"tensor_parallel_size": value} for value in ("2", 2.0, 0)),
        *({"speculative_config": value} for value in ("ngram", 5, [1], {1: 2})),
        *({"layout": value} for value in (5, "", "a\0b", "a" * 10**5)),
        *({"dtype": value} for value in (5, [], np.float32)),
    ],
)
def test_arguments_of_llm(path, arguments):
    with pytest.raises(ConfigError):
        LLM(path, **arguments)


@pytest.mark.parametrize("model", [5, None, "", b"x", "a\0b", "a" * 10**5, "~nobody-here/x"])
def test_models(model):
    with pytest.raises(SpecJaxError):
        LLM(model)


@pytest.mark.parametrize("speculation", ["ngram", 5, [1], {"method": 5}])
def test_with_speculation(llm, speculation):
    with pytest.raises(ConfigError):
        llm.with_speculation(speculation)


def test_a_prompt_of_megabytes_is_not_tokenized(llm):
    begin = time.monotonic()
    with pytest.raises(RequestError, match="has 10,000,000 characters, and a context of 128"):
        llm.generate("x" * 10**7, PARAMS)
    assert time.monotonic() - begin < 1
    with pytest.raises(RequestError, match=r"has 1,000,\d\d\d characters, and a context of 128"):
        llm.chat([{"role": "user", "content": "x" * 10**6}], PARAMS)
    most = 128 * llm.tokenizer.longest_token
    with pytest.raises(RequestError, match="tokens, which leaves no room"):
        llm.generate("x" * most, PARAMS)


def test_unseeded_requests_of_threads_have_keys_of_their_own(llm):
    keys: list[bytes] = []

    def make():
        keys.extend(llm.request("a", PARAMS).key.tobytes() for _ in range(200))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(set(keys)) == len(keys) == 800


def test_a_cold_start_of_threads_compiles_each_program_once(path):
    llm = LLM(path)
    threads = [threading.Thread(target=lambda: llm.generate("the inn", PARAMS)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert llm.engine.traces == len(llm.engine.compiler.names()) > 0
