"""Masks allow exactly what the grammar continues with, and looking ahead leaves no trace."""

import re
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher
from tokenizers import decoders, models, pre_tokenizers

from spec_jax import ConfigError, StructuredOutputsParams
from spec_jax.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from spec_jax.text.grammar import Grammar, GrammarCompiler, stack_masks
from spec_jax.text.tokenizer import Tokenizer
from tests.checkpoints.test_gguf_tokenizer import metadata, sentencepiece_metadata
from tests.grammars import random_grammars

ROWS = 320
"""Rows of the embedding: the tokenizer below has fewer tokens."""


def byte_level(**options) -> Tokenizer:
    """Bytes, some tokens of several bytes, and three special tokens of which two end a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = ["ab", "abc", '"}', '{"', '":', "tr", "ue", "true"]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate([*alphabet, *longer])}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "<end>", "<eot>"])
    ends = [backend.token_to_id(name) for name in ("<end>", "<eot>")]
    return Tokenizer(backend, **{"eos_token_ids": ends, **options})


TOKENIZER = byte_level()
COMPILER = GrammarCompiler(TOKENIZER, ROWS)
ENDS = list(TOKENIZER.eos_token_ids)


def compiled(
    compiler: GrammarCompiler = COMPILER, stops: Sequence[int] = ENDS, **params
) -> Grammar:
    return compiler.compile(StructuredOutputsParams(**params), stops)


def ids_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def texts_of(params: dict, tokenizer=TOKENIZER, compiler=COMPILER, stops=ENDS) -> list[str]:
    """Every whole output, by walking the masks from fresh grammars."""
    whole, open_ends = [], [[]]
    while open_ends:
        tokens = open_ends.pop()
        grammar = compiled(compiler, stops, **params)
        grammar.advance(tokens)
        allowed = ids_of(grammar.masks([])[0])
        assert (stops[0] in allowed) == grammar.is_complete
        assert all((stop in allowed) == (stops[0] in allowed) for stop in stops)
        if grammar.is_complete:
            whole.append(tokenizer.decode(tokens))
        open_ends += [[*tokens, token] for token in allowed if token not in stops]
    return whole


def test_the_masks_of_a_small_expression_spell_its_texts_and_no_others():
    expression = "a(bc?|[xé]){1,2}"
    letters = ["", *"abcxé"]
    words = {
        a + b + c + d + e
        for a in "a"
        for b in letters
        for c in letters
        for d in letters
        for e in letters
    }
    expected = {word for word in words if re.fullmatch(expression, word)}
    found = texts_of({"regex": expression})
    assert set(found) == expected
    # "abc" is three tokens, two or one.
    assert found.count("abc") == 4 - 1


def test_the_masks_of_a_schema_spell_its_values():
    schema = {
        "x-guidance": {"whitespace_flexible": False},
        "type": "object",
        "properties": {"a": {"enum": [True, "b"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert set(texts_of({"json": schema})) == {'{"a":true}', '{"a":"b"}'}


HARD_TO_SPELL = [
    "a.b",
    "a+",
    "(a|b)",
    "[ab]",
    "a b",
    "<s>",
    "\\d",
    "^$",
    "a\n",
    "é",
    "{2}",
    "a#&~-",
    '"',
]


def test_a_choice_is_literal():
    assert set(texts_of({"choice": HARD_TO_SPELL})) == set(HARD_TO_SPELL)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "ab" word?\nword: "c" | "(" word ")"',
        # As vLLM's example begins.
        '\n    ?start: "ab" word?\n\n    ?word: "c" | "(" word ")"\n',
        'root ::= "ab" word?\nword ::= "c" | "(" word ")"',
    ],
)
def test_grammars_of_both_kinds_recur(grammar):
    read = compiled(grammar=grammar)
    assert {TOKENIZER.decode([i]) for i in ids_of(read.masks([])[0])} == {"a", "ab", "abc"}
    read.advance(ids("ab((c)"))
    assert not read.is_complete and ids_of(read.masks([])[0]) == ids(")")
    read.advance(ids("ab((c))"))
    assert read.is_finished


def test_any_json_object():
    grammar = compiled(json_object=True)
    assert not set(ids_of(grammar.masks([])[0])) & {*ids("["), *ids("t")}
    grammar.advance(ids('{"x":[1,{}]}'))
    assert grammar.is_complete and grammar.error is None


@pytest.mark.parametrize("make", [metadata, sentencepiece_metadata])
def test_other_tokenizers_spell_the_same_texts(make):
    tokenizer = tokenizer_from_gguf(make())
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    stops = list(tokenizer.eos_token_ids)
    found = texts_of({"regex": "on(e|ly)"}, tokenizer, compiler, stops)
    assert set(found) == {"one", "only"}


def test_stop_tokens_are_allowed_where_the_output_may_end_and_nowhere_else():
    grammar = compiled(regex="a+")
    assert ids_of(grammar.masks([])[0]) == ids("a")
    grammar.advance(ids("a"))
    assert ids_of(grammar.masks([])[0]) == [*ids("a"), *ENDS]
    assert grammar.is_complete and not grammar.is_finished


def test_only_stop_tokens_follow_the_end_and_nothing_follows_a_stop_token():
    grammar = compiled(regex="ab")
    assert not grammar.is_complete
    places = grammar.masks([*ids("ab"), ENDS[1], ENDS[0]])
    assert [ids_of(mask) for mask in places[2:]] == [ENDS, [], []]
    grammar.advance(ids("ab"))
    assert grammar.is_finished
    assert ids_of(grammar.masks([])[0]) == ENDS
    grammar.advance([*ids("ab"), ENDS[1]])
    assert grammar.is_finished and grammar.error is None
    assert not grammar.masks([]).any()


def test_a_models_end_token_is_text_to_no_one_and_ends_only_requests_that_say_so():
    own = ids("x")[0]
    grammar = compiled(stops=[own], regex="ax?")
    grammar.advance(ids("a"))
    # The request's stop token, but neither the model's nor the letter as text.
    assert ids_of(grammar.masks([])[0]) == [own]
    nobody = compiled(stops=[], regex="a")
    nobody.advance(ids("a"))
    assert not nobody.masks([]).any() and nobody.is_finished and nobody.error is None


def test_the_name_of_a_special_token_is_spelt_as_text():
    for expression in ("<eot>a", "<s>a"):
        assert ids_of(compiled(regex=expression).masks([])[0]) == ids("<")
    # Even if the model's end token is not marked as special.
    backend = tokenizers.Tokenizer.from_str(TOKENIZER.to_json())
    backend.add_tokens(["</s>"])
    plain = Tokenizer(backend, eos_token_ids=[backend.token_to_id("</s>")])
    stops = list(plain.eos_token_ids)
    grammar = compiled(GrammarCompiler(plain, ROWS), stops, regex="</s>a")
    assert ids_of(grammar.masks([])[0]) == ids("<")


def test_padding_rows_and_special_tokens_are_never_allowed():
    for vocab_size in (TOKENIZER.vocab_size, TOKENIZER.vocab_size + 1, ROWS, ROWS + 7):
        grammar = compiled(GrammarCompiler(TOKENIZER, vocab_size), regex="(?s:.)*")
        (mask,) = grammar.masks([])
        assert mask.shape == (-(-vocab_size // 32),)
        assert max(ids_of(mask)) == max(ENDS)
        assert TOKENIZER.encode("<s>")[0] not in ids_of(mask)


def test_a_committed_token_that_is_not_allowed_is_an_error_that_stays():
    grammar = compiled(regex="ab")
    grammar.advance(ids("ax"))
    assert grammar.error == f"after 1 tokens: token {ids('x')[0]} is not allowed there"
    grammar.advance(ids("axb"))
    assert "after 1 tokens" in grammar.error and not grammar.masks(ids("b")).any()


def limited(states: int) -> Grammar:
    """A grammar whose parser may take on so few states."""
    tokens, end = COMPILER.tokens
    source = LLMatcher.grammar_from_regex("[ab]*a[ab]{14}")
    return Grammar(tokens, source, ENDS, end, ROWS, max_lexer_states=states)


def test_a_grammar_that_outgrows_the_parser_ends_its_row_with_the_reason():
    grammar, text = limited(30), ids("abaabaababbaabaabaab" * 4)
    for length in range(len(text)):
        grammar.advance(text[:length])
        if not grammar.masks([]).any():
            break
    assert "too many states" in grammar.error and grammar.error.startswith(f"after {length} tok")
    grammar.advance(text)
    assert not grammar.masks(ids("a")).any()


def test_what_drafts_cost_the_parser_does_not_concern_the_row():
    rng = np.random.default_rng(0)
    text = ids("".join(rng.choice(["a", "b"], 12)))
    plain, drafting = limited(40), limited(40)
    for length in range(len(text)):
        plain.advance(text[:length])
        expected = plain.masks([]).tolist()
        drafting.advance(text[:length])
        for _ in range(20):
            draft = ids("".join(rng.choice(["a", "b"], 3)))
            assert drafting.masks(draft)[:1].tolist() == expected
            assert drafting.masks(draft).any(1).all()
        assert drafting.error == plain.error is None


def test_advance_reads_only_what_is_new():
    grammar, whole = compiled(regex="[ab]{5}"), ids("abbab")
    for length in (0, 1, 1, 4, 5):
        grammar.advance(whole[:length])
        fresh = compiled(regex="[ab]{5}")
        fresh.advance(whole[:length])
        assert grammar.masks([]).tolist() == fresh.masks([]).tolist()


def walk(grammar: Grammar, rng: np.random.Generator, tokens: list[int], limit: int) -> list[int]:
    """Random allowed tokens, one at a time, up to a stop token or the limit."""
    for _ in range(limit):
        grammar.advance(tokens)
        allowed = ids_of(grammar.masks([])[0])
        if not allowed:
            break
        tokens = [*tokens, int(rng.choice(allowed))]
        if tokens[-1] in ENDS:
            break
    return tokens


def test_a_thousand_random_grammars_walk_to_texts_that_they_accept():
    rng, ended = np.random.default_rng(0), 0
    for params, accepts in random_grammars(1000):
        tokens = walk(compiled(**params), rng, [], 200)
        if tokens[-1] in ENDS:
            ended += 1
            assert accepts(TOKENIZER.decode(tokens)), (params, tokens)
    assert ended == 1000


def test_the_places_of_a_draft_are_those_of_one_token_at_a_time_and_leave_no_trace():
    rng = np.random.default_rng(1)
    for params, _ in random_grammars(200, seed=2):
        tokens = walk(compiled(**params), rng, [], 60)
        start = int(rng.integers(len(tokens)))
        grammar = compiled(**params)
        grammar.advance(tokens[:start])
        before = grammar.masks([]).tolist()
        draft = tokens[start : start + 6]
        broken = int(rng.integers(2 * len(draft)))  # half of the drafts go wrong somewhere
        draft[broken : broken + 1] = [int(rng.integers(ROWS))] * (broken < len(draft))
        together = grammar.masks(draft)
        assert grammar.masks([]).tolist() == before
        assert together.shape == (len(draft) + 1, ROWS // 32)
        legal = True
        for place in range(len(draft) + 1):
            apart = compiled(**params)
            apart.advance([*tokens[:start], *draft[:place]])
            legal = legal and apart.error is None
            expected = apart.masks([])[0] if legal else np.zeros(ROWS // 32, np.uint32)
            assert together[place].tolist() == expected.tolist(), (params, draft, place)
        grammar.advance(tokens)
        assert grammar.error is None


def test_the_places_of_a_tree_follow_their_own_paths():
    grammar = compiled(regex="a[bc]x|[bc]y")
    #  a -> b, a -> x (not allowed), then a second root c -> y
    draft = [*ids("a"), *ids("b"), *ids("x"), *ids("c"), *ids("y")]
    ancestors = np.zeros((6, 5), bool)
    for place, path in enumerate([[], [0], [0, 1], [0, 2], [3], [3, 4]]):
        ancestors[place, path] = True
    places = [ids_of(mask) for mask in grammar.masks(draft, ancestors)]
    first = {*ids("a"), *ids("b"), *ids("c"), TOKENIZER.encode("ab")[0]} | set(places[0])
    assert set(places[0]) == first
    assert places[2:] == [ids("x"), [], ids("y"), ENDS]


@given(st.lists(st.booleans(), min_size=1, max_size=4), st.integers(1, 4))
def test_rows_without_a_grammar_are_allowed_everything(has, places):
    grammars = [compiled(regex="ab") if each else None for each in has]
    drafts = [ids("ab")[: places - 1] for _ in has]
    stacked = stack_masks(grammars, drafts, places, ROWS)
    assert stacked.shape == (len(has), places, ROWS // 32) and stacked.dtype == np.uint32
    for row, grammar in enumerate(grammars):
        if grammar is None:
            assert (stacked[row] == 0xFFFFFFFF).all()
        else:
            known = grammar.masks(drafts[row])
            assert stacked[row, : len(known)].tolist() == known.tolist()
            assert not stacked[row, len(known) :].any()


def test_ids_without_a_token_are_never_allowed():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i if i < 100 else i + 10 for i, token in enumerate(alphabet)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    holed = Tokenizer(backend, eos_token_ids=())
    (mask,) = compiled(GrammarCompiler(holed, 300), [], regex="(?s:.)").masks([])
    assert not set(range(100, 110)) & set(ids_of(mask))
    assert set(holed.encode("aé")[:2]) <= set(ids_of(mask))


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"regex": "a("}, "unclosed group"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": r"(a)\1"}, "backreferences are not supported"),
        ({"regex": "a^b"}, "lookarounds not supported yet"),
        ({"regex": r"[^\s\S]"}, "matches no text"),
        ({"json": '{"type": "foo"}'}, "Invalid type: foo"),
        ({"json": {"type": "object", "properties": 5}}, "properties must be an object"),
        ({"json": {"$ref": "#/x"}}, "Pointer '/x' does not exist"),
        ({"json": {"uniqueItems": True, "type": "array"}}, "uniqueItems"),
        ({"json": {"type": "integer", "minimum": 5, "maximum": 2}}, "minimum (5) is"),
        ({"json": {"type": "string", "pattern": "b("}}, "unclosed group"),
        ({"grammar": "start: a"}, 'unknown name: "a"'),
        ({"grammar": "root ::= a"}, "Rule 'a' not found"),
        ({"grammar": "root ::= [a"}, "Unexpected end of input at line 1"),
        ({"grammar": "abc"}, "Expected token ':'"),
    ],
)
def test_a_grammar_that_does_not_compile_is_refused_with_the_reason(params, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)) as error:
        compiled(**params)
    (name,) = params
    assert str(error.value).startswith(
        f"{name} is {getattr(StructuredOutputsParams(**params), name)!r}"
    )


def test_a_tokenizer_that_spells_no_bytes_is_refused():
    words = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    compiler = GrammarCompiler(Tokenizer(words, eos_token_ids=[1]), 2)
    with pytest.raises(ConfigError, match="this model's tokenizer"):
        compiled(compiler, [1], regex="a")
