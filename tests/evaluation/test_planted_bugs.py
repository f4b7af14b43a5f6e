"""Bugs that other systems shipped, planted one at a time: the suite must fail on each.

Each runs the named tests in a process of its own, over a copy of the package with one edit.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.often import often

ROOT = Path(__file__).resolve().parents[2]
PROOF, LOOP, SAMPLED = (
    f"tests/decoding/test_{name}.py" for name in ("lossless", "loop", "sampled")
)

DRAWS, TAILS, PROBABILITIES, PROCESSORS = (
    f"tests/sampling/test_{name}.py" for name in ("draws", "tails", "probabilities", "processors")
)
JOINING = "tests/test_continuous_batching.py"

BUGS = {
    "temperature on one side only": (
        "decoding/score.py",
        "p = probabilities(logits, sampling, history, draft.tokens, before, allowed, ",
        "import dataclasses\n"
        "    cold = dataclasses.replace(sampling, temperature=sampling.temperature * 0 + 1)\n"
        "    p = probabilities(logits, cold, history, draft.tokens, before, allowed, ",
        [SAMPLED, "-k", "other-cool"],
    ),
    "accept uniform reused for the residual": (
        "decoding/verify.py",
        "p, draft.tokens, draft.probs, draft.lengths, halves[:, 0]",
        "p, draft.tokens, draft.probs, draft.lengths,"
        " jax.vmap(lambda key: jax.random.split(key)[0])(halves[:, 1])",
        [DRAWS, "-k", "jointly_exact and unlike"],
    ),
    "residual not clamped": (
        "decoding/verify.py",
        "jnp.maximum(scale * wanted - _proposed(p, tokens, q)[position], 0.0)",
        "scale * wanted - _proposed(p, tokens, q)[position]",
        [PROOF, "-k", "joint_distribution"],
    ),
    "bonus token from the wrong row": (
        "decoding/verify.py",
        "wanted = p[accepted]\n    if tokens",
        "wanted = p[jnp.maximum(accepted - 1, 0)]\n    if tokens",
        [PROOF, "-k", "joint_distribution"],
    ),
    "argmax draft with softmax q": (
        "drafters/autoregressive.py",
        "last = draw(keys.reshape(rows), q, random)",
        "last = jnp.argmax(q, -1).astype(jnp.int32)",
        [SAMPLED, "-k", "other-warm"],
    ),
    "q taken before the processors": (
        "drafters/autoregressive.py",
        "probs=write(state.probs, q, i)",
        "probs=write(state.probs, jax.nn.softmax(logits[:, 0]), i)",
        [SAMPLED, "-k", "other-cool"],
    ),
    "stale cache entry read after rollback": (
        "decoding/loop.py",
        "cache=cache.with_lengths(lengths - 1)",
        "cache=cache.with_lengths(cache.lengths + width + 1)",
        [LOOP, "-k", "targets_own and other-4"],
    ),
    "EOS inside a block ignored": (
        "decoding/loop.py",
        "is_stop = is_stop & (positions < offered[:, None])",
        "is_stop = is_stop & (positions == offered[:, None] - 1)",
        [LOOP, "-k", "stop_token and self"],
    ),
    "penalties blind to the draft": (
        "sampling/processors.py",
        "generated = history.generated[:, None] + drafted",
        "generated = history.generated[:, None] + 0 * drafted",
        [LOOP, "-k", "every_processor and other"],
    ),
    "bad words blind to the draft": (
        "sampling/processors.py",
        "visible[:, None] & (back[:, None] == wanted[None, :, None])",
        "visible[:, None] & (back[:1, None] == wanted[None, :, None])",
        [LOOP, "-k", "bad_words and self"],
    ),
    "min_tokens counted from the round's start": (
        "sampling/processors.py",
        "generated = history.lengths[:, None] + before.sum(1, dtype=jnp.int32)[None]",
        "generated = history.lengths[:, None] + 0 * before.sum(1, dtype=jnp.int32)[None]",
        [LOOP, "-k", "min_tokens and self"],
    ),
    "noise too coarse for rare tokens": (
        "sampling/draw.py",
        "    info, words = jnp.finfo(dtype)",
        "    return jax.random.uniform(key, shape, dtype)\n    info, words = jnp.finfo(dtype)",
        [TAILS, "-k", "every_exponent"],
    ),
    "acceptance by a uniform that can be zero": (
        "decoding/verify.py",
        "uniform(key, tokens.shape, p.dtype)",
        "jax.random.uniform(key, tokens.shape, p.dtype)",
        [TAILS, "-k", "billionth and 1"],
    ),
    "acceptance of several drafts by a uniform that can be zero": (
        "decoding/several.py",
        "uniform(key, (steps, drafts), p.dtype)",
        "jax.random.uniform(key, (steps, drafts), p.dtype)",
        [TAILS, "-k", "billionth and 2"],
    ),
    "a uniform depends on how many there are": (
        "sampling/draw.py",
        "    drawn = jax.random.bits(key, (*shape, 1 + EXPONENT_WORDS), words)",
        "    turned = jax.random.bits(key, (1 + EXPONENT_WORDS, *shape), words)\n"
        "    drawn = jnp.moveaxis(turned, 0, -1)",
        [TAILS, "-k", "fewer_uniforms"],
    ),
    "padding drawn as if it were tokens": (
        "sampling/draw.py",
        "(0, count * size - probs.shape[1])))",
        "(0, count * size - probs.shape[1])), mode='edge')",
        [TAILS, "-k", "possible and 50261 and float32"],
    ),
    "small temperatures overflow": (
        "sampling/probabilities.py",
        "(logits - best) / temperature",
        "logits / temperature",
        [PROBABILITIES, "-k", "smallest_temperatures"],
    ),
    "a bad word begins in the padding before the row": (
        "sampling/processors.py",
        "recent=jnp.where(at >= 0, last, -1)",
        "recent=last",
        [PROCESSORS, "-k", "begin_before"],
    ),
    "what stands before a row matches every bad word": (
        "sampling/processors.py",
        "(begin == recent[:, :, None])",
        "(begin == recent[:, :, None]) | (recent[:, :, None] < 0)",
        [PROCESSORS, "-k", "begin_before"],
    ),
    "features of the first row alone": (
        "sampling/parameters.py",
        "random = [row for row in rows if _temperature(row) > 0]",
        "random = [row for row in rows[:1] if _temperature(row) > 0]",
        [PROBABILITIES, "-k", "features_are_what"],
    ),
    "a cut that the first row does not use is skipped": (
        "sampling/probabilities.py",
        "each.any() if skip",
        "each.ravel()[0] if skip",
        [PROBABILITIES, "-k", "float64_agrees"],
    ),
    "as many bad words as the first row has": (
        "sampling/processors.py",
        "(last >= 0).sum(-1, dtype=jnp.int32).max()",
        "(last >= 0).sum(-1, dtype=jnp.int32)[0, 0]",
        [PROCESSORS, "-k", "whatever_its_neighbours"],
    ),
    "draft steps share a key": (
        "drafters/autoregressive.py",
        "_fold(key, i * drafts, drafts)",
        "_fold(key, 0, drafts)",
        [SAMPLED, "-k", "other-warm"],
    ),
    "a row's randomness shared with its neighbours": (
        "decoding/loop.py",
        "keys, state.lengths\n    )\n    return",
        "keys, jnp.broadcast_to(state.lengths.max(), state.lengths.shape)\n    )\n    return",
        [LOOP, "-k", "neighbours and other"],
    ),
    "a refused token counts for its position": (
        "decoding/loop.py",
        "(positions[:, :width] < kept[:, None]).astype(jnp.int32)",
        "(positions[:, :width] <= kept[:, None]).astype(jnp.int32)",
        [LOOP, "-k", "accepted_whole"],
    ),
    "tokens after a stop string are counted": (
        "engine/batch.py",
        "return Work(len(seen), ",
        "return Work(whole.rounds, ",
        [JOINING, "-k", "counted_ends"],
    ),
    "a greedy draft is always certain": (
        "drafters/autoregressive.py",
        "confidence = write(confidence, sure, i)",
        "confidence = write(confidence, q.max(-1), i)",
        ["tests/decoding/test_draft_length.py", "-k", "says_how and other"],
    ),
    "the warm-up counts as a measured round": (
        "engine/cost_profiling.py",
        "np.reshape(samples, (-1, len(choices)))[1:].min(0)",
        "np.reshape(samples, (-1, len(choices)))[:1].min(0)",
        ["tests/engine/test_cost_profiling.py", "-k", "each_choice"],
    ),
    "drafted tokens advance the grammar of their row": (
        "text/grammar.py",
        "state = state.deep_copy()",
        "state = state",
        ["tests/text/test_grammar.py", "-k", "places_of"],
    ),
    "a branch of a tree follows its neighbour's grammar": (
        "text/grammar.py",
        "parent = 1 + int(max(earlier, default=-1))",
        "parent = i",
        ["tests/text/test_grammar.py", "-k", "tree"],
    ),
    "no text is held back for a stop string": (
        "engine/detokenization.py",
        "for size in range(1, len(stop))",
        "for size in range(len(stop), len(stop))",
        ["tests/engine/test_detokenization.py"],
    ),
    "the branch that a tree keeps is taken from beyond a ring": (
        "models/cache.py",
        "slots = sources % self.slots if self.ring else sources",
        "slots = sources",
        ["tests/models/test_rings.py", "-k", "as_good"],
    ),
    "a window counts from slots": (
        "models/attention.py",
        "position = jnp.where(behind < 0, index, self.text[:, None, None] + self.depths[recent])",
        "position = index",
        ["tests/models/test_attention.py", "-k", "dense and tree and 2-False"],
    ),
}


def plant(bug: str | None, root: Path) -> list[str]:
    """Copies package and tests with one bug, or without; returns the tests that must find it."""
    for name in ("spec_jax", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    if bug is None:
        return []
    file, right, wrong, selection = BUGS[bug]
    path = root / "spec_jax" / file
    source = path.read_text()
    assert source.count(right) == 1, f"{file} no longer holds {right!r} once: plant the bug anew"
    path.write_text(source.replace(right, wrong))
    return selection


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_can_be_planted(bug):
    """The code that it changes is there, once; the slow tests plant it."""
    file, right, _, selection = BUGS[bug]
    assert (ROOT / "spec_jax" / file).read_text().count(right) == 1
    assert (ROOT / selection[0].partition("::")[0]).is_file()


@pytest.mark.slow
@pytest.mark.parametrize("bug", often(BUGS, [*BUGS][:1]))
def test_the_suite_fails_when_the_bug_is_planted(bug, tmp_path):
    selection = plant(bug, tmp_path)
    result = subprocess.run(
        # Slow cases too: the default ones change with what tests cost.
        [sys.executable, "-m", "pytest", "-qx", "-m", "", "-p", "no:cacheprovider", *selection],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1, result.stdout + result.stderr
    # It must be a test that failed, not the edit that broke the program.
    assert re.search(r"^E +(AssertionError|assert|Arrays|Not equal)", result.stdout, re.M), (
        result.stdout
    )
