"""docs/cli.md says the same as the classes of options."""

import re
from pathlib import Path

from spec_jax.cli.commands import OPTIONS
from spec_jax.cli.flags import make_parser
from spec_jax.cli.overview import COMMANDS
from spec_jax.cli.reference import page
from spec_jax.config import all_options

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text(encoding="utf-8") == page(), (
        "python -m spec_jax.cli.reference > docs/cli.md"
    )


def test_the_page_has_every_flag_and_every_option_of_a_method():
    text = page()
    assert OPTIONS.keys() == COMMANDS.keys()
    for command, options in OPTIONS.items():
        for flag in make_parser(command, options)._option_string_actions:
            assert flag in ("-h", "--help") or re.search(rf"`{flag}\b", text), flag
    for name in all_options():
        assert f"- `{name}`: " in text


def test_every_flag_is_documented():
    for command, options in OPTIONS.items():
        for action in make_parser(command, options)._actions:
            assert action.help, f"{command} {action.option_strings}"
