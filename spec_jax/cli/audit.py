"""`spec-jax audit`: is anything lost?"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from spec_jax.cli.decoding_options import AuditOptions
from spec_jax.cli.loading import job_summary, load
from spec_jax.cli.screen import Screen
from spec_jax.errors import ConfigError
from spec_jax.evaluation import Report, audit
from spec_jax.evaluation.audit import random_audio
from spec_jax.evaluation.prompts import PROMPTS, choose
from spec_jax.evaluation.verdict import FAIL, LEVEL, NOT_TESTED, PASS
from spec_jax.llm import LLM

_STYLES = {PASS: "green", FAIL: "bold red", NOT_TESTED: "yellow"}
_REMEDY = (
    "Give prompts whose continuations the method can draft, more --samples, or --allow-untested."
)
_EXIT_CODES = {PASS: 0, FAIL: 1, NOT_TESTED: 3}


def run(options: AuditOptions, texts: Sequence[str] | None) -> int:
    """Audits and prints the verdict.

    Returns the exit code: 1 if a check failed, 3 if one saw nothing and that is not allowed.

    Args:
      options: what was job_summary.
      texts: the prompts, or None for those that come with the audit.
    """
    with Screen(json_lines=options.json) as screen:
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
        audited = job_summary(options, llm) | {"seed": options.seed}
        if options.json:
            screen.record(audited | report.as_dict())
        else:
            stated = ((name, value) for name, value in audited.items() if value is not None)
            line = ", ".join(f"{name} {value}" for name, value in stated)
            screen.show(line, "", _table(report), "", *_verdict(report, options))
    untested = report.verdict == NOT_TESTED and options.allow_untested
    return 0 if untested else _EXIT_CODES[report.verdict]


def _prompts(
    llm: LLM, texts: Sequence[str] | None, options: AuditOptions, screen: Screen
) -> list[Any]:
    """Token ids, or the audio that a speech model starts from."""
    config = llm.engine.target.config
    if config.encoder is None or not config.encoder.mel_bins:
        ids = [llm.tokenizer.encode(text) for text in texts or PROMPTS]
        return ids if texts else choose(llm.engine, ids, options.max_tokens, screen.progress)
    if texts:
        raise ConfigError(
            f"{llm.name} reads speech, not text; leave the prompts out, and the audit makes noises."
        )
    return random_audio(config)


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("looked at")
    for name in ("compared", "tests", "least p", "finds w"):
        table.add_column(name, justify="right", no_wrap=True)
    for check in report.checks:
        table.add_row(
            check.name,
            f"[{_STYLES[check.status]}]{check.status}[/]",
            check.sample,
            str(check.comparisons),
            str(len(check.tests)) if check.tests else "",
            f"{check.p_value:.2g}" if check.p_value is not None else "",
            f"{check.detectable:.3f}" if check.detectable is not None else "",
        )
    return table


def _verdict(report: Report, options: AuditOptions) -> list[str]:
    """What the table means."""
    lines = [f"FAIL  {check.name}: {each}" for check in report.checks for each in check.failures]
    for check in report.checks:
        lines += [f"note  {check.name}: {each}" for each in check.notes]
        if check.status == NOT_TESTED:
            lines.append(f"note  {check.name}: not tested, {check.reason}.")
    if report.tests:
        lines.append(
            f"{report.tests} tests, corrected for each other (Holm); a lossless method fails one "
            f"of {1 / LEVEL:.0f} audits by chance. w: the smallest deviation (Cohen's) shares with "
            f"90 % probability;{_in_words(report)} more --samples find smaller ones."
        )
    left_out = [check.name for check in report.checks if check.status == NOT_TESTED]
    without = f" Not tested: {', '.join(left_out)}." if left_out else ""
    if report.verdict == FAIL:
        lines.append("FAIL: see above.")
    elif report.verdict == PASS:
        lines.append(f"PASS: nothing is lost.{without}")
    else:
        remedy = "" if options.allow_untested else f" {_REMEDY}"
        lines.append(f"NOT TESTED: nothing is lost in what was looked at.{without}{remedy}")
    return lines


def _in_words(report: Report) -> str:
    shares = [check.detectable for check in report.checks if check.detectable is not None]
    if not shares:
        return ""
    # Between two halves of the vocabulary a shift of s has w = 2 s.
    return f" {min(shares):.3f} is a shift of {50 * min(shares):.1f} % between two halves of p;"
