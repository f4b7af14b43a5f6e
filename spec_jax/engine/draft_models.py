"""Draft models for a target: checks and sharing of encoders, and reduced vocabularies."""

import dataclasses
import itertools

import jax
import numpy as np

from spec_jax.checkpoints import Checkpoint, OpenCheckpoint
from spec_jax.config import DraftModelConfig, SpeculativeConfig
from spec_jax.engine.custom import DrafterSetting
from spec_jax.errors import ConfigError, VocabularyMismatchError
from spec_jax.models.model import Model


def check_vocabulary(
    target: Checkpoint | OpenCheckpoint, draft: Checkpoint | OpenCheckpoint
) -> None:
    """Checks that a draft model's tokens mean what the target's tokens mean.

    Raises:
      VocabularyMismatchError: some differ.
    """
    if target.tokenizer is None or draft.tokenizer is None:
        return  # a draft that has its target's tokenizer
    difference = target.tokenizer.vocabulary_difference(draft.tokenizer)
    if difference is not None:
        raise VocabularyMismatchError(
            f"the draft {draft.name} does not share the vocabulary of {target.name}: "
            f"{difference} Use method 'universal_vocabulary' or 'universal_text', which take a "
            "draft of any tokenizer; method 'prompt_lookup', which needs none; or a draft of the "
            "target's."
        )


def check_source(setting: DrafterSetting, draft: Checkpoint, *, same_tokens: bool) -> None:
    """Checks that the draft's encoder, if it has one, can read the input of the target's encoder.

    Raises:
      ConfigError: it cannot.
    """
    encoder, target = draft.model.config.encoder, setting.target.model.config.encoder
    if encoder is None:
        return
    if target is None:
        raise ConfigError(
            f"the draft {draft.name} has an encoder, which would have nothing to read, since "
            f"{setting.target.name} has none; use a draft without one."
        )
    frames = (encoder.mel_bins, target.mel_bins)
    if frames[0] != frames[1] or (not frames[0] and not same_tokens):
        raise ConfigError(
            f"the encoder of the draft {draft.name} cannot read the encoder input of "
            f"{setting.target.name}; use method 'draft_model' with a draft of the same tokenizer "
            "or the same frames, 'prompt_lookup' or 'early_exit'."
        )


def sharing_encoder(target: Model, draft: Model) -> Model | None:
    """The draft with the target's encoder, if the two encoders are equal; None otherwise."""
    encoder = target.config.encoder
    if encoder is None or draft.config.encoder != encoder:
        return None
    ours, theirs = target.weights, draft.weights
    names = [name for name in theirs if name.startswith("encoder.")]
    if not encoder.mel_bins:  # the encoder reads tokens through the embedding
        names.append("embed.weight")
    for name in names:
        one, other = (jax.tree.leaves(each[name]) for each in (ours, theirs))
        alike = len(one) == len(other) and all(map(_alike, one, other))
        if not alike:
            return None
    return draft.with_weights({name: ours[name] for name in names})


def _alike(one: jax.Array, other: jax.Array) -> bool:
    same = one.shape == other.shape and one.dtype == other.dtype
    return same and one.sharding == other.sharding and bool((one == other).all())


def load_draft_of_any_tokenizer(setting: DrafterSetting) -> Checkpoint:
    """Loads a draft model that speaks all of its vocabulary.

    Raises:
      ConfigError: it proposes only some tokens of one target.
    """
    draft = setting.load_draft()
    if draft.outputs is not None:
        raise ConfigError(
            f"{draft.name} was trained to propose {len(draft.outputs)} tokens of one target; use "
            "method 'draft_model' with it."
        )
    return draft


def with_frequent_outputs(draft: Checkpoint, config: SpeculativeConfig) -> Checkpoint:
    """The draft with the `draft_vocab_size` outputs of the config, if it asks for so few.

    They are the tokens that are probably most frequent: special ones, and the first ids. Tokenizers
    are trained by merging the most frequent pair first, so ids are sorted by frequency.

    Raises:
      ConfigError: the size does not fit the draft or its layout.
    """
    count = config.draft_vocab_size if isinstance(config, DraftModelConfig) else None
    if count is None:
        return draft
    if draft.outputs is not None:
        raise ConfigError(
            f"draft_vocab_size is {count}, but {draft.name} was trained to propose "
            f"{len(draft.outputs)} chosen tokens; leave draft_vocab_size out."
        )
    size = min(draft.tokenizer.vocab_size, draft.model.config.vocab_size)
    if count > size:
        raise ConfigError(
            f"draft_vocab_size is {count}, but {draft.name} has {size} tokens; give fewer, or "
            "leave it out."
        )
    num_shards = draft.model.placement.num_shards("vocab")
    if count % num_shards:
        raise ConfigError(
            f"draft_vocab_size is {count}, but the layout splits the draft's vocabulary into "
            f"{num_shards} shards; give a multiple of {num_shards}."
        )
    special = set(draft.eos_token_ids)
    others = (i for i in range(size) if i not in special)
    ids = sorted([*special, *itertools.islice(others, count - len(special))])
    return dataclasses.replace(
        draft, model=draft.model.with_outputs(ids), outputs=np.array(ids, np.int32)
    )
