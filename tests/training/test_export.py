"""Drafts on disk: with the target's weights left out, whole, and read back."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax import LLM, SamplingParams, SpeculativeConfig, checkpoints
from spec_jax.checkpoints.draft_directory import MANIFEST
from spec_jax.checkpoints.hf_writer import write_model, write_tokenizer
from spec_jax.errors import CheckpointError, ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.registry import FAMILIES, family_of_shape
from spec_jax.models.rotary import RopeScaling
from spec_jax.training.config import TrainingConfig
from spec_jax.training.draft import untrained_draft
from spec_jax.training.export import Provenance, export
from spec_jax.training.run import TrainedDraft
from tests.checkpoints import tiny
from tests.reshaped import reshaped

OUTPUTS = np.arange(0, 200, 2)
PROVENANCE = Provenance("tiny", "spec-jax train-draft ...", "nothing", "Apache-2.0")

SHAPES = {
    "llama": {},
    "llama-tied": {"tied_head": True},
    "llama3": {"rope_scaling": RopeScaling(8.0, 1.0, 4.0, 8192), "rope_theta": 5e5},
    "llama-linear": {"rope_factor": 4.0},
    "mistral": {"sliding_window": 16},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": "head"},
    "gemma3_text": {
        "qk_norm": "head",
        "post_norms": True,
        "embedding_scale": 4.0,
        "activation": "gelu_tanh",
        "query_pre_attn_scalar": 8.0,
        "sliding_window": 16,
        "global_every": 2,
        "local_rope_theta": 1e4,
        "rope_theta": 1e6,
        "tied_head": True,
    },
}


def shape(**changes) -> TransformerConfig:
    base = TransformerConfig.of(
        vocab_size=len(tiny.TOKENS),
        embed_size=16,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        mlp_size=24,
        max_position=128,
    )
    return reshaped(base, **changes)


@pytest.mark.parametrize("name", SHAPES)
def test_a_model_written_is_the_model_read(name, tmp_path, llm):
    model = Model.random(shape(**SHAPES[name]), seed=3)
    assert family_of_shape(model.config).model_type == name.split("-")[0].replace("llama3", "llama")
    write_model(tmp_path, model, "float32")
    write_tokenizer(tmp_path, llm.tokenizer)
    found = checkpoints.load(tmp_path)
    assert found.model.config == model.config
    for weight, value in model.weights.items():
        np.testing.assert_allclose(found.model.weights[weight], value, atol=1e-6)
    text = "the inn é"
    assert found.tokenizer.encode(text) == llm.tokenizer.encode(text)
    assert found.eos_token_ids == llm.eos_token_ids
    message = [{"role": "user", "content": "hi"}]
    assert found.tokenizer.encode_chat(message) == llm.tokenizer.encode_chat(message)


def test_a_family_that_cannot_be_written_is_named():
    neox = shape(norm="layer", gated_mlp=False, parallel_residual=True)
    with pytest.raises(CheckpointError, match="can write models of the families"):
        family_of_shape(neox)
    assert {family.model_type for family in FAMILIES} >= {"llama", "qwen2"}


@pytest.fixture(scope="module")
def exported(llm, target, tmp_path_factory):
    path = tmp_path_factory.mktemp("exported")
    config = TrainingConfig(layers=1)
    base = llm.engine.target
    model = untrained_draft(base, config, OUTPUTS, base.placement)
    trained = TrainedDraft(model, OUTPUTS, 7, {"greedy": 0.5, "sampled": 0.25}, 1000)
    lending_target = checkpoints.Checkpoint(
        llm.engine.target, llm.tokenizer, llm.tokenizer.eos_token_ids, "tiny"
    )
    export(path, trained, lending_target, config, PROVENANCE, "float32")
    return path, model


def test_a_draft_is_read_with_its_targets_embedding(exported, llm, target):
    path, model = exported
    speculative = SpeculativeConfig(method="draft_model", draft=str(path / "draft.toml"))
    fast = llm.with_speculation(speculative)
    drafter = fast.engine.drafter
    for name, value in model.weights.items():
        np.testing.assert_array_equal(drafter.model.unpacked().weights[name], value)
    assert np.flatnonzero(np.asarray(drafter.columns) >= 0).tolist() == OUTPUTS.tolist()
    params = SamplingParams(max_tokens=12)
    prompts = ["the inn", "a b c"]
    plain = [each.token_ids for each in llm.generate(prompts, params)]
    outputs = fast.generate(prompts, params)
    assert [each.token_ids for each in outputs] == plain
    assert sum(each.metrics.draft_tokens for each in outputs) > 0


def test_a_draft_holds_nothing_of_its_target_on_disk(exported):
    from safetensors import safe_open

    path, _ = exported
    with safe_open(path / "draft" / "model.safetensors", framework="numpy") as file:
        names = list(file.keys())
    assert names and not [name for name in names if "embed" in name or "lm_head" in name]


def test_the_whole_draft_stands_alone(exported, llm):
    path, model = exported
    whole = checkpoints.load(path / "draft-whole").model
    assert whole.config.vocab_size == llm.engine.target.config.vocab_size
    tokens = jnp.asarray([[1, 5, 9, 2]])
    own, *_ = model.score(tokens, model.new_cache(1, 4))
    full, *_ = whole.score(tokens, whole.new_cache(1, 4))
    np.testing.assert_allclose(full[..., OUTPUTS], own, atol=1e-4)


def test_a_draft_alone_or_with_another_target_is_refused(exported, target, tmp_path):
    path, _ = exported
    with pytest.raises(CheckpointError, match="borrows its embedding from tiny"):
        checkpoints.load(path / "draft")
    random = np.random.default_rng(9)
    tensors = {
        name: random.standard_normal(value.shape).astype(np.float32)
        for name, value in tiny.llama_tensors(tiny.CONFIG).items()
    }
    other = tiny.write_directory(tmp_path / "other", tensors=tensors)
    speculative = SpeculativeConfig(method="draft_model", draft=str(path / "draft"))
    with pytest.raises(CheckpointError, match="other has another"):
        LLM(str(other), speculative_config=speculative)


def test_outputs_of_its_own_are_not_reduced_again(exported, llm):
    path, _ = exported
    speculative = SpeculativeConfig(
        method="draft_model", draft=str(path / "draft"), draft_vocab_size=50
    )
    with pytest.raises(ConfigError, match="leave draft_vocab_size out"):
        llm.with_speculation(speculative)


def test_other_methods_refuse_a_draft_that_is_one_targets(exported, llm):
    path, _ = exported
    for method in ("universal_vocabulary", "universal_text"):
        speculative = SpeculativeConfig(method=method, draft=str(path / "draft"))
        with pytest.raises(ConfigError, match="method 'draft_model'"):
            llm.with_speculation(speculative)


def test_a_manifest_of_another_version_is_refused(exported, llm, tmp_path):
    import shutil

    path, _ = exported
    copy = tmp_path / "draft"
    shutil.copytree(path / "draft", copy)
    manifest = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps({**manifest, "version": 99}))
    speculative = SpeculativeConfig(method="draft_model", draft=str(copy))
    with pytest.raises(CheckpointError, match="version 99"):
        llm.with_speculation(speculative)


@pytest.mark.parametrize("changes", [{"width": 8}, {}])
def test_a_draft_with_an_embedding_of_its_own_stands_alone(changes, llm, tmp_path):
    config = TrainingConfig(layers=1, embedding="own", **changes)
    base = llm.engine.target
    model = untrained_draft(base, config, OUTPUTS, base.placement)
    trained = TrainedDraft(model, OUTPUTS, 7, {"greedy": 0.5, "sampled": 0.25}, 1000)
    lending_target = checkpoints.Checkpoint(
        llm.engine.target, llm.tokenizer, llm.tokenizer.eos_token_ids, "tiny"
    )
    export(tmp_path, trained, lending_target, config, PROVENANCE, "float32")
    assert not (tmp_path / "draft-whole").exists()
    found = checkpoints.load(tmp_path / "draft")
    for name, value in model.weights.items():
        np.testing.assert_array_equal(found.model.weights[name], value)
    assert found.outputs.tolist() == OUTPUTS.tolist()


def test_the_card_says_what_it_is(exported):
    card = (exported[0] / "draft" / "README.md").read_text()
    for words in ("tiny", "0.500", "0.250", "100 tokens", "spec-jax train-draft"):
        assert words in card
