"""`spec-jax convert`: writes a model in another format."""

from spec_jax import checkpoints
from spec_jax.cli.convert_arguments import ConvertOptions
from spec_jax.cli.loading import join
from spec_jax.cli.screen import Screen


def run(options: ConvertOptions) -> int:
    """Converts a model; returns the exit code."""
    with Screen() as screen:
        layout = join(options.layout, screen)
        checkpoints.convert(
            options.source,
            options.output,
            place=layout and (lambda config: layout.place("target", config.axis_sizes)),
            on_progress=screen.progress,
            **options.convert,
        )
        screen.note(f"wrote {options.output}")
    return 0
