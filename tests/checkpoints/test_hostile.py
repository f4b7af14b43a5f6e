"""What a hostile or damaged checkpoint declares is refused before anything is built of it."""

import json
import os
import time

import pytest

from spec_jax import CheckpointError, RequestError, checkpoints
from spec_jax.checkpoints.shape import read_shape
from spec_jax.errors import SpecJaxError, printable, raising_panics
from spec_jax.text.tokenizer import Tokenizer
from tests.checkpoints.tiny import CONFIG, byte_tokenizer, write_directory, write_gguf, write_json
from tests.cli.harness import failure

ROPE = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**5}, "num_layers is 100000; expected an int"),
        ({"num_hidden_layers": 2000}, "declares 2000 layers, but holds only 21 tensors"),
        ({"vocab_size": 10**12}, "vocab_size is 1000000000000"),
        ({"max_position_embeddings": 10**12}, "max_position is 1000000000000"),
        ({"hidden_size": 2**40}, "embed_size is"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-5}, "norm_eps is -1e-05; expected a number >= 0"),
        ({"rope_parameters": [1]}, "config.json is truncated or damaged: it makes no sense"),
        ({"rope_parameters": ROPE | {"factor": -1.0}}, "factor"),
        ({"rope_parameters": ROPE | {"rope_theta": 0.0}}, "rope_theta is 0.0"),
        ({"model_type": ["llama"]}, "makes no sense"),
        ({"model_type": 5}, "unknown architecture"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"quantization_config": "int3"}, "the weights are quantized (quant_method 'int3')"),
        ({"eos_token_id": "</s>"}, "Field 'eos_token_id' with value '</s>'"),
        ({"eos_token_id": [[1]]}, "Field 'eos_token_id' with value [[1]]"),
        ({"eos_token_id": -1}, "texts is -1"),
        ({"eos_token_id": [2, 10**6]}, "texts is 1000000; expected an id below 268"),
    ],
)
def test_a_config_that_declares_too_much_or_nonsense(changes, said, tmp_path):
    path = write_directory(tmp_path / "tiny")
    checkpoints.load(path)  # which imports what reads it
    write_json(path / "config.json", CONFIG | changes)
    begin = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(path)
    assert said in str(caught.value) and time.monotonic() - begin < 5


@pytest.mark.parametrize("ids", ["</s>", [[1]], -1, [2, 10**6], 1.5, [True]])
def test_ends_of_texts_that_are_no_ids(ids, tmp_path):
    path = write_directory(tmp_path / "tiny")
    write_json(path / "generation_config.json", {"eos_token_id": ids})
    with pytest.raises(CheckpointError, match="the token that begins or ends texts is"):
        checkpoints.load(path)


@pytest.mark.parametrize("read", [checkpoints.load, read_shape])
def test_nesting_without_end(read, tmp_path):
    path = write_directory(tmp_path / "tiny")
    (path / "config.json").write_text('{"a":' * 200_000 + "1" + "}" * 200_000)
    with pytest.raises(CheckpointError, match=r"config.json is truncated or damaged"):
        read(path)


def test_a_config_of_gigabytes_is_not_read(tmp_path):
    path = write_directory(tmp_path / "tiny")
    with (path / "config.json").open("r+b") as file:
        file.truncate(2**33)  # holes take no room
    with pytest.raises(CheckpointError, match="it has more than 67108864 bytes"):
        checkpoints.load(path)


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
)
def test_a_pipe_in_place_of_a_file(name, tmp_path):
    path = write_directory(tmp_path / "tiny")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(CheckpointError, match="is not a file but a pipe, a socket or a device"):
        checkpoints.load(path)


def test_a_pipe_or_a_device_in_place_of_a_model(tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "zero.gguf").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe.toml")
    for name in ("pipe.gguf", "zero.gguf", "pipe.toml"):
        with pytest.raises(CheckpointError, match="is not a file but a pipe"):
            checkpoints.load(tmp_path / name)


def test_integers_are_not_weights(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    data = file.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # dimensions, and the only one
    assert data[at : at + 4] == bytes(4)  # float32
    file.write_bytes(data[:at] + (26).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(CheckpointError, match=r"holds integers \(I32\)"):
        checkpoints.load(file)


def test_tensors_that_overlap(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    data = file.read_bytes()
    name = b"output_norm.weight"
    at = data.index(name) + len(name) + 4 + 8 + 4
    file.write_bytes(data[:at] + bytes(8) + data[at + 8 :])
    with pytest.raises(CheckpointError, match="begins at 0 instead of"):
        checkpoints.load(file)


def test_the_last_tensor_of_another_size(tmp_path):
    file = write_gguf(tmp_path / "tiny.gguf")
    data = file.read_bytes()
    name = b"blk.1.ffn_down.weight"
    at = data.index(name) + len(name) + 4  # its dimensions, and then its type, float32
    float16 = data[: at + 16] + (1).to_bytes(4, "little") + data[at + 20 :]
    empty = data[:at] + bytes(8) + data[at + 8 :]
    for damaged, said in ((float16, "768 bytes follow the last tensor"), (empty, "holds nothing")):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=said):
            checkpoints.load(file)


def test_messages_are_safe_to_print():
    error = SpecJaxError("a\x1b[2Jb\x07\r\u202ec\nd é \ud800" + "x" * 10**6)
    assert str(error).startswith("a\\x1b[2Jb\\x07\\r\\u202ec\nd é \\ud800x")
    assert len(str(error)) < 2100 and str(error).endswith("x")
    assert printable("Ελληνικά 中文 🙂") == "Ελληνικά 中文 🙂"


def test_a_name_with_control_characters(tmp_path, capsys):
    message = failure(capsys, "convert", "x\x1b]0;owned\x07", tmp_path / "y")
    assert "\\x1b]0;owned\\x07" in message
    assert "\x1b" not in message and "\x07" not in message


class PanicException(BaseException):
    """As pyo3 raises it."""


def test_a_panic_of_the_tokenizers_library_is_an_error(tmp_path, monkeypatch):
    class Broken:
        def __getattr__(self, name):
            return lambda *args, **kwargs: None

        def encode(self, *args, **kwargs):
            raise PanicException("index out of bounds")

    with pytest.raises(RequestError, match=r"fails on a text of 3 characters: .*out of bounds"):
        Tokenizer(Broken(), eos_token_ids=()).encode("abc")
    with pytest.raises(KeyboardInterrupt), raising_panics():
        raise KeyboardInterrupt
    path = write_directory(tmp_path / "tiny")

    def panic(path):
        raise PanicException("no")

    monkeypatch.setattr("spec_jax.checkpoints.opening.tokenizer_from_directory", panic)
    with pytest.raises(CheckpointError, match="the tokenizers library fails: no"):
        checkpoints.load(path)


def test_a_tokenizer_may_have_more_tokens_than_the_embedding(tmp_path):
    """Like Gemma 3's; such a token is refused where a prompt has it."""
    path = write_directory(tmp_path / "tiny")
    backend = byte_tokenizer()
    backend.add_special_tokens([f"<more{i}>" for i in range(9)])
    backend.save(str(path / "tokenizer.json"))
    assert len(backend.get_vocab()) > json.loads((path / "config.json").read_text())["vocab_size"]
    checkpoints.load(path)
