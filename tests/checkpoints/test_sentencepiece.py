"""A directory with a SentencePiece tokenizer.model alone gives the ids of sentencepiece itself."""

import functools
import io
import unicodedata
from pathlib import Path

import pytest
import sentencepiece

from spec_jax import CheckpointError
from spec_jax.checkpoints.hf_tokenizer import tokenizer_from_directory
from spec_jax.checkpoints.sentencepiece_model import read_sentencepiece
from tests.checkpoints.tiny import TEMPLATE, write_json
from tests.vocabularies import CORPUS, hard_strings

AS_IT_IS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS = {
    "llama": {"model_type": "bpe", "byte_fallback": True, "split_digits": True, **AS_IT_IS},
    "gemma": {
        "model_type": "bpe",
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<turn>", "<|x|>"],
        **AS_IT_IS,
    },
    "bpe": {"model_type": "bpe"},
    "unigram": {"model_type": "unigram", "byte_fallback": True, **AS_IT_IS},
    "unigram without bytes": {"model_type": "unigram", **AS_IT_IS},
    "t5": {"model_type": "unigram", "byte_fallback": True},
    "small letters": {"model_type": "unigram", "normalization_rule_name": "nfkc_cf"},
}


@functools.cache
def model(kind: str) -> bytes:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=900,
        num_threads=1,
        minloglevel=2,
        **KINDS.get(kind, {"model_type": kind, "hard_vocab_limit": False}),
    )
    return written.getvalue()


def directory(path: Path, kind: str = "llama", **config) -> Path:
    (path / "tokenizer.model").write_bytes(model(kind))
    write_json(path / "config.json", {"model_type": "llama", "eos_token_id": 2})
    if config:
        write_json(path / "tokenizer_config.json", config)
    return path


def rewrites(kind: str) -> bool:
    return not AS_IT_IS.items() <= KINDS[kind].items()


def texts(kind: str) -> list[str]:
    """Without names of pieces, which only a Hugging Face tokenizer reads in a text."""
    names = ("<s>", "</s>", "<unk>", "<0x")
    found = [*hard_strings(1500), *CORPUS[:200], "", " ", "<turn>hi<|x|><|x|> there <turn> "]
    found = [text for text in found if not any(name in text for name in names)]
    if rewrites(kind):
        # `tokenizers` rewrites by what a reader takes for one character, sentencepiece by the
        # longest match: they differ where several marks stand on one letter.
        mark = {"Mn", "Mc", "Me"}
        found = [text for text in found if mark.isdisjoint(map(unicodedata.category, text))]
        # and a last ▁ is a space to sentencepiece alone
        found = [text for text in found if "▁" not in text]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_same_ids(kind, tmp_path):
    tokenizer = tokenizer_from_directory(directory(tmp_path, kind))
    reference = sentencepiece.SentencePieceProcessor(model_proto=model(kind))
    for text in texts(kind):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text), text
        assert tokenizer.encode(text) == [1, *ids]
        if "byte_fallback" in KINDS[kind] and not rewrites(kind):
            assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_what_the_model_says(tmp_path):
    tokenizer = tokenizer_from_directory(directory(tmp_path))
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_tokens == {0: "<unk>", 1: "<s>", 2: "</s>"}
    assert tokenizer.encode("<s></s>", add_special_tokens=False) == [1, 2]
    assert tokenizer.token_bytes(0x41 + 3) == b"A" and tokenizer.token(0x41 + 3) == "<0x41>"


def test_what_the_directory_says(tmp_path):
    path = directory(
        tmp_path,
        tokenizer_class="LlamaTokenizer",
        add_bos_token=False,
        add_eos_token=True,
        chat_template=TEMPLATE,
        eos_token="<|end|>",
        added_tokens_decoder={
            "900": {"content": "<|end|>", "special": True, "normalized": False},
        },
    )
    write_json(path / "config.json", {"model_type": "llama"})
    tokenizer = tokenizer_from_directory(path)
    assert tokenizer.eos_token_ids == (900,)
    assert tokenizer.encode("the")[-1] == 900 and tokenizer.encode("the")[0] != 1
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert sorted(file.name for file in path.iterdir()) == [
        "config.json",
        "tokenizer.model",
        "tokenizer_config.json",
    ]


def test_tokenizer_json_comes_first(tmp_path):
    directory(tmp_path)
    tokenizer_from_directory(tmp_path).save(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.model").write_bytes(b"unread")
    assert tokenizer_from_directory(tmp_path).vocab_size == 900


def test_saved_and_read_again(tmp_path):
    tokenizer = tokenizer_from_directory(directory(tmp_path, "t5"))
    tokenizer.save(tmp_path / "tokenizer.json")
    again = tokenizer_from_directory(tmp_path)
    assert again.vocabulary_difference(tokenizer) is None
    assert all(again.encode(text) == tokenizer.encode(text) for text in CORPUS)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda data: b"", "of 0 pieces, 0 is the unknown"),
        (lambda data: data[:-50], "not a SentencePiece model"),
        (lambda data: b"\xff" * 100, "not a SentencePiece model"),
        (lambda data: model("char"), "kind 4; supported: unigram (1) and BPE (2)"),
    ],
)
def test_bad_files(tmp_path, damage, said):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(damage(model("llama")))
    with pytest.raises(CheckpointError) as caught:
        read_sentencepiece(path)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_spaces_after_words(tmp_path):
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=500,
        treat_whitespace_as_suffix=True,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    with pytest.raises(CheckpointError, match=r"give a tokenizer\.json instead"):
        read_sentencepiece(tmp_path / "tokenizer.model")
