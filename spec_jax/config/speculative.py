"""How tokens are drafted and verified."""

import dataclasses
import importlib.metadata
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator

from spec_jax.config.choices import QUANTIZATIONS
from spec_jax.config.elsewhere import METHODS_ELSEWHERE
from spec_jax.config.fields import AtLeast1, Share, config_class, one_of
from spec_jax.errors import ConfigError, did_you_mean

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

Options = Mapping[str, tuple[str, ...] | None]
"""Options of `SpeculativeConfig`, each with the values it may take; None stands for all of them."""

_DRAFTING: Options = dict.fromkeys(
    (
        "num_speculative_tokens",
        "draft_length_policy",
        "verification",
        "scoring",
        "scoring_consistent",
    )
)
_CONFIDENT: Options = {"confidence_threshold": None, "retune_confidence": None}
_DRAFTED: Options = {"draft": None, "draft_quantization": None}
# A lookup has no probability to compare with a threshold.
LOOKUP_OPTIONS: Options = _DRAFTING | {
    "draft_length_policy": tuple(each for each in DRAFT_LENGTH_POLICIES if each != "confidence")
}
"""What every drafter supports, of which nothing more is known."""
CUSTOM = "custom"
"""The method whose drafter is `LLM(drafter=...)`."""

METHODS: dict[str, Options] = {
    "none": {"scoring_consistent": None},
    "draft_model": {
        **_DRAFTING,
        **_CONFIDENT,
        **_DRAFTED,
        "num_drafts": None,
        "draft_vocab_size": None,
    },
    "prompt_lookup": {**LOOKUP_OPTIONS, "num_drafts": None, "prompt_lookup_max": None},
    "suffix": LOOKUP_OPTIONS,
    # A prefix batch runs all layers of every prefix; early exit has already run the first layers,
    # one token a call, so that nothing makes its scoring consistent.
    "early_exit": {
        **{name: values for name, values in _DRAFTING.items() if name != "scoring_consistent"},
        **_CONFIDENT,
        "scoring": ("block",),
        "early_exit_layers": None,
    },
    "universal_vocabulary": {**_DRAFTING, **_CONFIDENT, **_DRAFTED},
    # It drafts in other tokens than are verified, so no threshold can be learnt from the verdicts.
    "universal_text": {**_DRAFTING, "confidence_threshold": None, **_DRAFTED},
    CUSTOM: LOOKUP_OPTIONS,
}
"""The options that each method supports; `SpeculativeConfig` refuses the others.

`add_method` adds those of drafters from outside of the package.
"""
ENTRY_POINTS = "spec_jax.drafters"
"""The group of entry points whose names are methods; importing one registers the method."""
_adding = threading.Lock()

_TOGETHER = (
    ("confidence_threshold", "draft_length_policy", ("confidence",)),
    ("retune_confidence", "draft_length_policy", ("confidence",)),
    ("num_drafts", "verification", ("token", "greedy")),
    ("num_drafts", "scoring", ("block",)),
    ("scoring_consistent", "scoring", ("block",)),
    ("scoring_consistent", "num_drafts", (1,)),
)
"""An option, a second one, and the values of the second that go with the first."""

DRAFTING_METHODS = tuple(name for name, options in METHODS.items() if "draft" in options)
"""Methods that need a model to draft with."""


def add_method(name: str, options: Options) -> None:
    """Adds a method, with the options that it supports.

    Raises:
      ConfigError: the name is taken or empty, or an option or a value does not exist.
    """
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise ConfigError(f"the name of a drafter is {name!r}; give it one in letters.")
    known = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    for option, values in options.items():
        if option not in known.keys() - {"method"}:
            hint = did_you_mean(option, known.keys() - {"method"})
            raise ConfigError(f"drafter {name!r} cannot support the option {option!r}.{hint}")
        for value in values or ():
            if value not in _VALUES.get(option, ()):
                hint = did_you_mean(str(value), _VALUES.get(option, ()))
                raise ConfigError(f"drafter {name!r} cannot support {option} {value!r}.{hint}")
    with _adding:
        if name in METHODS:
            raise ConfigError(
                f"there is a method {name!r} already; register each drafter once, under a name of "
                "its own."
            )
        METHODS[name] = dict(options)


def _import_method(name: Any) -> Any:
    """Imports what the entry point of a method's name refers to, if the method is not known yet."""
    if isinstance(name, str) and name not in METHODS:
        if name in METHODS_ELSEWHERE:
            raise ConfigError(f"method is {name!r}; {METHODS_ELSEWHERE[name]}.")
        for entry in importlib.metadata.entry_points(group=ENTRY_POINTS, name=name):
            try:
                entry.load()
            except Exception as error:
                raise ConfigError(
                    f"method {name!r} is the entry point {entry.value} of an installed package, "
                    f"which cannot be imported: {error}"
                ) from error
            if name not in METHODS:
                raise ConfigError(
                    f"method {name!r} is the entry point {entry.value} of an installed package, "
                    f"which does not register it; call `register_drafter({name!r}, ...)` there."
                )
    return name


@config_class
class SpeculativeConfig:
    """How tokens are drafted and verified.

    `METHODS` says which options a method supports; any other is refused. Besides the methods below
    there are those of `spec_jax.register_drafter`, by their names, and `custom`, whose drafter is
    `LLM(drafter=...)`.

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
      scoring_consistent: score K + 1 tokens of a row in every round, however few are drafted, and
        also with method `none`. The target then computes every token by the same kind of product,
        drafted or not: greedy tokens of plain decoding and of a drafter with the same K are the
        same in bfloat16 too, in batches of the same size, if no row of a product depends on its
        place. Calls take as long as
        those of a whole draft. Needs scoring `block` and one draft.
      num_drafts: drafts per round, verified together as a tree (arXiv 2305.09781).
      prompt_lookup_max: longest n-gram that `prompt_lookup` looks for, 3 by default; shorter ones
        follow.
      early_exit_layers: layers of the target that `early_exit` drafts with; a quarter by default.
      draft_vocab_size: for `draft_model`, how many of its tokens the draft may propose, counted
        from the most frequent; by default all. Fewer make its step cheaper.
    """

    method: Annotated[str, one_of(METHODS), BeforeValidator(_import_method)] = "none"
    draft: str | None = None
    draft_quantization: Annotated[str, one_of(QUANTIZATIONS)] | None = None
    num_speculative_tokens: AtLeast1 | None = None
    draft_length_policy: Annotated[str, one_of(DRAFT_LENGTH_POLICIES)] = "constant"
    confidence_threshold: Share | None = None
    retune_confidence: bool = False
    verification: Annotated[str, one_of(VERIFICATIONS)] = "token"
    scoring: Annotated[str, one_of(SCORINGS, SCORING_ALIASES)] = "block"
    scoring_consistent: bool = False
    num_drafts: AtLeast1 = 1
    prompt_lookup_max: AtLeast1 | None = None
    early_exit_layers: AtLeast1 | None = None
    draft_vocab_size: AtLeast1 | None = None

    def __post_init__(self) -> None:
        if "draft" in METHODS[self.method] and not self.draft:
            raise ConfigError(f"method {self.method!r} needs draft=... (--draft): the draft model.")
        self._refuse_unsupported()

    @classmethod
    def of(cls, given: "SpeculativeConfig | Mapping[str, Any] | None") -> "SpeculativeConfig":
        """One as it is, one of options (`from_dict`), or for None that of plain decoding.

        Raises:
          ConfigError: it is something else, or as `from_dict`.
        """
        if given is None or isinstance(given, Mapping):
            return cls.from_dict(given or {})
        if not isinstance(given, SpeculativeConfig):
            raise ConfigError(
                f"speculative_config is {given!r}; give SpeculativeConfig(...), or a mapping such "
                "as {'method': 'ngram', 'num_speculative_tokens': 4}."
            )
        return given

    @classmethod
    def from_dict(cls, options: Mapping[str, Any]) -> "SpeculativeConfig":
        """Options under these names, or under those of vLLM's `speculative_config`.

        Its `model` is the draft, its method `ngram` is `prompt_lookup`, a method that is left out
        is `draft_model` if there is a model, and `quantization` is the draft's.

        Raises:
          ConfigError: as of this class; or an option of vLLM has a value that has no meaning here.
        """
        given = {str(name): value for name, value in options.items() if value is not None}
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
        """Most tokens drafted per round, the default filled in; plain decoding drafts none.

        With `scoring_consistent` it scores as many all the same.
        """
        if self.method == "none" and not self.scoring_consistent:
            return 0
        return self.num_speculative_tokens or MOST_SPECULATIVE_TOKENS[self.draft_length_policy]

    @property
    def plain(self) -> "SpeculativeConfig":
        """The plain decoding that this is compared with."""
        if not self.scoring_consistent:
            return SpeculativeConfig()
        return SpeculativeConfig(
            num_speculative_tokens=self.most_speculative_tokens, scoring_consistent=True
        )

    def _refuse_unsupported(self) -> None:
        """Refuses options with a value other than the default that would be ignored."""
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name != "method" and getattr(self, field.name) != field.default
        }
        if self.method == "none" and self.scoring_consistent:
            given.pop("num_speculative_tokens", None)  # here it is the width of calls
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


_VALUES: Mapping[str, Sequence[str]] = {
    "draft_length_policy": DRAFT_LENGTH_POLICIES,
    "verification": VERIFICATIONS,
    "scoring": SCORINGS,
    "draft_quantization": QUANTIZATIONS,
}
"""Options that take one of some values."""


def _supports(method: str, option: str, value: object) -> bool:
    options = METHODS[method]
    return option in options and ((values := options[option]) is None or value in values)


def _one_of(values: Sequence[object]) -> str:
    *others, last = map(repr, values)
    return f"{', '.join(others)} or {last}" if others else last
