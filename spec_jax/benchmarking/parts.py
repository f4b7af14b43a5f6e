"""Which part of a round an op belongs to, from the text of the compiled programs (HLO)."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import NamedTuple

from spec_jax.planning.hlo import Instruction, parse

PARTS = ("prefill", "propose", "score", "verify", "commit")
"""Named scopes of the compiled programs, and annotations of the host's work."""

_MODULE = re.compile(r"HloModule ([\w.-]+)")
_PATH = re.compile(r'\bop_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Op(NamedTuple):
    """An op that ran: its module, the number of that program in the trace, and its name."""

    module: str
    program: int
    name: str


class OpInfo(NamedTuple):
    """An op in a program's text: its part, or None, and its kind (HLO's opcode)."""

    part: str | None
    kind: str


class ProgramOps:
    """The ops of a compiled program by name, from its `as_text()`, and the name of its module."""

    def __init__(self, text: str):
        match = _MODULE.match(text)
        self.module = match[1] if match else ""
        computations, _ = parse(text)
        homes = [
            (home, each)
            for home, computation in computations.items()
            for each in computation.instructions.values()
        ]
        callers: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
        users: dict[str, list[Instruction]] = defaultdict(list)
        for home, each in homes:
            for callee in each.callees:
                callers[callee].append((home, each))
            for operand in each.operands:
                users[operand].append(each)

        @cache
        def inside(computation: str) -> frozenset[str]:
            """The parts of the ops of a computation."""
            instructions = computations[computation].instructions.values()
            return frozenset().union(*map(parts_of, instructions))

        def parts_of(each: Instruction) -> frozenset[str]:
            """Its own scope, else the parts of all ops that it runs."""
            scope = _scope(each)
            return frozenset({scope}) if scope else frozenset().union(*map(inside, each.callees))

        @cache
        def around(computation: str) -> str | None:
            """The part of the ops that run a computation, if they agree."""
            parts = {_scope(each) or around(home) for home, each in callers[computation]}
            return parts.pop() if len(parts) == 1 else None

        @cache
        def of_users(name: str) -> frozenset[str | None]:
            """The parts of the ops that use a value, through ops without any scope."""
            parts: set[str | None] = set()
            for each in users[name]:
                if _PATH.search(each.attributes) or parts_of(each):
                    parts |= parts_of(each) or {None}
                else:
                    parts |= of_users(each.name)
            return frozenset(parts)

        def part(each: Instruction, home: str) -> str | None:
            if len(parts := parts_of(each)) == 1:
                return next(iter(parts))
            if outer := around(home):
                return outer
            # Only an op that the compiler added, which has no scope at all, belongs to its users.
            parts = frozenset() if _PATH.search(each.attributes) else of_users(each.name)
            return next(iter(parts)) if len(parts) == 1 else None

        self.ops = {each.name: OpInfo(part(each, home), _kind(each)) for home, each in homes}


def _scope(each: Instruction) -> str | None:
    """The outermost part among the named scopes that the op was traced in."""
    path = _PATH.search(each.attributes)
    return next((scope for scope in path[1].split("/") if scope in PARTS), None) if path else None


def _kind(each: Instruction) -> str:
    target = _TARGET.search(each.attributes)
    return f"{each.opcode} {target[1]}" if target else each.opcode


def describe(ops: Iterable[Op], programs: Sequence[ProgramOps]) -> dict[Op, OpInfo]:
    """Looks ops that ran up in the programs' texts; ops of other programs are left out.

    A trace numbers programs in its own way. So a program is recognised by its module's name and by
    its ops: it is the smallest that has them all.
    """
    by_program: dict[tuple[str, int], set[Op]] = defaultdict(set)
    for op in ops:
        by_program[op.module, op.program].add(op)
    infos: dict[Op, OpInfo] = {}
    for (module, _), members in by_program.items():
        names = {op.name for op in members}
        fits = [each for each in programs if each.module == module and names <= each.ops.keys()]
        if fits:
            program = min(fits, key=lambda each: len(each.ops))
            infos |= {op: program.ops[op.name] for op in members}
    return infos
