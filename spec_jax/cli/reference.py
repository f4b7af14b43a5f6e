"""The page docs/cli.md, made from the classes of options: `python -m spec_jax.cli.reference`."""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence

from spec_jax.cli.commands import OPTIONS
from spec_jax.cli.flags import documentation, make_parser
from spec_jax.config import CUSTOM, METHODS, all_options, option_names

_SHARED = ("model", "speculative decoding", "sampling")
"""Groups of options that many commands have."""
_FLAG = re.compile(r"(?<![`\w-])(--[a-z][a-z-]*[a-z])")
_HEAD = """\
# Command line

`python -m spec_jax.cli.reference > docs/cli.md` makes this page from the classes of options, and a
test keeps it up to date. `spec-jax COMMAND --help` shows the same text. With `--debug` a command
shows the traceback of an error.
"""


def page() -> str:
    """The text of docs/cli.md."""
    groups: dict[str, dict[str, tuple[str, list[str]]]] = {title: {} for title in _SHARED}
    commands = []
    for command, options in OPTIONS.items():
        parser = make_parser(command, options)
        rows, shared = [], []
        for group in parser._action_groups:
            actions = [each for each in group._group_actions if each.dest not in ("help", "debug")]
            if actions and group.title in groups:
                shared.append(group.title)
                for action in actions:
                    entry = groups[group.title].setdefault(_flags(action), (str(action.help), []))
                    entry[1].append(command)
            else:
                rows += [(_flags(action), str(action.help)) for action in actions]
        commands += [f"## `spec-jax {command}`", str(parser.description)]
        if shared:
            commands.append(f"Takes options of: {', '.join(map(_link, shared))}.")
        commands += [_table(("Flag", "Meaning"), rows), parser.epilog or ""]
    parts = [_HEAD, *commands]
    for title, flags in groups.items():
        users = [command for _, names in flags.values() for command in names]
        every = {each for each in OPTIONS if each in users}
        rows = [
            (flag, help if set(names) >= every else f"{help}; only {', '.join(names)}")
            for flag, (help, names) in flags.items()
        ]
        names = ", ".join(f"`{each}`" for each in OPTIONS if each in every)
        text = f"Of {names}, unless a row names commands."
        parts += [f"## {title.capitalize()}", text, _table(("Flag", "Meaning"), rows)]
    text = "\n\n".join([part.strip() for part in (*parts, _methods()) if part]) + "\n"
    parts = text.split("`")  # the odd ones are code
    return "`".join(
        _FLAG.sub(r"`\1`", each) if i % 2 == 0 else each for i, each in enumerate(parts)
    )


def _methods() -> str:
    """Which method has which options."""
    methods = [each for each in METHODS if each != CUSTOM]
    summaries = [f"- `{each}`: {str(METHODS[each].__doc__).splitlines()[0]}" for each in methods]
    rows = [
        (
            f"`{name}`",
            *("yes" if name in option_names(METHODS[each]) else "" for each in methods),
        )
        for name in all_options()
        if name != "method"
    ]
    meanings = [
        f"- `{name}`: {' '.join(documentation(config)[name].split())}"
        for name, config in all_options().items()
    ]
    return "\n\n".join(
        [
            "## Options of each method",
            "These are the fields of `SpeculativeConfig(method=...)`, and with hyphens the flags.",
            "\n".join(summaries),
            _table(("Option", *(f"`{each}`" for each in methods)), rows),
            "\n".join(meanings),
        ]
    )


def _flags(action: argparse.Action) -> str:
    metavar = "" if action.nargs == 0 else f" {action.metavar}"
    return ", ".join(f"`{each}{metavar}`" for each in action.option_strings or [""]).replace(
        "` ", "`"
    )


def _link(title: str) -> str:
    return f"[{title}](#{title.replace(' ', '-')})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [
        head,
        ["---"] * len(head),
        *([each.replace("|", "\\|") for each in row] for row in rows),
    ]
    lines = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join(lines).replace("%%", "%") if len(lines) > 2 else ""


if __name__ == "__main__":
    sys.stdout.write(page())
