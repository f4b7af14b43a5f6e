"""Sizes without arrays: parameter counts, and drafts derived from targets."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from spec_jax.errors import ConfigError
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.sizes import WideShallow, parameter_count
from spec_jax.models.transformer import Transformer
from tests.reshaped import reshaped

TINY = TransformerConfig.of(
    vocab_size=40,
    embed_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_size=20,
    max_position=64,
)
CHINCHILLA = TransformerConfig.of(
    vocab_size=32000,
    embed_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=64,
    head_dim=128,
    mlp_size=32768,
    max_position=2048,
    gated_mlp=False,
)
VARIANTS = (
    {},
    {"tied_head": True},
    {"gated_mlp": False},
    {"qkv_bias": True, "output_bias": True, "mlp_bias": True},
    {"qk_norm": "head"},
    {"norm": "layer", "parallel_residual": True, "activation": "gelu"},
    {"experts": Experts(count=4, per_token=2, size=10), "dense_layers": (1,)},
    {"post_norms": True, "embedding_scale": 4.0, "sliding_window": 8, "global_every": 2},
)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_parameters_are_those_of_a_real_model(variant):
    config = reshaped(TINY, **variant)
    leaves = jax.tree.leaves(Model.random(config).params)
    assert parameter_count(config) == sum(leaf.size for leaf in leaves)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_repeated_block_is_the_module_itself(variant):
    config = reshaped(TINY, **variant)
    traced = nnx.eval_shape(lambda: Transformer(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(traced)
    model = Model.abstract(config, dtype=jnp.bfloat16)
    assert model.graphdef == graphdef
    chex.assert_trees_all_equal_shapes_and_dtypes(model.params, params)


def test_chinchilla_and_its_draft():
    draft = WideShallow(width_ratio=0.75, depth_ratio=0.1)(CHINCHILLA)
    assert (draft.embed_size, draft.num_heads, draft.num_layers) == (6144, 48, 8)
    assert (draft.num_kv_heads, draft.head_dim, draft.mlp_size) == (48, 128, 24576)
    assert parameter_count(CHINCHILLA) == 64_950_116_352
    assert parameter_count(draft) == 4_017_199_104


@pytest.mark.parametrize("ratio", [0.05, 0.3, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("kv_heads", [4, 8, 64])
def test_a_draft_is_cut_as_its_target(ratio, kv_heads):
    target = dataclasses.replace(CHINCHILLA, num_kv_heads=kv_heads)
    draft = WideShallow(width_ratio=ratio, depth_ratio=ratio, num_shards=16)(target)
    assert draft.num_heads % 16 == 0 and draft.mlp_size % 16 == 0
    assert draft.num_kv_heads == (draft.num_heads if kv_heads == 64 else kv_heads)
    assert draft.head_dim == target.head_dim and 1 <= draft.num_layers <= target.num_layers


def test_what_cannot_be():
    with pytest.raises(ConfigError, match=r"width_ratio is 0.0; give a number in \(0, 1\]"):
        WideShallow(width_ratio=0.0)
    with pytest.raises(ConfigError, match=r"depth_ratio is 1.5"):
        WideShallow(depth_ratio=1.5)
    with pytest.raises(ConfigError, match="num_shards is 0"):
        WideShallow(num_shards=0)
