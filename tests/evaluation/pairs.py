"""Tiny pairs of models whose vocabulary is so small that little is needed to tell."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.checkpoints import tiny

LETTERS = "abcdefghijklmnopqrstuvw"
PROMPTS = ("abcde fgh", "ab ab cd ab ab cd ab", "the cat had a badge")
CONFIG = tiny.CONFIG | {
    "vocab_size": len(LETTERS) + 1,
    "hidden_size": 32,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
}
NOISE = 0.3
"""How far the draft's weights lie from the target's, so that it is right often but not always."""


def noisy(weights: np.ndarray, random: np.random.Generator, size: float = NOISE) -> np.ndarray:
    added = size * weights.std() * random.standard_normal(weights.shape)
    return (weights + added).astype(weights.dtype)


def noisy_copy(model, size=NOISE):
    """A draft for a model in memory."""
    leaves, tree = jax.tree.flatten(model.params)
    random = np.random.default_rng(1)
    changed = [noisy(np.asarray(leaf), random, size) for leaf in leaves]
    return dataclasses.replace(model, params=jax.tree.unflatten(tree, changed))


def write_pair(path: Path) -> tuple[Path, Path]:
    """Hugging Face directories of a target and of its draft."""
    random = np.random.default_rng(1)
    tensors = tiny.llama_tensors(CONFIG)
    tensors["lm_head.weight"] *= 4
    draft = {name: noisy(tensor, random) for name, tensor in tensors.items()}
    return write(path / "target", tensors), write(path / "draft", draft)


def write_stranger(path: Path) -> Path:
    """The draft of `write_pair` with another tokenizer: the same letters have other ids."""
    random = np.random.default_rng(1)
    tensors = tiny.llama_tensors(CONFIG)
    tensors["lm_head.weight"] *= 4
    draft = {name: noisy(tensor, random) for name, tensor in tensors.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        draft[name] = np.concatenate([draft[name][:-1][::-1], draft[name][-1:]])
    return write(path / "stranger", draft, LETTERS[::-1])


def write(path: Path, tensors: dict[str, np.ndarray], letters: str = LETTERS) -> Path:
    path.mkdir()
    tiny.write_json(path / "config.json", CONFIG)
    save_file(tensors, path / "model.safetensors")
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters + "Ġ")}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path / "tokenizer.json"))
    tiny.write_json(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    return path
