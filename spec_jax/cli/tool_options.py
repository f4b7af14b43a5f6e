"""The options of the commands that measure, train, convert, plan and report. Imports no JAX.

Each class becomes the flags of a command (`flags.py`); its docstring ends the command's help.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field

from spec_jax.benchmarking import prompts
from spec_jax.cli.flags import Group
from spec_jax.cli.options import DISTRIBUTION, LayoutFile, ModelOptions, Speculation
from spec_jax.config import (
    DRAFT_LENGTH_POLICIES,
    METHODS,
    SCORINGS,
    VERIFICATIONS,
    AtLeast0,
    AtLeast1,
    CheckpointFormat,
    Dtype,
    Flag,
    KvCacheDtype,
    LlmDtype,
    Many,
    NoDraftConfig,
    Offload,
    PlanMethod,
    PlanQuantization,
    Quantization,
    SamplingParams,
    Share,
    SpeculativeConfig,
    Text,
    config_class,
)
from spec_jax.errors import ConfigError, did_you_mean
from spec_jax.training.config import TrainingConfig

PROGRAMS_DIRECTORY = "JAX_COMPILATION_CACHE_DIR"
PLAN_LOOKAHEAD = 4
_NOT_OF_ALL = (
    *("method", "num_speculative_tokens", "draft_length_policy", "verification", "scoring"),
    *("scoring_consistent", "confidence_threshold", "retune_confidence"),
)
"""Options that `bench` takes lists of, or not at all."""


@config_class
class BenchOptions(ModelOptions):
    """Measure speed on your models and prompts.

    Every combination of the lists is measured, as far as a method supports it, and plain
    decoding beside it. At temperature 0 all verifications accept the same tokens, so that only one
    of them is measured. All systems take turns within each repeat. Speed-ups count against the
    fastest plain decoding that was measured, tokens/s is the mean over requests (in batches: of all
    rows together), and prompts are included.

    FILE.jsonl has a line for each run. Ctrl-C keeps the runs that have ended, and --resume
    continues. `spec-jax report FILE.jsonl --out report.html` draws it.
    """

    GROUP: ClassVar[str] = "what to compare, and how"

    output: Annotated[
        Path, Flag(name="out", remedy="name the file of results with --out FILE.jsonl")
    ]
    """Results, as JSON lines."""
    resume: bool = False
    """Continue the file if it is there, after Ctrl-C."""
    methods: Annotated[Many[str], Flag(metavar="NAME", commas=True)] = ()
    """How to draft (default: prompt_lookup, and draft_model with --draft)."""
    num_speculative_tokens: Annotated[Many[AtLeast0], Flag(metavar="K")] = (2, 4, 8)
    """Lookaheads; 1-4 is 1,2,3,4."""
    draft_length_policy: Annotated[Many[str], Flag(metavar="NAME", commas=True)] = ("constant",)
    """How K changes."""
    verification: Annotated[Many[str], Flag(metavar="NAME", commas=True)] = ("coupled",)
    """Which drafted tokens to accept."""
    scoring: Annotated[Many[str], Flag(metavar="NAME", commas=True)] = ("block",)
    """How a draft is scored."""
    temperature: Annotated[Many[float], Flag(metavar="T")] = (0.0,)
    """Temperatures of sampling; 0 is greedy."""
    top_p: Annotated[Many[float], Flag(metavar="P")] = (1.0,)
    """Top-p, at temperatures above 0."""
    batch_size: Many[AtLeast1] = (1,)
    """Rows decoded at once."""
    baseline: Annotated[Many[str], Flag(metavar="transformers|llama-cpp")] = ()
    """Also measure this library, if it is installed, one request at a time."""
    speculation: Annotated[Mapping[str, Any], Group(of=SpeculativeConfig, without=_NOT_OF_ALL)] = (
        Field(default_factory=dict)
    )
    """Options for all methods that have them."""
    prompt_set: Annotated[
        Many[str], Flag(metavar="|".join((*prompts.BUILT_IN, prompts.HUMANEVAL, "FILE")))
    ] = prompts.BUILT_IN
    """Prompts; FILE.jsonl has the key "prompt" in each line, or "turns" as in Spec-Bench's
    question.jsonl, of which the first is asked."""
    num_prompts: AtLeast1 = 16
    """Most prompts of each set, evenly spaced."""
    max_tokens: AtLeast1 = 64
    """Most tokens of an answer."""
    ignore_eos: bool = False
    """Decode past the end of sequence."""
    repeats: AtLeast1 = 3
    """How often everything is measured."""
    seed: AtLeast0 = 0
    """Seed of sampled requests."""
    command: Annotated[str, Flag(hidden=True)] = ""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Chooses the methods, and measures nothing twice."""
        draft = values.get("speculation", {}).get("draft")
        methods = ("draft_model", "prompt_lookup") if draft else ("prompt_lookup",)
        values.setdefault("methods", methods)
        for name, value in values.items():
            if isinstance(value, tuple):
                values[name] = tuple(dict.fromkeys(value))

    def __post_init__(self) -> None:
        for name, choices in (
            ("methods", METHODS),
            ("draft_length_policy", DRAFT_LENGTH_POLICIES),
            ("verification", VERIFICATIONS),
            ("scoring", SCORINGS),
        ):
            for value in getattr(self, name):
                if value not in choices:
                    raise ConfigError(f"{name} holds {value!r}.{did_you_mean(value, choices)}")
        for temperature in self.temperature:
            for top_p in self.top_p:
                SamplingParams(temperature=temperature, top_p=top_p)
        for name in self.prompt_set:
            prompts.check_known(name)


@config_class
class ReportOptions:
    """Draw what `spec-jax bench` measured.

    The report is one HTML file that needs no network. With several files of results, the systems
    that they have in common are compared with the ones of the first file, with bootstrap intervals.
    """

    results: Annotated[
        Many[Path],
        Flag(
            positional=True,
            metavar="RESULTS",
            remedy="name one or several files that spec-jax bench wrote",
        ),
    ]
    """A file that `spec-jax bench` wrote."""
    output: Annotated[Path, Flag(name="out", remedy="name the HTML file with --out report.html")]
    """The HTML file."""
    png: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Write the figures as PNG files, too."""

    def __post_init__(self) -> None:
        if self.output in self.results:
            raise ConfigError(f"--out is {self.output}, a file of results; name another file.")
        if self.png and self.png.exists() and not self.png.is_dir():
            raise ConfigError(f"--png is {self.png}, which is not a directory; name another.")


@config_class
class TrainDraftOptions:
    """Train a draft for your target.

    Data: a .jsonl file holds one object per line with a key "messages" (the target answers the
    last question), "prompt" (the target continues it) or "text" (read as it is); any other file is
    one text. Without --data the target generates its own prompts.

    DIR holds the run: data/, checkpoints/, metrics.jsonl, acceptance.png and at the end draft/ and
    draft.toml, which you pass as --draft. The same command resumes an interrupted run.
    """

    target: Annotated[
        Text, Flag(metavar="REF", also="model", remedy="name the model with --target")
    ]
    """The model that the draft is for, named like the target of `spec-jax generate`."""
    output: Annotated[
        Path, Flag(name="out", metavar="DIR", remedy="name the run's directory with --out")
    ]
    """The run's directory."""
    layout: LayoutFile | None = None
    """How models are sharded over several devices or processes: a layout file, or a name such as
    cpu-8 (default: one device)."""
    data: Many[Path] = ()
    """Examples; see below."""
    data_dir: Annotated[Path | None, Flag(metavar="DIR")] = None
    """Where sampled rows are kept; runs can share them (default: data in the run's)."""
    license: Annotated[str, Flag(metavar="SPDX")] = "LicenseRef-unspecified"
    """The licence of the draft's weights, for its recipe and card; the target's licence may
    restrict it."""
    training: TrainingConfig = TrainingConfig()
    command: Annotated[str, Flag(hidden=True)] = ""


@config_class
class ConvertOptions:
    """Write a model in another format.

    The model is read while it is written, some GiB at a time. DIR appears when it is complete,
    with the SHA-256 of every file, which loading compares. With --layout each process writes its
    part, and DIR must be storage that all processes share.
    """

    source: Annotated[
        str, Flag(positional=True, metavar="SRC", remedy="write spec-jax convert SRC --out DIR")
    ]
    """The model, named like a target."""
    directory: Annotated[str | None, Flag(positional=True, metavar="DIR")] = None
    """The output, if it is not named with --out."""
    out: Annotated[str | None, Flag(metavar="DIR")] = None
    """The directory to write, which does not exist yet."""
    format: CheckpointFormat = "orbax"
    """Orbax is read in parts with any layout, safetensors by other programs, too."""
    dtype: LlmDtype = "auto"
    """Dtype of the written weights; auto keeps every number, float16 as float32."""
    quantization: Quantization = "auto"
    """The bits that matrices are written in, with orbax: int8 and int4 round them, gguf keeps the
    blocks of a GGUF file (default: auto, which keeps what an Orbax directory has)."""
    layout: LayoutFile | None = None
    """How the model is sharded over several devices or processes while it is converted, one of
    sharding/*.toml (default: one device)."""

    def __post_init__(self) -> None:
        if self.directory and self.out:
            mistake = f"the output is named twice, {self.directory} and {self.out}"
        elif not self.output:
            mistake = "no output given"
        else:
            return
        raise ConfigError(f"{mistake}; name the directory with --out.")

    @property
    def output(self) -> str:
        """The directory to write."""
        return self.directory or self.out or ""


@config_class
class ShapeOptions:
    """A target of which only the shape is read."""

    GROUP: ClassVar[str] = "model"

    target: Annotated[
        Text, Flag(metavar="REF", also="model", remedy="name the target model with --target")
    ]
    """Target model, of which only the shape is read: a Hugging Face directory, a .gguf file, a
    recipe (.toml) or a hub id."""
    dtype: Dtype = "bfloat16"
    """Dtype of weights and caches."""


@config_class
class PlanOptions(ShapeOptions):
    """Project memory and speed on a layout.

    Every time is a projection from the layout's figures of the chip: the least time that memory,
    arithmetic and links take. No weights are read, and no accelerator is needed.
    """

    layout: LayoutFile | None = None
    """Topology and sharding, sharding/*.toml (default: one device, of which nothing is known)."""
    quantization: Annotated[Many[PlanQuantization], Flag(commas=True)] = ("none",)
    """Quantization of the matrices of both models."""
    method: PlanMethod = "draft_model"
    """What drafts: a draft model, the target's first layers, a lookup in the text, or nothing."""
    early_exit_layers: AtLeast1 | None = None
    """With --method early_exit, layers that draft (default: a quarter)."""
    draft: Annotated[str | None, Flag(metavar="REF")] = None
    """Draft model, named like the target (default: one derived from the target, much shallower and
    slightly narrower)."""
    offload: Offload = "none"
    """Host keeps the target's layers in host memory and streams them in every call."""
    resident_layers: AtLeast0 = 0
    """With --offload host, layers that stay on the chips."""
    num_speculative_tokens: Annotated[Many[AtLeast1], Flag(metavar="K")] = ()
    """Tokens drafted in a round (default: 4; with --search, 1 to 16)."""
    acceptance: Annotated[Share, Flag(metavar="A")] = 0.8
    """Probability that a drafted token is accepted."""
    batch: Many[AtLeast1] = ()
    """Rows decoded together (default: 1; with --search, doubled until nothing fits)."""
    context: Many[AtLeast1] = ()
    """Most tokens of prompt and completion together (default: the target's context)."""
    sampling: Annotated[SamplingParams, Group(only=("temperature", "top_k", "top_p"))] = (
        SamplingParams()
    )
    """Sampling adds exchanges to a round."""
    compile: bool = False
    """Compile for the layout and show what the compiler reports; for a TPU layout this needs the
    extra tpu but no TPU."""
    search: bool = False
    """Try batches, layouts of the draft and K, and show the fastest that fit; --batch, --context,
    --quantization and --num-speculative-tokens then take lists such as 1,8,64."""
    out: Annotated[str | None, Flag(metavar="FILE")] = None
    """With --search, write the layout of its first row."""
    json: bool = False
    """Print one JSON object."""

    def __post_init__(self) -> None:
        if not self.search:
            for name in ("num_speculative_tokens", "batch", "context", "quantization"):
                if len(values := getattr(self, name)) > 1:
                    listed = ",".join(map(str, values))
                    raise ConfigError(f"{name} is {listed}; give one value, or add --search.")
            if self.out is not None:
                raise ConfigError(f"out is {self.out!r}, which --search writes; add --search.")
        elif self.compile or self.offload != "none":
            name = "--compile" if self.compile else "--offload"
            raise ConfigError(f"--search does without {name}; leave one of them out.")
        if self.out is not None and self.method != "draft_model":
            raise ConfigError(
                f"out is {self.out!r}, a layout with the best place of a draft model, but method "
                f"{self.method!r} has none; leave one of them out."
            )


@config_class
class CompileOptions(ShapeOptions):
    """Compile for devices that are elsewhere.

    Set JAX_COMPILATION_CACHE_DIR to DIR where `generate` or LLM runs, with the same models,
    options and layout, and the same versions of spec-jax, jax, jaxlib and libtpu; it then reads the
    programs instead of compiling them. No weights are read here, and no TPU is needed, but the
    extra tpu. Layouts of GPUs compile in the first job.

    Lengths are rounded up to powers of two, and lengths with the same power share their programs.
    LLM's --dtype depends on what is stored, so give it there too.
    """

    layout: Annotated[
        Text, Flag(metavar="FILE", remedy="name the layout with --layout, such as tpu-v4-16")
    ]
    """Topology and sharding (sharding/*.toml)."""
    quantization: PlanQuantization = "none"
    """Quantization of the matrices of both models."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """What caches hold: int8 keeps keys and values in 8 bits (default: auto, not rounded)."""
    max_model_len: AtLeast1 | None = None
    """Most tokens of prompt and completion together (default: the model's context)."""
    speculative: Speculation = NoDraftConfig()
    sampling: Annotated[SamplingParams, Group(only=("max_tokens", *DISTRIBUTION))] = (
        SamplingParams()
    )
    prompt_tokens: Annotated[
        Many[AtLeast1],
        Flag(remedy="name the tokens of your prompts with --prompt-tokens, such as 128,512"),
    ]
    """Tokens of the longest prompt; each number is compiled for."""
    num_prompts: AtLeast1 = 1
    """Prompts of one call."""
    max_num_seqs: AtLeast1 = 8
    """Most prompts decoded as one batch."""
    output: Annotated[Path, Flag(name="out", metavar="DIR")] = Path()
    """The folder of the programs (default: $JAX_COMPILATION_CACHE_DIR)."""

    @classmethod
    def complete(cls, values: dict[str, Any]) -> None:
        """Takes the folder of the environment."""
        folder = values.get("output") or os.environ.get(PROGRAMS_DIRECTORY)
        if not folder:
            raise ConfigError(
                f"no folder given; name the programs' with --out, or set {PROGRAMS_DIRECTORY}."
            )
        values["output"] = Path(folder)


@config_class
class StoreOptions:
    """Keep outputs that method suffix drafts from.

    Texts are added to the file, and then it says what it holds. A text file is one output. A file
    .jsonl has an object a line, with the key token_ids or text, as spec-jax generate --out writes.
    """

    store: Annotated[
        Path,
        Flag(positional=True, metavar="FILE", remedy="write spec-jax store FILE --target REF"),
    ]
    """The file, for --suffix-store; it is made if there is none."""
    texts: Annotated[Many[Path], Flag(positional=True, metavar="TEXT")] = ()
    """A file of texts to add."""
    target: Annotated[
        str, Flag(metavar="REF", remedy="name the model that the outputs are for with --target")
    ]
    """The model whose tokens they are in, named like a target."""
    namespace: str = ""
    """The namespace that they are added to."""


@config_class
class EnvOptions:
    """Show versions and devices, for bug reports."""

    json: bool = False
    """Print one JSON object."""
