"""Every program of the package is compiled with options under which products are right."""

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spec_jax
from spec_jax.models.compiling import compiler_options
from spec_jax.testing import tiny_model
from tests import quick

ROWS = 32_769
PACKAGE = Path(spec_jax.__file__).parent
VERSION = tuple(int(part) for part in re.findall(r"\d+", jax.__version__)[:2])


def squares_of_products(rows, matrix):
    """A product, and a sum over each of its rows (jax issue 39103)."""
    return jax.vmap(lambda row: jnp.sum((matrix @ row) ** 2))(rows)


def last_of_many(options):
    """The last of `ROWS` results, 2 ** 30, as a program compiled with the options computes it."""
    rows = jnp.pad(jnp.arange(ROWS, dtype=jnp.float32)[:, None], ((0, 0), (0, 2)))
    compiled = jax.jit(
        squares_of_products, compiler_options={**quick.XLA_DEFAULTS, **(options or {})}
    )
    return float(compiled(rows, jnp.eye(3))[-1])


def test_jax_0_10_computes_the_last_of_many_products_wrongly():
    """If this fails with another jax, the fault is fixed there, or back again.

    Once no supported jax has it, the options are a matter of speed alone.
    """
    assert (last_of_many(None) == 2.0**30) == (VERSION >= (0, 11))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_options_compute_it_rightly(dtype):
    assert last_of_many(compiler_options("cpu", dtype)) == 2.0**30


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_platforms_get_no_options_of_cpus(platform):
    assert compiler_options(platform, jnp.bfloat16) == {}


def test_a_models_programs_have_its_options(monkeypatch):
    model = tiny_model(0)
    monkeypatch.setattr(type(model), "compiler_options", quick.OPTIMIZED)
    rows = jnp.pad(jnp.arange(ROWS, dtype=jnp.float32)[:, None], ((0, 0), (0, 2)))
    compiled = model.jit(squares_of_products)
    results = (
        compiled(rows, jnp.eye(3)),
        compiled.lower(rows, jnp.eye(3)).compile()(rows, jnp.eye(3)),
    )
    for result in results:
        np.testing.assert_array_equal(result, np.arange(ROWS, dtype=np.float32) ** 2)


COMPILERS = {"jit", "pjit", "pmap", "xla_computation", "aot"}
ALLOWED = {"models/construction.py": ["jax.jit"], "models/transformer.py": ["jax.jit"]}
"""`Model.jit`, which all others go through, and blocks, which are parts of programs."""


def compilers_of(source: str) -> list[str]:
    """Uses of what compiles a program: names, attributes of modules, imports."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in COMPILERS:
            owner = ast.unparse(node.value)
            if owner.split(".")[0] in ("jax", "nnx", "flax", "nn"):
                uses.append(f"{owner}.{node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("jax", "flax")):
            uses += [f"{node.module}.{each.name}" for each in node.names if each.name in COMPILERS]
    return uses


@pytest.mark.parametrize(
    "source, uses",
    [
        ("import jax\nf = jax.jit(g)", ["jax.jit"]),
        ("import jax\n@jax.jit\ndef f(): ...", ["jax.jit"]),
        ("from functools import partial\nf = partial(jax.jit, donate_argnums=0)", ["jax.jit"]),
        ("from jax import jit", ["jax.jit"]),
        ("from flax import nnx\nf = nnx.jit(g)", ["nnx.jit"]),
        ("f = model.jit(g)", []),
    ],
)
def test_the_search_finds_what_compiles(source, uses):
    assert compilers_of(source) == uses


def test_no_program_of_the_package_escapes_the_options():
    uses = {
        file.relative_to(PACKAGE).as_posix(): uses
        for file in PACKAGE.rglob("*.py")
        if (uses := compilers_of(file.read_text()))
    }
    assert uses == ALLOWED
