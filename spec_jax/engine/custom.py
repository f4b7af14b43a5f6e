"""Drafters from outside of the package: how they are made, checked and put on the devices."""

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spec_jax import distributed
from spec_jax.checkpoints import Checkpoint
from spec_jax.config import (
    CUSTOM,
    CustomConfig,
    SamplingParams,
    SpeculativeConfig,
    add_method,
)
from spec_jax.drafters.base import Committed, Context, Draft, Drafter, DrafterPrompt, PromptBlock
from spec_jax.errors import ConfigError
from spec_jax.models.model import Model
from spec_jax.sampling.parameters import BatchSampling

_LENGTH = 64
"""Tokens of a row in the trial of a drafter."""
_MAX_COMPARED = 2**26
"""Bytes of the largest array whose contents processes compare."""


@dataclasses.dataclass(frozen=True)
class DrafterSetting:
    """What a drafter is made from.

    Attributes:
      config: the user's choices.
      target: the target: its `model`, `tokenizer`, `eos_token_ids` and `name`.
      load_draft: loads the config's draft model, or returns the target if the config names it.
      factory: makes the drafter, for the method `custom`.
    """

    config: SpeculativeConfig
    target: Checkpoint
    load_draft: Callable[[], Checkpoint]
    factory: "DrafterFactory | None" = None

    @property
    def lookahead(self) -> int:
        """The largest number of tokens that a row drafts in a round (K)."""
        return self.config.lookahead


DrafterFactory = Callable[[DrafterSetting], Drafter]
"""Makes a drafter of `setting.lookahead` tokens; an error in its options is a `ConfigError`."""

_FACTORIES: dict[str, DrafterFactory] = {}


def register_drafter(
    name: str, factory: DrafterFactory, *, options: type[SpeculativeConfig] = CustomConfig
) -> None:
    """Makes a drafter from outside of the package a method: `SpeculativeConfig(method=name)`.

    On the command line, `--method name` imports the installed package that has an entry point of
    this name in the group `spec_jax.drafters`; the package registers the drafter when it is
    imported. All processes of a run register the same.

    Args:
      name: of the method.
      factory: makes the drafter; called for each `LLM` that uses the method.
      options: the class of the drafter's options, which `setting.config` is an instance of: a
        `spec_jax.config.config_class` derived from `spec_jax.config.CustomConfig`. That class
        itself has the options that every drafter supports: `num_speculative_tokens`,
        `verification`, `scoring`, and each `draft_length_policy` but `confidence`, which needs
        `Draft.confidence`. A class with a field `draft` needs a draft model, which
        `setting.load_draft()` loads.

    Raises:
      ConfigError: a method has this name already, or the options are not such a class.
    """
    if not callable(factory):
        raise ConfigError(
            f"the factory of drafter {name!r} is {factory!r}; give a function of a "
            "`DrafterSetting` that returns a drafter."
        )
    add_method(name, options)
    _FACTORIES[name] = factory


def choose(
    config: SpeculativeConfig | Mapping[str, Any] | None, factory: DrafterFactory | None
) -> SpeculativeConfig:
    """The config of an `LLM` with or without a custom drafter.

    Raises:
      ConfigError: a drafter without the method `custom`, or the method without a drafter.
    """
    if isinstance(config, Mapping):
        default = {} if factory is None else {"method": CUSTOM}
        config = {**default, **config}
    elif config is None and factory is not None:
        config = SpeculativeConfig(method=CUSTOM)
    config = SpeculativeConfig.of(config)
    if factory is not None and config.method != CUSTOM:
        raise ConfigError(
            f"drafter is given but method is {config.method!r}; use method {CUSTOM!r}, or leave "
            "the drafter out."
        )
    if factory is None and config.method == CUSTOM:
        raise ConfigError(
            f"method is {CUSTOM!r}, which is for `LLM(drafter=...)`; give the drafter there, or "
            "register it (`spec_jax.register_drafter`) and use its name."
        )
    return config


def custom_drafter(setting: DrafterSetting) -> Drafter | None:
    """The drafter of a method from outside of the package; None for a built-in method.

    NumPy arrays, and arrays of JAX that are not committed to a device, are replicated over the
    target's devices.

    Raises:
      ConfigError: the factory does not return a drafter, or its drafter has other sizes than the
        config.
    """
    method, model = setting.config.method, setting.target.model
    factory = setting.factory if method == CUSTOM else _FACTORIES.get(method)
    if factory is None:
        return None
    drafter = factory(setting)
    name = f"the drafter of method {method!r}, a {type(drafter).__qualname__},"
    if not isinstance(drafter, Drafter):
        raise ConfigError(
            f"{name} is not a drafter; make its class a subclass of `spec_jax.drafters.Drafter`."
        )
    if type(drafter).propose is Drafter.propose:
        raise ConfigError(f"{name} does not implement `propose`; see `spec_jax.drafters.Drafter`.")
    if jax.tree_util.all_leaves([drafter]):
        raise ConfigError(
            f"{name} is not a pytree; decorate its class with `spec_jax.drafters.pytree`."
        )
    for member, expected, option in (
        ("lookahead", setting.lookahead, "num_speculative_tokens"),
        ("num_drafts", setting.config.num_drafts, "num_drafts"),
    ):
        if getattr(drafter, member) != expected:
            raise ConfigError(
                f"{name} has {member} {getattr(drafter, member)}, but {option} is {expected}; "
                f"make it from the setting."
            )
    for leaf in jax.tree.leaves(drafter):
        if not isinstance(leaf, np.ndarray | np.generic | jax.Array):
            raise ConfigError(
                f"{name} holds {leaf!r}, which is not an array; declare such a field as "
                "`spec_jax.drafters.static()`."
            )
    _check_shapes(name, drafter, model)
    placed = jax.tree.map(
        lambda leaf: model.replicated(np.asarray(leaf)) if _is_uncommitted(leaf) else leaf, drafter
    )
    return placed


def fingerprint(config: SpeculativeConfig, drafter: Drafter) -> str | None:
    """A checksum that processes compare: the drafter's class, its source, numbers and arrays.

    Sharded and large arrays are weights, whose files are compared elsewhere: only their shapes
    count here. None in a run of one process, and for a built-in method that reads no other files.
    """
    differs = config.method in (CUSTOM, *_FACTORIES) or getattr(config, "suffix_store", None)
    if distributed.process()[1] == 1 or not differs:
        return None
    kind = type(drafter)
    try:
        source = inspect.getsource(inspect.getmodule(kind) or kind)
    except (OSError, TypeError):  # typed into an interpreter
        source = ""
    digest = hashlib.sha256(f"{kind.__module__}.{kind.__qualname__}\n{source}".encode())
    for field in dataclasses.fields(drafter) if dataclasses.is_dataclass(drafter) else ():
        value = getattr(drafter, field.name)
        if isinstance(value, bool | int | float | str | None):
            digest.update(f"{field.name}={value!r}\n".encode())
    for leaf in jax.tree.leaves(drafter):
        digest.update(f"{leaf.shape} {leaf.dtype}\n".encode())
        if leaf.is_fully_replicated and leaf.nbytes <= _MAX_COMPARED:
            digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def _is_uncommitted(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or not leaf.committed


def _check_shapes(name: str, drafter: Drafter, model: Model) -> None:
    """Traces a round without computing anything, and compares shapes and dtypes."""
    if model.config.encoder is not None:
        return  # the drafter may read the encoder's output, which is missing here
    placement, vocab = model.placement, model.config.vocab_size
    batch = 2 * placement.num_shards("batch")
    sampling = BatchSampling.stack(
        [SamplingParams(temperature=1.0)] * batch, vocab, placement=placement
    )

    def one_round() -> tuple[Any, ...]:
        tokens = jnp.zeros((batch, _LENGTH), jnp.int32)
        lengths, chosen = (jnp.full((batch,), each, jnp.int32) for each in (2, 0))
        keys = jax.random.split(jax.random.key(0), batch)
        layers, size = drafter.feature_layers, _LENGTH // 2

        def features(count: int) -> jax.Array | None:
            shape = (batch, count, len(layers), model.config.embed_size)
            return jnp.zeros(shape, model.dtype) if layers else None

        state = drafter.init(DrafterPrompt(tokens, lengths, block=size))
        block = PromptBlock(tokens, lengths, lengths - 2, lengths - 1, features(size), size)
        read = drafter.prefill(state, block)
        cache = model.new_cache(batch, _LENGTH)
        context = Context(tokens, lengths, lengths, keys, sampling, lengths, cache=cache)
        draft, proposed = drafter.propose(state, context)
        tapped, scored = features(drafter.lookahead + 1), None
        if drafter.needs_likeliest:
            scored = jnp.zeros((batch, drafter.lookahead + 1), jnp.int32)
        committed = drafter.commit(
            proposed, Committed(tokens, lengths, lengths + 1, chosen, tapped, scored, scored)
        )
        return state, draft, read, proposed, committed

    state, draft, *later = jax.eval_shape(one_round)
    if not isinstance(draft, Draft):
        raise ConfigError(f"{name} proposes a {type(draft).__qualname__}; return a `Draft`.")
    drafted = drafter.lookahead * drafter.num_drafts
    for member, shape, dtype in (
        ("tokens", (batch, drafted), jnp.int32),
        ("probs", (batch, drafted, vocab), jnp.float32),
        ("is_certain", (batch, drafted), jnp.bool_),
        ("lengths", (batch,), jnp.int32),
    ):
        array = getattr(draft, member)
        if array is not None and (array.shape, array.dtype) != (shape, dtype):
            raise ConfigError(
                f"{name} proposes {member} of shape {array.shape} and dtype {array.dtype}; for "
                f"{batch} rows of a vocabulary of {vocab} they are {jnp.dtype(dtype)} {shape}."
            )
    for leaf in jax.tree.leaves(state):
        if leaf.shape[:1] != (batch,):
            raise ConfigError(
                f"{name} has a state with an array of shape {leaf.shape} for {batch} rows; the "
                "rows lie along axis 0."
            )
    for member, after in zip(("prefill", "propose", "commit"), later, strict=True):
        if _shapes(after) != _shapes(state):
            raise ConfigError(
                f"{name} changes the shape of its state in `{member}`: from {state} to {after}; "
                "the loop is one program, so keep structure, shapes and dtypes."
            )


def _shapes(state: Any) -> Any:
    leaves, structure = jax.tree.flatten(state)
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
