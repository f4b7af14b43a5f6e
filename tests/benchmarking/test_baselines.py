"""transformers in the same run: the same tokens from the same files."""

import numpy as np
import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig, checkpoints
from spec_jax.benchmarking.baselines import (
    BASELINES,
    check_baseline,
    complete_with_llama_cpp,
    prepare_baselines,
)
from spec_jax.benchmarking.results import Setting
from spec_jax.benchmarking.systems import BenchTask, EncodedPrompt, digest
from spec_jax.checkpoints.draft_directory import write_draft
from spec_jax.errors import ConfigError
from tests.checkpoints import tiny

PROMPT = "the in the in the"


@pytest.mark.parametrize("name", BASELINES)
def test_what_is_not_installed(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="pip install"):
        check_baseline(name)


def test_llama_cpp_gets_our_sampling_and_stops():
    asked = {}

    class Model:
        def reset(self):
            asked["reset"] = True

        def set_seed(self, seed):
            asked["seed"] = seed

        def generate(self, ids, **options):
            asked.update(options, ids=ids)
            yield from (5, 6, 7, 8)

    setting = Setting(temperature=0.8, top_p=0.9)
    found = complete_with_llama_cpp(Model(), [1, 2], 3, setting, seed=2**32 + 4, stops=(6,))
    assert (found.token_ids, found.calls) == ([5, 6], 2)
    assert complete_with_llama_cpp(Model(), [1, 2], 3).token_ids == [5, 6, 7]
    assert asked["ids"] == [1, 2] and asked["reset"] and asked["temp"] == 0.0
    assert (asked["top_k"], asked["min_p"], asked["repeat_penalty"]) == (0, 0.0, 1.0)


@pytest.mark.torch
def test_transformers_gets_what_a_draft_borrows_from_its_target(tmp_path):
    """The target's own weights as a draft, and the tokens that it may propose."""
    path = tiny.write_directory(tmp_path / "target", tiny.CONFIG)
    target = checkpoints.load(str(path))
    llm = LLM(str(path), dtype="float32")
    ids = llm.tokenizer.encode(PROMPT)
    answer = llm.generate([ids], SamplingParams(max_tokens=12, ignore_eos=True))[0].token_ids
    lending_target = checkpoints.Checkpoint(
        target.model, target.tokenizer, target.tokenizer.eos_token_ids, "target"
    )
    others = np.setdiff1d(np.arange(target.model.config.vocab_size), answer)
    notes: list[str] = []
    for outputs, calls in ((None, 4), (np.unique(answer), 4), (others, 12)):
        draft = tmp_path / f"draft{calls}{outputs is None}"
        borrowed = ("embed.weight", "head.weight")
        write_draft(
            draft, target.model, lending_target, "float32", outputs=outputs, borrowed=borrowed
        )
        config = SpeculativeConfig(
            method="draft_model",
            draft=str(draft),
            num_speculative_tokens=2,
            draft_length_policy="constant",
        )
        given = (("transformers",), llm, str(path), [config], notes.append)
        _, drafting = prepare_baselines(*given)
        task = BenchTask([EncodedPrompt(0, ids)], [0], Setting(), 12, True, 1, "t")
        _, (request,) = drafting.run(task)
        assert (request.digest, request.rounds) == (digest(answer), calls)
    assert not notes
    tensors = tiny.llama_tensors(tiny.CONFIG)
    tensors.pop("model.norm.weight")
    lacking = tiny.write_directory(tmp_path / "lacking", tiny.CONFIG, tensors)
    config = SpeculativeConfig(
        method="draft_model",
        draft=str(lacking),
        num_speculative_tokens=2,
        draft_length_policy="constant",
    )
    given = (("transformers",), llm, str(path), [config], notes.append)
    (plain,) = prepare_baselines(*given)
    assert plain.system.method == "none"
    assert "it finds no model.norm.weight there" in notes[0]


@pytest.mark.torch
@pytest.mark.parametrize("form", ["directory", "gguf"])
def test_transformers_gives_our_tokens(tmp_path, form):
    write = tiny.write_gguf if form == "gguf" else tiny.write_directory
    # transformers reads no head_dim from a GGUF file.
    config = tiny.CONFIG | {"head_dim": 4}
    path = write(tmp_path / f"target.{form}", config)
    llm = LLM(str(path), dtype="float32", quantization="none")
    configs = [
        SpeculativeConfig(
            method="prompt_lookup", num_speculative_tokens=2, draft_length_policy="constant"
        ),
        SpeculativeConfig(
            method="draft_model",
            draft=str(path),
            num_speculative_tokens=2,
            draft_length_policy="constant",
        ),
        SpeculativeConfig(
            method="suffix", num_speculative_tokens=2, draft_length_policy="constant"
        ),
    ]
    notes: list[str] = []
    systems = list(prepare_baselines(("transformers",), llm, str(path), configs, notes.append))
    assert [each.system.name for each in systems] == [
        "transformers, plain",
        "transformers, prompt_lookup, K = 2",
        "transformers, draft_model, K = 2",
    ]
    assert notes == []
    ids = llm.tokenizer.encode(PROMPT)
    ours = llm.generate([ids], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    task = BenchTask([EncodedPrompt(0, ids, "c")], [0], Setting(), 12, True, 1, "t")
    for each in systems:
        seconds, (request,) = each.run(task)
        assert request.digest == digest(ours.token_ids), each.system.name
        assert 0 < request.first_token_seconds < request.seconds <= seconds
        assert (request.tokens, request.category) == (12, "c")
        drafts = each.system.method == "draft_model"  # the target itself: two of two are kept
        assert request.rounds == (4 if drafts else request.rounds) and request.rounds <= 12
    setting = Setting(temperature=0.9)
    sampled = BenchTask([EncodedPrompt(0, ids)], [3], setting, 12, True, 1, "t")
    one, other = (systems[0].run(sampled)[1][0] for _ in range(2))
    assert one.digest == other.digest != digest(ours.token_ids)
    assert callable(systems[0].complete)
