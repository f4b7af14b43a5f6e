"""Text to token ids and back, whole or as a stream."""

import abc
import codecs
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel

from spec_jax.errors import ConfigError, RequestError, raising_panics
from spec_jax.text.chat_template import ChatTemplate
from spec_jax.text.messages import checked_messages
from spec_jax.text.token_bytes import BYTE_TOKEN, byte_level, token_bytes_table

# Else transformers reports, when first imported, that PyTorch is missing: nothing here needs it.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

_TAKEN = frozenset(
    {"conversations", "chat_template", "tools", "documents", "return_assistant_tokens_mask"}
    | {"messages", "add_generation_prompt", "continue_final_message"}
)
"""Names of what templates get anyway."""


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    Args:
      backend: the tokenizer proper.
      eos_token_ids: tokens that end a generation.
      bos_token_id: the token that begins a text, if there is one.
      chat_template: turns messages into a prompt that asks for the assistant's next message;
        None for a model without one.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int],
        bos_token_id: int | None = None,
        chat_template: ChatTemplate | None = None,
    ):
        # A tokenizer.json may ask for cutting or padding, which belong to training.
        backend.no_truncation()
        backend.no_padding()
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.chat_template = chat_template
        self.backend = backend

    @cached_property
    def _tokens(self) -> list[str | None]:
        """Every token's string by its id; None where an id has no token."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
        for token, i in vocabulary.items():
            tokens[i] = token
        return tokens

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        added = self.backend.get_added_tokens_decoder()
        return frozenset(i for i, token in added.items() if token.special)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a tokenizer.json, which turns text into ids and back."""
        self.backend.save(os.fspath(path))

    @property
    def special_tokens(self) -> dict[int, str]:
        """The special tokens by id: those marked as special, and those that begin or end a text."""
        roles = {*self.eos_token_ids, self.bos_token_id}
        added = self.added_tokens.items()
        return {i: token for i, token in added if i in roles or i in self._special_ids}

    @property
    def added_tokens(self) -> dict[int, str]:
        """The tokens that text is searched for before it is split, special ones included, by id."""
        added = self.backend.get_added_tokens_decoder()
        return {i: token.content for i, token in sorted(added.items())}

    def to_json(self) -> str:
        """The tokenizer.json, which turns text into ids and back."""
        return self.backend.to_str()

    @property
    def vocab_size(self) -> int:
        """Ids below this have a token; a model's embedding may have padding rows beyond."""
        return len(self._tokens)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text has at least its length divided by this many."""
        return max((len(token) for token in self._tokens if token), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
          text: any text; the names of special tokens in it become those tokens.
          add_special_tokens: add the tokens that the model expects around a text.

        Raises:
          RequestError: it is not a `str`, or holds half of a surrogate pair, or the tokenizer
            fails on it.
        """
        try:
            with raising_panics():
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            raise RequestError(
                f"a prompt must be text that UTF-8 can express, not {text!r}."
            ) from None
        except Exception as error:  # the library has no error class
            raise RequestError(
                f"the model's tokenizer fails on a text of {len(text)} characters: {error}"
            ) from error

    def spellings(self, text: str) -> list[tuple[int, ...]]:
        """The tokens of a text at the start of a longer text, and after a space in one.

        Leading space of the text itself is ignored.
        """
        bare = text.lstrip()
        written = (bare, f" {bare}") if bare else (text,)
        encoded = (tuple(self.encode(each, add_special_tokens=False)) for each in written)
        return list(dict.fromkeys(ids for ids in encoded if ids))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, not cleaned up; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str:
        """A token as the vocabulary spells it, or `<no token N>` for a padding row's id."""
        token = self.backend.id_to_token(token_id)
        return f"<no token {token_id}>" if token is None else token

    @cached_property
    def bytes_of_tokens(self) -> list[bytes | None]:
        """The bytes of every token in a text, by its id.

        None for ids without text: special tokens, the unknown token and unused ids. A word's first
        token keeps its leading space, which decoders strip at a text's start.
        """
        return token_bytes_table(self.backend, self._tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """One entry of `bytes_of_tokens`; None for a padding row."""
        table = self.bytes_of_tokens
        return table[token_id] if 0 <= token_id < len(table) else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenize: bool = False,
    ) -> str:
        """The prompt that asks the model for the assistant's next message.

        Encode it with `add_special_tokens=False`: the template writes them out.

        Args:
          messages: each has a `role`, and as `content` its text or a list of text parts,
            `{"type": "text", "text": ...}`, each of which is a line.
          add_generation_prompt: whether it ends with the beginning of the assistant's message.
          continue_final_message: whether the last message is left open, to be continued.
          tools: JSON schemas of functions that the template describes to the model.
          chat_template_kwargs: variables of the template, such as Qwen3's `enable_thinking`.
          tokenize: False, as one writes for transformers' tokenizers; `encode_chat` gives tokens.

        Raises:
          ConfigError: `tokenize` is true, the model has no chat template, the last message is to be
            continued and answered, or a variable's name is taken.
          RequestError: a message is malformed, or the template refuses the order of roles, makes
            no sense, or takes too much time or memory.
        """
        if tokenize:
            raise ConfigError("tokenize is true; encode_chat gives the tokens of the text.")
        if self.chat_template is None:
            raise ConfigError(
                "this model has no chat template; give it plain text instead (generate, or --raw)."
            )
        if add_generation_prompt and continue_final_message:
            raise ConfigError(
                "add_generation_prompt and continue_final_message are both true; the last message "
                "is continued with add_generation_prompt=False."
            )
        variables = dict(chat_template_kwargs or {})
        taken = _TAKEN | self.chat_template.special_tokens.keys()
        if names := sorted(taken & variables.keys()):
            raise ConfigError(
                f"chat_template_kwargs sets {', '.join(names)}, which is set already."
            )
        return self.chat_template(
            checked_messages(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=None if tools is None else [dict(tool) for tool in tools],
            **variables,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of `apply_chat_template`; same arguments and errors."""
        text = self.apply_chat_template(messages, **options)
        return self.encode(text, add_special_tokens=False)

    def stream(self, skip_special_tokens: bool = True) -> "StreamDecoder":
        """A decoder that turns tokens into text as they come."""
        if isinstance(self.backend.decoder, ByteLevel):
            return _ByteLevelStream(self, skip_special_tokens)
        return _WindowStream(self, skip_special_tokens)

    def vocabulary_difference(self, other: "Tokenizer") -> str | None:
        """How another tokenizer's ids differ from this one's, or None if they mean the same.

        Args:
          other: the tokenizer to compare with; padding rows of an embedding are ignored.
        """
        if self.backend is other.backend:
            return None
        pairs = list(zip_longest(self._tokens, other._tokens))
        differing = [i for i, (ours, theirs) in enumerate(pairs) if ours != theirs]
        if not differing:
            return None
        shown = (f"{i} is {self.token(i)!r} and {other.token(i)!r}" for i in differing[:3])
        return f"{len(differing)} of {len(pairs)} token ids differ: {', '.join(shown)}."


class StreamDecoder(abc.ABC):
    """Turns tokens into text as they come: all pieces together equal the decoded whole.

    Text is returned once no later token can change it, at a cost that does not grow with the length
    of the text before it.
    """

    @abc.abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens and returns the text that can no longer change."""

    @abc.abstractmethod
    def flush(self) -> str:
        """Ends the stream and returns the remaining text."""


class _ByteLevelStream(StreamDecoder):
    """For byte-level vocabularies: tokens are bytes, and UTF-8 can be decoded as it comes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._token = tokenizer.backend.id_to_token
        self._skipped = tokenizer._special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        token = self._token(token_id)
        return b"" if token is None or token_id in self._skipped else byte_level(token)


class _WindowStream(StreamDecoder):
    """For other vocabularies: decodes a short window, and returns the text of the new tokens.

    The window starts before the new tokens, because decoders strip the space at a text's start.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool):
        self._tokenizer = tokenizer
        self._skipped = tokenizer._special_ids if skip_special_tokens else frozenset()
        self._window: list[int] = []
        self._returned = 0  # tokens of the window whose text has been returned

    def push(self, ids: Sequence[int]) -> str:
        token_of = self._tokenizer.backend.id_to_token
        self._window += [i for i in ids if i not in self._skipped and token_of(i) is not None]
        # A run of byte tokens reads as text if all of it is UTF-8, so the next byte can change it.
        if not self._window or BYTE_TOKEN.fullmatch(self._tokenizer.token(self._window[-1])):
            return ""
        return self._new_text(hold_incomplete=True)

    def flush(self) -> str:
        return self._new_text(hold_incomplete=False)

    def _new_text(self, *, hold_incomplete: bool) -> str:
        text = self._decode(self._window)
        if hold_incomplete and text.endswith("\ufffd"):
            return ""
        new = text[len(self._decode(self._window[: self._returned])) :]
        # One token before the new ones keeps their space from being stripped; two if it is a space.
        tails = (self._window[-count:] for count in (1, 2))
        self._window = next((tail for tail in tails if self._decode(tail)), self._window)
        self._returned = len(self._window)
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
