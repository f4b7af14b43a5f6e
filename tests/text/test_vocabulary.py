"""What tokens stand for, which of them two vocabularies share, and how the others are spelt."""

import random

import numpy as np
import pytest
from tokenizers import AddedToken

from spec_jax.errors import VocabularyMismatchError
from spec_jax.text.tokenizer import Tokenizer
from spec_jax.text.vocabulary import MAX_SPELLING, VocabularyMap, special_counterparts
from tests.text.test_tokenizer import demo_tokenizer
from tests.vocabularies import CORPUS, LOSSLESS, LOSSY, hard_strings, rebuilt, vocabulary

ALL = [*LOSSLESS, *LOSSY]


def between(target: str | Tokenizer, drafter: str | Tokenizer, padding: int = 5) -> VocabularyMap:
    one, other = (vocabulary(t) if isinstance(t, str) else t for t in (target, drafter))
    return VocabularyMap.between(
        one,
        other,
        target_vocab_size=one.vocab_size + padding,
        drafter_vocab_size=other.vocab_size + 3,
        target_name="org/target",
        drafter_name="org/draft",
    )


# Bytes of tokens


@pytest.mark.parametrize("name", ALL)
def test_bytes_are_the_decoded_text(name):
    tokenizer, draw = vocabulary(name), random.Random(0)
    own = [tokenizer.encode(text, add_special_tokens=False) for text in hard_strings(200)]
    drawn = [[draw.randrange(tokenizer.vocab_size) for _ in range(8)] for _ in range(200)]
    for ids in [*own, *drawn]:
        ids = [i for i in ids if tokenizer.token_bytes(i) is not None]
        spelt = b"".join(tokenizer.token_bytes(i) or b"" for i in ids)
        decoded = tokenizer.decode(ids)
        if name == "word pieces":  # whose decoder joins marks to their words
            joined = decoded.removeprefix("##").replace(" ", "")
            assert spelt.replace(b" ", b"") == joined.encode()
        elif name in ("byte level", "composing") or "\ufffd" not in decoded:
            text = spelt.decode("utf-8", "replace")
            assert text in (decoded, " " + decoded), ids


def test_what_stands_for_nothing():
    for name in ALL:
        tokenizer = vocabulary(name)
        assert tokenizer.token_bytes(-1) is None
        assert tokenizer.token_bytes(tokenizer.vocab_size) is None
        assert all(tokenizer.token_bytes(i) is None for i in tokenizer.special_tokens)
    assert vocabulary("words").token_bytes(0) is None  # [UNK]


def test_kinds_of_tokens():
    llama = vocabulary("sentencepiece")
    assert llama.token_bytes(3 + 0xE6) == b"\xe6"
    assert {llama.token(i): llama.token_bytes(i) for i in llama.encode(" the")[1:]}[
        "▁the"
    ] == b" the"
    gpt = vocabulary("byte level")
    assert [gpt.token_bytes(i) for i in gpt.encode("\n\x00")] == [b"\n", b"\x00"]
    assert gpt.token_bytes(1) is None and gpt.special_tokens[1] == "<|im_start|>"
    added = rebuilt_with(gpt, [AddedToken("<tool> é"), AddedToken("<end>", special=True)])
    size = gpt.vocab_size
    assert added.token_bytes(size) == "<tool> é".encode()
    assert added.token_bytes(size + 1) is None


def rebuilt_with(tokenizer: Tokenizer, added: list[AddedToken], **roles) -> Tokenizer:
    import json

    roles = {"eos": list(tokenizer.eos_token_ids), "bos": None} | roles
    changed = rebuilt(json.loads(tokenizer.to_json()), **roles)
    changed.backend.add_tokens(added)
    return Tokenizer(changed.backend, eos_token_ids=roles["eos"], bos_token_id=roles["bos"])


# The map


@pytest.mark.parametrize("drafter", LOSSLESS)
@pytest.mark.parametrize("target", LOSSLESS)
def test_map(target, drafter):
    found = between(target, drafter)
    one, other = vocabulary(target), vocabulary(drafter)
    ids = np.flatnonzero(found.to_drafter >= 0)
    own = found.to_drafter[ids]
    assert len(set(own.tolist())) == len(own)
    np.testing.assert_array_equal(found.to_target[own], ids)
    assert (found.to_target >= 0).sum() == len(ids)
    specials = special_counterparts(one, other)
    for i, j in zip(ids.tolist(), own.tolist(), strict=True):
        assert specials.get(i) == j or one.token_bytes(i) == other.token_bytes(j) is not None
    assert found.coverage == len(ids) / (one.vocab_size + 5) > 0.2
    # nothing that both have is left out
    theirs = {other.token_bytes(j) for j in range(other.vocab_size)} - {None, b""}
    ours = {one.token_bytes(i) for i in range(one.vocab_size)} - {None, b""}
    assert len(ours & theirs) <= len(ids)
    if target == drafter:
        np.testing.assert_array_equal(found.to_drafter[: one.vocab_size], np.arange(one.vocab_size))


@pytest.mark.parametrize("drafter", LOSSLESS)
@pytest.mark.parametrize("target", LOSSLESS)
def test_spelling(target, drafter):
    """Every token is spelt byte for byte; a padding row is not."""
    found, one, other = between(target, drafter), vocabulary(target), vocabulary(drafter)
    shape = found.spelling.shape
    assert shape[0] == one.vocab_size + 5 and shape[1] == found.spelling_lengths.max()
    assert (
        found.spelling.dtype == found.spelling_lengths.dtype == found.to_drafter.dtype == np.int32
    )
    for i, (ids, length) in enumerate(zip(found.spelling, found.spelling_lengths, strict=True)):
        assert (ids[:length] >= 0).all() and (ids[length:] == -1).all()
        if found.to_drafter[i] >= 0:
            assert ids[:length].tolist() == [found.to_drafter[i]]
            continue
        read = b"".join(other.token_bytes(token) or b"" for token in ids[:length].tolist())
        piece = one.token_bytes(i)
        if piece is None and i in one.special_tokens:
            piece = one.special_tokens[i].encode()
        assert (piece or b"").endswith(read) and bool(length) == bool(piece), (i, piece, read)
        assert read == piece or length in (0, MAX_SPELLING)
    assert (found.spelling_lengths[-5:] == 0).all()


def test_special_tokens_by_name_and_role():
    found = between("byte level", "composing")
    assert found.to_drafter[2] == 0  # <|im_end|>
    assert found.to_drafter[0] == 1  # <|endoftext|> and <|end|> end texts
    assert found.to_drafter[1] == -1 and found.spelling_lengths[1] > 1  # <|im_start|>
    assert found.to_target[2] == -1  # <tool>
    assert between("sentencepiece", "unigram").to_drafter[:3].tolist() == [0, 1, 2]


def test_letters_and_bytes_stay_apart():
    """<0x61> reads like `a`, and only one of them can be `a`."""
    found, llama = between("sentencepiece", "byte level"), vocabulary("sentencepiece")
    gpt = vocabulary("byte level")
    letter = next(i for i in range(llama.vocab_size) if llama.token(i) == "a")
    assert gpt.token_bytes(int(found.to_drafter[letter])) == b"a"
    assert found.to_drafter[3 + 0x61] == -1 and found.spelling_lengths[3 + 0x61] == 1
    assert gpt.token_bytes(int(found.to_drafter[3 + 0xE6])) == b"\xe6"


def test_an_embedding_smaller_than_the_vocabulary():
    gpt = vocabulary("byte level")
    found = VocabularyMap.between(
        gpt, gpt, target_vocab_size=400, drafter_vocab_size=300, target_name="a", drafter_name="b"
    )
    assert found.to_drafter.max() < 300 and found.spelling.max() < 300
    assert (found.to_drafter[:300] == np.arange(300)).all() and found.coverage == 0.75


def test_no_token_in_common():
    import tokenizers
    from tokenizers import models

    strange = tokenizers.Tokenizer(models.WordLevel({"zyx": 0, "wvu": 1}, unk_token="zyx"))
    other = Tokenizer(strange, eos_token_ids=[])
    with pytest.raises(VocabularyMismatchError) as caught:
        between("byte level", other)
    message = str(caught.value)
    assert "org/draft" in message and "org/target" in message and "translated as text" in message


@pytest.mark.weights
def test_demo_model(demo_recipe):
    demo = demo_tokenizer(demo_recipe)
    found = between(demo, "byte level")
    assert 0 < found.coverage < 0.1
    assert (found.spelling_lengths > 0).sum() == sum(
        piece is not None or i in demo.special_tokens
        for i, piece in enumerate(demo.bytes_of_tokens)
    )
    assert between("byte level", demo).coverage > 0.6
    text = "\n".join(CORPUS[:20])
    spelt = [
        j
        for i in demo.encode(text)
        for j in found.spelling[i, : found.spelling_lengths[i]].tolist()
    ]
    assert vocabulary("byte level").decode(spelt) == text


# A reduced output vocabulary


def test_reduced():
    found = VocabularyMap.reduced([7, 2, 9], 12)
    assert found.to_target.tolist() == [7, 2, 9]
    assert found.to_drafter.tolist() == [-1, -1, 1, -1, -1, -1, -1, 0, -1, 2, -1, -1]
    assert found.spelling[:, 0].tolist() == list(range(12))
    assert (found.spelling_lengths == 1).all() and found.coverage == 0.25


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([1, 12], "can propose token 12, but the target's vocabulary has 12 tokens"),
        ([-1, 3], "can propose token -1"),
        ([4, 3, 4, 4], "3 of the draft's outputs stand for the target's token 4"),
        ([], "shape (0,)"),
        ([0.5], "type float64"),
        ([[1, 2]], "shape (1, 2)"),
    ],
)
def test_bad_reductions(ids, said):
    with pytest.raises(VocabularyMismatchError) as caught:
        VocabularyMap.reduced(np.array(ids) if ids else np.zeros(0, np.int64), 12)
    assert said in str(caught.value)
