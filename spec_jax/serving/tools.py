"""The functions that a request offers to the model, and what it may do with them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from spec_jax.serving.errors import wrong
from spec_jax.serving.fields import Fields
from spec_jax.serving.parsing import Format


@dataclasses.dataclass(frozen=True)
class Tools:
    """The fields `tools` and `tool_choice`.

    Attributes:
      described: the tools that the chat template describes to the model.
      format: how calls are found in the answer; None if there are none.
      names: of the functions that may be called; None without any.
      schema: JSON schema of an answer that must be a call; None if it need not.
    """

    described: Sequence[Mapping[str, Any]] = ()
    format: Format | None = None
    names: Sequence[str] | None = None
    schema: dict[str, Any] | None = None

    @classmethod
    def of(cls, fields: Fields, format: Format | None) -> "Tools":
        """The tools of a request.

        Args:
          fields: its fields.
          format: in which the model calls tools by itself; None if its chat template knows none.
        """
        tools = fields.take("tools", list, [])
        choice = fields.take("tool_choice", (str, dict))
        several = fields.take("parallel_tool_calls", bool, True)
        functions = [_function(each) for each in tools]
        names = [each["name"] for each in functions]
        if choice in (None, "auto") and tools:
            if format is None:
                raise wrong(
                    "tools",
                    "tools are given, and the model's chat template has no place for them; leave "
                    "them out, or set tool_choice to 'required'.",
                )
            return cls(tools, format, names)
        if choice in (None, "auto", "none"):
            return cls()
        if not tools:
            raise wrong("tool_choice", f"tool_choice is {choice!r}, and there are no tools.")
        if isinstance(choice, dict):
            name = (choice.get("function") or choice).get("name")
            functions = [each for each in functions if each["name"] == name]
            if not functions:
                raise wrong(
                    "tool_choice",
                    f"tool_choice names {name!r}; the tools are {', '.join(names)}.",
                )
            several = False
        elif choice != "required":
            raise wrong(
                "tool_choice",
                f"tool_choice is {choice!r}; give 'none', 'auto', 'required' or one of the tools.",
            )
        described = tools if format is not None else ()
        return cls(described, "json", names, _schema(functions, several))


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong(
            "tools",
            f"tools holds {str(tool)[:100]}; give {{'type': 'function', 'function': {{'name': ..., "
            "'parameters': {...}}}.",
        )
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise wrong("tools", f"the parameters of tool {function['name']!r} are not an object.")
    return function


def _schema(functions: Sequence[Mapping[str, Any]], several: bool) -> dict[str, Any]:
    """Of a list of calls; definitions, which references name from the top, are moved there."""
    definitions: dict[str, Any] = {}
    items = []
    for function in functions:
        parameters = dict(function.get("parameters") or {"type": "object"})
        for key in ("$defs", "definitions"):
            if isinstance(inner := parameters.pop(key, None), Mapping):
                definitions.setdefault(key, {}).update(inner)
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": function["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    return schema | ({} if several else {"maxItems": 1}) | definitions
