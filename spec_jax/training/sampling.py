"""Makes rows of training data: the target answers, and is asked what else it might have said."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.decoding.draft_length import Constant
from spec_jax.drafters.none import NoDraft
from spec_jax.engine.engine import Engine
from spec_jax.engine.programs import bytes_beside_arguments
from spec_jax.engine.requests import Request
from spec_jax.llm import LLM
from spec_jax.models.model import Model
from spec_jax.training.examples import Example, prefix_of_questions
from spec_jax.training.memory import check_fits
from spec_jax.training.rows import Rows

CHUNK = 16
"""Tokens of each row whose logits are held at once."""
QUESTION_TOKENS = 96


class Sampler:
    """Makes rows of examples.

    Args:
      llm: the target; its `max_num_seqs` is how many rows are sampled at once.
      length: tokens of a row.
    """

    def __init__(self, llm: LLM, length: int):
        self.llm, self.length = llm, length
        self._engine = Engine(
            llm.engine.target,
            NoDraft(),
            Constant(0),
            max_model_len=llm.max_model_len,
            keep_states=True,
        )

    def check_memory(self, size: int) -> None:
        """Refuses to sample more rows at once than memory holds.

        Args:
          size: rows that are sampled together.

        Raises:
          ConfigError: it holds fewer, and says how many.
        """
        target, size = self.llm.engine.target, min(size, self.llm.max_num_seqs)
        num_shards = 1 if target.placement is None else target.placement.num_shards("batch")
        fewer = (size >> i for i in range(1, size.bit_length()) if size >> i >= num_shards)
        prompt = Example((0,) * (self.length * 3 // 4))  # the longest that data keeps
        request = self._request(prompt, SamplingParams(max_tokens=self.length // 4))

        def needed(rows: int) -> int:
            prefill, _ = self._engine.prefill([request] * rows)
            normalisers = self._normalisers(prefill.out_info.states)
            return bytes_beside_arguments(prefill) + bytes_beside_arguments(normalisers)

        check_fits(target, "sampling", "sample_batch", size, fewer, needed)

    def questions(self, count: int, seed: int) -> list[str]:
        """What a user might ask, as the target invents it at temperature 1; at most `count`.

        Raises:
          ConfigError: it has no chat template.
        """
        prefix = prefix_of_questions(self.llm.tokenizer)
        params = [
            SamplingParams(temperature=1.0, max_tokens=QUESTION_TOKENS, seed=(seed << 32) + i)
            for i in range(count)
        ]
        outputs = self.llm.generate([prefix] * count, params)
        texts = [output.text.strip() for output in outputs if output.finish_reason == "stop"]
        return [text for text in dict.fromkeys(texts) if text]

    def rows(self, examples: Sequence[Example], params: Sequence[SamplingParams]) -> Rows:
        """One row for each example, and the target's states at its tokens.

        Args:
          examples: what rows begin with, or all of what they are.
          params: how the target is sampled for each; its tokens end with the row.
        """
        requests = [
            self._request(each, sampling) for each, sampling in zip(examples, params, strict=True)
        ]
        prompts = [request.prompt_token_ids for request in requests]
        distributed.agree({"its training data": prompts})
        size = self.llm.max_num_seqs
        parts = [self._rows(requests[i : i + size]) for i in range(0, len(requests), size)]
        tokens, lengths, states, normalisers = map(np.concatenate, zip(*parts, strict=True))
        begins = np.array([min(len(each.prompt), self.length) for each in examples], np.int32)
        return Rows(tokens, begins, lengths, states, normalisers)

    def _request(self, example: Example, sampling: SamplingParams) -> Request:
        if example.text is None:
            return self.llm.request(example.prompt, sampling)
        # A text is a prompt after which nothing is wanted; it leaves room for a token nevertheless.
        ids = (*example.prompt, *example.text)[: min(self.length, self.llm.max_model_len - 1)]
        return dataclasses.replace(self.llm.request(ids, sampling), max_length=len(ids))

    def _rows(self, requests: Sequence[Request]) -> tuple[np.ndarray, ...]:
        """Tokens, lengths, states and normalisers of as many rows as are sampled at once."""
        batch = self._engine.start(requests)
        while batch.running:
            batch.advance(self.length)
        count, length = len(requests), self.length
        target, states = self._engine.target, batch.state.states
        found = self._normalisers(states)(target, states)
        states, normalisers = distributed.to_host(found)
        tokens, lengths = batch.view.tokens[:count, :length].copy(), batch.view.lengths[:count]
        places = np.arange(length)[None] - lengths[:, None]
        known, scored = places < 0, places < -1  # nothing follows the last token
        states = np.where(scored[..., None], np.asarray(states[:count, :length], np.float32), 0.0)
        return (
            np.where(known, tokens, 0),
            lengths.astype(np.int32),
            states.astype(ml_dtypes.bfloat16),
            np.where(scored, normalisers[:count, :length], 0.0),
        )

    def _normalisers(self, states: Any) -> jax.stages.Compiled:
        key = ("the normalisers of rows", states.shape)
        return self._engine.compiler.program(key, _normalisers, (self._engine.target, states))


def _normalisers(
    target: Model, states: Float[Array, "rows length embed"]
) -> tuple[Float[Array, "rows length embed"], Float[Array, "rows length"]]:
    """The states, rounded, and the normalisers of the logits that follow from them."""
    states = states.astype(jnp.bfloat16)
    rows, length, embed = states.shape
    # By pieces, since the logits of all tokens would not fit.
    pieces = states.reshape(rows, length // CHUNK, CHUNK, embed).swapaxes(0, 1)

    def normaliser(piece: Array) -> Array:
        return jax.nn.logsumexp(target.exit(piece.astype(jnp.float32)), axis=-1)

    return states, jax.lax.map(normaliser, pieces).swapaxes(0, 1).reshape(rows, length)
