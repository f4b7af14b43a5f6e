"""The strict room that every test runs in. This file is imported before `spec_jax` is."""

import gc
import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Tests prove correctness, which needs no accelerator; set JAX_PLATFORMS to run them on one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# PyTorch and the tokenizers start a thread for each core; pytest-xdist already uses the cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Compiled programs outlive a run, so that the next one is quick, and processes that tests start
# share them. A bounded cache is also a locked one: without a bound JAX lets parallel workers read
# entries that are still being written.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "jax")
    os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(2 * 1024**3)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import jax
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 16)  # meshes are emulated
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Shapes and types in annotations are checked at every call of what computes. That takes a sixth of
# the time, so that only CI does it (.ci/run). Elsewhere tests pass what annotations forbid.
CHECKED = (
    *("decoding", "drafters", "sampling", "kernels.experts", "kernels.products"),
    *("models.attention", "models.attention_mask", "models.blocks", "models.cache"),
    *("models.encoder", "models.experts", "models.layers", "models.model", "models.prefill"),
    "models.transformer",
)
if os.environ.get("SPEC_JAX_CHECK_SHAPES"):
    install_import_hook([f"spec_jax.{name}" for name in CHECKED], "beartype.beartype")

from spec_jax.kernels import native
from spec_jax.models import attention
from tests import quick

quick.compile_quickly()
quick.keep_programs_quickly()
quick.draft_as_if_it_were_free()
attention.MAX_KEY_BLOCK = 32  # the caches of tests are short, but have several blocks

# Tracing makes millions of small objects, none of them in a cycle.
gc.freeze()
gc.set_threshold(100_000, 20, 100)

# The same examples in every run: a failure is then the change's own. Compiling takes longer than
# any deadline.
settings.register_profile(
    "spec-jax",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("spec-jax")


SLOW_FILES = {
    *("tests/evaluation/test_planted.py", "tests/evaluation/test_planted_bugs.py"),
    *("tests/decoding/test_battery.py", "tests/fuzz/test_mutants.py", "tests/test_distributed.py"),
    *("tests/text/test_translation.py", "tests/training/test_run.py"),
}


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        quick.bound_cache()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files that take long first, so that in the end no worker waits for one of them."""
    items.sort(key=lambda item: item.path.relative_to(ROOT).as_posix() not in SLOW_FILES)


@pytest.fixture(autouse=True)
def _native_code(request: pytest.FixtureRequest) -> None:
    """Skips tests of native code where there is no compiler; where there is one, it must work."""
    if request.node.get_closest_marker("native") and not native.available():
        why = native.description()
        (pytest.skip if "there is no C++ compiler" in why else pytest.fail)(why)


@pytest.fixture(scope="session")
def demo_recipe() -> Path:
    """The recipe of the demo model, SmolLM2-135M-Instruct."""
    return ROOT / "checkpoints" / "smollm2-135m-instruct.toml"


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch):
    """What a test registers (`spec_jax.register_drafter`) is forgotten afterwards."""
    from spec_jax.config import METHODS
    from spec_jax.engine import custom

    before = dict(METHODS)
    monkeypatch.setattr(custom, "_FACTORIES", {})
    yield
    for name in METHODS.keys() - before.keys():
        del METHODS[name]
