"""No key of a config.json is ignored in silence if it might change what a model computes."""

import json

import pytest
from transformers import CONFIG_MAPPING

from spec_jax.checkpoints.shape import hf_shape
from spec_jax.errors import CheckpointError
from spec_jax.models.hf_keys import check_keys
from spec_jax.models.registry import FAMILIES
from tests.checkpoints.tiny import CONFIG

ALL = pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)


@ALL
def test_the_keys_of_transformers_class_are_known(family):
    settings = CONFIG_MAPPING[family.model_type]().to_dict()
    # Any value but null and false, which turn a setting off.
    check_keys(family.model_type, {**settings, **dict.fromkeys(settings, 1)})


@ALL
@pytest.mark.parametrize("value", [True, 0, 1.5, "on", [], {"a": 1}], ids=str)
def test_other_keys_are_refused_by_name(family, value):
    with pytest.raises(CheckpointError, match=f"not known for {family.model_type}: {{'new_scale'"):
        check_keys(family.model_type, {"new_scale": value})
    for off in (None, False):
        check_keys(family.model_type, {"new_scale": off})


@ALL
def test_keys_of_another_family_are_refused(family):
    other = "residual_multiplier" if family.model_type != "granite" else "alibi"
    with pytest.raises(CheckpointError, match=other):
        check_keys(family.model_type, {other: 2.0})


def test_a_directory_is_refused_before_its_shape_is_read(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(CONFIG))
    hf_shape(tmp_path)
    file.write_text(json.dumps(CONFIG | {"logits_scaling": 8.0}))
    with pytest.raises(CheckpointError, match=r"'logits_scaling': 8.0}. They may change what"):
        hf_shape(tmp_path)


def test_doubled_keys_are_refused(tmp_path):
    text = json.dumps(CONFIG)
    (tmp_path / "config.json").write_text(text[:-1] + ', "rms_norm_eps": 1e-3}')
    with pytest.raises(CheckpointError, match="an object has two keys 'rms_norm_eps'"):
        hf_shape(tmp_path)
