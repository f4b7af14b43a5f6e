"""`spec-jax convert`: writes a model as a directory that can be read in parts with any layout."""

from spec_jax import checkpoints, distributed
from spec_jax.cli.arguments import ConvertOptions
from spec_jax.cli.loading import join
from spec_jax.cli.screen import Screen


def run(options: ConvertOptions) -> int:
    """Loads a model and saves it; returns the exit code."""
    with Screen() as screen:
        arguments = dict(options.load)
        layout = join(arguments.pop("layout", None), screen)
        distributed.agree({"its model": options.target, "its output": options.output})
        checkpoint = checkpoints.load(
            options.target,
            place=layout and (lambda config: layout.place("target", config.axis_sizes)),
            on_progress=screen.progress,
            **arguments,
        )
        screen.progress(f"writing {options.output}")
        checkpoints.save(checkpoint, options.output)
        screen.note(f"wrote {checkpoint.name} to {options.output}")
    return 0
