"""Systems: the grid of them, what they share, and warm-up."""

import pytest

from spec_jax import LLM, checkpoints
from spec_jax.benchmarking.results import Setting
from spec_jax.benchmarking.systems import (
    BenchTask,
    EncodedPrompt,
    Ours,
    grid,
    one_of_each,
    prepare,
    system_of,
)
from spec_jax.config import SpeculativeConfig
from spec_jax.errors import ConfigError
from tests.checkpoints import tiny


def names(configs):
    return [system_of(each).name for each in configs]


def test_the_grid_has_what_methods_support():
    options = {"draft": "d", "draft_vocab_size": 100, "prompt_lookup_max": 2}
    found = grid(
        ("none", "prompt_lookup", "draft_model"),
        (0, 1, 2),
        policies=("constant", "confidence"),
        verifications=("coupled", "block"),
        options=options,
    )
    assert names(found) == [
        *("prompt_lookup, K = 1", "prompt_lookup, block verification, K = 1"),
        *("prompt_lookup, K = 2", "prompt_lookup, block verification, K = 2"),
        *("draft_model, K = 1", "draft_model, block verification, K = 1"),
        *("draft_model, confidence, K = 1", "draft_model, confidence, block verification, K = 1"),
        *("draft_model, K = 2", "draft_model, block verification, K = 2"),
        *("draft_model, confidence, K = 2", "draft_model, confidence, block verification, K = 2"),
    ]
    assert {each.draft for each in found if each.method == "draft_model"} == {"d"}
    assert all(each.draft is None for each in found if each.method == "prompt_lookup")


def test_what_keeps_the_same_tokens_is_measured_once():
    configs = grid(["prompt_lookup", "suffix"], [2], verifications=("coupled", "block"))
    runners = [Ours(system_of(each), None) for each in (SpeculativeConfig(), *configs)]
    kept = [each.system.name for each in one_of_each(runners)]
    assert kept == ["plain", "prompt_lookup, K = 2", "suffix, K = 2"]


def test_a_method_without_any_combination_is_refused():
    with pytest.raises(ConfigError, match="draft_length_policy is 'confidence'"):
        grid(("suffix",), (2,), policies=("confidence",))
    with pytest.raises(ConfigError, match="scoring is 'prefix_batch'"):
        grid(("early_exit",), (2,), scorings=("prefix_batch",))
    assert grid(("none",), (2,)) == grid(("suffix",), (0,)) == []


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    target, draft = (str(tiny.write_directory(folder / each)) for each in ("target", "draft"))
    opened, open_checkpoint = [], checkpoints.open_checkpoint

    def counting(reference, **options):
        opened.append(reference)
        return open_checkpoint(reference, **options)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(checkpoints, "open_checkpoint", counting)
        configs = grid(("draft_model", "prompt_lookup"), (1, 2), options={"draft": draft})
        found = list(prepare(LLM(target), configs))
    assert opened == [target, draft]
    return found


def test_systems_share_their_models(runners):
    plain, one, two, *_ = runners
    assert [each.system.num_speculative_tokens for each in (plain, one, two)] == [0, 1, 2]
    assert one.llm.engine.target is two.llm.engine.target is plain.llm.engine.target
    assert one.llm.engine.drafter.model is two.llm.engine.drafter.model
    assert [each.system.method for each in runners][3:] == ["prompt_lookup", "prompt_lookup"]


def test_warm_up_compiles_everything(runners):
    texts = [[5, 6, 7], [5] * 20, [8, 9], [6, 7]]
    prompts = [EncodedPrompt(i, text) for i, text in enumerate(texts)]
    task = BenchTask(prompts, range(4), Setting(temperature=0.8), 6, True, 2, "t")
    warm = task.warm_up()
    assert list(warm.prompts) == [prompts[1], prompts[0], prompts[2]]
    assert list(warm.seeds) == [1, 0, 2]
    one = runners[1]
    one.run(warm)
    traces = one.llm.engine.traces
    seconds, requests = one.run(task)
    assert one.llm.engine.traces == traces and seconds > 0
    assert [each.tokens for each in requests] == [6] * 4
    assert [each.digest for each in one.run(task)[1]] == [each.digest for each in requests]
