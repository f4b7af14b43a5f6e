"""A tiny target, and something for drafts of it to learn from."""

import json

import pytest

from spec_jax import LLM
from tests.checkpoints import tiny

ROW = 32
SHARPNESS = 4.0


@pytest.fixture(scope="session")
def target(tmp_path_factory) -> str:
    """The directory of a tiny random model that is sure of what it says."""
    tensors = tiny.llama_tensors(tiny.CONFIG)
    tensors["lm_head.weight"] = SHARPNESS * tensors["lm_head.weight"]
    path = tmp_path_factory.mktemp("target") / "target"
    return str(tiny.write_directory(path, tensors=tensors))


@pytest.fixture(scope="session")
def llm(target) -> LLM:
    return LLM(target, max_num_seqs=8)


@pytest.fixture(scope="session")
def data_file(tmp_path_factory):
    """Twenty prompts."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"the {chr(97 + i)} in a"}) for i in range(20)]
    path.write_text("\n".join(lines) + "\n")
    return path
