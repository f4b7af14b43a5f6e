"""A tokenizer for models without one: models with random weights use bytes as tokens."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spec_jax.errors import CheckpointError
from spec_jax.text.tokenizer import Tokenizer


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """A tokenizer whose first 256 tokens are the bytes; nothing ends a generation.

    Text becomes bytes only. The other tokens exist because random weights emit them: token 300
    decodes to `<300>`, so that outputs can be compared.

    Args:
      vocab_size: tokens in all, the model's vocabulary.

    Raises:
      CheckpointError: the vocabulary cannot hold the bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(alphabet):
        raise CheckpointError(
            f"a model without a tokenizer reads bytes, but its vocabulary has only {vocab_size} "
            f"tokens; give it a vocab_size of at least {len(alphabet)}."
        )
    tokens = [*alphabet, *(f"<{i}>" for i in range(len(alphabet), vocab_size))]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, eos_token_ids=())
