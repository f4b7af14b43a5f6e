"""The battery that every drafter must pass, also one from outside of the package."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, Int

from spec_jax.checkpoints import Checkpoint
from spec_jax.config import CUSTOM, SpeculativeConfig
from spec_jax.engine.custom import DrafterFactory, DrafterSetting
from spec_jax.engine.engine import Engine
from spec_jax.engine.methods import make_draft_length_policy, make_engine
from spec_jax.engine.requests import RequestInput
from spec_jax.errors import ConfigError
from spec_jax.evaluation.audit import SETTINGS
from spec_jax.evaluation.greedy import GreedyChecks
from spec_jax.evaluation.independence import IndependenceChecks
from spec_jax.evaluation.reference import ReferenceDecoder
from spec_jax.evaluation.rollback import check_rollback
from spec_jax.evaluation.sampled import MEANINGS
from spec_jax.evaluation.sampler import SampledAudit
from spec_jax.evaluation.statistics import Test, pearson
from spec_jax.evaluation.verdict import Check, Report, judge
from spec_jax.models.model import Model
from spec_jax.testing.models import tiny_checkpoint

VOCAB, LOOKAHEAD, SAMPLES, MAX_TOKENS = 8, 3, 4096, 24
PROMPTS = ([1, 2, 1, 3, 1], [3, 4, 3], [7, 5, 7, 7, 6, 2, 7, 5, 7])
"""They repeat themselves, so that lookups find something."""
JOINT = "sampled: jointly exact"
_MEANINGS = {
    **MEANINGS,
    JOINT: "the first tokens do not have the target's joint distribution",
}


def check_lossless(
    factory: DrafterFactory,
    speculative_config: SpeculativeConfig | None = None,
    *,
    samples: int = SAMPLES,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Checks that decoding with a drafter loses nothing, on tiny random models of 8 tokens.

    At temperature 0 the tokens equal plain decoding, in batches of one and three, with processors
    and stop tokens. Sampled tokens follow the target, each given the tokens before it, and the
    first four at most jointly, with the exact distribution by enumeration; the token after a
    rejection follows the residual. Drafted tokens follow the q that the drafter reports; without q,
    the same text gives the same draft. A row has the same tokens alone, beside neighbours, and when
    it is inserted into a running batch. After rejected tokens a draft depends on the text alone.

    All p-values are corrected for each other (Holm): a lossless drafter fails one in a thousand
    seeds. A check that sees nothing, such as one of drafts if nothing is drafted, fails too.

    Args:
      factory: makes the drafter, like `register_drafter`.
      speculative_config: how it drafts and is verified; by default the method `custom`, a constant
        K of 3, and verification `token`, which uses the q that the drafter reports. A `draft` is a
        tiny random model whatever its name.
      samples: rows sampled of each setting; more find smaller deviations.
      seed: of the sampled rows.
      on_progress: called with a line of text.

    Returns:
      What was looked at, and how.

    Raises:
      AssertionError: something is lost, or was not tested; the message says what that means.
      ConfigError: the factory's result is no drafter; or a value is out of range.
    """
    config = speculative_config or SpeculativeConfig(
        method=CUSTOM,
        num_speculative_tokens=LOOKAHEAD,
        draft_length_policy="constant",
        verification="token",
    )
    if samples < 1:
        raise ConfigError(f"samples is {samples}; give at least 1.")
    target = tiny_checkpoint(0, vocab_size=VOCAB, embed_size=16, num_layers=1)
    engine = _engine(factory, config, target)
    prompts = [RequestInput(list(prompt)) for prompt in PROMPTS]
    length = max(MAX_TOKENS, 2 * engine.drafter.lookahead + 2)
    checks = GreedyChecks(engine, prompts, length, on_progress).run()
    sampled = _SampledRows()
    checks += SampledAudit(engine, prompts, samples, on_progress).checks(
        SETTINGS, seed, sampled.add
    )
    checks.append(sampled.check(target.model, prompts[0], min(engine.drafter.lookahead, 3) + 1))
    name, most = list(SETTINGS.items())[-1]
    checks += IndependenceChecks(engine, prompts, {name: most}, length, seed, on_progress).run()
    # What a drafter may learn of rejected tokens, a prompt of the same text does not say.
    if make_draft_length_policy(config).reproducible and not engine.drafter.needs_likeliest:
        checks.append(
            check_rollback(engine, prompts, max_tokens=length, seed=seed, on_progress=on_progress)
        )
    report = judge(checks, _MEANINGS)
    faults = [f"{check.name}: {each}" for check in checks for each in check.failures]
    faults += [
        f"{check.name}: not tested, {check.reason}."
        for check in checks
        if check.name in report.untested
    ]
    if faults:
        raise AssertionError("\n".join(["something is lost:", *faults]))
    return report


@dataclasses.dataclass
class _SampledRows:
    """The tokens that rows of the first prompt have, by setting."""

    rows: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    def add(self, setting: str, which: np.ndarray, tokens: np.ndarray) -> None:
        self.rows.setdefault(setting, []).append(tokens[which == 0])

    def check(self, target: Model, prompt: RequestInput, length: int) -> Check:
        """Compares the first tokens with the target's joint distribution, by enumeration."""
        check, reference, begin = Check(JOINT), ReferenceDecoder(target), len(prompt)
        for name, rows in self.rows.items():
            tokens = np.concatenate(rows)[:, begin : begin + length]
            exact = reference.joint(prompt.prompt_token_ids, length, SETTINGS[name])
            check.tests += joint_tests(name, tokens, exact)
            check.sample = f"{len(tokens)} rows a setting, {length} tokens"
        return check


def joint_tests(
    name: str, tokens: Int[np.ndarray, "rows length"], joint: Float[np.ndarray, "*vocab"]
) -> list[Test]:
    """Tests of rows of tokens against their exact joint distribution, one axis per token.

    All tokens together have too many values: all but the last are compared, and the last with each.
    """
    counts, last = np.zeros(joint.shape), joint.ndim - 1
    np.add.at(counts, tuple(tokens.T), 1)
    together: Sequence[tuple[int, ...]] = [(0,)]
    if last:
        together = [tuple(range(last)), *itertools.product(range(last), [last])]
    tests = []
    for axes in together:
        other_axes = tuple(axis for axis in range(joint.ndim) if axis not in axes)
        label = f"{name}, tokens {', '.join(map(str, axes))}"
        tests.append(pearson(label, counts.sum(other_axes), joint.sum(other_axes)))
    return tests


def _engine(factory: DrafterFactory, config: SpeculativeConfig, target: Checkpoint) -> Engine:
    """An engine of a tiny target, as `LLM` makes one."""

    def load_draft() -> Checkpoint:
        return tiny_checkpoint(1, vocab_size=VOCAB, embed_size=16, num_layers=1)

    return make_engine(DrafterSetting(config, target, load_draft, factory), max_model_len=512)[0]
