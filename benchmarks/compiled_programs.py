"""What the TPU compiler makes of rounds and of prefill: temporaries, memory, all-reduces.

    python -m benchmarks.compiled_programs [--pairs NAME,...]      # needs the extra tpu, and no TPU

Programs are compiled for real slices in bfloat16, with K = 4 and 6 layers of the target, 2 of the
draft. To what a chip holds are added the weights and caches of the other layers, known from their
shapes, and to what is counted their all-reduces, as planned (tests/planning/test_tpu.py compares
them). Batches and contexts whose weights and caches alone do not fit into a chip have no row.
"""

import argparse
import dataclasses
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from spec_jax.checkpoints.shape import Shape, read_shape
from spec_jax.config import SamplingParams
from spec_jax.models.config import TransformerConfig, layer_stack
from spec_jax.planning.compiled import compile_prefill, compile_round, devices_for
from spec_jax.planning.hlo import by_kind
from spec_jax.planning.pair import Pair
from spec_jax.planning.plan import derived_draft
from spec_jax.sampling.parameters import SamplingFeatures
from spec_jax.sharding import Layout

ROOT = Path(__file__).resolve().parents[1]
BATCHES, CONTEXTS, LOOKAHEAD = (1, 8, 64), (2048, 8192, 32768, 131072), 4
GREEDY, NUCLEUS = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.9)
FEATURES = SamplingFeatures.of([GREEDY])
DEPTHS = 6, 2
"""Layers of target and draft that are compiled; 6 are a period of Gemma 3."""

QWEN3 = TransformerConfig.of(
    vocab_size=151936, embed_size=5120, num_layers=64, num_heads=64, num_kv_heads=8, head_dim=128,
    mlp_size=25600, max_position=40960, rope_theta=1e6, norm_eps=1e-6, qk_norm="head",
)  # fmt: skip
QWEN3_SMALL = dataclasses.replace(
    QWEN3.resized(28), embed_size=1024, num_heads=16, mlp_size=3072, tied_head=True
)
GEMMA3_LAYERS = {"rope_theta": 1e6, "local_rope_theta": 1e4, "global_every": 6}
GEMMA3 = TransformerConfig.of(
    vocab_size=262208, embed_size=5376, num_layers=62, num_heads=32, num_kv_heads=16, head_dim=128,
    mlp_size=21504, max_position=131072, rope_factor=8.0, sliding_window=1024,
    norm_eps=1e-6, activation="gelu_tanh", qk_norm="head", post_norms=True, tied_head=True,
    embedding_scale=5376**0.5, query_pre_attn_scalar=168.0, **GEMMA3_LAYERS,
)  # fmt: skip
GEMMA3_SMALL = dataclasses.replace(
    GEMMA3, embed_size=1152, num_heads=4, num_kv_heads=1, head_dim=256,
    mlp_size=6912, embedding_scale=1152**0.5, query_pre_attn_scalar=256.0,
    layers=layer_stack(26, sliding_window=512, **GEMMA3_LAYERS),
)  # fmt: skip


def recipe(name):
    return read_shape(ROOT / "checkpoints" / f"{name}.toml")


def pairs():
    """By name: target, draft (None for a wide and shallow one) and layout."""
    small, large = recipe("llama-1b"), recipe("llama-70b")
    return {
        "llama-8b": (recipe("llama-8b"), small, "tpu-v5e-8"),
        "llama-70b": (large, small, "tpu-v5e-16"),
        "llama-70b-v5p": (large, small, "tpu-v5p-16"),
        "qwen3-32b": (Shape("qwen3-32b", QWEN3), Shape("qwen3-0.6b", QWEN3_SMALL), "tpu-v6e-8"),
        "gemma3-27b": (Shape("gemma3-27b", GEMMA3), Shape("gemma3-1b", GEMMA3_SMALL), "tpu-v5e-16"),
        "chinchilla-70b": (recipe("chinchilla-70b"), recipe("chinchilla-draft-4b"), "tpu-v4-16"),
        "llama-405b": (recipe("llama-405b"), None, "tpu-v5p-64"),
        "llama-70b-v6e": (large, small, "tpu-v6e-16"),
        "llama-70b-v5e-64": (large, small, "tpu-v5e-64"),
        "llama-70b-long": (large, small, "tpu-v5e-16-long"),
        "llama-405b-long": (recipe("llama-405b"), None, "tpu-v5p-64-long"),
    }


def whole_and_cut(target, draft, layout):
    """The pair as it is, to know what it holds, and the one that is compiled."""
    draft = draft or derived_draft(target, layout)
    short_target, short_draft = (
        Shape(shape.name, shape.config.resized(layers))
        for shape, layers in zip((target, draft), DEPTHS, strict=True)
    )
    pair = Pair.of(target, draft, layout, "bfloat16")
    devices = devices_for(layout)
    return pair, Pair.of(short_target, short_draft, layout, "bfloat16", devices=devices)


def reduced(program, pair, shallow):
    """All-reduces of a compiled round at full depth; the plan counts the layers left out."""

    def planned(job):
        calls = [job.scoring, *[job.draft_step] * LOOKAHEAD]
        return sum(call.collectives.get("all-reduce", 0) for call in calls)

    kinds = by_kind(program.collectives)
    count = kinds.pop("all-reduce", 0) + planned(pair) - planned(shallow)
    return ", ".join([str(count), *(f"{n} {kind}" for kind, n in kinds.items())])


def cells(batches, contexts, pair):
    """Batches and contexts whose weights and caches fit into a chip."""
    most = pair.target.config.max_position
    for batch in batches:
        for context in contexts:
            if context <= most:
                job = pair.job(batch, context, LOOKAHEAD, FEATURES)
                if job.prefill.held_bytes <= pair.layout.chip.memory:
                    yield batch, context, job


def gibi(size):
    return f"{size / 2**30:.2f}"


def tabulate(name, target, draft, layout, batches, contexts):
    layout = Layout.read(ROOT / "sharding" / f"{layout}.toml")
    pair, shallow = whole_and_cut(target, draft, layout)
    drafter, nucleus = shallow.drafter(LOOKAHEAD), {}
    for batch, context, full in cells(batches, contexts, pair):
        job = shallow.job(batch, context, LOOKAHEAD, FEATURES)
        compiled = compile_round(shallow.target, drafter, job.shapes, GREEDY)
        prefill = compile_prefill(shallow.target, drafter, job.shapes)
        if batch not in nucleus:  # every context has the same number
            sampled = compile_round(shallow.target, drafter, job.shapes, NUCLEUS)
            nucleus[batch] = reduced(sampled, full, job)
        largest = full.prefill.held_bytes + max(compiled.temporary_bytes, prefill.temporary_bytes)
        memory = pair.layout.chip.memory
        show(
            *(f"{name}, {layout.name}", batch, context, job.shapes.block),
            *(gibi(each.temporary_bytes) for each in (prefill, compiled)),
            f"{gibi(largest)} of {gibi(memory)}" + ("" if largest <= memory else ", does not fit"),
            *(reduced(compiled, full, job), nucleus[batch]),
        )


def show(*cells):
    print("| " + " | ".join(str(cell) for cell in cells) + " |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", default=",".join(pairs()))
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options = parser.parse_args()
    show(
        *("target, layout", "batch", "context", "chunk", "prefill, GiB", "round, GiB"),
        *("GiB a chip", "all-reduces, greedy", "T = 1, top-p 0.9"),
    )
    show(*["---"] * 9)
    for name in options.pairs.split(","):
        target, draft, layout = pairs()[name]
        tabulate(name, target, draft, layout, options.batches, options.contexts)


if __name__ == "__main__":
    main()
