"""Grammars: the tokens that may come next, so that a request's output has the requested form.

A grammar lives on the host, one per row. Everything here is a function of the request and of its
tokens alone, so every process of a run computes the same masks. The parsing is llguidance's.
"""

import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, UInt32
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from spec_jax.config import StructuredOutputsParams
from spec_jax.errors import ConfigError
from spec_jax.text.tokenizer import Tokenizer

_MAX_QUOTE = 200
"""Characters of a grammar that an error quotes."""
_GBNF_RULE = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_METACHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""Characters with a meaning in regular expressions; escaping others would give them one."""


class GrammarCompiler:
    """Compiles requests' grammars for the tokens of one model.

    Args:
      tokenizer: the model's.
      vocab_size: rows of the model's embedding; those without a token are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer

    @cached_property
    def tokens(self) -> tuple[LLTokenizer, int]:
        """The tokens for llguidance, and the id of the token that ends a text for it."""
        end = self._tokenizer.vocab_size
        serialized = _with_nameless_specials(self._tokenizer, end)
        try:
            size = max(self.vocab_size, end + 1)
            return LLTokenizer(serialized, n_vocab=size, eos_token=end), end
        except ValueError as error:
            raise ConfigError(
                f"structured_outputs do not work with this model's tokenizer: {error}; leave them "
                "out."
            ) from error

    def compile(self, params: StructuredOutputsParams, stop_token_ids: Sequence[int]) -> "Grammar":
        """A request's grammar before its first token.

        Args:
          params: the form of the output.
          stop_token_ids: tokens that end the request, end-of-sequence tokens included.

        Raises:
          ConfigError: the grammar is malformed, uses a feature that llguidance does not support,
            or matches nothing; or the model's tokenizer has no bytes for its tokens.
        """
        text = str(getattr(params, params.kind))
        shown = repr(text if len(text) <= _MAX_QUOTE else f"{text[:_MAX_QUOTE]}...")
        begin = f"{params.kind} is {shown}, which"
        try:
            source = _source(params)
        except Exception as error:  # llguidance has no error class for malformed GBNF
            raise ConfigError(f"{begin} does not compile: {error}.") from error
        tokens, end = self.tokens
        grammar = Grammar(tokens, source, stop_token_ids, end, self.vocab_size)
        if grammar.error is not None:
            raise ConfigError(f"{begin} does not compile: {grammar.error}.")
        if not grammar.is_complete and not grammar.masks(()).any():
            raise ConfigError(f"{begin} matches no text; loosen it.")
        return grammar


def _source(params: StructuredOutputsParams) -> str:
    """A grammar in llguidance's own form."""
    if params.json is not None:
        return LLMatcher.grammar_from_json_schema(str(params.json))
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        texts = (_METACHARACTERS.sub(r"\\\g<0>", text) for text in params.choice)
        return LLMatcher.grammar_from_regex("|".join(texts))
    if params.grammar is not None:
        # llguidance's own guess takes Lark's `?start:` for GBNF.
        is_gbnf, text = _GBNF_RULE.search(params.grammar), params.grammar
        return LLMatcher.grammar_from_lark(gbnf_to_lark(text) if is_gbnf else text)
    return LLMatcher.grammar_from_json_schema('{"type": "object"}')


class Grammar:
    """The state of one row in its grammar.

    A stop token is allowed exactly where the output may end, even if it spells text that the
    grammar would allow elsewhere. After the whole grammar nothing but stop tokens is allowed.

    Args:
      tokens: the model's tokens.
      source: the grammar in llguidance's own form.
      stop_token_ids: tokens that end the request.
      end: the token that llguidance ends texts with.
      vocab_size: rows of the model's embedding.
      limits: bounds of the work of the parser, as `LLParserLimits` names them.

    Attributes:
      error: the reason why no token is allowed although the output is not complete.
    """

    def __init__(
        self,
        tokens: LLTokenizer,
        source: str,
        stop_token_ids: Sequence[int],
        end: int,
        vocab_size: int,
        **limits: Any,
    ):
        bounds = LLParserLimits(verbose_errors=False, **limits)
        self._make = lambda: LLMatcher(tokens, source, log_level=0, limits=bounds)
        self._matcher = self._make()
        self._read: list[int] = []
        self._stopped = False
        self._stop_token_ids = frozenset(stop_token_ids)
        self._stops = _pack(stop_token_ids, vocab_size)
        not_text = {*stop_token_ids, end}
        self._text = _pack((i for i in range(vocab_size) if i not in not_text), vocab_size)
        self.error: str | None = None
        if self._matcher.is_error():
            self.error = _problem(self._matcher.get_error())

    @property
    def is_complete(self) -> bool:
        """Whether the output so far is complete, so that it may end here."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete and only a stop token may follow."""
        return self._stopped or (self._matcher.is_accepting() and self._matcher.is_stopped())

    def advance(self, generated: Sequence[int]) -> None:
        """Takes all tokens generated so far and reads the new ones."""
        for token in generated[len(self._read) :]:
            if token in self._stop_token_ids and self.is_complete:
                self._stopped = True
            elif self._stopped or not self._matcher.try_consume_tokens([token]):
                if self._matcher.is_error():
                    self._matcher = self._parse([*self._read, token])
                    self._check()
                else:
                    self._fail(f"token {token} is not allowed there")
            self._read.append(token)

    def masks(
        self,
        draft: Sequence[int],
        ancestors: Bool[np.ndarray, "_ _"] | None = None,
    ) -> UInt32[np.ndarray, "positions words"]:
        """The tokens allowed at each query position, packed as in `sampling.probabilities`.

        The row's own state does not change. A position after a token that is not allowed, or after
        a stop token, cannot be reached and allows nothing.

        Args:
          draft: tokens proposed after the tokens of `advance`; -1 for none.
          ancestors: which draft tokens each position follows; all earlier ones if None.
        """
        masks = np.zeros((len(draft) + 1, len(self._stops)), np.uint32)
        if self.error is not None or self._stopped:
            return masks
        self._matcher, masks[0] = self._open(self._matcher, [])
        self._check()
        states: list[LLMatcher | None] = [self._matcher]
        paths: list[list[int]] = [[]]
        for i, token in enumerate(draft):
            earlier = range(i) if ancestors is None else np.flatnonzero(ancestors[i + 1, :i])
            parent = 1 + int(max(earlier, default=-1))
            state = states[parent]
            is_allowed = token >= 0 and (masks[parent, token // 32] >> np.uint32(token % 32)) & 1
            if state is None or not is_allowed or token in self._stop_token_ids:
                state = None
            else:
                # A copy costs no more than a rollback, and cannot be forgotten.
                state = state.deep_copy()
                state.try_consume_tokens([token])
                state, masks[i + 1] = self._open(state, [*paths[parent], token])
            states.append(state)
            paths.append([*paths[parent], token])
        return masks

    def _open(
        self, state: LLMatcher, path: list[int]
    ) -> tuple[LLMatcher, UInt32[np.ndarray, " words"]]:
        """The tokens allowed after a path through the draft, and the parser that found them."""
        mask = self._mask(state)
        if state.is_error():
            # Copies share a limit of the parser's work, which drafts must not use up.
            state = self._parse([*self._read, *path])
            mask = self._mask(state)
        return state, mask

    def _mask(self, state: LLMatcher) -> UInt32[np.ndarray, " words"]:
        mask = np.frombuffer(state.compute_bitmask(), np.uint32)[: len(self._stops)] & self._text
        return mask | self._stops if state.is_accepting() else mask

    def _parse(self, tokens: list[int]) -> LLMatcher:
        matcher = self._make()
        matcher.consume_tokens(tokens)
        return matcher

    def _check(self) -> None:
        if self._matcher.is_error():
            self._fail(_problem(self._matcher.get_error()))

    def _fail(self, why: str) -> None:
        self.error = self.error or f"after {len(self._read)} tokens: {why}"


def stack_masks(
    grammars: Sequence[Grammar | None],
    drafts: Sequence[Sequence[int]],
    positions: int,
    vocab_size: int,
    ancestors: Bool[np.ndarray, "positions drafted"] | None = None,
) -> UInt32[np.ndarray, "batch {positions} words"]:
    """The masks of a batch.

    Args:
      grammars: each row's; None allows every token.
      drafts: each row's draft tokens, fewer than `positions`.
      positions: query positions of each row; those past its draft's end allow nothing.
      vocab_size: rows of the model's embedding.
      ancestors: see `Grammar.masks`.
    """
    words = -(-vocab_size // 32)
    masks = np.full((len(grammars), positions, words), 0xFFFFFFFF, np.uint32)
    for row, (grammar, draft) in enumerate(zip(grammars, drafts, strict=True)):
        if grammar is not None:
            masks[row] = 0
            masks[row, : len(draft) + 1] = grammar.masks(draft, ancestors)
    return masks


def _with_nameless_specials(tokenizer: Tokenizer, end: int) -> str:
    """The tokenizer.json with one more token, `end`, and special tokens renamed.

    The new names occur in no text. llguidance needs exactly one token that ends a text; a model may
    have none or several. Where a grammar allows one text only, llguidance would encode the name of
    a special token in it as that token. And it does not accept ids without a token.
    """
    data = json.loads(tokenizer.to_json())
    data["post_processor"] = None
    model, added = data["model"], data["added_tokens"]
    names = {}
    for token in added:
        if token["special"] or token["id"] in tokenizer.eos_token_ids:
            names[token["content"]] = _nameless(token["id"])["content"]
            token.update(_nameless(token["id"]))
    if isinstance(model["vocab"], dict):
        vocab = {names.get(name, name): i for name, i in model["vocab"].items()}
        taken = {*vocab.values(), *(token["id"] for token in added)}
        added += [_nameless(i) for i in range(end + 1) if i not in taken]
        model["vocab"] = vocab | {token["content"]: token["id"] for token in added}
    else:  # a list, which has no holes
        model["vocab"] = [[names.get(name, name), score] for name, score in model["vocab"]]
        added.append(_nameless(end))
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    return json.dumps(data)


def _nameless(token_id: int) -> dict[str, Any]:
    """An entry of a tokenizer.json for a special token that no text holds."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": f"\0{token_id}", "special": True, **flags}


def _pack(ids: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, " words"]:
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)


def _problem(message: str) -> str:
    """The error itself, from a message that also marks its position."""
    lines = message.strip().splitlines() or [""]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return errors[-1] if errors else lines[0].split("(in regex): ")[-1]
