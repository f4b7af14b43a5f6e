"""Says what pydantic refuses in the words of our own messages."""

import re

import pydantic

_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid string": "text",
    "a valid boolean": "true or false",
    "a valid tuple": "a list",
    "a valid dictionary": "a mapping",
}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}
"""pydantic's wording -> ours."""


def explain(error: pydantic.ValidationError) -> str:
    """Names the first key that pydantic refuses, its value, and what it should be."""
    first = error.errors(include_url=False)[0]
    place, value, message = first["loc"], first["input"], first["msg"]
    context = first.get("ctx", {})
    is_key = place[-1:] == ("[key]",)
    where = ".".join(map(str, place[:-2] if is_key else place))
    where = f"a key of {where}" if is_key else where
    if first["type"] == "unknown_key":
        unknown = ".".join(map(str, (*place, context["key"])))
        return f"unknown key {unknown!r}.{message}"
    if first["type"] == "missing":
        return f"{where} is missing; add it."
    if first["type"] == "choice":
        return f"{where} is {value!r}.{message}"
    for bound in _BOUNDS.keys() & context.keys():
        message = f"it should be {_BOUNDS[bound]} {context[bound]}".removesuffix(".0")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours)
    return f"{where} is {value!r}; {re.sub('^[A-Z][a-z]+ should', 'it should', message)}."
