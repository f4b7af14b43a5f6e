"""Whisper models in CTranslate2's format: the same weights, and no damage unseen."""

import json
import shutil

import numpy as np
import pytest

from spec_jax import checkpoints
from spec_jax.checkpoints.ctranslate2_directory import Ctranslate2Directory
from spec_jax.checkpoints.files import fingerprint
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


@pytest.mark.parametrize("ids", [5, ["a"], [-1], [2000], [1.5], [True]])
def test_suppressed_ids_that_are_none(directory, tmp_path, ids):
    path = write(tmp_path / "model", as_ctranslate2(directory))
    (path / "config.json").write_text(json.dumps({"suppress_ids": ids}))
    with pytest.raises(
        CheckpointError, match=r"config.json: suppress_ids is .*; it should be a list"
    ):
        checkpoints.load(path)


ONE = {"decoder/num_heads": np.array(2, np.int16), "decoder/a": np.ones((2, 3), np.float16)}
LINEAR, SCALE = (f"encoder/layer_0/ffn/linear_0/weight{each}" for each in ("", "_scale"))
EIGHT = {LINEAR: np.ones((2, 3), np.int8)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (packed(ONE, version=5), "version 5"),
        (packed(ONE, spec="TransformerSpec"), "it is a TransformerSpec"),
        (packed(ONE)[:-1], "4 bytes are declared at byte"),
        (packed(ONE) + b"x", "1 bytes follow its end"),
        (packed(ONE).replace(b"\2\0\0\0\3\0\0\0", b"\2\0\0\0\4\0\0\0"), "takes 12 bytes"),
        (packed(ONE).replace(b"\2\0\0\0\3\0\0\0", b"\xff\xff\xff\xff\xff\xff\xff\xff"), "takes 12"),
        (b"", "cannot mmap an empty file"),
        (packed(ONE), "it has no 'model.decoder.embed_tokens.weight'"),
        (packed({"decoder/embeddings/weight": np.ones(4, np.float16)}), "number of dimensions"),
        (packed({"decoder/num_heads": np.array(np.inf, np.float32)}), "infinity"),
        (packed({"decoder/a": np.ones((0, 3), np.float16)}), "takes 0 bytes"),
        (packed({"decoder/pre_norm": np.array(0, np.int8)}), "decoder/pre_norm is 0"),
        (packed({"decoder/activation": np.array(1, np.int8)}), "decoder/activation is 1"),
        (packed({LINEAR: np.ones((2, 3), np.int16)}), "is stored as int16; convert the model"),
        (packed(EIGHT), "has no scale for each of its rows"),
        (packed(EIGHT | {SCALE: np.ones(5, np.float32)}), "has no scale for each of its rows"),
        (packed(EIGHT | {SCALE: np.zeros(2, np.float32)}), "are not all positive numbers"),
        (
            packed({f"decoder/{each}": np.ones(3, np.float16) for each in ("a/beta", "a/bias")}),
            "it holds model.decoder.a.bias twice",
        ),
    ],
)
def test_damage_is_named(tmp_path, content, said):
    with pytest.raises(CheckpointError, match=said):
        checkpoints.load(write(tmp_path / "model", content))


def test_a_count_is_refused_before_its_entries_are_kept(tmp_path):
    many = packed({f"decoder/{i}": np.ones(1, np.float16) for i in range(20_000)})
    with pytest.raises(CheckpointError, match="20000 entries are declared; at most 16384 are read"):
        Ctranslate2Directory(write(tmp_path / "model", many))


def test_the_fingerprint_is_of_the_weights(directory, tmp_path):
    """Processes of a run agree by it that they load the same model."""
    content = bytearray(as_ctranslate2(directory))
    before = fingerprint(write(tmp_path / "model", bytes(content)))
    content[len(content) // 2 :: 64] = bytes(len(content[len(content) // 2 :: 64]))
    assert fingerprint(write(tmp_path / "model", bytes(content))) != before


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_a_wrong_number_of_heads(directory, tmp_path, stack):
    """It changes no shape."""
    content = as_ctranslate2(directory)
    two, one = (f"{stack}/num_heads".encode() + b"\0\0\2\2\0\0\0" + each for each in (b"\2", b"\1"))
    assert content.count(two) == 1
    with pytest.raises(CheckpointError, match="encoder and decoder have"):
        checkpoints.load(write(tmp_path / "model", content.replace(two, one)))


def test_two_kinds_of_half_precision_are_refused(directory, tmp_path):
    """They have one size, so that a wrong byte changes every number and no shape."""
    content = bytearray(as_ctranslate2(directory, np.float16))
    whole = Ctranslate2Directory(write(tmp_path / "model", bytes(content)))
    variable = whole.variables["decoder/layer_1/attention/linear_2/weight"]
    kind = variable.offset - 5  # a byte, before four for the size
    assert content[kind] == 4
    content[kind] = 5
    with pytest.raises(CheckpointError, match="some weights are float16 and others bfloat16"):
        Ctranslate2Directory(write(tmp_path / "model", bytes(content)))


def test_keys_with_a_bias_are_refused(directory, tmp_path):
    path = write(tmp_path / "model", as_ctranslate2(directory, np.float32))
    whole = Ctranslate2Directory(path)
    variable = whole.variables["decoder/layer_0/self_attention/linear_0/bias"]
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
    with pytest.raises(CheckpointError, match="it is not a tokenizer"):
        checkpoints.load(path)


@pytest.mark.parametrize("kind", [np.float16, np.int8], ids=lambda kind: kind.__name__)
def test_mutants_of_all_but_the_weights_are_refused_or_the_same(directory, tmp_path, kind):
    """`TensorWeights` refuses names or shapes that differ from the model that a file describes."""
    random = np.random.default_rng(0)
    content = as_ctranslate2(directory, kind)
    path = write(tmp_path / "model", content)
    whole = Ctranslate2Directory(path)
    expected = {name: np.array(whole.read(name)) for name in whole.shapes}
    header = np.ones(len(content), bool)
    for each in whole.variables.values():
        size = np.prod(each.shape) * np.dtype(each.dtype).itemsize
        header[each.offset : each.offset + size] = False
    places, refused = np.flatnonzero(header), 0
    for _ in range(500):
        mutant = bytearray(content)
        for _ in range(random.integers(1, 3)):
            mutant[random.choice(places)] = random.choice([0, 1, 255, random.integers(256)])
        if random.random() < 0.1:
            mutant = mutant[: random.integers(len(mutant))]
        (path / "model.bin").write_bytes(mutant)
        try:
            found = Ctranslate2Directory(path)
            shapes = {name: found.read(name).shape for name in found.shapes}
            assert shapes == found.shapes
            if shapes == whole.shapes:
                for name, tensor in expected.items():
                    np.testing.assert_array_equal(found.read(name), tensor, err_msg=name)
        except CheckpointError:
            refused += 1
    assert refused > 300
