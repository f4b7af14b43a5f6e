"""The common battery: every method under every policy, rule, way of scoring and setting.

What a combination must show depends on its setting and its rows:

- greedy, `one` row or `three`: the reference decoder's tokens, exactly.
- sampled, `one`: what one request says is a sample of the target's joint distribution. Thousands of
  rows with different seeds stand for it, and chi-square tests of its first tokens against the
  exact probabilities fail a correct program once in a million.
- sampled, `three`: a row says the same in another place and among other neighbours.
- sampled, with `coupled` verification: rows say what plain decoding says with the same seeds.

A test for each would compile for hours. By default those run that cover each method, and every
pair of other choices, such as a policy with a rule; under `--slow` those that cover every three
choices; the rest is marked `exhaustive`.
"""

import functools
import itertools
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest

from spec_jax.config import (
    DRAFT_LENGTH_POLICIES,
    METHODS,
    SCORINGS,
    VERIFICATIONS,
    SamplingParams,
    SpeculativeConfig,
    annotations_of,
    choices_of,
    option_names,
)
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import Confidence, Constant, Heuristic, Oracle
from spec_jax.engine import engine as engine_module
from spec_jax.errors import ConfigError
from spec_jax.testing import ReferenceDecoder, tiny_model
from spec_jax.testing.lossless import joint_tests
from tests.harness import DRAFTINGS, make_engine, request, run
from tests.often import often

K, VOCAB, SAMPLES, P_VALUE = 3, 8, 8192, 1e-6
TARGET = tiny_model(0, vocab_size=VOCAB, embed_size=16, num_layers=2)
DRAFT = tiny_model(1, vocab_size=VOCAB, embed_size=16, num_layers=1)
REFERENCE = ReferenceDecoder(TARGET)
PROMPTS = [[1, 2, 1, 3, 1], [3], [7, 5, 7, 7, 6, 2]]

POLICIES = {
    "constant": Constant(K),
    "heuristic": Heuristic(K, start=2),
    "confidence": Confidence(K, 0.3),
    "retuned": Confidence(K, 0.3, retune=True),
    "adaptive": Adaptive(K),
    "oracle": Oracle(K),
}
SETTINGS = {
    "greedy": SamplingParams(max_tokens=40),
    "plain": SamplingParams(max_tokens=K + 1, temperature=1.0),
    "cool": SamplingParams(max_tokens=K + 1, temperature=0.7, top_p=0.9, repetition_penalty=1.2),
}


class Combination(NamedTuple):
    """One choice of each kind."""

    method: str
    policy: str
    verification: str
    scoring: str
    setting: str
    rows: str

    def __str__(self):
        return "-".join(self)


AXES = (DRAFTINGS, POLICIES, VERIFICATIONS, SCORINGS, SETTINGS, ("one", "three"))
PRODUCT = [Combination(*each) for each in itertools.product(*AXES)]

CONFIGURED = {
    "self": {"method": "draft_model", "draft": "the target"},
    "other": {"method": "draft_model", "draft": "a model"},
    "tree": {"method": "draft_model", "draft": "a model", "num_drafts": 3},
    "reduced": {"method": "draft_model", "draft": "a model", "draft_vocab_size": 5},
    "lookup_tree": {"method": "prompt_lookup", "num_drafts": 3},
    "universal_vocabulary": {"method": "universal_vocabulary", "draft": "a model"},
    "features": {"method": "custom"},
    "retuned": {"draft_length_policy": "confidence", "retune_confidence": True},
}
"""The options that a row of the battery stands for, where its name does not say them."""


def options_of(each):
    """The configuration that a combination stands for."""
    method = CONFIGURED.get(each.method, {"method": each.method})
    policy = CONFIGURED.get(each.policy, {"draft_length_policy": each.policy})
    return method | policy | {"verification": each.verification, "scoring": each.scoring}


@functools.cache
def configurable(*choices):
    """Whether `SpeculativeConfig` accepts a method, policy, verification and scoring."""
    try:
        SpeculativeConfig(**options_of(Combination(*choices, "greedy", "one")))
    except ConfigError:
        return False
    return True


SKIPS = {
    "the configuration refuses it: one option has no meaning beside another": (
        lambda c: not configurable(*c[:4])
    ),
    "adaptive rounds are as long as measured times say, so that a sampled row keeps its "
    "distribution but not its tokens, unless verification is coupled": (
        lambda c: (
            c.policy == "adaptive"
            and c.setting != "greedy"
            and c.rows == "three"
            and c.verification != "coupled"
        )
    ),
}
"""Why some combinations are not run."""


def skipped(each):
    return [reason for reason, holds in SKIPS.items() if holds(each)]


RUN = [each for each in PRODUCT if not skipped(each)]


def pairs(each):
    """The method and the policy that a combination uses, and every two of its other choices."""
    method, policy, *others = enumerate(each)
    return {(method,), (policy,), *itertools.combinations(others, 2)}


def triples(each):
    """Every three choices of a combination."""
    return set(itertools.combinations(enumerate(each), 3))


SLOW_TO_SAMPLE = ("suffix", "universal_vocabulary", "other", "tree", "reduced")
"""Methods that compile or decode for long where a row samples: others stand for them by default."""


def is_dear(each):
    """Whether a combination runs for long."""
    return each.method in SLOW_TO_SAMPLE and each.setting != "greedy"


def covering(combinations, choices, price=1):
    """Few of them that make the `choices` which any of them makes, each about as often.

    One that is dear must make `price` times as many new choices as another.
    """
    left = {each: choices(each) for each in combinations}
    wanted, chosen, uses = set().union(*left.values()), [], Counter()

    def gain(each):
        gained = len(left[each] & wanted) / (price if is_dear(each) else 1)
        return gained, not is_dear(each), -sum(uses[choice] for choice in enumerate(each))

    while wanted:
        best = max(left, key=gain)
        chosen.append(best)
        uses.update(enumerate(best))
        wanted -= left.pop(best)
    return chosen


COVER, SLOW = set(covering(RUN, pairs, price=3)), set(covering(RUN, triples))


def marks(each):
    """When a combination runs."""
    if each in COVER:
        return ()
    return pytest.mark.slow if each in SLOW else pytest.mark.exhaustive


@functools.lru_cache(maxsize=4)  # compiled programs take memory
def engine_of(method, policy, verification, scoring):
    return make_engine(
        method,
        TARGET,
        DRAFT,
        lookahead=K,
        policy=POLICIES[policy],
        verification=verification,
        scoring=scoring,
        max_len=128,
    )


@pytest.mark.slow
@pytest.mark.parametrize("policy", often(POLICIES, ["confidence"]))
def test_nothing_is_compiled_after_warm_up_whatever_k_becomes(policy, monkeypatch):
    monkeypatch.setattr(engine_module, "MIN_CAPACITY", 32)
    engine = engine_of("other", policy, "token", "block")
    for setting in ("greedy", "plain", "cool"):
        run(engine, [request(PROMPTS[0], SETTINGS[setting])], rounds=3)
    traces = engine.traces
    for i, setting in enumerate(("cool", "greedy", "plain")):
        run(engine, [request(PROMPTS[i], SETTINGS[setting], seed=i)], rounds=2)
    assert engine.traces == traces


@functools.cache
def joint(setting):
    return REFERENCE.joint(PROMPTS[0], K + 1, SETTINGS[setting])


@functools.cache
def greedy_tokens():
    return [REFERENCE.greedy(prompt, SETTINGS["greedy"])[0] for prompt in PROMPTS]


@functools.cache
def plain_rows(setting):
    """What plain decoding says to one prompt, with many seeds."""
    engine = engine_of("none", "constant", "coupled", "block")
    return run(engine, [request(PROMPTS[0], SETTINGS[setting], seed=i) for i in range(SAMPLES)])


def check_distribution(engine, setting):
    params = SETTINGS[setting]
    rows = run(engine, [request(PROMPTS[0], params, seed=i) for i in range(SAMPLES)])
    for test in joint_tests(setting, np.array(rows), joint(setting)):
        assert test.p_value > P_VALUE, test
    if engine.strategy.verification == "coupled":
        # Rounding moves a logit by 1e-6, and so a draw in a million.
        others = [row for row, plain in zip(rows, plain_rows(setting), strict=True) if row != plain]
        assert len(others) <= 2, others


def check_neighbours(engine, setting):
    params = SETTINGS[setting]
    row = request(PROMPTS[0], params, seed=7)
    hot = SamplingParams(max_tokens=K + 1, temperature=2.0, top_k=3)
    others = [request(PROMPTS[i % 3], each, seed=i) for i, each in enumerate([params, hot] * 2)]
    alone = run(engine, [row, *others[:2]])[0]
    assert run(engine, [*others[2:], row])[2] == alone
    seeds = [request(PROMPTS[0], params, seed=i) for i in range(3)]
    assert len({tuple(tokens) for tokens in run(engine, seeds)}) > 1


@pytest.mark.parametrize(
    "each",
    [pytest.param(each, marks=marks(each), id=str(each)) for each in RUN],
)
def test_a_combination_loses_nothing(each, monkeypatch):
    monkeypatch.setattr(engine_module, "MIN_CAPACITY", 32)
    engine = engine_of(*each[:4])
    if each.setting == "greedy":
        requests = [request(prompt, SETTINGS["greedy"]) for prompt in PROMPTS]
        if each.rows == "three":
            assert run(engine, requests) == greedy_tokens()
        else:
            assert [run(engine, [alone])[0] for alone in requests] == greedy_tokens()
    elif each.rows == "one":
        check_distribution(engine, each.setting)
    else:
        check_neighbours(engine, each.setting)


def test_every_combination_is_run_or_skipped_for_a_reason():
    run_or_skipped = set(RUN) | {each for each in PRODUCT if skipped(each)}
    assert run_or_skipped == set(PRODUCT) and len(PRODUCT) == len(set(PRODUCT))
    for reason, holds in SKIPS.items():
        assert any(skipped(each) == [reason] for each in PRODUCT), f"{reason}: nothing to skip"
        assert not all(holds(each) for each in PRODUCT)
    assert set(RUN) >= COVER | SLOW
    for some, choices in ((COVER, pairs), (COVER | SLOW, triples)):
        assert set().union(*map(choices, some)) == set().union(*map(choices, RUN))


ELSEWHERE = {"universal_text": "drafts on the host, from text"}
"""Methods that the battery does not know, and why."""


def test_the_battery_knows_all_that_can_be_configured():
    methods = {}
    for each in RUN:
        options = options_of(each)
        values = methods.setdefault(options.pop("method"), {})
        for name, value in options.items():
            values.setdefault(name, set()).add(value)
    assert methods.keys() == METHODS.keys() - set(ELSEWHERE)
    every = {
        "draft_length_policy": DRAFT_LENGTH_POLICIES,
        "verification": VERIFICATIONS,
        "scoring": SCORINGS,
    }
    for method, values in methods.items():
        for name, known in every.items():
            if name in option_names(METHODS[method]):
                choices = choices_of(annotations_of(METHODS[method])[name])
                assert values[name] == set(choices) & set(known)
