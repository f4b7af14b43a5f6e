"""`spec-jax compile`: compiles for a layout whose devices need not be there."""

import shutil
import tempfile
from pathlib import Path

import jax

from spec_jax.checkpoints.draft_directory import MANIFEST
from spec_jax.checkpoints.reference import locate
from spec_jax.checkpoints.shape import Shape, read_shape
from spec_jax.cli.devices import prepare_to_compile_for
from spec_jax.cli.screen import Screen
from spec_jax.cli.tool_options import CompileOptions
from spec_jax.errors import ConfigError
from spec_jax.planning import Workload, compile_ahead
from spec_jax.sharding import Layout


def run(options: CompileOptions, screen: Screen) -> int:
    """Compiles and keeps the programs; returns the exit code."""
    layout = Layout.read(options.layout)
    prepare_to_compile_for(layout)
    with tempfile.TemporaryDirectory() as made:
        jax.config.update("jax_compilation_cache_dir", made)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_raise_persistent_cache_errors", True)  # such as a full disk

        def progress(message: str) -> None:
            # The options are valid, and what is compiled stays, whatever comes.
            publish(Path(made), options.output)
            screen.progress(message)

        target = read_shape(options.target, on_progress=screen.progress)
        same = options.speculative.draft == options.target
        draft = target if same else _draft(options.speculative.draft, screen)
        workloads = [
            Workload(tokens, options.sampling, options.num_prompts, options.max_num_seqs)
            for tokens in options.prompt_tokens
        ]
        programs, seconds = compile_ahead(
            target,
            draft,
            layout,
            options.speculative,
            workloads,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            max_model_len=options.max_model_len,
            on_progress=progress,
        )
        publish(Path(made), options.output)
        screen.note(f"{programs} programs in {seconds:.0f} s, in {options.output}")
    return 0


def publish(made: Path, output: Path) -> None:
    """Moves programs to their folder, where each appears whole: JAX never replaces an entry."""
    output.mkdir(parents=True, exist_ok=True)
    for path in made.glob("*-cache"):
        partial = output / f".{path.name}.partial"
        try:
            shutil.copyfile(path, partial)
            partial.replace(output / path.name)
        finally:
            partial.unlink(missing_ok=True)
        path.unlink()


def _draft(reference: str | None, screen: Screen) -> Shape | None:
    """The shape of a draft, unless it was trained for one target."""
    if reference is None:
        return None
    name, path = locate(reference, screen.progress, config_only=True)
    if (path / MANIFEST).is_file():
        raise ConfigError(
            f"the draft {name} was trained to propose some tokens of one target, which its weights "
            "tell; compile ahead with a draft that is a complete model."
        )
    return read_shape(reference, on_progress=screen.progress)
