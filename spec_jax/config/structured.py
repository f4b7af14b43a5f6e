"""What structured outputs look like."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_jax.config.fields import Text, config_class, to_json, to_tuple
from spec_jax.errors import ConfigError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OF_THE_GRAMMAR = "leave it out, or say it in the schema or the grammar"


@config_class
class StructuredOutputsParams:
    """What the whole output must be; exactly one of these. Names as in vLLM.

    Attributes:
      json: JSON of this schema; a mapping or JSON text. It is kept as text.
      regex: a text that matches this regular expression (syntax of Rust's regex crate).
      choice: one of these texts.
      grammar: a text of this context-free grammar: Lark's syntax, which begins at the rule `start`,
        or GBNF (`root ::= ...`), which begins at `root`.
      json_object: any JSON object.
    """

    json: Annotated[Mapping[str, Any] | str | None, BeforeValidator(to_json)] = None
    regex: Text | None = None
    choice: Annotated[Sequence[Text], Field(min_length=1), BeforeValidator(to_tuple)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None

    ELSEWHERE: ClassVar[Mapping[str, str]] = {
        "disable_any_whitespace": _OF_THE_GRAMMAR,
        "disable_additional_properties": _OF_THE_GRAMMAR,
        "whitespace_pattern": _OF_THE_GRAMMAR,
        "structural_tag": "use grammar",
    }

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(KINDS)}."
            )

    @property
    def kind(self) -> str:
        """Which of them is given."""
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
