"""Tiny models of different tokenizers, written as Hugging Face directories.

What a token means decides its weights, so models of different vocabularies agree now and then.
"""

import hashlib
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from spec_jax.text.tokenizer import Tokenizer
from tests.checkpoints.tiny import CONFIG, TEMPLATE, llama_tensors, write_json

SHAPE = CONFIG | {"vocab_size": 1, "max_position_embeddings": 512}


def write_model(
    path: Path,
    tokenizer: Tokenizer,
    *,
    padding: int = 3,
    noise: float = 0.02,
    seed: int = 0,
    layers: int = 1,
) -> str:
    """A model of this tokenizer; returns the directory's path.

    Args:
      path: where to write it.
      tokenizer: its tokenizer.
      padding: rows of the embedding that have no token.
      noise: how far its output weights are from other models' output weights; NaN breaks it.
      seed: of the noise.
      layers: blocks.
    """
    size = tokenizer.vocab_size + padding
    shape = SHAPE | {"num_hidden_layers": layers}
    tensors = llama_tensors(shape)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.stack([_row(name, tokenizer, i) for i in range(size)])
    drawn = np.random.default_rng(seed).normal(size=tensors["lm_head.weight"].shape)
    tensors["lm_head.weight"] += np.float32(noise) * drawn.astype(np.float32)
    path.mkdir(parents=True)
    save_file(tensors, path / "model.safetensors")
    ends = list(tokenizer.eos_token_ids)
    write_json(path / "config.json", shape | {"vocab_size": size, "eos_token_id": ends})
    tokenizer.save(path / "tokenizer.json")
    roles = {"eos_token": tokenizer.token(ends[-1]), "chat_template": TEMPLATE}
    if tokenizer.bos_token_id is not None:
        roles["bos_token"] = tokenizer.token(tokenizer.bos_token_id)
    write_json(
        path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **roles}
    )
    return str(path)


def _row(name: str, tokenizer: Tokenizer, i: int) -> np.ndarray:
    """What stands for a token in a table; rows without a token have other weights."""
    spelt = tokenizer.bytes_of_tokens[i] if i < tokenizer.vocab_size else None
    key = spelt or f"{i} {tokenizer.special_tokens.get(i)}".encode()
    digest = hashlib.sha256(name.encode() + key).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "little"))
    return rng.normal(0, 0.3, SHAPE["hidden_size"]).astype(np.float32)
