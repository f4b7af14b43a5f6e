"""Says what pydantic refuses, by name, with the value and what it should be."""

import re

import pydantic

from spec_jax.errors import did_you_mean

_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most"}
_CHOICE = re.compile("'(.*?)'")


def explain(error: pydantic.ValidationError) -> str:
    """Names the first key that pydantic refuses, its value, and what it should be."""
    first = error.errors(include_url=False)[0]
    place, value, context = first["loc"], first["input"], first.get("ctx", {})
    name = ".".join(map(str, place))
    if place[-1:] == ("[key]",):
        name = f"a key of {'.'.join(map(str, place[:-2]))}"
    if first["type"] == "unknown_key":
        return f"unknown key {'.'.join(map(str, (*place, context['key'])))!r}.{context['hint']}"
    if first["type"] == "missing":
        return f"{name} is missing; add it."
    if first["type"] == "literal_error":
        hint = did_you_mean(str(value), _CHOICE.findall(context["expected"]))
        return f"{name} is {value!r}.{hint}"
    message = re.sub("^[A-Z][a-z]+ should", "it should", first["msg"])
    for bound in _BOUNDS.keys() & context.keys():
        message = f"it should be {_BOUNDS[bound]} {context[bound]}".removesuffix(".0")
    return f"{name} is {value!r}; {message}."
