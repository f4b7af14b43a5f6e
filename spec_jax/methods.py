"""From a `SpeculativeConfig` to a drafter and a lookahead policy: one row a method."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax.checkpoints import Checkpoint
from spec_jax.config import SpeculativeConfig
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.lookahead import Confidence, Constant, Heuristic, Lookahead, Oracle
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.early_exit import EarlyExit
from spec_jax.drafters.given import Given
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.universal_vocabulary import UniversalVocabulary
from spec_jax.engine import Bucket, Request
from spec_jax.errors import ConfigError, VocabularyMismatchError
from spec_jax.host_rounds import HostDrafter
from spec_jax.models.transformer import Model
from spec_jax.translation import TextTranslator
from spec_jax.universal_text import UniversalText
from spec_jax.vocabulary import VocabularyMap


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A method, ready for an engine.

    Attributes:
      drafter: what proposes tokens on the device.
      inputs: what the drafter must be told about a batch of requests, if anything.
      host: what drafts on the host, if `drafter` is only told.
    """

    drafter: Drafter
    inputs: Callable[[Sequence[Request], Bucket], Any] | None = None
    host: HostDrafter | None = None


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a method is made from.

    Attributes:
      config: the user's choices.
      target: the target.
      load_draft: loads the draft model that the config names, or gives the target if it is that.
    """

    config: SpeculativeConfig
    target: Checkpoint
    load_draft: Callable[[], Checkpoint]

    @property
    def lookahead(self) -> int:
        """Most tokens drafted per round."""
        return most_speculative_tokens(self.config)


def most_speculative_tokens(config: SpeculativeConfig) -> int:
    """The lookahead K; plain decoding drafts nothing."""
    assert config.num_speculative_tokens is not None  # SpeculativeConfig has filled it in
    return 0 if config.method == "none" else config.num_speculative_tokens


def make_drafting(setting: Setting) -> Drafting:
    """The drafter that the config asks for.

    Raises:
      CheckpointError: the draft model cannot be loaded.
      ConfigError: an option does not fit the models.
      VocabularyMismatchError: the draft's token ids mean other text than the target's.
    """
    return _METHODS[setting.config.method](setting)


def make_lookahead(config: SpeculativeConfig) -> Lookahead:
    """The policy that the config asks for."""
    most = most_speculative_tokens(config)
    if config.lookahead == "confidence":
        return Confidence(most, config.confidence_threshold, config.retune_confidence)
    return _LOOKAHEADS[config.lookahead](most)


def _none(setting: Setting) -> Drafting:
    return Drafting(NoDraft())


def _prompt_lookup(setting: Setting) -> Drafting:
    return Drafting(PromptLookup(setting.lookahead, setting.config.prompt_lookup_max))


def _draft_model(setting: Setting) -> Drafting:
    target, draft = setting.target, setting.load_draft()
    difference = target.tokenizer.vocabulary_difference(draft.tokenizer)
    if difference is not None:
        raise VocabularyMismatchError(
            f"the draft {draft.name} does not share the vocabulary of {target.name}: "
            f"{difference} Use method 'universal_vocabulary' or 'universal_text', which take a "
            "draft of any tokenizer, or one of the target's."
        )
    return Drafting(DraftModel(draft.model, setting.lookahead, setting.config.num_drafts))


def _universal_vocabulary(setting: Setting) -> Drafting:
    target, draft = setting.target, setting.load_draft()
    vocabulary = VocabularyMap.between(
        target.tokenizer,
        draft.tokenizer,
        target_vocab_size=target.model.config.vocab_size,
        drafter_vocab_size=draft.model.config.vocab_size,
        target_name=target.name,
        drafter_name=draft.name,
    )
    drafter = UniversalVocabulary(
        draft.model,
        _on_every_device(draft.model, vocabulary.to_drafter),
        _on_every_device(draft.model, np.maximum(vocabulary.spelling, 0)),
        _on_every_device(draft.model, vocabulary.spelling_lengths),
        setting.lookahead,
    )
    translator = TextTranslator(target.tokenizer, draft.tokenizer)

    def prompts(requests: Sequence[Request], bucket: Bucket) -> tuple[np.ndarray, np.ndarray]:
        """The prompts in the drafter's tokens; another tokenizer may need more for a text."""
        tokens = np.zeros((bucket.batch, 2 * bucket.capacity), np.int32)
        lengths = np.ones((bucket.batch,), np.int32)
        for row, request in enumerate(requests):
            ids = translator.encode_prompt(list(request.prompt_token_ids))[: tokens.shape[1]]
            tokens[row, : len(ids)] = ids
            lengths[row] = max(1, len(ids))
        return tokens, lengths

    return Drafting(drafter, inputs=prompts)


def _on_every_device(model: Model, table: np.ndarray) -> jax.Array:
    """A table that each of a model's devices holds whole, so that no call has to send it."""
    placement = model.placement
    return placement.put(table, *(None,) * table.ndim) if placement else jnp.asarray(table)


def _universal_text(setting: Setting) -> Drafting:
    draft = setting.load_draft()
    translator = TextTranslator(setting.target.tokenizer, draft.tokenizer)
    host = UniversalText(draft.model, translator, setting.lookahead)
    return Drafting(Given(setting.lookahead), host=host)


def _early_exit(setting: Setting) -> Drafting:
    model = setting.target.model
    all_layers = model.config.num_layers
    layers = setting.config.early_exit_layers or max(1, all_layers // 4)
    if layers >= all_layers:
        raise ConfigError(
            f"early_exit_layers is {layers}, but {setting.target.name} has {all_layers} layers; "
            "give fewer."
        )
    return Drafting(EarlyExit(model, setting.lookahead, layers))


_METHODS: dict[str, Callable[[Setting], Drafting]] = {
    "none": _none,
    "draft_model": _draft_model,
    "prompt_lookup": _prompt_lookup,
    "early_exit": _early_exit,
    "universal_vocabulary": _universal_vocabulary,
    "universal_text": _universal_text,
}

_LOOKAHEADS: dict[str, Callable[[int], Lookahead]] = {
    "constant": Constant,
    "heuristic": Heuristic,
    "adaptive": Adaptive,
    "oracle": Oracle,
}
