"""Every method and every say of the host on two emulated devices: the text is one device's."""

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, Layout, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints.draft_directory import Lender, write_draft
from spec_jax.sharding import Rule
from spec_jax.training.config import TrainingConfig
from spec_jax.training.draft import BORROWED, untrained_draft
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
    deep = write_model(path / "deep", vocabulary("byte level"), layers=3)
    return {
        "target": write_model(path / "target", vocabulary("byte level")),
        "draft": write_model(path / "draft", vocabulary("sentencepiece"), seed=1),
        "deep": deep,
        "reader": write_reader(path / "reader", deep),
    }


def write_reader(path, target: str) -> str:
    """A draft of the target's last layer that reads its states, with weights drawn for that."""
    llm = LLM(target)
    training = TrainingConfig(architecture="features", layers=1, from_layers=(2,))
    draft = untrained_draft(llm.engine.target, training)
    shape = draft.weights["fusion.state.weight"].shape
    drawn = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    draft = draft.with_weights({"fusion.state.weight": jnp.asarray(drawn)})
    borrowed = tuple(name for name in draft.weights if name.startswith(BORROWED))
    lender = Lender("deep", llm.engine.target, llm.tokenizer)
    write_draft(path, draft, lender, "float32", outputs=None, borrowed=borrowed)
    return str(path)


def texts(directories, layout, config, target="target", **grammar):
    """Tokens of three rows in two calls, so that every compiled program meets its own results."""
    llm = LLM(directories[target], layout=layout, speculative_config=config)
    params = [*PARAMS[:2], SamplingParams(max_tokens=16, temperature=1.2, seed=2, **grammar)]
    outputs = llm.generate(PROMPTS, params) + llm.generate(PROMPTS[::-1], params[::-1])
    assert all(output.error is None for output in outputs)
    return [output.token_ids for output in outputs]


def config(method: str, directories, **options) -> SpeculativeConfig:
    draft = None
    if method.startswith("universal"):
        draft = directories["draft"]
    if method == "draft_model":
        draft = directories["reader"]
    return SpeculativeConfig(method=method, draft=draft, num_speculative_tokens=3, **options)


REGEX = {"regex": "[a-c]{3,9}( [0-9]{2}){2}"}
CASES = [
    ("universal_vocabulary", {}, {}, "tensor"),
    ("universal_vocabulary", {"lookahead": "heuristic"}, {}, "data"),
    ("universal_text", {}, {}, "tensor"),
    ("universal_text", {"lookahead": "confidence"}, REGEX, "data"),
    ("early_exit", {"early_exit_layers": 1}, {}, "tensor"),
    ("draft_model", {}, {}, "tensor"),
    ("draft_model", {"lookahead": "heuristic"}, {}, "data"),
    ("prompt_lookup", {"lookahead": "heuristic"}, {}, "tensor"),
    ("prompt_lookup", {}, REGEX, "tensor"),
]


@pytest.mark.parametrize(
    ("method", "options", "grammar", "layout"), often(CASES, [CASES[0], CASES[5]])
)
def test_the_text_is_one_devices(directories, method, options, grammar, layout):
    target = "deep" if method in ("early_exit", "draft_model") else "target"
    chosen = config(method, directories, **options)
    found = texts(directories, LAYOUTS[layout], chosen, target, **grammar)
    assert found == texts(directories, None, chosen, target, **grammar)
