"""Programs that are compiled from shapes alone are those that an engine then asks for."""

import dataclasses
from pathlib import Path

import jax
import jaxtyping
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from jax.experimental.compilation_cache import compilation_cache

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.checkpoints.shape import read_shape
from spec_jax.errors import ConfigError
from spec_jax.planning import Workload, compile_ahead
from spec_jax.sharding import Layout
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory, write_gguf
from tests.often import often
from tests.planning.shapes import shape_for

SHARDING = Path(__file__).parents[2] / "sharding"
GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.8, top_p=0.9)


@pytest.fixture
def kept(tmp_path):
    """The programs of engines that JAX keeps, by their keys."""
    before = {
        name: jax.config.values[name]
        for name in (
            "jax_compilation_cache_dir",
            "jax_compilation_cache_max_size",
            "jax_persistent_cache_min_compile_time_secs",
        )
    }
    values = (str(tmp_path / "kept"), -1, 0.0)
    for name, value in zip(before, values, strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    # What annotations call arrays are their shapes here.
    jaxtyping.config.update("jaxtyping_disable", True)
    yield lambda: {path.name for path in (tmp_path / "kept").glob("jit_counted-*-cache")}
    jaxtyping.config.update("jaxtyping_disable", False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target and a draft of another depth."""
    folder = tmp_path_factory.mktemp("models")
    shapes = {"target": CONFIG, "draft": CONFIG | {"num_hidden_layers": 1}}
    return [
        str(write_directory(folder / name, shape, llama_tensors(shape)))
        for name, shape in shapes.items()
    ]


def two_by_four() -> Layout:
    """Rows over two groups of four devices each."""
    layout = Layout.read(SHARDING / "cpu-8.toml")
    return dataclasses.replace(layout, name="cpu-2x4", mesh=(("data", 2), ("model", 4)))


# What is decoded: (method and its options, sampling, prompts, at once, further arguments).
JOBS = {
    "one prompt": ({"method": "none"}, GREEDY, 1, 8, {}),
    "a draft model, more prompts than rows": ({"method": "draft_model"}, SAMPLED, 9, 4, {}),
    "prompt lookup, penalties": (
        {"method": "prompt_lookup", "verification": "block"},
        SamplingParams(temperature=1.0, frequency_penalty=0.5),
        3,
        8,
        {},
    ),
    "early exit, as long as it is confident": (
        {"method": "early_exit", "early_exit_layers": 1, "draft_length_policy": "confidence"},
        GREEDY,
        5,
        2,
        {},
    ),
    "the target drafts, prefixes in a batch": (
        {"method": "draft_model", "scoring": "prefix_batch"},
        GREEDY,
        1,
        8,
        {},
    ),
    "several drafts": ({"method": "draft_model", "num_drafts": 2}, SAMPLED, 1, 8, {}),
    "scored at one width": (
        {"method": "prompt_lookup", "scoring_consistent": True},
        GREEDY,
        1,
        8,
        {},
    ),
    "int8": ({"method": "draft_model"}, GREEDY, 1, 8, {"quantization": "int8"}),
    "int8 caches": ({"method": "draft_model"}, GREEDY, 1, 8, {"kv_cache_dtype": "int8"}),
    "log-probabilities, adaptive": (
        {"method": "draft_model", "draft_length_policy": "adaptive"},
        SamplingParams(logprobs=3),
        1,
        8,
        {},
    ),
}
FEW = [("one prompt", "2x4")]


@pytest.mark.parametrize(
    ("job", "where"), often([(job, where) for job in JOBS for where in ("cpu-8", "2x4")], FEW)
)
def test_a_job_finds_every_program(kept, models, job, where):
    options, sampling, prompts, at_once, more = JOBS[job]
    layout = Layout.read(SHARDING / "cpu-8.toml") if where == "cpu-8" else two_by_four()
    target, draft = models
    if options["method"] == "draft_model":
        options = options | {"draft": target if "the target" in job else draft}
    if options["method"] != "none":  # each width of `adaptive` is a program
        options = {"num_speculative_tokens": 3, "draft_length_policy": "constant"} | options
    speculation = SpeculativeConfig(**options)
    sampling = dataclasses.replace(sampling, max_tokens=20, ignore_eos=True)
    shapes = [read_shape(path) for path in models]
    compile_ahead(
        shapes[0],
        shapes[0] if options.get("draft") == target else shapes[1],
        layout,
        speculation,
        [Workload(24, sampling, prompts, at_once)],
        dtype="float32",
        max_model_len=128,
        **more,
    )
    before = kept()
    assert len(before) >= 2
    llm = LLM(
        target,
        speculative_config=speculation,
        layout=layout,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=at_once,
        **more,
    )
    ids = np.random.default_rng(0).integers(0, 200, (prompts, 24)).tolist()
    llm.generate(ids, sampling)
    assert kept() == before and llm.engine.traces == len(before)


@pytest.mark.slow
def test_a_job_of_gguf_blocks_finds_every_program(kept, tmp_path):
    config = CONFIG | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
    path, layout = tmp_path / "tiny.gguf", Layout.read(SHARDING / "cpu-2.toml")
    kind, options = GGMLQuantizationType.Q4_1, {"dtype": "bfloat16", "quantization": "gguf"}
    write_gguf(path, config, llama_tensors(config), quantization=kind)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    workload = Workload(24, sampling, 1, 8)
    compile_ahead(read_shape(path), None, layout, SpeculativeConfig(), [workload], **options)
    before = kept()
    assert len(before) >= 2
    llm = LLM(path, layout=layout, max_num_seqs=8, **options)
    llm.generate([list(range(24))], sampling)
    assert kept() == before and llm.engine.traces == len(before)


@pytest.mark.tpu
@pytest.mark.parametrize("name", often(["tpu-v5e-8", "tpu-v4-16", "tpu-v5e-2x16"], ["tpu-v5e-8"]))
def test_programs_for_a_slice_are_kept_under_the_same_keys(kept, name):
    layout = Layout.read(SHARDING / f"{name}.toml")
    shape = shape_for(layout, num_layers=2)
    speculation = SpeculativeConfig(method="draft_model", draft="it", num_speculative_tokens=2)
    job = (shape, shape, layout, speculation, [Workload(100, SAMPLED, 9, 4)])
    compile_ahead(*job)
    first = written()
    assert len(kept()) >= 3
    compile_ahead(*job)  # asks for the same keys, and writes none
    assert written() == first


def written() -> dict[Path, int]:
    """When each program that is kept was written."""
    folder = Path(jax.config.values["jax_compilation_cache_dir"])
    return {path: path.stat().st_mtime_ns for path in folder.glob("*-cache")}


REFUSED = {
    "method is 'suffix'": ({"method": "suffix"}, GREEDY, {}),
    "method is 'universal_text'": ({"method": "universal_text", "draft": "x"}, GREEDY, {}),
    "draft_vocab_size is 8": (
        {"method": "draft_model", "draft": "x", "draft_vocab_size": 8},
        GREEDY,
        {},
    ),
    "draft_quantization is 'auto'": (
        {"method": "draft_model", "draft": "x", "draft_quantization": "auto"},
        GREEDY,
        {},
    ),
    "prompt_tokens is 100, but the context is 64": (
        {"method": "none"},
        GREEDY,
        {"max_model_len": 64},
    ),
    "dtype is 'float16'": ({"method": "none"}, GREEDY, {"dtype": "float16"}),
    "context is 100000, but tiny was made for": (
        {"method": "none"},
        GREEDY,
        {"max_model_len": 100000},
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_be_compiled_ahead(models, said):
    options, sampling, more = REFUSED[said]
    shape = dataclasses.replace(read_shape(models[0]), name="tiny")
    layout = Layout.read(SHARDING / "cpu-8.toml")
    with pytest.raises(ConfigError, match=said):
        compile_ahead(
            shape,
            shape,
            layout,
            SpeculativeConfig(**options),
            [Workload(100, sampling)],
            **({"max_model_len": 128} | more),
        )
