"""The host's side of requests: detokenization, stop strings, results."""

from collections.abc import Sequence

from spec_jax.decoding.state import ERROR, LENGTH, RUNNING
from spec_jax.engine.batch import Batch
from spec_jax.engine.requests import Request
from spec_jax.outputs import (
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestOutput,
    SpeculativeMetrics,
)
from spec_jax.text.tokenizer import Tokenizer


class Row:
    """The host's side of one request: detokenization, stop strings, the result.

    Args:
      index: of the prompt in its call.
      sample: which of the prompt's completions it is.
      request_id: of the prompt.
      prompt: its text, if it was given as text.
      request: what is decoded.
      tokenizer: the target's.
    """

    def __init__(
        self,
        index: int,
        sample: int,
        request_id: str,
        prompt: str | None,
        request: Request,
        tokenizer: Tokenizer,
    ):
        self.index, self.sample, self.request_id = index, sample, request_id
        self.prompt, self.request, self._tokenizer = prompt, request, tokenizer
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._decoder = None
        if request.sampling.detokenize:
            self._decoder = tokenizer.stream(request.sampling.skip_special_tokens)
        self._stop_string: str | None = None
        self._text = ""
        self._shown = 0
        self._cut = False

    def take(self, new: list[int], finish: int) -> tuple[str, list[int]]:
        """Adds tokens up to a stop string; returns the text to show and the tokens that count."""
        for i, token in enumerate(new):
            self.token_ids.append(token)
            if self._decoder is not None and self._add_text(self._decoder.push([token])):
                return self._show(), new[: i + 1]
        rest = "" if self._decoder is None or finish == RUNNING else self._decoder.flush()
        if finish != RUNNING and not self._add_text(rest):
            reasons: dict[int, FinishReason] = {LENGTH: "length", ERROR: "error"}
            self.finish_reason = reasons.get(finish, "stop")
        return self._show(), new

    def _add_text(self, text: str) -> bool:
        """Appends text; true if this completed a stop string, which is then removed."""
        sampling, known = self.request.sampling, len(self._text)
        self._text += text
        if len(self.token_ids) <= sampling.min_tokens:
            return False
        # A stop string may begin in the earlier text, but it ends in the new one.
        begins = ((stop, max(0, known - len(stop) + 1)) for stop in sampling.stop)
        found = [(at, stop) for stop, begin in begins if (at := self._text.find(stop, begin)) >= 0]
        if not found:
            return False
        at, self._stop_string = min(found)
        kept = len(self._stop_string) if sampling.include_stop_str_in_output else 0
        self._text = self._text[: at + kept]
        self.finish_reason, self._cut = "stop", True
        return True

    def _show(self) -> str:
        """The text not returned yet, without an end that may become a stop string."""
        end = len(self._text)
        if self.finish_reason is None:
            end -= max(
                (
                    size
                    for stop in self.request.sampling.stop
                    for size in range(1, len(stop))
                    if self._text.endswith(stop[:size])
                ),
                default=0,
            )
        text = self._text[self._shown : end]
        self._shown = max(self._shown, end)
        return text

    def output(self, slot: int, batch: Batch) -> RequestOutput:
        """The result, once the row in a slot of the batch has finished."""
        assert self.finish_reason is not None
        error = None
        if self.finish_reason == "error":
            error = (
                f"prompt {self.index}: the target gave no distribution after "
                f"{len(self.token_ids)} tokens: its logits hold a NaN, or logit_bias, "
                "bad_words, min_tokens and the grammar together mask every token."
            )
            grammar = self.request.grammar
            if grammar is not None and grammar.error is not None:
                error = f"prompt {self.index}: its grammar allows nothing {grammar.error}."
        sampling = self.request.sampling
        begin, seconds = len(self.request.prompt_token_ids), batch.seconds_of(slot)
        work = batch.view.work(slot)
        if self._cut:
            work = batch.view.work_until(slot, begin, begin + len(self.token_ids))
        completion = CompletionOutput(
            index=self.sample,
            text=self._text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason(),
            logprobs=self._logprobs(slot, batch, begin, self.token_ids, sampling.logprobs),
            metrics=SpeculativeMetrics(
                rounds=work.rounds,
                draft_tokens=work.drafted,
                accepted_tokens=work.accepted,
                accepted_per_position=work.accepted_per_position,
                prefill_seconds=seconds.prefill,
                decode_seconds=seconds.decode,
                compile_seconds=seconds.compile,
                completion_tokens=len(self.token_ids),
            ),
            error=error,
        )
        ids = tuple(self.request.text_token_ids)
        known = self._logprobs(slot, batch, 1, ids[1:], sampling.prompt_logprobs)
        prompt_logprobs = None if known is None else (None, *known)
        return RequestOutput(self.request_id, self.prompt, ids, (completion,), prompt_logprobs)

    def _stop_reason(self) -> str | int | None:
        if self._stop_string is not None or self.finish_reason != "stop" or not self.token_ids:
            return self._stop_string
        last = self.token_ids[-1]
        return last if last in self.request.sampling.stop_token_ids else None

    def _logprobs(
        self, slot: int, batch: Batch, begin: int, token_ids: Sequence[int], count: int | None
    ) -> tuple[dict[int, Logprob], ...] | None:
        """Of tokens from the place `begin` on, and of `count` others in each place."""
        if count is None:
            return None
        known = batch.view.logprobs
        return tuple(
            {
                token: Logprob(float(logprob), int(rank), self._spelt(token))
                for token, logprob, rank in (
                    (said, known.chosen[slot, at], known.ranks[slot, at]),
                    *(
                        (int(known.top_ids[slot, at, i]), known.top[slot, at, i], i + 1)
                        for i in range(count)
                    ),
                )
            }
            for at, said in enumerate(token_ids, begin)
        )

    def _spelt(self, token: int) -> str | None:
        return self._tokenizer.decode([token], False) if self._decoder is not None else None
