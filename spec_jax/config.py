"""What a user may choose: frozen, validated, with a suggestion for every misspelt key."""

import dataclasses
import functools
import json
import numbers
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from spec_jax.errors import ConfigError, SpecJaxError, did_you_mean, explain

T = TypeVar("T")
TableT = TypeVar("TableT", bound="Table")

FLOAT32_MAX = 3.4028234e38
"""Parameters travel to the device as float32."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
def config_class(cls: type[T]) -> type[T]:
    """A frozen keyword-only dataclass whose values pydantic checks; errors are `ConfigError`."""
    strict = pydantic.ConfigDict(extra="forbid", strict=True)
    decorate = pydantic.dataclasses.dataclass(frozen=True, kw_only=True, config=strict)
    data_class: Any = decorate(cls)
    names = {field.name for field in dataclasses.fields(data_class)}
    validate = data_class.__init__

    @functools.wraps(validate)
    def checked_init(self: Any, **values: Any) -> None:
        for name in values.keys() - names:
            hint = did_you_mean(name, names)
            raise ConfigError(f"{cls.__name__} has no option {name!r}.{hint}")
        try:
            validate(self, **values)
        except pydantic.ValidationError as error:
            cause = error.errors()[0].get("ctx", {}).get("error")
            raise (
                cause if isinstance(cause, SpecJaxError) else ConfigError(explain(error))
            ) from None

    data_class.__init__ = checked_init
    return data_class


class Table(pydantic.BaseModel):
    """A table of a TOML file, whose keys are its fields and no others."""

    model_config = pydantic.ConfigDict(strict=True, frozen=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _refuse_unknown_keys(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise PydanticCustomError("table", "It should be a table")
        for key in values.keys() - cls.model_fields.keys():
            context = {"key": key, "hint": did_you_mean(key, cls.model_fields)}
            raise PydanticCustomError("unknown_key", "{hint}", context)
        return values

    @classmethod
    def read(cls: type[TableT], file: Path, error: type[SpecJaxError]) -> TableT:
        """Reads a file.

        Raises:
          SpecJaxError: of the type `error`: it is no TOML, or a key is unknown, missing or
            malformed.
          OSError: it cannot be read.
        """
        try:
            return cls.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as reason:
            raise error(f"{file} is not a TOML file: {reason}.") from None
        except pydantic.ValidationError as reason:
            raise error(f"{file}: {explain(reason)}") from None


def cache_directory() -> Path:
    """Where fetched and built files are kept: $SPEC_JAX_CACHE, or spec-jax in the user's cache."""
    if own := os.environ.get("SPEC_JAX_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spec-jax"


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's."""
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) and not isinstance(value, int) else value


Whole = Annotated[int, BeforeValidator(_plain)]
Number = Annotated[
    float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX, allow_inf_nan=False), BeforeValidator(_plain)
]
AtLeast0 = Annotated[Whole, Field(ge=0)]
AtLeast1 = Annotated[Whole, Field(ge=1)]
NotNegative = Annotated[Number, Field(ge=0)]
Positive = Annotated[Number, Field(gt=0)]
Share = Annotated[Number, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


def one_of(known: Iterable[str], aliases: Mapping[str, str] | None = None) -> BeforeValidator:
    """Refuses a value that is not one of the known ones; replaces an alias by its meaning."""
    names, aliases = tuple(known), aliases or {}

    def check(value: Any) -> Any:
        if isinstance(value, str):
            value = aliases.get(value, value)
        if value not in names:
            hint = did_you_mean(str(value), (*names, *aliases))
            raise PydanticCustomError("choice", "{hint}", {"hint": hint})
        return value

    return BeforeValidator(check)


def to_tuple(value: Any) -> Any:
    """Any collection as a tuple, but no text and no mapping."""
    whole = isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable)
    return value if whole else tuple(value)


def _to_json(value: Any) -> Any:
    """A JSON object as text; the order of its keys is kept, which is the order of the output."""
    if value is None:
        return None
    try:
        text = value if isinstance(value, str) else json.dumps(dict(value))
        if isinstance(json.loads(text), dict):
            return text
        why = "it is none"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise PydanticCustomError("json", "It should be a JSON object: {why}", {"why": why})


def _finite_or_ban(value: float) -> float:
    if not abs(value) <= FLOAT32_MAX and value != float("-inf"):
        raise PydanticCustomError("bias", "It should be a finite number, or -inf to ban the token")
    return value


Bias = Annotated[float, AfterValidator(_finite_or_ban), BeforeValidator(_plain)]


def _or(empty: object) -> BeforeValidator:
    """Takes None for what says nothing, as vLLM does."""
    return BeforeValidator(lambda value: empty if value is None else value)


Texts = Annotated[
    tuple[Text, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else to_tuple(value)),
    _or(()),
]
"""One text or several."""

MOST_SPECULATIVE_TOKENS = {
    "constant": 4,
    "heuristic": 20,
    "confidence": 20,
    "adaptive": 8,
    "oracle": 20,
}
DRAFT_LENGTH_POLICIES = tuple(MOST_SPECULATIVE_TOKENS)
CONFIDENCE_THRESHOLD = 0.4
PROMPT_LOOKUP_MAX = 3
VERIFICATIONS = ("token", "block", "greedy")
SCORINGS = ("block", "prefix_batch")
SCORING_ALIASES = {"stairs": "prefix_batch"}
"""The name in the publication (IVUS 2024) is accepted too."""
DTYPES = ("float32", "bfloat16")
AUTO = "auto"
LLM_DTYPES = (AUTO, *DTYPES)
CHECKPOINT_FORMATS = ("orbax", "safetensors")
"""What a model can be converted to."""
QUANTIZATIONS = (AUTO, "none", "int8", "int4", "gguf")
PLAN_QUANTIZATIONS = ("none", "int8", "int4")
"""Those that a model's shape alone determines."""
KV_CACHE_DTYPES = (AUTO, "int8")
OFFLOADS = ("none", "host")

Options = Mapping[str, tuple[str, ...] | None]
"""Options of `SpeculativeConfig`, each with the values it may take; None stands for all of them."""

_DRAFTING: Options = dict.fromkeys(
    ("num_speculative_tokens", "draft_length_policy", "verification", "scoring")
)
_CONFIDENT: Options = {"confidence_threshold": None, "retune_confidence": None}
_DRAFTED: Options = {"draft": None, "draft_quantization": None}
# A lookup has no probability to compare with a threshold.
_LOOKUP: Options = _DRAFTING | {
    "draft_length_policy": tuple(each for each in DRAFT_LENGTH_POLICIES if each != "confidence")
}

METHODS: Mapping[str, Options] = {
    "none": {},
    "draft_model": {
        **_DRAFTING,
        **_CONFIDENT,
        **_DRAFTED,
        "num_drafts": None,
        "draft_vocab_size": None,
    },
    "prompt_lookup": {**_LOOKUP, "num_drafts": None, "prompt_lookup_max": None},
    "suffix": _LOOKUP,
    # A prefix batch runs all layers of every prefix; early exit has already run the first layers.
    "early_exit": {**_DRAFTING, **_CONFIDENT, "scoring": ("block",), "early_exit_layers": None},
    "universal_vocabulary": {**_DRAFTING, **_CONFIDENT, **_DRAFTED},
    # It drafts in other tokens than are verified, so no threshold can be learnt from the verdicts.
    "universal_text": {**_DRAFTING, "confidence_threshold": None, **_DRAFTED},
}
"""The options that each method supports; `SpeculativeConfig` refuses the others."""

_TOGETHER = (
    ("confidence_threshold", "draft_length_policy", ("confidence",)),
    ("retune_confidence", "draft_length_policy", ("confidence",)),
    ("num_drafts", "verification", ("token", "greedy")),
    ("num_drafts", "scoring", ("block",)),
)
"""An option, a second one, and the values of the second that go with the first."""

DRAFTING_METHODS = tuple(name for name, options in METHODS.items() if "draft" in options)
"""Methods that need a model to draft with."""


@config_class
class SamplingParams:
    """How one request is sampled and when it stops.

    The logits pass through logit bias, repetition penalty, presence and frequency penalty, bad
    words, min tokens, grammar, temperature, top-k, top-p and min-p, in that order: Hugging Face
    transformers' order and semantics, with the two additive penalties of the OpenAI API, which see
    generated tokens only.

    Attributes:
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
      seed: makes the request's randomness reproducible, whatever else shares its batch.
        None takes the next seed of the `LLM`.
      stop: strings that end the text; the text is cut before the string.
      stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
      ignore_eos: decode past the model's end-of-sequence tokens.
      namespace: for method `suffix`: requests of one namespace draft from each other's outputs;
        those of others are never seen. How fast a request runs tells of the outputs it drafts
        from, so users who must not learn of each other need namespaces of their own.
    """

    max_tokens: AtLeast1 | None = 256
    min_tokens: AtLeast0 = 0
    temperature: NotNegative = 0.0
    top_k: Annotated[AtLeast0, BeforeValidator(lambda k: 0 if k == -1 else k)] = 0
    top_p: Annotated[Share, Field(gt=0)] = 1.0
    min_p: Share = 0.0
    repetition_penalty: Positive = 1.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    logit_bias: Annotated[Mapping[AtLeast0, Bias], _or({})] = dataclasses.field(
        default_factory=dict
    )
    bad_words: Texts = ()
    json_schema: Annotated[Mapping[str, Any] | str | None, BeforeValidator(_to_json)] = None
    regex: Text | None = None
    seed: Annotated[AtLeast0, Field(le=2**64 - 1)] | None = None
    stop: Texts = ()
    stop_token_ids: Annotated[tuple[AtLeast0, ...], BeforeValidator(to_tuple), _or(())] = ()
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


@config_class
class SpeculativeConfig:
    """How tokens are drafted and verified.

    `METHODS` says which options a method supports; any other is refused.

    Attributes:
      method: `none` decodes plainly; `draft_model` drafts with a second, smaller model of the same
        tokenizer (Chen et al. 2023, arXiv 2302.01318); `prompt_lookup` copies what followed the
        latest n-gram earlier in prompt or output (Saxena 2023; semantics of Hugging Face
        transformers); `suffix` copies what followed the longest match in the outputs of earlier
        requests (after Oliaro et al. 2024, arXiv 2411.04975); `early_exit` drafts with the
        target's own first layers (Elhoushi et al. 2024, arXiv 2404.16710); `universal_vocabulary`
        drafts with a model of another tokenizer over the tokens that both have (Timor et al. 2025,
        arXiv 2502.05202, algorithm 4); `universal_text` with one of any tokenizer, by way of text
        (Hugging Face's universal assisted generation).
      draft: the draft model's reference (directory, .gguf file, recipe or hub id); naming
        the target again shares its weights.
      draft_quantization: as `quantization` of the target, for the draft model; by default the
        same, and `none` for the draft of a `gguf` target that is no .gguf file itself.
      num_speculative_tokens: the lookahead K, most tokens drafted per round. By default 4 where
        it is constant, 8 where it is adaptive, else 20.
      draft_length_policy: how K changes from round to round. `constant` keeps it; `heuristic`
        drafts two more after a fully accepted draft, otherwise one fewer (Hugging Face 2023);
        `confidence` stops after a token with a low probability (arXiv 2405.04304); `adaptive`
        measures the cost of rounds and maximises each request's tokens per second; `oracle`
        counts the tokens that the best policy would have drafted, for analysis.
      confidence_threshold: for `confidence`, the smallest probability of a drafted token with
        which drafting continues; 0.4 by default.
      retune_confidence: for `confidence`, adapt the threshold to the accepted tokens.
      verification: `token` is modified rejection sampling and `block` verifies a draft as a whole
        (Sun et al. 2024, arXiv 2403.10444), both exact at every temperature; `greedy` keeps the
        longest prefix equal to the target's argmax, and needs temperature 0.
      scoring: `block` scores a draft in one row; `prefix_batch` scores its prefixes as a batch
        (IVUS 2024, which calls it `stairs`; that name is accepted as an alias).
      num_drafts: drafts per round, verified together as a tree (arXiv 2305.09781).
      prompt_lookup_max: longest n-gram that `prompt_lookup` looks for, 3 by default; shorter ones
        follow.
      early_exit_layers: layers of the target that `early_exit` drafts with; a quarter by default.
      draft_vocab_size: for `draft_model`, how many of its tokens the draft may propose, counted
        from the most frequent; by default all. Fewer make its step cheaper.
    """

    method: Annotated[str, one_of(METHODS)] = "none"
    draft: str | None = None
    draft_quantization: Annotated[str, one_of(QUANTIZATIONS)] | None = None
    num_speculative_tokens: AtLeast1 | None = None
    draft_length_policy: Annotated[str, one_of(DRAFT_LENGTH_POLICIES)] = "constant"
    confidence_threshold: Share | None = None
    retune_confidence: bool = False
    verification: Annotated[str, one_of(VERIFICATIONS)] = "token"
    scoring: Annotated[str, one_of(SCORINGS, SCORING_ALIASES)] = "block"
    num_drafts: AtLeast1 = 1
    prompt_lookup_max: AtLeast1 | None = None
    early_exit_layers: AtLeast1 | None = None
    draft_vocab_size: AtLeast1 | None = None

    def __post_init__(self) -> None:
        if self.method in DRAFTING_METHODS and not self.draft:
            raise ConfigError(f"method {self.method!r} needs draft=... (--draft): the draft model.")
        self._refuse_unsupported()

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "SpeculativeConfig":
        """Options under these names, or under those of vLLM's `speculative_config`.

        Its `model` is the draft, its method `ngram` is `prompt_lookup`, a method that is left out
        is `draft_model` if there is a model, and `quantization` is the draft's.

        Raises:
          ConfigError: as of this class; or an option of vLLM has a value that has no meaning here.
        """
        given = {name: value for name, value in options.items() if value is not None}
        if given.pop("prompt_lookup_min", 1) != 1:
            raise ConfigError(
                f"prompt_lookup_min is {options['prompt_lookup_min']!r}; leave it out, since "
                "n-grams of every length up to prompt_lookup_max are looked for."
            )
        for theirs, ours in (("model", "draft"), ("quantization", "draft_quantization")):
            if theirs in given:
                if ours in given:
                    raise ConfigError(f"{theirs} and {ours} mean the same; give one of the two.")
                given[ours] = given.pop(theirs)
        if given.get("method") == "ngram" or given.get("draft") in ("ngram", "[ngram]"):
            given.pop("draft", None)
            given["method"] = "prompt_lookup"
        elif "draft" in given:
            given.setdefault("method", "draft_model")
        return cls(**given)

    @property
    def most_speculative_tokens(self) -> int:
        """Most tokens drafted per round, the default filled in; plain decoding drafts none."""
        if self.method == "none":
            return 0
        return self.num_speculative_tokens or MOST_SPECULATIVE_TOKENS[self.draft_length_policy]

    def _refuse_unsupported(self) -> None:
        """Refuses options with a value other than the default that would be ignored."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "method" and getattr(self, field.name) != field.default
        }
        for name, value in given.items():
            if not _supports(self.method, name, value):
                known = [each for each in METHODS if _supports(each, name, value)]
                values = METHODS[self.method].get(name)
                otherwise = f"use {name} {_one_of(values)}" if values else f"leave {name} out"
                raise ConfigError(
                    f"{name} is {value!r} but method is {self.method!r}; use method "
                    f"{_one_of(known)}, or {otherwise}."
                )
        for name, other, values in _TOGETHER:
            if name in given and getattr(self, other) not in values:
                raise ConfigError(
                    f"{name} is {given[name]!r} but {other} is {getattr(self, other)!r}; use "
                    f"{other} {_one_of(values)}, or leave {name} out."
                )


def _supports(method: str, option: str, value: object) -> bool:
    options = METHODS[method]
    return option in options and ((values := options[option]) is None or value in values)


def _one_of(values: Sequence[str]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last
