"""Hugging Face's torch model of a GGUF file: the reference of tests and benchmarks."""

from pathlib import Path

import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def load_llama(path: Path, dtype: torch.dtype = torch.float32) -> transformers.LlamaForCausalLM:
    """A file of architecture `llama`, with a tied head."""
    return _load(path, transformers.LlamaForCausalLM, dtype)


def load_gemma(path: Path, dtype: torch.dtype = torch.float32) -> transformers.Gemma3ForCausalLM:
    """A file of architecture `gemma3`."""
    return _load(path, transformers.Gemma3ForCausalLM, dtype)


def _load(path: Path, architecture: type, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """What `from_pretrained(gguf_file=...)` does, without the `accelerate` package it asks for."""
    model = architecture(architecture.config_class(**load_gguf_checkpoint(path)["config"]))
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    lacking = model.load_state_dict(read["tensors"], strict=False)
    assert lacking.missing_keys == ["lm_head.weight"] and not lacking.unexpected_keys
    model.tie_weights()
    return model.to(dtype).eval()
