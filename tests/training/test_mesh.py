"""Training on an emulated mesh: rows over two devices, weights over two."""

import json

import numpy as np
import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig, checkpoints
from spec_jax.errors import ConfigError
from spec_jax.sharding import Layout, Rule
from spec_jax.training.config import TrainingConfig
from spec_jax.training.examples import read_examples
from spec_jax.training.export import Provenance, export
from spec_jax.training.run import TrainingRun
from tests.training.conftest import ROW

CONFIG = TrainingConfig(
    layers=1,
    reduced_vocab=64,
    sample_tokens=200,
    sequence_length=ROW,
    sample_batch=8,
    held_out=4,
    steps=4,
    batch_size=8,
    accumulate=2,
    warmup_steps=1,
    evaluate_every=2,
)
SHARDED = (
    ("batch", Rule(("data",))),
    *((name, Rule(("model",), replicate=True)) for name in ("heads", "kv_heads", "mlp", "vocab")),
)
LAYOUT = Layout("mixed", (("data", 2), ("model", 2)), "cpu", target=SHARDED, draft=SHARDED)


def history(llm, path, data_file, config=CONFIG):
    run = TrainingRun(llm, config, path, read_examples([data_file], llm.tokenizer, ROW))
    list(run.run())
    return run, [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def spread(target):
    return LLM(target, layout=LAYOUT, max_num_seqs=8)


@pytest.mark.slow
def test_a_mesh_trains_as_one_device_does(llm, spread, data_file, tmp_path):
    _, alone = history(llm, tmp_path / "alone", data_file)
    run, together = history(spread, tmp_path / "together", data_file)
    assert [each["step"] for each in together] == [0, 2, 4]
    for one, other in zip(alone, together, strict=True):
        for kind in ("greedy", "sampled"):
            assert other[kind] == pytest.approx(one[kind], abs=0.02)
    weights = run.state.weights["blocks.0.mlp.up.weight"]
    assert len(weights.sharding.device_set) == 4
    assert weights.addressable_shards[0].data.shape[1] == weights.shape[1] // 2
    moments = [leaf for leaf in run.state.optimizer[1][0].mu.values() if leaf.ndim == 2]
    assert moments and all(len(leaf.sharding.device_set) == 4 for leaf in moments)
    lending_target = checkpoints.Checkpoint(
        spread.engine.target, spread.tokenizer, spread.tokenizer.eos_token_ids, "tiny"
    )
    made = Provenance("tiny", "spec-jax train-draft ...", "prompts", "Apache-2.0")
    export(tmp_path / "together", run.best(), lending_target, CONFIG, made, "float32")
    draft = str(tmp_path / "together" / "draft.toml")
    params = SamplingParams(max_tokens=12)
    said = [
        each.with_speculation(SpeculativeConfig(method="draft_model", draft=draft))
        .generate("the inn", params)[0]
        .token_ids
        for each in (llm, spread)
    ]
    assert said[0] == said[1] == llm.generate("the inn", params)[0].token_ids


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6}, r"batch_size is 6 in 2 parts.* 2 shards; give a multiple of 4"),
        ({"reduced_vocab": 63}, r"reduced_vocab is 63.* 2 shards; give a multiple of 2"),
    ],
)
def test_what_the_layout_cannot_shard_is_refused(spread, data_file, tmp_path, changes, message):
    from dataclasses import replace

    with pytest.raises(ConfigError, match=message):
        history(spread, tmp_path / "run", data_file, replace(CONFIG, **changes))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_numbers_are_those_of_the_best_step(llm, data_file, tmp_path):
    run, measured = history(llm, tmp_path / "run", data_file)
    best = run.best()
    entry = next(each for each in measured if each["step"] == best.step)
    assert best.acceptance == {kind: entry[kind] for kind in ("greedy", "sampled")}
    assert np.isclose(
        sum(best.acceptance.values()), max(e["greedy"] + e["sampled"] for e in measured)
    )
