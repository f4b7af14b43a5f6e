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
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

from spec_jax.cli.parser import Parser, integer, integers, names, number, numbers
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
    float: (number, numbers, "X"),
    str: (str, names, "TEXT"),
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


class _Option(NamedTuple):
    """A field of a class of options, with what its annotation says."""

    name: str
    owner: type
    default: Any
    flag: Flag
    group: Group
    kind: Any
    is_sequence: bool
    choices: tuple[Any, ...]


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
    if any(option.name == "command" for option in _options(options)):
        values["command"] = f"spec-jax {command} {shlex.join(arguments)}"
    for option in _options(options):
        if option.default is dataclasses.MISSING and not values.get(option.name):
            remedy = option.flag.remedy or f"give --{_flag_name(option)}"
            raise ConfigError(f"no {option.name.replace('_', ' ')} given; {remedy}.")
    complete: Callable[[dict[str, Any]], None] = getattr(options, "complete", lambda values: None)
    complete(values)
    for option in _options(options):
        if (nested := _nested(option)) and not option.group.of and option.name in values:
            values[option.name] = nested(**values[option.name])
    return options(**values)


def make_parser(command: str, options: type, explain: bool = True) -> Parser:
    """The parser of a command's flags.

    Args:
      command: its name.
      options: the class of its options.
      explain: whether to read the fields' documentation, for the help texts.
    """
    operands = []
    for option in _options(options):
        needed = option.default is dataclasses.MISSING
        if option.flag.positional:
            many = "..." if option.is_sequence else ""
            operands.append(f"{_metavar(option)}{many}" if needed else f"[{_metavar(option)}]")
        elif needed:
            operands.append(f"--{_flag_name(option)} {_metavar(option)}")
    operands.sort(key=lambda each: each.startswith("--"))
    summary, _, epilog = (inspect.getdoc(options) or "").partition("\n\n")
    parser = Parser(command, " ".join(operands), summary, epilog)
    _add(parser, options, Group(), "", None, explain)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def documentation(config: type) -> dict[str, str]:
    """The docstrings below the fields of a class and its bases."""
    texts: dict[str, str] = {}
    for each in reversed(config.__mro__[:-1]):
        texts |= _own_documentation(each)
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
        if nested := _nested(option):
            title = option.group.title or option.name.replace("_", " ")
            inner = group or parser.add_argument_group(title, text or None)
            _add(parser, nested, option.group, f"{place}.", inner, explain)
            continue
        if options is SpeculativeConfig and (methods := _methods(option.name)):
            text = f"{_sentence(text)}; for {methods}"
        title = _declaring(option).__dict__.get("GROUP")
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
    repeated = option.is_sequence and not _has_commas(option)
    notes = [*(["repeatable"] if repeated and not flag.positional else [])]
    notes += [f"default: {default}"] if default and "(default: " not in help else []
    help += f" ({'; '.join(notes)})" if notes else ""
    if option.kind is bool:
        group.add_argument(f"--{_flag_name(option)}", dest=place, action="store_true", help=help)
        if flag.off:
            off = f"not --{_flag_name(option)} (default)"
            group.add_argument(f"--{flag.off}", dest=place, action="store_false", help=off)
        return
    one, several, _ = _PARSERS[option.kind]
    how: dict[str, Any] = {"metavar": _metavar(option), "help": help}
    how["type"] = several if _has_commas(option) else one
    if flag.positional:
        how["nargs"] = "*" if option.is_sequence else "?"
        group.add_argument(place, **how)
        return
    if repeated:
        how["action"] = "append"
    flags = [f"--{each}" for each in (_flag_name(option), flag.also) if each]
    group.add_argument(*flags, dest=place, **how)


@functools.cache
def _options(config: type) -> list[_Option]:
    if config is SpeculativeConfig:
        owners = all_options()
    else:
        owners = {field.name: config for field in dataclasses.fields(config) if field.init}
    options = []
    for name, owner in owners.items():
        annotation = annotations_of(owner)[name]
        (field,) = (each for each in dataclasses.fields(owner) if each.name == name)
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        kind, is_sequence = _kind(annotation)
        marks = _marks(annotation)
        flag = next((each for each in marks if isinstance(each, Flag)), Flag())
        group = next((each for each in marks if isinstance(each, Group)), Group())
        choices = choices_of(annotation)
        if owner is SpeculativeConfig and name == "method":
            choices = tuple(each for each in METHODS if each != CUSTOM)
        options.append(_Option(name, owner, default, flag, group, kind, is_sequence, choices))
    return options


def _nested(option: _Option) -> Any:
    """The class of options that a field holds, if any."""
    kind = option.group.of or option.kind
    return kind if _is_options(kind) else None


def _is_options(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


def _declaring(option: _Option) -> type:
    classes = option.owner.__mro__
    return next(each for each in classes if option.name in inspect.get_annotations(each))


def _methods(name: str) -> str:
    """The methods that have an option, unless most have it."""
    methods = [method for method, config in METHODS.items() if name in option_names(config)]
    return ", ".join(methods) if 2 * len(methods) <= len(METHODS) else ""


def _kind(annotation: Any) -> tuple[Any, bool]:
    """The type of one value, and whether there are several."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _kind(parts[0])
    if origin in (Union, types.UnionType):
        kinds = [_kind(each) for each in parts]
        return next(each for each in kinds if each[0] in (bool, *_PARSERS) or _is_options(each[0]))
    if origin in (Sequence, tuple):
        return _kind(parts[0])[0], True
    return (str if choices_of(annotation) else annotation), False


def _marks(annotation: Any) -> list[Any]:
    marks = list(getattr(annotation, "__metadata__", ()))
    return marks + [mark for part in get_args(annotation) for mark in _marks(part)]


def _flag_name(option: _Option) -> str:
    return option.flag.name or option.name.replace("_", "-")


def _has_commas(option: _Option) -> bool:
    return option.is_sequence and (option.flag.commas or option.kind in (int, float))


def _metavar(option: _Option) -> str:
    metavar = option.flag.metavar or "|".join(option.choices) or _PARSERS[option.kind][2]
    return f"{metavar},..." if _has_commas(option) and "," not in metavar else metavar


def _shown(default: Any) -> str:
    """A default that says something, as text."""
    if isinstance(default, bool) or default in (None, dataclasses.MISSING, (), ""):
        return ""
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _sentence(text: str) -> str:
    """The first sentence of a documentation, without its full stop."""
    sentence = re.split(r"\.(?:\s|$)", " ".join(text.split()), maxsplit=1)[0]
    return sentence[:1].lower() + sentence[1:] if not sentence[1:2].isupper() else sentence


@functools.cache
def _own_documentation(config: type) -> dict[str, str]:
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(config))).body
    except (OSError, TypeError):
        return {}
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for field, text in zip(definition.body, definition.body[1:], strict=False):
        match field, text:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(value))):
                texts[name] = inspect.cleandoc(value)
    return texts
