"""Files of results: JSON lines. The first says what was measured, where and how.

Each other line is a run (all prompts of a set decoded once by one system) or the cost of calls. A
line is written when its run has ended, so that an interrupted measurement keeps earlier runs.
"""

from collections.abc import Iterable, Iterator
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
    """A JSON object of a file of results; unknown keys are refused."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True, extra="forbid")


class Setting(Record):
    """How requests are sampled."""

    temperature: NotNegative = 0.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def name(self) -> str:
        """The label in tables."""
        if not self.temperature:
            return "greedy"
        nucleus = f", top-p {self.top_p:g}" if self.top_p < 1 else ""
        return f"T = {self.temperature:g}{nucleus}"


class System(Record):
    """A library (`spec-jax`, `transformers` or `llama.cpp`), its method and the method's options.

    The name is unique in a file; the method `none` is plain decoding, for which K is 0.
    """

    name: Text
    library: Text = SPEC_JAX
    method: Text = "none"
    num_speculative_tokens: AtLeast0 = 0
    draft_length_policy: Text = "constant"
    verification: Text = "coupled"
    scoring: Text = "block"

    @property
    def is_plain(self) -> bool:
        """Whether it decodes token by token."""
        return self.method == "none"

    @property
    def family(self) -> str:
        """The name without K, shared by systems that differ in K alone."""
        ours = "" if self.library == SPEC_JAX else f"{self.library}, "
        if self.is_plain:
            return f"{ours}plain"
        verification = f"{self.verification} verification"
        parts = (self.method, self.draft_length_policy, verification, self.scoring)
        usual = ("constant", "coupled verification", "block")
        return ours + ", ".join(each for each in parts if each not in usual)


class PromptsOf(Record):
    """A set of prompts: its name, how many were decoded, and the checksum of their tokens."""

    name: Text
    count: AtLeast1
    digest: Text


class Header(Record):
    """The first line: everything that the figures depend on.

    Attributes:
      created: UTC, as ISO 8601.
      versions: package -> version.
      machine: operating system, processor and number of cores.
      devices: kind -> count.
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
        """What differs in another measurement, apart from its date and command."""
        ours, theirs = (each.model_dump(exclude={"created", "command"}) for each in (self, other))
        return [
            f"{key} is {value!r} there and {theirs[key]!r} here"
            for key, value in ours.items()
            if value != theirs[key]
        ]


class BenchRequest(Record):
    """One prompt's completion.

    Attributes:
      prompt: its number in the set.
      digest: checksum of the generated token ids.
      rounds: target calls that gave tokens.
      accepted_per_position: for each draft position, how often its token was accepted.
      first_token_seconds: time to the first token. For spec-jax: prefill and a round of mean
        length, since the host does not see the tokens of single rounds.
      seconds: prefill and decoding, without waiting for a free row or other rows' prefill.
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
        """Tokens a second of the whole request, prompt included, as in Spec-Bench."""
        return self.tokens / self.seconds if self.seconds else 0.0


class BenchRun(Record):
    """All prompts of a set, decoded once by one system; both are named.

    `seconds` is the wall time of the whole call, without compilation.
    """

    kind: Literal["run"] = "run"
    prompts: Text
    setting: Setting
    batch_size: AtLeast1
    system: Text
    repeat: AtLeast0
    seconds: NotNegative
    requests: Annotated[tuple[BenchRequest, ...], Field(min_length=1)]

    @property
    def key(self) -> tuple:
        """Identifies the run in its file."""
        return (self.prompts, self.setting, self.batch_size, self.system, self.repeat)


class Step(Record):
    """Seconds of a call of `target` or of a method's draft step, for each repeat.

    `width` is the number of tokens that it reads in each row.
    """

    name: Text
    width: AtLeast1
    seconds: Annotated[tuple[NotNegative, ...], Field(min_length=1)]


class Costs(Record):
    """Cost of the target's calls by tokens scored, and of a draft step of each method.

    `streaming` is the bandwidth of the host's memory in bytes a second; None on accelerators.
    """

    kind: Literal["costs"] = "costs"
    batch_size: AtLeast1
    weight_bytes: AtLeast1
    streaming: NotNegative | None
    steps: tuple[Step, ...]


_LINE: pydantic.TypeAdapter[Header | BenchRun | Costs] = pydantic.TypeAdapter(
    Annotated[Header | BenchRun | Costs, Field(discriminator="kind")]
)


class Results:
    """The content of a file: its header, its runs in order, and the costs by batch size."""

    def __init__(self, header: Header, lines: Iterable[BenchRun | Costs] = ()):
        self.header, self.runs, self.costs = header, list[BenchRun](), dict[int, Costs]()
        for line in lines:
            self.add(line)

    def add(self, line: BenchRun | Costs) -> None:
        """Adds a measurement."""
        if isinstance(line, BenchRun):
            self.runs.append(line)
        else:
            self.costs[line.batch_size] = line


def read(path: Path) -> Results:
    """Reads and checks a file of results.

    Raises:
      BenchmarkError: a line is damaged or does not belong to a file of results; it is named.
      OSError: the file cannot be read.
    """
    lines = list(_lines(path, path.read_bytes()))
    if not lines or not isinstance(lines[0], Header):
        raise BenchmarkError(
            f"{path}, line 1 is not the header of a file of results; give one that `spec-jax "
            "bench` wrote."
        )
    results, keys = Results(lines[0]), set()
    systems, prompts = (
        {each.name for each in some} for some in (lines[0].systems, lines[0].prompts)
    )
    for number, line in enumerate(lines[1:], start=2):
        place = f"{path}, line {number}"
        if isinstance(line, Header):
            raise BenchmarkError(f"{place} is a second header; split the file there.")
        if isinstance(line, BenchRun):
            for name in {line.system} - systems | {line.prompts} - prompts:
                raise BenchmarkError(
                    f"{place} names {name!r}, which line 1 does not; remove the line."
                )
            if line.key in keys:
                raise BenchmarkError(f"{place} comes twice; remove the line.")
            keys.add(line.key)
        results.add(line)
    return results


def _lines(path: Path, data: bytes) -> Iterator[Header | BenchRun | Costs]:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            yield _LINE.validate_json(line)
        except pydantic.ValidationError as error:
            remedy = "remove the line"
            if number > 1 and not data.endswith(b"\n") and data.endswith(line):
                remedy = "it was cut off, and `spec-jax bench --resume` measures it again"
            first = error.errors(include_url=False)[0]
            reason = first["msg"] if first["type"] == "json_invalid" else explain(error)
            raise BenchmarkError(
                f"{path}, line {number} is damaged: {reason.rstrip('.')}; {remedy}."
            ) from None


class Writer:
    """Appends lines to a file of results; each is complete on the disk when `add` returns.

    With `resume` a file that exists is continued.

    Raises:
      BenchmarkError: the file exists and is not to be resumed, is damaged, or belongs to another
        measurement.
      OSError: it cannot be written.
    """

    def __init__(self, path: Path, header: Header, *, resume: bool = False):
        self._path = path
        if path.exists() and not resume:
            raise BenchmarkError(
                f"{path} exists, and nothing is overwritten; give --resume to continue it, or "
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

    def add(self, line: BenchRun | Costs) -> None:
        """Writes a measurement."""
        append_line(self._path, line.model_dump())
        self.results.add(line)
