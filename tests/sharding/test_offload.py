"""Offloaded targets say what the same targets on the devices say."""

import os

import pytest

from spec_jax import LLM, ConfigError, Layout, SamplingParams, SpeculativeConfig
from tests.cli.harness import failure
from tests.models.test_streaming import in_host_memory
from tests.often import often
from tests.pairs import write_model
from tests.vocabularies import vocabulary

PROMPTS = ["the quick brown fox and then", "über", "What is the capital of France? " * 2]
PARAMS = [
    SamplingParams(max_tokens=16, ignore_eos=True),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=0.8, top_p=0.9, seed=1),
    SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.2, seed=2),
]


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    path = tmp_path_factory.mktemp("models")
    return {
        "target": write_model(path / "target", vocabulary("byte level"), layers=3),
        "draft": write_model(path / "draft", vocabulary("byte level"), seed=1),
    }


METHODS = {
    "none": {},
    "draft_model": {"num_speculative_tokens": 3},
    "prompt_lookup": {"num_speculative_tokens": 3},
    "early_exit": {"num_speculative_tokens": 3, "early_exit_layers": 1},
}
CASES = [
    *((method, devices, "none", 0) for method in METHODS for devices in (1, 2)),
    ("draft_model", 2, "int8", 0),
    ("draft_model", 1, "int4", 2),
    ("early_exit", 2, "int4", 0),
]
SOME = [("early_exit", 2, "int4", 0)]


@pytest.mark.parametrize(("method", "devices", "quantization", "resident"), often(CASES, SOME))
def test_tokens_are_those_of_a_target_on_the_devices(
    directories, method, devices, quantization, resident
):
    """Greedy and sampled, in one batch."""
    draft = directories["draft"] if method == "draft_model" else None
    config = SpeculativeConfig(method=method, draft=draft, **METHODS[method])

    def decoded(**offload):
        llm = LLM(
            directories["target"],
            speculative_config=config,
            layout=Layout.tensor_parallel(devices),
            quantization=quantization,
            **offload,
        )
        outputs = llm.generate(PROMPTS, PARAMS)
        assert all(output.error is None for output in outputs)
        return [output.token_ids for output in outputs], llm.engine

    expected, engine = decoded()
    assert not in_host_memory(engine.target)
    found, engine = decoded(offload="host", resident_layers=resident)
    assert found == expected
    layers = {name.split(".")[1] for name in in_host_memory(engine.target)}
    assert layers == {str(i) for i in range(resident, 3)}
    model = getattr(engine.drafter, "model", None)
    if method == "early_exit":  # the layers that draft are on the devices, whatever was asked
        assert {name.split(".")[1] for name in in_host_memory(model)} == {"1", "2"}
    elif model is not None:
        assert not in_host_memory(model)


def test_a_cpu_has_nowhere_to_offload_to(directories, capsys, monkeypatch):
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", raising=False)
    with pytest.raises(ConfigError, match="offload is 'host', but JAX computes on the CPU"):
        LLM(directories["target"], offload="host")
    # What XLA would pin for a GPU is the machine's memory, not 64 GB.
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    assert os.environ["XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"] == str(memory)
    message = failure(
        capsys, "generate", "a", "--target", directories["target"], "--offload", "host"
    )
    assert "leave offload out" in message


@pytest.mark.parametrize(
    "options, said",
    [
        ({"offload": "disk"}, "offload is 'disk'. Known: host, none"),
        ({"resident_layers": 2}, "resident_layers is 2, but offload is 'none'"),
        (
            {"resident_layers": 5, "offload": "host", "layout": Layout.tensor_parallel(1)},
            "resident_layers is 5, but the target has 3 layers",
        ),
        (
            {"resident_layers": -1, "offload": "host", "layout": Layout.tensor_parallel(1)},
            "resident_layers is -1",
        ),
    ],
)
def test_mistakes(directories, options, said):
    with pytest.raises(ConfigError, match=said):
        LLM(directories["target"], **options)


def test_a_flag_that_is_wrong(directories, capsys):
    target = directories["target"]
    message = failure(capsys, "generate", "a", "--target", target, "--offload", "hots")
    assert "offload is 'hots'. Did you mean 'host'?" in message
