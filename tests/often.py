"""Which cases of a test are run by default, and which only with the slow ones."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def often(cases: Iterable[Any], some: Collection[Any]) -> list[Any]:
    """The cases for `parametrize`, all but some marked slow: compiling each takes its time."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in some else pytest.mark.slow,
        )
        for case in cases
    ]
