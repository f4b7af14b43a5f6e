"""Makes rows of training data: the target answers, and is asked what else it might have said."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Int

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.llm import LLM
from spec_jax.models.model import Model
from spec_jax.training.examples import Example, prefix_of_questions
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
        asked = [i for i, each in enumerate(examples) if each.text is None]
        outputs = self.llm.generate([examples[i].prompt for i in asked], [params[i] for i in asked])
        said = {i: output.token_ids for i, output in zip(asked, outputs, strict=True)}
        tokens = np.zeros((len(examples), self.length), np.int32)
        begins = np.zeros((len(examples),), np.int32)
        lengths = np.zeros((len(examples),), np.int32)
        for i, example in enumerate(examples):
            text = example.text if example.text is not None else said[i]
            ids = [*example.prompt, *text][: self.length]
            tokens[i, : len(ids)] = ids
            begins[i], lengths[i] = min(len(example.prompt), len(ids)), len(ids)
        states, normalisers = self._read(tokens)
        return Rows(tokens, begins, lengths, states, normalisers)

    def _read(self, tokens: Int[np.ndarray, "rows length"]) -> tuple[np.ndarray, np.ndarray]:
        compiler, target = self.llm.engine.compiler, self.llm.engine.target
        rows, length = tokens.shape
        ways = 1 if target.placement is None else target.placement.ways("batch")
        padded = np.pad(tokens, ((0, -rows % ways), (0, -length % CHUNK)))
        device_tokens = compiler.put(padded)
        read = compiler.program(
            ("the reading of rows", padded.shape), _states, (target, device_tokens)
        )
        states, normalisers = distributed.to_host(read(target, device_tokens))
        kept = slice(0, rows), slice(0, length)
        return np.asarray(states[kept]).view(ml_dtypes.bfloat16), np.asarray(normalisers[kept])


def _states(
    target: Model, tokens: Int[Array, "rows length"]
) -> tuple[Float[Array, "rows length embed"], Float[Array, "rows length"]]:
    """The last layer's states, rounded, and the normalisers of the logits that follow from them."""
    states, _ = target.begin(tokens, target.new_cache(*tokens.shape), target.config.num_layers)
    states = states.astype(jnp.bfloat16)
    rows, length, embed = states.shape
    # By pieces, since the logits of all tokens would not fit.
    pieces = states.reshape(rows, length // CHUNK, CHUNK, embed).swapaxes(0, 1)

    def normaliser(piece: Array) -> Array:
        return jax.nn.logsumexp(target.exit(piece.astype(jnp.float32)), axis=-1)

    normalisers = jax.lax.map(normaliser, pieces).swapaxes(0, 1).reshape(rows, length)
    return states, normalisers
