"""From the tokens of a sequence to its text, which ends before a stop string."""

from collections.abc import Sequence

from spec_jax.config import SamplingParams
from spec_jax.text.tokenizer import Tokenizer


class Detokenizer:
    """The text of one sequence.

    Args:
      sampling: the stop strings, and how tokens become text.
      tokenizer: the target's.

    Attributes:
      text: the text so far, cut at a stop string.
      stop_string: the stop string that ended it; None if none did.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer):
        self.text, self.stop_string = "", None
        self._sampling = sampling
        self._decoder = tokenizer.stream(sampling.skip_special_tokens)
        self._num_tokens = self._num_shown = 0

    def push(self, token_ids: Sequence[int]) -> int:
        """Adds tokens up to one that completes a stop string; returns how many it took."""
        for i, token in enumerate(token_ids):
            self._num_tokens += 1
            if self._add(self._decoder.push([token])):
                return i + 1
        return len(token_ids)

    def finish(self) -> None:
        """Adds the text that waited for further tokens."""
        self._add(self._decoder.flush())

    def take(self, *, finished: bool) -> str:
        """The text that was not taken yet; if more follows, without a possible stop string."""
        end = len(self.text)
        if not finished:
            end -= max(
                (
                    size
                    for stop in self._sampling.stop
                    for size in range(1, len(stop))
                    if self.text.endswith(stop[:size])
                ),
                default=0,
            )
        text = self.text[self._num_shown : end]
        self._num_shown = max(self._num_shown, end)
        return text

    def _add(self, text: str) -> bool:
        """Appends text; true if this completed a stop string, at which the text is then cut."""
        sampling, before = self._sampling, len(self.text)
        self.text += text
        if self._num_tokens <= sampling.min_tokens:
            return False
        # A stop string may begin in the earlier text, but it ends in the new one.
        begins = ((stop, max(0, before - len(stop) + 1)) for stop in sampling.stop)
        matches = [(at, stop) for stop, begin in begins if (at := self.text.find(stop, begin)) >= 0]
        if not matches:
            return False
        at, self.stop_string = min(matches)
        end = at + (len(self.stop_string) if sampling.include_stop_str_in_output else 0)
        self.text = self.text[:end]
        return True
