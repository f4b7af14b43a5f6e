"""Makes an untrained draft from its target: wide and shallow (arXiv 2302.01318, section 3)."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from spec_jax.errors import ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model
from spec_jax.sharding import Placement
from spec_jax.training.config import TrainingConfig

BORROWED = ("embed.", "head.")
"""How the names of weights begin that a draft may share with its target."""


def untrained_draft(
    target: Model,
    config: TrainingConfig,
    outputs: np.ndarray | None = None,
    placement: Placement | None = None,
) -> Model:
    """A draft of the target's family.

    Of the target's width, it begins as some of the target's layers between its embedding, its
    last norm and its head; of another, with random weights.

    Args:
      target: the target.
      config: the draft's size.
      outputs: the ids that it can propose; None for all.
      placement: how the draft lies on a mesh; by default as the target does.

    Raises:
      ConfigError: the target has no such layer, or its heads do not fit the width.
    """
    placement = placement or target.placement
    if config.width is not None and config.width != target.config.embed_size:
        shape = dataclasses.replace(_resized(target.config, config.width), num_layers=config.layers)
        draft = Model.random(shape, seed=config.seed, dtype=jnp.float32, placement=placement)
        return draft if outputs is None else draft.with_outputs(outputs.tolist())
    source = target if outputs is None else target.with_outputs(outputs.tolist())
    layers = chosen_layers(target.config, config)
    shape = Model.abstract(
        dataclasses.replace(source.config, num_layers=config.layers),
        dtype=target.dtype,
        placement=placement,
    )
    weights = {}
    for name, weight in source.weights.items():
        kind, *rest = name.split(".")
        if kind != "blocks":
            weights[name] = weight
            continue
        for i, layer in enumerate(layers):
            if rest[0] == str(layer):
                weights[".".join([kind, str(i), *rest[1:]])] = weight
    draft = shape.with_weights(weights)
    return draft if placement in (None, target.placement) else draft.place(placement)


def chosen_layers(target: TransformerConfig, config: TrainingConfig) -> tuple[int, ...]:
    """Which of the target's layers the draft begins as.

    Raises:
      ConfigError: the target has no such layer.
    """
    last = target.num_layers - 1
    if config.from_layers is None:
        return tuple(round(each) for each in np.linspace(0, last, config.layers))
    for layer in config.from_layers:
        if layer > last:
            raise ConfigError(
                f"from_layers names layer {layer}, but the target's layers end at {last}."
            )
    return config.from_layers


def trained_names(model: Model, config: TrainingConfig) -> list[str]:
    """Names of the weights that training changes."""
    frozen = BORROWED if config.embedding == "shared" else ()
    return [name for name in model.weights if not name.startswith(frozen)]


def _resized(target: TransformerConfig, width: int) -> TransformerConfig:
    """The target's shape at another width, with heads of the same size."""
    heads, rest = divmod(width * target.num_heads, target.embed_size)
    if rest or not heads:
        raise ConfigError(
            f"width is {width}, of which the target's heads of {target.head_dim} are no whole "
            f"number; give a multiple of {target.embed_size // target.num_heads}."
        )
    kv_heads = max(n for n in range(1, target.num_kv_heads + 1) if heads % n == 0)
    return dataclasses.replace(
        target,
        embed_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_size=max(1, target.mlp_size * width // target.embed_size),
    )
