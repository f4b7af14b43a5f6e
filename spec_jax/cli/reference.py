"""The page docs/cli.md, made from the classes of options: `python -m spec_jax.cli.reference`."""

import argparse
import re
import sys
from collections.abc import Iterable, Sequence

from spec_jax.cli.commands import OF_SERVERS, OPTIONS
from spec_jax.cli.flags import documentation, make_parser
from spec_jax.config import CUSTOM, METHODS, all_options, option_names

_SHARED = ("model", "speculative decoding", "sampling")
"""Groups of options that many commands have."""
_CODE_OR_FLAG = re.compile(r"(`[^`]*`)|(?<![`\w-])(--[a-z][a-z-]*[a-z])")
_HEADER = """\
# Command line

`python -m spec_jax.cli.reference > docs/cli.md` makes this page from the classes of options, and a
test keeps it up to date. `spec-jax COMMAND --help` shows the same text. With `--debug` a command
shows the traceback of an error.
"""


def page() -> str:
    """The text of docs/cli.md."""
    groups: dict[str, dict[str, tuple[str, list[str]]]] = {title: {} for title in _SHARED}
    parts = [_HEADER]
    for command, options in _all().items():
        parser = make_parser(command, options)
        rows, links = [], []
        for group in parser._action_groups:
            actions = [each for each in group._group_actions if each.dest not in ("help", "debug")]
            lines = [(_flags(action), str(action.help)) for action in actions]
            if lines and group.title in groups:
                links.append(f"[{group.title}](#{group.title.replace(' ', '-')})")
                for flag, help in lines:
                    groups[group.title].setdefault(flag, (help, []))[1].append(command)
            else:
                rows += lines
        parts += [f"## `spec-jax {command}`", str(parser.description)]
        if links:
            parts.append(f"Takes options of: {', '.join(links)}.")
        parts += [_table(("Flag", "Meaning"), rows), parser.epilog or ""]
    for title, flags in groups.items():
        users = {command for _, commands in flags.values() for command in commands}
        rows = [
            (flag, help if users <= set(commands) else f"{help}; only {', '.join(commands)}")
            for flag, (help, commands) in flags.items()
        ]
        names = ", ".join(f"`{each}`" for each in OPTIONS if each in users)
        text = f"Of {names}, unless a row names commands."
        parts += [f"## {title.capitalize()}", text, _table(("Flag", "Meaning"), rows)]
    text = "\n\n".join(part.strip() for part in (*parts, *_methods()) if part.strip()) + "\n"
    return _CODE_OR_FLAG.sub(lambda match: match[1] or f"`{match[2]}`", text)


def _all() -> dict[str, type]:
    """The options of each command, and of those that ask a server after them."""
    every: dict[str, type] = {}
    for command, options in OPTIONS.items():
        every[command] = options
        if command in OF_SERVERS:
            flag, of_server, _ = OF_SERVERS[command]
            every[f"{command} {flag}"] = of_server
    return every


def _methods() -> list[str]:
    """Which method has which options."""
    methods = {name: config for name, config in METHODS.items() if name != CUSTOM}
    summaries = [
        f"- `{name}`: {str(config.__doc__).splitlines()[0]}" for name, config in methods.items()
    ]
    rows = [
        (
            f"`{name}`",
            *("yes" if name in option_names(config) else "" for config in methods.values()),
        )
        for name in all_options()
        if name != "method"
    ]
    meanings = [
        f"- `{name}`: {' '.join(documentation(config)[name].split())}"
        for name, config in all_options().items()
    ]
    return [
        "## Options of each method",
        "These are the fields of `SpeculativeConfig(method=...)`, and with hyphens the flags.",
        "\n".join(summaries),
        _table(("Option", *(f"`{each}`" for each in methods)), rows),
        "\n".join(meanings),
    ]


def _flags(action: argparse.Action) -> str:
    metavar = "" if action.nargs == 0 else f" {action.metavar}"
    return ", ".join(f"`{f'{each}{metavar}'.strip()}`" for each in action.option_strings or [""])


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[each.replace("|", "\\|").replace("%%", "%") for each in row] for row in rows]
    lines = [header, ["---"] * len(header), *lines] if lines else []
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.stdout.write(page())
