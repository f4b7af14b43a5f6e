"""The words of docs/glossary.md: one word a concept, and plain sentences.

A room is a folder that the rules hold for as a whole: a package of `spec_jax`, a folder of tests,
or a top-level folder. Rooms in `NOT_YET` still have to be converted.
"""

import ast
import collections
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

NOT_YET: set[str] = set()
"""Rooms that are not converted yet."""

PHRASES = {
    r"\b(those|that) of\b": "repeat the noun",
    r"\bof (its|their) own\b": "own, separate",
    r"\blikewise\b": "also, in the same way",
    r"\bso many\b": "this many, the same number",
    r"\bwhole numbers?\b": "integer",
    r"\bfew bits\b": "quantized",
    r"\bat need\b": "when needed, on demand",
    r"\ball the same\b": "anyway",
    r"\b(go|goes|going|went) on with\b": "continue with, resume",
    r"(?<!as long )(?<!as much )(?<!same )\bas (of|for)\b": "the same as for, like",
    r"(?<!there )\b(is|are|was) no (?!longer\b|\w+er\b|more\b|less\b)": "is not a",
    r"\bis what\b": "name the thing",
    r"\b(sound|sounds) files?\b": "audio file",
    r"\bmodels? of speech\b": "speech model",
    r"\bto no purpose\b": "for nothing, unused",
    r"\brefused? (drafted |draft )?(tokens?|ones?|candidates?)\b(?! of)": "reject",
    r"\bnoises\b": "random audio",
    r"\b(of sound|(a|the) sound(?! \w)|(the|several) sounds)\b": "audio, an audio file",
}
"""Phrases that have to be read twice -> the plain words instead."""

LOCALS = {
    *("found", "own", "known", "said", "wanted", "given", "whole", "asked", "kept", "rest"),
}
"""Names of variables and parameters that do not say what they hold."""

SUPERLATIVES = re.compile(r"_?(MOST|LEAST|FEWEST|LONG|NARROW)(_|$)")
"""Names of limits: `MAX_` and `MIN_` instead."""

STORES = {"spec_jax", "spec_jax/checkpoints", "spec_jax/cli", "spec_jax/models"}
"""Rooms that may speak of a bucket: a folder of an object store, or T5's buckets of distances."""

ALLOWED = ("docs/glossary.md", "tests/test_language.py")
"""Files that name the words in order to ban them."""

TEXTS = ("*.md", "*.py", "*.sh", "*.sbatch", "*.toml", "*.yaml", "*.cpp", "*.h")
IGNORED = {"log", "_build", "layouts", "recipes", "results"}
"""Folders whose files are history, made by a program, or a second view of another folder."""


def files() -> Iterator[Path]:
    """Everything that people read, except the changelog and the log of measurements."""
    for folder in ("spec_jax", "tests", "benchmarks", "docs", "launch", "sharding", "checkpoints"):
        for pattern in TEXTS:
            for path in sorted((ROOT / folder).rglob(pattern)):
                inside = path.relative_to(ROOT)
                if not IGNORED & set(inside.parts) and str(inside) not in ALLOWED:
                    yield path
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))
    yield from (ROOT / name for name in ("pyproject.toml", "constraints.txt", "launch/Dockerfile"))


def room(path: Path) -> str:
    parts = path.relative_to(ROOT).parts
    return "/".join(parts[: 2 if parts[0] in ("spec_jax", "tests") and len(parts) > 2 else 1])


FILES = list(files())
ROOMS = sorted({room(path) for path in FILES})
PACKAGE = [path for path in FILES if path.suffix == ".py" and room(path).startswith("spec_jax")]


def squeeze(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Neighbouring comments of a Python file as one text."""
    lines: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            if lines and token.start[0] > last + 1:
                yield first, squeeze(" ".join(lines))
                lines = []
            first = token.start[0] if not lines else first
            last = token.start[0]
            lines.append(token.string.lstrip("# "))
    if lines:
        yield first, squeeze(" ".join(lines))


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Docstrings of modules, classes and functions, and the texts below constants and fields."""
    for node in ast.walk(tree):
        for child in getattr(node, "body", []) if isinstance(node, DOCUMENTED) else []:
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, squeeze(value.value)


def strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, squeeze(node.value)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of all that a file tells its readers."""
    text = path.read_text()
    if path.suffix == ".py":
        tree = ast.parse(text)
        yield from comments(path)
        # Strings of the tests are data; those of the package are errors and help.
        yield from docstrings(tree) if room(path).startswith("tests") else strings(tree)
    elif path.suffix == ".md":
        line = 1
        for paragraph in re.split(r"(\n\s*\n)", text):
            yield line, squeeze(paragraph)
            line += paragraph.count("\n")
    else:
        mark = "//" if path.suffix in (".cpp", ".h") else "#"
        for line, each in enumerate(text.splitlines(), start=1):
            if mark in each:
                yield line, each.partition(mark)[2]


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def banned_phrases(path: Path) -> Iterator[str]:
    for line, text in prose(path):
        for pattern, plain in PHRASES.items():
            for match in re.finditer(pattern, text, re.IGNORECASE):
                near = text[max(match.start() - 30, 0) : match.end() + 30]
                yield f"{where(path, line)}: ...{near}... (say: {plain})"


@pytest.mark.parametrize("name", [name for name in ROOMS if name not in NOT_YET])
def test_prose_is_plain(name):
    assert [each for path in FILES if room(path) == name for each in banned_phrases(path)] == []


def assigned(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that code binds: variables, parameters, targets of loops."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def defined(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names of functions, methods and members of classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                for target in getattr(member, "targets", []):
                    names = target.elts if isinstance(target, ast.Tuple) else [target]
                    yield from ((name.lineno, name.id) for name in names)


def wrong_names(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for line, name in assigned(tree):
        if name in LOCALS:
            yield f"{where(path, line)}: {name} (use a noun that says what it holds)"
        if SUPERLATIVES.match(name):
            yield f"{where(path, line)}: {name} (MAX_ or MIN_)"
    for line, name in defined(tree):
        if name in ("join", "join_rows"):
            yield f"{where(path, line)}: {name} (insert)"
    if room(path) not in STORES:
        for line, text in [*assigned(tree), *defined(tree), *comments(path), *strings(tree)]:
            if re.search("bucket", text, re.IGNORECASE):
                yield f"{where(path, line)}: bucket (BatchShape, or the shapes of a program)"


@pytest.mark.parametrize(
    "name", [name for name in ROOMS if name.startswith("spec_jax") and name not in NOT_YET]
)
def test_names_are_of_the_glossary(name):
    assert [each for path in PACKAGE if room(path) == name for each in wrong_names(path)] == []


def test_no_class_name_occurs_twice():
    places = collections.defaultdict(list)
    for path in PACKAGE:
        if room(path) not in NOT_YET:
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(where(path, node.lineno))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_rooms_to_convert_exist():
    assert set(ROOMS) >= NOT_YET


EXAMPLES = (
    *("those of", "of its own", "likewise", "so many", "whole number", "few bits", "at need"),
    *("all the same", "goes on with", "as of a row", "it is no file", "is what", "sound file"),
    *(
        "model of speech",
        "to no purpose",
        "a refused token",
        "it makes noises",
        "two of the sounds",
    ),
)
PLAIN = (
    *("there is no file", "it is no longer here", "it is no larger", "as long as for one row"),
    *("the compiler refused one of them", "a sound proof"),
)


@pytest.mark.parametrize("pattern, example", list(zip(PHRASES, EXAMPLES, strict=True)))
def test_a_rule_sees_what_it_bans_and_nothing_else(pattern, example):
    assert re.search(pattern, example) and not any(re.search(pattern, each) for each in PLAIN)
