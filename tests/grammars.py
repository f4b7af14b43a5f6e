"""Random grammars that are small enough to be walked to their end, each with its own judge."""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

LETTERS = "abc"


class RandomGrammar(NamedTuple):
    """A grammar and who decides what belongs to it, without the parser under test.

    Attributes:
      params: the field of `StructuredOutputsParams` that asks for it.
      accepts: whether a text is a whole output.
    """

    params: dict[str, Any]
    accepts: Callable[[str], bool]


def random_grammars(count: int, seed: int = 0) -> Iterator[RandomGrammar]:
    """JSON schemas and grammars of the other kinds in turn; the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    others = itertools.cycle([_regex, _rules, _regex, _choice])
    for i in range(count):
        yield next(others)(rng) if i % 2 else _json_schema(rng)


def _regex(rng: np.random.Generator) -> RandomGrammar:
    expression = random_regex(rng)
    return RandomGrammar(
        {"regex": expression}, lambda text: re.fullmatch(expression, text) is not None
    )


def _choice(rng: np.random.Generator) -> RandomGrammar:
    count = int(rng.integers(1, 5))
    texts = [
        "".join(rng.choice([*LETTERS, *".+(|é\n"], int(rng.integers(1, 6)))) for _ in range(count)
    ]
    return RandomGrammar({"choice": texts}, lambda text: text in texts)


def _rules(rng: np.random.Generator) -> RandomGrammar:
    """A context-free grammar of few texts, in Lark's syntax or in GBNF; all are written out."""
    is_lark = rng.random() < 0.5
    sign, last = (":", "start") if is_lark else ("::=", "root")
    names, texts, lines = [], {}, []
    for name in ("x", "y", last):
        alternatives, spelt = [], set()
        for _ in range(int(rng.integers(1, 4))):
            parts = [
                str(each)
                for each in rng.choice([*LETTERS, "(", "é", *names], int(rng.integers(1, 4)))
            ]
            alternatives.append(" ".join(part if part in names else f'"{part}"' for part in parts))
            spelt |= {
                "".join(each) for each in itertools.product(*(texts.get(p, {p}) for p in parts))
            }
        lines.append(f"{name} {sign} {' | '.join(alternatives)}")
        texts[name] = spelt
        names.append(name)
    return RandomGrammar({"grammar": "\n".join(lines)}, lambda text: text in texts[last])


def random_regex(rng: np.random.Generator, depth: int = 3) -> str:
    """An expression that matches a finite number of short texts, never only the empty one."""
    kind = rng.choice(["letter", "class", "concat", "either", "repeat"]) if depth else "letter"
    if kind == "letter":
        return str(rng.choice([*LETTERS, "é", "\\."]))
    if kind == "class":
        return str(rng.choice(["[ab]", "[a-c0-1]", "(?:ab|ac)"]))
    parts = [random_regex(rng, depth - 1) for _ in range(int(rng.integers(2, 4)))]
    if kind == "concat":
        return "".join(f"(?:{part})" for part in parts)
    if kind == "either":
        return "|".join(parts)
    low = int(rng.integers(0, 3))
    return f"(?:{parts[0]}){{{low},{low + int(rng.integers(1, 3))}}}"


class _Schema(NamedTuple):
    schema: dict[str, Any]
    accepts: Callable[[Any], bool]


def _json_schema(rng: np.random.Generator) -> RandomGrammar:
    schema, accepts = _value(rng, depth=2)

    def is_whole(text: str) -> bool:
        try:
            return accepts(json.loads(text))
        except ValueError:
            return False

    # Spaces between tokens are allowed without end; a random walk would seldom leave them.
    compact = {"x-guidance": {"whitespace_flexible": False}, **schema}
    return RandomGrammar({"json": compact}, is_whole)


def _value(rng: np.random.Generator, depth: int) -> _Schema:
    leaves = [_constant, _integer, _string, _enum]
    kinds = [*leaves, _array, _object, _object, _either] if depth else leaves
    return kinds[int(rng.integers(len(kinds)))](rng, depth)


def _constant(rng: np.random.Generator, depth: int) -> _Schema:
    kind = str(rng.choice(["boolean", "null"]))
    types: dict[str, type] = {"boolean": bool, "null": type(None)}
    return _Schema({"type": kind}, lambda value: isinstance(value, types[kind]))


def _integer(rng: np.random.Generator, depth: int) -> _Schema:
    low = int(rng.integers(-20, 20))
    high = low + int(rng.integers(0, 120))
    return _Schema(
        {"type": "integer", "minimum": low, "maximum": high},
        lambda value: type(value) is int and low <= value <= high,
    )


def _string(rng: np.random.Generator, depth: int) -> _Schema:
    if rng.random() < 0.5:
        low = int(rng.integers(0, 3))
        high = low + int(rng.integers(0, 3))
        return _Schema(
            {"type": "string", "minLength": low, "maxLength": high},
            lambda value: isinstance(value, str) and low <= len(value) <= high,
        )
    pattern = f"^(?:{random_regex(rng, 2)})$"
    return _Schema(
        {"type": "string", "pattern": pattern},
        lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None,
    )


def _enum(rng: np.random.Generator, depth: int) -> _Schema:
    words = [str(word) for word in rng.choice(["a", "ab", "abc", "b\n", "é"], 3, replace=False)]
    return _Schema({"enum": words}, lambda value: value in words)


def _array(rng: np.random.Generator, depth: int) -> _Schema:
    item = _value(rng, depth - 1)
    low = int(rng.integers(0, 2))
    high = low + int(rng.integers(0, 3))
    return _Schema(
        {"type": "array", "items": item.schema, "minItems": low, "maxItems": high},
        lambda value: (
            isinstance(value, list) and low <= len(value) <= high and all(map(item.accepts, value))
        ),
    )


def _object(rng: np.random.Generator, depth: int) -> _Schema:
    fields = {name: _value(rng, depth - 1) for name in LETTERS[: int(rng.integers(1, 4))]}
    required = [name for name in fields if rng.random() < 0.6]

    def accepts(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and set(required) <= set(value) <= set(fields)
            and all(fields[name].accepts(each) for name, each in value.items())
        )

    schema = {
        "type": "object",
        "properties": {name: field.schema for name, field in fields.items()},
        "required": required,
        "additionalProperties": False,
    }
    return _Schema(schema, accepts)


def _either(rng: np.random.Generator, depth: int) -> _Schema:
    several = [_value(rng, depth - 1) for _ in range(2)]
    return _Schema(
        {"anyOf": [each.schema for each in several]},
        lambda value: any(each.accepts(value) for each in several),
    )
