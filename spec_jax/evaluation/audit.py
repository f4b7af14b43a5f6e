"""The losslessness audit: what a method decodes against what its target alone says."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from spec_jax.config import SamplingParams
from spec_jax.engine import Engine
from spec_jax.errors import ConfigError, RequestError
from spec_jax.evaluation.greedy import Greedy, decode
from spec_jax.evaluation.recorder import play, recording
from spec_jax.evaluation.report import Check, Report, judge
from spec_jax.evaluation.rows import check_rows
from spec_jax.evaluation.sampled import DRAFTED, EMITTED, FOLLOWING, MEANINGS, Evidence, requests_of
from spec_jax.evaluation.scoring import Scorer

PROMPTS = (
    "The capital of France is",
    "one two three four five one two three four five one two three",
    "def mean(xs):\n    total = 0\n    for x in xs:\n        total += x\n    return",
)
"""Prompts of unlike kinds; the second repeats itself, so that lookups find something."""
SETTINGS = {
    "T=1": SamplingParams(temperature=1.0),
    "T=0.7 top-p 0.9": SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.2),
}
GREEDY_TOKENS = 32
MANY_PARAMETERS = 10_000_000
FEW_SAMPLES, MANY_SAMPLES = 512, 2048
"""Rows of each setting by default, for a model of many parameters and of few."""
BATCH_BYTES = 2**31
"""What the rows decoded together may take, about."""
MOST_ROWS = 4096
CROSS_CHECKED = 2
"""Rows of each sampled batch that are also decoded alone."""


def audit(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    *,
    settings: Mapping[str, SamplingParams] | None = None,
    samples: int | None = None,
    max_tokens: int = GREEDY_TOKENS,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Checks that a method loses nothing: greedy tokens, sampled ones, drafts and batches.

    Args:
      engine: target, drafter, lookahead and verification; nothing but their protocols is used.
      prompts: token ids; three or more of different lengths show most.
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
    texts = [list(prompt) for prompt in prompts]
    width = 2 * engine.drafter.lookahead + 2
    _check_prompts(engine, texts, max_tokens, width)
    checks = Greedy(engine, texts, max_tokens, on_progress).run()
    greedy_only = engine.verification == "greedy"
    if greedy_only or not settings:
        reason = "verification 'greedy' is for temperature 0" if greedy_only else "temperature is 0"
        checks += [Check(name, reason=reason) for name in (EMITTED, FOLLOWING, DRAFTED)]
        settings = {"T=0": SamplingParams()}
    else:
        checks += _sample(engine, texts, settings, samples, width, seed, on_progress)
    checks.append(
        check_rows(
            engine, texts, dict(settings), max_tokens=max_tokens, seed=seed, on_progress=on_progress
        )
    )
    return judge(checks, MEANINGS)


def _sample(
    engine: Engine,
    prompts: list[list[int]],
    settings: Mapping[str, SamplingParams],
    samples: int,
    width: int,
    seed: int,
    on_progress: Callable[[str], None],
) -> list[Check]:
    """Samples `width` tokens a row, enough for two whole blocks, and collects the evidence."""
    recorder = recording(engine, on_progress)
    rows = min(_rows_at_once(engine, max(map(len, prompts)) + width), _power_of_two(samples))
    scorer = Scorer(engine.target, rows=-(-rows // len(prompts)), width=width)
    evidence = Evidence(scorer, engine.verification, seed)
    batches = -(-samples // rows)
    alone = Check("rows: sampled alone and among many")
    exact = engine.target.dtype == np.float32
    for number, (name, setting) in enumerate(settings.items()):
        params = dataclasses.replace(setting, max_tokens=width)
        for batch in range(batches):
            on_progress(f"sampling, {name}: batch {batch + 1} of {batches}")
            # Whole batches, so that one program serves all.
            which = np.arange(batch * rows, (batch + 1) * rows) % len(prompts)
            requests = requests_of(prompts, params, which, (seed, number, batch))
            tokens, rounds = play(recorder, requests)
            for row, asked in enumerate(requests[:CROSS_CHECKED] if exact else ()):
                text = decode(engine, [asked])[0][0]
                begin = len(asked.prompt_token_ids)
                alone.compare(
                    text == tokens[row, begin : begin + width].tolist(),
                    f"a sampled row gives other tokens alone than in a batch of {rows}.",
                )
            on_progress(f"comparing, {name}: batch {batch + 1} of {batches}")
            evidence.add(name, params, prompts, which, tokens, rounds)
    alone.sample = f"{alone.comparisons} texts of {width} tokens"
    alone.reason = "" if exact else "in bfloat16 batches of other sizes may round differently"
    return [*evidence.checks(), alone]


def _rows_at_once(engine: Engine, length: int) -> int:
    """How many rows to decode together, a power of two."""
    model, lookahead = engine.target, engine.drafter.lookahead
    cache = jax.eval_shape(lambda: model.new_cache(1, max(256, _power_of_two(length))))
    cached = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    # The draft's cache beside the target's; p, q, their intermediates and the rounds kept on host.
    distributions = 16 * (lookahead + 1) * model.config.vocab_size * 4
    most = max(1, BATCH_BYTES // (2 * cached + distributions))
    return min(MOST_ROWS, 1 << most.bit_length() - 1)


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _check_prompts(engine: Engine, prompts: list[list[int]], max_tokens: int, width: int) -> None:
    """Every prompt must leave room for what is decoded from it, and for a neighbour's text."""
    if not prompts:
        raise RequestError("there is no prompt; give at least one.")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise RequestError(f"prompt {i} holds no token; give text that the tokenizer knows.")
        needed = len(prompt) + max(2 * max_tokens, width)
        if needed > engine.max_model_len:
            raise RequestError(
                f"prompt {i} has {len(prompt)} tokens, and the audit needs {needed - len(prompt)} "
                f"more in a context of {engine.max_model_len}; shorten it, or give fewer "
                "--max-tokens."
            )
