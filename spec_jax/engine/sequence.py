"""One request while it is decoded: its tokens, its text, why it ended, its result."""

import dataclasses
from collections.abc import Iterable

from spec_jax.decoding.logprobs import Logprobs
from spec_jax.decoding.state import ERROR, LENGTH, RUNNING
from spec_jax.engine.detokenizer import Detokenizer
from spec_jax.engine.requests import Request
from spec_jax.engine.view import Seconds, View, Work
from spec_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    SpeculativeMetrics,
    StreamChunk,
)
from spec_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a request comes from.

    Attributes:
      request_id: of the prompt, in its result.
      prompt: the prompt's text, if it was given as text.
      index: of the prompt in its call.
      sample: which of the prompt's completions the request makes.
    """

    request_id: str = ""
    prompt: str | None = None
    index: int = 0
    sample: int = 0


class Sequence:
    """The host's side of one request.

    Args:
      number: of the request in its scheduler; later requests have larger ones.
      request: what is decoded.
      origin: where it comes from.
      tokenizer: the target's; None if nobody reads the text.

    Attributes:
      token_ids: the completion.
      finish_reason: None until it ends.
      num_computed_tokens: tokens of prompt and completion whose keys and values are in the cache.
      num_cached_tokens: tokens of the prompt that were copied from an earlier request.
    """

    def __init__(self, number: int, request: Request, origin: Origin, tokenizer: Tokenizer | None):
        self.number, self.request, self.origin = number, request, origin
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = self.num_cached_tokens = 0
        self._tokenizer = tokenizer if request.sampling.detokenize else None
        self._detokenizer = (
            None if self._tokenizer is None else Detokenizer(request.sampling, self._tokenizer)
        )

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended it."""
        return None if self._detokenizer is None else self._detokenizer.stop_string

    def append(self, token_ids: list[int], finish: int) -> StreamChunk:
        """Adds tokens up to a stop string, and ends for the device's reason, if it has one."""
        text = ""
        if self._detokenizer is not None:
            token_ids = token_ids[: self._detokenizer.push(token_ids)]
            if finish != RUNNING and self.stop_string is None:
                self._detokenizer.finish()
        self.token_ids += token_ids
        if self.stop_string is not None:
            self.finish_reason = "stop"
        elif finish != RUNNING:
            reasons: dict[int, FinishReason] = {LENGTH: "length", ERROR: "error"}
            self.finish_reason = reasons.get(finish, "stop")
        if self._detokenizer is not None:
            text = self._detokenizer.take(finished=self.finish_reason is not None)
        self.num_computed_tokens = len(self.request.prompt_token_ids) + len(self.token_ids) - 1
        origin = self.origin
        return StreamChunk(origin.index, text, tuple(token_ids), sample=origin.sample)

    def detailed(self, chunk: StreamChunk, slot: int, view: View) -> StreamChunk:
        """The chunk that was appended last, with what a stream says of each of its tokens."""
        prompt = len(self.request.prompt_token_ids)
        end = prompt + len(self.token_ids)
        begin, count = end - len(chunk.token_ids), self.request.sampling.logprobs
        chunk = dataclasses.replace(
            chunk,
            logprobs=self._logprobs(view.logprobs, slot, begin, chunk.token_ids, count),
            drafted=tuple(view.drafted(slot, prompt, begin, end)),
        )
        if begin > prompt or not chunk.token_ids:
            return chunk
        return dataclasses.replace(
            chunk,
            prompt_token_ids=tuple(self.request.text_token_ids),
            prompt_logprobs=self._prompt_logprobs(view.logprobs, slot),
        )

    def abort(self) -> StreamChunk:
        """Ends it before it is complete."""
        self.finish_reason = "abort"
        text = "" if self._detokenizer is None else self._detokenizer.take(finished=True)
        return StreamChunk(self.origin.index, text, (), sample=self.origin.sample)

    def output(self, slot: int | None, view: View | None, seconds: Seconds) -> RequestOutput:
        """The result, once it has finished.

        Args:
          slot: of the batch in which it was decoded; None if it never entered one.
          view: the host's copy of that batch.
          seconds: what it took.
        """
        assert self.finish_reason is not None
        request, sampling = self.request, self.request.sampling
        begin = len(request.prompt_token_ids)
        work, plain_rounds = Work(), 0
        if view is not None and slot is not None:
            work = view.work(slot)
            plain_rounds = view.plain_rounds(slot, begin, begin + len(self.token_ids))
            if self.stop_string is not None:
                work = view.work_until(slot, begin, begin + len(self.token_ids))
        logprobs = None if view is None else view.logprobs
        detokenizer = self._detokenizer
        completion = CompletionOutput(
            index=self.origin.sample,
            text="" if detokenizer is None else detokenizer.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason(),
            logprobs=self._logprobs(logprobs, slot, begin, self.token_ids, sampling.logprobs),
            metrics=SpeculativeMetrics(*work, *seconds, len(self.token_ids), plain_rounds),
            error=self._error(),
        )
        return RequestOutput(
            self.origin.request_id,
            self.origin.prompt,
            tuple(request.text_token_ids),
            (completion,),
            self._prompt_logprobs(logprobs, slot),
            self.num_cached_tokens,
        )

    def _error(self) -> str | None:
        if self.finish_reason != "error":
            return None
        index, grammar = self.origin.index, self.request.grammar
        if grammar is not None and grammar.error is not None:
            return f"prompt {index}: its grammar allows nothing {grammar.error}."
        return (
            f"prompt {index}: the target gave no distribution after {len(self.token_ids)} tokens: "
            "its logits hold a NaN, or logit_bias, bad_words, min_tokens and the grammar together "
            "mask every token."
        )

    def _stop_reason(self) -> str | int | None:
        if self.stop_string is not None or self.finish_reason != "stop" or not self.token_ids:
            return self.stop_string
        last = self.token_ids[-1]
        return last if last in self.request.sampling.stop_token_ids else None

    def _prompt_logprobs(
        self, logprobs: Logprobs | None, slot: int | None
    ) -> tuple[dict[int, Logprob] | None, ...] | None:
        """Of the prompt's tokens, if they were asked for; the first one has none."""
        request = self.request
        ids, count = request.text_token_ids[1:], request.sampling.prompt_logprobs
        later = self._logprobs(logprobs, slot, 1, ids, count)
        return None if later is None else (None, *later)

    def _logprobs(
        self,
        logprobs: Logprobs | None,
        slot: int | None,
        begin: int,
        token_ids: Iterable[int],
        count: int | None,
    ) -> tuple[dict[int, Logprob], ...] | None:
        """Of tokens from the place `begin` on, and of `count` others in each place."""
        if count is None or logprobs is None or slot is None:
            return None
        return tuple(
            {
                token: Logprob(float(logprob), int(rank), self._spelt(token))
                for token, logprob, rank in (
                    (token_id, logprobs.chosen[slot, at], logprobs.ranks[slot, at]),
                    *(
                        (int(logprobs.top_ids[slot, at, i]), logprobs.top[slot, at, i], i + 1)
                        for i in range(count)
                    ),
                )
            }
            for at, token_id in enumerate(token_ids, begin)
        )

    def _spelt(self, token: int) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([token], False)
