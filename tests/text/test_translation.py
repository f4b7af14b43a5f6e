"""Text survives the way to another tokenizer and back; the target's tokens never change."""

import functools
import random
from collections.abc import Sequence

import pytest

from spec_jax.text.spelling import Speller, Spelt, special_symbol
from spec_jax.text.translation import TextTranslator, longest_diagonal
from tests.prompts import COPY_PROMPTS, PROMPTS
from tests.text.test_tokenizer import demo_tokenizer
from tests.vocabularies import CORPUS, LOSSLESS, LOSSY, hard_strings, vocabulary

COMPOSED = "composing"


@functools.cache
def translator(target: str, drafter: str) -> TextTranslator:
    return TextTranslator(vocabulary(target), vocabulary(drafter))


def symbols_of(speller: Speller, ids: Sequence[int]) -> str:
    return "".join(speller.symbols(i) or "" for i in ids)


def there_and_back(translator: TextTranslator, ids: list[int], cut: int) -> tuple[float, float]:
    """Lets a drafter that knows how a text goes on draft the rest of it.

    Returns:
      Whether the proposal is the target's own continuation, and whether it reads like it.
    """
    known, rest = ids[:cut], ids[cut:]
    row = translator.row()
    before = list(known)
    row.extend(known)
    assert known == before
    text = symbols_of(translator.target, rest)
    if not row.has_text and translator.target.strips_first_space:
        text = text.removeprefix(" ")
    drafted = translator.drafter.spell(text, at_start=not row.length).ids
    proposal = row.propose(drafted)
    assert known == before
    found = symbols_of(translator.target, proposal)
    if not row.has_text and translator.target.strips_first_space:
        found = found.removeprefix(" ")
    # What the target says next, whatever was drafted, is the drafter's context as well.
    revision = row.extend(rest)
    assert row.drafter_ids[revision.num_kept :] == revision.ids
    return proposal == rest, found == text


def shares(translator: TextTranslator, texts: Sequence[str], seed: int = 0) -> tuple[float, float]:
    draw = random.Random(seed)
    same = read_alike = 0.0
    for text in texts:
        ids = translator.target._tokenizer.encode(text)
        one, other = there_and_back(translator, ids, draw.randint(0, len(ids)))
        same, read_alike = same + one, read_alike + other
    return same / len(texts), read_alike / len(texts)


def least_shares(target: str, drafter: str) -> tuple[float, float]:
    """Measured on 10,000 strings, less 0.01."""
    if drafter == COMPOSED != target:  # it composes what the target does not
        return 0.93, 0.94
    if drafter == target:
        return 0.98, 0.99
    # A literal ▁ is a space to SentencePiece.
    return 0.94, 0.95


@pytest.mark.parametrize("drafter", LOSSLESS)
@pytest.mark.parametrize("target", LOSSLESS)
def test_strings_survive(target, drafter):
    """10,000 strings in all: a part of them for each pair."""
    pairs = [(one, other) for one in LOSSLESS for other in LOSSLESS]
    texts = list(hard_strings(10_000))[pairs.index((target, drafter)) :: len(pairs)]
    found = shares(translator(target, drafter), texts)
    assert all(a >= b - 0.02 for a, b in zip(found, least_shares(target, drafter), strict=True)), (
        found
    )


@pytest.mark.slow
@pytest.mark.parametrize("drafter", LOSSLESS)
@pytest.mark.parametrize("target", LOSSLESS)
def test_all_strings_survive(target, drafter):
    found = shares(translator(target, drafter), list(hard_strings(10_000)))
    assert all(a >= b for a, b in zip(found, least_shares(target, drafter), strict=True)), found


@pytest.mark.parametrize("lossy", LOSSY)
def test_lossy_vocabularies_do_no_harm(lossy):
    """They draft little of such strings, but nothing raises and nothing known changes."""
    texts = list(hard_strings(120))
    for target, drafter in [(lossy, "byte level"), ("sentencepiece", lossy), (lossy, lossy)]:
        shares(translator(target, drafter), texts)
    plain = [text for text in CORPUS if text.islower()][:40]
    assert plain and shares(translator(lossy, "byte level"), plain)[0] > 0.8


@pytest.mark.weights
@pytest.mark.parametrize("other", ["sentencepiece", "unigram", COMPOSED])
def test_demo_model(demo_recipe, other):
    demo, tiny = demo_tokenizer(demo_recipe), vocabulary(other)
    texts = [*hard_strings(300), *PROMPTS[:20], *COPY_PROMPTS[:3]]
    least = (0.86, 0.86)  # SmolLM2 has no token for some bytes
    found = shares(TextTranslator(demo, tiny), texts), shares(TextTranslator(tiny, demo), texts)
    assert all(a >= b for pair in found for a, b in zip(pair, least, strict=True)), found


# Round after round


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("byte level", "sentencepiece"), ("sentencepiece", COMPOSED), ("unigram", "byte level")],
)
@pytest.mark.parametrize("seed", range(6))
def test_rounds(target, drafter, seed):
    """Drafts that are right, wrong after some tokens, or empty; the text always stays the text."""
    pair, draw = translator(target, drafter), random.Random(seed)
    text = " ".join([*draw.sample(CORPUS, 6), *hard_strings(10, seed)])
    text = text.replace("▁", "_").replace("<", "(")
    ids = vocabulary(target).encode(text)
    row, done = pair.row(), draw.randint(1, 20)
    had = list(row.extend(ids[:done]).ids)
    accepted = proposed = 0
    while done < len(ids):
        rest = symbols_of(pair.target, ids[done : done + 20])
        drafted = pair.drafter.spell(rest).ids[:6]
        right = draw.choice([0, 2, 6, 6])
        drafted[right:] = [draw.randrange(300, 600) for _ in drafted[right:]]
        proposal = row.propose(drafted)
        ahead = ids[done : done + len(proposal)]
        agreed = next((i for i, known in enumerate(ahead) if proposal[i] != known), len(ahead))
        accepted, proposed = accepted + agreed, proposed + len(proposal)
        revision = row.extend(ids[done : done + agreed + 1])
        done += agreed + 1
        whole = [*had, *drafted]
        had = [*whole[: revision.num_kept], *revision.ids]
        assert had == row.drafter_ids
        assert revision.num_kept == len(whole) or revision.ids[:1] != whole[revision.num_kept :][:1]
        known = symbols_of(pair.target, pair.without_first_ids(ids[:done]))
        if drafter != COMPOSED:  # the first space may be none of the text's
            read = symbols_of(pair.drafter, had[len(pair.drafter.first_ids) :])
            assert read.lstrip(" ") == known.lstrip(" ")
    assert accepted > 0.3 * proposed  # half of what is drafted is wrong on purpose


def test_a_right_draft_stays_in_the_drafters_cache():
    row = translator("byte level", "sentencepiece").row()
    target, drafter = vocabulary("byte level"), vocabulary("sentencepiece")
    first, then = "Repeat this text", " exactly as it is, word for word"
    row.extend(target.encode(first))
    had = row.drafter_ids
    assert had == drafter.encode(first)
    drafted = drafter.encode(first + then)[len(had) :]
    proposal = row.propose(drafted)
    assert target.decode(proposal) == then
    revision = row.extend(proposal)
    assert (revision.num_kept, revision.ids) == (len(had) + len(drafted), [])


def test_a_wrong_draft_is_rolled_back():
    row = translator("byte level", "byte level").row()
    tokenizer = vocabulary("byte level")
    row.extend(tokenizer.encode("The museum opens"))
    had = row.drafter_ids
    row.propose(tokenizer.encode(" every day at nine"))
    revision = row.extend(tokenizer.encode(" every week"))
    kept = len(had) + len(tokenizer.encode(" every"))
    assert (revision.num_kept, revision.ids) == (kept, tokenizer.encode(" week"))


def test_a_draft_that_ends_as_the_text_does_is_still_wrong():
    """Equal tokens at equal places, but after other text."""
    row, tokenizer = translator("byte level", "byte level").row(), vocabulary("byte level")
    row.extend(tokenizer.encode("A"))
    rest = " in the kitchen of the museum near the old bridge"
    row.propose(tokenizer.encode(" cat" + rest))
    row.extend(tokenizer.encode(" dog" + rest))
    assert tokenizer.decode(row.drafter_ids) == "A dog" + rest


@pytest.mark.parametrize("drafter", ["sentencepiece", "words"])
def test_cost_does_not_grow(drafter, monkeypatch):
    pair, tokenizer = translator("byte level", drafter), vocabulary("byte level")
    spelt = 0
    real = Speller.spell

    def counted(self, symbols, *args, **options):
        nonlocal spelt
        spelt += len(symbols)
        return real(self, symbols, *args, **options)

    row = pair.row()
    row.extend(tokenizer.encode(" ".join(CORPUS)))
    monkeypatch.setattr(Speller, "spell", counted)
    costs = []
    for _ in range(20):
        spelt = 0
        row.propose(row.drafter_ids[-30:-25])
        row.extend(tokenizer.encode(" every day"))
        costs.append(spelt)
    assert max(costs) < 400


# What is not plain text


def test_special_tokens():
    """By name, by role, spelt out: and text that reads like one stays text."""
    pair = translator("byte level", COMPOSED)
    target, drafter = vocabulary("byte level"), vocabulary(COMPOSED)
    # <|im_end|> is 2 there and 0 here; <|endoftext|> ends texts as <|end|> does.
    assert pair.encode_prompt([2, 0]) == [0, 1]
    start = drafter.encode("<|im_start|>")
    assert pair.encode_prompt([1]) == start and len(start) > 1
    text = target.encode("<|im_", add_special_tokens=False) + target.encode("end|>")
    assert 0 not in pair.encode_prompt(text)
    assert drafter.decode(pair.encode_prompt(text)) == "<|im_end|>"

    row = pair.row()
    row.extend(target.encode("hi"))
    assert row.propose([0, *drafter.encode(" you")])[0] == 2
    assert row.propose(drafter.encode("<|im_start|>user")) == target.encode("<|im_start|>user")
    assert row.propose([2, *drafter.encode(" you")]) == []  # <tool>, of which the target has none
    assert row.propose([]) == [] and row.propose([10**6]) == []


def test_prompts_are_cut_as_the_drafter_cuts_them():
    for target in LOSSLESS:
        for drafter in LOSSLESS:
            for text in PROMPTS[:5]:
                ids = translator(target, drafter).encode_prompt(vocabulary(target).encode(text))
                assert ids == vocabulary(drafter).encode(text), (target, drafter)


def test_chat_prompts():
    text = "<|im_start|>user\nWhere is it?<|im_end|>\n<|im_start|>assistant\n"
    ids = vocabulary("byte level").encode(text)
    assert translator("byte level", "byte level").encode_prompt(ids) == ids
    composed = translator("byte level", COMPOSED).encode_prompt(ids)
    assert composed.count(0) == 1 and vocabulary(COMPOSED).decode(composed, False) == text


def test_broken_characters():
    """A drafted token may end within a character, and so may the known text."""
    pair = translator("byte level", "sentencepiece")
    target, drafter = vocabulary("byte level"), vocabulary("sentencepiece")
    one = "🫨"
    ids, spelt = target.encode(one), drafter.encode(one)[2:]
    assert len(ids) == len(spelt) == 4
    for known in range(5):
        for drafted in range(5 - known):
            row = pair.row()
            row.extend([*target.encode("a"), *ids[:known]])
            assert row.drafter_ids[2:] == spelt[:known]
            assert row.propose(spelt[known : known + drafted]) == ids[known : known + drafted]
    row = pair.row()
    row.extend([*target.encode("a"), ids[1], ids[1]])  # bytes that never become a character
    assert row.drafter_ids[2:] == [spelt[1], spelt[1]]


@pytest.mark.parametrize("text", ["", " ", "  a", "a", "\n"])
def test_beginnings(text):
    for target in LOSSLESS:
        for drafter in LOSSLESS:
            pair = translator(target, drafter)
            ids = vocabulary(target).encode(text)
            for cut in range(len(ids) + 1):
                there_and_back(pair, ids, cut)


def test_longest_diagonal():
    def spelt(ids: str) -> Spelt:
        return Spelt([ord(i) for i in ids], [*range(len(ids))], [*range(1, len(ids) + 1)])

    assert longest_diagonal(spelt("abcdef"), spelt("xbcdyf")) == (1, 1, 3)
    assert longest_diagonal(spelt("abxcd"), spelt("abycd")) == (3, 3, 2)  # the last of equals
    assert longest_diagonal(spelt("abc"), spelt("xabc")) == (0, 0, 0)  # at other places
    assert longest_diagonal(spelt(""), spelt("abc")) == (0, 0, 0)
    assert special_symbol(7) == chr(263)
