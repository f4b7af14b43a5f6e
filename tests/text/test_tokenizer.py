"""Streams add up to the whole, differences are found, messages are checked."""

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from spec_jax import ConfigError, RequestError, checkpoints
from spec_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from spec_jax.text.tokenizer import Tokenizer
from tests.checkpoints.test_gguf_tokenizer import HARD_TEXTS, metadata, sentencepiece_metadata
from tests.checkpoints.tiny import TOKENS
from tests.prompts import COPY_PROMPTS, PROMPTS


def metaspace() -> Tokenizer:
    """A decoder that strips the first space without bytes to fall back on."""
    vocabulary = {"▁": 0, "▁a": 1, "b": 2, "▁▁": 3, "\ufffd": 4, "é": 5}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.Metaspace()
    return Tokenizer(backend, eos_token_ids=[0])


TOKENIZERS = {
    "byte level": lambda: tokenizer_from_gguf(metadata()),
    "sentencepiece": lambda: tokenizer_from_gguf(sentencepiece_metadata()),
    "no first space": lambda: tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False)),
    "metaspace": metaspace,
}


@functools.cache
def tokenizer_named(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


def streamed(tokenizer: Tokenizer, ids: list[int], sizes: list[int], **options) -> list[str]:
    """The pieces of text when ids arrive in groups of these sizes, over and over."""
    stream, pieces, at, turn = tokenizer.stream(**options), [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(stream.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*pieces, stream.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), sizes=st.lists(st.integers(1, 4), min_size=1), skip=st.booleans())
def test_pieces_are_the_whole(name, data, sizes, skip):
    tokenizer = tokenizer_named(name)
    # A few ids often, so that spaces, special tokens and broken characters meet.
    common = st.sampled_from(range(0, tokenizer.vocab_size, max(1, tokenizer.vocab_size // 12)))
    anything = st.integers(0, tokenizer.vocab_size + 2)  # padding rows too
    last = st.integers(max(0, tokenizer.vocab_size - 16), tokenizer.vocab_size - 1)
    ids = data.draw(st.lists(st.one_of(common, anything, last)))
    pieces = streamed(tokenizer, ids, sizes, skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte level", "sentencepiece", "no first space"])
@given(text=st.text(), sizes=st.lists(st.integers(1, 4), min_size=1))
def test_text_survives_and_is_never_given_out_broken(name, text, sizes):
    tokenizer = tokenizer_named(name)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, ids, sizes)
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_characters_appear_with_their_last_byte():
    tokenizer = tokenizer_named("byte level")
    ids = tokenizer.encode("a🙂b")
    assert streamed(tokenizer, ids, [1]) == ["a", "", "", "", "🙂", "b", ""]


def test_bytes_wait_for_the_end_of_their_run():
    """A SentencePiece run of bytes is text only if all of it is UTF-8."""
    tokenizer = tokenizer_named("sentencepiece")
    first = tokenizer.encode("日", add_special_tokens=False)[1:]
    e = tokenizer.encode("e", add_special_tokens=False)[-1]
    assert streamed(tokenizer, [e, *first, e], [1]) == ["e", "", "", "", "日e", ""]
    broken = [e, *first, first[0], e]
    assert tokenizer.decode(broken) == "e" + "\ufffd" * 4 + "e"
    assert "".join(streamed(tokenizer, broken, [1])) == tokenizer.decode(broken)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("kind", ["spaces", "bytes", "mixed"])
def test_cost_does_not_grow(name, kind, monkeypatch):
    """Decoding token by token decodes a bounded number of tokens for each."""
    tokenizer = tokenizer_named(name)
    decoded = 0
    real = Tokenizer.decode

    def counted(self, ids, skip_special_tokens=True):
        nonlocal decoded
        decoded += len(ids)
        return real(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    size = tokenizer.vocab_size
    space = next((i for i in range(size) if tokenizer.token(i) in ("▁", "Ġ")), 0)
    byte = min(100, size - 1)
    ids = {"spaces": [space], "bytes": [byte], "mixed": range(3 if size > 9 else 0, size)}[kind]
    ids = (list(ids) * 2000)[:2000]
    streamed(tokenizer, ids, [1])
    assert decoded <= 10 * len(ids)


@pytest.mark.weights
@given(data=st.data())
def test_demo_model(demo_recipe, data):
    tokenizer = demo_tokenizer(demo_recipe)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1)))
    assert "".join(streamed(tokenizer, ids, [1])) == tokenizer.decode(ids)


@pytest.mark.weights
@pytest.mark.parametrize("text", [*HARD_TEXTS, *PROMPTS, *COPY_PROMPTS])
def test_demo_model_keeps_text(demo_recipe, text):
    tokenizer = demo_tokenizer(demo_recipe)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert "".join(streamed(tokenizer, ids, [1, 3], skip_special_tokens=False)) == text


@functools.cache
def demo_tokenizer(recipe) -> Tokenizer:
    from spec_jax.checkpoints.gguf_file import GgufFile

    return tokenizer_from_gguf(GgufFile(checkpoints.locate(recipe, print)[1]).metadata)


# Differences


def test_equal_vocabularies():
    one, other = tokenizer_from_gguf(metadata()), tokenizer_from_gguf(metadata(pre="smollm"))
    assert one.vocabulary_difference(one) is None
    assert one.vocabulary_difference(other) is None


def test_different_vocabularies():
    tokens = list(TOKENS)
    tokens[7], tokens[9] = tokens[9], tokens[7]
    one, other = tokenizer_from_gguf(metadata()), tokenizer_from_gguf(metadata(tokens=tokens))
    difference = one.vocabulary_difference(other)
    assert difference == (
        f"2 of {len(TOKENS)} token ids differ: 7 is {TOKENS[7]!r} and {TOKENS[9]!r}, "
        f"9 is {TOKENS[9]!r} and {TOKENS[7]!r}."
    )


def test_a_larger_vocabulary_differs():
    kinds = [*metadata()["tokenizer.ggml.token_type"], 3]
    larger = tokenizer_from_gguf(metadata(tokens=[*TOKENS, "<|tool|>"], token_type=kinds))
    difference = tokenizer_from_gguf(metadata()).vocabulary_difference(larger)
    assert difference is not None
    assert f"{len(TOKENS)} is '<no token {len(TOKENS)}>' and '<|tool|>'" in difference


def test_unrelated_vocabularies():
    difference = tokenizer_named("byte level").vocabulary_difference(metaspace())
    assert difference is not None and "0 is '<|endoftext|>' and '▁'" in difference


# Text


def test_encoding_what_is_no_text():
    with pytest.raises(RequestError, match="UTF-8"):
        tokenizer_named("byte level").encode("half a pair: \ud800")


def test_padding_rows():
    tokenizer = tokenizer_named("byte level")
    assert tokenizer.token(tokenizer.vocab_size) == f"<no token {tokenizer.vocab_size}>"
    assert tokenizer.decode([tokenizer.vocab_size]) == ""


def test_truncation_and_padding_of_a_training_run_are_undone():
    backend = Backend(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert Tokenizer(backend, eos_token_ids=[]).encode("abab") == [0, 1, 0, 1]


# Messages


def test_chat():
    tokenizer = tokenizer_named("byte level")
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "the inn"},
    ]
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")
    assert prompt.endswith("the inn<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode_chat(messages)
    assert all(isinstance(i, int) for i in ids)
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_chat_without_a_template():
    with pytest.raises(ConfigError, match="no chat template"):
        metaspace().encode_chat([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "messages is \\[\\]"),
        ([{"role": "user"}], "needs a 'role' and a 'content'"),
        ([{"role": "usr", "content": "hi"}], "'usr' is unknown. Did you mean 'user'"),
        ([{"role": "user", "content": 3}], "content is int; give text"),
        ([{"role": "tool", "content": "hi"}], "refuses these messages: no tools here"),
    ],
)
def test_bad_messages(messages, said):
    with pytest.raises(RequestError, match=said):
        tokenizer_named("byte level").apply_chat_template(messages)


def test_a_texts_spellings_are_those_at_a_start_and_after_a_space():
    tokenizer = tokenizer_named("byte level")
    for text in ("the", " the", "  the"):
        found = tokenizer.spellings(text)
        assert [tokenizer.decode(ids) for ids in found] == ["the", " the"]
    assert [tokenizer.decode(ids) for ids in tokenizer.spellings("\n ")] == ["\n "]


def test_spellings_have_nothing_before_the_text():
    for name in ("sentencepiece", "no first space"):
        tokenizer = tokenizer_named(name)
        assert tokenizer.encode("on")[0] == 1  # a first token, where a text begins
        assert all(1 not in ids for ids in tokenizer.spellings("on"))
