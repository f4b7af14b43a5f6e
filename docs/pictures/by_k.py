"""Draws time, speed-up and acceptance by K: `python docs/pictures/by_k.py` writes by_k.svg.

After figure 1 of arXiv 2302.01318, from what `spec-jax bench` measured of the demo pair.
"""

from pathlib import Path

from spec_jax.benchmarking.figures import LIGHT, svg
from spec_jax.benchmarking.results import read
from spec_jax.benchmarking.sections import sections_of
from spec_jax.benchmarking.summary import summarize

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "demo_pair_humaneval.jsonl"
FAMILY = "By K: draft_model, token verification"
PANEL, HEIGHT = 430, 326
"""Of one plot of the four."""
DARK = ("#6cb0ff", "#ff9a5c", "#5fd38a", "#d08cff", "#e3b341", "#56d4dd", "#ff8ac4", "#9aa4af")


def colours(ink: str, rule: str, series: tuple[str, ...]) -> str:
    """What the plots take from the page."""
    lines = "".join(f"--series-{number}: {each};" for number, each in enumerate(series))
    return f"svg {{ color: {ink}; --rule: {rule}; {lines} }}"


def draw() -> str:
    """The picture as SVG, light or dark as the reader's page is."""
    sections = sections_of(summarize(read(RESULTS)))
    (section,) = (each for each in sections if each.title == FAMILY)
    parts = []
    for number, figure in enumerate(section.figures):
        place = f'x="{number % 2 * PANEL}" y="{number // 2 * HEIGHT}"'
        size = f'width="{PANEL}" height="{HEIGHT}"'
        parts.append(svg(figure.plot).replace("<svg ", f"<svg {place} {size} ", 1))
    light = colours(LIGHT.ink, LIGHT.rule, LIGHT.series)
    dark = colours("#e6e9ec", "#3d444d", DARK)
    width, height = 2 * PANEL, 2 * HEIGHT
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" width="{width}" role="img" '
        'aria-label="Time, speed-up and acceptance by K">'
        f"<style>{light} @media (prefers-color-scheme: dark) {{ {dark} }}</style>"
        f"{''.join(parts)}</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(), encoding="utf-8")
