"""Hugging Face's torch model of a GGUF file: the reference of tests and benchmarks."""

from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_llama(path: Path, dtype: torch.dtype = torch.float32) -> transformers.LlamaForCausalLM:
    """What `from_pretrained(gguf_file=...)` does, without the `accelerate` package it asks for."""
    config = transformers.LlamaConfig(**load_gguf_checkpoint(path)["config"])
    model = transformers.LlamaForCausalLM(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    lacking = model.load_state_dict(read["tensors"], strict=False)
    assert lacking.missing_keys == ["lm_head.weight"] and not lacking.unexpected_keys
    model.tie_weights()
    return model.to(dtype).eval()
