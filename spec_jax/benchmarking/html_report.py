"""A report of files of results: one HTML file that needs no network."""

import importlib.resources
import re
from collections.abc import Mapping

import jinja2

from spec_jax.benchmarking import figures
from spec_jax.benchmarking.results import Header, Results
from spec_jax.benchmarking.sections import comparison, sections_of
from spec_jax.benchmarking.summary import summarize


def render(files: Mapping[str, Results]) -> str:
    """The report as HTML; further files are compared with the first.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    folder = importlib.resources.files("spec_jax.benchmarking")
    template = folder.joinpath("report.html").read_text("utf-8")
    targets = dict.fromkeys(results.header.target for results in files.values())
    (first, before), *others = files.items()
    return environment.from_string(template).render(
        title=f"Speculative decoding of {', '.join(targets)}",
        comparisons=[comparison((first, name), before, after) for name, after in others],
        files=[
            {"title": name, "facts": _facts(each), "sections": sections_of(summarize(each))}
            for name, each in files.items()
        ],
        light=figures.LIGHT,
        svg=figures.svg,
    )


def draw(results: Results) -> dict[str, bytes]:
    """The report's figures: names of PNG files -> their bytes.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    images = {}
    for section in sections_of(summarize(results)):
        stem = re.sub(r"[^a-z0-9]+", "_", section.title.lower()).strip("_")
        for number, (plot, caption) in enumerate(section.figures, start=1):
            images[f"{stem}_{number}.png"] = figures.png(plot, f"{section.title}: {caption}")
    return images


def _facts(results: Results) -> list[tuple[str, str]]:
    header: Header = results.header
    sampling = "; ".join(setting.name for setting in header.settings)
    devices = ", ".join(f"{count} x {kind}" for kind, count in header.devices.items())
    facts = {
        "command": header.command,
        "measured": f"{header.created}, {len(results.runs)} runs",
        "target": f"{header.target}, {header.dtype}, quantization {header.quantization}",
        "draft": header.draft,
        "prompts": ", ".join(f"{each.name} ({each.count})" for each in header.prompts),
        "sampling": f"{sampling}; at most {header.max_tokens} tokens, seed {header.seed}",
        "devices": f"{devices}; {header.layout}; {header.machine}",
        "versions": ", ".join(f"{name} {version}" for name, version in header.versions.items()),
        "options": ", ".join(f"{name} {value}" for name, value in header.options.items()),
    }
    return [(name, value) for name, value in facts.items() if value]
