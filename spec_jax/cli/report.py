"""`spec-jax report`: draws files of results."""

from spec_jax.benchmarking import results
from spec_jax.benchmarking.report import render
from spec_jax.cli.report_arguments import ReportOptions
from spec_jax.cli.screen import Screen


def run(options: ReportOptions) -> int:
    """Writes the report; returns the exit code."""
    with Screen() as screen:
        stems = [path.stem for path in options.results]
        names = [
            path.stem if stems.count(path.stem) == 1 else str(path) for path in options.results
        ]
        screen.progress("drawing")
        files = {
            name: results.read(path) for name, path in zip(names, options.results, strict=True)
        }
        part = options.output.with_suffix(".part")
        part.write_text(render(files), encoding="utf-8")
        part.replace(options.output)
        screen.note(f"the report is {options.output}")
    return 0
