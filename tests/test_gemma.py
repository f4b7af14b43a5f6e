"""Gemma 3 270M, real weights: its tokens equal transformers' and plain decoding's.

The model is pretrained only, so its file has no chat template; the prompts spell Gemma's turns.
"""

import numpy as np
import pytest

from spec_jax import checkpoints
from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.testing import first_layers
from tests.conftest import ROOT
from tests.harness import request, run
from tests.prompts import COPY_PROMPTS, PROMPTS

pytestmark = [pytest.mark.gemma, pytest.mark.slow, pytest.mark.timeout(1800)]

RECIPE = ROOT / "checkpoints" / "gemma3-270m.toml"
WINDOW = 512
LONG_PROMPT = " ".join(COPY_PROMPTS)
"""Longer than the window, so that the first tokens are out of the local layers' sight."""
QUESTIONS = [*PROMPTS[:3], COPY_PROMPTS[0], LONG_PROMPT]
TOKENS = 24
MAX_LEN = 2048


@pytest.fixture(scope="module")
def gemma():
    return checkpoints.load(RECIPE)


@pytest.fixture(scope="module")
def prompts(gemma):
    turns = "<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n"
    ids = [gemma.tokenizer.encode(turns.format(question)) for question in QUESTIONS]
    assert all(row[0] == gemma.tokenizer.bos_token_id for row in ids)
    assert len(ids[-1]) > 2 * WINDOW
    return ids


@pytest.fixture(scope="module")
def plain(gemma, prompts):
    return decode(gemma, prompts, NoDraft(0))


def decode(gemma, prompts, drafter):
    engine = Engine(gemma.model, drafter, Constant(4), "token", max_model_len=MAX_LEN)
    params = SamplingParams(max_tokens=TOKENS)
    ends = gemma.eos_token_ids
    requests = [request(ids, params, stop_token_ids=ends, max_len=MAX_LEN) for ids in prompts]
    return [run(engine, [each])[0] for each in requests]


@pytest.mark.torch
def test_greedy_tokens_are_those_of_transformers(gemma, prompts, plain):
    """float32, the same dequantized weights."""
    import torch

    from tests.torch_reference import load_gemma

    _, path = checkpoints.locate(RECIPE, print)
    reference = load_gemma(path)
    assert reference.config.sliding_window == gemma.model.config.sliding_window == WINDOW
    for ids, tokens in zip(prompts, plain, strict=True):
        with torch.inference_mode():
            out = reference.generate(
                torch.tensor([ids]),
                do_sample=False,
                max_new_tokens=TOKENS,
                eos_token_id=list(gemma.eos_token_ids),
            )
        assert np.asarray(out)[0, len(ids) :].tolist() == tokens


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_greedy_text_is_plain_decodings(gemma, prompts, plain, method):
    """As target, and cut down as its own drafter: 7 layers, one of them global."""
    drafter = (
        PromptLookup(4, 3)
        if method == "prompt_lookup"
        else DraftModel(first_layers(gemma.model, 7), 4)
    )
    assert decode(gemma, prompts, drafter) == plain


RECORDED = {
    "Hello  world,\tit's 2024!\n\n\n    x = a*b": "9259 138 12392 236764 255968 509 236789 236751 "
    "236743 236778 236771 236778 236812 236888 109 140 236781 578 496 236829 236763",
    "naïve 日本語 🙂👩\u200d👧 e\u0301\xa0\u200b\ue000": "1789 238527 560 33375 238582 57235 "
    "243767 237243 244814 545 238288 432 398 237141 245863",
    "<start_of_turn>user\nhi<end_of_turn>\n": "105 2364 107 2202 106 107",
    "<0x41> ---------- hahahaha": "236820 236771 236781 236812 236770 236813 48305 678 89009 8377",
    " " * 40 + "x": "167 145 236781",
}


@pytest.mark.parametrize("text", RECORDED)
def test_tokens_are_those_of_llama_cpp(gemma, text):
    """Recorded from llama-cpp-python 0.3.36, which tokenized the same file."""
    ids = [gemma.tokenizer.bos_token_id, *map(int, RECORDED[text].split())]
    assert gemma.tokenizer.encode(text) == ids
    assert gemma.tokenizer.decode(ids[1:], skip_special_tokens=False) == text


def test_what_ends_a_text(gemma):
    ends = [gemma.tokenizer.token(i) for i in gemma.eos_token_ids]
    assert ends == ["<eos>", "<end_of_turn>"]
