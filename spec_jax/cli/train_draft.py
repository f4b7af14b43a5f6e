"""`spec-jax train-draft`: trains a draft for a target."""

from spec_jax.checkpoints import Checkpoint
from spec_jax.cli.loading import join
from spec_jax.cli.screen import Screen
from spec_jax.cli.tool_options import TrainOptions
from spec_jax.llm import LLM
from spec_jax.training.examples import fingerprints, read_examples
from spec_jax.training.export import RECIPE, Provenance, check_recipe, export
from spec_jax.training.plot import plot_acceptance
from spec_jax.training.run import TrainingProgress, TrainingRun


def run(options: TrainOptions) -> int:
    """Trains, exports and tells how to use the draft; returns the exit code."""
    config = options.training
    with Screen() as screen:
        contents = fingerprints(options.data)
        layout = join(options.layout, screen)
        log = _Log(screen)
        llm = LLM(
            options.target,
            layout=layout,
            dtype=config.dtype,
            max_num_seqs=config.sample_batch,
            seed=config.seed,
            on_progress=screen.progress,
        )
        examples = read_examples(options.data, llm.tokenizer, config.sequence_length)
        files = ", ".join(path.name for path in options.data) or "prompts that it invented"
        provenance = Provenance(
            target=llm.name,
            license=options.license,
            command=options.command,
            data=f"answers of {llm.name} to {files}" if examples else f"{files}",
        )
        check_recipe(provenance)
        training = TrainingRun(
            llm,
            config,
            options.output,
            examples,
            identity={"target": llm.name, "data": contents},
            data_dir=options.data_dir,
            on_progress=log.line,
        )
        for progress in training.run():
            log.progress(progress)
        trained = training.best()
        target = Checkpoint(llm.engine.target, llm.tokenizer, llm.tokenizer.eos_token_ids, llm.name)
        export(options.output, trained, target, config, provenance)
        try:
            plot_acceptance(options.output / "acceptance.png", training.history)
        except ImportError:
            screen.note("no plot without matplotlib: pip install 'spec-jax[train]'")
        kept = trained.acceptance
        screen.write(
            f"best after {trained.step} updates: acceptance {kept['greedy']:.3f} greedy, "
            f"{kept['sampled']:.3f} at temperature 1\n"
            f"use it with --target {options.target} --draft {options.output / RECIPE}\n"
        )
    return 0


class _Log:
    """Progress as a bar on a terminal, and as lines of text elsewhere."""

    def __init__(self, screen: Screen):
        self._screen = screen

    def line(self, text: str) -> None:
        if self._screen.shows_progress:
            self._screen.progress(text)
        self._screen.log(text, now=False)

    def progress(self, progress: TrainingProgress) -> None:
        accepted = ", ".join(f"{kind} {rate:.3f}" for kind, rate in progress.acceptance.items())
        minutes, seconds = divmod(round(progress.seconds_left), 60)
        text = (
            f"loss {progress.loss:.3f}, accepted {accepted}, "
            f"{progress.tokens_per_second:.0f} tokens/s, {minutes}:{seconds:02d} left"
        )
        self._screen.bar(progress.step, progress.steps, text)
        self._screen.log(
            f"step {progress.step} of {progress.steps}: {text}", now=progress.evaluated
        )
