"""`spec-jax convert`: writes a model in another format."""

from spec_jax import checkpoints
from spec_jax.cli.loading import connect
from spec_jax.cli.screen import Screen
from spec_jax.cli.tool_options import ConvertOptions
from spec_jax.models.config import TransformerConfig
from spec_jax.sharding import Placement


def run(options: ConvertOptions, screen: Screen) -> int:
    """Converts a model; returns the exit code."""
    layout = connect(options.layout, screen)

    def place(config: TransformerConfig) -> Placement:
        if layout is None:
            return Placement.single_device()
        return layout.place("target", config.axis_sizes)

    checkpoints.convert(
        options.source,
        options.output,
        place=place,
        on_progress=screen.progress,
        format=options.format,
        dtype=options.dtype,
        quantization=options.quantization,
    )
    screen.note(f"wrote {options.output}")
    return 0
