"""Speech to text: windows of 30 seconds, one after the other in each file, all files together.

Windows follow each other as in OpenAI's `transcribe` with temperature 0 alone, without the text of
the window before and without checks for silence: with timestamps, a window starts where the last
complete segment of the window before ended. The text of a window has at most half as many tokens
as the decoder's context.
"""

import dataclasses
import os
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from spec_jax.audio.features import FRAMES_PER_SECOND, HOP, log_mel
from spec_jax.audio.wave import RATE, check_samples, read_audio
from spec_jax.checkpoints import Checkpoint
from spec_jax.config import SamplingParams
from spec_jax.engine.requests import RequestInput
from spec_jax.errors import ConfigError, RequestError, did_you_mean
from spec_jax.models.config import TransformerConfig
from spec_jax.outputs import RequestOutput, Segment, Transcription
from spec_jax.text.speech import SECONDS_PER_TIMESTAMP, TASKS, SpeechTokens
from spec_jax.text.tokenizer import Tokenizer

FRAMES_PER_TIMESTAMP = 2

Generate = Callable[[Sequence[RequestInput], Sequence[SamplingParams]], list[RequestOutput]]
"""Completes the texts of windows."""
Sound = str | os.PathLike[str] | np.ndarray
"""The path of an audio file, or samples of one channel at 16 kHz."""


class SoundReader:
    """Reads one audio file, window after window, and collects its text.

    Args:
      samples: at 16 kHz.
      encoder: the shape of the encoder that reads it.
      tokens: the special tokens.
      timestamps: whether the text has them.
    """

    def __init__(
        self,
        samples: Float[np.ndarray, " samples"],
        encoder: TransformerConfig,
        tokens: SpeechTokens,
        timestamps: bool,
    ):
        self._size = 2 * encoder.max_position
        # Silence follows, as it did in training.
        padded = np.pad(samples, (0, self._size * HOP))
        self._features = log_mel(padded, encoder.mel_bins)
        self._frames = max(1, len(samples) // HOP)
        self._tokens, self._timestamps = tokens, timestamps
        self.position = 0
        self.segments: list[Segment] = []
        self.outputs: list[RequestOutput] = []

    @property
    def over(self) -> bool:
        """Whether all windows have been read."""
        return self.position >= self._frames

    @property
    def window(self) -> Float[np.ndarray, "frames bins"]:
        """The frames to read next; zeros follow the end of the audio."""
        frames = self._features[self.position : min(self.position + self._size, self._frames)]
        return np.pad(frames, ((0, self._size - len(frames)), (0, 0)))

    def take(self, output: RequestOutput, tokenizer: Tokenizer) -> None:
        """Adds the text of the window."""
        self.outputs.append(output)
        size = min(self._size, self._frames - self.position)
        ids = [token for token in output.token_ids if token != self._tokens.end]
        if not self._timestamps:
            self._add(tokenizer, 0.0, size / FRAMES_PER_SECOND, ids)
            self.position += size
            return
        first = self._tokens.first_timestamp
        timed = [token >= first for token in ids]
        ends = [i for i in range(1, len(ids)) if timed[i - 1] and timed[i]]
        alone = timed[-2:] == [False, True]
        if not ends:
            last = (ids[-1] - first) * SECONDS_PER_TIMESTAMP if timed[-1:] == [True] else 0.0
            begin = (ids[0] - first) * SECONDS_PER_TIMESTAMP if timed[:1] == [True] else 0.0
            self._add(tokenizer, begin, last or size / FRAMES_PER_SECOND, ids)
            self.position += size
            return
        begin = 0
        for end in [*ends, len(ids)] if alone else ends:
            start, stop = (at - first for at in (ids[begin], ids[end - 1]))
            times = start * SECONDS_PER_TIMESTAMP, stop * SECONDS_PER_TIMESTAMP
            self._add(tokenizer, *times, ids[begin:end])
            begin = end
        if alone:
            self.position += size
        else:
            self.position += max(1, (ids[begin - 1] - first) * FRAMES_PER_TIMESTAMP)

    def _add(self, tokenizer: Tokenizer, begin: float, end: float, ids: list[int]) -> None:
        text = tokenizer.decode([token for token in ids if token < self._tokens.end])
        if text.strip():
            at = self.position / FRAMES_PER_SECOND
            self.segments.append(Segment(at + begin, at + end, text, tuple(ids)))


class Transcriber:
    """Transcribes audio with a speech model.

    Args:
      checkpoint: the model.
      generate: completes windows.

    Raises:
      ConfigError: the model is not a speech model.
    """

    def __init__(self, checkpoint: Checkpoint, generate: Generate):
        config, speech = checkpoint.model.config, checkpoint.speech
        if speech is None:
            raise ConfigError(f"{checkpoint.name} reads no speech; use a model such as Whisper.")
        assert config.encoder is not None
        self._encoder, self._speech = config.encoder, speech
        self._tokenizer = checkpoint.tokenizer
        self._generate = generate
        self._never = dict.fromkeys(speech.suppressed, float("-inf"))
        self._others = dict.fromkeys(range(config.vocab_size), float("-inf"))
        for language in speech.languages.values():
            del self._others[language]
        # The rest of the context was for the text of the window before.
        self._max_tokens = config.max_position // 2

    def run(
        self,
        sounds: Sound | Sequence[Sound],
        language: str | None,
        task: str,
        timestamps: bool,
        params: SamplingParams | None,
    ) -> list[Transcription]:
        """The text of each audio; arguments and errors are the same as for `LLM.transcribe`."""
        if task not in TASKS:
            raise ConfigError(f"task is {task!r}.{did_you_mean(task, TASKS)}")
        self._speech.check(language, task)
        params = params or SamplingParams(max_tokens=self._max_tokens)
        params = dataclasses.replace(
            params,
            max_tokens=min(params.token_limit, self._max_tokens),
            min_tokens=min(params.min_tokens, self._max_tokens),
            logit_bias={**params.logit_bias, **self._never},
        )
        several: list[object] = [sounds]
        if isinstance(sounds, Sequence) and not isinstance(sounds, str):
            several = list(sounds)
        samples = [_samples(i, each) for i, each in enumerate(several)]
        texts = [SoundReader(each, self._encoder, self._speech, timestamps) for each in samples]
        languages = [language or "en"] * len(texts)
        if language is None and self._speech.languages:
            languages = self._languages(texts)
        while waiting := [i for i, text in enumerate(texts) if not text.over]:
            starts = [self._start(texts[i], languages[i], task, timestamps) for i in waiting]
            for i, output in zip(
                waiting, self._generate(starts, [params] * len(starts)), strict=True
            ):
                texts[i].take(output, self._tokenizer)
        return [
            Transcription(
                text="".join(segment.text for segment in text.segments).strip(),
                language=code,
                segments=tuple(text.segments),
                seconds=len(each) / RATE,
                windows=tuple(text.outputs),
            )
            for text, each, code in zip(texts, samples, languages, strict=True)
        ]

    def _languages(self, texts: Sequence[SoundReader]) -> list[str]:
        """The likeliest language of each first window."""
        params = SamplingParams(max_tokens=1, logit_bias=self._others)
        starts = [RequestInput([self._speech.start], each.window) for each in texts]
        outputs = self._generate(starts, [params] * len(starts))
        codes = {i: code for code, i in self._speech.languages.items()}
        return [codes[output.token_ids[0]] for output in outputs]

    def _start(self, text: SoundReader, language: str, task: str, timestamps: bool) -> RequestInput:
        ids = self._speech.prompt(language, task, timestamps)
        first = self._speech.first_timestamp if timestamps else -1
        blank = tuple((ids[-1], token) for token in self._speech.suppressed_first)
        return RequestInput(
            ids, text.window, bad_words=() if timestamps else blank, timestamps=first
        )


def _samples(number: int, sound: object) -> Float[np.ndarray, " samples"]:
    if isinstance(sound, np.ndarray):
        return check_samples(sound, f"sound {number}")
    if isinstance(sound, str | os.PathLike):
        return read_audio(sound)
    raise RequestError(
        f"sound {number} is {sound!r:.80}; give a path, or a NumPy array of samples at {RATE} Hz."
    )
