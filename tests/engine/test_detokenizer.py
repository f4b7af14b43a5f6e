"""What of a row's text is shown, and when."""

import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.state import LENGTH, RUNNING
from spec_jax.engine.requests import Request
from spec_jax.engine.sequence import Origin, Sequence
from spec_jax.text.tokenizer import StreamDecoder


class Letters(StreamDecoder):
    """A tokenizer, and its stream, whose tokens are characters."""

    def stream(self, skip_special_tokens):
        return self

    def push(self, token_ids):
        return "".join(map(chr, token_ids))

    def flush(self):
        return ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("abEND", ["a", "b", "", "", ""]),
        ("aENd", ["a", "", "", "ENd"]),
        ("aEENDx", ["a", "", "E", "", ""]),
        ("aE", ["a", "E"]),
    ],
)
def test_text_that_may_become_a_stop_string_is_held_back_and_no_longer(text, shown):
    params = SamplingParams(stop=("END", "never"))
    prompt = Request([1], params, np.zeros((2,), np.uint32), (), max_length=99)
    sequence = Sequence(0, prompt, Origin(), Letters())
    seen = []
    for i, letter in enumerate(text):
        if sequence.finish_reason is None:
            last = i == len(text) - 1
            seen.append(sequence.append([ord(letter)], LENGTH if last else RUNNING).text)
    assert seen == shown
    assert sequence.finish_reason == ("stop" if "END" in text else "length")
