"""What a compiled program does in its loops, read from its text."""

import math
import re
from collections import Counter
from collections.abc import Iterator

import jax

from spec_jax.planning import hlo

MOVES = ("copy", "copy-start", "transpose")


def dimensions(shape: str) -> tuple[int, ...]:
    """The sizes of an array's axes in order of size, without axes of one: `f32[1,5,3]` is (3, 5).

    A copy may merge or turn axes; nothing else of a test's models has the sizes of a weight.
    """
    inside = re.search(r"\[([\d,]*)\]", shape)
    sizes = [int(size) for size in inside[1].split(",") if size] if inside else []
    return tuple(sorted(size for size in sizes if size > 1))


def held(*trees) -> set[tuple[int, ...]]:
    """The sizes that a device holds of each matrix and each cache, but not of what rows have."""
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(trees)]
    sizes = (tuple(sorted(size for size in shape if size > 1)) for shape in shapes)
    return {size for size in sizes if len(size) > 1 and math.prod(size) > 10_000}


def moved_in_loops(program: str) -> Counter[tuple[int, ...]]:
    """The sizes of the arrays that loops copy or transpose, and by how many instructions.

    What stands inside a fusion and is not its result takes no memory, and does not count. Nor does
    what a TPU moves to or from its nearer memories, S(1) and S(3) in the text.
    """
    computations, _ = hlo.parse(program)
    inside: set[str] = set()

    def enter(name: str) -> None:
        if name not in inside:
            inside.add(name)
            for each in computations[name].instructions.values():
                if each.opcode != "fusion":
                    for callee in each.callees:
                        enter(callee)

    for computation in computations.values():
        for each in computation.instructions.values():
            if each.opcode == "while":
                enter(each.callee("body"))

    def results(each: hlo.Instruction) -> Iterator[hlo.Instruction]:
        """The instruction, or those that make the results of a fusion."""
        if each.opcode != "fusion":
            yield each
            return
        (name,) = each.callees
        fused = computations[name]
        root = fused.instructions[fused.root]
        parts = root.operands if root.opcode == "tuple" else [root.name]
        yield from (fused.instructions[part] for part in parts)

    return Counter(
        dimensions(result.shape)
        for name in inside
        for each in computations[name].instructions.values()
        for result in results(each)
        if result.opcode in MOVES and not re.search(r"S\([1-9]", result.laid_out + each.laid_out)
    )


def elements_read(program: str, stack: tuple[int, ...]) -> int:
    """Elements that one run reads of all arrays of this shape, a loop's in each iteration.

    A slice reads what it gives out, everything else the whole array; of a conditional the branch
    that reads more counts.
    """
    computations, entry = hlo.parse(program)
    shape = f"[{','.join(map(str, stack))}]"
    passes = ("get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "fusion")
    fused = {
        name
        for computation in computations.values()
        for each in computation.instructions.values()
        if each.opcode == "fusion"
        for name in each.callees
    }

    def count(name: str) -> int:
        computation = computations[name]
        return sum(
            of(each, computation, name in fused) for each in computation.instructions.values()
        )

    def of(each: hlo.Instruction, computation: hlo.Computation, is_fused: bool) -> int:
        if each.opcode == "while":
            return hlo.iterations(computations, each) * count(each.callee("body"))
        if each.opcode == "conditional":
            return max(count(name) for name in each.callees)
        inside = sum(count(name) for name in each.callees)
        # Inside a fusion only the elements that its result needs are computed.
        if each.opcode in passes or (is_fused and each.opcode == "convert"):
            return inside
        stacks = [
            name
            for name in each.operands
            if name in computation.instructions
            and computation.instructions[name].shape.endswith(shape)
        ]
        if stacks and each.opcode == "dynamic-slice":
            return inside + math.prod(dimensions(each.shape))
        return inside + len(stacks) * math.prod(stack)

    return count(entry)
