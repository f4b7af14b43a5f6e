"""Arguments that users of vLLM know and that this library does not have; what to do instead."""

import functools
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, get_args

from spec_jax.config.fields import option_names
from spec_jax.config.sampling import SamplingParams
from spec_jax.config.speculative import METHODS
from spec_jax.errors import unknown_option

F = TypeVar("F", bound=Callable[..., Any])

_OFFLOAD = "use offload='host', with resident_layers for what stays on the devices"
_LAYOUT = "use a layout, whose axes shard rows, heads and experts"
_TOKENIZER = "leave it out: the tokenizer comes with the model"
_CONFIG = "put it into speculative_config"
_MODEL_CONFIG = "write it into the model's config.json"
_ADAPTERS = "adapters are not supported: merge them into the checkpoint"

IGNORED_BY_LLM: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"),
            *("max_num_batched_tokens", "swap_space"),
        ),
        "max_num_seqs and max_model_len say how much memory is used",
    ),
    **dict.fromkeys(
        ("enforce_eager", "compilation_config", "max_seq_len_to_capture", "cuda_graph_sizes"),
        "everything is compiled",
    ),
    **dict.fromkeys(("disable_log_stats", "disable_log_requests"), "nothing is logged"),
    "trust_remote_code": "no code of a checkpoint is ever run",
    "low_cpu_mem_usage": "one tensor is read at a time",
    "use_safetensors": "the files tell the format",
    "block_size": "caches have no blocks",
    "enable_prefix_caching": "common beginnings are always computed once",
    "enable_chunked_prefill": "prompts are always read in chunks",
    "max_num_partial_prefills": "prompts are always read in chunks",
    "disable_custom_all_reduce": "XLA adds",
    "disable_cascade_attention": "there is none",
    **dict.fromkeys(("disable_chunked_mm_input", "limit_mm_per_prompt"), "prompts hold no images"),
    "async_scheduling": "there is one scheduler",
    "distributed_executor_backend": "the scripts in launch/ start processes",
    "served_model_name": "nothing is served",
}
"""Arguments that change no output here, and why they are not needed."""

IGNORED_VALUES: Mapping[str, tuple[tuple, str]] = {
    "load_format": (
        ("auto", "hf", "safetensors", "gguf", "fastsafetensors", "runai_streamer"),
        "the files tell the format",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_size", "data_parallel_size"), ((1,), "a layout has the devices")
    ),
    **dict.fromkeys(("enable_lora", "enable_expert_parallel", "enable_sleep_mode"), ((False,), "")),
    **dict.fromkeys(("task", "runner"), (("auto", "generate"), "models complete texts")),
    "tokenizer_mode": (("auto",), "the tokenizer comes with the model"),
    "model_impl": (("auto",), "there is one way"),
}
"""Arguments of which some values change no output, and why these are not needed."""

_DRAFTS = {
    "assistant_model": "{'model': ...}",
    "assistant_tokenizer": "{'method': 'universal_text', 'model': ...}",
    "assistant_early_exit": "{'method': 'early_exit', 'early_exit_layers': ...}",
    "num_assistant_tokens": "{'num_speculative_tokens': ...}",
    "num_assistant_tokens_schedule": "{'draft_length_policy': 'heuristic'}",
    "assistant_confidence_threshold": (
        "{'draft_length_policy': 'confidence', 'confidence_threshold': ...}"
    ),
    "prompt_lookup_num_tokens": "{'method': 'prompt_lookup', 'num_speculative_tokens': ...}",
    "max_matching_ngram_size": "{'method': 'prompt_lookup', 'prompt_lookup_max': ...}",
}
"""Settings of transformers' assisted generation as a `speculative_config`."""
_OF_TRANSFORMERS = {
    **dict.fromkeys(
        ("target_lookbehind", "assistant_lookbehind"),
        "leave it out: universal_text finds where two tokenizers part",
    ),
    **dict.fromkeys(
        ("num_beams", "num_beam_groups", "length_penalty", "early_stopping"),
        "leave it out: beams are not searched",
    ),
    "penalty_alpha": "leave it out: there is no contrastive search",
}
NOT_OF_LLM: Mapping[str, str] = {
    **{name: _CONFIG for config in METHODS.values() for name in option_names(config)},
    **{name: f"use speculative_config={config}" for name, config in _DRAFTS.items()},
    **_OF_TRANSFORMERS,
    **dict.fromkeys(
        (
            *("max_new_tokens", "do_sample", "num_return_sequences", "temperature", "top_p"),
            *("max_tokens", "top_k"),
        ),
        "give it to SamplingParams, and these to generate",
    ),
    "target": "it is called model",
    "draft": "use speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "speculative_model": "use speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "cpu_offload_gb": _OFFLOAD,
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": f"{_TOKENIZER}; give token ids, and detokenize=False for ids alone",
    "revision": "write it behind the model's name: 'org/name@revision'",
    "hf_token": "set the environment variable HF_TOKEN",
    "download_dir": "set the environment variable HF_HOME",
    "pipeline_parallel_size": _LAYOUT,
    "data_parallel_size": _LAYOUT,
    "enable_expert_parallel": _LAYOUT,
    "max_logprobs": "leave it out: 20 is the most",
    "torch_dtype": "it is called dtype",
    "device_map": _LAYOUT,
    "device": "set the environment variable JAX_PLATFORMS",
    "load_in_8bit": "use quantization='int8'",
    "load_in_4bit": "use quantization='int4'",
    "quantization_config": "use quantization='int8' or 'int4'",
    "attn_implementation": "leave it out: the platform decides",
    **dict.fromkeys(("enable_lora", "max_loras", "max_lora_rank", "lora_modules"), _ADAPTERS),
    **dict.fromkeys(("hf_overrides", "rope_scaling", "rope_theta"), _MODEL_CONFIG),
    "load_format": "give a model with weights: they are read as the files hold them",
    "config_format": "leave it out: the files tell the format",
    "chat_template": "write it into the model's tokenizer_config.json",
    "enable_prompt_embeds": "give texts or token ids",
    "enable_sleep_mode": "leave it out: memory is free after: del llm",
    "guided_decoding_backend": "leave it out, and use SamplingParams(structured_outputs=...)",
    "structured_outputs_config": "leave it out, and use SamplingParams(structured_outputs=...)",
    "logprobs_mode": "leave it out: logprobs are of the target's logits as they are",
    "model_impl": "leave it out: there is one",
    "kv_transfer_config": "leave it out: caches stay in their process",
    "mm_processor_kwargs": "leave it out: prompts hold no images",
    "override_generation_config": "write generation_config='none', and give SamplingParams",
    "task": "leave it out: models complete texts, and speech models transcribe",
    "runner": "leave it out: models complete texts, and speech models transcribe",
    "enable_trace_replay": "leave it out: requests are not recorded",
    "logits_processors": "use SamplingParams(logit_bias=..., allowed_token_ids=..., ...)",
}

_PARAMS = "put it into SamplingParams"
NOT_OF_CALLS: Mapping[str, str] = {
    **dict.fromkeys(option_names(SamplingParams), _PARAMS),
    "prompt": "it is called prompts",
    "prompt_token_ids": "give the ids as prompts",
    "params": "it is called sampling_params",
    "conversation": "it is called messages",
    "lora_request": _ADAPTERS,
    **dict.fromkeys(("inputs", "input_ids"), "give the texts, or the ids of each, as prompts"),
    **{name: f"write LLM(model, speculative_config={config})" for name, config in _DRAFTS.items()},
    **_OF_TRANSFORMERS,
    "num_return_sequences": "write sampling_params=SamplingParams(n=...)",
    **dict.fromkeys(
        ("max_new_tokens", "max_length"), "write sampling_params=SamplingParams(max_tokens=...)"
    ),
    "do_sample": "write sampling_params=SamplingParams(temperature=...): 0 is greedy",
    "generation_config": "write sampling_params=SamplingParams(...)",
    "stopping_criteria": "write sampling_params=SamplingParams(stop=...)",
    "logits_processor": "write sampling_params=SamplingParams(logit_bias=...)",
    "streamer": "write LLM.stream(prompts), which yields what is new",
    **dict.fromkeys(
        ("attention_mask", "pad_token_id", "use_cache", "return_dict_in_generate", "tokenizer"),
        "leave it out",
    ),
    "priority": "leave it out: requests are decoded in their order",
    "chat_template": "leave it out: the template comes with the model",
    "chat_template_content_format": "leave it out: contents are texts",
}
"""Of `LLM.generate`, `stream` and `chat`."""


def ignored_by_llm(arguments: Mapping[str, Any]) -> Mapping[str, str]:
    """The arguments of an `LLM` that change nothing, and why."""
    ignored, model = dict(IGNORED_BY_LLM), arguments.get("model")
    for name, (values, why) in IGNORED_VALUES.items():
        if arguments.get(name) in values:
            ignored[name] = why or "this is the default"
    if isinstance(model, str | os.PathLike) and os.path.exists(model):
        revisions = ("revision", "tokenizer_revision", "code_revision")
        ignored |= dict.fromkeys(revisions, "the model is on this machine")
    return ignored


def explaining_unknown(
    unsupported: Mapping[str, str],
    ignored: Callable[[Mapping[str, Any]], Mapping[str, str]] = lambda _: MappingProxyType({}),
) -> Callable[[F], F]:
    """Makes a method raise a `ConfigError` for an argument that it does not have.

    Args:
      unsupported: for some names, what to do instead; for others the nearest name is suggested.
        None asks for nothing, so that it is taken.
      ignored: gives, for the method's arguments by name, the names that are taken with one note,
        and why they change nothing.
    """

    def decorate(method: F) -> F:
        parameters = _parameters(method)

        @functools.wraps(method)
        def checked(self: Any, *args: Any, **arguments: Any) -> Any:
            owner = type(self).__name__
            if method.__name__ != "__init__":
                owner += f".{method.__name__}"
            reasons = ignored({**dict(zip(parameters, args, strict=False)), **arguments})
            taken = {name: value for name, value in arguments.items() if name not in reasons}
            for name in [each for each in taken if each not in parameters]:
                if name not in unsupported or taken.pop(name) is not None:
                    raise unknown_option(owner, name, parameters, unsupported)
            if unused := [f"{name} ({reasons[name]})" for name in arguments if name in reasons]:
                note = f"{owner} ignores {', '.join(unused)}: this changes no output"
                warnings.warn(note, stacklevel=2)
            return method(self, *args, **taken)

        return checked  # type: ignore[return-value]

    return decorate


def explaining_attributes(unsupported: Mapping[str, str]) -> Callable[[Any, str], Any]:
    """A `__getattr__` that says what to write instead of some attributes."""

    def missing(self: Any, name: str) -> Any:
        hint = f"; {unsupported[name]}" if name in unsupported else ""
        message = f"{type(self).__name__!r} object has no attribute {name!r}{hint}"
        raise AttributeError(message, name=name, obj=self)

    return missing


class MissingAttribute:
    """An attribute that a class of another library has, and this one has not.

    Args:
      name: of the attribute.
      remedy: what to write instead.
    """

    def __init__(self, name: str, remedy: str):
        self._name, self._remedy = name, remedy

    def __get__(self, instance: Any, owner: type) -> Any:
        message = f"{owner.__name__} has no attribute {self._name!r}; {self._remedy}."
        raise AttributeError(message, name=self._name, obj=owner)


def _parameters(method: Callable) -> list[str]:
    """The names of a method's arguments, the ones of an unpacked `TypedDict` included."""
    names: list[str] = []
    for each in list(inspect.signature(method).parameters.values())[1:]:
        several = each.kind is inspect.Parameter.VAR_KEYWORD
        names += get_args(each.annotation)[0].__annotations__ if several else [each.name]
    return names
