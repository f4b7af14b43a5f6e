"""Plots of lines, as SVG that takes its colours from a page and as PNG on a white ground."""

import dataclasses
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.benchmarking.summary import Spread
from spec_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Palette:
    """Colours of text, of rules and of the series in turn."""

    ink: str
    rule: str
    series: tuple[str, ...]


LIGHT = Palette(
    ink="#1b1f24",
    rule="#c4cad1",
    series=(
        *("#0b62c4", "#c2410c", "#15803d", "#8b2fb8"),
        *("#a16207", "#0e7490", "#be185d", "#4b5563"),
    ),
)
"""Of PNG files, and of the page where it is light."""
# Stand for the page's own, which defines `--series-0` and so on.
_OF_THE_PAGE = Palette("#010203", "#040506", tuple(f"#a0b0{i:02x}" for i in range(8)))
_DOTS_PER_INCH = 200
_MARKERS = "os^Dv<>p"
_RATIO = re.compile(r'width="[\d.]+pt" height="[\d.]+pt" ')

Points = Sequence[tuple[float, Spread | float]]


@dataclasses.dataclass(frozen=True)
class Plot:
    """A plot of lines whose y begins at 0.

    Attributes:
      series: label -> points, whose y may be a spread, of which the range is a bar.
      x: label of the axis.
      y: likewise.
      reference: where a horizontal line is drawn, or None.
    """

    series: Mapping[str, Points]
    x: str
    y: str
    reference: float | None = None


def svg(plot: Plot) -> str:
    """An `<svg>` element without a size of its own, for a page that defines the colours.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    text = _saved(plot, _OF_THE_PAGE, format="svg", transparent=True, metadata={"Date": None})
    return _for_page(text.decode(), f"{plot.y} by {plot.x}")


def png(plot: Plot, title: str) -> bytes:
    """A PNG file with a title, 740 pixels wide.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    return _saved(plot, LIGHT, title, format="png", dpi=_DOTS_PER_INCH)


def _saved(plot: Plot, palette: Palette, title: str = "", **how: Any) -> bytes:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'spec-jax[bench]'.") from None
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        # Identical figures are identical text, and no two figures of a page share a name.
        "svg.hashsalt": repr((plot.series, plot.x, plot.y)),
        "font.size": 9,
        "axes.edgecolor": palette.rule,
        "grid.color": palette.rule,
        "legend.frameon": False,
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor"), palette.ink),
        **dict.fromkeys(("ytick.labelcolor", "legend.labelcolor"), palette.ink),
        **dict.fromkeys(("xtick.color", "ytick.color"), palette.rule),
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(3.7, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for number, (label, points) in enumerate(plot.series.items()):
            _draw(axes, palette, number, label, sorted(points, key=lambda point: point[0]))
        if plot.reference is not None:
            axes.axhline(plot.reference, color=palette.ink, linewidth=0.8, linestyle=":")
        axes.set(xlabel=plot.x, ylabel=plot.y)
        axes.set_title("\n".join(textwrap.wrap(title, 60)), fontsize=8)
        axes.set_ylim(bottom=0)
        if all(float(place).is_integer() for points in plot.series.values() for place, _ in points):
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(linewidth=0.4, alpha=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        if any(plot.series):
            _add_legend(figure)
        file = io.BytesIO()
        figure.savefig(file, **how)
    return file.getvalue()


def _add_legend(figure: Any) -> None:
    """A legend of two columns, or of one where two are wider than the figure."""
    legend = figure.legend(loc="outside upper left", ncols=2, fontsize=8)
    figure.draw_without_rendering()
    if legend.get_window_extent().width > figure.bbox.width:
        legend.remove()
        figure.legend(loc="outside upper left", ncols=1, fontsize=8)


def _draw(axes, palette: Palette, number: int, label: str, points: Points) -> None:
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
        color=palette.series[number % len(palette.series)],
        marker=_MARKERS[number % len(_MARKERS)],
        linestyle="-" if number < len(palette.series) else "--",
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
    svg = svg.replace(_OF_THE_PAGE.ink, "currentColor")
    svg = svg.replace(_OF_THE_PAGE.rule, "var(--rule)")
    for number, colour in enumerate(_OF_THE_PAGE.series):
        svg = svg.replace(colour, f"var(--series-{number})")
    return svg
