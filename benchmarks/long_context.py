"""What long contexts take on a chip, as the TPU compiler lays it out from shapes alone.

    pip install -c constraints.txt -e ".[tpu]"
    python -m benchmarks.long_context          # about ten minutes on two cores, no TPU needed

Two pairs in bfloat16, 8 rows of 32,768 tokens, K = 4: Chinchilla 70B (64 key/value heads) and
Llama 70B (8), each with a wide and shallow draft.
"""

import dataclasses
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp

from spec_jax.checkpoints.shape import Shape, read_shape
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.planning import derived_draft
from spec_jax.planning.abstract import plan_shape
from spec_jax.planning.compiled import compile_prefill, compile_round, devices_for
from spec_jax.sharding import Layout

ROOT = Path(__file__).resolve().parents[1]
BATCH, CONTEXT, LOOKAHEAD = 8, 32768, 4
LLAMA_70B = TransformerConfig.of(
    vocab_size=128256,
    embed_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    mlp_size=28672,
    max_position=CONTEXT,
    rope_theta=500000.0,
)


def pairs():
    """Name, layout and shape of each target."""
    chinchilla = read_shape(ROOT / "checkpoints" / "chinchilla-70b.toml")
    longer = dataclasses.replace(chinchilla.config, max_position=CONTEXT)
    yield Shape(chinchilla.name, longer), "tpu-v5p-16"
    yield Shape("llama-70b", LLAMA_70B), "tpu-v4-16"


def main():
    print("| target, layout | program | weights and caches | all | temporary, GiB |")
    print("| --- | --- | --- | --- | --- |")
    for target, name in pairs():
        layout = Layout.read(ROOT / "sharding" / f"{name}.toml")
        devices = devices_for(layout)
        models = {}
        for role, shape in (("target", target), ("draft", derived_draft(target, layout))):
            placement = layout.place(role, shape.config.axis_sizes, devices)
            models[role] = Model.abstract(shape.config, dtype=jnp.bfloat16, placement=placement)
        drafter = DraftModel(models["draft"], LOOKAHEAD)
        shapes = plan_shape(models["target"], drafter, BATCH, CONTEXT, "tpu")
        held = None
        for what, compile in (("round", compile_round), ("prefill", compile_prefill)):
            program = compile(models["target"], drafter, shapes)
            held = program.argument_bytes if held is None else held
            figures = (held, program.memory_bytes or 0, program.temporary_bytes)
            cells = " | ".join(f"{each / 2**30:.2f}" for each in figures)
            print(f"| {target.name}, {name} | {what} | {cells} |", flush=True)
            if program.refusal:
                print(program.refusal, flush=True)


if __name__ == "__main__":
    main()
