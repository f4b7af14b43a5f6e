"""Names that users of vLLM and transformers know; what to write here."""

from collections.abc import Mapping

HEADS = "heads on a target are not supported; use draft_model, early_exit or prompt_lookup"

NOT_OF_SPECULATION: Mapping[str, str] = {
    "model": "it is called draft",
    "quantization": "it is called draft_quantization",
    "assistant_model": "it is called draft",
    "num_assistant_tokens": "it is called num_speculative_tokens",
    "prompt_lookup_num_tokens": (
        "use method='prompt_lookup', with num_speculative_tokens for how many it drafts"
    ),
    "num_lookahead_slots": "it is called num_speculative_tokens",
    "num_assistant_tokens_schedule": "use draft_length_policy='heuristic' or 'constant'",
    "assistant_confidence_threshold": (
        "use confidence_threshold, with draft_length_policy='confidence'"
    ),
    "assistant_early_exit": "use method='early_exit' with early_exit_layers",
    "assistant_tokenizer": "use method='universal_text': a draft has its tokenizer with it",
    "max_matching_ngram_size": "it is called prompt_lookup_max",
    "ngram_prompt_lookup_max": "it is called prompt_lookup_max",
    "ngram_prompt_lookup_min": "leave it out: the longest match drafts",
    "prompt_lookup_min": "leave it out: the longest match drafts",
    "draft_tensor_parallel_size": "leave it out: the [draft] table of a layout shards the draft",
    "custom_class": "give LLM a drafter, or the name of a registered one as method",
    "max_model_len": "leave it out: it is the target's",
    "disable_by_batch_size": "leave it out: draft_length_policy='adaptive' drafts where it pays",
    "disable_padded_drafter_batch": "leave it out: shapes are static",
    "parallel_drafting": "leave it out: tokens are drafted one after another",
    "rejection_sample_method": "it is called verification",
    "acceptance_method": "it is called verification",
    "draft_sample_method": "leave it out: drafts are sampled as the target is",
    "posterior_threshold": "leave it out: verification never changes what the target would say",
    "posterior_alpha": "leave it out: verification never changes what the target would say",
    "speculative_token_tree": "use num_drafts for several drafts, which are verified as a tree",
    "suffix_decoding_max_tree_depth": "use method='suffix' with num_speculative_tokens",
}
"""Of `SpeculativeConfig`. A dict for an `LLM` may have vLLM's `model` and `quantization`."""

_ARGUMENTS = "write LLM(model, max_model_len=..., ...), which takes the arguments itself"
_THREADS = "use LLM: its stream yields tokens as they come, and all threads share its running batch"
_MODEL = (
    "write LLM(model, speculative_config={'model': draft, 'num_speculative_tokens': 5}), or "
    "{'method': 'prompt_lookup'} without a draft"
)
_STREAM = "write llm.stream(prompts, sampling_params), which yields what is new"
_POOLING = "models complete texts here, and pool no embeddings"
_METRICS = "each output has its own: output.metrics"
_MASKS = "write SamplingParams(logit_bias=..., allowed_token_ids=..., structured_outputs=...)"
_MEMORY = "leave it out: memory is free after: del llm"
_PROFILE = "run spec-jax profile, or write: with jax.profiler.trace(directory)"
_SPEECH = "write LLM(model).transcribe(audio), with a speculative_config for a draft"
_ENCODERS = "give the texts that the encoder reads as prompts"

NOT_OF_PACKAGE: Mapping[str, str] = {
    **dict.fromkeys(
        ("EngineArgs", "AsyncEngineArgs", "VllmConfig", "ModelConfig", "CompilationConfig"),
        _ARGUMENTS,
    ),
    "LLMEngine": _THREADS,
    "AsyncLLMEngine": "write AsyncLLM(LLM(model, ...))",
    **dict.fromkeys(
        ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel", "pipeline"), _MODEL
    ),
    **dict.fromkeys(("Counter", "Gauge", "Histogram", "Metric", "Vector"), _METRICS),
    **dict.fromkeys(
        (
            *("LogitsProcessor", "LogitsProcessorList", "AdapterLogitsProcessor"),
            *("RequestLogitsProcessor", "BatchUpdate", "MoveDirectionality"),
        ),
        _MASKS,
    ),
    **dict.fromkeys(
        (
            *("AutoModelForSpeechSeq2Seq", "WhisperForConditionalGeneration", "AutoProcessor"),
            "AudioAsset",
        ),
        _SPEECH,
    ),
    **dict.fromkeys(("ExplicitEncoderDecoderPrompt", "zip_enc_dec_prompts"), _ENCODERS),
    **dict.fromkeys(
        ("add_dataset_parser", "get_samples"), "give a list of texts or conversations as prompts"
    ),
    **dict.fromkeys(("TextStreamer", "TextIteratorStreamer", "RequestOutputKind"), _STREAM),
    **dict.fromkeys(("PoolingParams", "PoolingOutput", "EmbeddingRequestOutput"), _POOLING),
    "AutoTokenizer": "write LLM(model).get_tokenizer()",
    "AutoConfig": "write LLM(model): config.json says what the model is",
    "DynamicCache": "leave it out: an LLM has its caches",
    **dict.fromkeys(("ImageAsset", "VideoAsset"), "prompts hold no images"),
    "PromptType": "a prompt is a text, a list of ids, or {'prompt': text}",
    "KVTransferConfig": "leave it out: caches stay in their process",
    "WeightTransferConfig": "leave it out: an LLM reads its weights once",
    "ProfilerConfig": _PROFILE,
    "PoolerConfig": _POOLING,
    "ShardedStateLoader": "run spec-jax convert, of whose files each process reads its part",
    "current_platform": "write jax.devices()[0].platform",
    "StoppingCriteriaList": "write SamplingParams(stop=..., stop_token_ids=...)",
    "cleanup_dist_env_and_memory": _MEMORY,
    **dict.fromkeys(
        ("get_ip", "get_open_port"), "leave it out: the scripts in launch/ start processes"
    ),
    "init_logger": "write logging.getLogger(__name__)",
    "GenerationConfig": "write SamplingParams(max_tokens=..., temperature=..., ...)",
    "GuidedDecodingParams": "it is called StructuredOutputsParams",
    "BeamSearchParams": "beams are not searched: write SamplingParams(n=...)",
    "TextPrompt": "write {'prompt': text}",
    "TokensPrompt": "write {'prompt_token_ids': ids}",
    "FlexibleArgumentParser": "write argparse.ArgumentParser()",
    "LoRARequest": "adapters are not loaded: merge it into the model",
    "BitsAndBytesConfig": "write LLM(model, quantization='int8') or 'int4'",
    "set_seed": "write SamplingParams(seed=...), or LLM(model, seed=...)",
}
"""Names that one would import."""


def no_attribute(module: str, name: str) -> ImportError | AttributeError:
    """The error of a module without an attribute; of another system's name, what to write here."""
    if name in NOT_OF_PACKAGE:
        return ImportError(f"spec_jax has no {name}; {NOT_OF_PACKAGE[name]}.")
    return AttributeError(f"module {module!r} has no attribute {name!r}")


NOT_MODULES = frozenset(
    {
        *("assets", "benchmarks", "entrypoints", "envs", "generation", "inputs", "logger", "lora"),
        *("models.auto", "multimodal", "platforms", "pooling_params", "sampling_params"),
        *("model_executor", "tokenizers", "transformers_utils", "usage", "utils", "v1"),
        *("engine.arg_utils", "engine.async_llm_engine", "engine.llm_engine"),
        *("config.kv_transfer", "config.model", "config.parallel", "config.compilation"),
        *("distributed.device_communicators", "distributed.kv_transfer", "distributed.utils"),
        *("distributed.parallel_state", "distributed.weight_transfer", "forward_context"),
        *("profiler", "renderers", "version", "worker", "reasoning", "compilation", "attention"),
    }
)
"""Modules of vLLM and transformers; here all public names are in `spec_jax` itself."""

NOT_OF_INSTANCES: Mapping[str, str] = {
    "llm_engine": "LLM is the engine",
    **dict.fromkeys(("get_metrics", "get_stats"), _METRICS),
    **dict.fromkeys(("encode", "embed", "classify", "score", "reward"), _POOLING),
    **dict.fromkeys(("sleep", "wake_up"), "models and caches stay in memory until: del llm"),
    **dict.fromkeys(("add_request", "step", "has_unfinished_requests", "abort_request"), _THREADS),
    **dict.fromkeys(("shutdown", "close"), _MEMORY),
    **dict.fromkeys(("to", "cuda", "eval", "half"), "leave it out: a layout places the model"),
    **dict.fromkeys(
        ("collective_rpc", "apply_model"),
        "write spec_jax.checkpoints.load(path).model for a model of your own",
    ),
    **dict.fromkeys(("start_profile", "stop_profile"), _PROFILE),
    **dict.fromkeys(
        ("reset_prefix_cache", "reset_mm_cache"),
        "a cached prefix changes no output, so leave it out",
    ),
    "beam_search": "beams are not searched: write generate(prompts, SamplingParams(n=...))",
    "set_tokenizer": "the tokenizer comes with the model",
    "generation_config": "write SamplingParams(...); drafting is set by speculative_config",
}
"""Attributes that an `LLM` does not have."""
