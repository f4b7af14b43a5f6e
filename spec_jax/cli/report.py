"""`spec-jax report`: draws files of results."""

from spec_jax.benchmarking import results
from spec_jax.benchmarking.html_report import draw, render
from spec_jax.cli.screen import Screen
from spec_jax.cli.tool_options import ReportOptions
from spec_jax.files import replace_text


def run(options: ReportOptions, screen: Screen) -> int:
    """Writes the report; returns the exit code."""
    stems = [path.stem for path in options.results]
    screen.progress("drawing")
    files = {
        path.stem if stems.count(path.stem) == 1 else str(path): results.read(path)
        for path in options.results
    }
    replace_text(options.output, render(files))
    screen.note(f"the report is {options.output}")
    if options.png is not None:
        count = 0
        for name, each in files.items():
            folder = options.png if len(files) == 1 else options.png / name.replace("/", "_")
            folder.mkdir(parents=True, exist_ok=True)
            for file, image in draw(each).items():
                (folder / file).write_bytes(image)
                count += 1
        screen.note(f"{count} figures in {options.png}")
    return 0
