"""Drafts from another tokenizer, from text to text: the output equals plain decoding."""

import dataclasses
import time

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spec_jax import LLM, SamplingParams, SpeculativeConfig
from spec_jax.engine.programs import Compiler
from spec_jax.errors import ConfigError, VocabularyMismatchError
from spec_jax.text.tokenizer import Tokenizer
from tests.often import often
from tests.pairs import write_model
from tests.vocabularies import LOSSLESS, OTHER_LANGUAGES, vocabulary

METHODS = ("universal_vocabulary", "universal_text")
PROMPTS = [
    "the quick brown fox jumps over the lazy dog, and then",
    "über",
    "What is the capital of France? " * 3 + "日本語のテキスト \U0001f980",
]
PAIRS = [
    ("byte level", "composing", "constant", "token"),
    ("byte level", "sentencepiece", "heuristic", "block"),
    ("sentencepiece", "byte level", "confidence", "token"),
    ("unigram", "sentencepiece", "adaptive", "block"),
    ("composing", "unigram", "oracle", "token"),
]
CASES = [(method, *pair) for pair in PAIRS for method in METHODS]
CASES = often(CASES, [CASES[0]])
TOKENS = 24
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
# A random model mostly speaks in halves of characters; these leave it letters.
LETTERS = {
    i: float("-inf")
    for i, spelt in enumerate([*vocabulary("byte level").bytes_of_tokens, None, None, None])
    if not spelt or not spelt.isalpha()
}


def bytes_only() -> Tokenizer:
    """Bytes and an end token: it needs more tokens for a text than any other."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    model = models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_token_ids=[256])


def digits_only() -> Tokenizer:
    """Two numbers, which no vocabulary of the others has."""
    vocab = {"[UNK]": 0, "[END]": 1, "4711": 2, "1789": 3}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    backend.add_special_tokens(["[UNK]", "[END]"])
    return Tokenizer(backend, eos_token_ids=[1])


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """A target and a draft of every tokenizer."""
    path = tmp_path_factory.mktemp("pairs")
    return {
        (role, name): write_model(path / role / name.replace(" ", "-"), vocabulary(name), seed=seed)
        for seed, role in enumerate(("target", "draft"))
        for name in LOSSLESS
    }


@pytest.fixture(scope="module")
def plain(directories):
    targets = {}

    def llm(name):
        if name not in targets:
            targets[name] = LLM(directories["target", name], max_num_seqs=4)
        return targets[name]

    return llm


@pytest.fixture(scope="module")
def drafted(directories, plain):
    llms = {}

    def llm(method, target="byte level", drafter="composing", policy="constant", **options):
        key = (method, target, drafter, policy, *sorted(options.items()))
        if key not in llms:
            config = SpeculativeConfig(
                method=method,
                draft=directories["draft", drafter],
                num_speculative_tokens=4,
                draft_length_policy=policy,
                **options,
            )
            llms[key] = plain(target).with_speculation(config)
        return llms[key]

    return llm


def ids_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(("method", "target", "drafter", "policy", "verification"), CASES)
def test_greedy_text_is_plain_decodings(
    plain, drafted, method, target, drafter, policy, verification
):
    """Prompts of different lengths; every policy, both verifications that sample."""
    expected = ids_of(plain(target).generate(PROMPTS, GREEDY))
    llm = drafted(method, target, drafter, policy, verification=verification)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert ids_of(outputs) == expected
    if policy == "constant":  # a separate program
        assert ids_of(llm.generate(PROMPTS[0], GREEDY)) == expected[:1]
    metrics = [output.metrics for output in outputs]
    assert sum(each.draft_tokens for each in metrics) > 0
    assert sum(each.accepted_tokens for each in metrics) > 0


@pytest.mark.parametrize("method", often(METHODS, ["universal_text"]))
@pytest.mark.slow
def test_special_tokens_and_what_ends_a_request(plain, drafted, method):
    """Chat markers in the prompt; the end token, a stop string and max_tokens in one batch."""
    target, llm = plain("byte level"), drafted(method)
    chat = target.tokenizer.encode_chat([{"role": "user", "content": "Where is the lake?"}])
    assert len({*chat} & set(target.tokenizer.special_tokens)) >= 2
    eos = target.eos_token_ids[-1]
    (free,) = target.generate([chat], dataclasses.replace(GREEDY, logit_bias=LETTERS))
    params = [
        dataclasses.replace(GREEDY, ignore_eos=False, logit_bias={eos: 3.0}),
        dataclasses.replace(GREEDY, logit_bias=LETTERS, stop=free.text[9:12]),
        dataclasses.replace(GREEDY, max_tokens=7),
    ]
    expected = target.generate([chat] * 3, params)
    outputs = llm.generate([chat] * 3, params)
    assert [each.finish_reason for each in outputs] == ["stop", "stop", "length"]
    assert expected[0].token_ids[-1] == eos and len(expected[0].token_ids) < TOKENS
    for output, other in zip(outputs, expected, strict=True):
        assert output.token_ids == other.token_ids and output.text == other.text


@pytest.mark.parametrize("method", often(METHODS, ["universal_text"]))
@pytest.mark.slow
def test_a_sampled_request_depends_on_its_seed_and_on_no_neighbour(drafted, method):
    llm = drafted(method)
    warm = [dataclasses.replace(GREEDY, temperature=0.9, seed=seed) for seed in (5, 5, 6)]
    together = ids_of(llm.generate([PROMPTS[0], PROMPTS[0], PROMPTS[2]], warm))
    assert together[0] == together[1]
    assert ids_of(llm.generate(PROMPTS[0], warm[0])) == together[:1]
    assert ids_of(llm.generate(PROMPTS[0], warm[2])) != together[:1]
    other = ids_of(llm.generate([PROMPTS[2], PROMPTS[1], PROMPTS[0]], warm[::-1]))
    assert other[::2] == together[::-2]


LONG = OTHER_LANGUAGES[1] * 8  # few tokens for many bytes
CAPACITY = 256
"""Tokens that the target has room for in a batch of these."""


@pytest.mark.parametrize("method", often(METHODS, ["universal_text"]))
@pytest.mark.slow
def test_a_text_that_outgrows_the_drafters_room_is_drafted_for_no_more(
    directories, plain, tmp_path, method
):
    """The drafter has hardly more than bytes; its room is twice the target's."""
    draft = write_model(tmp_path / "bytes", bytes_only())
    options = {"num_speculative_tokens": 4, "draft_length_policy": "constant"}
    target = plain("byte level")
    llm = target.with_speculation(SpeculativeConfig(method=method, draft=draft, **options))
    # One text has outgrown it from the start, one soon does, one does not.
    room = 2 * CAPACITY
    soon = LONG.encode()[: room - 24].decode(errors="ignore")
    assert len(LONG.encode()) > room
    prompts = [LONG, soon, PROMPTS[0]]
    longer = dataclasses.replace(GREEDY, max_tokens=40)
    outputs = llm.generate(prompts, longer)
    assert ids_of(outputs) == ids_of(target.generate(prompts, longer))
    assert max(output.usage.total_tokens for output in outputs) + 10 < CAPACITY
    drafts = [output.metrics.draft_tokens for output in outputs]
    assert drafts[0] == 0 < drafts[1] < drafts[2]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_a_drafter_of_nan_drafts_nothing_and_does_no_harm(plain, tmp_path, method):
    draft = write_model(tmp_path / "nan", vocabulary("composing"), noise=float("nan"))
    llm = plain("byte level").with_speculation(SpeculativeConfig(method=method, draft=draft))
    params = [GREEDY, dataclasses.replace(GREEDY, temperature=0.8, seed=3)]
    outputs = llm.generate(PROMPTS[:2], params)
    assert all(each.error is None and each.metrics.draft_tokens == 0 for each in outputs)
    assert ids_of(outputs[:1]) == ids_of(plain("byte level").generate(PROMPTS[0], GREEDY))


@pytest.mark.parametrize("sizes", [(3, 90), (90, 3)])
@pytest.mark.slow
def test_padded_embeddings_of_one_family_need_no_translation(plain, tmp_path, sizes):
    """As Qwen2's: 151936 rows in small models, 152064 in large ones, the same tokenizer."""
    paths = [
        write_model(tmp_path / role, vocabulary("byte level"), padding=padding, seed=seed)
        for seed, (role, padding) in enumerate(zip(("target", "draft"), sizes, strict=True))
    ]
    target = LLM(paths[0], max_num_seqs=4)
    config = SpeculativeConfig(method="draft_model", draft=paths[1])
    llm = target.with_speculation(config)
    params = [GREEDY, dataclasses.replace(GREEDY, temperature=0.7, top_p=0.9, seed=1), GREEDY]
    outputs = llm.generate(PROMPTS, params)
    assert ids_of(outputs)[::2] == ids_of(target.generate(PROMPTS, GREEDY))[::2]
    assert all(output.error is None for output in outputs)
    assert sum(output.metrics.accepted_tokens for output in outputs) > 20


def test_vocabularies_that_share_nothing(plain, tmp_path):
    draft = write_model(tmp_path / "digits", digits_only())
    config = SpeculativeConfig(method="universal_vocabulary", draft=draft)
    with pytest.raises(VocabularyMismatchError) as caught:
        plain("byte level").with_speculation(config)
    message = str(caught.value)
    assert "digits" in message and "no token in common" in message
    assert "universal_text" in message


@pytest.mark.parametrize("method", METHODS)
def test_a_drafter_must_be_named(method):
    with pytest.raises(ConfigError, match=f"{method!r} needs draft=.*--draft"):
        SpeculativeConfig(method=method)


@pytest.mark.slow
def test_rows_join_and_leave_and_compiling_is_in_no_ones_prefill(plain, drafted, monkeypatch):
    """Twice as many prompts as rows; what each says does not depend on when it joins."""
    prompts = [*PROMPTS, *PROMPTS[::-1]] * 2
    params = [dataclasses.replace(GREEDY, max_tokens=4 + 5 * i % 17) for i in range(len(prompts))]
    expected = ids_of(plain("byte level").generate(prompts, params))
    llm = plain("byte level").with_speculation(drafted("universal_text").speculative_config)
    program = Compiler.program

    def slow(compiler, key, *args, **options):
        """More seconds of compilation for each program of the drafter's prompts."""
        if key not in compiler.names() and "drafter" in key[0]:
            time.sleep(2.0)
            compiler.seconds += 2.0
        return program(compiler, key, *args, **options)

    monkeypatch.setattr(Compiler, "program", slow)
    outputs = llm.generate(prompts, params)
    assert ids_of(outputs) == expected
    assert outputs[0].metrics.compile_seconds > 2
    assert all(output.metrics.prefill_seconds < 2 for output in outputs)
