"""Blocks in host memory: where their weights lie, and that nothing changes but that.

CPU has memories of these names, and copies from one to the other do nothing: what is computed is
checked here, and what is copied when, and what memory that takes, in the compiled programs of
tests/planning/test_tpu_offload.py.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from spec_jax.kernels import QuantizedWeight, quantize
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.model import Model
from spec_jax.models.source import EncoderInput
from spec_jax.sharding import HOST_MEMORY, Layout
from tests.often import often
from tests.reshaped import reshaped

LAYERS = 4
WINDOWS = {"sliding_window": 3, "global_every": 2}
CONFIG = TransformerConfig.of(
    vocab_size=32,
    embed_size=64,
    num_layers=LAYERS,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    mlp_size=128,
    max_position=64,
    qkv_bias=True,
    **WINDOWS,
)
MODEL = Model.random(CONFIG)
WORDS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 5)), jnp.int32)


def on_devices(model: Model, count: int) -> Model:
    layout = Layout.tensor_parallel(count)
    return model.place(layout.place("target", model.config.axis_sizes, jax.devices()[:count]))


def streamed(model: Model, count: int = 1, first: int = 0) -> Model:
    """The same model, whose blocks lie in host memory from the `first` on."""
    layout = Layout.tensor_parallel(count)
    placement = layout.place("target", model.config.axis_sizes, jax.devices()[:count])
    return model.place(dataclasses.replace(placement, streamed_from=first))


def call(model: Model, words: jax.Array):
    logits, _, cache = model.score(words, model.new_cache(2, 16))
    return logits, cache.layers


def in_host_memory(model: Model) -> set[str]:
    return {
        name
        for name, weight in model.weights.items()
        if any(leaf.sharding.memory_kind == HOST_MEMORY for leaf in jax.tree.leaves(weight))
    }


STREAMS = [(1, 0), (2, 0), (1, 1), (1, 2), (1, LAYERS)]


@pytest.mark.parametrize("devices, first", often(STREAMS, [(2, 0), (1, 1)]))
def test_a_streamed_call_is_the_same_to_the_last_bit(devices, first):
    expected = jax.jit(call)(on_devices(MODEL, devices), WORDS)
    actual = jax.jit(call)(streamed(MODEL, devices, first), WORDS)
    for mine, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert mine.sharding.memory_kind == "device"
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("layers", often([1, 2, 3], [1]))
def test_few_layers(layers):
    model = Model.random(CONFIG.resized(layers))
    actual, expected = (jax.jit(call)(each, WORDS)[0] for each in (streamed(model), model))
    np.testing.assert_array_equal(actual, expected)


def test_matrices_of_blocks_lie_in_host_memory():
    model = streamed(MODEL, 2, first=1)
    matrices = ("attention.query", "attention.key", "attention.value", "attention.output")
    expected = {
        f"blocks.{i}.{name}.weight"
        for i in range(1, LAYERS)
        for name in (*matrices, "mlp.gate", "mlp.up", "mlp.down")
    }
    assert in_host_memory(model) == expected
    again = Model.random(CONFIG, placement=model.placement)
    assert in_host_memory(again) == expected
    for name, weight in again.weights.items():
        assert weight.sharding.spec == model.weights[name].sharding.spec


def test_first_layers_can_be_brought_to_the_device():
    model = streamed(MODEL, 2).with_resident(2)
    left = {name.split(".")[1] for name in in_host_memory(model)}
    assert left == {"2", "3"}
    for name, weight in model.weights.items():
        np.testing.assert_array_equal(weight, MODEL.weights[name])
        plain = on_devices(MODEL, 2).weights[name]
        assert weight.sharding.shard_shape(weight.shape) == plain.sharding.shard_shape(plain.shape)


def copies(model: Model) -> list[int]:
    """How many arrays a call copies to device memory: outside of loops, and in each loop."""
    counts = [0]

    def count(jaxpr, place: int) -> None:
        for each in jaxpr.eqns:
            counts[place] += each.primitive.name == "device_put"
            where = place
            if each.primitive.name == "while" and place == 0:
                where = len(counts)
                counts.append(0)
            for inner in jaxprs_in_params(each.params):
                count(inner, where)

    count(jax.make_jaxpr(call)(model, WORDS).jaxpr, 0)
    return counts


def test_each_matrix_is_copied_once_and_one_block_at_a_time():
    # Of the first two blocks before any loop; a loop runs a block and copies the next but one.
    assert copies(streamed(MODEL)) == [14, 7, 7]
    assert copies(streamed(MODEL, first=1)) == [14, 7]
    assert copies(streamed(MODEL, first=LAYERS)) == [0]


@pytest.mark.parametrize("bits, devices", [(8, 2), (4, 1)])
def test_quantized_weights(bits, devices):
    """Their bytes lie otherwise in host memory, and blocks may differ in form."""

    def packed(model: Model) -> Model:
        actual = {}
        for name, weight in model.weights.items():
            if name.startswith("blocks.") and weight.ndim == 2 and ".2." not in name:
                rows = quantize(np.asarray(weight).T, bits)
                actual[name] = QuantizedWeight.of(rows, jnp.float32, weight.sharding)
        return model.with_weights(actual)

    expected, actual = packed(on_devices(MODEL, devices)), packed(streamed(MODEL, devices))
    assert in_host_memory(actual) == in_host_memory(streamed(MODEL))
    for name, weight in actual.weights.items():
        assert weight.shape == expected.weights[name].shape
    mine, theirs = (jax.jit(call)(model, WORDS)[0] for model in (actual, expected))
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_experts_among_dense_blocks():
    """All of a block's experts are copied; a buffer that the block before cannot leave is new."""
    experts = Experts(count=4, per_token=2, size=64)
    model = Model.random(
        reshaped(CONFIG, **WINDOWS, num_layers=5, experts=experts, dense_layers=(1, 2))
    )
    actual = streamed(model, 2)
    assert "blocks.3.mlp.expert_down.weight" in in_host_memory(actual)
    mine, theirs = (jax.jit(call)(each, WORDS)[0] for each in (actual, on_devices(model, 2)))
    np.testing.assert_array_equal(mine, theirs)


def test_what_an_encoder_gave_out_is_not_read_again():
    encoder = reshaped(CONFIG, num_layers=2)
    model = Model.random(dataclasses.replace(CONFIG, encoder=encoder))
    source = EncoderInput(WORDS[:, ::-1], jnp.asarray([5, 3], jnp.int32))

    def translate(model: Model):
        encoded, _ = model.encode(source)
        cache = dataclasses.replace(model.new_cache(2, 16), encoded=encoded)
        return model.score(WORDS, cache)[0]

    actual = streamed(model)
    np.testing.assert_array_equal(jax.jit(translate)(actual), jax.jit(translate)(model))
    names = in_host_memory(actual)
    assert all(name.startswith("blocks.") for name in names)
    assert {name for name in names if ".0.cross." in name} == {
        f"blocks.0.cross.{each}.weight" for each in ("query", "output")
    }
