"""A plot of acceptance over time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from spec_jax.files import new_file
from spec_jax.training.data import HELD_OUT


def plot_acceptance(path: Path, history: Sequence[dict[str, Any]]) -> None:
    """Writes a PNG of the acceptance rates by number of updates.

    Args:
      path: the file.
      history: the measurements of the evaluations.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for kind, temperature in HELD_OUT.items():
        axes.plot(
            [entry["step"] for entry in history],
            [entry[kind] for entry in history],
            label="greedy" if not temperature else f"temperature {temperature:g}",
        )
    axes.set(xlabel="updates", ylabel="drafted tokens kept", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    with new_file(path) as partial:
        figure.savefig(partial, format="png", dpi=150)
