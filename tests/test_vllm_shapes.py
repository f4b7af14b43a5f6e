"""What users of vLLM write is understood: names, defaults, shapes of prompts."""

import copy
import dataclasses
import importlib
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import spec_jax
from spec_jax import (
    LLM,
    CheckpointError,
    ConfigError,
    Layout,
    RequestError,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutputsParams,
    checkpoints,
)
from spec_jax.config.other_names import (
    NOT_MODULES,
    NOT_OF_INSTANCES,
    NOT_OF_PACKAGE,
    NOT_OF_SPECULATION,
)
from spec_jax.config.speculative import all_options
from spec_jax.config.unsupported import (
    IGNORED_BY_LLM,
    IGNORED_VALUES,
    NOT_OF_CALLS,
    NOT_OF_LLM,
)
from tests.checkpoints.tiny import write_directory, write_json

PARAMS = SamplingParams(max_tokens=8)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_directory(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model=model)


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
            SpeculativeConfig(
                method="prompt_lookup", num_speculative_tokens=3, prompt_lookup_max=4
            ),
        ),
        (
            {"method": "ngram", "model": None, "prompt_lookup_min": 1},
            SpeculativeConfig(method="prompt_lookup"),
        ),
        ({"model": "[ngram]"}, SpeculativeConfig(method="prompt_lookup")),
        (
            {"model": "x", "num_speculative_tokens": 5, "quantization": "int8"},
            SpeculativeConfig(
                method="draft_model", draft="x", num_speculative_tokens=5, draft_quantization="int8"
            ),
        ),
        (
            {"method": "universal_vocabulary", "draft": "x"},
            SpeculativeConfig(method="universal_vocabulary", draft="x"),
        ),
        ({"method": "suffix"}, SpeculativeConfig(method="suffix")),
    ],
)
def test_names_of_a_speculative_config(options, meant):
    assert SpeculativeConfig.of(options) == meant


def test_the_shortest_match_changes_no_output():
    options = {"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 2}
    with pytest.warns(UserWarning, match=r"prompt_lookup_min is ignored .*changes no output"):
        config = SpeculativeConfig.of(options)
    assert config == SpeculativeConfig(method="prompt_lookup", prompt_lookup_max=5)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"method": "eagle3", "model": "x"}, "method is 'eagle3'"),
        ({"model": "x", "draft": "y"}, "model and draft mean the same"),
        ({"num_spec_tokens": 3}, "has no option 'num_spec_tokens'"),
    ],
)
def test_what_a_speculative_config_cannot_mean(options, said, monkeypatch):
    monkeypatch.setattr("spec_jax.checkpoints.open_checkpoint", None)  # nothing is read before
    with pytest.raises(ConfigError, match=said):
        LLM("nowhere", speculative_config=options)


def test_a_mapping_configures(model, llm):
    lookup = LLM(model, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    assert lookup.speculative_config.method == "prompt_lookup"
    found, plain = (each.generate("the inn in the", PARAMS)[0].token_ids for each in (lookup, llm))
    assert found == plain


def test_shapes_of_prompts(llm):
    ids = llm.tokenizer.encode("the inn")
    prompts = ["the inn", {"prompt": "the inn"}, {"prompt_token_ids": ids}, np.array(ids), ids]
    found = llm.generate(prompts, PARAMS)
    assert len({each.token_ids for each in found}) == 1
    assert [each.prompt for each in found] == ["the inn", "the inn", None, None, None]
    assert llm.generate(prompts[1], PARAMS)[0].token_ids == found[0].token_ids
    both = llm.generate({"prompt": "the inn", "prompt_token_ids": ids}, PARAMS)[0]
    assert (both.prompt, both.token_ids) == ("the inn", found[0].token_ids)


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        (None, "prompts are None"),
        (5, "prompts are 5"),
        ([None], "prompt 0 is None"),
        (["x", 5.5], "prompt 1 is 5.5"),
        ({"text": "x"}, "prompt 0 is a mapping with 'text'"),
        ({"prompt": "x", "multi_modal_data": {}}, "a mapping with 'multi_modal_data'"),
        ({"prompt": 5, "prompt_token_ids": [1]}, "prompt 0 has the text 5"),
        ({}, "without 'prompt', a text"),
        ({"prompt_token_ids": 5}, "prompt 0 is 5"),
        ({"prompt_token_ids": []}, "prompt 0 is empty"),
        ({"prompt_token_ids": "a"}, "'a' as 'prompt_token_ids'; give it as 'prompt'"),
    ],
)
def test_what_is_no_prompt(llm, prompts, said):
    with pytest.raises(RequestError, match=said):
        llm.generate(prompts, PARAMS)


@pytest.mark.parametrize("params", ["x", ["x"], {"max_tokens": 3}, [None]])
def test_what_are_no_sampling_params(llm, params):
    with pytest.raises(ConfigError, match="sampling_params has"):
        llm.generate(["a"], params)


def test_defaults_of_sampling_params():
    theirs = SamplingParams(
        top_k=-1, stop=None, stop_token_ids=None, bad_words=None, logit_bias=None, seed=None
    )
    assert theirs == SamplingParams()
    with pytest.raises(ConfigError, match="top_k is -2"):
        SamplingParams(top_k=-2)


def test_as_many_tokens_as_the_context_holds(llm):
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    found = llm.generate("the inn", params)[0]
    assert found.finish_reason == "length"
    assert found.usage.total_tokens == llm.max_model_len


def test_a_number_of_devices_is_a_layout(model, llm):
    two = LLM(model, tensor_parallel_size=2)
    assert two.layout == Layout.tensor_parallel(2)
    found = two.generate("the inn in the", PARAMS)[0].token_ids
    assert found == llm.generate("the inn in the", PARAMS)[0].token_ids
    for given in ({"tensor_parallel_size": 0}, {"tensor_parallel_size": 2, "layout": two.layout}):
        with pytest.raises(ConfigError, match="tensor_parallel_size is"):
            LLM(model, **given)


MESSAGES = [{"role": "user", "content": "the inn"}, {"role": "assistant", "content": "the"}]


def test_a_chat_streams(llm):
    chats = [MESSAGES[:1], MESSAGES]
    whole = llm.chat(chats, PARAMS)
    chunks = list(llm.chat(chats, PARAMS, stream=True))
    for i, output in enumerate(whole):
        mine = [chunk for chunk in chunks if chunk.index == i]
        assert "".join(chunk.text for chunk in mine) == output.text
        assert sum((chunk.token_ids for chunk in mine), ()) == output.token_ids
        last = mine[-1].output
        assert (last.prompt, last.prompt_token_ids) == (output.prompt, output.prompt_token_ids)
    with pytest.raises(ConfigError, match="leave stream out"):
        llm.chat(chats, PARAMS, stream=True, use_tqdm=True)


def test_the_last_message_is_continued(llm):
    asked = llm.encode_chat(MESSAGES[:1])
    said = llm.tokenizer.encode("the", add_special_tokens=False)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert llm.encode_chat(MESSAGES, **options) == [*asked, *said]
    (output,) = llm.chat(MESSAGES, PARAMS, **options)
    assert output.prompt_token_ids == (*asked, *said)
    closed = llm.encode_chat(MESSAGES[:1], add_generation_prompt=False)
    assert closed == asked[: len(closed)] and len(closed) < len(asked)
    with pytest.raises(ConfigError, match="both true"):
        llm.encode_chat(MESSAGES, continue_final_message=True)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("max_model_length", "LLM has no option 'max_model_length'. Did you mean 'max_model_len'?"),
        ("zzz", "LLM has no option 'zzz'; help(LLM) says what it has."),
        ("torch_dtype", "it is called dtype"),
        ("device_map", "use a layout"),
        ("load_in_4bit", "use quantization='int4'"),
        ("assistant_model", "use speculative_config={'model'"),
        ("target", "it is called model"),
        ("draft_quantization", "put it into speculative_config"),
    ],
)
def test_what_is_no_argument(name, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM("nowhere", **{name: 1})


def test_arguments_that_change_nothing_are_taken_with_one_note(model):
    arguments = {"gpu_memory_utilization": 0.9, "enforce_eager": True, "trust_remote_code": True}
    arguments |= {"swap_space": 4, "load_format": "auto", "enable_prefix_caching": True}
    with pytest.warns(UserWarning, match="LLM ignores gpu_memory_utilization") as notes:
        LLM(model, **arguments)
    (note,) = [str(each.message) for each in notes if "ignores" in str(each.message)]
    assert all(f"{name} (" in note for name in arguments)
    with pytest.raises(ConfigError, match="no option 'zzz'"):
        LLM(model, zzz=1, swap_space=4)


def test_a_revision_of_a_local_path_changes_nothing(model):
    with pytest.warns(UserWarning, match="revision .the model is on this machine"):
        LLM(model, revision="main")
    with pytest.raises(ConfigError, match="'org/name@revision'"):
        LLM("org/name", revision="main")


def test_none_asks_for_nothing(model):
    LLM(model, tokenizer=None, speculative_model=None, quantization_config=None)
    with pytest.raises(ConfigError, match="no option 'zzz'"):
        LLM(model, zzz=None)


def test_what_is_no_argument_of_a_call(llm):
    for call in (llm.generate, llm.stream):
        with pytest.raises(ConfigError, match="no option 'temperature'; put it into Sampling"):
            call("the", temperature=0.5)
    with pytest.raises(ConfigError, match=re.escape("LLM.chat has no option 'stram'. Did you")):
        llm.chat([], stram=True)


def test_a_text_is_no_conversation(llm):
    with pytest.raises(RequestError, match=re.escape("messages is the text 'hello'; a conver")):
        llm.chat("hello")


def test_what_an_llm_and_the_package_show(llm):
    assert repr(llm) == "LLM('tiny', dtype='float32', quantization='none', method='none')"
    code = "import spec_jax, sys; assert 'LLM' in dir(spec_jax) and 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_no_sampling_parameter():
    for name, said in (
        ("temprature", "Did you mean 'temperature'?"),
        ("guided_decoding", "use structured_outputs"),
        ("output_kind", "LLM.stream"),
        ("max_completion_tokens", "it is called max_tokens"),
        ("max_new_tokens", "it is called max_tokens"),
        ("length_penalty", "beams are not searched"),
        ("do_sample", "a temperature above 0 samples"),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            SamplingParams(**{name: 1})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("prompt_lookup_num_tokens", "with num_speculative_tokens for how many it drafts"),
        ("num_assistant_tokens", "it is called num_speculative_tokens"),
        ("assistant_confidence_threshold", "use confidence_threshold, with draft_length_policy="),
        ("draft_tensor_parallel_size", "the [draft] table of a layout shards the draft"),
        ("custom_class", "give LLM a drafter"),
        ("model", "it is called draft"),
    ],
)
def test_what_is_no_option_of_drafting(name, said):
    for method in ("prompt_lookup", "none"):
        with pytest.raises(ConfigError, match=re.escape(said)):
            SpeculativeConfig(method=method, **{name: 1})


def test_what_would_be_imported_is_said():
    for name, said in NOT_OF_PACKAGE.items():
        with pytest.raises(ImportError, match=re.escape(f"spec_jax has no {name}; {said}.")):
            exec(f"from spec_jax import {name}")
    with pytest.raises(ImportError, match="cannot import name 'Zzz'"):
        exec("from spec_jax import Zzz")
    assert not hasattr(spec_jax, "Zzz")
    assert not NOT_OF_PACKAGE.keys() & {*spec_jax.__all__}


def test_modules_of_vllm_are_not_here():
    for name in (
        "sampling_params",
        "utils.argparse_utils",
        "v1.metrics.reader",
        "engine.arg_utils",
    ):
        with pytest.raises(ModuleNotFoundError, match="as in: from spec_jax import SamplingParams"):
            importlib.import_module(f"spec_jax.{name}")
    for name in NOT_MODULES:
        assert not Path(spec_jax.__file__).parent.joinpath(*name.split(".")).exists(), name
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'spec_jax\.zzz'"):
        importlib.import_module("spec_jax.zzz")
    with pytest.raises(ImportError, match="memory is free after: del llm"):
        exec("from spec_jax.distributed import cleanup_dist_env_and_memory")
    with pytest.raises(ModuleNotFoundError, match=r"has no module config\.kv_transfer; all"):
        exec("from spec_jax.config.kv_transfer import KVTransferConfig")
    with pytest.raises(ImportError, match=r"has no KVTransferConfig; leave it out"):
        exec("from spec_jax.config import KVTransferConfig")
    with pytest.raises(ImportError, match=r"has no VllmConfig; write LLM\(model, max_model_len"):
        exec("from spec_jax.config import VllmConfig")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"load_format": "dummy"}, "has no option 'load_format'; give a model with weights"),
        ({"hf_overrides": {"rope_scaling": {}}}, "write it into the model's config.json"),
        ({"pipeline_parallel_size": 2}, "use a layout"),
        ({"enable_lora": True}, "merge them into the checkpoint"),
        ({"task": "embed"}, "models complete texts"),
    ],
)
def test_what_would_change_outputs_is_refused(model, arguments, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM(model, **arguments)


def test_values_that_change_nothing_are_taken(model):
    harmless = {
        "load_format": "safetensors",
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "mp",
        "enable_lora": False,
        "task": "generate",
        "tokenizer_mode": "auto",
    }
    with pytest.warns(UserWarning, match="LLM ignores .*: this changes no output") as notes:
        LLM(model, **harmless)
    assert len(notes) == 1
    assert all(name in str(notes[0].message) for name in harmless)
    for name in IGNORED_VALUES:
        assert name in NOT_OF_LLM, "other values are refused with what to write"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"assistant_model": 1}, "write LLM(model, speculative_config={'model': ...})"),
        ({"prompt_lookup_num_tokens": 3}, "'method': 'prompt_lookup'"),
        ({"max_new_tokens": 5}, "SamplingParams(max_tokens=...)"),
        ({"input_ids": [1]}, "as prompts"),
        ({"num_beams": 4}, "beams are not searched"),
        ({"num_return_sequences": 2}, "SamplingParams(n=...)"),
    ],
)
def test_calls_of_transformers_are_told_what_to_write(llm, arguments, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        llm.generate("a", **arguments)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("assistant_model", "{'model': ...}"),
        ("assistant_tokenizer", "{'method': 'universal_text', 'model': ...}"),
        ("assistant_early_exit", "{'method': 'early_exit', 'early_exit_layers': ...}"),
        ("num_assistant_tokens", "{'num_speculative_tokens': ...}"),
        ("num_assistant_tokens_schedule", "{'draft_length_policy': 'heuristic'}"),
        (
            "assistant_confidence_threshold",
            "{'draft_length_policy': 'confidence', 'confidence_threshold': ...}",
        ),
        (
            "prompt_lookup_num_tokens",
            "{'method': 'prompt_lookup', 'num_speculative_tokens': ...}",
        ),
    ],
)
def test_settings_of_assisted_generation_are_said_wherever_they_are_given(llm, name, config):
    said = re.escape(f"has no option '{name}'; ")
    with pytest.raises(ConfigError, match=f"{said}use speculative_config={re.escape(config)}"):
        LLM("nowhere", **{name: 3})
    written = re.escape(f"write LLM(model, speculative_config={config})")
    with pytest.raises(ConfigError, match=said + written):
        llm.generate("a", **{name: 3})
    with pytest.raises(ConfigError, match=f"{said}drafts are set by LLM"):
        SamplingParams(**{name: 3})


def test_what_is_written_instead_is_taken():
    for config in (
        {"method": "universal_text", "model": "x"},
        {"method": "early_exit", "early_exit_layers": 2},
        {"method": "prompt_lookup", "num_speculative_tokens": 3, "prompt_lookup_max": 2},
        {"model": "x", "draft_length_policy": "confidence", "confidence_threshold": 0.5},
        {"model": "x", "draft_length_policy": "heuristic"},
    ):
        assert SpeculativeConfig.of(config)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "mlp_speculator"},
        {"speculators_model_type": "eagle3"},
        {"model_type": "llama", "architectures": ["LlamaForCausalLMEagle3"]},
        {"model_type": "medusa"},
    ],
)
def test_a_head_is_no_draft(model, tmp_path, config):
    write_json(tmp_path / "config.json", config)
    said = "heads on a target are not supported; use draft_model, early_exit or prompt_lookup"
    with pytest.raises(CheckpointError, match=said):
        LLM(model, speculative_config={"model": str(tmp_path)})


def test_what_an_llm_lacks_is_said(llm):
    for name, said in NOT_OF_INSTANCES.items():
        assert not hasattr(LLM, name)
        with pytest.raises(AttributeError, match=re.escape(f"no attribute {name!r}; {said}")):
            getattr(llm, name)
    with pytest.raises(AttributeError, match=r"'LLM' object has no attribute 'zzz'$"):
        llm.zzz  # noqa: B018


def test_parameters_are_changed_by_a_copy():
    params = SamplingParams(temperature=0.5)
    said = r"write dataclasses.replace\(..., max_tokens=5\), which returns"
    with pytest.raises(dataclasses.FrozenInstanceError, match=said):
        params.max_tokens = 5
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_advice_is_about_names_that_are_not_taken():
    assert not IGNORED_BY_LLM.keys() & {*NOT_OF_LLM, *inspect.signature(LLM).parameters}
    assert not NOT_OF_SPECULATION.keys() & all_options().keys()
    assert NOT_OF_LLM.keys() >= {field.name for field in dataclasses.fields(SpeculativeConfig)}
    assert not NOT_OF_LLM.keys() & inspect.signature(LLM).parameters.keys()
    for call in (LLM.generate, LLM.stream, LLM.chat):
        assert not NOT_OF_CALLS.keys() & inspect.signature(call).parameters.keys()
    for config in (SamplingParams, StructuredOutputsParams):
        assert not config.UNSUPPORTED.keys() & {field.name for field in dataclasses.fields(config)}


def test_defaults_of_arguments(model, llm):
    theirs = LLM(
        model, quantization=None, max_num_seqs=None, seed=None, tensor_parallel_size=1, dtype="auto"
    )
    assert (theirs.layout, theirs.max_num_seqs) == (llm.layout, llm.max_num_seqs)
    assert (theirs.dtype, theirs.quantization) == (llm.dtype, llm.quantization)


class Bar:
    def __init__(self, **options):
        self.options, self.done, self.closed = options, 0, False

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def update(self):
        self.done += 1


def test_a_bar(llm, capsys):
    bars = []

    def make(**options):
        bars.append(Bar(**options))
        return bars[-1]

    params = SamplingParams(max_tokens=2, n=2)
    llm.generate(["a", "b"], params, use_tqdm=make)
    llm.chat([MESSAGES[:1]], PARAMS, use_tqdm=make)
    assert [(bar.options["total"], bar.done, bar.closed) for bar in bars] == [
        (4, 4, True),
        (1, 1, True),
    ]
    llm.generate("a", params)
    assert capsys.readouterr() == ("", "")
    llm.generate("a", params, use_tqdm=True)
    out, err = capsys.readouterr()
    assert out == "" and "2/2" in err


def test_the_last_tokens_of_a_prompt(llm):
    ids = llm.tokenizer.encode("the inn in the end")
    for count, kept in ((3, ids[-3:]), (1, ids[-1:]), (100, ids), (None, ids)):
        params = SamplingParams(truncate_prompt_tokens=count)
        for prompt in (ids, "the inn in the end"):
            assert llm.request(prompt, params).prompt_token_ids == kept
    long = ids * 50
    with pytest.raises(RequestError, match="leaves no room"):
        llm.request(long, SamplingParams())
    room = llm.max_model_len - 100
    params = SamplingParams(truncate_prompt_tokens=-1, max_tokens=100)
    assert llm.request(long, params).prompt_token_ids == long[-room:]
    everything = SamplingParams(truncate_prompt_tokens=-1, max_tokens=None)
    assert llm.request(long, everything).prompt_token_ids == long[-1:]


def test_ids_alone(llm):
    ids = llm.tokenizer.encode("the inn")
    params = SamplingParams(max_tokens=6, logprobs=1)
    bare = dataclasses.replace(params, detokenize=False)
    with_text, without = llm.generate([ids, ids], [params, bare])
    assert with_text.text and without.text == ""
    assert with_text.token_ids == without.token_ids
    (first, *_), (same, *_) = (each.outputs[0].logprobs for each in (with_text, without))
    assert {i: each.logprob for i, each in first.items()} == {
        i: each.logprob for i, each in same.items()
    }
    assert {each.decoded_token for each in same.values()} == {None}
    assert all(chunk.text == "" for chunk in llm.stream([ids], bare))


SETTINGS = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({"do_sample": True, **SETTINGS}, SamplingParams(**SETTINGS)),
        ({"do_sample": True, "top_p": 0.9}, SamplingParams(temperature=1.0, top_p=0.9)),
        ({"max_new_tokens": 7, "eos_token_id": 0}, SamplingParams(max_tokens=7)),
        ({"temperature": None, "num_beams": 4}, SamplingParams()),
        ({"eos_token_id": 0, "pad_token_id": 1}, SamplingParams()),
    ],
)
def test_what_a_model_asks_for(tmp_path, said, meant):
    model = write_directory(tmp_path / "tiny")
    write_json(model / "generation_config.json", said)
    loaded = checkpoints.load(model)
    assert checkpoints.default_sampling_params(loaded.name, loaded.sampling) == meant


def test_a_models_sampling_is_for_requests_without_parameters(tmp_path):
    model = write_directory(tmp_path / "tiny")
    write_json(model / "generation_config.json", {"max_new_tokens": 3, "do_sample": True})
    llm, ours = LLM(model), LLM(model, generation_config="none")
    assert llm.get_default_sampling_params() == SamplingParams(max_tokens=3, temperature=1.0)
    assert ours.get_default_sampling_params() == SamplingParams()
    greedy = SamplingParams(max_tokens=5, ignore_eos=True)
    assert len(llm.generate("the inn")[0].token_ids) <= 3
    assert len(llm.generate("the inn", greedy)[0].token_ids) == 5
    checkpoints.convert(model, tmp_path / "orbax")
    converted = checkpoints.load(tmp_path / "orbax")
    assert converted.sampling == {"max_new_tokens": 3, "do_sample": True}
    with pytest.raises(ConfigError, match="generation_config is 'vllm'; choose one of auto, none"):
        LLM(model, generation_config="vllm")


@pytest.mark.parametrize("bad", [{"temperature": "hot"}, {"top_p": 7}, {"max_new_tokens": [1]}])
def test_sampling_that_is_not_possible(tmp_path, bad):
    model = write_directory(tmp_path / "tiny")
    write_json(model / "generation_config.json", bad)
    with pytest.raises(CheckpointError, match="of tiny asks for sampling"):
        LLM(model)
    assert LLM(model, generation_config="none").name == "tiny"
