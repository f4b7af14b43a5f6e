"""Every damaged, incomplete or foreign checkpoint ends in an error that names it and a remedy."""

import json

import ml_dtypes
import numpy as np
import pytest

from spec_jax import CheckpointError, ConfigError, checkpoints
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory, write_gguf, write_json

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def error_of(reference) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(reference)
    return str(caught.value)


def assert_names(message: str, *parts: object) -> None:
    for part in parts:
        assert str(part) in message, message


# Files


def test_missing_path_suggests_a_neighbour(tmp_path):
    write_directory(tmp_path / "smollm2-135m")
    (tmp_path / ".hidden").mkdir()
    for wrong in ("smolm2-135m", "smollm2-135m.gguf"):
        message = error_of(tmp_path / wrong)
        assert_names(message, tmp_path / wrong, "does not exist", "Did you mean 'smollm2-135m'?")
    assert_names(error_of(tmp_path / "quite-another"), "Known: smollm2-135m.")


def test_missing_parent(tmp_path):
    message = error_of(tmp_path / "no" / "model.gguf")
    assert_names(message, "model.gguf does not exist", f"Nor does the directory {tmp_path / 'no'}")


def test_a_misspelt_relative_path_is_not_taken_for_a_hub_id(tmp_path, monkeypatch):
    write_directory(tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert_names(error_of("models/tinny"), "models/tinny does not exist", "Did you mean 'tiny'?")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_stay_closed(tmp_path, name):
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"cos\nsystem\n(S'touch owned'\ntR.")
    assert_names(error_of(tmp_path), name, "pickle", "safetensors")
    assert_names(error_of(tmp_path / name), name, "pickle", "safetensors")


def test_other_files(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"")
    assert_names(error_of(tmp_path / "model.onnx"), "model.onnx is not a model", ".gguf", ".toml")


def test_directory_without_config(tmp_path):
    assert_names(error_of(tmp_path), tmp_path / "config.json", "missing")


def test_directory_without_weights(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert_names(error_of(tmp_path), tmp_path, "neither model.safetensors nor")


def test_directory_without_tokenizer(tmp_path):
    write_directory(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    assert_names(error_of(tmp_path), tmp_path, "no tokenizer", "tokenizer.json")


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1', "\xff"])
def test_config_that_is_no_json_object(tmp_path, text):
    write_directory(tmp_path)
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert_names(error_of(tmp_path), tmp_path / "config.json", "Download it again")


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_safetensors(tmp_path, keep):
    file = write_directory(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert_names(error_of(tmp_path), file, "truncated or damaged", "Download it again")


def test_missing_shard(tmp_path):
    write_directory(tmp_path, shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    shard.unlink()
    assert_names(error_of(tmp_path), shard, "missing")


def test_index_that_promises_too_much(tmp_path):
    write_directory(tmp_path, shards=2)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    write_json(index, {"weight_map": weight_map | {"x.weight": weight_map[Q_PROJ]}})
    assert_names(error_of(tmp_path), weight_map[Q_PROJ], "lacks tensor 'x.weight'", index.name)
    write_json(index, {})
    assert_names(error_of(tmp_path), index, "weight_map")


@pytest.mark.parametrize(
    "outside", ["../other/{}", "{root}/other/{}", "sub/../../other/{}", 5, None]
)
def test_index_that_leaves_its_directory(tmp_path, outside):
    write_directory(tmp_path / "other", shards=2)
    index = write_directory(tmp_path / "model", shards=2) / "model.safetensors.index.json"
    (tmp_path / "model" / "sub").mkdir()
    weight_map = json.loads(index.read_text())["weight_map"]
    entry = outside
    if isinstance(outside, str):
        entry = outside.format(weight_map[Q_PROJ], root=tmp_path)
        assert (index.parent / entry).is_file()
    write_json(index, {"weight_map": weight_map | {Q_PROJ: entry}})
    assert_names(
        error_of(index.parent), index, repr(Q_PROJ), repr(entry), "a file of the directory"
    )


def test_index_of_links_into_a_hub_cache(tmp_path):
    snapshot = write_directory(tmp_path / "snapshots" / "0123", shards=2)
    (tmp_path / "blobs").mkdir()
    for i, file in enumerate(sorted(snapshot.glob("*.safetensors"))):
        file.rename(tmp_path / "blobs" / str(i))
        file.symlink_to(f"../../blobs/{i}")
    checkpoints.load(snapshot)


def test_truncated_gguf(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    for keep in [0, 3, 6, 20, 200, 3000, len(whole) // 2, len(whole) - 1]:
        file.write_bytes(whole[:keep])
        assert_names(error_of(file), file, "truncated or damaged", "Download it again")


def test_gguf_with_every_byte_of_its_header_flipped_ends_in_an_error_or_a_model(tmp_path):
    """Damage anywhere never ends in an error of another type."""
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    for at in [*range(24), *random.integers(24, 6000, 60)]:
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        file.write_bytes(bytes(damaged))
        try:
            checkpoints.load(file)
        except CheckpointError as error:
            assert str(error)


def test_a_git_lfs_pointer_is_recognised(tmp_path):
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"
    file = write_directory(tmp_path) / "model.safetensors"
    file.write_bytes(pointer)
    assert_names(error_of(tmp_path), file, "Git LFS pointer", "git lfs pull")
    (tmp_path / "tiny.gguf").write_bytes(pointer)
    assert_names(error_of(tmp_path / "tiny.gguf"), "Git LFS pointer", "git lfs pull")


# Tensors


def test_missing_tensor(tmp_path):
    tensors = llama_tensors(CONFIG)
    del tensors[Q_PROJ]
    message = error_of(write_directory(tmp_path, tensors=tensors))
    assert_names(message, tmp_path, "lacks 1 of the 21", Q_PROJ, "(24, 16)")


def test_missing_head_of_an_untied_model(tmp_path):
    tensors = llama_tensors(CONFIG)
    del tensors["lm_head.weight"]
    assert_names(error_of(write_directory(tmp_path, tensors=tensors)), "lm_head.weight")


def test_unexpected_tensor(tmp_path):
    tensors = llama_tensors(CONFIG)
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(24, np.float32)
    message = error_of(write_directory(tmp_path, tensors=tensors))
    assert_names(
        message, tmp_path, "model.layers.0.self_attn.q_proj.bias", "(24,)", "wrong results"
    )


def test_wrong_shape(tmp_path):
    tensors = llama_tensors(CONFIG)
    tensors[Q_PROJ] = tensors[Q_PROJ][:-1]
    message = error_of(write_directory(tmp_path / "tiny", tensors=tensors))
    assert_names(message, tmp_path / "tiny", Q_PROJ, "(23, 16)", "(24, 16)")
    tensors = llama_tensors(CONFIG)
    tensors["model.norm.weight"] = np.ones(15, np.float32)
    file = write_gguf(tmp_path / "tiny.gguf", tensors=tensors)
    assert_names(error_of(file), file, "output_norm.weight", "(15,)", "(16,)")


def test_integer_tensor(tmp_path):
    tensors = llama_tensors(CONFIG)
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(np.int8)
    message = error_of(write_directory(tmp_path, tensors=tensors))
    assert_names(message, tmp_path / "model.safetensors", Q_PROJ, "I8", "F32, F16, BF16")


def test_float8_tensor(tmp_path):
    tensors = llama_tensors(CONFIG)
    tensors[Q_PROJ] = tensors[Q_PROJ].astype(ml_dtypes.float8_e4m3fn)
    assert_names(error_of(write_directory(tmp_path, tensors=tensors)), Q_PROJ, "F8_E4M3")


# Configs


def test_unknown_architecture(tmp_path):
    message = error_of(write_directory(tmp_path / "tiny", dict(CONFIG, model_type="mamba")))
    assert_names(message, "'mamba'", "gpt_neox, granite, llama, mistral")
    file = write_gguf(tmp_path / "tiny.gguf", architecture="rwkv")
    assert_names(error_of(file), "'rwkv'", "llama, olmo2, phi3, qwen2")
    config = {key: value for key, value in CONFIG.items() if key != "model_type"}
    assert_names(error_of(write_directory(tmp_path / "none", config)), "model_type is None")


def test_quantized_weights(tmp_path):
    config = dict(CONFIG, quantization_config={"quant_method": "gptq", "bits": 4})
    assert_names(error_of(write_directory(tmp_path, config)), tmp_path, "'gptq'", ".gguf")


def test_unknown_dtype(tmp_path):
    with pytest.raises(ConfigError, match="dtype is 'float16'; choose one of auto, float32"):
        checkpoints.load(write_directory(tmp_path), dtype="float16")


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.expert_count", 8, "no 'llama.expert_used_count'"),
        ("llama.rope.dimension_count", 4, "llama.rope.dimension_count is 4"),
        ("llama.rope.scaling.type", "mine", "'mine'; supported: none, linear, yarn"),
        ("tokenizer.ggml.pre", "no-such", "smollm"),
    ],
)
def test_gguf_metadata_that_is_not_supported(tmp_path, key, value, said):
    file = tmp_path / "tiny.gguf"
    if key == "tokenizer.ggml.pre":
        write_gguf(file)
        file.write_bytes(file.read_bytes().replace(b"gpt-2", b"gpt-3"))
        assert_names(error_of(file), "'gpt-3'", said)
    else:
        assert_names(error_of(write_gguf(file, extra={key: value})), said)


def test_gguf_with_other_scaled_positions(tmp_path):
    tensors = llama_tensors(CONFIG) | {"rope_freqs.weight": np.array([1, 5, 9], np.float32)}
    file = write_gguf(tmp_path / "tiny.gguf", tensors=tensors)
    assert_names(error_of(file), "rope_freqs.weight", "Llama 3")


def test_gguf_of_another_version(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    whole = bytearray(file.read_bytes())
    whole[4:8] = (1).to_bytes(4, "little")
    file.write_bytes(bytes(whole))
    assert_names(error_of(file), file, "version 1")
