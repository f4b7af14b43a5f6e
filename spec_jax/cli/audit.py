"""`spec-jax audit`: is anything lost?"""

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType

from spec_jax.cli.decoding_options import AuditOptions
from spec_jax.cli.loading import job_summary, load
from spec_jax.cli.prompts import PromptText
from spec_jax.cli.screen import Screen, plain_table
from spec_jax.errors import ConfigError
from spec_jax.evaluation import Report, audit
from spec_jax.evaluation.audit import random_audio
from spec_jax.evaluation.prompts import PROMPTS, choose
from spec_jax.evaluation.verdict import FAIL, LEVEL, NOT_TESTED, PASS
from spec_jax.llm import LLM

_STYLES = {PASS: "green", FAIL: "bold red", NOT_TESTED: "yellow"}
_REMEDY = (
    " Give prompts whose continuations the method can draft, more --samples, or --allow-untested."
)
_EXIT_CODES = {PASS: 0, FAIL: 1, NOT_TESTED: 3}


def run(options: AuditOptions, screen: Screen, texts: Sequence[PromptText]) -> int:
    """Audits with some prompts, or with prompts that come with the audit, and prints the verdict.

    Returns the exit code: 1 if a check failed, 3 if one saw nothing and that is not allowed.
    """
    llm = load(options, screen)
    report = audit(
        llm.engine,
        _prompts(llm, texts, options, screen),
        settings=options.settings,
        samples=options.samples,
        max_tokens=options.max_tokens,
        seed=options.seed,
        on_progress=screen.progress,
    )
    job = job_summary(options, llm) | {"seed": options.seed}
    screen.report(job, report.as_dict(), _in_words(report, options.allow_untested))
    untested = report.verdict == NOT_TESTED and options.allow_untested
    return 0 if untested else _EXIT_CODES[report.verdict]


def _prompts(
    llm: LLM, texts: Sequence[PromptText], options: AuditOptions, screen: Screen
) -> list[Any]:
    """Token ids, or the audio that a speech model starts from."""
    config = llm.engine.target.config
    if config.encoder is None or not config.encoder.mel_bins:
        ids = [
            llm.tokenizer.encode(each)
            if isinstance(each, str)
            else llm.encode_chat(each.messages, tools=each.tools)
            for each in texts or PROMPTS
        ]
        return ids if texts else choose(llm.engine, ids, options.max_tokens, screen.progress)
    if texts:
        raise ConfigError(
            f"{llm.name} reads speech, not text; leave the prompts out, and the audit uses random "
            "audio."
        )
    return random_audio(config)


def _in_words(report: Report, allow_untested: bool) -> list[RenderableType]:
    """A table of the checks, and its meaning."""
    rows = [
        (
            *(check.name, f"[{_STYLES[check.status]}]{check.status}[/]", check.sample),
            str(check.comparisons),
            str(len(check.tests) or ""),
            "" if check.p_value is None else f"{check.p_value:.2g}",
            "" if check.detectable is None else f"{check.detectable:.3f}",
        )
        for check in report.checks
    ]
    labels, numbers = ("check", "verdict", "looked at"), ("compared", "tests", "least p", "finds w")
    lines = [f"FAIL  {check.name}: {each}" for check in report.checks for each in check.failures]
    untested = [check for check in report.checks if check.status == NOT_TESTED]
    for check in report.checks:
        lines += [f"note  {check.name}: {each}" for each in check.notes]
        if check in untested:
            lines.append(f"note  {check.name}: not tested, {check.reason}.")
    if report.tests:
        smallest = min(each.detectable for each in report.checks if each.detectable is not None)
        # Between two halves of the vocabulary a shift of s has w = 2 s.
        lines.append(
            f"{report.tests} tests, corrected for each other (Holm); a lossless method fails one "
            f"of {1 / LEVEL:.0f} audits by chance. w: the smallest deviation (Cohen's) found with "
            f"90 % probability; {smallest:.3f} is a shift of {50 * smallest:.1f} % between two "
            "halves of p; more --samples find smaller ones."
        )
    without = f" Not tested: {', '.join(each.name for each in untested)}." if untested else ""
    verdicts = {
        FAIL: "FAIL: see above.",
        PASS: f"PASS: nothing is lost.{without}",
        NOT_TESTED: f"NOT TESTED: nothing is lost in what was looked at.{without}"
        f"{'' if allow_untested else _REMEDY}",
    }
    return [plain_table(labels, numbers, rows), "", *lines, verdicts[report.verdict]]
