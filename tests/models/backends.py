"""Backends of attention, as cases of a test."""

import pytest

from spec_jax.models.attention import BACKENDS

EACH_BACKEND = [
    pytest.param(name, marks=pytest.mark.native if name == "native" else ()) for name in BACKENDS
]
