"""GGUF files of Hugging Face directories, as llama.cpp's converter makes them.

Names are from the `gguf` package's own tables. What the converter does to tensors beside that
is written down here once more: https://github.com/ggml-org/llama.cpp/tree/master/conversion.
"""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file

from tests.checkpoints.tiny import add_tokenizer, interleave

ARCHITECTURES = {
    "bloom": "bloom",
    "falcon": "falcon",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt2": "gpt2",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "granite": "granite",
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "olmo2": "olmo2",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""Hugging Face's `model_type` -> `general.architecture`."""

_PAIRED = ("llama", "mistral", "mixtral", "granite", "smollm3")
"""Those whose rotated features llama.cpp keeps side by side."""


def convert(
    directory: Path, path: Path, quantization: gguf.GGMLQuantizationType | None = None
) -> Path:
    """Writes a directory's model as a GGUF file; matrices may be quantized, but for routers."""
    config = json.loads((directory / "config.json").read_text())
    tensors = load_file(directory / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    layers = _first(config, "num_hidden_layers", "n_layer")
    writer = gguf.GGUFWriter(path, architecture)
    _add_metadata(writer, config, layers)
    add_tokenizer(writer, config["vocab_size"])
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(kinds[architecture], layers)
    for name, tensor in _rearranged(config, tensors).items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if quantization is not None and tensor.ndim > 1 and "ffn_gate_inp" not in stored:
            blocks = gguf.quants.quantize(tensor, quantization)
            writer.add_tensor(stored, blocks, raw_dtype=quantization)
        else:
            writer.add_tensor(stored, np.ascontiguousarray(tensor, np.float32))
    for name, factors in _extra(config).items():
        writer.add_tensor(f"{name}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _first(config: Mapping[str, Any], *names: str) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _add_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any], layers: int) -> None:
    kind = config["model_type"]
    embed = _first(config, "hidden_size", "n_embd")
    heads = _first(config, "num_attention_heads", "n_head")
    head_dim = config.get("head_dim") or embed // heads
    mlp = _first(config, "intermediate_size", "n_inner", "ffn_hidden_size") or 4 * embed
    context = _first(config, "max_position_embeddings", "n_positions", "seq_length")
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    fraction = _first(config, "partial_rotary_factor", "rotary_pct") or rope.get(
        "partial_rotary_factor", 1.0
    )
    kv_heads = _first(config, "num_key_value_heads", "num_kv_heads") or heads
    kv_heads = 1 if config.get("multi_query") and kind == "gpt_bigcode" else kv_heads
    added = {
        writer.add_block_count: layers,
        writer.add_context_length: context,
        writer.add_embedding_length: embed,
        writer.add_feed_forward_length: mlp,
        writer.add_head_count: heads,
        writer.add_head_count_kv: kv_heads,
        writer.add_key_length: config.get("head_dim"),
        writer.add_rope_freq_base: rope.get("rope_theta"),
        writer.add_layer_norm_rms_eps: config.get("rms_norm_eps"),
        writer.add_layer_norm_eps: _first(
            config, "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"
        ),
        writer.add_expert_count: _first(config, "num_local_experts", "num_experts"),
        writer.add_expert_used_count: config.get("num_experts_per_tok"),
        writer.add_expert_feed_forward_length: config.get("moe_intermediate_size"),
        writer.add_attention_scale: config.get("attention_multiplier"),
        writer.add_embedding_scale: config.get("embedding_multiplier"),
        writer.add_residual_scale: config.get("residual_multiplier"),
        writer.add_logit_scale: config.get("logits_scaling"),
        writer.add_attn_logit_softcapping: config.get("attn_logit_softcapping"),
        writer.add_final_logit_softcapping: config.get("final_logit_softcapping"),
    }
    for add, value in added.items():
        if value is not None:
            add(value)
    if kind in ("gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config["sliding_window"] or 0)
    if kind == "gemma3_text":
        every = config["layer_types"].index("full_attention") + 1
        writer.add_uint32("gemma3.attention.sliding_window_pattern", every)
    if kind in ("stablelm", "gpt_neox"):
        writer.add_parallel_residual(config["use_parallel_residual"])
    if kind in ("phi3", "stablelm", "gpt_neox", *_PAIRED):
        writer.add_rope_dimension_count(int(fraction * head_dim))
    if kind == "falcon":
        writer.add_tensor_data_layout("jploski")
    scaling, original = rope.get("rope_type"), rope.get("original_max_position_embeddings")
    if scaling == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(
            math.sqrt(1 + math.log(context / original) / math.log(original))
        )
    elif scaling in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(rope["factor"])
        if original:
            writer.add_rope_scaling_orig_ctx_len(original)


def _extra(config: Mapping[str, Any]) -> dict[str, list[float]]:
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") != "longrope":
        return {}
    return {
        "rope_factors_long": rope["long_factor"],
        "rope_factors_short": rope["short_factor"],
    }


def _rearranged(
    config: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The tensors under names that `gguf` knows, their rows in llama.cpp's order."""
    kind, heads = config["model_type"], _first(config, "num_attention_heads", "n_head")
    found, experts = {}, {}
    for name, tensor in tensors.items():
        if kind in _PAIRED and re.search(r"\.[qk]_proj\.", name):
            count = heads if ".q_proj." in name else config["num_key_value_heads"]
            tensor = interleave(tensor, count)
        if kind == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
            tensor = tensor.T
        if kind in ("bloom", "gpt_neox") and "query_key_value" in name:
            by_head = tensor.reshape(heads, 3, -1, *tensor.shape[1:])
            tensor = by_head.swapaxes(0, 1).reshape(tensor.shape)
        if kind == "falcon" and "query_key_value" in name:
            groups = tensor.reshape(
                config["num_kv_heads"], -1, config["hidden_size"] // heads, *tensor.shape[1:]
            )
            parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
            tensor = np.concatenate([part.reshape(-1, *tensor.shape[1:]) for part in parts])
        if kind.startswith("gemma") and "norm" in name:
            tensor = tensor + 1
        if kind == "bloom":
            name = name.removeprefix("transformer.")
        if expert := re.match(r"(.*)\.experts\.(\d+)\.(\w+)\.weight$", name):
            module, number, which = expert.groups()
            if kind == "mixtral":
                module = re.sub(r"model\.(layers\.\d+)\..*", r"\1.feed_forward", module)
            experts.setdefault(f"{module}.experts.{which}.weight", {})[int(number)] = tensor
        else:
            found[name] = tensor
    stacked = {name: np.stack([each[i] for i in sorted(each)]) for name, each in experts.items()}
    return found | stacked
