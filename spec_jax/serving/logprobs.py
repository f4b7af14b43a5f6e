"""Log-probabilities in the two forms of the OpenAI API; the target's, draft or no draft."""

from collections.abc import Sequence
from typing import Any

from spec_jax.outputs import Logprob
from spec_jax.text.tokenizer import Tokenizer

Place = dict[int, Logprob]
"""The token of a place and the likeliest ones there, by id."""

MIN_LOGPROB = -9999.0
"""JSON has no infinity; as in vLLM."""


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], places: Sequence[Place], top: int
) -> list[dict[str, Any]]:
    """What `choices[].logprobs.content` holds."""
    return [
        _entry(tokenizer, token, place[token])
        | {"top_logprobs": [_entry(tokenizer, *each) for each in _likeliest(place, top)]}
        for token, place in zip(token_ids, places, strict=True)
    ]


class CompletionLogprobs:
    """What `choices[].logprobs` of a completion holds.

    Args:
      tokenizer: spells a token without probabilities.
      top: the number of likeliest tokens.
    """

    def __init__(self, tokenizer: Tokenizer, top: int):
        self._tokenizer, self._top, self._offset = tokenizer, top, 0

    def of(self, token_ids: Sequence[int], places: Sequence[Place | None]) -> dict[str, Any]:
        """Of the next tokens; a place of None, a prompt's first, has no probabilities."""
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, place in zip(token_ids, places, strict=True):
            if place is None:
                text = self._tokenizer.decode([token], False)
            else:
                text = place[token].decoded_token or ""
            tokens.append(text)
            values.append(None if place is None else _finite(place[token].logprob))
            offsets.append(self._offset)
            self._offset += len(text)
            if place is None:
                tops.append(None)
                continue
            likeliest = dict(_likeliest(place, self._top)) | {token: place[token]}
            tops.append(
                {each.decoded_token or "": _finite(each.logprob) for each in likeliest.values()}
            )
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _likeliest(place: Place, top: int) -> list[tuple[int, Logprob]]:
    return sorted(place.items(), key=lambda each: (each[1].rank, each[0]))[:top]


def _entry(tokenizer: Tokenizer, token: int, logprob: Logprob) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    text = logprob.decoded_token or ""
    data = text.encode() if data is None else data
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(data)}


def _finite(value: float) -> float:
    return max(value, MIN_LOGPROB)
