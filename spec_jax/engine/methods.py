"""From a `SpeculativeConfig` to a drafter and a draft-length policy: one row per method."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from spec_jax import distributed
from spec_jax.config import (
    CONFIDENCE_THRESHOLD,
    DraftModelConfig,
    EarlyExitConfig,
    PromptLookupConfig,
    SpeculativeConfig,
    SuffixConfig,
)
from spec_jax.decoding.adaptive import Adaptive
from spec_jax.decoding.draft_length import (
    Confidence,
    Constant,
    DraftLengthPolicy,
    Heuristic,
    Oracle,
)
from spec_jax.drafters.base import Drafter
from spec_jax.drafters.draft_model import DraftModel
from spec_jax.drafters.early_exit import EarlyExit, exit_layers
from spec_jax.drafters.host_draft import HostDraft
from spec_jax.drafters.none import NoDraft
from spec_jax.drafters.prompt_lookup import PromptLookup
from spec_jax.drafters.recycle import TokenRecycling
from spec_jax.drafters.suffix import StoredText, SuffixLookup
from spec_jax.drafters.universal_vocabulary import UniversalVocabulary
from spec_jax.engine.batch_shape import BatchShape
from spec_jax.engine.custom import DrafterSetting, custom_drafter
from spec_jax.engine.draft_models import (
    check_source,
    check_vocabulary,
    load_draft_of_any_tokenizer,
    sharing_encoder,
)
from spec_jax.engine.engine import Engine
from spec_jax.engine.programs import Compiler
from spec_jax.engine.requests import Request
from spec_jax.engine.rows import HostInputs
from spec_jax.engine.scheduler import OnFinished
from spec_jax.engine.suffix_index import SuffixIndex
from spec_jax.engine.suffix_store import SuffixStore
from spec_jax.engine.universal_text import UniversalText
from spec_jax.errors import ConfigError
from spec_jax.text.translation import TextTranslator
from spec_jax.text.vocabulary import VocabularyMap

MAX_RECYCLED = 2048
"""Tokens of a namespace's past outputs that `recycle` begins with: a part of its table."""


@dataclasses.dataclass(frozen=True)
class Drafting:
    """A method, ready for an engine.

    Attributes:
      drafter: proposes tokens on the device.
      inputs: makes the drafter's inputs for a batch of requests, if it has any.
      host: makes the drafts on the host for a batch, if `drafter` only proposes their tokens.
      on_finished: stores the output of a finished request, if the method uses past outputs.
    """

    drafter: Drafter
    inputs: HostInputs | None = None
    host: Callable[[Compiler, BatchShape], UniversalText] | None = None
    on_finished: OnFinished | None = None


def make_drafting(setting: DrafterSetting) -> Drafting:
    """The drafter that the config asks for.

    Raises:
      CheckpointError: the draft model cannot be loaded.
      ConfigError: an option does not fit the models; or the factory of a custom method does not
        return a drafter.
      VocabularyMismatchError: the draft's token ids mean other text than the target's.
    """
    drafter = custom_drafter(setting)
    return Drafting(drafter) if drafter is not None else _METHODS[setting.config.method](setting)


def make_engine(
    setting: DrafterSetting,
    max_model_len: int,
    on_progress: Callable[[str], None] | None = None,
) -> tuple[Engine, OnFinished | None]:
    """The engine that a config asks for, and what is told of finished requests.

    Raises:
      CheckpointError, ConfigError, VocabularyMismatchError: see `make_drafting`.
    """
    config, drafting = setting.config, make_drafting(setting)
    engine = Engine(
        setting.target.model,
        drafting.drafter,
        make_draft_length_policy(config),
        config.verification,
        scoring=config.scoring,
        scoring_consistent=config.scoring_consistent,
        max_model_len=max_model_len,
        inputs=drafting.inputs,
        host=drafting.host,
        on_progress=on_progress,
        keeps_costs=True,
    )
    return engine, drafting.on_finished


def make_draft_length_policy(config: SpeculativeConfig) -> DraftLengthPolicy:
    """The policy that the config asks for."""
    if config.draft_length_policy == "confidence":
        threshold = config.confidence_threshold
        threshold = CONFIDENCE_THRESHOLD if threshold is None else threshold
        return Confidence(config.lookahead, threshold, config.retune_confidence)
    return _DRAFT_LENGTH_POLICIES[config.draft_length_policy](config.lookahead)


def _none(setting: DrafterSetting) -> Drafting:
    return Drafting(NoDraft(setting.lookahead))


def _prompt_lookup(setting: DrafterSetting) -> Drafting:
    config = setting.config
    assert isinstance(config, PromptLookupConfig)
    return Drafting(PromptLookup(config.lookahead, config.prompt_lookup_max, config.num_drafts))


def _suffix(setting: DrafterSetting) -> Drafting:
    config, index = setting.config, SuffixIndex()
    assert isinstance(config, SuffixConfig)
    store = stored = None
    if config.suffix_store is not None:
        model = setting.target.model
        path = Path(config.suffix_store).expanduser()
        store = SuffixStore(path, setting.target.tokenizer, model.config.vocab_size)
        arrays = store.outputs.tokens, store.outputs.order
        stored = StoredText(*map(model.replicated, arrays))

    def inputs(requests: Sequence[Request], shape: BatchShape) -> tuple[np.ndarray, ...]:
        names = _namespaces(requests)
        parts = () if store is None else (store.outputs.of_rows(names, shape.batch),)
        return *index.arrays(names, shape.batch), *parts

    # Processes that decode together keep the same outputs; one of them writes.
    writes = store is not None and distributed.process()[0] == 0
    drafter = SuffixLookup(setting.lookahead, stored=stored)
    stores = [index, store] if writes else [index]
    return Drafting(drafter, inputs=inputs, on_finished=_adding_to(*stores))


def _recycle(setting: DrafterSetting) -> Drafting:
    index = SuffixIndex(MAX_RECYCLED)

    def inputs(requests: Sequence[Request], shape: BatchShape) -> np.ndarray:
        return index.texts(_namespaces(requests), shape.batch)

    drafter = TokenRecycling(setting.lookahead)
    return Drafting(drafter, inputs=inputs, on_finished=_adding_to(index))


def _namespaces(requests: Sequence[Request]) -> list[str]:
    return [each.sampling.namespace for each in requests]


def _adding_to(*stores: SuffixIndex | SuffixStore) -> OnFinished:
    def on_finished(request: Request, token_ids: Sequence[int]) -> None:
        for each in stores:
            each.add(request.sampling.namespace, token_ids)

    return on_finished


def _draft_model(setting: DrafterSetting) -> Drafting:
    target, draft = setting.target, setting.load_draft()
    check_vocabulary(target, draft)
    check_source(setting, draft, same_tokens=True)
    sharing = sharing_encoder(target.model, draft.model)
    model, columns = sharing or draft.model, None
    assert isinstance(setting.config, DraftModelConfig)
    if draft.outputs is not None:
        vocabulary = VocabularyMap.reduced(draft.outputs, target.model.config.vocab_size)
        columns = model.replicated(vocabulary.to_drafter)
    drafter = DraftModel(
        model,
        setting.lookahead,
        setting.config.num_drafts,
        columns,
        shares_encoder=sharing is not None,
    )
    return Drafting(drafter)


def _universal_vocabulary(setting: DrafterSetting) -> Drafting:
    target, draft = setting.target, load_draft_of_any_tokenizer(setting)
    check_source(setting, draft, same_tokens=False)
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
        draft.model.replicated(vocabulary.to_drafter),
        draft.model.replicated(np.maximum(vocabulary.spelling, 0)),
        draft.model.replicated(vocabulary.spelling_lengths),
        setting.lookahead,
    )
    translator = TextTranslator(target.tokenizer, draft.tokenizer)

    def prompts(requests: Sequence[Request], shape: BatchShape) -> tuple[np.ndarray, np.ndarray]:
        """The prompts in the drafter's tokens; another tokenizer may need more for a text."""
        tokens = np.zeros((shape.batch, 2 * shape.capacity), np.int32)
        lengths = np.ones((shape.batch,), np.int32)
        for row, request in enumerate(requests):
            ids = translator.encode_prompt(list(request.prompt_token_ids))[: tokens.shape[1]]
            tokens[row, : len(ids)] = ids
            lengths[row] = max(1, len(ids))
        return tokens, lengths

    return Drafting(drafter, inputs=prompts)


def _universal_text(setting: DrafterSetting) -> Drafting:
    draft = load_draft_of_any_tokenizer(setting)
    if draft.model.config.encoder is not None:
        raise ConfigError(
            f"the draft {draft.name} has an encoder, and method 'universal_text' drafts with "
            "decoders alone; use 'draft_model' or 'universal_vocabulary'."
        )
    translator = TextTranslator(setting.target.tokenizer, draft.tokenizer)
    host = functools.partial(UniversalText, draft.model, translator, setting.lookahead)
    return Drafting(HostDraft(setting.lookahead), host=host)


def _early_exit(setting: DrafterSetting) -> Drafting:
    model = setting.target.model
    assert isinstance(setting.config, EarlyExitConfig)
    layers = exit_layers(setting.config.early_exit_layers, model.config, setting.target.name)
    return Drafting(EarlyExit(model.with_resident(layers), setting.lookahead, layers))


_METHODS: dict[str, Callable[[DrafterSetting], Drafting]] = {
    "none": _none,
    "draft_model": _draft_model,
    "prompt_lookup": _prompt_lookup,
    "suffix": _suffix,
    "recycle": _recycle,
    "early_exit": _early_exit,
    "universal_vocabulary": _universal_vocabulary,
    "universal_text": _universal_text,
}

_DRAFT_LENGTH_POLICIES: dict[str, Callable[[int], DraftLengthPolicy]] = {
    "constant": Constant,
    "heuristic": Heuristic,
    "adaptive": Adaptive,
    "oracle": Oracle,
}
