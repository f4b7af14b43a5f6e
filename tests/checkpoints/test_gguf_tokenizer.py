"""Tokenizers built from GGUF metadata split and merge as the originals do."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from spec_jax import CheckpointError, checkpoints
from spec_jax.checkpoints.gguf_file import GgufFile
from spec_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from tests.checkpoints.tiny import ALPHABET, MERGES, SPECIALS, TEMPLATE, TOKENS
from tests.prompts import COPY_PROMPTS, PROMPTS

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = ["▁", "t", "h", "e", "▁t", "he", "▁the", "i", "n", "in", "▁in", "é", "th", "ne", "▁the▁"]
HARD_TEXTS = [
    "",
    " ",
    "  leading and   inner spaces  ",
    "tabs\tand\nlines\n\n\n  indented\r\nend",
    "In 2024 there were 12345 of them, 3.14159 each: v2.0b1!",
    "I'm sure you're right, we'll see; THEY'D say it's so",
    "def f(x):\n    return x**2  # squared\n\n\tif a!=b: pass",
    "naïve café — “quotes” … 日本語テスト 한국어 العربية हिन्दी русский ελληνικά",
    "🙂👩‍👩‍👧🇫🇷 e\u0301 \u00a0 \u3000 \u200b",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "https://example.org/a?b=c&d=%20 user@example.org __init__ snake_case camelCase",
]


def metadata(**changes) -> dict:
    """Metadata of the tiny byte-level tokenizer."""
    base = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": TOKENS,
        "token_type": [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)),
        "merges": [" ".join(merge) for merge in MERGES],
        "eos_token_id": 2,
        "bos_token_id": 1,
    }
    values = {f"tokenizer.ggml.{key}": value for key, value in (base | changes).items()}
    values = {key: value for key, value in values.items() if value is not None}
    return values | {"tokenizer.chat_template": TEMPLATE}


def sentencepiece_metadata(**changes) -> dict:
    """Metadata of a tiny SentencePiece vocabulary; later pieces score worse."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    base = {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES),
        "scores": [0.0] * 259 + [-float(i) for i in range(len(PIECES))],
        "merges": None,
    }
    return metadata(**(base | changes))


def test_what_the_metadata_says():
    tokenizer = tokenizer_from_gguf(metadata(add_bos_token=True))
    assert tokenizer.bos_token_id == 1
    assert tokenizer.encode("the")[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False) == [TOKENS.index("the")]
    assert tokenizer.vocab_size == len(TOKENS)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1


def test_every_token_that_ends_a_turn_ends_a_generation():
    assert tokenizer_from_gguf(metadata()).eos_token_ids == (0, 2)
    assert tokenizer_from_gguf(metadata(eos_token_id=0)).eos_token_ids == (0, 2)
    tokenizer = tokenizer_from_gguf(metadata(eos_token_id=5, eot_token_id=6, eom_token_id=7))
    assert tokenizer.eos_token_ids == (0, 2, 5, 6, 7)
    other = metadata(tokens=["<pad>", *TOKENS[1:]])  # no end among them
    assert tokenizer_from_gguf(other).eos_token_ids == (2,)
    kinds = [1] * len(TOKENS)  # spelt like ends, but ordinary text
    assert tokenizer_from_gguf(metadata(token_type=kinds)).eos_token_ids == (2,)


def test_user_defined_tokens_are_kept_in_the_text():
    kinds = metadata()["tokenizer.ggml.token_type"]
    tokenizer = tokenizer_from_gguf(metadata(token_type=[4, *kinds[1:]]))
    ids = tokenizer.encode("<|endoftext|>a<|im_end|>")
    assert (ids[0], ids[-1]) == (0, 2)
    assert tokenizer.decode(ids) == "<|endoftext|>a"


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        # These two patterns know small letters only.
        ("gpt-2", ["It", "'s", "Ġ2024", "'", "S", "ĊĊ"]),
        ("smollm", ["It", "'s", "Ġ", "2", "0", "2", "4", "'", "S", "ĊĊ"]),
        ("llama-bpe", ["It", "'s", "Ġ", "202", "4", "'S", "ĊĊ"]),
        ("qwen2", ["It", "'s", "Ġ", "2", "0", "2", "4", "'S", "ĊĊ"]),
        ("falcon", ["It", "'", "s", "Ġ", "202", "4", "'", "S", "ĊĊ"]),
        ("bloom", ["It's", "Ġ2024'S", "ĊĊ"]),
    ],
)
def test_words(pre, words):
    backend = tokenizer_from_gguf(metadata(pre=pre)).backend
    found = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("It's 2024'S\n\n")]
    assert found == words


@pytest.mark.parametrize(
    ("pre", "other"),
    [
        ("starcoder", "smollm"),
        ("refact", "smollm"),
        ("olmo", "gpt-2"),
        ("dbrx", "llama-bpe"),
        ("smaug-bpe", "llama-bpe"),
        ("stablelm2", "qwen2"),
    ],
)
def test_names_of_the_same_words(pre, other):
    found, expected = (
        tokenizer_from_gguf(metadata(pre=name)).backend.pre_tokenizer for name in (pre, other)
    )
    for text in HARD_TEXTS:
        assert found.pre_tokenize_str(text) == expected.pre_tokenize_str(text)
    # Llama 3 alone takes words that are tokens as they are, and begins with a token unasked.
    assert not tokenizer_from_gguf(metadata(pre=pre)).backend.model.ignore_merges
    assert tokenizer_from_gguf(metadata(pre=pre)).encode("a") == [TOKENS.index("a")]


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2"])
@pytest.mark.parametrize("text", HARD_TEXTS + PROMPTS)
def test_words_are_split_as_by_transformers(pre, text):
    """The patterns that transformers itself uses for these vocabularies."""
    from transformers.convert_slow_tokenizer import TikTokenConverter
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    pattern = PRETOKENIZE_REGEX if pre == "qwen2" else TikTokenConverter(vocab_file="x").pattern
    reference = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend = tokenizer_from_gguf(metadata(pre=pre)).backend
    assert backend.pre_tokenizer.pre_tokenize_str(text) == reference.pre_tokenize_str(text)


def test_llama3_takes_whole_words_without_merges():
    tokens = [*TOKENS, "xyz"]
    kinds = [3] * 3 + [1] * (len(tokens) - 3)
    llama = tokenizer_from_gguf(metadata(pre="llama-bpe", tokens=tokens, token_type=kinds))
    assert llama.encode("xyz") == [1, len(TOKENS)]  # begins with its first token unasked
    other = tokenizer_from_gguf(metadata(pre="gpt-2", tokens=tokens, token_type=kinds))
    assert other.encode("xyz") == [TOKENS.index(letter) for letter in "xyz"]


def test_qwen2_composes_characters():
    tokenizer = tokenizer_from_gguf(metadata(pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("é")


# SentencePiece


def greedy_merges(
    text: str, tokens: list[str], scores: list[float], *, space_first: bool = True
) -> list[str]:
    """SentencePiece's BPE by its definition: join the neighbours whose union scores best."""
    pieces = list("▁" * space_first + text.replace(" ", "▁"))
    while True:
        unions = [
            (-scores[tokens.index(pair)], i)
            for i in range(len(pieces) - 1)
            if (pair := pieces[i] + pieces[i + 1]) in tokens
        ]
        if not unions:
            break
        _, i = min(unions)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    spelt = []
    for piece in pieces:
        known = piece in tokens
        spelt += [piece] if known else [f"<0x{byte:02X}>" for byte in piece.encode()]
    return spelt


@given(st.text(alphabet="then é日x", min_size=1))
def test_sentencepiece(text):
    values = sentencepiece_metadata()
    tokens = values["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_from_gguf(values)
    ids = tokenizer.encode(text, add_special_tokens=False)
    expected = greedy_merges(text, tokens, values["tokenizer.ggml.scores"])
    assert [tokens[i] for i in ids] == expected
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text) == [1, *ids]


GEMMA_USER_DEFINED = ["\n", "\n\n", "  ", "   ", "\t", "<table>"]
GEMMA_CONTROL = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)


def gemma_metadata() -> dict:
    """As llama.cpp's converter writes Gemma's: runs of whitespace are user-defined tokens."""
    tokens = [*GEMMA_CONTROL, *GEMMA_USER_DEFINED, *BYTES, *PIECES]
    own = len(GEMMA_CONTROL) + len(GEMMA_USER_DEFINED)
    values = sentencepiece_metadata(
        tokens=tokens,
        token_type=[3] * len(GEMMA_CONTROL)
        + [4] * len(GEMMA_USER_DEFINED)
        + [6] * 256
        + [1] * len(PIECES),
        scores=[-1000.0] * own + [0.0] * 256 + [-float(i) for i in range(len(PIECES))],
        bos_token_id=2,
        eos_token_id=1,
        unknown_token_id=3,
        add_bos_token=True,
        add_space_prefix=False,
    )
    return values | {"tokenizer.chat_template": GEMMA_TEMPLATE}


@given(st.text(alphabet="the \n\té🙂"))
def test_gemma(text):
    """User-defined tokens are found first, the longest; what lies between them is merged."""
    values = gemma_metadata()
    tokens = values["tokenizer.ggml.tokens"]
    expected: list[str] = []
    longest_first = sorted(GEMMA_USER_DEFINED, key=len, reverse=True)
    for part in re.split(f"({'|'.join(longest_first)})", text):
        if part in GEMMA_USER_DEFINED:
            expected.append(part)
        elif part:
            expected += greedy_merges(
                part, tokens, values["tokenizer.ggml.scores"], space_first=False
            )
    tokenizer = tokenizer_from_gguf(values)
    ids = tokenizer.encode(text)
    assert [tokens[i] for i in ids] == ["<bos>", *expected]
    assert tokenizer.decode(ids) == text


def test_turns_of_gemma():
    tokenizer = tokenizer_from_gguf(gemma_metadata())
    assert [tokenizer.token(i) for i in tokenizer.eos_token_ids] == ["<eos>", "<end_of_turn>"]
    ids = tokenizer.encode_chat([{"role": "user", "content": " the<table> "}])
    assert [tokenizer.token(i) for i in ids[:2]] == ["<bos>", "<start_of_turn>"]
    spelt = "".join(map(tokenizer.token, ids))
    assert spelt.endswith("\nthe<table><end_of_turn>\n<start_of_turn><0x6D><0x6F><0x64>e<0x6C>\n")
    assert tokenizer.decode(ids).endswith("\nthe<table>\nmodel\n")


def test_text_that_reads_like_a_byte_token():
    pieces = [*"<0x41>", "<0", "<0x", "<0x4", "<0x41"]
    values = sentencepiece_metadata(
        tokens=["<unk>", "<s>", "</s>", *BYTES, "▁", *dict.fromkeys(pieces)],
        token_type=[2, 3, 3] + [6] * 256 + [1] * 11,
        scores=[0.0] * 259 + [-float(i) for i in range(11)],
        add_space_prefix=False,
    )
    tokenizer = tokenizer_from_gguf(values)
    ids = tokenizer.encode("<0x41>", add_special_tokens=False)
    assert [tokenizer.token(i) for i in ids] == ["<0x41", ">"]
    assert tokenizer.decode(ids) == "<0x41>"


def test_sentencepiece_without_a_first_space():
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata(add_space_prefix=False))
    ids = tokenizer.encode("the in", add_special_tokens=False)
    assert [tokenizer.token(i) for i in ids] == ["t", "he", "▁in"]
    assert tokenizer.decode(ids) == "the in"


# Errors


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": None}, "no tokenizer"),
        ({"model": "bert"}, "'bert'; supported: gpt2, llama"),
        ({"pre": "tekken"}, "'tekken'; supported: bloom, dbrx, deepseek-r1-qwen"),
        ({"token_type": [1]}, "265 tokens but 1 token types"),
        ({"merges": ["no such"]}, "makes no sense"),
        ({"merges": ["nospace"]}, "makes no sense"),
    ],
)
def test_bad_metadata(changes, said):
    with pytest.raises(CheckpointError) as caught:
        tokenizer_from_gguf(metadata(**changes))
    assert said in str(caught.value)


def test_sentencepiece_needs_scores():
    with pytest.raises(CheckpointError, match="scores"):
        tokenizer_from_gguf(sentencepiece_metadata(scores=None))


@pytest.mark.torch
@pytest.mark.weights
def test_demo_model_against_transformers(demo_recipe):
    """transformers builds a tokenizer from the same file, but ignores how it splits digits."""
    from transformers import AutoTokenizer

    _, path = checkpoints.locate(demo_recipe, print)
    ours = tokenizer_from_gguf(GgufFile(path).metadata)
    theirs = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [*HARD_TEXTS, *PROMPTS, *COPY_PROMPTS]
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text
        ids = ours.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == text
    assert ours.token(1) == theirs.bos_token == "<|im_start|>"
    assert theirs.eos_token_id in ours.eos_token_ids
    messages = [{"role": "user", "content": "Hi"}]
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == expected
    backend = theirs.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in [*texts, "ﬁ ½ ² Ⅷ ٣٤٥ 12a3"]:
        assert ours.encode(text) == theirs.encode(text), text


def test_alphabet_is_whole():
    assert len(ALPHABET) == 256
