"""The audit in memory: its verdicts, and how often it errs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.base import Draft, Drafter
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import RequestInput
from spec_jax.errors import ConfigError, RequestError
from spec_jax.evaluation import audit
from spec_jax.evaluation.audit import SETTINGS
from spec_jax.evaluation.decoding import decode, make_request
from spec_jax.evaluation.greedy import GreedyChecks
from spec_jax.evaluation.independence import DRAFT_ROUNDED, ROUNDED, why_not_reproducible
from spec_jax.evaluation.prompts import choose
from spec_jax.evaluation.sampled import DRAFTED, FOLLOWING, MEANINGS
from spec_jax.evaluation.sampler import SampledAudit
from spec_jax.evaluation.verdict import FAIL, NOT_TESTED, judge
from spec_jax.pytree import pytree, static
from spec_jax.testing import tiny_model
from tests.evaluation.pairs import noisy_copy
from tests.harness import make_engine

VOCAB = 12
TARGET = tiny_model(0, vocab_size=VOCAB, embed_size=16, num_layers=1)
DRAFT = noisy_copy(TARGET, 0.3)
PROMPTS = [[1, 2, 3], [4, 5, 4, 5, 4, 5, 4], [int(t) for t in np.arange(20) * 7 % VOCAB]]
STARTS = [RequestInput(prompt) for prompt in PROMPTS]
ONE = {"T=1": SamplingParams(temperature=1.0)}


def engine(method="other", **options):
    return make_engine(method, TARGET, DRAFT, lookahead=2, **options)


def statuses(report):
    return {check.name: check.status for check in report.checks}


@pytest.mark.slow
def test_few_audits_of_a_lossless_method_fail():
    sampler = SampledAudit(engine(), STARTS, 512, lambda message: None)
    p_values, failed = [], 0
    for seed in range(8):
        checks = sampler.checks(SETTINGS, seed)
        failed += not judge(checks, MEANINGS).passed
        p_values += [test.p_value for check in checks for test in check.tests]
    assert failed == 0
    # They overlap, so that they are not independent of each other; still, they are uniform.
    assert len(p_values) > 200
    assert 0.05 < (np.array(p_values) < 0.1).mean() < 0.15
    assert (np.array(p_values) < 0.001).mean() < 0.005


@pytest.mark.slow
def test_without_settings_only_greedy_checks_are_made():
    report = audit(engine(), PROMPTS, settings={}, max_tokens=8)
    assert report.passed and report.tests == 0
    assert [status for status in statuses(report).values()].count(NOT_TESTED) == 3
    assert all("temperature is 0" in check.reason for check in report.checks if check.reason)


def in_bfloat16(model):
    return dataclasses.replace(
        model, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.params)
    )


@pytest.mark.parametrize(
    ("target", "draft", "reason"),
    [
        (TARGET, DRAFT, None),
        (in_bfloat16(TARGET), DRAFT, ROUNDED),
        (TARGET, in_bfloat16(DRAFT), DRAFT_ROUNDED),
    ],
)
def test_rows_are_compared_where_nothing_rounds(target, draft, reason):
    assert why_not_reproducible(make_engine("other", target, draft, lookahead=2)) == reason


@pytest.mark.slow
def test_in_bfloat16_rounding_is_no_failure():
    bfloat16 = make_engine("other", in_bfloat16(TARGET), in_bfloat16(DRAFT), lookahead=2)
    report = audit(bfloat16, PROMPTS, settings=ONE, samples=256, max_tokens=12)
    assert report.passed, report.as_dict()
    assert statuses(report)[FOLLOWING] == NOT_TESTED
    assert statuses(report)["rows: that join"] == NOT_TESTED


@pytest.mark.slow
def test_a_method_that_drafts_nothing_was_not_tested():
    """Lookups that match nothing: every check of drafts says so, and nothing passes."""
    silent = make_engine("prompt_lookup", TARGET, lookahead=2)
    prompts = [RequestInput([1]), RequestInput([2]), RequestInput([3])]
    greedy = GreedyChecks(silent, prompts, 1, lambda message: None).run()
    assert [check.status for check in greedy] == [NOT_TESTED] * 3
    assert greedy[0].reason == "nothing was drafted" and greedy[0].comparisons
    report = judge(greedy, MEANINGS)
    assert report.verdict == NOT_TESTED and not report.passed and len(report.untested) == 3


@pytest.mark.slow
def test_rejections_are_needed_for_a_test_of_what_follows_them():
    """A draft that is the target itself is never refused."""
    perfect = make_engine("self", TARGET, lookahead=2)
    sampler = SampledAudit(perfect, STARTS, 256, lambda message: None)
    checks = {check.name: check for check in sampler.checks(ONE, seed=0)}
    assert checks[FOLLOWING].status == NOT_TESTED and not checks[FOLLOWING].excused
    assert checks[FOLLOWING].reason == "too few drafted tokens were rejected"


@pytest.mark.parametrize("method", ["prompt_lookup", "other"])
@pytest.mark.slow
def test_the_audit_chooses_prompts_that_show_something(method):
    candidates = [[1], [2, 3], [4, 5, 4, 5, 4, 5, 4], [6, 7, 8], [1, 2, 3, 1, 2, 3, 1], [9, 10]]
    chosen = choose(engine(method), candidates, 12, lambda message: None)
    assert len(chosen) == 3 and all(list(each.prompt_token_ids) in candidates for each in chosen)
    checks = GreedyChecks(engine(method), chosen, 12, lambda message: None).run()
    assert checks[0].status == checks[2].status == "PASS"
    narrow = make_engine(method, TARGET, DRAFT, lookahead=2, max_len=24 + 1)
    assert [len(each) for each in choose(narrow, candidates, 12, lambda message: None)] == [1]


@pytree
class Restless(Drafter):
    """A drafter without q whose drafts change with its key."""

    lookahead: int = static()
    fixed_length = True

    def init(self, prompt):
        return None

    def propose(self, state, context):
        batch = context.lengths.shape[0]
        tokens = jax.vmap(lambda key: jax.random.randint(key, (2,), 0, VOCAB, jnp.int32))(
            context.keys
        )
        return Draft(tokens=tokens, probs=None, lengths=jnp.full((batch,), 2, jnp.int32)), state

    def commit(self, state, committed):
        return None


@pytree
class Overconfident(DraftModel):
    """A draft model whose reported q does not sum to one."""

    def propose(self, state, context):
        draft, state = super().propose(state, context)
        return dataclasses.replace(draft, probs=draft.probs * 1.1), state


@pytest.mark.parametrize(
    ("drafter", "said"),
    [
        pytest.param(Restless(2), "says that it is deterministic", marks=pytest.mark.slow),
        (Overconfident(DRAFT, 2), "not a distribution"),
    ],
)
def test_what_a_drafter_reports_is_checked(drafter, said):
    untrue = Engine(TARGET, drafter, Constant(2), "token", max_model_len=256)
    checks = SampledAudit(untrue, STARTS, 256, lambda message: None).checks(ONE, seed=0)
    report = judge(checks, MEANINGS)
    assert not report.passed and statuses(report)[DRAFTED] == FAIL
    (drafted,) = (check for check in checks if check.name == DRAFTED)
    assert any(said in failure for failure in drafted.failures)


def test_a_difference_is_explained_by_the_scores():
    greedy = GreedyChecks(engine(), STARTS, 8, lambda message: None)
    params = SamplingParams(max_tokens=8)
    asked = make_request(STARTS[0], params)
    (expected,), _ = decode(greedy.plain, [asked])
    near, said = greedy.explain(asked, expected, 3, (expected[3] + 1) % VOCAB)
    assert not near and f"{expected[3]} became" in said and "Neither score" in said


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"samples": 0}, ConfigError, "samples is 0; give at least 1."),
        ({"max_tokens": 0}, ConfigError, "max_tokens is 0"),
        ({"prompts": []}, RequestError, "no prompt"),
        ({"prompts": [[1], []]}, RequestError, "prompt 1 holds no token"),
        ({"max_tokens": 400}, RequestError, "prompt 0 has 3 tokens, and the audit needs 800 more"),
    ],
)
def test_mistakes(changes, error, said):
    arguments = {"prompts": PROMPTS} | changes
    with pytest.raises(error, match=said):
        audit(engine(), arguments.pop("prompts"), **arguments)
