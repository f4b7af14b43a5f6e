"""Offloaded targets compiled for TPU slices, on a machine without a TPU."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from spec_jax.checkpoints.shape import read_shape
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.offloading import offloaded
from spec_jax.models.model import Model
from spec_jax.planning import hlo
from spec_jax.planning.abstract import abstract_model, bytes_per_chip, host_bytes_per_chip
from spec_jax.planning.compiled import (
    CompiledProgram,
    compile_call,
    compile_prefill,
    compile_round,
    devices_for,
)
from spec_jax.sharding import Layout
from tests.often import often

pytestmark = pytest.mark.tpu
ROOT = Path(__file__).parents[2]
SHAPES = BatchShape(1, 2560, 512)


@functools.cache
def slice_of_chips() -> tuple[Layout, Sequence[Any]]:
    layout = Layout.read(ROOT / "sharding" / "tpu-v6e-8.toml")
    return layout, devices_for(layout)


def model(role: str, layers: int, offload: str = "none", quantization: str = "none") -> Model:
    """Some layers of Chinchilla's size, or of its draft's, on v6e-8."""
    layout, devices = slice_of_chips()
    name = {"target": "70b", "draft": "draft-4b"}[role]
    config = read_shape(ROOT / "checkpoints" / f"chinchilla-{name}.toml").config
    config = config.resized(layers)
    placement = layout.place(role, config.axis_sizes, devices)
    return abstract_model(
        config, "bfloat16", quantization, offloaded(placement, config, offload, 0)
    )


def call(target: Model) -> CompiledProgram:
    return compile_call(target, SHAPES, 5, jnp.bfloat16)


@pytest.mark.parametrize("quantization", often(["none", "int8", "int4"], ["none", "int8"]))
def test_a_chip_holds_two_blocks(quantization):
    """However many the model has; the others lie in host memory."""
    layers = 5
    plain, streamed = (model("target", layers, each, quantization) for each in ("none", "host"))
    before, after = call(plain), call(streamed)
    away = host_bytes_per_chip(streamed.params)
    block = away / layers
    assert away == pytest.approx(bytes_per_chip(plain.params["blocks"]), rel=0.01)
    assert (before.host_bytes, after.host_bytes) == (0, pytest.approx(away, rel=0.01))
    assert after.argument_bytes == pytest.approx(before.argument_bytes - away, rel=0.02)
    least = before.temporary_bytes + 2 * block
    assert 0.95 * least < after.temporary_bytes < least + block / 3
    more = call(model("target", layers + 2, "host", quantization))
    assert more.temporary_bytes < after.temporary_bytes + block / 4


def copies(program: str) -> list[tuple[int, int, list[int]]]:
    """The loops that copy from host memory.

    Of each: the bytes that it copies, those that it still waits for after its last product, and
    the places of its products among its instructions.
    """
    computations, _ = hlo.parse(program)
    bodies = {
        each.callee("body")
        for computation in computations.values()
        for each in computation.instructions.values()
        if each.opcode == "while"
    }
    found = []
    for name in bodies:
        instructions = list(computations[name].instructions.values())
        products = [i for i, each in enumerate(instructions) if is_product(each)]
        started = {each.name: i for i, each in enumerate(instructions) if from_host(each)}
        total = overlapped = 0
        for i, each in enumerate(instructions):
            if each.opcode == "copy-done" and each.operands[0] in started:
                size = bytes_of(each.shape)
                total += size
                late = products and started[each.operands[0]] < products[0] and i > products[-1]
                overlapped += size if late else 0
        if total:
            found.append((total, overlapped, products))
    return found


def from_host(each: hlo.Instruction) -> bool:
    return each.opcode == "copy-start" and "S(5)" in each.laid_out


def is_product(each: hlo.Instruction) -> bool:
    return each.opcode == "fusion" and "convolution" in each.name


def bytes_of(shape: str) -> int:
    dtype, _, rest = shape.partition("[")
    sizes = {"bf16": 2, "f16": 2, "f32": 4, "u8": 1, "s8": 1}
    count = 1
    for size in rest.rstrip("]").split(","):
        count *= int(size)
    return count * sizes[dtype]


def test_copies_run_beside_products():
    """They are started before a block's first product and awaited after its last."""
    layers = 5
    target = model("target", layers, "host")
    found = copies(call(target).text)
    block = host_bytes_per_chip(target.params) / layers
    assert len(found) == layers - 2  # all but the first two blocks are copied in loops
    for total, overlapped, products in found:
        assert total == pytest.approx(block, rel=0.01) and len(products) >= 5
        # Five of the six copies can be under way at a time; the first to start is waited for.
        assert overlapped > 0.5 * total


PIECES = {"prompt": compile_prefill, "round": compile_round}


@pytest.mark.parametrize("piece", often(PIECES, ["prompt"]))
def test_a_round_and_a_prompt_hold_two_blocks_too(piece):
    layers = 3
    draft = DraftModel(model("draft", 1), 4)
    sizes = {}
    for offload in ("none", "host"):
        target = model("target", layers, offload)
        sizes[offload] = PIECES[piece](target, draft, SHAPES)
    block = host_bytes_per_chip(target.params) / layers
    assert sizes["host"].host_bytes == pytest.approx(layers * block, rel=0.01)
    least = sizes["none"].temporary_bytes + 2 * block
    assert sizes["host"].temporary_bytes < least + block / 3
    kept = bytes_per_chip(jax.tree.leaves((target.params, draft.model.params))) - layers * block
    assert sizes["host"].argument_bytes == pytest.approx(kept, rel=0.2)
