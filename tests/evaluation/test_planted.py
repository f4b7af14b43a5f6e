"""The audit that users run finds every planted bug that changes the tokens it samples."""

import json
import os
import subprocess
import sys

import pytest

from tests.evaluation.pairs import PROMPTS, write_pair, write_stranger
from tests.evaluation.test_planted_bugs import BUGS, plant


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    return write_stranger(tmp_path_factory.mktemp("stranger"))


SAMPLES = ("--samples", 1024)
"""A quarter of the default for a model as small: enough for what is planted, in half the time."""


RUN = (
    "import runpy; from tests import quick; quick.draft_as_if_it_were_free(); "
    "runpy.run_module('spec_jax', run_name='__main__')"
)
"""Otherwise measured times decide how much an adaptive policy drafts, and whether it does."""


def audit(root, *flags):
    """Runs `spec-jax audit --json` of the package under a folder; without a report if it fails."""
    prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
    command = [sys.executable, "-c", RUN, "audit", "--json", *prompts, *map(str, flags)]
    result = subprocess.run(
        command,
        cwd=root,
        # Bugs are planted in what XLA compiles.
        env=os.environ | {"PYTHONPATH": str(root), "SPEC_JAX_NATIVE": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode in (0, 1, 3), result.stderr
    return result.returncode, json.loads(result.stdout or "null")


UNSEEN = {
    # Thousands of samples do not show what happens once in millions; tests of single draws do.
    "noise too coarse for rare tokens": "rare",
    "acceptance by a uniform that can be zero": "rare",
    "acceptance of several drafts by a uniform that can be zero": "rare",
    # An audit compares a method with its target alone, which draws by the same function.
    "padding drawn as if it were tokens": "on both sides",
    # Rows of this audit all have drafts of one length.
    "a uniform depends on how many there are": "one draft length",
    # An audit chooses the sampling parameters.
    "bad words blind to the draft": "no bad words",
    "a bad word begins in the padding before the row": "no bad words",
    "what stands before a row matches every bad word": "no bad words",
    "min_tokens counted from the round's start": "no min_tokens",
    "small temperatures overflow": "no small temperature",
    "drafted tokens advance the grammar of their row": "no grammar",
    "a branch of a tree follows its neighbour's grammar": "no grammar",
    "tokens after a stop string are counted": "no stop string",
    "no text is held back for a stop string": "no stop string",
    "min_tokens holds a stop string off one token too long": "no stop string",
    "the stop string that is listed first ends the text": "no stop string",
    # An audit makes its requests by itself, one completion each.
    "the upper half of a seed is dropped": "no request of a user",
    "completions have the seeds of other requests": "no request of a user",
    "requests are reported as they end": "no request of a user",
    "the masks of one draft are made for several": "no grammar",
    "a beginning is shared to the last token of its text": "no common beginning",
    "a beginning is shared to the end of a prompt": "no common beginning",
    "a store that is just full loses an output": "no full store",
    "a ring has no headroom": "no window in this target",
    "the branch that a tree keeps is taken from beyond a ring": "no window in this target",
    "a window counts from slots": "no window in this target",
    # These change counters and how much is drafted, but no token.
    "a refused token counts for its position": "counters",
    "a greedy draft is always certain": "draft length",
    "the warm-up counts as a measured round": "draft length",
}
"""Bugs that this audit cannot see, and why; the tests that must find them are in `BUGS`."""


OF_COUPLED = {"every token of a block drawn with the first one's key"}
"""Bugs of coupled verification, which draws no residual and compares no uniform."""


def test_only_planted_bugs_are_named():
    assert UNSEEN.keys() | OF_COUPLED <= BUGS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in UNSEEN])
def test_an_audit_fails_when_the_bug_is_planted(bug, pair, tmp_path):
    plant(bug, tmp_path)
    target, draft = pair
    verification = "coupled" if bug in OF_COUPLED else "token"
    flags = ("--draft", draft, "--verification", verification)
    code, report = audit(tmp_path, "--target", target, *SAMPLES, *flags)
    assert code == 1
    # A program that ends with an error says nothing wrong either.
    assert report is None or any(check["failures"] for check in report["checks"])


METHODS = {
    "draft_model": ("--draft", "DRAFT"),
    "self": ("--draft", "TARGET"),
    "block": ("--draft", "DRAFT", "--verification", "block"),
    "prefix batch": ("--draft", "DRAFT", "--scoring", "prefix_batch"),
    "several": ("--draft", "DRAFT", "--num-drafts", 2),
    "reduced": ("--draft", "DRAFT", "--draft-vocab-size", 16),
    "heuristic": ("--draft", "DRAFT", "--draft-length-policy", "heuristic"),
    "confidence": (
        "--draft",
        "DRAFT",
        "--draft-length-policy",
        "confidence",
        "--verification",
        "block",
    ),
    "retuned": ("--draft", "DRAFT", "--draft-length-policy", "confidence", "--retune-confidence"),
    "adaptive": ("--draft", "DRAFT", "--draft-length-policy", "adaptive"),
    "oracle": ("--draft", "DRAFT", "--draft-length-policy", "oracle"),
    "prompt_lookup": ("--method", "prompt_lookup"),
    "several_lookups": ("--method", "prompt_lookup", "--num-drafts", 2),
    "suffix": ("--method", "suffix"),
    "recycle": ("--method", "recycle"),
    "early_exit": ("--method", "early_exit", "--early-exit-layers", 1),
    "universal_vocabulary": ("--method", "universal_vocabulary", "--draft", "STRANGER"),
    "universal_text": ("--method", "universal_text", "--draft", "STRANGER"),
}


# Greedy texts of this target repeat too little for a block that holds a stop token.
UNTESTED = {name: ["greedy: stop tokens"] for name in ("prompt_lookup", "suffix")}
"""Checks that see nothing with this pair."""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_an_audit_passes_without_a_bug(method, pair, stranger, tmp_path):
    plant(None, tmp_path)
    models = dict(zip(("TARGET", "DRAFT"), pair, strict=True)) | {"STRANGER": stranger}
    flags = [models.get(flag, flag) for flag in METHODS[method]]
    code, report = audit(tmp_path, "--target", pair[0], *SAMPLES, *flags)
    unseen = report["untested"]
    assert unseen == UNTESTED.get(method, []), report
    assert code == (3 if unseen else 0), report
    assert report["verdict"] != "FAIL" and report["tests"] > 20
