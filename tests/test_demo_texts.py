"""Fifty texts of the demo model: speculation, its batch and its K change no token of them."""

import functools

import pytest

from spec_jax import LLM, checkpoints
from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.engine.engine import Engine
from spec_jax.testing import first_layers
from tests.harness import completions, finish, request
from tests.often import often
from tests.prompts import COPY_PROMPTS, PROMPTS

pytestmark = pytest.mark.weights

DRAFT_LAYERS = 3
"""Of the target's 30: a draft that is often wrong, so that rounds accept every count."""


@pytest.fixture(scope="session")
def demo(demo_recipe):
    return checkpoints.load(str(demo_recipe))


FIFTY = [*PROMPTS[:40], *COPY_PROMPTS]


def decode(engine, demo, prompts, *, batch, max_tokens):
    """Greedy completions, `batch` prompts at a time."""
    requests = []
    for prompt in prompts:
        ids = demo.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        params = SamplingParams(max_tokens=max_tokens)
        requests.append(request(ids, params, stop_token_ids=demo.eos_token_ids, max_len=8192))
    rows = []
    for first in range(0, len(requests), batch):
        group = requests[first : first + batch]
        rows += completions(finish(engine.start(group)), group)
    return rows


@pytest.fixture(scope="session")
def engine_of(demo, demo_recipe):
    """An engine of the target in full precision, or as the file stores it, which is fastest."""

    @functools.cache
    def target(form):
        return demo.model if form == "float32" else LLM(str(demo_recipe)).engine.target

    @functools.lru_cache(maxsize=4)  # compiled programs take memory
    def engine(form, method, lookahead=1):
        model = target(form)
        drafter = {
            "none": lambda _: NoDraft(0),
            "draft_model": lambda k: DraftModel(first_layers(model, DRAFT_LAYERS), k),
            "prompt_lookup": lambda k: PromptLookup(k, 3),
        }[method](lookahead)
        return Engine(model, drafter, Constant(drafter.lookahead), "token", max_model_len=8192)

    return engine


@pytest.fixture(scope="session")
def fifty_plain(demo, engine_of):
    """Plain completions of fifty prompts in a form, each decoded alone."""
    return functools.cache(
        lambda form: decode(engine_of(form, "none"), demo, FIFTY, batch=1, max_tokens=64)
    )


GRID = [("float32", 3), *(("gguf", lookahead) for lookahead in (1, 3, 5, 8))]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("form", "lookahead"), GRID)
@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_fifty_greedy_texts_are_plain_decodings(
    demo, engine_of, fifty_plain, method, form, lookahead, batch
):
    ours = engine_of(form, method, lookahead)
    assert decode(ours, demo, FIFTY, batch=batch, max_tokens=64) == fifty_plain(form)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["float32", "gguf"])
def test_fifty_plain_texts_do_not_depend_on_the_batch(demo, engine_of, fifty_plain, form):
    plain = engine_of(form, "none")
    assert decode(plain, demo, FIFTY, batch=3, max_tokens=64) == fifty_plain(form)


@pytest.mark.torch
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("third", often(range(3), [0]))
def test_greedy_tokens_are_those_of_transformers(demo, demo_recipe, engine_of, third):
    """64 tokens on 20 prompts in all, float32, the same dequantized weights."""
    import torch

    from tests.torch_reference import load_llama

    _, path = checkpoints.locate(str(demo_recipe), lambda line: None)
    reference = load_llama(path)
    prompts = [*PROMPTS[:16], *COPY_PROMPTS[:4]][third::3]
    ours = decode(engine_of("float32", "prompt_lookup", 4), demo, prompts, batch=1, max_tokens=64)
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = demo.tokenizer.encode_chat([{"role": "user", "content": prompt}])
        with torch.inference_mode():
            logits = reference(torch.tensor([[*ids, *tokens]])).logits[0]
        # Each token is the likeliest one after those before it: what greedy decoding says, in
        # one call instead of 64.
        assert logits[len(ids) - 1 : -1].argmax(-1).tolist() == tokens
        assert len(tokens) == 64 or tokens[-1] in demo.eos_token_ids
