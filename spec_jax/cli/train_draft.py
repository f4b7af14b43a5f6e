"""`spec-jax train-draft`: trains a draft for a target."""

from spec_jax.checkpoints import Checkpoint
from spec_jax.cli.loading import make_llm
from spec_jax.cli.screen import Screen, minutes_left
from spec_jax.cli.tool_options import TrainDraftOptions
from spec_jax.training.examples import fingerprints, read_examples
from spec_jax.training.export import RECIPE, Provenance, check_recipe, export
from spec_jax.training.plot import plot_acceptance
from spec_jax.training.run import TrainingRun


def run(options: TrainDraftOptions, screen: Screen) -> int:
    """Trains, exports and tells how to use the draft; returns the exit code."""
    config = options.training
    contents = fingerprints(options.data)
    llm = make_llm(
        options.target,
        screen,
        layout=options.layout,
        dtype=config.dtype,
        max_num_seqs=config.sample_batch,
        seed=config.seed,
    )
    examples = read_examples(options.data, llm.tokenizer, config.sequence_length)
    files = ", ".join(path.name for path in options.data) or "prompts that it invented"
    provenance = Provenance(
        target=llm.name,
        license=options.license,
        command=options.command,
        data=f"answers of {llm.name} to {files}" if examples else files,
    )
    check_recipe(provenance)
    training = TrainingRun(
        llm,
        config,
        options.output,
        examples,
        identity={"target": llm.name, "data": contents},
        data_dir=options.data_dir,
        on_progress=screen.log,
    )
    for progress in training.run():
        rates = ", ".join(f"{kind} {rate:.3f}" for kind, rate in progress.acceptance.items())
        text = (
            f"loss {progress.loss:.3f}, accepted {rates}, "
            f"{progress.tokens_per_second:.0f} tokens/s{minutes_left(progress.seconds_left)}"
        )
        screen.count(progress.step, progress.steps, "steps", text, now=progress.evaluated)
    trained = training.best()
    target = Checkpoint(llm.engine.target, llm.tokenizer, llm.tokenizer.eos_token_ids, llm.name)
    export(options.output, trained, target, config, provenance)
    try:
        plot_acceptance(options.output / "acceptance.png", training.history)
    except ImportError:
        screen.note("no plot without matplotlib: pip install 'spec-jax[train]'")
    screen.write(
        f"best after {trained.step} updates: acceptance {trained.acceptance['greedy']:.3f} greedy, "
        f"{trained.acceptance['sampled']:.3f} at temperature 1\n"
        f"use it with --target {options.target} --draft {options.output / RECIPE}\n"
    )
    return 0
