"""Tiny checkpoints, written as Hugging Face directories and as GGUF files."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("Ã", "©")]
TOKENS = [*SPECIALS, *ALPHABET, *(left + right for left, right in MERGES)]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

CONFIG = {
    "model_type": "llama",
    "vocab_size": len(TOKENS) + 3,  # padding rows, as real embeddings have
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-17,  # GGUF keeps float32
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "eos_token_id": 0,
}


def byte_tokenizer(tokens: list[str] = TOKENS) -> Tokenizer:
    """Byte-level BPE with a handful of merges."""
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return backend


def write_tokenizer(path: Path, tokens: list[str] = TOKENS, template: str | None = TEMPLATE):
    """tokenizer.json and tokenizer_config.json."""
    byte_tokenizer(tokens).save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    if template:
        config["chat_template"] = template
    write_json(path / "tokenizer_config.json", config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def llama_tensors(config: Mapping, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random tensors under Hugging Face's names."""
    random = np.random.default_rng(0)
    embed, mlp = config["hidden_size"], config["intermediate_size"]
    width = config["num_attention_heads"] * config["head_dim"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]
    shapes = {"model.embed_tokens": (config["vocab_size"], embed), "model.norm": (embed,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = (config["vocab_size"], embed)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": (embed,),
            "self_attn.q_proj": (width, embed),
            "self_attn.k_proj": (kv_width, embed),
            "self_attn.v_proj": (kv_width, embed),
            "self_attn.o_proj": (embed, width),
            "post_attention_layernorm": (embed,),
            "mlp.gate_proj": (mlp, embed),
            "mlp.up_proj": (mlp, embed),
            "mlp.down_proj": (embed, mlp),
        }
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {
        f"{name}.weight": random.normal(0, 0.3, shape).astype(dtype)
        for name, shape in shapes.items()
    }


def write_pair(path: Path) -> Path:
    """A folder with `target` and `draft`, which has other weights and the same tokenizer."""
    tensors = llama_tensors(CONFIG)
    noise = np.random.default_rng(1)
    wrong = {n: t + noise.normal(0, 0.1, t.shape).astype(t.dtype) for n, t in tensors.items()}
    write_directory(path / "target", CONFIG, tensors)
    write_directory(path / "draft", CONFIG, wrong)
    return path


def write_directory(
    path: Path, config: Mapping = CONFIG, tensors: Mapping | None = None, *, shards: int = 1
) -> Path:
    """A Hugging Face directory, by default of a random Llama."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = llama_tensors(config) if tensors is None else tensors
    write_json(path / "config.json", config)
    write_tokenizer(path)
    if shards == 1:
        save_file(dict(tensors), path / "model.safetensors")
        return path
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(tensors)
    }
    for shard in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in tensors if weight_map[name] == shard}, path / shard
        )
    write_json(path / "model.safetensors.index.json", {"weight_map": weight_map})
    return path


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


GGUF_NAMES_OF_GEMMA = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def gguf_name(name: str, architecture: str) -> str:
    """llama.cpp's name of a tensor."""
    names = GGUF_NAMES_OF_GEMMA if architecture in ("gemma2", "gemma3") else GGUF_NAMES
    module, leaf = name.rsplit(".", 1)
    if module.startswith("model.layers."):
        layer, module = module.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{names[module]}.{leaf}"
    return f"{names[module]}.{leaf}"


def interleave(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The order in which llama.cpp keeps rotated features: 0, n/2, 1, n/2 + 1 ..."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def add_tokenizer(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The same tokenizer as `write_tokenizer`, with names for the padding rows."""
    padding = [f"[PAD{i}]" for i in range(len(TOKENS), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*TOKENS, *padding])
    kinds = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS)) + [5] * len(padding)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in MERGES])
    writer.add_eos_token_id(TOKENS.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE)


def write_gguf(
    path: Path,
    config: Mapping = CONFIG,
    tensors: Mapping | None = None,
    *,
    quantization: gguf.GGMLQuantizationType | None = None,
    extra: Mapping[str, object] | None = None,
    architecture: str = "llama",
) -> Path:
    """The same model as `write_directory`, as a GGUF file."""
    tensors = llama_tensors(config) if tensors is None else tensors
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    add_tokenizer(writer, config["vocab_size"])
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        if "q_proj" in name and architecture == "llama":
            tensor = interleave(tensor, config["num_attention_heads"])
        if "k_proj" in name and architecture == "llama":
            tensor = interleave(tensor, config["num_key_value_heads"])
        if "norm" in name and architecture.startswith("gemma"):
            tensor = tensor + 1
        stored = name if name == "rope_freqs.weight" else gguf_name(name, architecture)
        if quantization is not None and tensor.ndim == 2:
            writer.add_tensor(
                stored, gguf.quants.quantize(tensor, quantization), raw_dtype=quantization
            )
        else:
            writer.add_tensor(stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
