"""Counts the collectives that a compiled program runs, from its text (HLO).

A loop's body counts once per iteration, and one branch of a conditional counts. The compiler's own
analysis does neither.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_HEAD = re.compile(r"(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_NAME = re.compile(r"\s+(ROOT )?%?([\w.-]+) = ")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLEES = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(?:\{([^}]*)\}|(%?[\w.-]+))"
)
_INDEX = re.compile(r"index=(\d+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_BETWEEN_SLICES = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_LAYOUT = re.compile(r"\{[^{}]*\}|/\*.*?\*/")


class Collective(NamedTuple):
    """One kind of collective, for example `all-reduce` of `f32[1,5,8192]`."""

    kind: str
    shape: str


@dataclass(frozen=True)
class Instruction:
    """A line of a computation: `name = shape opcode(operands), attributes`.

    `laid_out` is the shape with its layout, which also names memory apart from the main one.
    """

    name: str
    shape: str
    laid_out: str
    opcode: str
    operands: tuple[str, ...]
    constant: str
    attributes: str

    @property
    def callees(self) -> list[str]:
        """The computations it runs; the end of an asynchronous call only names its own again."""
        if self.opcode.endswith(("-done", "-update")):
            return []
        return [
            name.strip().lstrip("%")
            for several, one in _CALLEES.findall(self.attributes)
            for name in (several or one).split(",")
        ]

    def callee(self, role: str) -> str:
        """The computation of a role, such as `body`."""
        callee = re.search(rf"\b{role}=%?([\w.-]+)", self.attributes)
        assert callee, f"{self.opcode} {self.name} has no {role}"
        return callee[1]


@dataclass
class Computation:
    """Instructions by name, of which `root` is the result."""

    instructions: dict[str, Instruction]
    root: str = ""

    def resolve(self, name: str) -> Instruction | None:
        """The instruction that computes a value, behind those that pass it on unchanged."""
        source = self.instructions.get(name)
        while source and source.opcode in ("copy", "copy-start", "copy-done", "bitcast"):
            source = self.instructions.get(source.operands[0])
        return source

    def number(self, name: str) -> int | None:
        """The value of an integer constant."""
        source = self.resolve(name)
        constant = source.constant if source and source.opcode == "constant" else ""
        return int(constant) if re.fullmatch(r"-?\d+", constant) else None

    def carried(self, name: str) -> int | None:
        """Which element of the computation's one parameter a value is."""
        element = self.resolve(name)
        if element is None or element.opcode != "get-tuple-element":
            return None
        source, index = self.resolve(element.operands[0]), _INDEX.search(element.attributes)
        return int(index[1]) if index and source and source.opcode == "parameter" else None


def collectives(program: str, branch: Callable = max) -> Counter[Collective]:
    """How often each collective runs on a device in one run of a program.

    A loop counts as one iteration if the text does not give their number: one round of the decoding
    loop. What a device sends to other slices of a TPU job counts as `slice-transfer`.

    `branch` is `max` to count of every conditional the branch with the most collectives, `min` for
    the one with the fewest.
    """
    computations, entry = parse(program)

    @functools.cache
    def count(name: str) -> Counter[Collective]:
        return sum((of(each) for each in computations[name].instructions.values()), Counter())

    def of(each: Instruction) -> Counter[Collective]:
        if each.opcode == "send" and _BETWEEN_SLICES in each.attributes:
            return Counter({Collective("slice-transfer", each.shape.split(", ")[0].strip("(")): 1})
        kind = each.opcode.removesuffix("-start")
        if kind in KINDS:
            return Counter({Collective(kind, each.shape): 1})
        if each.opcode == "conditional":
            return branch((count(name) for name in each.callees), key=Counter.total)
        total = sum((count(name) for name in each.callees), Counter())
        if each.opcode == "while" and total:
            turns = iterations(computations, each)
            total = Counter({key: turns * number for key, number in total.items()})
        return total

    return count(entry)


def by_kind(counts: Counter[Collective]) -> dict[str, int]:
    """Kind -> count, whatever the shape."""
    kinds: Counter[str] = Counter()
    for each, number in counts.items():
        kinds[each.kind] += number
    return dict(sorted(kinds.items()))


def iterations(computations: dict[str, Computation], loop: Instruction) -> int:
    """The number of a loop's iterations; 1 if the program decides at run time.

    A loop with a known number either states it, or counts from one constant to another.
    """
    if trips := _TRIPS.search(loop.attributes):
        return int(trips[1])
    condition = computations[loop.callee("condition")]
    body = computations[loop.callee("body")]
    home = next(each for each in computations.values() if loop.name in each.instructions)
    test, start = condition.resolve(condition.root), home.resolve(loop.operands[0])
    step = body.instructions[body.root]
    if test is None or "direction=LT" not in test.attributes or start is None:
        return 1
    counter = condition.carried(test.operands[0])
    if counter is None or (start.opcode, step.opcode) != ("tuple", "tuple"):
        return 1
    limit = condition.number(test.operands[1])
    if limit is None:
        # A constant that is carried along.
        index = condition.carried(test.operands[1])
        if index is None or body.carried(step.operands[index]) != index:
            return 1
        limit = home.number(start.operands[index])
    begin, add = home.number(start.operands[counter]), body.resolve(step.operands[counter])
    if begin is None or limit is None or add is None or add.opcode != "add":
        return 1
    by = [body.number(operand) for operand in add.operands if body.carried(operand) != counter]
    if len(by) != 1 or not by[0] or by[0] < 0:
        return 1
    return max(0, -(-(limit - begin) // by[0]))


def parse(program: str) -> tuple[dict[str, Computation], str]:
    """The computations by name, and the name of the one that is run."""
    computations: dict[str, Computation] = {}
    current, entry = Computation({}), ""
    for line in program.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = Computation({})
            entry = head[2] if head[1] else entry
        elif name := _NAME.match(line):
            instruction = _instruction(name[2], line[name.end() :])
            current.instructions[name[2]] = instruction
            current.root = name[2] if name[1] else current.root
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    """An instruction: `SHAPE opcode(operands), attributes`."""
    shape = next(_top_level(text, " "))
    opcode, _, inside = text[len(shape) + 1 :].partition("(")
    operands = next(_top_level(inside, ")"))
    return Instruction(
        name=name,
        shape=_LAYOUT.sub("", shape),
        laid_out=shape,
        opcode=opcode,
        operands=tuple(_OPERAND.findall(operands)),
        constant=operands if opcode == "constant" else "",
        attributes=inside[len(operands) + 1 :],
    )


def _top_level(text: str, separator: str) -> Iterator[str]:
    """The parts of a text between separators that stand inside no brackets and no quotes."""
    begin = depth = 0
    quoted = False
    for at, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif quoted:
            continue
        elif character == separator and depth == 0:
            yield text[begin:at]
            begin = at + 1
        elif character in "({[":
            depth += 1
        elif character in ")}]":
            depth -= 1
    yield text[begin:]
