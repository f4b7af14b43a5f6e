"""Plants bugs in a copy of the package; finds the code by function name and syntax tree."""

import ast
import dataclasses
import string
from collections.abc import Iterator
from pathlib import Path

REST = "REST"
"""In a call of a pattern, `*REST` stands for all further arguments, positional and by keyword."""


@dataclasses.dataclass(frozen=True)
class PlantedBug:
    """One edit: `right` becomes `wrong` in a named function.

    In `right`, a single capital letter stands for any expression, and for the same expression each
    time that it occurs; `wrong` may use these letters. Formatting and comments do not matter.

    Attributes:
      module: path of the module inside the package.
      function: qualified name of the function, as in `Class.method.nested`.
      right: an expression or a `return` statement that the function has exactly once.
      wrong: what it becomes.
      selection: arguments for pytest; one of these tests must fail.
    """

    module: str
    function: str
    right: str
    wrong: str
    selection: list[str]

    def planted(self, source: str) -> str:
        """The source of the module with the bug; an AssertionError if the code has changed."""
        where = f"`{self.function}` of {self.module}"
        function = _function(ast.parse(source), self.function.split("."))
        assert function is not None, f"there is no {where}: plant the bug anew"
        pattern = _one(self.right)
        matches = [
            (node, captured)
            for node in ast.walk(function)
            if (captured := _matched(pattern, node, {})) is not None
        ]
        assert len(matches) == 1, (
            f"{where} holds `{self.right}` {len(matches)} times: plant the bug anew"
        )
        node, captured = matches[0]
        replacement = ast.unparse(_Substitution(captured).visit(_one(self.wrong)))
        if isinstance(node, ast.expr):
            replacement = f"({replacement})"
        begin, end = _span(source, node)
        content = source.encode()
        edited = (content[:begin] + replacement.encode() + content[end:]).decode()
        compile(edited, self.module, "exec")
        return edited

    def plant(self, package: Path) -> None:
        """Edits the module in a copy of the package."""
        path = package / self.module
        path.write_text(self.planted(path.read_text()))


def _function(tree: ast.AST, names: list[str]) -> ast.AST | None:
    for name in names:
        kinds = ast.FunctionDef | ast.ClassDef
        tree = next((n for n in _scope(tree) if isinstance(n, kinds) and n.name == name), None)
        if tree is None:
            return None
    return tree


def _scope(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module, class or function without those inside its own definitions."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _scope(node)


def _one(text: str) -> ast.AST:
    (statement,) = ast.parse(text).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _matched(pattern, node, captured: dict[str, ast.AST]) -> dict[str, ast.AST] | None:
    """What the letters of the pattern stand for, or None if the node is something else."""
    if isinstance(pattern, ast.Name) and pattern.id in string.ascii_uppercase:
        if not isinstance(node, ast.expr):
            return None
        if pattern.id in captured:
            return _matched(captured[pattern.id], node, captured)
        return captured | {pattern.id: node}
    if type(pattern) is not type(node):
        return None
    if isinstance(pattern, list):
        if len(pattern) != len(node):
            return None
        return _all_matched(zip(pattern, node, strict=True), captured)
    if not isinstance(pattern, ast.AST):
        return captured if pattern == node else None
    fields = [name for name in pattern._fields if name not in ("ctx", "kind")]
    pairs = [(getattr(pattern, name), getattr(node, name)) for name in fields]
    if isinstance(pattern, ast.Call) and pattern.args and _is_rest(pattern.args[-1]):
        count = len(pattern.args) - 1
        others = ast.Call(ast.Name(REST), node.args[count:], node.keywords)
        pairs = [(pattern.func, node.func), (pattern.args[:-1], node.args[:count])]
        captured = captured | {REST: others}
    return _all_matched(pairs, captured)


def _all_matched(pairs, captured):
    for pattern, node in pairs:
        captured = _matched(pattern, node, captured)
        if captured is None:
            return None
    return captured


def _is_rest(node: ast.AST) -> bool:
    return isinstance(node, ast.Starred) and getattr(node.value, "id", None) == REST


class _Substitution(ast.NodeTransformer):
    """Puts what was captured for the letters of a pattern."""

    def __init__(self, captured: dict[str, ast.AST]):
        self.captured = captured

    def visit_Name(self, node):
        return self.captured.get(node.id, node)

    def visit_Call(self, node):
        if node.args and _is_rest(node.args[-1]):
            rest = self.captured[REST]
            node = ast.Call(node.func, node.args[:-1] + rest.args, node.keywords + rest.keywords)
        return self.generic_visit(node)


def _span(source: str, node: ast.AST) -> tuple[int, int]:
    """The bytes of the source that a node takes."""
    lines = [0]
    for line in source.encode().split(b"\n"):
        lines.append(lines[-1] + len(line) + 1)
    return lines[node.lineno - 1] + node.col_offset, lines[
        node.end_lineno - 1
    ] + node.end_col_offset
