"""The losslessness audit: compares a method's tokens with its target alone."""

from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine.engine import Engine
from spec_jax.engine.requests import RequestInput
from spec_jax.errors import ConfigError, RequestError
from spec_jax.evaluation.greedy import GreedyChecks
from spec_jax.evaluation.independence import IndependenceChecks
from spec_jax.evaluation.prompts import room_needed
from spec_jax.evaluation.sampled import DRAFTED, EMITTED, FOLLOWING, MEANINGS
from spec_jax.evaluation.sampler import SampledAudit
from spec_jax.evaluation.verdict import Check, Report, judge
from spec_jax.models.config import TransformerConfig

SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7 top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
}
GREEDY_TOKENS = 32
MANY_PARAMETERS = 10_000_000
FEW_SAMPLES, MANY_SAMPLES = 512, 4096
"""Default rows of each setting, for a large and for a small model."""


def audit(
    engine: Engine,
    prompts: Sequence[Sequence[int] | RequestInput],
    *,
    settings: Mapping[str, SamplingParams] | None = None,
    samples: int | None = None,
    max_tokens: int = GREEDY_TOKENS,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Checks that a method loses nothing: greedy tokens, sampled ones, drafts and batches.

    Args:
      engine: target, drafter, draft-length policy and verification; only their protocols are
        used.
      prompts: token ids, or what requests start from; three or more of different lengths show
        most.
      settings: name -> how to sample; two settings by default, none for greedy checks only.
      samples: rows sampled of each setting, at least; whole batches are.
      max_tokens: tokens decoded greedily from each prompt.
      seed: of the sampled rows; another seed is another audit.
      on_progress: called with a line of text.

    Raises:
      ConfigError: a value is out of range.
      RequestError: a prompt is empty or too long.
    """
    if settings is None:
        settings = SETTINGS
    many = sum(leaf.size for leaf in jax.tree.leaves(engine.target.params)) >= MANY_PARAMETERS
    samples = (FEW_SAMPLES if many else MANY_SAMPLES) if samples is None else samples
    for name, value in (("samples", samples), ("max_tokens", max_tokens)):
        if value < 1:
            raise ConfigError(f"{name} is {value}; give at least 1.")
    config = engine.target.config
    texts = [
        each if isinstance(each, RequestInput) else RequestInput.of(config, each)
        for each in prompts
    ]
    _check_prompts(engine, texts, max_tokens)
    checks = GreedyChecks(engine, texts, max_tokens, on_progress).run()
    if not settings:
        names = (EMITTED, FOLLOWING, DRAFTED)
        checks += [Check(name, reason="temperature is 0", excused=True) for name in names]
        settings = {"T=0": SamplingParams()}
    else:
        checks += SampledAudit(engine, texts, samples, on_progress).checks(settings, seed)
    checks += IndependenceChecks(engine, texts, settings, max_tokens, seed, on_progress).run()
    return judge(checks, MEANINGS)


def random_audio(config: TransformerConfig) -> list[RequestInput]:
    """Where an audit of a speech model starts: frames of noise, and texts of few tokens."""
    assert config.encoder is not None
    random = np.random.default_rng(0)
    shape = 2 * config.encoder.max_position, config.encoder.mel_bins
    frames = [random.normal(size=shape).astype(np.float32) for _ in range(3)]
    return [
        RequestInput([*config.decoder_start, *range(count)], each)
        for count, each in enumerate(frames)
    ]


def _check_prompts(engine: Engine, prompts: list[RequestInput], max_tokens: int) -> None:
    """Checks that every prompt leaves room for its completion, and for a neighbour's text."""
    if not prompts:
        raise RequestError("there is no prompt; give at least one.")
    needed = room_needed(engine, max_tokens)
    for i, prompt in enumerate(prompts):
        if prompt.source is None and engine.target.config.encoder is not None:
            raise RequestError(
                f"prompt {i} is text, but the target reads speech; give a "
                "`RequestInput` with frames, for example from `random_audio`."
            )
        if not len(prompt) or (prompt.source is not None and not len(prompt.source)):
            raise RequestError(f"prompt {i} holds no token; give text that the tokenizer knows.")
        if len(prompt) + needed > engine.max_model_len:
            raise RequestError(
                f"prompt {i} has {len(prompt)} tokens, and the audit needs {needed} more in a "
                f"context of {engine.max_model_len}; shorten it, or give fewer --max-tokens."
            )
