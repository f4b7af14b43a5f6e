"""What structured outputs look like."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_jax.config.fields import Flag, Text, config_class, to_json, to_tuple
from spec_jax.errors import ConfigError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_IN_THE_GRAMMAR = "leave it out, or say it in the schema or the grammar"


@config_class
class StructuredOutputsParams:
    """What the whole output must be: exactly one of these. Names as in vLLM."""

    json: Annotated[
        Mapping[str, Any] | str | None,
        BeforeValidator(to_json),
        Flag(name="json-schema", metavar="JSON"),
    ] = None
    """The output is JSON of this schema: a mapping or JSON text. It is kept as text."""
    regex: Annotated[Text | None, Flag(metavar="REGEX")] = None
    """The output matches this regular expression (syntax of Rust's regex crate)."""
    choice: Annotated[Sequence[Text], Field(min_length=1), BeforeValidator(to_tuple)] | None = None
    """The output is one of these texts."""
    grammar: Text | None = None
    """The output is of this grammar: Lark's syntax, which begins at the rule `start`, or GBNF
    (`root ::= ...`), which begins at `root`."""
    json_object: Annotated[bool | None, Flag(hidden=True)] = None
    """The output is any JSON object."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = {
        "disable_any_whitespace": _IN_THE_GRAMMAR,
        "disable_additional_properties": _IN_THE_GRAMMAR,
        "whitespace_pattern": _IN_THE_GRAMMAR,
        "structural_tag": "use grammar",
    }

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(kinds) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(kinds) or 'nothing'}; give exactly one of "
                f"{', '.join(KINDS)}."
            )

    @property
    def kind(self) -> str:
        """The name of the form that is given."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))


def to_structured(value: Any) -> Any:
    """A mapping as `StructuredOutputsParams`."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise PydanticCustomError(
            "structured_outputs", "It should be StructuredOutputsParams(...) or a mapping"
        )
    return StructuredOutputsParams(**{str(name): each for name, each in value.items()})
