"""Bugs that other systems shipped, planted one at a time: the suite must fail on each.

Each runs the named tests in a new process, over a copy of the package with one edit.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.often import often
from tests.planting import PlantedBug

ROOT = Path(__file__).resolve().parents[2]
PROOF, LOOP, SAMPLED = (
    f"tests/decoding/test_{name}.py" for name in ("lossless", "loop", "sampled")
)

DRAWS, TAILS, PROBABILITIES, PROCESSORS = (
    f"tests/sampling/test_{name}.py" for name in ("draws", "tails", "probabilities", "processors")
)
JOINING = "tests/test_continuous_batching.py"

BUGS = {
    "temperature on one side only": PlantedBug(
        "decoding/score.py",
        "score",
        "probabilities(L, S, *REST)",
        "probabilities(L, __import__('dataclasses')"
        ".replace(S, temperature=S.temperature * 0 + 1), *REST)",
        [SAMPLED, "-k", "other-cool"],
    ),
    "accept uniform reused for the residual": PlantedBug(
        "decoding/verify.py",
        "split_keys",
        "child_key(K, 0)",
        "child_key(child_key(K, 1), 0)",
        [DRAWS, "-k", "jointly_exact and unlike"],
    ),
    "residual not clamped": PlantedBug(
        "decoding/verification.py",
        "residual",
        "jnp.maximum(R, 0.0)",
        "R",
        [PROOF, "-k", "joint_distribution"],
    ),
    "every token of a block drawn with the first one's key": PlantedBug(
        "decoding/verify.py",
        "draw_target_tokens",
        "keys[:, 1:]",
        "keys[:, :1].repeat(keys.shape[1] - 1, axis=1)",
        ["tests/decoding/test_coupled.py"],
    ),
    "bonus token from the wrong row": PlantedBug(
        "decoding/verify.py",
        "_next_token_probs",
        "p[A]",
        "p[jnp.maximum(A - 1, 0)]",
        [PROOF, "-k", "joint_distribution"],
    ),
    "argmax draft with softmax q": PlantedBug(
        "drafters/autoregressive.py",
        "autoregress.one",
        "draw_tokens(K, Q, *REST)",
        "jnp.argmax(Q, -1).astype(jnp.int32)",
        [SAMPLED, "-k", "other-warm"],
    ),
    "q taken before the processors": PlantedBug(
        "drafters/autoregressive.py",
        "autoregress.one",
        "write(S.probs, Q, I)",
        "write(S.probs, jax.nn.softmax(logits[:, 0]), I)",
        [SAMPLED, "-k", "other-cool"],
    ),
    "stale cache entry read after rollback": PlantedBug(
        "decoding/loop.py",
        "commit",
        "C.commit(L)",
        "C.commit(C.lengths + width + 1)",
        [LOOP, "-k", "targets_own and other-4"],
    ),
    "EOS inside a block ignored": PlantedBug(
        "decoding/loop.py",
        "commit",
        "S & (P < E)",
        "S & (P == E - 1)",
        [LOOP, "-k", "stop_token and self"],
    ),
    "penalties blind to the draft": PlantedBug(
        "sampling/processors.py",
        "_penalise",
        "H.generated[:, None] + D",
        "H.generated[:, None] + 0 * D",
        [LOOP, "-k", "every_processor and other"],
    ),
    "bad words blind to the draft": PlantedBug(
        "sampling/processors.py",
        "_TokensBefore.recent",
        "V & (B[:, None] == W)",
        "V & (B[:1, None] == W)",
        [LOOP, "-k", "bad_words and self"],
    ),
    "min_tokens counted from the round's start": PlantedBug(
        "sampling/processors.py",
        "_TokensBefore.num_generated",
        "H.lengths[:, None] + D",
        "H.lengths[:, None] + 0 * D",
        [LOOP, "-k", "min_tokens and self"],
    ),
    "noise too coarse for rare tokens": PlantedBug(
        "sampling/draw.py",
        "uniform",
        "return X",
        "return jax.random.uniform(key, shape, dtype)",
        [TAILS, "-k", "every_exponent"],
    ),
    "acceptance by a uniform that can be zero": PlantedBug(
        "decoding/verify.py",
        "verify.decide",
        "uniform(*REST)",
        "jax.random.uniform(*REST)",
        [TAILS, "-k", "billionth and 1"],
    ),
    "acceptance of several drafts by a uniform that can be zero": PlantedBug(
        "decoding/verify.py",
        "verify.decide",
        "uniform(*REST)",
        "jax.random.uniform(*REST)",
        [TAILS, "-k", "billionth and 2"],
    ),
    "a uniform depends on how many there are": PlantedBug(
        "sampling/draw.py",
        "uniform",
        "jax.random.bits(K, (*S, N), W)",
        "jnp.moveaxis(jax.random.bits(K, (N, *S), W), 0, -1)",
        [TAILS, "-k", "fewer_uniforms"],
    ),
    "padding drawn as if it were tokens": PlantedBug(
        "sampling/draw.py",
        "draw",
        "jnp.pad(P, W)",
        "jnp.pad(P, W, mode='edge')",
        [TAILS, "-k", "possible and 50261 and float32"],
    ),
    "small temperatures overflow": PlantedBug(
        "sampling/probabilities.py",
        "_softened.softmax",
        "(L - B) / T",
        "L / T",
        [PROBABILITIES, "-k", "smallest_temperatures"],
    ),
    "a bad word begins in the padding before the row": PlantedBug(
        "sampling/processors.py",
        "History.of",
        "jnp.where(I >= 0, T, -1)",
        "T",
        [PROCESSORS, "-k", "begin_before"],
    ),
    "what stands before a row matches every bad word": PlantedBug(
        "sampling/processors.py",
        "_forbidden",
        "B == R[:, :, None]",
        "(B == R[:, :, None]) | (R[:, :, None] < 0)",
        [PROCESSORS, "-k", "begin_before"],
    ),
    "features of the first row alone": PlantedBug(
        "sampling/parameters.py",
        "SamplingFeatures.of",
        "[R for R in rows if C]",
        "[R for R in rows[:1] if C]",
        [PROBABILITIES, "-k", "features_are_what"],
    ),
    "a cut that the first row does not use is skipped": PlantedBug(
        "sampling/probabilities.py",
        "_Cuts.of",
        "E.any()",
        "E.ravel()[0]",
        [PROBABILITIES, "-k", "float64_agrees"],
    ),
    "as many bad words as the first row has": PlantedBug(
        "sampling/processors.py",
        "_forbidden",
        "C.max()",
        "C[0, 0]",
        [PROCESSORS, "-k", "whatever_its_neighbours"],
    ),
    "draft steps share a key": PlantedBug(
        "drafters/base.py",
        "Context.token_keys",
        "S * D",
        "0 * D",
        [SAMPLED, "-k", "other-warm"],
    ),
    "a row's randomness shared with its neighbours": PlantedBug(
        "decoding/loop.py",
        "_round_keys",
        "child_key(keys_of_rows, L)",
        "child_key(keys_of_rows, jnp.broadcast_to(L.max(), L.shape))",
        [LOOP, "-k", "neighbours and other"],
    ),
    "a refused token counts for its position": PlantedBug(
        "decoding/state.py",
        "Counters.add",
        "P < K",
        "P <= K",
        [LOOP, "-k", "accepted_whole"],
    ),
    "tokens after a stop string are counted": PlantedBug(
        "engine/view.py",
        "View.work_until",
        "Work(len(S), *REST)",
        "Work(self.work(slot).rounds, *REST)",
        [JOINING, "-k", "counted_ends"],
    ),
    "a greedy draft is always certain": PlantedBug(
        "drafters/autoregressive.py",
        "autoregress.one",
        "write(confidence, S, I)",
        "write(confidence, jnp.ones_like(S), I)",
        ["tests/decoding/test_draft_length.py", "-k", "says_how and other"],
    ),
    "the warm-up counts as a measured round": PlantedBug(
        "engine/cost_profiling.py",
        "_Samples.costs",
        "F(S[1:])",
        "F(S[:1])",
        ["tests/engine/test_cost_profiling.py", "-k", "each_choice"],
    ),
    "drafted tokens advance the grammar of their row": PlantedBug(
        "text/grammar.py",
        "Grammar.masks",
        "S.deep_copy()",
        "S",
        ["tests/text/test_grammar.py", "-k", "places_of"],
    ),
    "a branch of a tree follows its neighbour's grammar": PlantedBug(
        "text/grammar.py",
        "Grammar.masks",
        "1 + int(P)",
        "i",
        ["tests/text/test_grammar.py", "-k", "tree"],
    ),
    "no text is held back for a stop string": PlantedBug(
        "engine/detokenizer.py",
        "Detokenizer.take",
        "range(1, len(S))",
        "range(len(S), len(S))",
        ["tests/engine/test_detokenizer.py"],
    ),
    "the branch that a tree keeps is taken from beyond a ring": PlantedBug(
        "models/cache.py",
        "KVState.gather",
        "S if self.ring else T",
        "T",
        ["tests/models/test_rings.py", "-k", "as_good"],
    ),
    "a window counts from slots": PlantedBug(
        "models/attention_mask.py",
        "AttentionMask.seen",
        "jnp.where(B < 0, I, P)",
        "I",
        ["tests/models/test_attention.py", "-k", "dense and tree and 2-False"],
    ),
    "each device counts its part of a cache from the first slot": PlantedBug(
        "models/attention.py",
        "_attend_in_parts.attend_to_part",
        "jax.lax.axis_index(A) * S",
        "0",
        ["tests/sharding/test_length.py", "-k", "logits and plain"],
    ),
    "sums of other devices are not scaled to the best score": PlantedBug(
        "models/attention.py",
        "_Sums.of_all",
        "jax.lax.pmax(B, A)",
        "B",
        ["tests/sharding/test_length.py", "-k", "logits and plain"],
    ),
    "a part of a ring wraps around at its size": PlantedBug(
        "models/cache.py",
        "KVState.indices",
        "size or S",
        "S",
        ["tests/sharding/test_length.py", "-k", "logits and window"],
    ),
    "min_tokens holds a stop string off one token too long": PlantedBug(
        "engine/detokenizer.py",
        "Detokenizer._add",
        "self._num_tokens <= S",
        "self._num_tokens <= S + 1",
        ["tests/engine/test_detokenizer.py", "-k", "min_tokens"],
    ),
    "the stop string that is listed first ends the text": PlantedBug(
        "engine/detokenizer.py",
        "Detokenizer._add",
        "min(A)",
        "A[0]",
        ["tests/engine/test_detokenizer.py", "-k", "several_stop_strings"],
    ),
    "the upper half of a seed is dropped": PlantedBug(
        "engine/request_builder.py",
        "RequestBuilder._key",
        "sampling.seed >> 32",
        "0",
        ["tests/test_llm.py", "-k", "every_bit"],
    ),
    "completions have the seeds of other requests": PlantedBug(
        "engine/request_builder.py",
        "completions_of",
        "int(A.generate_state(*REST)[0])",
        "sampling.seed + 1",
        ["tests/test_llm.py", "-k", "every_bit"],
    ),
    "the masks of one draft are made for several": PlantedBug(
        "engine/host_rounds.py",
        "HostRounds._masks",
        "L * draft.num_drafts",
        "L",
        ["tests/engine/test_host_rounds.py"],
    ),
    "a beginning is shared to the last token of its text": PlantedBug(
        "engine/slots.py",
        "Slot.num_shared",
        "self._num_equal[R] - 1",
        "self._num_equal[R]",
        ["tests/engine/test_slots.py"],
    ),
    "a beginning is shared to the end of a prompt": PlantedBug(
        "engine/slots.py",
        "Slot.num_shared",
        "len(P) - 2",
        "len(P) - 1",
        ["tests/engine/test_slots.py"],
    ),
    "requests are reported as they end": PlantedBug(
        "engine/scheduler.py",
        "Scheduler._report_finished",
        "sorted(*REST)",
        "self._finished",
        ["tests/engine/test_scheduler.py", "-k", "reported_in_their_order"],
    ),
    "a store that is just full loses an output": PlantedBug(
        "engine/suffix_index.py",
        "_Store.add",
        "self.size > self._capacity",
        "self.size >= self._capacity",
        ["tests/engine/test_suffix_index.py", "-k", "latest_whole"],
    ),
    "one namespace searches the stored outputs of another": PlantedBug(
        "engine/suffix_store.py",
        "StoredOutputs.of_rows",
        "self.parts.get(N, (0, 0))",
        "next(iter(self.parts.values()), (0, 0))",
        ["tests/drafters/test_suffix.py", "-k", "two_tenants"],
    ),
    "a table learns from tokens that were not drafted": PlantedBug(
        "decoding/loop.py",
        "commit",
        "P <= draft.lengths[:, None]",
        "P <= draft.lengths[:, None] + 1",
        ["tests/drafters/test_recycle.py", "-k", "likeliest_token"],
    ),
    "a table takes the emitted token for the rejected one": PlantedBug(
        "decoding/loop.py",
        "commit",
        "draft_ids[:, :-1]",
        "new_ids[:, :-1]",
        ["tests/drafters/test_recycle.py", "-k", "likeliest_token"],
    ),
    "a ring has no headroom": PlantedBug(
        "models/cache.py",
        "slots_of_layer",
        "layer.window + H",
        "layer.window",
        ["tests/models/test_rings.py", "-k", "only_layers"],
    ),
}


def plant(bug: str | None, root: Path) -> list[str]:
    """Copies package and tests with one bug, or without; returns the tests that must find it."""
    for name in ("spec_jax", "tests"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    if bug is None:
        return []
    BUGS[bug].plant(root / "spec_jax")
    return BUGS[bug].selection


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_can_be_planted(bug):
    """The code that it changes is there, once; the slow tests plant it."""
    source = (ROOT / "spec_jax" / BUGS[bug].module).read_text()
    assert BUGS[bug].planted(source) != source
    assert (ROOT / BUGS[bug].selection[0].partition("::")[0]).is_file()


def example(right, wrong, function="Mean.of"):
    return PlantedBug("mean.py", function, right, wrong, [])


MEAN = """
class Mean:
    def of(self, rows):
        total = sum(  # é
            rows, start=0
        )
        return total / len(rows)
    def other(self, rows):
        return rows / len(rows)
"""


@pytest.mark.parametrize(
    ("right", "wrong", "edited"),
    [
        ("A / len(B)", "A // (len(B) - 1)", "return (total // (len(rows) - 1))"),
        ("sum(*REST)", "max(*REST)", "total = (max(rows, start=0))\n        return"),
        ("return A", "return len(A)", "return len(total / len(rows))\n    def other"),
    ],
)
def test_only_the_matched_code_changes(right, wrong, edited):
    planted = example(right, wrong).planted(MEAN)
    assert edited in planted and "return rows / len(rows)" in planted


@pytest.mark.parametrize(
    ("bug", "message"),
    [
        (example("A * B", "A"), "`Mean.of` of mean.py holds `A * B` 0 times"),
        (example("A / A", "A"), "holds `A / A` 0 times"),
        (example("rows", "A"), "`Mean.of` of mean.py holds `rows` 2 times"),
        (example("A / B", "A", "Mean.all"), "there is no `Mean.all` of mean.py"),
    ],
)
def test_code_that_has_changed_is_reported_with_its_function(bug, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        bug.planted(MEAN)


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
