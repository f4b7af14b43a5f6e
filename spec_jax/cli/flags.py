"""Flags made from classes of options: names, types, defaults and help come from their fields.

A field that holds a class of options gives the flags of that class, as a group. Imports no JAX.
"""

import ast
import dataclasses
import functools
import inspect
import re
import shlex
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from spec_jax.cli.parser import Parser, integer, integers, number, several
from spec_jax.config import (
    CUSTOM,
    METHODS,
    Flag,
    SpeculativeConfig,
    all_options,
    annotations_of,
    choices_of,
    option_names,
)
from spec_jax.errors import ConfigError

T = TypeVar("T")
_PARSERS: dict[type, tuple[Callable[[str], Any], Callable[[str], Any], str]] = {
    int: (integer, integers, "N"),
    float: (number, several(number), "X"),
    str: (str, several(str), "TEXT"),
    Path: (Path, Path, "FILE"),
}
"""Type -> what reads one value, what reads several with commas between them, and a metavar."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Which options of a nested class a command has, in `Annotated`.

    Attributes:
      title: of the group; the field's name if empty.
      only: their names; all if empty.
      without: the others' names.
      defaults: the command's defaults, in words.
      of: the class, for a field that holds a mapping of its options.
    """

    title: str = ""
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    of: type | None = None


class _Option:
    """A field of a class of options, with what its annotation says."""

    def __init__(self, owner: type, name: str):
        annotation = annotations_of(owner)[name]
        (field,) = (each for each in dataclasses.fields(owner) if each.name == name)
        marks = _marks(annotation)
        self.owner, self.name = owner, name
        self.flag = next((each for each in marks if isinstance(each, Flag)), Flag())
        self.group = next((each for each in marks if isinstance(each, Group)), Group())
        self.kind, self.is_sequence = (object, False) if self.flag.read else _kind(annotation)
        make: Any = field.default_factory
        self.default = field.default if make is dataclasses.MISSING else make()
        self.needed = self.default is dataclasses.MISSING
        kind = self.group.of or self.kind
        self.nested: Any = kind if dataclasses.is_dataclass(kind) else None
        """The class of options that the field holds, if any."""
        self.flag_name = self.flag.name or name.replace("_", "-")
        self.has_commas = self.is_sequence and (self.flag.commas or self.kind in (int, float))
        choices = choices_of(annotation)
        if owner is SpeculativeConfig and name == "method":
            choices = tuple(each for each in METHODS if each != CUSTOM)
        self.metavar = self.flag.metavar or "|".join(choices)
        if not self.metavar and self.kind in _PARSERS:
            self.metavar = _PARSERS[self.kind][2]
        if self.has_commas and "," not in self.metavar:
            self.metavar += ",..."


def parse(command: str, options: type[T], arguments: Sequence[str]) -> T:
    """The options that arguments give.

    Raises:
      ConfigError: an argument is missing, unknown, malformed or out of range, or two contradict
        each other.
    """
    parser = make_parser(command, options, bool({"-h", "--help"} & set(arguments)))
    values: dict[str, Any] = {}
    for place, value in parser.parse(arguments).items():
        *groups, name = place.split(".")
        inner = functools.reduce(lambda each, group: each.setdefault(group, {}), groups, values)
        inner[name] = tuple(value) if isinstance(value, list) else value
    for option in _options(options):
        if option.name == "command":
            values["command"] = f"spec-jax {command} {shlex.join(arguments)}"
        if option.needed and not values.get(option.name):
            remedy = option.flag.remedy or f"give --{option.flag_name}"
            raise ConfigError(f"no {option.name.replace('_', ' ')} given; {remedy}.")
    complete: Callable[[dict[str, Any]], None] = getattr(options, "complete", lambda values: None)
    complete(values)
    for option in _options(options):
        if option.nested and not option.group.of and option.name in values:
            values[option.name] = option.nested(**values[option.name])
    return options(**values)


def make_parser(command: str, options: type, explain: bool = True) -> Parser:
    """The parser of a command's flags, for help texts with the fields' documentation."""
    operands, needed_flags = [], []
    for option in _options(options):
        if option.flag.positional:
            operand = f"{option.metavar}{'...' if option.is_sequence else ''}"
            operands.append(operand if option.needed else f"[{operand}]")
        elif option.needed:
            needed_flags.append(f"--{option.flag_name} {option.metavar}")
    summary, _, epilog = (inspect.getdoc(options) or "").partition("\n\n")
    parser = Parser(command, " ".join(operands + needed_flags), summary, epilog)
    _add(parser, options, Group(), "", None, explain)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


@functools.cache
def documentation(config: type) -> dict[str, str]:
    """The docstrings below the fields of a class and its bases."""
    texts: dict[str, str] = {}
    for base in reversed(config.__bases__):
        texts |= documentation(base)
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    except (OSError, TypeError):
        return texts
    assert isinstance(definition, ast.ClassDef)
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(value))):
                texts[name] = inspect.cleandoc(value)
    return texts


def _add(
    parser: Parser, options: type, chosen: Group, path: str, group: Any, explain: bool
) -> None:
    groups: dict[str | None, Any] = {None: parser}
    for option in _options(options):
        left_out = chosen.only and option.name not in chosen.only
        if left_out or option.name in chosen.without or option.flag.hidden:
            continue
        place = f"{path}{option.name}"
        text = documentation(option.owner).get(option.name, "") if explain else ""
        if option.nested:
            title = option.group.title or option.name.replace("_", " ")
            inner = group or parser.add_argument_group(title, text or None)
            _add(parser, option.nested, option.group, f"{place}.", inner, explain)
            continue
        if options is SpeculativeConfig:
            methods = [
                each for each, config in METHODS.items() if option.name in option_names(config)
            ]
            if methods and 2 * len(methods) <= len(METHODS):
                text = f"{_sentence(text)}; for {', '.join(methods)}"
        mro = option.owner.__mro__
        declaring = next(each for each in mro if option.name in inspect.get_annotations(each))
        title = declaring.__dict__.get("GROUP")
        if group is None and title not in groups:
            groups[title] = parser.add_argument_group(title)
        _add_flag(group or groups[title], option, place, chosen.defaults.get(option.name), text)


def _add_flag(group: Any, option: _Option, place: str, default: str | None, text: str) -> None:
    flag = option.flag
    if flag.add is not None:
        flag.add(group, place)
        return
    help = _sentence(text).replace("%", "%%")
    if default:
        help = re.sub(r" \(default: [^)]*\)", "", help)
    default = default or _shown(option.default)
    repeated = option.is_sequence and not option.has_commas
    notes = ["repeatable"] if repeated and not flag.positional else []
    notes += [f"default: {default}"] if default and "(default: " not in help else []
    help += f" ({'; '.join(notes)})" if notes else ""
    flags = [f"--{each}" for each in (option.flag_name, flag.also) if each]
    if option.kind is bool:
        group.add_argument(*flags, dest=place, action="store_true", help=help)
        if flag.off:
            off = f"not {flags[0]} (default)"
            group.add_argument(f"--{flag.off}", dest=place, action="store_false", help=off)
        return
    how: dict[str, Any] = {"metavar": option.metavar, "help": help, "type": flag.read}
    if flag.read is None:
        one, many, _ = _PARSERS[option.kind]
        how["type"] = many if option.has_commas else one
    if flag.positional:
        group.add_argument(place, nargs="*" if option.is_sequence else "?", **how)
    else:
        action = "append" if repeated else "store"
        group.add_argument(*flags, dest=place, action=action, **how)


@functools.cache
def _options(config: type) -> list[_Option]:
    if config is SpeculativeConfig:
        return [_Option(owner, name) for name, owner in all_options().items()]
    return [_Option(config, name) for name in option_names(config)]


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there are several."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin in (Union, types.UnionType):
        kinds = {bool, *_PARSERS}
        pairs = map(_kind, parts)
        return next(each for each in pairs if each[0] in kinds or dataclasses.is_dataclass(each[0]))
    if origin in (Sequence, tuple):
        return _kind(parts[0])[0], True
    return (str if choices_of(annotation) else annotation), False


def _marks(annotation: Any) -> list[Any]:
    marks = list(getattr(annotation, "__metadata__", ()))
    return marks + [mark for part in get_args(annotation) for mark in _marks(part)]


def _shown(default: Any) -> str:
    """A default that says something, as text."""
    if isinstance(default, bool) or default in (None, dataclasses.MISSING, (), ""):
        return ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _sentence(text: str) -> str:
    """The first sentence of a documentation, without its full stop."""
    sentence = re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
    return sentence[:1].lower() + sentence[1:] if not sentence[1:2].isupper() else sentence
