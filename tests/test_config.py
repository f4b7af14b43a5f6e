"""Every wrong value is refused with its name, itself and what to give instead."""

import copy
import dataclasses
import functools
import math
import pickle
import re
import types

import numpy as np
import pytest

from spec_jax import ConfigError, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from spec_jax.config import (
    DRAFT_LENGTH_POLICIES,
    DRAFTING_METHODS,
    METHODS,
    SCORINGS,
    VERIFICATIONS,
    option_names,
)
from spec_jax.errors import SpecJaxError

INF, NAN = math.inf, math.nan

INTEGER, NUMBER, FINITE = "a valid integer", "a valid number", "a finite number"
TEXT, BOOLEAN = "a valid string", "a valid boolean"


def below(name, *bad, low):
    return [(name, each, f"at least {low}") for each in bad]


def no_integer(name, *bad):
    return [(name, each, INTEGER) for each in (1.5, "5", True, NAN, *bad)]


def no_number(name, *bad):
    strange = [(name, each, FINITE) for each in (INF, -INF, NAN)]
    return [*strange, *[(name, each, NUMBER) for each in ("1", False, [1.0], *bad)]]


BAD_SAMPLING = [
    *below("max_tokens", 0, -1, low=1),
    *no_integer("max_tokens", 1.0),
    *below("min_tokens", -1, low=0),
    *no_integer("min_tokens", 1.0, None),
    ("min_tokens", 300, "max_tokens is 256"),
    *below("temperature", -0.1, low=0),
    *no_number("temperature", None),
    *below("top_k", -2, low=0),
    *no_integer("top_k", None),
    *[("top_p", bad, "above 0") for bad in (0, 0.0)],
    *below("top_p", -0.5, low=0),
    *[("top_p", bad, "at most 1") for bad in (1.0001, 2)],
    *no_number("top_p", None),
    *below("min_p", -0.01, low=0),
    ("min_p", 1.5, "at most 1"),
    *no_number("min_p", None),
    *[("repetition_penalty", bad, "above 0") for bad in (0, -1.0)],
    *no_number("repetition_penalty", None),
    ("presence_penalty", 1e39, "at most 3.4028234e+38"),
    *no_number("presence_penalty", None),
    ("frequency_penalty", -1e39, "at least -3.4028234e+38"),
    *no_number("frequency_penalty", None),
    *below("seed", -1, low=0),
    ("seed", 2**64, f"at most {2**64 - 1}"),
    *no_integer("seed"),
    *[("logit_bias", bad, "a valid dictionary") for bad in ([3, 4], 5, "5")],
    *[("bad_words", bad, "a list") for bad in (5, {})],
    *[("structured_outputs", bad, "or a mapping") for bad in (5, "json", ["json"])],
    *[("stop", bad, "a list") for bad in (5, {})],
    *[("stop_token_ids", bad, "a list") for bad in (5, "2")],
    *[("namespace", bad, TEXT) for bad in (None, 7, b"a", ("a",))],
    *below("n", 0, -1, low=1),
    ("n", 16385, "at most 16384"),
    *no_integer("n", 1.0, None),
    *below("logprobs", -1, low=0),
    ("logprobs", 21, "at most 20"),
    *no_integer("logprobs", 1.0),
    *below("prompt_logprobs", -1, low=0),
    ("prompt_logprobs", 21, "at most 20"),
    *no_integer("prompt_logprobs", 1.0),
    ("truncate_prompt_tokens", 0, "at least 1, or -1"),
    *below("truncate_prompt_tokens", -2, low=-1),
    *no_integer("truncate_prompt_tokens", 1.0),
    *[("allowed_token_ids", bad, "a list") for bad in (5, "2")],
    ("allowed_token_ids", (), "at least 1"),
    *[
        (name, bad, BOOLEAN)
        for name in (
            "detokenize",
            "ignore_eos",
            "include_stop_str_in_output",
            "skip_special_tokens",
        )
        for bad in ("no", 1, None)
    ],
]

BAD_STRUCTURED = [
    *[("json", bad, "a JSON object") for bad in (5, "{", "[]", "5", [1], {1: {2}}, "")],
    *[("regex", bad, TEXT) for bad in (5, b"a", ["a"])],
    ("regex", "", "at least 1 character"),
    *[("choice", bad, "a list") for bad in (5, "a", {"a": 1})],
    ("choice", (), "at least 1"),
    *[("grammar", bad, TEXT) for bad in (5, b"a", ["a"])],
    ("grammar", "", "at least 1 character"),
    *[("json_object", bad, BOOLEAN) for bad in (1, "yes")],
]

COUNTS = ("num_speculative_tokens", "prompt_lookup_max", "early_exit_layers", "draft_vocab_size")
BAD_SPECULATIVE = [
    *[
        ("method", bad, "Did you mean 'prompt_lookup'?")
        for bad in ("prompt-lookup", "promptlookup")
    ],
    ("method", "ngram", "it is called prompt_lookup"),
    ("method", "eagle", "use draft_model, early_exit or prompt_lookup"),
    *[("method", bad, f"Known: {', '.join(sorted(METHODS))}.") for bad in ("xyz", "", 3, [])],
    ("draft_length_policy", "constantly", "Did you mean 'constant'?"),
    ("draft_length_policy", 4, "Known: adaptive, confidence, constant, heuristic, oracle."),
    ("verification", "tokens", "Did you mean 'token'?"),
    ("verification", "xyz", "Known: block, coupled, token."),
    ("scoring", "stair", "Did you mean 'stairs'?"),
    ("scoring", None, "Known: block, prefix_batch, stairs."),
    *[bad for name in COUNTS for bad in below(name, 0, -4, low=1)],
    *[bad for name in COUNTS for bad in no_integer(name, 4.0)],
    *below("num_drafts", 0, -1, low=1),
    *no_integer("num_drafts", None),
    *below("confidence_threshold", -0.1, low=0),
    ("confidence_threshold", 1.1, "at most 1"),
    *no_number("confidence_threshold"),
    *[
        (name, bad, BOOLEAN)
        for name in ("retune_confidence", "scoring_consistent")
        for bad in (1, "yes", None)
    ],
    *[(name, 5, TEXT) for name in ("draft", "suffix_store")],
    *[("draft", bad, TEXT) for bad in (b"model", ["model"])],
    ("draft_quantization", "int-8", "Did you mean 'int8'?"),
    ("draft_quantization", 8, "Known: auto, gguf, int4, int8, none."),
]


@pytest.mark.parametrize(("name", "bad", "remedy"), BAD_SAMPLING)
def test_a_bad_sampling_value_is_refused_by_name_with_a_remedy(name, bad, remedy):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**{name: bad})
    message = str(error.value)
    assert message.startswith(f"{name} is {bad!r}")
    assert remedy in message


@pytest.mark.parametrize(("name", "bad", "remedy"), BAD_STRUCTURED)
def test_a_bad_form_of_outputs_is_refused_by_name_with_a_remedy(name, bad, remedy):
    for make in (StructuredOutputsParams, lambda **given: SamplingParams(structured_outputs=given)):
        with pytest.raises(ConfigError) as error:
            make(**{name: bad})
        message = str(error.value)
        assert message.startswith(f"{name} is {bad!r}")
        assert remedy in message


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "structured_outputs has nothing; give exactly one of json, regex, choice, grammar"),
        ({"json_object": False}, "structured_outputs has nothing"),
        ({"regex": "a", "json": {}}, "structured_outputs has json and regex"),
        ({"regexp": "a"}, "has no option 'regexp'. Did you mean 'regex'?"),
        ({"whitespace_pattern": " "}, "has no option 'whitespace_pattern'; leave it out"),
        ({5: 5}, "has no option '5'"),
    ],
)
def test_structured_outputs_have_one_form(given, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        SamplingParams(structured_outputs=given)


def test_a_mapping_says_what_structured_outputs_are():
    made = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    same = SamplingParams(structured_outputs=StructuredOutputsParams(choice=("a", "b")))
    assert made == same and made.structured_outputs.kind == "choice"


TAKING = ("draft_model", "prompt_lookup", "early_exit", "suffix")
"""Methods that have all options among them."""


@pytest.mark.parametrize(("name", "bad", "remedy"), BAD_SPECULATIVE)
def test_a_bad_speculative_value_is_refused_by_name_with_a_remedy(name, bad, remedy):
    method = next(each for each in TAKING if name in option_names(METHODS[each]))
    with pytest.raises(ConfigError) as error:
        config_of(**{"method": method, name: bad})
    message = str(error.value)
    assert message.startswith(f"{name} is {bad!r}")
    assert remedy in message


def test_every_field_is_validated():
    tested = {name for name, *_ in BAD_SAMPLING}
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == tested
    tested = {name for name, *_ in BAD_STRUCTURED}
    fields = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    assert fields == tested
    tested = {name for name, *_ in BAD_SPECULATIVE}
    fields = {name for config in METHODS.values() for name in option_names(config)}
    assert fields == tested


@pytest.mark.parametrize(
    ("options", "value", "remedy"),
    [
        ({"logit_bias": {3: NAN}}, "logit_bias.3 is nan", "-inf to ban"),
        ({"logit_bias": {3: INF}}, "logit_bias.3 is inf", "-inf to ban"),
        ({"logit_bias": {3: "1"}}, "logit_bias.3 is '1'", NUMBER),
        ({"logit_bias": {1: 0.0, 4: None}}, "logit_bias.4 is None", NUMBER),
        ({"logit_bias": {-1: 1.0}}, "a key of logit_bias is -1", "at least 0"),
        ({"logit_bias": {"5": 1.0}}, "a key of logit_bias is '5'", INTEGER),
        ({"stop": ""}, "stop.0 is ''", "at least 1 character"),
        ({"stop": ("end", "")}, "stop.1 is ''", "at least 1 character"),
        ({"stop": ["end", 5]}, "stop.1 is 5", TEXT),
        ({"stop": [b"end"]}, "stop.0 is b'end'", TEXT),
        ({"bad_words": ("a", "")}, "bad_words.1 is ''", "at least 1 character"),
        ({"stop": "a", "detokenize": False}, "stop is ('a',)", "use stop_token_ids"),
        ({"stop_token_ids": [2, -1]}, "stop_token_ids.1 is -1", "at least 0"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids.0 is 1.0", INTEGER),
    ],
)
def test_a_bad_value_inside_a_collection_is_named(options, value, remedy):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**options)
    assert value in str(error.value)
    assert remedy in str(error.value)


@pytest.mark.parametrize("method", DRAFTING_METHODS)
@pytest.mark.parametrize("draft", [None, ""])
def test_a_method_with_a_model_of_its_own_needs_one(method, draft):
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig(method=method, draft=draft)
    assert f"'{method}' needs draft=... (--draft)" in str(error.value)


def config_of(method, **options):
    """A configuration whose draft, if the method needs one, is not in question."""
    needed = {"draft": "some/model"} if method in DRAFTING_METHODS else {}
    return SpeculativeConfig(method=method, **needed | options)


OPTION_OF = {
    "draft": ("some/model", DRAFTING_METHODS),
    "draft_quantization": ("int8", DRAFTING_METHODS),
    "num_speculative_tokens": (4, METHODS.keys() - {"none"}),
    "draft_length_policy": ("heuristic", METHODS.keys() - {"none"}),
    "verification": ("block", METHODS.keys() - {"none"}),
    "scoring": ("prefix_batch", METHODS.keys() - {"none", "early_exit"}),
    "num_drafts": (2, ("draft_model", "prompt_lookup")),
    "prompt_lookup_max": (3, ("prompt_lookup",)),
    "early_exit_layers": (2, ("early_exit",)),
    "draft_vocab_size": (100, ("draft_model",)),
    "suffix_store": ("file", ("suffix",)),
}
"""Options that belong to some methods, and a value of each."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OPTION_OF)
def test_an_option_that_the_method_would_ignore_is_refused(name, method):
    value, methods = OPTION_OF[name]
    if method in methods:
        assert getattr(config_of(method, **{name: value}), name) == value
        return
    with pytest.raises(ConfigError) as error:
        config_of(method, **{name: value})
    message = str(error.value)
    assert message.startswith(f"{name} is {value!r} but method is {method!r}; use method ")
    remedy = message.partition("; ")[2]
    assert {each for each in METHODS if repr(each) in remedy} == set(methods)
    values = f"use {name} 'block'" if method == "early_exit" and name == "scoring" else ""
    assert message.endswith(f", or {values or f'leave {name} out'}.")


def test_the_published_name_of_the_prefix_batch_is_an_alias():
    assert config_of("prompt_lookup", scoring="stairs") == config_of(
        "prompt_lookup", scoring="prefix_batch"
    )


CONFIDENT = ("draft_model", "early_exit", "universal_vocabulary", "universal_text")


@pytest.mark.parametrize("method", METHODS)
def test_only_a_method_that_knows_its_confidence_stops_by_it(method):
    options = {"draft_length_policy": "confidence", "confidence_threshold": 0.5}
    if method in CONFIDENT:
        assert config_of(method, **options).confidence_threshold == 0.5
        return
    with pytest.raises(ConfigError) as error:
        config_of(method, **options)
    assert f"draft_length_policy is 'confidence' but method is {method!r}" in str(error.value)
    assert all(repr(each) in str(error.value) for each in CONFIDENT)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_without_an_option_reads_as_its_default(method):
    made = config_of(method)
    for field in dataclasses.fields(SpeculativeConfig):
        assert hasattr(made, field.name)
    assert type(made) is METHODS[method] and METHODS[method](**options_of(made)) == made


def options_of(config):
    return {name: getattr(config, name) for name in option_names(type(config))}


CONTRADICTIONS = [
    (
        {"method": "prompt_lookup", "num_drafts": 2, "verification": "block"},
        ["num_drafts is 2", "verification is 'block'", "verification 'coupled' or 'token'"],
    ),
    (
        {"method": "draft_model", "draft": "d", "num_drafts": 2, "scoring": "prefix_batch"},
        ["num_drafts is 2", "scoring is 'prefix_batch'", "scoring 'block', or leave num_drafts"],
    ),
    (
        {"method": "prompt_lookup", "scoring_consistent": True, "scoring": "stairs"},
        ["scoring_consistent is True", "scoring is 'prefix_batch'", "use scoring 'block'"],
    ),
    (
        {"method": "prompt_lookup", "scoring_consistent": True, "num_drafts": 2},
        ["scoring_consistent is True", "num_drafts is 2", "use num_drafts 1"],
    ),
    (
        {"method": "early_exit", "scoring_consistent": True},
        ["scoring_consistent is True", "'early_exit'", "leave scoring_consistent out"],
    ),
    ({"draft": "self:int3"}, ["draft is 'self:int3'", "'self:int4' or 'self:int8'", "'./self'"]),
    (
        {"draft": "self:int4", "draft_quantization": "int8"},
        ["draft_quantization is 'int8'", "draft is 'self:int4'", "leave draft_quantization out"],
    ),
    ({"num_speculative_tokens": 3}, ["num_speculative_tokens is 3", "method is 'none'"]),
    (
        {"method": "early_exit", "retune_confidence": True},
        ["draft_length_policy is 'adaptive'", "use draft_length_policy 'confidence'"],
    ),
    (
        {"method": "early_exit", "confidence_threshold": 0.4},
        ["confidence_threshold is 0.4", "draft_length_policy is 'adaptive'", "'confidence', or"],
    ),
    (
        {"method": "suffix", "draft_length_policy": "confidence"},
        ["draft_length_policy is 'confidence'", "or use draft_length_policy 'constant', 'heur"],
    ),
    (
        {
            "method": "universal_text",
            "draft": "d",
            "draft_length_policy": "confidence",
            "retune_confidence": True,
        },
        ["'universal_text'", "leave retune_confidence out"],
    ),
]


@pytest.mark.parametrize(("options", "parts"), CONTRADICTIONS)
def test_a_contradiction_is_refused_with_both_values_and_a_remedy(options, parts):
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig(**options)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(
    ("policy", "most"),
    [("constant", 4), ("heuristic", 20), ("confidence", 20), ("adaptive", 8), ("oracle", 20)],
)
def test_each_policy_has_its_own_most_tokens(policy, most):
    drafting = SpeculativeConfig(method="early_exit", draft_length_policy=policy)
    assert drafting.lookahead == most
    assert dataclasses.replace(drafting, draft_length_policy="constant").lookahead == 4
    assert SpeculativeConfig().lookahead == 0
    assert dataclasses.replace(drafting, num_speculative_tokens=7).lookahead == 7


def test_consistent_scoring_is_compared_with_plain_decoding_of_the_same_width():
    lookup = SpeculativeConfig(method="prompt_lookup", num_speculative_tokens=7)
    assert lookup.plain == SpeculativeConfig()
    plain = dataclasses.replace(lookup, scoring_consistent=True).plain
    assert plain == SpeculativeConfig(num_speculative_tokens=7, scoring_consistent=True)
    assert (plain.lookahead, plain.plain) == (7, plain)
    assert SpeculativeConfig(scoring_consistent=True).lookahead == 4


@pytest.mark.parametrize(
    ("config", "key", "hint"),
    [
        (SamplingParams, "temprature", "Did you mean 'temperature'?"),
        (SamplingParams, "top-p", "Did you mean 'top_p'?"),
        (SamplingParams, "max_token", "Did you mean 'max_tokens'?"),
        (SamplingParams, "stop_ids", "Did you mean 'stop_token_ids'?"),
        (SpeculativeConfig, "num_speculative_token", "Did you mean 'num_speculative_tokens'?"),
        (SpeculativeConfig, "verificaton", "Did you mean 'verification'?"),
        (SpeculativeConfig, "zzz", "; help(SpeculativeConfig) says"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(config, key, hint):
    with pytest.raises(ConfigError) as error:
        config(**{key: 1})
    begin = f"{config.__name__} has no option {key!r}"
    assert str(error.value).startswith(begin + ("" if hint[0] == ";" else ". ") + hint)


def test_an_unknown_key_is_refused_beside_good_ones():
    with pytest.raises(ConfigError, match="no option 'topk'"):
        SamplingParams(temperature=1.0, topk=5)


@pytest.mark.parametrize("config", [SamplingParams, SpeculativeConfig])
def test_options_are_given_by_name_only(config):
    with pytest.raises(TypeError):
        config(1)


@pytest.mark.parametrize("config", [SamplingParams, SpeculativeConfig])
def test_no_field_can_be_changed_or_added(config):
    made = config()
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(made, field.name, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(made, field.name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.another = 1
    assert made == config()


@pytest.mark.parametrize(
    ("config", "change", "bad"),
    [
        (SamplingParams, {"top_k": 5}, {"top_k": -2}),
        (SpeculativeConfig, {"scoring_consistent": True}, {"num_speculative_tokens": 0}),
    ],
)
def test_a_changed_copy_is_validated_again(config, change, bad):
    changed = dataclasses.replace(config(), **change)
    assert changed == config(**change)
    with pytest.raises(ConfigError):
        dataclasses.replace(changed, **bad)


def test_copies_and_pickles_are_equal():
    for made in (
        SamplingParams(temperature=0.5, stop=["a"], logit_bias={1: -INF}, seed=2**64 - 1),
        SpeculativeConfig(method="draft_model", draft="some/model"),
    ):
        assert copy.deepcopy(made) == made
        assert pickle.loads(pickle.dumps(made)) == made


def test_the_ends_of_every_range_are_accepted():
    SamplingParams(
        max_tokens=1,
        min_tokens=1,
        temperature=0,
        top_k=0,
        top_p=1,
        min_p=1,
        repetition_penalty=1e-3,
        presence_penalty=-2,
        frequency_penalty=2,
        logit_bias={0: -INF, 5: 2},
        seed=0,
        stop_token_ids=[0],
    )
    SamplingParams(top_p=1e-9, min_p=0, seed=2**64 - 1)
    lookup = functools.partial(SpeculativeConfig, method="prompt_lookup")
    lookup(num_speculative_tokens=1, prompt_lookup_max=1, num_drafts=1)
    for threshold in (0, 1):
        config_of("early_exit", draft_length_policy="confidence", confidence_threshold=threshold)
    for method in METHODS:
        config_of(method)
    for policy in DRAFT_LENGTH_POLICIES:
        config_of("early_exit", draft_length_policy=policy)
    for verification in VERIFICATIONS:
        lookup(verification=verification)
    for scoring in SCORINGS:
        lookup(scoring=scoring)


def test_the_defaults_decode_greedily_and_change_nothing():
    made = SamplingParams()
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == (0.0, 0, 1.0, 0.0)
    assert (made.repetition_penalty, made.presence_penalty, made.frequency_penalty) == (1, 0, 0)
    assert (made.logit_bias, made.seed, made.stop, made.stop_token_ids) == ({}, None, (), ())
    assert (made.min_tokens, made.bad_words, made.structured_outputs) == (0, (), None)
    assert SpeculativeConfig().method == "none"


def test_stops_may_be_given_as_one_string_or_any_sequence_and_become_tuples():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(bad_words="end").bad_words == ("end",)
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)


def test_a_schema_is_kept_as_text_in_the_order_of_its_keys():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    made = StructuredOutputsParams(json=schema)
    assert made.json == '{"type": "object", "properties": {"b": {}, "a": {}}}'
    assert StructuredOutputsParams(json=made.json) == made


def test_numbers_of_numpy_are_numbers():
    made = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        stop_token_ids=np.array([3, 4]),
        logit_bias={np.int32(3): np.float64(-INF)},
    )
    assert (made.max_tokens, made.temperature, made.stop_token_ids) == (3, 0.5, (3, 4))
    assert made.logit_bias == {3: -INF}
    assert SamplingParams(logit_bias=types.MappingProxyType({1: 2})).logit_bias == {1: 2.0}


def test_two_defaults_do_not_share_their_collections():
    assert SamplingParams().logit_bias is not SamplingParams().logit_bias


def test_config_errors_are_typed_and_are_value_errors():
    assert issubclass(ConfigError, SpecJaxError)
    assert issubclass(ConfigError, ValueError)
