"""The flags of `spec-jax report`. Imports no JAX."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from spec_jax.cli.parser import Parser, add_debug
from spec_jax.errors import ConfigError

_EPILOG = """\
The report is one HTML file that needs no network. With several files of results, the systems that
they have in common are compared with those of the first file, with bootstrap intervals.
"""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What `report` was asked to do.

    Attributes:
      results: files of results.
      output: the HTML file.
      png: a directory for the figures as PNG files, or None.
    """

    results: tuple[Path, ...]
    output: Path
    png: Path | None = None


def parse_report(arguments: Sequence[str]) -> ReportOptions:
    """Parses and checks the arguments of `report`.

    Raises:
      ConfigError: an argument is missing or unknown.
    """
    parser = Parser("report", "RESULTS... --out FILE", _EPILOG)
    parser.add_argument(
        "results",
        nargs="*",
        type=Path,
        metavar="RESULTS",
        help="a file that `spec-jax bench` wrote",
    )
    parser.add_argument("--out", dest="output", type=Path, metavar="FILE", help="the HTML file")
    parser.add_argument(
        "--png", type=Path, metavar="DIR", help="write the figures as PNG files, too"
    )
    add_debug(parser)
    given = parser.parse(arguments)
    if not given.get("results"):
        raise ConfigError("no results given; name one or several files that spec-jax bench wrote.")
    if not given.get("output"):
        raise ConfigError("no output given; name the HTML file with --out report.html.")
    if given["output"] in given["results"]:
        raise ConfigError(f"--out is {given['output']}, a file of results; name another file.")
    if (png := given.get("png")) and png.exists() and not png.is_dir():
        raise ConfigError(f"--png is {png}, which is no directory; name another.")
    return ReportOptions(tuple(given["results"]), given["output"], png)
