"""Layouts on the command line, and models converted for them."""

from pathlib import Path

import pytest

from spec_jax import LLM, Layout, SamplingParams
from tests.checkpoints.tiny import write_directory
from tests.cli.harness import run

SHARDING = Path(__file__).parents[2] / "sharding"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_directory(tmp_path_factory.mktemp("model") / "tiny")


def text(capsys, model, *flags) -> str:
    code, out, err = run(
        capsys, "generate", "the inn", "--target", model, *flags, "--max-tokens", 8
    )
    assert code == 0, err
    return out


def test_a_layout_does_not_change_what_is_said(capsys, model):
    plain = text(capsys, model)
    assert plain and text(capsys, model, "--layout", SHARDING / "cpu-4.toml") == plain


def test_a_converted_model_says_the_same(capsys, model, tmp_path):
    saved, layout = tmp_path / "saved", SHARDING / "cpu-4.toml"
    convert = ("convert", model, saved, "--layout", layout)
    code, out, err = run(capsys, *convert)
    assert (code, out) == (0, "") and f"wrote {saved}" in err.replace("\n", "")
    assert text(capsys, saved) == text(capsys, model)
    code, _, err = run(capsys, *convert)
    assert code == 2 and "choose a new directory, nothing is overwritten" in err


def test_in_python_no_file_is_needed(model):
    outputs = [
        LLM(str(model), layout=layout).generate("the inn", SamplingParams(max_tokens=8))
        for layout in (None, Layout.tensor_parallel(2))
    ]
    assert outputs[0][0].token_ids == outputs[1][0].token_ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "x", "--layout", "none.toml"), "the layout none.toml cannot be read"),
        (
            ("chat", "--layout", SHARDING / "cpu-2x2.toml"),
            "is for 2 processes, but only one of them",
        ),
        (
            ("generate", "x", "--layout", SHARDING / "tpu-v5e-8.toml"),
            "heads of the target into 8 shards",
        ),
    ],
)
def test_what_cannot_work_is_refused(capsys, model, arguments, message):
    code, out, err = run(capsys, *arguments, "--target", model)
    assert (code, out) == (2, "") and message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no source given; write spec-jax convert SRC --out DIR"),
        (("x",), "no output given; name the directory with --out"),
        (("x", "y", "--out", "z"), "named twice, y and z; name the directory with --out"),
        (("x", "--out", "y", "--dtype", "int3"), "dtype is 'int3'"),
        (("x", "y", "--dtype", "int3"), "dtype is 'int3'"),
        (("x", "y", "--format", "orbx"), "format is 'orbx'. Did you mean 'orbax'?"),
        (("x", "y", "--format", "safetensors", "--quantization", "int8"), "use format orbax"),
    ],
)
def test_what_convert_refuses(capsys, arguments, message):
    code, _, err = run(capsys, "convert", *arguments)
    assert code == 2 and message in err
