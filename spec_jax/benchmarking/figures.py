"""Line plots: SVG that takes its colours from a page, and PNG on a white background."""

import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spec_jax.benchmarking.summary import Spread
from spec_jax.errors import ConfigError


class Palette(NamedTuple):
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
"""Colours of PNG files, and of the page in light mode."""
# Placeholders of the page's own colours, which it defines as `--series-0` and so on.
_PAGE = Palette("#010203", "#040506", tuple(f"#a0b0{i:02x}" for i in range(8)))
_DOTS_PER_INCH = 200
_MARKERS = "os^Dv<>p"

Points = Sequence[tuple[float, Spread | float]]


class Plot(NamedTuple):
    """A line plot of points by label, whose y axis begins at 0; `x` and `y` are labels of the axes.

    The bar of a point is the range of its spread. A horizontal line is drawn at `reference`.
    """

    series: Mapping[str, Points]
    x: str
    y: str
    reference: float | None = None


def svg(plot: Plot) -> str:
    """An `<svg>` element of any size, for a page that defines the colours.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    text = _saved(plot, _PAGE, format="svg", transparent=True, metadata={"Date": None}).decode()
    text = text[text.index("<svg") :]
    # Nothing may name another place, and the page decides about the size.
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", text, count=1)
    text = text.replace("<svg ", f'<svg role="img" aria-label="{plot.y} by {plot.x}" ', 1)
    names = {_PAGE.ink: "currentColor", _PAGE.rule: "var(--rule)"}
    names |= {colour: f"var(--series-{i})" for i, colour in enumerate(_PAGE.series)}
    return re.sub("|".join(names), lambda match: names[match[0]], text)


def png(plot: Plot, title: str) -> bytes:
    """A PNG file with a title, 740 pixels wide.

    Raises:
      ConfigError: matplotlib is not installed.
    """
    return _saved(plot, LIGHT, title, format="png", dpi=_DOTS_PER_INCH)


def _saved(plot: Plot, palette: Palette, title: str = "", **options: Any) -> bytes:
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError("figures need matplotlib: pip install 'spec-jax[bench]'.") from None
    inked = (
        *("text.color", "axes.labelcolor", "legend.labelcolor"),
        *("xtick.labelcolor", "ytick.labelcolor"),
    )
    ruled = ("axes.edgecolor", "grid.color", "xtick.color", "ytick.color")
    style: dict[Any, Any] = {
        "svg.fonttype": "none",
        # Equal figures are equal text, and no two figures of a page share a name.
        "svg.hashsalt": repr((plot.series, plot.x, plot.y)),
        "font.size": 9,
        "legend.frameon": False,
        **dict.fromkeys(inked, palette.ink),
        **dict.fromkeys(ruled, palette.rule),
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
            legend = figure.legend(loc="outside upper left", ncols=2, fontsize=8)
            figure.draw_without_rendering()
            if legend.get_window_extent().width > figure.bbox.width:
                legend.remove()
                figure.legend(loc="outside upper left", ncols=1, fontsize=8)
        file = io.BytesIO()
        figure.savefig(file, **options)
    return file.getvalue()


def _draw(axes: Any, palette: Palette, number: int, label: str, points: Points) -> None:
    spreads = [y if isinstance(y, Spread) else Spread(y, y, y) for _, y in points]
    bars = [[y.median - y.low for y in spreads], [y.high - y.median for y in spreads]]
    axes.errorbar(
        [place for place, _ in points],
        [y.median for y in spreads],
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
