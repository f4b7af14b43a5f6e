"""A report of files of results: one HTML file that needs no network."""

import importlib.resources
import re
from collections.abc import Mapping

import jinja2

from spec_jax.benchmarking import figures
from spec_jax.benchmarking.comparison import LEVEL, compare
from spec_jax.benchmarking.results import Header, Results
from spec_jax.benchmarking.sections import Section, Table, sections_of
from spec_jax.benchmarking.summary import summarize


def render(files: Mapping[str, Results]) -> str:
    """The report as HTML.

    Args:
      files: name -> results. With several, the systems that each has in common with the first one
        are compared.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    folder = importlib.resources.files("spec_jax.benchmarking")
    template = folder.joinpath("report.html").read_text("utf-8")
    targets = dict.fromkeys(results.header.target for results in files.values())
    return environment.from_string(template).render(
        title=f"Speculative decoding of {', '.join(targets)}",
        comparisons=_comparisons(files),
        files=[
            {"title": name, "facts": _facts(results), "sections": _sections(results)}
            for name, results in files.items()
        ],
        light=figures.LIGHT,
        svg=figures.svg,
    )


def draw(results: Results) -> dict[str, bytes]:
    """The report's figures as PNG files.

    Returns:
      Name of the file -> its bytes.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    found = {}
    for section in _sections(results):
        for number, figure in enumerate(section.figures, start=1):
            words = re.sub(r"[^a-z0-9]+", "_", section.title.lower()).strip("_")
            name = f"{words}_{number}.png"
            found[name] = figures.png(figure.plot, f"{section.title}: {figure.caption}")
    return found


def _sections(results: Results) -> list[Section]:
    found = sections_of(summarize(results))
    return [section for section in found if section.figures or section.tables]


def _facts(results: Results) -> list[tuple[str, str]]:
    head: Header = results.header
    sampling = "; ".join(setting.name for setting in head.settings)
    facts = {
        "command": head.command,
        "measured": f"{head.created}, {len(results.runs)} runs",
        "target": f"{head.target}, {head.dtype}, quantization {head.quantization}",
        "draft": head.draft,
        "prompts": ", ".join(f"{each.name} ({each.count})" for each in head.prompts),
        "sampling": f"{sampling}; at most {head.max_tokens} tokens, seed {head.seed}",
        "devices": ", ".join(f"{count} x {kind}" for kind, count in head.devices.items())
        + f"; {head.layout}; {head.machine}",
        "versions": ", ".join(f"{name} {version}" for name, version in head.versions.items()),
        "options": ", ".join(f"{name} {value}" for name, value in head.options.items()),
    }
    return [(name, value) for name, value in facts.items() if value]


def _comparisons(files: Mapping[str, Results]) -> list[Section]:
    (first, before), *others = files.items()
    sections = []
    for name, after in others:
        rows = [
            [
                each.cell.name,
                each.system,
                f"{each.before:.1f}",
                f"{each.after:.1f}",
                f"{each.ratio:.3f} ({each.low:.3f} - {each.high:.3f})",
                each.verdict,
            ]
            for each in compare(before, after)
        ]
        head = ("domain", "system", "tokens/s before", "after", "after / before", "verdict")
        text = (
            f"Mean tokens a second of requests; {LEVEL:.0%} intervals by bootstrap over prompts "
            "and repeats. The files were not measured in turns: what slowed the machine during all "
            "of one of them is not in the interval."
        )
        caption = f"after: {name}; before: {first}"
        if not rows:
            text = f"{name} and {first} have no system, prompts and way of sampling in common."
        tables = [Table(caption, head, rows)] if rows else []
        sections.append(Section("Is it faster?", text, tables=tables))
    return sections
