"""The special tokens of speech models, as in Whisper (arXiv 2212.04356, section 2.3)."""

import dataclasses
from collections.abc import Mapping, Sequence

from spec_jax.errors import CheckpointError, ConfigError, did_you_mean
from spec_jax.text.tokenizer import Tokenizer

SECONDS_PER_TIMESTAMP = 0.02
TASKS = ("transcribe", "translate")
_ENGLISH_ONLY = 51864
"""Ids of English-only models; multilingual ones have at least one more."""


@dataclasses.dataclass(frozen=True)
class SpeechTokens:
    """Token ids of tasks, languages and times.

    Attributes:
      start: begins every text.
      end: ends it; all ids below are text.
      tasks: `transcribe` and `translate` (into English); empty for English-only models.
      languages: by their codes, such as `de`; empty for English-only models.
      no_timestamps: asks for text without timestamps.
      first_timestamp: 0.00 seconds; each further id is 0.02 seconds more.
      suppressed: tokens that are never generated: symbols and special tokens.
      suppressed_first: tokens that are not generated first.
    """

    start: int
    end: int
    tasks: Mapping[str, int]
    languages: Mapping[str, int]
    no_timestamps: int
    first_timestamp: int
    suppressed: tuple[int, ...] = ()
    suppressed_first: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        name: str,
        vocab_size: int,
        suppressed: Sequence[int],
        suppressed_first: Sequence[int],
    ) -> "SpeechTokens":
        """Finds them among the special tokens of a tokenizer, for a model of `vocab_size` ids.

        Raises:
          CheckpointError: a token that every speech model has is missing.
        """
        ids = {token: i for i, token in tokenizer.added_tokens.items()}
        needed = ("startoftranscript", "endoftext", "notimestamps", *TASKS)
        missing = [each for each in needed if f"<|{each}|>" not in ids]
        if missing:
            raise CheckpointError(
                f"the tokenizer of {name} has no token <|{missing[0]}|>, which a speech model "
                "needs; use the tokenizer.json that belongs to it."
            )
        start, translate = ids["<|startoftranscript|>"], ids["<|translate|>"]
        # Languages stand between the start and the tasks.
        codes = {token.strip("<|>"): i for token, i in ids.items() if start < i < translate}
        codes = {code: i for code, i in codes.items() if code not in TASKS}
        # English-only models have these tokens, too, but were not trained on them. As in OpenAI's
        # Whisper, they are recognised by their size.
        multilingual = vocab_size > _ENGLISH_ONLY
        no_timestamps = ids["<|notimestamps|>"]
        return cls(
            start=start,
            end=ids["<|endoftext|>"],
            tasks={task: ids[f"<|{task}|>"] for task in TASKS} if multilingual else {},
            languages=codes if multilingual else {},
            no_timestamps=no_timestamps,
            first_timestamp=no_timestamps + 1,
            suppressed=tuple(suppressed),
            suppressed_first=tuple(suppressed_first),
        )

    def check(self, language: str | None, task: str) -> None:
        """Checks a language, or None to detect it, and a task.

        Raises:
          ConfigError: the model does not know them.
        """
        if self.languages:
            if language is not None and language not in self.languages:
                raise ConfigError(
                    f"language is {language!r}.{did_you_mean(language, list(self.languages))}"
                )
        elif language not in (None, "en") or task != TASKS[0]:
            raise ConfigError(
                f"language is {language!r} and task {task!r}, but the model transcribes English "
                "alone; use a multilingual one."
            )

    def prompt(self, language: str, task: str, timestamps: bool) -> list[int]:
        """The decoder's first tokens, for a language and a task that `check` accepts."""
        ids = [self.start]
        if self.languages:
            ids += [self.languages[language], self.tasks[task]]
        return ids if timestamps else [*ids, self.no_timestamps]
