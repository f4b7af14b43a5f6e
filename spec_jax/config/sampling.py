"""How a request is sampled and when it stops."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from spec_jax.config.fields import (
    AtLeast0,
    AtLeast1,
    Bias,
    NotNegative,
    Number,
    Positive,
    Share,
    Text,
    Texts,
    config_class,
    or_empty,
    to_json,
    to_tuple,
)
from spec_jax.errors import ConfigError

MOST_COMPLETIONS = 16384
"""vLLM's bound of `n`."""
MOST_LOGPROBS = 20
"""vLLM's bound of `logprobs`."""


@config_class
class SamplingParams:
    """How one request is sampled and when it stops.

    The logits pass through logit bias, repetition penalty, presence and frequency penalty, bad
    words, min tokens, grammar, temperature, top-k, top-p and min-p, in that order: Hugging Face
    transformers' order and semantics, with the two additive penalties of the OpenAI API, which see
    generated tokens only.

    Attributes:
      n: completions of the prompt, each drawn for itself; those of a seed follow from it and their
        number.
      max_tokens: most tokens to generate, at least 1; None for as many as the context holds.
      min_tokens: before so many tokens are generated no token that ends the request can be, and
        no stop string ends it; at most max_tokens.
      temperature: 0 is greedy decoding, and so is what is below float32's smallest normal number,
        1.2e-38; otherwise logits are divided by it.
      top_k: keep the k likeliest tokens (ties at the k-th are kept); 0 or -1 keeps all.
      top_p: keep the smallest set of likeliest tokens whose probability reaches it; in (0, 1].
      min_p: drop tokens less likely than this fraction of the likeliest one; in [0, 1].
      repetition_penalty: divides positive and multiplies negative logits of tokens seen in
        prompt or output (Keskar et al. 2019, arXiv 1909.05858); 1 is off.
      presence_penalty: subtracted once from the logit of each generated token; 0 is off.
      frequency_penalty: subtracted per occurrence among the generated tokens; 0 is off.
      logit_bias: token id -> value added to its logit; -inf bans the token.
      bad_words: texts that must not be generated, at the start of a word or after a space: the
        last of a text's tokens is banned where prompt or output end with those before it. Other
        ways to spell the same text in tokens are not banned.
      json_schema: the output must be JSON of this schema; a mapping or JSON text. It is kept as
        text.
      regex: the whole output must match this regular expression (syntax of Rust's regex crate).
      allowed_token_ids: tokens that may be generated, all others are banned; None for all.
      logprobs: also give the log-probability of each generated token, and so many of the likeliest
        tokens in its place, at most 20. They are the target's own: of its logits as they are,
        before all of the above. None gives none.
      seed: makes the request's randomness reproducible, whatever else shares its batch.
        None takes the next seed of the `LLM`.
      stop: strings that end the text; the text is cut before the string.
      include_stop_str_in_output: cut it after the string instead.
      skip_special_tokens: leave special tokens out of the text.
      stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
      ignore_eos: decode past the model's end-of-sequence tokens.
      namespace: for method `suffix`: requests of one namespace draft from each other's outputs;
        those of others are never seen. How fast a request runs tells of the outputs it drafts
        from, so users who must not learn of each other need namespaces of their own.
    """

    n: Annotated[AtLeast1, Field(le=MOST_COMPLETIONS)] = 1
    max_tokens: AtLeast1 | None = 256
    min_tokens: AtLeast0 = 0
    temperature: NotNegative = 0.0
    top_k: Annotated[AtLeast0, BeforeValidator(lambda k: 0 if k == -1 else k)] = 0
    top_p: Annotated[Share, Field(gt=0)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Positive = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Annotated[Mapping[AtLeast0, Bias], or_empty({})] = dataclasses.field(
        default_factory=dict
    )
    bad_words: Texts = ()
    json_schema: Annotated[Mapping[str, Any] | str | None, BeforeValidator(to_json)] = None
    regex: Text | None = None
    allowed_token_ids: (
        Annotated[tuple[AtLeast0, ...], Field(min_length=1), BeforeValidator(to_tuple)] | None
    ) = None
    logprobs: Annotated[AtLeast0, Field(le=MOST_LOGPROBS)] | None = None
    seed: Annotated[AtLeast0, Field(le=2**64 - 1)] | None = None
    stop: Texts = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stop_token_ids: Annotated[tuple[AtLeast0, ...], BeforeValidator(to_tuple), or_empty(())] = ()
    ignore_eos: bool = False
    namespace: str = ""

    def __post_init__(self) -> None:
        if self.min_tokens > self.most_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; lower the "
                "first or raise the second."
            )
        if self.json_schema is not None and self.regex is not None:
            raise ConfigError(
                f"json_schema is {self.json_schema!r} and regex is {self.regex!r}; give one of "
                "the two."
            )

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or more than any context holds."""
        return 2**30 if self.max_tokens is None else self.max_tokens
