"""Figures as SVG that takes its colours from the page, so that it is light or dark like it."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.benchmarking.summary import Spread
from spec_jax.errors import ConfigError

COLOURS = 8
"""Of series; the page defines `--series-0` and so on."""
_INK, _RULE = "#010203", "#040506"
_SERIES = [f"#a0b0{i:02x}" for i in range(COLOURS)]
_MARKERS = "os^Dv<>p"
_RATIO = re.compile(r'width="[\d.]+pt" height="[\d.]+pt" ')

Points = Sequence[tuple[float, Spread | float]]


def line_plot(
    series: Mapping[str, Points],
    *,
    x: str,
    y: str,
    reference: float | None = None,
) -> str:
    """A plot of lines whose y begins at 0, as an `<svg>` element.

    Args:
      series: label -> points, whose y may be a spread, of which the range is a bar.
      x: label of the axis.
      y: likewise.
      reference: draws a horizontal line there.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'spec-jax[bench]'.") from None
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        # Identical figures are identical text, and no two figures of a page share a name.
        "svg.hashsalt": repr((series, x, y)),
        "font.size": 9,
        "axes.edgecolor": _RULE,
        "grid.color": _RULE,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor"), _INK),
        **dict.fromkeys(("ytick.labelcolor", "legend.labelcolor"), _INK),
        **dict.fromkeys(("xtick.color", "ytick.color"), _RULE),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.7, 2.8), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        for number, (label, points) in enumerate(series.items()):
            _draw(axes, number, label, sorted(points, key=lambda point: point[0]))
        if reference is not None:
            axes.axhline(reference, color=_INK, linewidth=0.8, linestyle=":")
        axes.set(xlabel=x, ylabel=y)
        axes.set_ylim(bottom=0)
        if all(float(place).is_integer() for points in series.values() for place, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if any(series):
            figure.legend(loc="outside upper left", ncols=2, fontsize=8)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(file.getvalue(), f"{y} by {x}")


def _draw(axes, number: int, label: str, points: Points) -> None:
    places = [place for place, _ in points]
    spreads = [y if isinstance(y, Spread) else Spread(y, y, y) for _, y in points]
    middle = [each.median for each in spreads]
    bars = [
        [each.median - each.least for each in spreads],
        [each.most - each.median for each in spreads],
    ]
    axes.errorbar(
        places,
        middle,
        yerr=bars if any(map(any, bars)) else None,
        color=_SERIES[number % COLOURS],
        marker=_MARKERS[number % len(_MARKERS)],
        linestyle="-" if number < COLOURS else "--",
        markersize=4,
        linewidth=1.4,
        elinewidth=0.8,
        capsize=2,
        label=label,
    )


def _for_page(svg: str, title: str) -> str:
    """The element alone, with the page's colours, and nothing that names another place."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg)
    svg = _RATIO.sub("", svg, count=1)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    svg = svg.replace(_INK, "currentColor").replace(_RULE, "var(--rule)")
    for number, colour in enumerate(_SERIES):
        svg = svg.replace(colour, f"var(--series-{number})")
    return svg
