"""Calls: several prompts, decoded together, and their results."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from spec_jax import distributed
from spec_jax.config import SamplingParams
from spec_jax.engine.detokenization import Row
from spec_jax.engine.engine import Engine
from spec_jax.engine.intake import Intake, Prompt, completions_of, text_of
from spec_jax.engine.progress import Bar, progress_bar
from spec_jax.engine.requests import Request, Start
from spec_jax.engine.scheduler import ROUNDS_PER_CALL, ROUNDS_PER_CHUNK, Scheduler
from spec_jax.errors import ConfigError, GenerationError
from spec_jax.outputs import RequestOutput, StreamChunk
from spec_jax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Turns:
    """What all `LLM` of one target share: whose turn it is, and how many prompts there were."""

    lock: AbstractContextManager[bool] = field(default_factory=threading.RLock)
    request_ids: Iterator[int] = field(default_factory=itertools.count)


@dataclass(frozen=True)
class Calls:
    """Decodes calls with one engine, in turn.

    Attributes:
      engine: what decodes them.
      intake: makes requests.
      tokenizer: the target's.
      max_num_seqs: most requests decoded at once.
      turns: shared with the siblings of an `LLM`.
      learn: told each request's tokens once it has finished.
      facts: what all processes must have in common, as `distributed.agree` takes it.
    """

    engine: Engine
    intake: Intake
    tokenizer: Tokenizer
    max_num_seqs: int
    turns: Turns
    learn: Callable[[Request, Sequence[int]], None]
    facts: Mapping[str, object]

    def generate(
        self,
        prompts: Sequence[Prompt | Start],
        params: Sequence[SamplingParams],
        use_tqdm: Bar = False,
    ) -> list[RequestOutput]:
        """One result per prompt, in order; errors are those of `LLM.generate`."""
        with self.turns.lock:
            rows = self._rows(prompts, params, ROUNDS_PER_CALL)
            found: list[list[RequestOutput]] = [[] for _ in prompts]
            try:
                with progress_bar(use_tqdm, len(rows)) as advance:
                    for chunk in self._decode(rows, ROUNDS_PER_CALL):
                        if chunk.output is not None:
                            found[chunk.index].append(chunk.output)
                            advance()
            except Exception as error:
                outputs = [
                    RequestOutput.joined(each) if len(each) == sampling.n else None
                    for each, sampling in zip(found, params, strict=True)
                ]
                done = sum(output is not None for output in outputs)
                raise GenerationError(
                    f"decoding failed after {done} of {len(found)} prompts, whose results are this "
                    f"error's `outputs`: {error}",
                    outputs,
                ) from error
        return [RequestOutput.joined(each) for each in found]

    def stream(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]
    ) -> Iterator[StreamChunk]:
        """Yields the text as it comes, see `LLM.stream`; everything is checked before."""
        with self.turns.lock:
            rows = self._rows(prompts, params, ROUNDS_PER_CHUNK)
        return self._decode(rows, ROUNDS_PER_CHUNK)

    def request(self, prompt: Prompt | Start, sampling: SamplingParams, index: int) -> Request:
        """Checks a prompt and its parameters, and makes a request of them."""
        if self.engine.strategy.verification == "greedy" and sampling.temperature > 0:
            raise ConfigError(
                f"verification 'greedy' is exact at temperature 0 only, but prompt {index} asks "
                f"for temperature {sampling.temperature}; use verification 'token'."
            )
        return self.intake.request(prompt, sampling, index)

    def _rows(
        self, prompts: Sequence[Prompt | Start], params: Sequence[SamplingParams], rounds: int
    ) -> list[Row]:
        """The requests, after a check that all processes will decode the same ones."""
        rows = []
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            text, given = text_of(i, prompt)
            request_id = str(next(self.turns.request_ids))
            for sample, own in enumerate(completions_of(sampling)):
                request = self.request(given, own, i)
                rows.append(Row(i, sample, request_id, text, request, self.tokenizer))
        distributed.agree(
            {
                **self.facts,
                "its limits": (self.engine.max_model_len, self.max_num_seqs, rounds),
                "its prompts": [row.request.prompt_token_ids for row in rows],
                "its sources": [_digest(row.request.source) for row in rows],
                "its sampling parameters": params,
                "its seeds": [row.request.key.tolist() for row in rows],
            }
        )
        return rows

    def _decode(self, rows: list[Row], rounds: int) -> Iterator[StreamChunk]:
        if not rows:
            return
        with self.turns.lock:
            scheduler = Scheduler(self.engine, rows, self.max_num_seqs, rounds, self.learn)
        while scheduler.busy:
            # Not held while the caller has the chunks: it may wait for another call of ours.
            with self.turns.lock:
                chunks = scheduler.step()
            yield from chunks


def _digest(source: np.ndarray | None) -> str | None:
    return None if source is None else hashlib.sha256(source.tobytes()).hexdigest()
