"""Shapes without weights: recipes that give one, and configs read alone."""

import json

import pytest

from spec_jax.checkpoints.byte_tokenizer import byte_tokenizer
from spec_jax.checkpoints.recipe import Published, Recipe
from spec_jax.checkpoints.reference import locate
from spec_jax.checkpoints.shape import read_shape
from spec_jax.errors import CheckpointError
from spec_jax.models.config import Experts
from tests.checkpoints import tiny

SIZES = {
    "vocab_size": 300,
    "embed_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "mlp_size": 24,
    "max_position": 64,
}


def write(tmp_path, head='name = "mine"', tail="", **shape):
    values = {**SIZES, **shape}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None]
    path = tmp_path / "mine.toml"
    path.write_text("\n".join([head, "[shape]", *lines, tail]))
    return path


def test_a_recipe_may_give_a_shape(tmp_path):
    tail = '[published]\nms_per_token = 2\nlayout = "cpu-1"\nsource = "us"'
    path = write(tmp_path, tail=tail, gated_mlp=False, norm="layer", rope_theta=500000)
    recipe = Recipe.read(path)
    assert recipe.shape is not None and recipe.shape.rotated.theta == 500000
    assert (recipe.shape.num_layers, recipe.shape.gated_mlp) == (2, False)
    assert recipe.published == Published(ms_per_token=2.0, layout="cpu-1", source="us")
    shape = read_shape(path)
    assert (shape.name, shape.config, shape.published) == ("mine", recipe.shape, recipe.published)
    assert locate(path, print) == ("mine", path)


def test_a_shape_may_have_windows(tmp_path):
    own = {"sliding_window": 16, "global_every": 2, "query_pre_attn_scalar": 8}
    shape = Recipe.read(write(tmp_path, **own, local_rope_theta=500)).shape
    assert shape is not None
    assert [layer.window for layer in shape.layers] == [16, None]
    local_theta = shape.layers[0].rotary.theta
    for value, expected in ((shape.query_pre_attn_scalar, 8.0), (local_theta, 500.0)):
        assert value == expected and isinstance(value, float)


def test_a_shape_may_have_experts(tmp_path):
    tail = "[shape.experts]\ncount = 4\nper_token = 2\nsize = 8"
    shape = Recipe.read(write(tmp_path, tail=tail)).shape
    assert shape is not None and shape.experts == Experts(count=4, per_token=2, size=8)
    assert [layer.mlp for layer in shape.layers] == ["experts"] * 2
    for line, said in (
        ("count = 1", "a token chooses 2 of 1 experts"),
        ("cuont = 4", "unknown key 'shape.experts.cuont'"),
        ("", "shape.experts.count is missing"),
    ):
        with pytest.raises(CheckpointError, match=said):
            Recipe.read(write(tmp_path, tail=tail.replace("count = 4", line)))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"sliding_window": 2.5}, "shape.sliding_window is 2.5; it should be a valid integer."),
        ({"sliding_window": 0}, "sliding_window is 0; expected an int >= 1"),
        ({"global_every": 2}, "global_every is 2, but without a sliding_window no layer is local"),
        ({"local_rope_theta": "x"}, "shape.local_rope_theta is 'x'; it should be a valid number."),
        ({"rope_factor": 0}, "rope_factor is 0.0; expected a number > 0"),
        ({"num_layer": 2}, "unknown key 'shape.num_layer'. Did you mean 'num_layers'?"),
        ({"rope_scaling": [2]}, "unknown key 'shape.rope_scaling'"),
        ({"head_dim": None}, "shape.head_dim is missing; add it."),
        ({"num_layers": 0}, "num_layers is 0; expected an int >= 1"),
        ({"num_layers": True}, "shape.num_layers is True; it should be a valid integer."),
        ({"num_layers": 2.0}, "shape.num_layers is 2.0; it should be a valid integer."),
        ({"num_kv_heads": 3}, "3 KV heads do not divide 4 query heads"),
        ({"gated_mlp": 1}, "shape.gated_mlp is 1; it should be a valid boolean."),
        ({"rope_theta": "10"}, "shape.rope_theta is '10'; it should be a valid number."),
        ({"norm": "lawyer"}, "shape.norm is 'lawyer'. Did you mean 'layer'?"),
        ({"head": 'name = "my model"'}, "name is 'my model'; it should be of letters"),
        ({"head": 'name = "m"\nlicense = "MIT"'}, "license belongs to weights"),
        ({"head": 'name = "m"\nshapes = 1'}, "unknown key 'shapes'. Did you mean 'shape'?"),
        ({"tail": '[source]\nhub = "a/b"'}, "source belongs to weights"),
        ({"tail": "published = 3"}, "unknown key 'shape.published'"),
        (
            {"tail": "[published]\nms_per_token = 0"},
            "published.ms_per_token is 0; it should be above 0",
        ),
        ({"tail": "[published]\nms_per_token = 1"}, "published.layout is missing; add it"),
        (
            {"tail": '[published]\nms_per_token = 1\nlayout = "x"'},
            "published.source is missing; add it",
        ),
        ({"tail": "[published]\nms = 1"}, "unknown key 'published.ms'"),
    ],
)
def test_what_a_shape_recipe_may_not_say(tmp_path, change, said):
    path = write(tmp_path, **change)
    with pytest.raises(CheckpointError) as error:
        Recipe.read(path)
    assert said in str(error.value) and str(path) in str(error.value)


def test_shape_must_be_a_table(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\nshape = 3')
    with pytest.raises(CheckpointError, match=r"shape is 3; it should be a table"):
        Recipe.read(path)


def test_a_directory_needs_no_more_than_its_config(tmp_path):
    whole = tiny.write_directory(tmp_path / "whole")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((whole / "config.json").read_bytes())
    shape = read_shape(tmp_path / "bare")
    assert shape.name == "bare" and shape.published is None
    assert shape.config == read_shape(whole).config
    assert shape.config.embed_size == tiny.CONFIG["hidden_size"]


def test_a_gguf_file_and_a_recipe_of_it(tmp_path):
    path = tiny.write_gguf(tmp_path / "tiny.gguf")
    recipe = tmp_path / "tiny.toml"
    recipe.write_text('name = "little"\nlicense = "MIT"\n[source]\npath = "tiny.gguf"')
    shape = read_shape(recipe)
    assert shape.name == "little" and shape.config == read_shape(path).config
    assert shape.config.embed_size == tiny.CONFIG["hidden_size"]


def test_only_the_config_of_a_hub_repository_is_fetched(tmp_path, monkeypatch):
    import huggingface_hub

    whole = tiny.write_directory(tmp_path / "whole")
    asked = []

    def snapshot_download(name, *, allow_patterns, **_):
        asked.append((name, allow_patterns))
        return str(whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    recipe = tmp_path / "hub.toml"
    recipe.write_text('name = "far"\nlicense = "MIT"\n[source]\nhub = "some/body"')
    assert read_shape("some/body").config == read_shape(recipe).config == read_shape(whole).config
    assert asked == [("some/body", ["config.json"])] * 2


def test_bytes_are_tokens():
    tokenizer = byte_tokenizer(400)
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (400, ())
    text = "Naïve <300> 3 日\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and max(ids) < 256
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids, 300]) == text + "<300>"
    stream = tokenizer.stream()
    assert "".join(stream.push([i]) for i in [*ids, 399]) + stream.flush() == text + "<399>"
    with pytest.raises(CheckpointError, match="only 255 tokens; give it a vocab_size of at least"):
        byte_tokenizer(255)
