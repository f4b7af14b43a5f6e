"""Arguments that users of vLLM know and that this library does not have; what to do instead."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from spec_jax.config.fields import option_names
from spec_jax.config.sampling import SamplingParams
from spec_jax.config.speculative import METHODS
from spec_jax.errors import unknown_option

F = TypeVar("F", bound=Callable[..., Any])

_MEMORY = "leave it out: lower max_num_seqs or max_model_len where memory is full"
_OFFLOAD = "use offload='host', with resident_layers for what stays on the devices"
_LAYOUT = "use a layout, whose axes shard rows, heads and experts"
_TOKENIZER = "leave it out: the tokenizer comes with the model"
_LEAVE_OUT = "leave it out"
_CONFIG = "put it into speculative_config"

NOT_OF_LLM: Mapping[str, str] = {
    **{name: _CONFIG for config in METHODS.values() for name in option_names(config)},
    "target": "it is called model",
    "draft": "use speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "speculative_model": "use speculative_config={'model': ..., 'num_speculative_tokens': ...}",
    "gpu_memory_utilization": _MEMORY,
    "kv_cache_memory_bytes": _MEMORY,
    "num_gpu_blocks_override": _MEMORY,
    "max_num_batched_tokens": _MEMORY,
    "swap_space": _LEAVE_OUT,
    "cpu_offload_gb": _OFFLOAD,
    "enforce_eager": "leave it out: everything is compiled",
    "compilation_config": "leave it out: everything is compiled",
    "trust_remote_code": "leave it out: no code of a checkpoint is ever run",
    "tokenizer": _TOKENIZER,
    "tokenizer_mode": _TOKENIZER,
    "tokenizer_revision": _TOKENIZER,
    "skip_tokenizer_init": f"{_TOKENIZER}; give token ids, and detokenize=False for ids alone",
    "revision": "write it behind the model's name: 'org/name@revision'",
    "hf_token": "set the environment variable HF_TOKEN",
    "download_dir": "set the environment variable HF_HOME",
    "load_format": "leave it out: the files tell the format",
    "pipeline_parallel_size": _LAYOUT,
    "data_parallel_size": _LAYOUT,
    "enable_expert_parallel": _LAYOUT,
    "distributed_executor_backend": _LAYOUT,
    "max_logprobs": "leave it out: 20 is the most",
    "block_size": _LEAVE_OUT,
    "enable_prefix_caching": _LEAVE_OUT,
    "enable_chunked_prefill": "leave it out: prompts are always read in chunks",
    "disable_log_stats": "leave it out: nothing is logged, and each output has its metrics",
    "enable_lora": "adapters are not supported: merge them into the checkpoint",
    "hf_overrides": "leave it out: config.json says what the model is",
    "task": "leave it out: models complete texts, and speech models transcribe",
    "runner": "leave it out: models complete texts, and speech models transcribe",
    "limit_mm_per_prompt": "leave it out: only texts and speech are read",
    "logits_processors": "use SamplingParams(logit_bias=..., allowed_token_ids=..., ...)",
}

_PARAMS = "put it into SamplingParams"
NOT_OF_CALLS: Mapping[str, str] = {
    **dict.fromkeys(option_names(SamplingParams), _PARAMS),
    "prompt": "it is called prompts",
    "prompt_token_ids": "give the ids as prompts",
    "params": "it is called sampling_params",
    "conversation": "it is called messages",
    "lora_request": "adapters are not supported: merge them into the checkpoint",
    "priority": "leave it out: requests are decoded in their order",
    "tools": "there are no tools; write them into a message",
    "chat_template": "leave it out: the template comes with the model",
    "chat_template_kwargs": (
        "leave it out: templates are rendered with their defaults; "
        "or give llm.generate the text of one rendered otherwise"
    ),
    "chat_template_content_format": "leave it out: contents are texts",
}
"""Of `LLM.generate`, `stream` and `chat`."""


def explaining_unknown(unsupported: Mapping[str, str]) -> Callable[[F], F]:
    """Makes a method raise a `ConfigError` for an argument that it does not have.

    Args:
      unsupported: for some names, what to do instead; for others the nearest name is suggested.
    """

    def decorate(method: F) -> F:
        parameters = list(inspect.signature(method).parameters)[1:]

        @functools.wraps(method)
        def checked(self: Any, *args: Any, **arguments: Any) -> Any:
            for name in arguments:
                if name not in parameters:
                    owner = type(self).__name__
                    if method.__name__ != "__init__":
                        owner += f".{method.__name__}"
                    raise unknown_option(owner, name, parameters, unsupported)
            return method(self, *args, **arguments)

        return checked  # type: ignore[return-value]

    return decorate
