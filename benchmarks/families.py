"""The table of model families: what the registry says, and how near torch's logits are.

    python -m benchmarks.families            # five minutes on two cores; needs torch
    python -m benchmarks.families --write    # the same, and puts the table into docs/models.md

Tiny random models that transformers makes and saves, one for each option of a family, are scored in
float32 and compared with the same model of transformers in float64. The table has the largest
difference of any logit.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.models.family import Family
from spec_jax.models.registry import FAMILIES
from tests.models.tiny_families import ENCODER_DECODERS, MODELS, make, with_sources

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- benchmarks/families.py -->", "<!-- end -->"
HEAD = ("`model_type`", "models", "files", "experts", "windows", "encoder", "largest difference")
TOKENS, ROWS = 40, 3


def facts(family: Family) -> tuple[str, ...]:
    """What the table says of a family apart from the measurement."""
    from transformers import AutoConfig

    doc = sys.modules[family.config_from_hf.__module__].__doc__ or ""
    files = ["safetensors", "Orbax"]
    if gguf := family.gguf_architecture or family.gguf_as:
        files.append(f"GGUF (`{gguf}`)")
    shapes = [
        family.config_from_hf(AutoConfig.for_model(family.model_type, **options).to_dict())
        for options in variants(family).values()
    ]
    flags = (
        any(shape.experts for shape in shapes),
        any(shape.sliding_window for shape in shapes),
        any(shape.encoder for shape in shapes),
    )
    marks = ["yes" if flag else "" for flag in flags]
    return f"`{family.model_type}`", doc.partition(" (")[0], ", ".join(files), *marks


def variants(family: Family) -> dict[str, dict]:
    """Names and configurations of the tiny models of a family."""
    return {
        name: options
        for name, (_, options) in {**MODELS, **ENCODER_DECODERS}.items()
        if name.split(",")[0] == family.model_type
    }


def difference(name: str) -> float:
    """The largest difference of a tiny model's logits in float32 from transformers' in float64."""
    import torch

    with tempfile.TemporaryDirectory() as folder:
        reference, model = make(name, Path(folder))
    rows = np.random.default_rng(1).integers(0, model.config.vocab_size, (ROWS, TOKENS))
    reference, cache = reference.double(), model.new_cache(ROWS, TOKENS)
    if model.config.experts is not None:  # torch's grouped product knows no float64
        reference.set_experts_implementation("eager")
    call = reference
    if model.config.encoder is not None:
        source, call = with_sources(reference, model)
        encoded, _ = jax.jit(lambda model, source: model.encode(source))(model, source)
        cache = dataclasses.replace(cache, encoded=encoded)
    with torch.no_grad():
        expected = call(torch.tensor(rows)).logits.numpy()
    score = jax.jit(lambda model, tokens, cache: model.score(tokens, cache)[0])
    logits = score(model, jnp.asarray(rows, jnp.int32), cache)
    return float(np.abs(np.asarray(logits, np.float64) - expected).max())


def table(measured: Mapping[str, float]) -> str:
    """The table in Markdown, of `model_type` -> largest difference."""
    rows = [
        (*facts(family), f"{measured[family.model_type]:.0e}")
        for family in sorted(FAMILIES, key=lambda family: family.model_type)
    ]
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="put the table into docs/models.md")
    write = parser.parse_args().write
    measured = {}
    for family in FAMILIES:
        each = {name: difference(name) for name in variants(family)}
        print(*(f"{value:.1e} {name}" for name, value in each.items()), sep="\n", file=sys.stderr)
        measured[family.model_type] = max(each.values())
    made = table(measured)
    print(made)
    if write:
        text = PAGE.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{after}")


if __name__ == "__main__":
    main()
