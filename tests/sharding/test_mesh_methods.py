"""Every method and every say of the host on two emulated devices: the text is one device's."""

import pytest

from spec_jax import LLM, Layout, SamplingParams, SpeculativeConfig
from spec_jax.sharding import Rule
from tests.often import often
from tests.pairs import write_model
from tests.vocabularies import vocabulary

PROMPTS = ["the quick brown fox and then", "über", "What is the capital of France? " * 2]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.2, seed=2),
]
ROWS = (("batch", Rule(("data",))),)
LAYOUTS = {
    "tensor": Layout.tensor_parallel(2),
    "data": Layout("data", (("data", 2), ("model", 1)), "cpu", target=ROWS, draft=ROWS),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return {
        "target": write_model(path / "target", vocabulary("byte level")),
        "draft": write_model(path / "draft", vocabulary("sentencepiece"), seed=1),
        "deep": write_model(path / "deep", vocabulary("byte level"), layers=3),
    }


def texts(directories, layout, config, target="target", **grammar):
    """Tokens of three rows in two calls, so that every compiled program meets its own results."""
    llm = LLM(directories[target], layout=layout, speculative_config=config)
    params = [*PARAMS[:2], SamplingParams(max_tokens=16, temperature=1.2, seed=2, **grammar)]
    outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS[::-1], params[::-1])
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def config(method: str, directories, **options) -> SpeculativeConfig:
    draft = directories["draft"] if method.startswith("universal") else None
    return SpeculativeConfig(method=method, draft=draft, num_speculative_tokens=3, **options)


REGEX = {"structured_outputs": {"regex": "[a-c]{3,9}( [0-9]{2}){2}"}}
CASES = [
    ("universal_vocabulary", {}, {}, "tensor"),
    ("universal_vocabulary", {"draft_length_policy": "heuristic"}, {}, "data"),
    ("universal_text", {}, {}, "tensor"),
    ("universal_text", {"draft_length_policy": "confidence"}, REGEX, "data"),
    ("early_exit", {"early_exit_layers": 1}, {}, "tensor"),
    ("prompt_lookup", {"draft_length_policy": "heuristic"}, {}, "tensor"),
    ("prompt_lookup", {}, REGEX, "tensor"),
]


@pytest.mark.parametrize(("method", "options", "grammar", "layout"), often(CASES, CASES[-1:]))
def test_the_text_is_one_devices(directories, method, options, grammar, layout):
    target = "deep" if method == "early_exit" else "target"
    chosen = config(method, directories, **options)
    found = texts(directories, LAYOUTS[layout], chosen, target, **grammar)
    assert found == texts(directories, None, chosen, target, **grammar)
