"""The special tokens of models of speech, as Whisper has them (arXiv 2212.04356, section 2.3)."""

import dataclasses
from collections.abc import Mapping, Sequence

from spec_jax.errors import CheckpointError, ConfigError, did_you_mean
from spec_jax.text.tokenizer import Tokenizer

SECONDS_PER_TIMESTAMP = 0.02
TASKS = ("transcribe", "translate")
_ENGLISH_ONLY = 51864
"""Ids of models of English alone; multilingual ones have at least one more."""


@dataclasses.dataclass(frozen=True)
class SpeechTokens:
    """Token ids that say what is wanted and when something was said.

    Attributes:
      start: begins every text.
      end: ends it; all ids below are text.
      tasks: `transcribe` and `translate` (into English); empty for models of English alone.
      languages: by their codes, such as `de`; empty for models of English alone.
      no_timestamps: asks for text alone.
      first_timestamp: 0.00 seconds; each further id is 0.02 seconds more.
      suppressed: what is never said: symbols and special tokens.
      suppressed_first: what is not said first.
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
          CheckpointError: one that every model of speech has is missing.
        """
        ids = {token: i for i, token in tokenizer.added_tokens.items()}
        needed = ("startoftranscript", "endoftext", "notimestamps", *TASKS)
        missing = [each for each in needed if f"<|{each}|>" not in ids]
        if missing:
            raise CheckpointError(
                f"the tokenizer of {name} has no token <|{missing[0]}|>, which a model of speech "
                "needs; use the tokenizer.json that belongs to it."
            )
        start, translate = ids["<|startoftranscript|>"], ids["<|translate|>"]
        # Languages stand between the start and the tasks.
        codes = {token.strip("<|>"): i for token, i in ids.items() if start < i < translate}
        codes = {code: i for code, i in codes.items() if code not in TASKS}
        # Models of English alone have these tokens, too, but were never shown them. As OpenAI's
        # Whisper does, they are told by their size.
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
        """Checks a language, or None for the one that is spoken, and a task.

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
        """What the decoder starts from; language and task are known ones."""
        ids = [self.start]
        if self.languages:
            ids += [self.languages[language], self.tasks[task]]
        return ids if timestamps else [*ids, self.no_timestamps]
