"""`spec-jax audit`: is anything lost?"""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from spec_jax.cli.audit_arguments import AuditOptions
from spec_jax.cli.loading import load
from spec_jax.cli.screen import Screen
from spec_jax.errors import ConfigError
from spec_jax.evaluation import Report, audit
from spec_jax.evaluation.audit import PROMPTS, noises
from spec_jax.evaluation.report import FAIL, LEVEL, NOT_RUN, PASS
from spec_jax.llm import LLM

_STYLES = {PASS: "green", FAIL: "bold red", NOT_RUN: "dim"}


def run(options: AuditOptions, texts: Sequence[str] | None) -> int:
    """Audits and prints the verdict; returns the exit code, 1 if a check failed.

    Args:
      options: what was asked.
      texts: the prompts, or None for those that come with the audit.
    """
    with Screen(json_lines=options.json) as screen:
        llm = load(options, screen)
        report = audit(
            llm.engine,
            _prompts(llm, texts),
            settings=options.settings,
            samples=options.samples,
            max_tokens=options.max_tokens,
            seed=options.seed,
            on_progress=screen.progress,
        )
        if options.json:
            screen.record(_asked(options, llm) | report.as_dict())
        else:
            asked = ", ".join(f"{name} {value}" for name, value in _asked(options, llm).items())
            screen.show(asked, "", _table(report), "", *_verdict(report))
    return 0 if report.passed else 1


def _prompts(llm: LLM, texts: Sequence[str] | None) -> list[Any]:
    """Token ids, or what a model of speech starts from."""
    config = llm.engine.target.config
    if config.encoder is None or not config.encoder.mel_bins:
        return [llm.tokenizer.encode(text) for text in texts or PROMPTS]
    if texts:
        raise ConfigError(
            f"{llm.name} reads speech, not text; leave the prompts out, and the audit makes noises."
        )
    return noises(config)


def _asked(options: AuditOptions, llm: LLM) -> dict[str, str | int | None]:
    """What was audited."""
    how = options.speculative
    return {
        "target": options.target,
        "draft": how.draft,
        "method": how.method,
        "verification": how.verification,
        "num_speculative_tokens": how.most_speculative_tokens,
        "dtype": llm.dtype,
        "quantization": llm.quantization,
        "seed": options.seed,
    }


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


def _verdict(report: Report) -> list[str]:
    """What the table means."""
    lines = [f"FAIL  {check.name}: {each}" for check in report.checks for each in check.failures]
    for check in report.checks:
        lines += [f"note  {check.name}: {each}" for each in check.notes]
        if check.status == NOT_RUN:
            lines.append(f"note  {check.name}: not run, {check.reason}.")
    if report.tests:
        lines.append(
            f"{report.tests} tests, corrected for each other (Holm); a lossless method fails one "
            f"of {1 / LEVEL:.0f} audits by chance. w: the smallest deviation (Cohen's) found with "
            f"90 % probability;{_in_words(report)} more --samples find smaller ones."
        )
    lines.append("PASS: nothing is lost." if report.passed else "FAIL: see above.")
    return lines


def _in_words(report: Report) -> str:
    found = [check.detectable for check in report.checks if check.detectable is not None]
    if not found:
        return ""
    # Between two halves of the vocabulary a shift of s has w = 2 s.
    return f" {min(found):.3f} is a shift of {50 * min(found):.1f} % between two halves of p;"
