"""Whisper models in CTranslate2's format: the same weights, and no damage unseen."""

import shutil

import numpy as np
import pytest

from spec_jax import checkpoints
from spec_jax.checkpoints.ctranslate2_directory import Ctranslate2Directory
from spec_jax.checkpoints.shape import read_shape
from spec_jax.errors import CheckpointError
from tests.speech import as_ctranslate2, packed, tokenizer, write_speech_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("speech") / "model"
    write_speech_model(path)
    return path


def write(path, content):
    path.mkdir(exist_ok=True)
    (path / "model.bin").write_bytes(content)
    tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("kind", [np.float32, np.float16, np.int8], ids=lambda kind: kind.__name__)
def test_weights_are_those_of_the_same_model(directory, tmp_path, kind):
    path = write(tmp_path / "model", as_ctranslate2(directory, kind))
    found, expected = (checkpoints.load(each, dtype="float32") for each in (path, directory))
    assert found.model.config == expected.model.config
    assert read_shape(path).config == expected.model.config
    assert found.speech is not None and found.eos_token_ids == expected.eos_token_ids == (256,)
    for name, weight in expected.model.weights.items():
        weight, ours = np.asarray(weight), np.asarray(found.model.weights[name])
        # Half precision keeps 11 bits, eight bits half of 1/127 of a row's largest.
        steps = {np.float32: 0.0, np.float16: 2.0**-11, np.int8: 0.5 / 127}[kind]
        assert np.abs(ours - weight).max() <= steps * np.abs(weight).max() * 1.001, name


def test_what_is_suppressed(directory, tmp_path):
    path = write(tmp_path / "model", as_ctranslate2(directory))
    (path / "config.json").write_text('{"suppress_ids": [1, 2], "suppress_ids_begin": [220]}')
    speech = checkpoints.load(path).speech
    assert (speech.suppressed, speech.suppressed_first) == ((1, 2), (220,))


ONE = {"decoder/num_heads": np.array(2, np.int16), "decoder/a": np.ones((2, 3), np.float16)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (packed(ONE, version=5), "version 5"),
        (packed(ONE, spec="TransformerSpec"), "it is a TransformerSpec"),
        (packed(ONE)[:-1], "buffer"),
        (packed(ONE) + b"x", "1 bytes follow its end"),
        (packed(ONE).replace(b"\2\0\0\0\3\0\0\0", b"\2\0\0\0\4\0\0\0"), "takes 12 bytes"),
        (packed(ONE).replace(b"\2\0\0\0\3\0\0\0", b"\xff\xff\xff\xff\xff\xff\xff\xff"), "takes 12"),
        (b"", "cannot mmap an empty file"),
        (packed(ONE), "it has no 'model.decoder.embed_tokens.weight'"),
    ],
)
def test_damage_is_named(tmp_path, content, said):
    with pytest.raises(CheckpointError, match=said):
        checkpoints.load(write(tmp_path / "model", content))


def test_keys_with_a_bias_are_refused(directory, tmp_path):
    path = write(tmp_path / "model", as_ctranslate2(directory, np.float32))
    whole = Ctranslate2Directory(path)
    variable = whole._variables["decoder/layer_0/self_attention/linear_0/bias"]
    content = bytearray((path / "model.bin").read_bytes())
    content[variable.offset + 4 * 20] = 1
    with pytest.raises(CheckpointError, match="has a bias of keys"):
        Ctranslate2Directory(write(path, bytes(content)))


def test_a_missing_tokenizer(directory, tmp_path):
    path = write(tmp_path / "model", as_ctranslate2(directory))
    (path / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json is missing; copy it"):
        checkpoints.load(path)
    shutil.copy(directory / "config.json", path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="it is no tokenizer"):
        checkpoints.load(path)


def test_mutants_load_or_are_refused(tmp_path):
    """Headers only: bytes of the weights may be anything."""
    random = np.random.default_rng(0)
    header = packed(dict(ONE, **{f"encoder/x{i}": np.ones(3, np.int8) for i in range(9)}))
    refused = 0
    for _ in range(500):
        mutant = bytearray(header)
        for _ in range(random.integers(1, 4)):
            mutant[random.integers(len(mutant))] = random.integers(256)
        path = write(tmp_path / "model", bytes(mutant[: random.integers(1, 2 * len(mutant))]))
        try:
            Ctranslate2Directory(path)
        except CheckpointError:
            refused += 1
    assert refused > 300
