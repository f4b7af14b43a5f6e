import pytest

from spec_jax.models.model import Model
from tests import quick


@pytest.fixture(autouse=True)
def users_options(monkeypatch):
    """Plans are of the programs that users run."""
    monkeypatch.setattr(Model, "compiler_options", quick.OPTIMIZED)
