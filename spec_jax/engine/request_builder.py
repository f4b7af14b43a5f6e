"""From prompts and parameters to requests: every mistake in them is found here."""

import dataclasses
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from spec_jax.checkpoints import Checkpoint
from spec_jax.config import FIT_CONTEXT, SamplingParams, StructuredOutputsParams
from spec_jax.engine.requests import Request, RequestInput
from spec_jax.engine.sequence import Origin
from spec_jax.errors import ConfigError, ContextLengthError, RequestError
from spec_jax.text.grammar import GrammarCompiler

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's mapping with one of them, or with tokens and their text."""


Message = Mapping[str, Any]


class RequestBuilder:
    """Makes requests for one target.

    Args:
      checkpoint: the target.
      max_model_len: limit of the tokens of prompt and completion together.
      seed: seeds of requests without their own seed derive from it.
    """

    def __init__(self, checkpoint: Checkpoint, max_model_len: int, seed: int):
        self._name, self._tokenizer = checkpoint.name, checkpoint.tokenizer
        self._eos_token_ids, self._config = checkpoint.eos_token_ids, checkpoint.model.config
        self._max_model_len, self._seed, self._unseeded = max_model_len, seed, 0
        self._counting = threading.Lock()
        self._grammars = GrammarCompiler(checkpoint.tokenizer, self._config.vocab_size)
        self._request_ids = itertools.count()  # shared by copies

    def entries(
        self, prompts: Sequence[Prompt | RequestInput], params: Sequence[SamplingParams]
    ) -> list[tuple[Request, Origin]]:
        """The requests of a call, one for each completion, and where they come from.

        Raises:
          RequestError, ConfigError: see `request`.
        """
        entries = []
        for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True)):
            text, bare = text_of(i, prompt)
            request_id = str(next(self._request_ids))
            for sample, each in enumerate(completions_of(sampling)):
                origin = Origin(request_id, text, i, sample)
                entries.append((self.request(bare, each, i), origin))
        return entries

    def request(
        self, prompt: Prompt | RequestInput, sampling: SamplingParams, index: int
    ) -> Request:
        """Checks a prompt and its parameters, and makes a request of them.

        Args:
          prompt: text, token ids or what else a request starts from.
          sampling: how to sample.
          index: names the prompt in messages.

        Raises:
          RequestError: the prompt is empty, too long, or not of the target's kind.
          ConfigError: a parameter does not fit the target.
        """
        _, bare = text_of(index, prompt)
        tokens = bare if isinstance(bare, RequestInput) else self._truncated(index, bare, sampling)
        request_input = (
            tokens if isinstance(tokens, RequestInput) else RequestInput.of(self._config, tokens)
        )
        if len(tokens) >= self._max_model_len:
            raise ContextLengthError(
                f"prompt {index} has {len(tokens)} tokens, which leaves no room in a context of "
                f"{self._max_model_len}; shorten it or raise max_model_len."
            )
        if self._config.encoder is not None:
            if request_input.source is None:
                raise RequestError(f"{self._name} reads speech, not text; use `transcribe`.")
            if sampling.prompt_logprobs is not None:
                raise ConfigError(
                    f"prompt_logprobs is {sampling.prompt_logprobs}, but an encoder reads the "
                    f"prompts of {self._name}, which predicts none of it; leave it out."
                )
        if isinstance(bare, RequestInput) and sampling.truncate_prompt_tokens is not None:
            raise ConfigError(
                f"truncate_prompt_tokens is {sampling.truncate_prompt_tokens}, but audio is "
                "not a prompt of tokens; leave it out."
            )
        vocab = self._config.vocab_size
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(sampling, name) or ():
                if token >= vocab:
                    raise ConfigError(
                        f"{name} names token {token}; the vocabulary's ids end at {vocab - 1}."
                    )
        eos = () if sampling.ignore_eos else self._eos_token_ids
        stop_token_ids = tuple(dict.fromkeys((*eos, *sampling.stop_token_ids)))
        structure = sampling.structured_outputs
        # SamplingParams has converted a mapping.
        assert structure is None or isinstance(structure, StructuredOutputsParams)
        return Request(
            prompt_token_ids=request_input.prompt_token_ids,
            sampling=sampling,
            key=self._key(sampling),
            stop_token_ids=stop_token_ids,
            max_length=min(len(request_input) + sampling.token_limit, self._max_model_len),
            bad_words=[*self._bad_words(sampling), *request_input.bad_words],
            grammar=structure and self._grammars.compile(structure, stop_token_ids),
            source=request_input.source,
            timestamps=request_input.timestamps,
        )

    def encode(self, text: str, index: int, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt's text, unless it has more characters than a context can hold.

        Raises:
          RequestError: the text is too long, or the tokenizer fails on it.
        """
        max_characters = self._max_model_len * self._tokenizer.longest_token
        if len(text) > max_characters:  # counting its tokens would take minutes
            raise ContextLengthError(
                f"prompt {index} has {len(text):,} characters, and a context of "
                f"{self._max_model_len} tokens holds at most {max_characters:,}; shorten it or "
                "raise max_model_len."
            )
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def conversations(
        self, messages: Sequence[Message] | Sequence[Sequence[Message]], **options: Any
    ) -> list[dict[str, Any]]:
        """The prompts of one conversation or several; see `LLM.chat`.

        Raises:
          RequestError, ConfigError: for the reasons that `LLM.chat` gives.
        """
        if isinstance(messages, str):
            raise RequestError(
                f"messages is the text {messages[:50]!r}; a conversation is a list of "
                '{"role": "user", "content": ...}. Text alone is completed by `generate`.'
            )
        is_one = not isinstance(messages, Sequence) or (
            messages and isinstance(messages[0], Mapping)
        )
        several: Sequence[Any] = [messages] if is_one else messages
        texts = [self._tokenizer.apply_chat_template(each, **options) for each in several]
        return [
            {"prompt": text, "prompt_token_ids": self.encode(text, i, add_special_tokens=False)}
            for i, text in enumerate(texts)
        ]

    def _key(self, sampling: SamplingParams) -> np.ndarray:
        if sampling.seed is not None:
            return np.array([sampling.seed >> 32, sampling.seed & 0xFFFFFFFF], np.uint32)
        with self._counting:
            entropy = (self._seed, self._unseeded)
            self._unseeded += 1
        return np.random.SeedSequence(entropy).generate_state(2, np.uint32)

    def _bad_words(self, sampling: SamplingParams) -> list[tuple[int, ...]]:
        """The token sequences of `bad_words`."""
        spellings = (self._tokenizer.spellings(text) for text in sampling.bad_words)
        return list(dict.fromkeys(itertools.chain.from_iterable(spellings)))

    def _truncated(
        self, index: int, prompt: str | Sequence[int], sampling: SamplingParams
    ) -> list[int]:
        """The tokens of a prompt, or only the last ones if the request says so."""
        size = sampling.truncate_prompt_tokens
        ids = self._token_ids(index, prompt, bounded=size is None)
        if size == FIT_CONTEXT:
            size = max(1, self._max_model_len - sampling.token_limit)
        return ids if size is None else ids[-size:]

    def _token_ids(self, index: int, prompt: str | Sequence[int], *, bounded: bool) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError(f"prompt {index} is empty; give at least one character.")
            return self.encode(prompt, index) if bounded else self._tokenizer.encode(prompt)
        if not _is_list(prompt):
            raise RequestError(f"prompt {index} is {prompt!r}; give text or a list of token ids.")
        ids = list(prompt)
        if not ids:
            raise RequestError(f"prompt {index} is empty; give at least one token id.")
        vocab = self._config.vocab_size
        for token in ids:
            if not isinstance(token, int | np.integer) or not 0 <= token < vocab:
                raise RequestError(
                    f"prompt {index} holds {token!r}; token ids are integers in [0, {vocab})."
                )
        return [int(token) for token in ids]


def _is_list(value: object) -> bool:
    """Whether it holds several values; bytes are text that was not decoded."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview)


def completions_of(sampling: SamplingParams) -> list[SamplingParams]:
    """The parameters of each of `n` completions. The first has the seed as it is given.

    The others have seeds made of it, not the next ones, which a user may give to other requests.
    """
    if sampling.seed is None:
        return [sampling] * sampling.n
    more = (np.random.SeedSequence((sampling.seed, i)) for i in range(1, sampling.n))
    seeds = (sampling.seed, *(int(each.generate_state(1, np.uint64)[0]) for each in more))
    return [dataclasses.replace(sampling, seed=seed) for seed in seeds]


def text_of(index: int, prompt: Prompt | RequestInput) -> tuple[str | None, Any]:
    """A prompt's text, if it has one, and its text, token ids or input without the mapping.

    Raises:
      RequestError: it is a mapping without text and token ids, or with another key.
    """
    if not isinstance(prompt, Mapping):
        return prompt if isinstance(prompt, str) else None, prompt
    fields = {name: value for name, value in prompt.items() if value is not None}
    text = fields.get("prompt")
    if others := fields.keys() - {"prompt", "prompt_token_ids"}:
        raise RequestError(
            f"prompt {index} is a mapping with {', '.join(map(repr, sorted(others, key=str)))}; "
            "give it 'prompt', a text, or 'prompt_token_ids', and no more."
        )
    if not fields:
        raise RequestError(
            f"prompt {index} is a mapping without 'prompt', a text, and 'prompt_token_ids'."
        )
    if isinstance(ids := fields.get("prompt_token_ids"), str):
        raise RequestError(
            f"prompt {index} has the text {ids[:40]!r} as 'prompt_token_ids'; give it as 'prompt'."
        )
    if "prompt_token_ids" in fields and not isinstance(text, str | None):
        raise RequestError(f"prompt {index} has the text {text!r}; give text or leave it out.")
    return text, fields.get("prompt_token_ids", text)


def match(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    default: SamplingParams,
) -> tuple[list[Prompt], list[SamplingParams]]:
    """One prompt or several as a list, and the parameters of each; `default` without any.

    Raises:
      RequestError: a prompt is neither text nor token ids.
      ConfigError: the number of `params` is neither one nor the prompts', or one is not
        SamplingParams.
    """
    several = _as_list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return several, [params or default] * len(several)
    for each in params if isinstance(params, Sequence) else [params]:
        if not isinstance(each, SamplingParams):
            raise ConfigError(f"sampling_params has {each!r}; give SamplingParams(...).")
    if len(params) != len(several):
        raise ConfigError(
            f"{len(params)} sampling_params for {len(several)} prompts; give one for each."
        )
    return several, list(params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"prompts are {prompts!r}; give text, token ids, or a list of them.")
    several: list[Any] = list(prompts)
    if several and all(isinstance(each, int | np.integer) for each in several):
        return [several]
    for i, prompt in enumerate(several):
        if not isinstance(prompt, str | Mapping) and not _is_list(prompt):
            raise RequestError(f"prompt {i} is {prompt!r}; give text or a list of token ids.")
    return several
