"""The results of an audit."""

import dataclasses
from typing import Any

from spec_jax.evaluation.statistics import Test, holm

PASS, FAIL, NOT_RUN = "PASS", "FAIL", "NOT RUN"
LEVEL = 1e-3
"""The probability that an audit of a lossless method fails by chance, all tests together."""


@dataclasses.dataclass
class Check:
    """One line of the verdict.

    Attributes:
      name: what is checked.
      sample: how much was looked at, in words.
      comparisons: exact comparisons, apart from statistical tests.
      tests: statistical tests.
      p_value: the smallest, corrected for all tests of the audit; None without a test.
      detectable: the smallest deviation (Cohen's w) that its strongest test finds with 90 % power.
      failures: what went wrong, in sentences.
      notes: other findings, such as near-ties and features that were not exercised.
      reason: why it was not run, or empty.
    """

    name: str
    sample: str = ""
    comparisons: int = 0
    tests: list[Test] = dataclasses.field(default_factory=list)
    p_value: float | None = None
    detectable: float | None = None
    failures: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    reason: str = ""

    @property
    def status(self) -> str:
        """PASS, FAIL or NOT RUN."""
        if self.failures:
            return FAIL
        return PASS if self.comparisons or self.tests else NOT_RUN

    def compare(self, same: bool, failure: str) -> None:
        """Counts an exact comparison; `failure` explains what a failure means."""
        self.comparisons += 1
        if not same and failure not in self.failures:
            self.failures.append(failure)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "name": self.name,
            "status": self.status,
            "sample": self.sample,
            "comparisons": self.comparisons,
            "tests": [dataclasses.asdict(test) for test in self.tests],
            "corrected_p_value": self.p_value,
            "detectable_effect": self.detectable,
            "failures": self.failures,
            "notes": self.notes,
            "not_run_because": self.reason or None,
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """An audit's verdict.

    Attributes:
      checks: in the order in which they ran.
    """

    checks: list[Check]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != FAIL for check in self.checks)

    @property
    def tests(self) -> int:
        """The number of statistical tests, which are corrected for each other."""
        return sum(len(check.tests) for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "passed": self.passed,
            "level": LEVEL,
            "tests": self.tests,
            "checks": [check.as_dict() for check in self.checks],
        }


def judge(checks: list[Check], meanings: dict[str, str]) -> Report:
    """Corrects all p-values for each other and turns the small ones into failures.

    Args:
      checks: what was measured.
      meanings: check name -> what a rejection there suggests.
    """
    tests = [(check, test) for check in checks for test in check.tests]
    corrected = holm([test.p_value for _, test in tests])
    for check in checks:
        own = [(p, test) for p, (of, test) in zip(corrected, tests, strict=True) if of is check]
        if not own:
            continue
        check.p_value = min(p for p, _ in own)
        check.detectable = min(test.detectable(LEVEL / len(tests)) for _, test in own)
        rejected = sorted((p, test.name) for p, test in own if p <= LEVEL)
        if rejected:
            p, name = rejected[0]
            others = f" and {len(rejected) - 1} more" if len(rejected) > 1 else ""
            check.failures.append(f"{meanings[check.name]} ({name}: p = {p:.1g}{others}).")
    return Report(checks)
