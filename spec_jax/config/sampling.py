"""How a request is sampled and when it stops."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from spec_jax.config.fields import (
    AtLeast0,
    AtLeast1,
    Bias,
    Flag,
    Integer,
    NotNegative,
    Number,
    Positive,
    Share,
    Texts,
    config_class,
    or_empty,
    to_tuple,
)
from spec_jax.config.structured import StructuredOutputsParams, to_structured
from spec_jax.errors import ConfigError

MAX_COMPLETIONS = 16384
"""As in vLLM."""
MAX_LOGPROBS = 20
"""As in vLLM."""
FIT_CONTEXT = -1
"""`truncate_prompt_tokens` that leaves room for max_tokens."""

_UNSUPPORTED = {
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
    "extra_args": "use logit_bias, bad_words, allowed_token_ids or structured_outputs",
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "use structured_outputs={'json': ...}, or 'regex', 'choice', 'grammar'",
    ),
    "max_length": "use max_tokens, which the prompt does not count for",
    "no_repeat_ngram_size": "use repetition_penalty or frequency_penalty",
    "max_completion_tokens": "it is called max_tokens",
    "max_new_tokens": "it is called max_tokens",
    "num_return_sequences": "it is called n",
    "do_sample": "leave it out: a temperature above 0 samples",
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "early_stopping"),
        "leave it out: beams are not searched",
    ),
    **dict.fromkeys(
        (
            *("assistant_model", "assistant_tokenizer", "assistant_early_exit"),
            *("num_assistant_tokens", "num_assistant_tokens_schedule"),
            *("assistant_confidence_threshold", "prompt_lookup_num_tokens"),
        ),
        "drafts are set by LLM(model, speculative_config=...)",
    ),
}
"""Names that vLLM, the OpenAI API and transformers have, or had, and what to do here."""


@config_class
class SamplingParams:
    """How one request is sampled and when it stops.

    The logits pass through logit bias, repetition penalty, presence and frequency penalty, bad
    words, min tokens, grammar, temperature, top-k, top-p and min-p, in that order: Hugging Face
    transformers' order and semantics, with the two additive penalties of the OpenAI API, which see
    generated tokens only.
    """

    n: Annotated[AtLeast1, Field(le=MAX_COMPLETIONS)] = 1
    """Completions of the prompt, each drawn for itself. A seed and their number determine them."""
    max_tokens: AtLeast1 | None = 256
    """Most tokens to generate. At least 1; None for as many as the context holds."""
    min_tokens: AtLeast0 = 0
    """Fewest tokens to generate before any stop. Until then no token that ends the request is
    generated, and no stop string ends it; at most max_tokens."""
    temperature: Annotated[NotNegative, Flag(metavar="T")] = 0.0
    """Logits are divided by it; 0 is greedy. So is a value below float32's smallest normal number,
    1.2e-38."""
    top_k: Annotated[
        AtLeast0, BeforeValidator(lambda k: 0 if k == -1 else k), Flag(metavar="K")
    ] = 0
    """Keep the K likeliest tokens; 0 keeps all. Ties at the K-th are kept; -1 keeps all too."""
    top_p: Annotated[Share, Field(gt=0), Flag(metavar="P")] = 1.0
    """Keep the likeliest tokens that reach probability P. The smallest such set; in (0, 1]."""
    min_p: Annotated[Share, Flag(metavar="P")] = 0.0
    """Drop tokens less likely than P times the likeliest. In [0, 1]."""
    repetition_penalty: Positive = 1.0
    """Divide positive and multiply negative logits of tokens seen; 1 is off. Seen in prompt or
    output (Keskar et al. 2019, arXiv 1909.05858)."""
    presence_penalty: Number = 0.0
    """Subtract it once from the logit of each generated token; 0 is off."""
    frequency_penalty: Number = 0.0
    """Subtract it for each time a token was generated; 0 is off."""
    logit_bias: Annotated[Mapping[AtLeast0, Bias], or_empty({})] = dataclasses.field(
        default_factory=dict
    )
    """Token id -> value added to its logit; -inf bans the token."""
    bad_words: Texts = ()
    """Never generate this text. It is banned at the start of a word or after a space: the last of
    its tokens is banned where prompt or output end with the tokens before it. Other ways to spell
    the same text in tokens are not banned."""
    structured_outputs: Annotated[
        StructuredOutputsParams | Mapping[str, Any] | None, BeforeValidator(to_structured)
    ] = None
    """What the whole output must be, such as JSON of a schema. Also as a mapping with one of the
    names of `StructuredOutputsParams`."""
    allowed_token_ids: (
        Annotated[Sequence[AtLeast0], Field(min_length=1), BeforeValidator(to_tuple)] | None
    ) = None
    """Tokens that may be generated, all others are banned; None for all."""
    logprobs: Annotated[AtLeast0, Field(le=MAX_LOGPROBS)] | None = None
    """With --json or --out, log-probabilities of each token and of the N likeliest in its place. At
    most 20. They are the target's: of its logits before all of the above. None gives none."""
    prompt_logprobs: Annotated[AtLeast0, Field(le=MAX_LOGPROBS)] | None = None
    """The same for each token of the prompt after its first."""
    seed: Annotated[AtLeast0, Field(le=2**64 - 1)] | None = None
    """Make sampling reproducible, whatever else shares its batch (default: random). None takes the
    next seed of the `LLM`."""
    stop: Texts = ()
    """End before this text."""
    include_stop_str_in_output: bool = False
    """Cut the text after the stop string instead of before it."""
    detokenize: bool = True
    """Whether the output has a text; without one no stop string can be found."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    stop_token_ids: Annotated[Sequence[AtLeast0], BeforeValidator(to_tuple), or_empty(())] = ()
    """End after one of these tokens. The model's end-of-sequence tokens end it too."""
    ignore_eos: bool = False
    """Decode past the end of sequence."""
    truncate_prompt_tokens: Annotated[Integer, Field(ge=FIT_CONTEXT)] | None = None
    """Keep only this number of the prompt's last tokens. -1 keeps as many as leave room for
    max_tokens in the context. None refuses a prompt that does not fit."""
    namespace: Annotated[str, Flag(metavar="NAME")] = ""
    """Methods suffix and recycle draft only from outputs of this namespace. Outputs of other
    namespaces are never seen. How fast a request runs tells of the outputs it drafts from, so users
    who must not learn of each other need separate namespaces."""

    UNSUPPORTED: ClassVar[Mapping[str, str]] = _UNSUPPORTED

    def __post_init__(self) -> None:
        if self.min_tokens > self.token_limit:
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
    def token_limit(self) -> int:
        """`max_tokens`, or more than any context holds."""
        return 2**30 if self.max_tokens is None else self.max_tokens
