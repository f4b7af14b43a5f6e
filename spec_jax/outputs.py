"""The result of a request: text, ids, why it ended, and metrics of the speculation."""

import dataclasses
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and completion together."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class SpeculativeMetrics:
    """How one request was decoded; names as in vLLM.

    Counts belong to the request alone, without rounds past a stop and tokens drafted past it.
    Seconds are wall time, which the request shared with others in the batch, without compilation.

    Attributes:
      rounds: target calls after the prompt.
      draft_tokens: drafted tokens.
      accepted_tokens: drafted tokens that verification accepted.
      accepted_per_position: for each draft position, how often its token was accepted.
      prefill_seconds: computing the prompt; an equal share if several were computed together.
      decode_seconds: the rounds from the first one that the request took part in to its last.
      compile_seconds: compilation that the call waited for until then; 0 after warm-up.
      completion_tokens: tokens generated.
      plain_rounds: rounds in which nothing was drafted for it.
    """

    rounds: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]
    prefill_seconds: float
    decode_seconds: float
    compile_seconds: float
    completion_tokens: int
    plain_rounds: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted tokens; 0 if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per round: the bonus token is included; 0 without a round."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """The request's tokens per second of decoding, without prefill and compilation."""
        return self.completion_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The metrics as JSON-ready values."""
        counts = ("rounds", "draft_tokens", "accepted_tokens")
        rates = ("draft_acceptance_rate", "mean_acceptance_length", "accepted_per_position")
        times = ("decode_seconds", "prefill_seconds", "compile_seconds", "tokens_per_second")
        values = {name: getattr(self, name) for name in (*counts, *rates, *times)}
        return values | {"accepted_per_position": list(self.accepted_per_position)}


@dataclass(frozen=True)
class Logprob:
    """A token in one place of a completion or of a prompt; names as in vLLM.

    Attributes:
      logprob: the natural logarithm of its probability, by the target's logits as they are.
      rank: 1 for the likeliest token; ties have the same.
      decoded_token: its text; None if no text was asked for.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt; names as in vLLM.

    Attributes:
      index: which of the prompt's `n` it is.
      text: the completion, cut before a stop string, without special tokens.
      token_ids: the completion's tokens, the stop token or the token that completed a stop
        string included.
      finish_reason: `stop` (end-of-sequence, stop token or stop string), `length` (max_tokens or
        the context's edge), `error` (see the field) or `abort` (cancelled before it was complete).
      stop_reason: the stop string or the stop token that ended it; None for an end-of-sequence
        token, or if something else did.
      metrics: speculation and timing.
      logprobs: for each token itself and the likeliest ones in its place, by id; None if they were
        not asked for.
      error: what went wrong in this completion alone, such as a row of NaN logits.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    metrics: SpeculativeMetrics
    stop_reason: str | int | None = None
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        """The logarithm of the probability of all tokens together; None without `logprobs`."""
        if self.logprobs is None:
            return None
        pairs = zip(self.token_ids, self.logprobs, strict=True)
        return sum(logprobs[token].logprob for token, logprobs in pairs)


@dataclass(frozen=True)
class RequestOutput:
    """The result of one prompt; names as in vLLM.

    The fields of the first completion, such as `text`, are here too.

    Attributes:
      request_id: different for each prompt of one `LLM`.
      prompt: the prompt's text, or None if the prompt was token ids.
      prompt_token_ids: its tokens.
      outputs: its completions, as many as `n`.
      prompt_logprobs: for each of its tokens as `logprobs` of a completion; None for the first,
        which nothing predicts. None if they were not asked for.
      num_cached_tokens: tokens of the prompt that were not computed again, since an earlier prompt
        or answer began with them.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0

    @classmethod
    def of_completions(cls, parts: Sequence["RequestOutput"]) -> "RequestOutput":
        """The result of a prompt whose completions were decoded one by one."""
        outputs = sorted((each for part in parts for each in part.outputs), key=lambda c: c.index)
        return dataclasses.replace(parts[0], outputs=tuple(outputs))

    def __repr__(self) -> str:
        text = reprlib.repr(self.text)
        return f"RequestOutput({self.request_id}, {text}, {self.finish_reason}, {self.usage})"

    @property
    def text(self) -> str:
        """Of the first completion."""
        return self.outputs[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first completion."""
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Of the first completion."""
        return self.outputs[0].finish_reason

    @property
    def metrics(self) -> SpeculativeMetrics:
        """Of the first completion."""
        return self.outputs[0].metrics

    @property
    def error(self) -> str | None:
        """The first error of a completion."""
        return next((each.error for each in self.outputs if each.error is not None), None)

    @property
    def usage(self) -> Usage:
        """Token counts, of all completions together."""
        return Usage(len(self.prompt_token_ids), sum(len(each.token_ids) for each in self.outputs))

    def as_dict(self) -> dict[str, Any]:
        """The result as one JSON-ready object, as `spec-jax generate --json` prints it."""
        result: dict[str, Any] = {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "usage": dataclasses.asdict(self.usage) | {"total_tokens": self.usage.total_tokens},
            "metrics": self.metrics.as_dict(),
        }
        if (logprobs := self.outputs[0].logprobs) is not None:
            result["cumulative_logprob"] = self.outputs[0].cumulative_logprob
            result["logprobs"] = list(map(_as_dict, logprobs))
        if self.prompt_logprobs is not None:
            result["prompt_logprobs"] = list(map(_as_dict, self.prompt_logprobs))
        if self.error is not None:
            result["error"] = self.error
        return result


def _as_dict(place: dict[int, Logprob] | None) -> dict[int, Any] | None:
    return place and {token: dataclasses.asdict(each) for token, each in place.items()}


@dataclass(frozen=True)
class Segment:
    """A piece of a transcription.

    Attributes:
      start: seconds from the begin of the audio.
      end: seconds from the begin of the audio.
      text: the spoken text.
      token_ids: its tokens, timestamps included.
    """

    start: float
    end: float
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Transcription:
    """The text of one audio.

    Attributes:
      text: all of it.
      language: the code of the language that was spoken, such as `de`.
      segments: its pieces; one for each window of 30 seconds if no timestamps were asked for.
      seconds: the duration of the audio.
      windows: the completion of each window, with its metrics.
    """

    text: str
    language: str
    segments: tuple[Segment, ...]
    seconds: float
    windows: tuple[RequestOutput, ...]

    def as_dict(self) -> dict[str, Any]:
        """The result as one JSON-ready object, as `spec-jax transcribe --json` prints it."""
        return {
            "text": self.text,
            "language": self.language,
            "seconds": self.seconds,
            "segments": [
                {"start": each.start, "end": each.end, "text": each.text} for each in self.segments
            ],
            "windows": [each.as_dict() for each in self.windows],
        }


@dataclass(frozen=True)
class StreamChunk:
    """A piece of one streamed request: the new text and tokens since the chunk before.

    Attributes:
      index: which prompt of the call it belongs to.
      text: new text; text that could still become a stop string is held back.
      token_ids: new tokens.
      output: the whole result, in the request's last chunk only.
      sample: which of the prompt's `n` completions.
      logprobs: of the new tokens, like a completion's.
      drafted: for each new token, whether a draft had proposed it.
      prompt_token_ids: the prompt's tokens, in a completion's first chunk with tokens only.
      prompt_logprobs: their log-probabilities, if they were asked for, in the same chunk.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    output: RequestOutput | None = None
    sample: int = 0
    logprobs: tuple[dict[int, Logprob], ...] | None = None
    drafted: tuple[bool, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    prompt_logprobs: tuple[dict[int, Logprob] | None, ...] | None = None
