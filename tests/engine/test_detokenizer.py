"""What of a row's text is shown, and when."""

import numpy as np
import pytest

from spec_jax.config import SamplingParams
from spec_jax.decoding.state import LENGTH, RUNNING
from spec_jax.engine.detokenizer import Detokenizer
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


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(4, "ab"), (5, "abENDx"), (9, "abENDxEND"), (12, "abENDxENDEND")]
)
def test_a_stop_string_counts_from_the_token_after_min_tokens_on(min_tokens, text):
    params = SamplingParams(stop=("END",), min_tokens=min_tokens)
    detokenizer = Detokenizer(params, Letters())
    for letter in "abENDxENDEND":
        if detokenizer.stop_string is None:
            detokenizer.push([ord(letter)])
    detokenizer.finish()
    assert detokenizer.text == text


class Words(Letters):
    """A tokenizer whose tokens are words."""

    words = ("the ", "wolf and the seven ", "kids")

    def push(self, token_ids):
        return "".join(self.words[token] for token in token_ids)


@pytest.mark.parametrize("stops", [("seven", "and"), ("and", "seven"), ("seven", "and the", "and")])
def test_of_several_stop_strings_in_one_token_the_earliest_ends_the_text(stops):
    detokenizer = Detokenizer(SamplingParams(stop=stops), Words())
    assert detokenizer.push([0, 1, 2]) == 2
    assert detokenizer.text == "the wolf " and detokenizer.stop_string.startswith("and")
