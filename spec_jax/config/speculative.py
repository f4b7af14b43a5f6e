"""How tokens are drafted and verified: one class of options for each method."""

import dataclasses
import importlib.metadata
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator

from spec_jax.config.choices import Quantization
from spec_jax.config.fields import (
    AtLeast1,
    Flag,
    Share,
    annotations_of,
    choices_of,
    config_class,
    option_names,
)
from spec_jax.config.other_names import HEADS, NOT_OF_SPECULATION
from spec_jax.errors import ConfigError, did_you_mean, unknown_option

_Policy = Literal["constant", "heuristic", "confidence", "adaptive", "oracle"]
_Verification = Literal["coupled", "token", "block"]
DRAFT_LENGTH_POLICIES, VERIFICATIONS = get_args(_Policy), get_args(_Verification)
CONFIDENCE_THRESHOLD = 0.4
SCORINGS = ("block", "prefix_batch")
CUSTOM = "custom"
"""The method whose drafter is `LLM(drafter=...)`."""
COPIES = {"self:int4": "int4", "self:int8": "int8"}
"""Drafts that are copies of the target, and how they are quantized."""
ENTRY_POINTS = "spec_jax.drafters"
"""The group of entry points whose names are methods; importing one registers the method."""

UNSUPPORTED_METHODS: Mapping[str, str] = {
    "ngram": "it is called prompt_lookup",
    **dict.fromkeys(("eagle", "eagle3", "medusa", "mtp"), HEADS),
}
"""Methods of vLLM, and what to use instead."""

_registration = threading.Lock()


@config_class
class SpeculativeConfig:
    """How tokens are drafted and verified; `method` decides which options there are.

    `SpeculativeConfig(method="prompt_lookup", ...)` makes a `PromptLookupConfig`, and so on: each
    method has a class with its options. `spec_jax.register_drafter` adds methods; the drafter of
    the method `custom` is `LLM(drafter=...)`. The default method is `draft_model` if there is a
    draft, else `none`.
    """

    method: str
    """How to draft, or the name of an installed package's drafter (default: draft_model if --draft
    is given, else none)."""
    num_speculative_tokens: Annotated[AtLeast1 | None, Flag(metavar="K")] = None
    """The lookahead K, most tokens drafted in a round (default: 8 if adaptive, 4 if constant, else
    20)."""
    draft_length_policy: _Policy = "adaptive"
    """How K changes from round to round. `adaptive` measures the cost of rounds, maximises the
    tokens per second of a batch, and drafts nothing where drafting does not pay; `constant` keeps
    K; `heuristic` drafts two more after a fully accepted draft, otherwise one fewer (Hugging Face
    2023); `confidence` stops after a token with a low probability (arXiv 2405.04304); `oracle`
    counts the tokens that the best policy would have drafted, for analysis."""
    verification: _Verification = "coupled"
    """Which drafted tokens to accept; at temperature 0 all accept the target's likeliest tokens.
    `coupled` accepts tokens equal to those that plain decoding draws with the same seed, and drafts
    with the same random numbers (Daliri et al. 2024, arXiv 2408.07978); `token` is modified
    rejection sampling (Chen et al. 2023, arXiv 2302.01318); `block` verifies a draft as a whole
    (Sun et al. 2024, arXiv 2403.10444)."""
    scoring: Annotated[
        Literal["block", "prefix_batch", "stairs"],
        AfterValidator(lambda name: "prefix_batch" if name == "stairs" else name),
    ] = "block"
    """How the target scores a draft. `block` scores it in one row; `prefix_batch` scores its
    prefixes as a batch (IVUS 2024, which calls it `stairs`; that name is an alias)."""
    scoring_consistent: bool = False
    """Score K + 1 tokens in every round, and in plain decoding: equal greedy tokens in bfloat16.
    The target then computes every token by the same kind of product, drafted or not: greedy tokens
    of plain decoding and of a drafter with the same K are the same in bfloat16 too, in batches of
    the same size, if no row of a product depends on its place. Calls take as long as calls with a
    full draft. Needs scoring `block` and one draft."""

    # The values of these options for a method that does not have them.
    draft: str | None = dataclasses.field(default=None, init=False, repr=False)
    draft_quantization: str | None = dataclasses.field(default=None, init=False, repr=False)
    num_drafts: int = dataclasses.field(default=1, init=False, repr=False)
    confidence_threshold: float | None = dataclasses.field(default=None, init=False, repr=False)
    retune_confidence: bool = dataclasses.field(default=False, init=False, repr=False)

    def __new__(cls, **options: Any) -> "SpeculativeConfig":
        """An instance of the method's class."""
        if cls is SpeculativeConfig:
            default = "draft_model" if options.get("draft") else "none"
            cls = options_class(options.get("method", default))
        return object.__new__(cls)

    if TYPE_CHECKING:

        def __init__(self, *, method: str = "none", **options: Any) -> None: ...

    def __post_init__(self) -> None:
        if "draft" in option_names(type(self)) and not self.draft:
            raise ConfigError(f"method {self.method!r} needs draft=... (--draft): the draft model.")
        if self.draft in COPIES and self.draft_quantization is not None:
            raise ConfigError(
                f"draft_quantization is {self.draft_quantization!r} but draft is {self.draft!r}, "
                "which says it already; leave draft_quantization out."
            )
        if str(self.draft).partition(":")[0] == "self" and self.draft not in COPIES:
            raise ConfigError(
                f"draft is {self.draft!r}; a copy of the target is {_alternatives([*COPIES])}, and "
                "a directory of this name is './self'."
            )
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for option, other, *values in (
            ("confidence_threshold", "draft_length_policy", "confidence"),
            ("retune_confidence", "draft_length_policy", "confidence"),
            ("num_drafts", "verification", "coupled", "token"),
            ("num_drafts", "scoring", "block"),
            ("scoring_consistent", "scoring", "block"),
            ("scoring_consistent", "num_drafts", 1),
        ):
            value, actual = getattr(self, option), getattr(self, other)
            if value != defaults[option] and actual not in values:
                raise ConfigError(
                    f"{option} is {value!r} but {other} is {actual!r}; use {other} "
                    f"{_alternatives(values)}, or leave {option} out."
                )

    @classmethod
    def accept(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The options without values that this method has anyway.

        Raises:
          ConfigError: an option has an effect with other methods only.
        """
        for field in dataclasses.fields(cls):
            if not field.init and values.get(field.name) in (None, field.default):
                values.pop(field.name, None)
        names = option_names(cls)
        for name, value in values.items():
            if name == "method" or _takes(cls, name, value):
                continue
            if methods := [each for each in METHODS if _takes(METHODS[each], name, value)]:
                otherwise = f"leave {name} out"
                if choices := name in names and choices_of(annotations_of(cls)[name]):
                    otherwise = f"use {name} {_alternatives(choices)}"
                raise ConfigError(
                    f"{name} is {value!r} but method is {values.get('method', cls.method)!r}; use "
                    f"method {_alternatives(methods)}, or {otherwise}."
                )
            if name not in (options := all_options()):
                raise unknown_option("SpeculativeConfig", name, options, NOT_OF_SPECULATION)
            if name not in names:
                choices = choices_of(annotations_of(options[name])[name])
                raise ConfigError(f"{name} is {value!r}.{did_you_mean(str(value), choices)}")
        return values

    @classmethod
    def of(cls, config: "SpeculativeConfig | Mapping[str, Any] | None") -> "SpeculativeConfig":
        """A config as it is, or made of a mapping; for None it is plain decoding.

        A mapping has options with these names or with the names of vLLM's `speculative_config`. In
        vLLM's names, `model` is the draft, `quantization` is the draft's, the method `ngram` is
        `prompt_lookup`, and the default method is `draft_model` if there is a model.

        Raises:
          ConfigError: it is something else, an option is refused, or a value of an option of vLLM
            has no meaning here.
        """
        if isinstance(config, SpeculativeConfig):
            return config
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(
                f"speculative_config is {config!r}; give SpeculativeConfig(...), or a mapping such "
                "as {'method': 'ngram', 'num_speculative_tokens': 4}."
            )
        values = {str(name): each for name, each in (config or {}).items() if each is not None}
        if values.pop("prompt_lookup_min", 1) != 1:
            note = "prompt_lookup_min is ignored (the longest match drafts): this changes no output"
            warnings.warn(note, stacklevel=2)
        for theirs, ours in (("model", "draft"), ("quantization", "draft_quantization")):
            if theirs in values:
                if ours in values:
                    raise ConfigError(f"{theirs} and {ours} mean the same; give one of the two.")
                values[ours] = values.pop(theirs)
        if values.get("method") == "ngram" or values.get("draft") in ("ngram", "[ngram]"):
            values.pop("draft", None)
            values["method"] = "prompt_lookup"
        return SpeculativeConfig(**values)

    @property
    def lookahead(self) -> int:
        """The lookahead K, or its default. Plain decoding drafts no token.

        With `scoring_consistent` plain decoding scores K + 1 tokens nevertheless.
        """
        defaults = {"constant": 4, "adaptive": 8}
        return self.num_speculative_tokens or defaults.get(self.draft_length_policy, 20)

    @property
    def plain(self) -> "SpeculativeConfig":
        """The plain decoding that this is compared with."""
        if not self.scoring_consistent:
            return NoDraftConfig()
        return NoDraftConfig(num_speculative_tokens=self.lookahead, scoring_consistent=True)


@config_class
class NoDraftConfig(SpeculativeConfig):
    """Plain decoding: one token a call of the target."""

    method: Literal["none"] = "none"
    draft_length_policy: Literal["constant"] = dataclasses.field(
        default="constant", init=False, repr=False
    )
    verification: Literal["coupled"] = dataclasses.field(default="coupled", init=False, repr=False)
    scoring: Literal["block"] = dataclasses.field(default="block", init=False, repr=False)

    def __post_init__(self) -> None:
        if self.num_speculative_tokens is not None and not self.scoring_consistent:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens} but method is 'none'; "
                f"use method {_alternatives([each for each in METHODS if each != 'none'])}, or "
                "leave num_speculative_tokens out."
            )

    @property
    def lookahead(self) -> int:
        """0, or the width of calls that score consistently."""
        return super().lookahead if self.scoring_consistent else 0


@config_class
class _WithoutConfidence(SpeculativeConfig):
    """A method whose drafts have no probability to compare with a threshold."""

    draft_length_policy: Literal["constant", "heuristic", "adaptive", "oracle"] = "adaptive"


@config_class
class _Confidence:
    """A method that knows the probability of each drafted token."""

    confidence_threshold: Annotated[Share | None, Flag(metavar="P")] = None
    """Stop drafting below this probability of a drafted token, with policy confidence (default:
    0.4)."""
    retune_confidence: bool = False
    """Learn the threshold of policy confidence from accepted and rejected tokens."""


@config_class
class _Draft:
    """A method that drafts with a second model."""

    draft: Annotated[str | None, Flag(metavar="REF")] = None
    """The draft model, named like the target: a directory, .gguf file, recipe or hub id. Naming the
    target again shares its weights; `self:int4` and `self:int8` are a copy of it in as many bits
    (cf. ML-SpecQD, arXiv 2503.13565)."""
    draft_quantization: Quantization | None = None
    """As --quantization, for the draft model (default: what its recipe says for CPUs, else the same
    where it can be). It is `none` for the draft of a `gguf` target that is not a .gguf file
    itself."""


@config_class
class DraftModelConfig(_Draft, _Confidence, SpeculativeConfig):
    """Drafts with a second, smaller model of the same tokenizer (arXiv 2302.01318)."""

    method: Literal["draft_model"] = "draft_model"
    num_drafts: AtLeast1 = 1
    """Drafts per round, verified together as a tree (arXiv 2305.09781)."""
    draft_vocab_size: AtLeast1 | None = None
    """How many of its tokens the draft may propose, the most frequent ones (default: what its
    recipe says for CPUs, else all). Fewer make its step cheaper."""


@config_class
class PromptLookupConfig(_WithoutConfidence):
    """Copies what followed an earlier occurrence of the text's last n-gram (Saxena 2023)."""

    method: Literal["prompt_lookup"] = "prompt_lookup"
    num_drafts: AtLeast1 = 1
    """Drafts per round, verified together as a tree (arXiv 2305.09781)."""
    prompt_lookup_max: AtLeast1 = 3
    """Longest n-gram looked up; shorter ones follow."""


@config_class
class SuffixConfig(_WithoutConfidence):
    """Copies what followed the longest match in outputs of earlier requests (arXiv 2411.04975)."""

    method: Literal["suffix"] = "suffix"
    suffix_store: Annotated[str | None, Flag(metavar="FILE")] = None
    """Also search the outputs in this file, and add new ones to it when the process ends; it is
    made if there is none. `spec-jax store` makes one of texts."""


@config_class
class RecycleConfig(_WithoutConfidence):
    """Chains what the target found likeliest after the same last tokens (arXiv 2408.08696)."""

    method: Literal["recycle"] = "recycle"


@config_class
class EarlyExitConfig(_Confidence, SpeculativeConfig):
    """Drafts with the target's own first layers (arXiv 2404.16710)."""

    method: Literal["early_exit"] = "early_exit"
    early_exit_layers: AtLeast1 | None = None
    """Layers of the target that draft (default: a quarter)."""
    # A prefix batch runs all layers of every prefix, and the first layers have already run, one
    # token a call, so that nothing makes the scoring consistent.
    scoring: Literal["block"] = "block"
    scoring_consistent: bool = dataclasses.field(default=False, init=False, repr=False)


@config_class
class UniversalVocabularyConfig(_Draft, _Confidence, SpeculativeConfig):
    """Drafts with a model of another tokenizer, in shared tokens (arXiv 2502.05202)."""

    method: Literal["universal_vocabulary"] = "universal_vocabulary"


@config_class
class UniversalTextConfig(_Draft, _Confidence, SpeculativeConfig):
    """Drafts with a model of any tokenizer, by way of text (Hugging Face 2024)."""

    method: Literal["universal_text"] = "universal_text"
    # It drafts other tokens than the target verifies, so acceptances teach no threshold.
    retune_confidence: bool = dataclasses.field(default=False, init=False, repr=False)


@config_class
class CustomConfig(_WithoutConfidence):
    """Drafts with a drafter from outside the package."""

    method: str = CUSTOM


METHODS: dict[str, type[SpeculativeConfig]] = {
    "none": NoDraftConfig,
    "draft_model": DraftModelConfig,
    "prompt_lookup": PromptLookupConfig,
    "suffix": SuffixConfig,
    "recycle": RecycleConfig,
    "early_exit": EarlyExitConfig,
    "universal_vocabulary": UniversalVocabularyConfig,
    "universal_text": UniversalTextConfig,
    CUSTOM: CustomConfig,
}
"""Method -> its options; `add_method` adds one."""
DRAFTING_METHODS = tuple(name for name in METHODS if "draft" in option_names(METHODS[name]))
"""Methods that need a model to draft with."""


def all_options() -> dict[str, type[SpeculativeConfig]]:
    """Every option that a method has, with a class that has it."""
    classes = (*reversed(METHODS.values()), SpeculativeConfig)
    return {name: config for config in classes for name in option_names(config)}


def add_method(name: str, options: type[SpeculativeConfig]) -> None:
    """Adds a method with its class of options.

    Raises:
      ConfigError: the name is taken or empty, or the options are not a class of options.
    """
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise ConfigError(f"the name of a drafter is {name!r}; give it one in letters.")
    if not isinstance(options, type) or not issubclass(options, SpeculativeConfig):
        raise ConfigError(
            f"the options of drafter {name!r} are {options!r}; give a class derived from "
            "CustomConfig or SpeculativeConfig."
        )
    with _registration:
        if name in METHODS:
            raise ConfigError(
                f"there is a method {name!r} already; register each drafter once, under another "
                "name."
            )
        METHODS[name] = options


def options_class(method: Any) -> type[SpeculativeConfig]:
    """The class of a method's options; a method of an installed package is imported.

    Raises:
      ConfigError: there is no such method, or its package does not register it.
    """
    if isinstance(method, str) and method not in METHODS:
        if method in UNSUPPORTED_METHODS:
            raise ConfigError(f"method is {method!r}; {UNSUPPORTED_METHODS[method]}.")
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=method):
            which = f"method {method!r} is the entry point {entry.value} of an installed package,"
            try:
                entry.load()
            except Exception as error:
                raise ConfigError(f"{which} which cannot be imported: {error}") from error
            if method not in METHODS:
                raise ConfigError(
                    f"{which} which does not register it; call `register_drafter({method!r}, ...)` "
                    "there."
                )
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(f"method is {method!r}.{did_you_mean(str(method), METHODS)}")
    return METHODS[method]


def _takes(config: type[SpeculativeConfig], name: str, value: object) -> bool:
    if name not in option_names(config):
        return False
    choices = choices_of(annotations_of(config)[name])
    return not choices or value in choices


def _alternatives(values: Sequence[object]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last
