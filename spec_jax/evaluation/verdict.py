"""The results of an audit."""

import dataclasses
from typing import Any

from spec_jax.evaluation.statistics import Test, holm

PASS, FAIL, NOT_TESTED = "PASS", "FAIL", "NOT TESTED"
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
      reason: why it was not tested, or not where it matters most; or empty.
      excused: whether what was asked for leaves nothing to test, such as plain decoding.
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
    excused: bool = False

    @property
    def status(self) -> str:
        """PASS, FAIL or NOT TESTED."""
        if self.failures:
            return FAIL
        looked = bool(self.comparisons or self.tests)
        return PASS if looked and not self.reason else NOT_TESTED

    def leave_out(self, reason: str, excused: bool = False) -> None:
        """Says why there is nothing to see; the first reason stays."""
        if not self.reason:
            self.reason, self.excused = reason, excused

    def compare(self, same: bool, failure: str) -> bool:
        """Counts an exact comparison and returns it; `failure` explains what a failure means."""
        self.comparisons += 1
        if not same and failure not in self.failures:
            self.failures.append(failure)
        return same

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("name", "status", "sample", "comparisons", "failures", "notes", "excused")
        return {
            **{name: getattr(self, name) for name in names},
            "tests": [dataclasses.asdict(test) for test in self.tests],
            "corrected_p_value": self.p_value,
            "detectable_effect": self.detectable,
            "not_tested_because": self.reason or None,
        }


@dataclasses.dataclass(frozen=True)
class Report:
    """An audit's verdict, with the checks in the order in which they ran."""

    checks: list[Check]

    @property
    def verdict(self) -> str:
        """FAIL if a check failed, NOT TESTED if one could not see what it is for, or PASS.

        A check that is excused is listed as not tested and does not change the verdict.
        """
        if any(check.status == FAIL for check in self.checks):
            return FAIL
        return NOT_TESTED if self.untested else PASS

    @property
    def passed(self) -> bool:
        """Whether everything was tested and nothing failed."""
        return self.verdict == PASS

    @property
    def untested(self) -> list[str]:
        """The names of the checks that should have seen something and did not."""
        return [
            check.name for check in self.checks if check.status == NOT_TESTED and not check.excused
        ]

    @property
    def tests(self) -> int:
        """The number of statistical tests, which are corrected for each other."""
        return sum(len(check.tests) for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        names = ("verdict", "passed", "untested", "tests")
        return {
            **{name: getattr(self, name) for name in names},
            "level": LEVEL,
            "checks": [check.as_dict() for check in self.checks],
        }


def judge(checks: list[Check], meanings: dict[str, str]) -> Report:
    """Corrects all p-values for each other and turns the small ones into failures.

    `meanings` says for each check what a rejection there suggests.
    """
    tests = [(check, test) for check in checks for test in check.tests]
    corrected = holm([test.p_value for _, test in tests])
    for check in checks:
        results = [(p, test) for p, (of, test) in zip(corrected, tests, strict=True) if of is check]
        if not results:
            continue
        check.p_value = min(p for p, _ in results)
        check.detectable = min(test.detectable(LEVEL / len(tests)) for _, test in results)
        rejected = sorted((p, test.name) for p, test in results if p <= LEVEL)
        if rejected:
            p, name = rejected[0]
            others = f" and {len(rejected) - 1} more" if len(rejected) > 1 else ""
            check.failures.append(f"{meanings[check.name]} ({name}: p = {p:.1g}{others}).")
    return Report(checks)
