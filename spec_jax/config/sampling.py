"""How a request is sampled and when it stops."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from spec_jax.config.fields import (
    AtLeast0,
    AtLeast1,
    Bias,
    NotNegative,
    Number,
    Positive,
    Share,
    Texts,
    Whole,
    config_class,
    or_empty,
    to_tuple,
)
from spec_jax.config.structured import StructuredOutputsParams, to_structured
from spec_jax.errors import ConfigError

MOST_COMPLETIONS = 16384
"""vLLM's bound of `n`."""
MOST_LOGPROBS = 20
"""vLLM's bound of `logprobs`."""
WHAT_FITS = -1
"""As `truncate_prompt_tokens`."""

_ELSEWHERE = {
    "best_of": "use n, and choose by cumulative_logprob",
    "use_beam_search": "leave it out: tokens are sampled, or the likeliest at temperature 0",
    "guided_decoding": "use structured_outputs",
    "json_schema": "use structured_outputs={'json': ...}",
    "regex": "use structured_outputs={'regex': ...}",
    "logits_processors": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    "output_kind": "use LLM.generate for whole outputs, and LLM.stream for what is new",
    "spaces_between_special_tokens": "leave it out: no space is added",
    "logprob_token_ids": "use logprobs",
    "flat_logprobs": "leave it out",
    "extra_args": "leave it out",
}
"""Names that vLLM has, or had, and what to do here."""


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
      structured_outputs: what the whole output must be, such as JSON of a schema; also as a mapping
        with one of the names of `StructuredOutputsParams`.
      allowed_token_ids: tokens that may be generated, all others are banned; None for all.
      logprobs: also give the log-probability of each generated token, and so many of the likeliest
        tokens in its place, at most 20. They are the target's own: of its logits as they are,
        before all of the above. None gives none.
      prompt_logprobs: the same for each token of the prompt after its first.
      seed: makes the request's randomness reproducible, whatever else shares its batch.
        None takes the next seed of the `LLM`.
      stop: strings that end the text; the text is cut before the string.
      include_stop_str_in_output: cut it after the string instead.
      detokenize: whether the output has a text; without one no stop string can be found.
      skip_special_tokens: leave special tokens out of the text.
      stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
      ignore_eos: decode past the model's end-of-sequence tokens.
      truncate_prompt_tokens: keep only so many tokens of the prompt, the last ones; -1 keeps as
        many as leave room for max_tokens in the context. None refuses a prompt that does not fit.
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
    structured_outputs: Annotated[
        StructuredOutputsParams | Mapping[str, Any] | None, BeforeValidator(to_structured)
    ] = None
    allowed_token_ids: (
        Annotated[Sequence[AtLeast0], Field(min_length=1), BeforeValidator(to_tuple)] | None
    ) = None
    logprobs: Annotated[AtLeast0, Field(le=MOST_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[AtLeast0, Field(le=MOST_LOGPROBS)] | None = None
    seed: Annotated[AtLeast0, Field(le=2**64 - 1)] | None = None
    stop: Texts = ()
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    stop_token_ids: Annotated[Sequence[AtLeast0], BeforeValidator(to_tuple), or_empty(())] = ()
    ignore_eos: bool = False
    truncate_prompt_tokens: Annotated[Whole, Field(ge=WHAT_FITS)] | None = None
    namespace: str = ""

    ELSEWHERE: ClassVar[Mapping[str, str]] = _ELSEWHERE

    def __post_init__(self) -> None:
        if self.min_tokens > self.most_tokens:
            raise ConfigError(
                f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; lower the "
                "first or raise the second."
            )
        if self.truncate_prompt_tokens == 0:
            raise ConfigError("truncate_prompt_tokens is 0; give at least 1, or -1 for what fits.")
        if self.stop and not self.detokenize:
            raise ConfigError(
                f"stop is {self.stop!r}, but without detokenize there is no text to find it in; "
                "leave one of the two out, or use stop_token_ids."
            )

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or more than any context holds."""
        return 2**30 if self.max_tokens is None else self.max_tokens
