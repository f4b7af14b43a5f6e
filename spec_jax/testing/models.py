"""Tiny models with random weights."""

import dataclasses

import jax
import tokenizers
from tokenizers import models, pre_tokenizers

from spec_jax.checkpoints import Checkpoint
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.text.tokenizer import Tokenizer


def tiny_model(
    seed: int = 0,
    *,
    vocab_size: int = 16,
    embed_size: int = 32,
    num_layers: int = 2,
    sharpness: float = 1.0,
    max_position: int = 1024,
    encoder_layers: int = 0,
) -> Model:
    """A Llama-like model with random float32 weights that decodes in milliseconds.

    Args:
      seed: weights of different seeds are independent.
      vocab_size: number of tokens.
      embed_size: width; heads have 8 dimensions.
      num_layers: blocks.
      sharpness: scales the logits; around 1 no token dominates.
      max_position: longest context.
      encoder_layers: blocks of an encoder, which reads tokens; the decoder starts from token 0.
    """
    heads = embed_size // 8
    config = TransformerConfig.of(
        vocab_size=vocab_size,
        embed_size=embed_size,
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=8,
        mlp_size=2 * embed_size,
        max_position=max_position,
    )
    if encoder_layers:
        encoder = config.resized(encoder_layers)
        config = dataclasses.replace(config, encoder=encoder, decoder_start=(0,))
    model = Model.random(config, seed=seed)
    # The residual stream starts at unit size, so that attention and MLP matter.
    scale = {"embed": 50.0, "head": sharpness}

    def rescale(path, leaf):
        return leaf * scale.get(getattr(path[0], "key", ""), 1.0)

    params = jax.tree_util.tree_map_with_path(rescale, model.params)
    return Model(graphdef=model.graphdef, params=params, config=config)


def tiny_checkpoint(seed: int = 0, *, vocab_size: int = 16, **sizes: int) -> Checkpoint:
    """A `tiny_model` with a tokenizer whose words are "0", "1", ..., each its own id.

    Args:
      seed: of the weights.
      vocab_size: number of tokens; the last one ends a text.
      **sizes: see `tiny_model`.
    """
    words = {str(token): token for token in range(vocab_size)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    ends = (vocab_size - 1,)
    return Checkpoint(
        model=tiny_model(seed, vocab_size=vocab_size, **sizes),
        tokenizer=Tokenizer(backend, eos_token_ids=ends),
        eos_token_ids=ends,
        name=f"tiny-{seed}",
    )


def first_layers(model: Model, count: int) -> Model:
    """The model cut down to its first blocks: a draft that shares all its weights and is wrong."""
    shape = Model.abstract(model.config.resized(count), dtype=model.dtype)
    return shape.with_weights(model.weights)
