"""Files of results: JSON lines, of which the first says what was measured, where and how.

Every other line is a run, all prompts of a set decoded once by one system, or the cost of calls. A
line is written when its run has ended, so that an interrupted measurement keeps all runs before.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from spec_jax.config import AtLeast0, AtLeast1, NotNegative, Text
from spec_jax.config.explain import explain
from spec_jax.errors import BenchmarkError
from spec_jax.text.json_lines import append_line, drop_unfinished_line

VERSION = 1
SPEC_JAX = "spec-jax"


class Record(pydantic.BaseModel):
    """A JSON object of a file of results, whose keys are its fields and no others."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="forbid")


class Setting(Record):
    """How requests are sampled."""

    temperature: NotNegative = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def name(self) -> str:
        """As tables have it."""
        if not self.temperature:
            return "greedy"
        nucleus = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"T = {self.temperature:g}{nucleus}"


class System(Record):
    """What decodes: a library, its method and the method's options.

    Attributes:
      name: in tables; different for each system of a file.
      library: `spec-jax`, `transformers` or `llama.cpp`.
      method: as `SpeculativeConfig.method`; `none` is plain decoding.
      num_speculative_tokens: K; 0 if nothing is drafted.
      draft_length_policy: how K changes.
      verification: which drafted tokens are kept.
      scoring: how the target scores a draft.
    """

    name: Text
    library: Text = SPEC_JAX
    method: Text = "none"
    num_speculative_tokens: AtLeast0 = 0
    draft_length_policy: Text = "constant"
    verification: Text = "token"
    scoring: Text = "block"

    @property
    def is_plain(self) -> bool:
        """Whether it decodes token by token."""
        return self.method == "none"

    @property
    def family(self) -> str:
        """The name without K: systems that differ in K alone have the same."""
        ours = "" if self.library == SPEC_JAX else f"{self.library}, "
        if self.is_plain:
            return f"{ours}plain"
        parts = [self.method]
        if self.draft_length_policy != "constant":
            parts.append(self.draft_length_policy)
        if self.verification != "token":
            parts.append(f"{self.verification} verification")
        if self.scoring != "block":
            parts.append(self.scoring)
        return ours + ", ".join(parts)


class PromptsOf(Record):
    """A set of prompts: its name, how many were decoded, and the checksum of their tokens."""

    name: Text
    count: AtLeast1
    digest: Text


class Header(Record):
    """The first line: everything that the figures depend on.

    Attributes:
      created: UTC, as ISO 8601.
      command: as it was typed.
      versions: package -> version.
      machine: operating system, processor and number of cores.
      devices: kind -> how many.
      layout: its name, or `one device`.
      options: further options of the models and methods, by name.
    """

    kind: Literal["header"] = "header"
    version: Literal[1] = VERSION
    created: Text
    command: str
    versions: dict[str, str]
    machine: str
    devices: dict[str, int]
    layout: Text
    target: Text
    draft: str | None
    dtype: Text
    quantization: Text
    options: dict[str, str]
    seed: AtLeast0
    max_tokens: AtLeast1
    ignore_eos: bool
    repeats: AtLeast1
    settings: Annotated[tuple[Setting, ...], Field(min_length=1)]
    batch_sizes: Annotated[tuple[AtLeast1, ...], Field(min_length=1)]
    systems: Annotated[tuple[System, ...], Field(min_length=1)]
    prompts: Annotated[tuple[PromptsOf, ...], Field(min_length=1)]

    def differences(self, other: "Header") -> list[str]:
        """What another measurement has otherwise; its date and command do not count."""
        own, theirs = (each.model_dump(exclude={"created", "command"}) for each in (self, other))
        return [
            f"{key} is {own[key]!r} there and {theirs[key]!r} here"
            for key in own
            if own[key] != theirs[key]
        ]


class Request(Record):
    """One prompt's completion.

    Attributes:
      prompt: its number in the set.
      category: the prompt's, or empty.
      digest: of the generated token ids.
      rounds: target calls that gave tokens.
      accepted_per_position: of each draft position, how often its token was kept.
      first_token_seconds: from the begin of the prompt's reading; of spec-jax, the reading and a
        round of mean length, since rounds run on the device without a look at their tokens.
      seconds: reading the prompt and decoding; without waiting for a free row, and for the prompts
        of others.
      decode_seconds: decoding alone.
    """

    prompt: AtLeast0
    category: str = ""
    prompt_tokens: AtLeast1
    tokens: AtLeast0
    finish_reason: Text
    digest: Text
    rounds: AtLeast0
    draft_tokens: AtLeast0 = 0
    accepted_tokens: AtLeast0 = 0
    accepted_per_position: tuple[AtLeast0, ...] = ()
    first_token_seconds: NotNegative
    seconds: NotNegative
    decode_seconds: NotNegative

    @property
    def tokens_per_second(self) -> float:
        """Of the whole request, prompt included, as Spec-Bench has it."""
        return self.tokens / self.seconds if self.seconds else 0.0


class Run(Record):
    """All prompts of a set, decoded once by one system.

    Attributes:
      prompts: the set's name.
      setting: how they were sampled.
      batch_size: rows decoded at once.
      system: its name.
      repeat: counts from 0.
      seconds: wall time of the whole call, without compilation.
    """

    kind: Literal["run"] = "run"
    prompts: Text
    setting: Setting
    batch_size: AtLeast1
    system: Text
    repeat: AtLeast0
    seconds: NotNegative
    requests: Annotated[tuple[Request, ...], Field(min_length=1)]

    @property
    def key(self) -> tuple:
        """What no two runs of a file have in common."""
        return (self.prompts, self.setting, self.batch_size, self.system, self.repeat)

    def without_times(self) -> dict:
        """Everything that does not change from run to run."""
        times = {"first_token_seconds", "seconds", "decode_seconds"}
        return self.model_dump(exclude={"seconds": True, "requests": {"__all__": times}})


class Step(Record):
    """Seconds of a call, one figure a repeat.

    Attributes:
      name: `target`, or the method whose draft step it is.
      width: tokens of each row that it reads.
    """

    name: Text
    width: AtLeast1
    seconds: Annotated[tuple[NotNegative, ...], Field(min_length=1)]


class Costs(Record):
    """What calls cost: the target's by tokens scored, and a draft step of each method.

    Attributes:
      batch_size: rows of each call.
      weight_bytes: that a target call reads.
      streaming: bytes a second at which the host's memory is read; None on accelerators.
    """

    kind: Literal["costs"] = "costs"
    batch_size: AtLeast1
    weight_bytes: AtLeast1
    streaming: NotNegative | None
    steps: tuple[Step, ...]


Line = Annotated[Header | Run | Costs, Field(discriminator="kind")]
_LINE: pydantic.TypeAdapter[Header | Run | Costs] = pydantic.TypeAdapter(Line)


class Results:
    """What a file holds.

    Attributes:
      header: its first line.
      runs: in the order in which they ended.
      costs: by batch size.
    """

    def __init__(self, header: Header, lines: Sequence[Run | Costs] = ()):
        self.header = header
        self.runs = [line for line in lines if isinstance(line, Run)]
        self.costs = {line.batch_size: line for line in lines if isinstance(line, Costs)}

    def add(self, line: Run | Costs) -> None:
        """Adds what was measured."""
        if isinstance(line, Run):
            self.runs.append(line)
        else:
            self.costs[line.batch_size] = line

    @property
    def systems(self) -> dict[str, System]:
        """Name -> system."""
        return {system.name: system for system in self.header.systems}


def read(path: Path) -> Results:
    """Reads and checks a file of results.

    Raises:
      BenchmarkError: a line is damaged, or is none of a file of results; it is named.
      OSError: the file cannot be read.
    """
    lines = list(_lines(path, path.read_bytes()))
    if not lines or not isinstance(lines[0], Header):
        raise BenchmarkError(
            f"{path}, line 1 is not the head of a file of results; give one that `spec-jax bench` "
            "wrote."
        )
    header, seen = lines[0], set()
    systems, prompts = ({each.name for each in some} for some in (header.systems, header.prompts))
    rest: list[Run | Costs] = []
    for number, line in enumerate(lines[1:], start=2):
        if isinstance(line, Header):
            raise BenchmarkError(f"{path}, line {number} is a second head; split the file there.")
        if isinstance(line, Run):
            strange = {line.system} - systems | {line.prompts} - prompts
            if strange or line.key in seen:
                why = (
                    f"names {strange.pop()!r}, which line 1 does not" if strange else "comes twice"
                )
                raise BenchmarkError(f"{path}, line {number} {why}; remove the line.")
            seen.add(line.key)
        rest.append(line)
    return Results(header, rest)


def _lines(path: Path, data: bytes) -> Iterator[Header | Run | Costs]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _LINE.validate_json(line)
        except pydantic.ValidationError as error:
            remedy = "remove the line"
            if number > 1 and not data.endswith(b"\n") and data.endswith(line):
                remedy = "it was cut off, and `spec-jax bench --resume` measures it again"
            raise BenchmarkError(
                f"{path}, line {number} is damaged: {_reason(error).rstrip('.')}; {remedy}."
            ) from None


def _reason(error: pydantic.ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    return first["msg"] if first["type"] == "json_invalid" else explain(error)


class Writer:
    """Appends lines to a file of results, each whole and at once on the disk.

    Args:
      path: the file.
      header: of the measurement.
      resume: go on with a file that is there, rather than refuse it.

    Attributes:
      results: what the file holds.

    Raises:
      BenchmarkError: the file is there and was not to be resumed, is damaged, or is of another
        measurement.
      OSError: it cannot be written.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool = False):
        self._path = path
        if path.exists() and not resume:
            raise BenchmarkError(
                f"{path} exists, and nothing is overwritten; give --resume to go on with it, or "
                "another --out."
            )
        path.touch()
        drop_unfinished_line(path, b'{"kind": "header"')
        if not path.stat().st_size:
            self.results = Results(header)
            append_line(path, header.model_dump())
            return
        self.results = read(path)
        if differences := self.results.header.differences(header):
            raise BenchmarkError(
                f"{path} holds another measurement: {'; '.join(differences)}. Give the same "
                "options on the same machine, or another --out."
            )

    def add(self, line: Run | Costs) -> None:
        """Writes what was measured."""
        append_line(self._path, line.model_dump())
        self.results.add(line)
