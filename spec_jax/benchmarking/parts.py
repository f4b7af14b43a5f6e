"""Which part of a round an op belongs to, from the text of the compiled programs (HLO)."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spec_jax.planning.hlo import Instruction, parse

PARTS = ("prefill", "propose", "score", "verify", "commit")
"""Named scopes of the compiled programs, and annotations of what the host does for them."""

_MODULE = re.compile(r"HloModule ([\w.-]+)")
_PATH = re.compile(r'\bop_name="([^"]*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Op(NamedTuple):
    """An op that ran: the name of its module, the number of that program in the trace, its name."""

    module: str
    program: int
    name: str


class Known(NamedTuple):
    """What a program's text says of an op: its part, or None, and its kind (HLO's opcode)."""

    part: str | None
    kind: str


class Program:
    """The ops of a compiled program.

    Args:
      text: `jax.stages.Compiled.as_text()`.

    Attributes:
      module: its name.
      ops: name -> what is known of it.
    """

    def __init__(self, text: str):
        found = _MODULE.match(text)
        self.module = found[1] if found else ""
        self._computations, _ = parse(text)
        self._callers: dict[str, list[tuple[str, Instruction]]] = defaultdict(list)
        for name, computation in self._computations.items():
            for each in computation.instructions.values():
                for callee in each.callees:
                    self._callers[callee].append((name, each))
        self._users: dict[str, list[Instruction]] = defaultdict(list)
        for computation in self._computations.values():
            for each in computation.instructions.values():
                for operand in each.operands:
                    self._users[operand].append(each)
        self._inside: dict[str, frozenset[str]] = {}
        self._used: dict[str, frozenset[str | None]] = {}
        self._around: dict[str, str | None] = {}
        self.ops = {
            each.name: Known(self._part(each, name), _kind(each))
            for name, computation in self._computations.items()
            for each in computation.instructions.values()
        }

    def _part(self, each: Instruction, home: str) -> str | None:
        """By its own scope, else of all that it runs, of what runs it, or of all that use it.

        Only what the compiler added has the part of those that use it: it has no scope at all.
        """
        if own := _scope(each):
            return own
        inside = set[str]().union(*map(self._parts_inside, each.callees))
        if len(inside) == 1:
            return inside.pop()
        if around := self._part_around(home):
            return around
        users = set() if _PATH.search(each.attributes) else self._parts_of_users(each.name)
        return next(iter(users)) if len(users) == 1 else None

    def _parts_of_users(self, name: str) -> frozenset[str | None]:
        if name not in self._used:
            found: set[str | None] = set()
            for each in self._users[name]:
                inside = set[str]().union(*map(self._parts_inside, each.callees))
                if own := _scope(each):
                    found.add(own)
                elif inside or _PATH.search(each.attributes):
                    found.update(inside or {None})
                else:
                    found |= self._parts_of_users(each.name)
            self._used[name] = frozenset(found)
        return self._used[name]

    def _parts_inside(self, name: str) -> frozenset[str]:
        if name not in self._inside:
            found: set[str] = set()
            for each in self._computations[name].instructions.values():
                own = _scope(each)
                found.update({own} if own else set().union(*map(self._parts_inside, each.callees)))
            self._inside[name] = frozenset(found)
        return self._inside[name]

    def _part_around(self, name: str) -> str | None:
        if name not in self._around:
            found = {_scope(each) or self._part_around(home) for home, each in self._callers[name]}
            self._around[name] = found.pop() if len(found) == 1 else None
        return self._around[name]


def _scope(each: Instruction) -> str | None:
    """The outermost part among the named scopes that the op was traced in."""
    path = _PATH.search(each.attributes)
    return next((scope for scope in path[1].split("/") if scope in PARTS), None) if path else None


def _kind(each: Instruction) -> str:
    target = _TARGET.search(each.attributes) if each.opcode == "custom-call" else None
    return f"{each.opcode} {target[1]}" if target else each.opcode


def describe(ops: Iterable[Op], programs: Sequence[Program]) -> dict[Op, Known]:
    """What the programs' texts say of ops that ran; ops of other programs are left out.

    A trace numbers programs in a way of its own. So a program is recognised by its module's name
    and by its ops: it is the smallest that has them all.
    """
    ran: dict[tuple[str, int], set[Op]] = defaultdict(set)
    for op in ops:
        ran[op.module, op.program].add(op)
    found: dict[Op, Known] = {}
    for (module, _), own in ran.items():
        names = {op.name for op in own}
        fits = [each for each in programs if each.module == module and names <= each.ops.keys()]
        if fits:
            program = min(fits, key=lambda each: len(each.ops))
            found |= {op: program.ops[op.name] for op in own}
    return found
