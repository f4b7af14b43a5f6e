"""The options of the commands that decode with an `LLM`. Imports no JAX.

Each class becomes the flags of a command (`flags.py`); its docstring ends the command's help.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from spec_jax.benchmarking import prompts
from spec_jax.cli.flags import Group
from spec_jax.cli.options import (
    DISTRIBUTION,
    PYTHON_ONLY,
    Batches,
    ChatTemplateOptions,
    CompletedPrompts,
    PromptOptions,
    SpeculationOptions,
)
from spec_jax.cli.results_file import refuse_existing
from spec_jax.config import (
    AtLeast0,
    AtLeast1,
    Flag,
    Many,
    NoDraftConfig,
    SamplingParams,
    SpeculativeConfig,
    config_class,
)
from spec_jax.errors import ConfigError

WITHOUT_LOGPROBS = (*PYTHON_ONLY, "logprobs")
AUDIT_LOOKAHEAD = 4
"""K of an audit: such drafts are accepted in full and rejected often enough to be tested."""
AUDIT_DEFAULTS = {
    "num_speculative_tokens": str(AUDIT_LOOKAHEAD),
    "draft_length_policy": "constant",
}
AUDIT_TEMPERATURE = 1.0


@config_class
class GenerateOptions(CompletedPrompts, Batches, SpeculationOptions):
    """Complete prompts.

    Prompts are decoded together, as many at once as --max-num-seqs allows, and printed in order.
    Without a prompt, standard input is the prompt. One line break at the end of a file is dropped.

    --json prints, for each prompt, the keys index, prompt (or messages), text, token_ids,
    finish_reason, usage and metrics, and error if the request failed; with --logprobs also logprobs
    (for each token by id) and cumulative_logprob; with --compare also plain (the metrics of plain
    decoding) and identical (whether it gave the same tokens; null if sampled).

    --out writes the same keys to a file, each result as soon as it is there. If the job is stopped
    or killed, the same command with --resume decodes what is missing.
    """

    GROUP: ClassVar[str] = "output"

    sampling: Annotated[SamplingParams, Group(without=PYTHON_ONLY)] = SamplingParams()
    compare: bool = False
    """Also run plain decoding and show both speeds."""
    json: bool = False
    """Print one JSON object per prompt, one a line."""
    output: Annotated[Path | None, Flag(name="out")] = None
    """Write results to this file instead."""
    resume: bool = False
    """Continue the file if it is there."""

    def __post_init__(self) -> None:
        if self.sampling.logprobs is not None and not self.json and self.output is None:
            raise ConfigError(
                f"logprobs is {self.sampling.logprobs}, but only --json and --out show them."
            )
        if self.output is None and self.resume:
            raise ConfigError("--resume continues a file; name it with --out FILE.jsonl.")
        if self.output is not None and (self.json or self.compare):
            raise ConfigError(
                f"--{'json' if self.json else 'compare'} prints results, but --out writes them to "
                "a file; give one of the two."
            )


@config_class
class ChatOptions(ChatTemplateOptions, Batches, SpeculationOptions):
    """Hold a conversation with a model that has a chat template."""

    GROUP: ClassVar[str] = "conversation"

    sampling: Annotated[SamplingParams, Group(without=WITHOUT_LOGPROBS)] = SamplingParams()
    system: str | None = None
    """Tell the model how to answer."""


@config_class
class TranscribeOptions(Batches, SpeculationOptions):
    """Write down the words of audio files.

    An audio file is read in windows of 30 seconds; several files are decoded together. Formats
    are the ones of libsndfile, such as WAV, FLAC, OGG and MP3.

    --json prints, for each file, the keys text, language, seconds, segments and windows, each of
    which is a completion as `spec-jax generate --json` prints it.
    """

    sampling: Annotated[SamplingParams, Group(only=DISTRIBUTION)] = SamplingParams()
    sounds: Annotated[
        Many[str], Flag(positional=True, metavar="AUDIO", remedy="name one or several audio files")
    ]
    """An audio file."""
    language: Annotated[str | None, Flag(metavar="CODE")] = None
    """The language that is spoken, such as de (default: the model detects it)."""
    task: Annotated[str, Flag(metavar="transcribe|translate")] = "transcribe"
    """What to write; translate writes English."""
    timestamps: bool = False
    """Say when each segment was spoken."""
    json: bool = False
    """Print one JSON object for each audio file."""


@config_class
class AuditOptions(PromptOptions, SpeculationOptions):
    """Test that nothing is lost, on your models.

    Four things are checked: greedy tokens equal plain decoding's, stop tokens inside
    accepted blocks and penalties included; sampled tokens follow the target's distribution,
    computed without speculation and without the library's sampling code; drafted tokens follow the
    probabilities that their drafter reports; and a row's tokens do not depend on its batch, nor on
    when it is inserted. A check that sees nothing, such as one of rejections if nothing is
    rejected, is "NOT TESTED".

    The exit code is 1 if a check fails, and 3 if one that should see something does not. A lossless
    method fails one audit in a thousand by chance. Without prompts the audit takes three that show
    most of the method.
    """

    speculative: Annotated[
        SpeculativeConfig,
        Group("speculative decoding", defaults=AUDIT_DEFAULTS),
    ] = NoDraftConfig()
    sampling: Annotated[
        SamplingParams,
        Group(only=DISTRIBUTION, defaults={"temperature": str(AUDIT_TEMPERATURE)}),
    ] = SamplingParams()
    """Without these there are two settings: temperature 1, and temperature 0.7 with top-p 0.9 and a
    repetition penalty of 1.2. With any of them there is one, with these defaults; at temperature 0
    only the greedy checks run."""
    has_sampling: Annotated[bool, Flag(hidden=True)] = False
    samples: AtLeast1 | None = None
    """Rows sampled for each setting; more find smaller deviations (default: 4096, or 512 for a
    model of ten million parameters or more)."""
    max_tokens: AtLeast1 = 32
    """Tokens decoded greedily from each prompt."""
    seed: AtLeast0 = 0
    """Another seed samples other rows."""
    allow_untested: bool = False
    """Exit with 0 even if a check saw nothing (default: with 3)."""
    json: bool = False
    """Print one JSON object."""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Fills in the audit's defaults: it tests drafting also where drafting does not pay."""
        if "speculative" in values:
            values["speculative"].setdefault("draft_length_policy", "constant")
        if "sampling" in values:
            values["has_sampling"] = True
            values["sampling"].setdefault("temperature", AUDIT_TEMPERATURE)

    def __post_init__(self) -> None:
        config = self.speculative
        if config.num_speculative_tokens is None and config.method != "none":
            config = dataclasses.replace(config, num_speculative_tokens=AUDIT_LOOKAHEAD)
            object.__setattr__(self, "speculative", config)

    @property
    def settings(self) -> dict[str, SamplingParams] | None:
        """Name -> how to sample; None for the default settings."""
        if not self.has_sampling:
            return None
        return {"as given": self.sampling} if self.sampling.temperature else {}


@config_class
class ProfileOptions(CompletedPrompts, SpeculationOptions):
    """Show where the time of a round goes.

    The prompts are decoded three times as one batch: to compile, to measure, and to record. The
    table divides the recorded wall time among prefill (the prompts, and all that the host does for
    them), the parts of a round (propose, score, verify, commit), other ops, and the host: time
    during which no op ran. Every moment counts once: for the op that runs, in equal parts for ops
    that run at once, for a loop only while nothing inside it runs. An op fused from several parts
    counts as one.

    DIR gets the trace itself. Without a prompt, standard input is the prompt.
    """

    sampling: Annotated[
        SamplingParams,
        Group(without=WITHOUT_LOGPROBS, defaults={"max_tokens": "as many as the rounds can give"}),
    ] = SamplingParams()
    output: Annotated[
        Path,
        Flag(name="out", metavar="DIR", remedy="name the directory of the trace with --out DIR"),
    ]
    """Where the trace is written: a directory that is empty or not there yet."""
    rounds: AtLeast1 = 32
    """Most rounds that are recorded."""
    json: bool = False
    """Print one JSON object."""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Decodes as many tokens as the rounds can give."""
        rounds = values.get("rounds", cls.rounds)
        lookahead = SpeculativeConfig(**values.get("speculative", {})).lookahead
        sampling = values.setdefault("sampling", {})
        sampling.setdefault("max_tokens", max(1, rounds * (lookahead + 1)))

    def __post_init__(self) -> None:
        directory = self.output
        exists, inside = directory.is_dir(), directory.absolute().parent.is_dir()
        if not inside or (directory.exists() and not exists):
            raise ConfigError(
                f"out is {str(directory)!r}; give a directory, in one that exists, for the trace."
            )
        if exists and any(directory.iterdir()):
            raise ConfigError(
                f"{directory} is not empty, and nothing is overwritten; give another --out."
            )


@config_class
class EvaluateOptions(Batches, SpeculationOptions):
    """Score answers beside the ones of plain decoding.

    The same items are decoded plainly and with the method, and every answer has a score. The
    mean scores are compared item by item, with a 95 % interval of their difference. Greedy answers
    have the same tokens but for rounding; sampled ones are drawn independently.

    The exit code is 1 if the interval does not hold 0 ("DIFFERENT"), and 3 if the comparison could
    see nothing ("NOT TESTED"). With sampling, a lossless method is called different in one run of
    twenty by chance; `spec-jax audit` is the stricter test.

    --task humaneval runs programs that the model writes. They run in separate processes, each with
    limits of time and memory, but not in a sandbox: use a container, or a machine where nothing can
    be lost. The packages that score answers are the extra `evaluate`.
    """

    LINES: ClassVar[dict[str, str]] = {
        "summarization": '{"prompt": "...", "reference": "..."}',
        "speech": '{"audio": "talk.wav", "text": "..."}',
    }
    sampling: Annotated[SamplingParams, Group(only=DISTRIBUTION)] = SamplingParams()
    """Task likelihood samples at temperature 1 unless you say otherwise."""
    task: Annotated[
        Literal["humaneval", "summarization", "speech", "likelihood"],
        Flag(remedy="name one with --task: humaneval, summarization, speech, likelihood"),
    ]
    """The task: pass@1 of HumanEval; ROUGE-2 F1 of summaries; word error rate of transcriptions; or
    how likely answers are under the target alone."""
    data: Annotated[str | None, Flag(metavar="FILE")] = None
    """A .jsonl file, an object a line: summarization has the keys prompt, reference and optionally
    chat (true unless it says false); speech has audio, relative to the file, and text; likelihood
    has prompt, or takes the sets chat, code or copy (default: all three)."""
    num_problems: Annotated[AtLeast1, Field(ge=2)] | None = None
    """Most items, evenly spaced (default: all)."""
    samples: AtLeast1 = 1
    """Answers to each item, sampled."""
    max_tokens: AtLeast1 | None = None
    """Most tokens of an answer (default: 512 for humaneval, what the model takes for speech, and
    128)."""
    allow_code_execution: bool = False
    """Let humaneval run what the model writes on this machine."""
    chat: bool = False
    """Ask humaneval's problems through the model's chat template."""
    seed: AtLeast0 = 0
    """Another seed samples other answers."""
    json: bool = False
    """Print one JSON object."""
    output: Annotated[Path | None, Flag(name="out")] = None
    """Also write the answers to this file as JSON lines, as soon as they are decoded; their scores
    follow."""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Fills in the task's defaults."""
        sampling = values.setdefault("sampling", {})
        if values.get("task") == "likelihood":
            sampling.setdefault("temperature", 1.0)

    def __post_init__(self) -> None:
        task, data, executes = self.task, self.data, self.task == "humaneval"
        if executes and data is not None:
            raise ConfigError(f"data is {data!r}, but task 'humaneval' has its own; leave it out.")
        if executes and not self.allow_code_execution:
            raise ConfigError(
                "task 'humaneval' runs code that the model writes, in a subprocess with limits of "
                "time and memory but without a sandbox; if this machine may do that, give "
                "--allow-code-execution."
            )
        if self.allow_code_execution and not executes:
            raise ConfigError(f"task {task!r} runs no code; leave --allow-code-execution out.")
        if self.chat and not executes:
            raise ConfigError(
                f"chat is for task 'humaneval', and task is {task!r}, whose lines say how to ask; "
                "leave --chat out."
            )
        if task == "likelihood" and data is not None:
            prompts.check_known(data)
        if task in self.LINES and data is None:
            raise ConfigError(
                f"task {task!r} needs data; name a .jsonl file of lines {self.LINES[task]} with "
                "--data."
            )
        if self.speculative.method == "none":
            raise ConfigError(
                "method is 'none', and a method is compared with plain decoding; give "
                "--draft or --method."
            )
        if self.samples > 1 and not self.sampling.temperature:
            raise ConfigError(
                f"samples is {self.samples}, but at temperature 0 all answers to an item are the "
                "same; give a --temperature, or leave --samples out."
            )
        object.__setattr__(self, "sampling", dataclasses.replace(self.sampling, n=self.samples))
        if self.output is not None:
            refuse_existing(self.output)
