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
"""Prefixes of the names of weights that a draft may share with its target."""


def untrained_draft(
    target: Model,
    config: TrainingConfig,
    outputs: np.ndarray | None,
    placement: Placement,
) -> Model:
    """A draft of the target's family.

    With the target's width, it starts from some of the target's layers, its embedding, its last
    norm and its head; with another width, from random weights.

    Args:
      target: the target.
      config: the draft's size.
      outputs: the ids that it can propose; None for all.
      placement: how the draft is sharded over a mesh.

    Raises:
      ConfigError: the target has no such layer, or its heads do not fit the width.
    """
    target = target.unpacked()
    if config.width is not None and config.width != target.config.embed_size:
        shape = _with_layers(
            _resized(target.config, config.width), chosen_layers(target.config, config)
        )
        draft = Model.random(shape, seed=config.seed, dtype=jnp.float32, placement=placement)
        return draft if outputs is None else draft.with_outputs(outputs.tolist())
    source = target if outputs is None else target.with_outputs(outputs.tolist())
    layers = chosen_layers(target.config, config)
    shape = Model.abstract(
        _with_layers(source.config, layers),
        dtype=target.dtype,
        placement=placement,
    )
    weights = {}
    for name, weight in source.weights.items():
        kind, *parts = name.split(".")
        if kind != "blocks":
            weights[name] = weight
            continue
        for i, layer in enumerate(layers):
            if parts[0] == str(layer):
                weights[".".join([kind, str(i), *parts[1:]])] = weight
    draft = shape.with_weights(weights)
    return draft if placement == target.placement else draft.place(placement)


def chosen_layers(target: TransformerConfig, config: TrainingConfig) -> tuple[int, ...]:
    """The target's layers that initialise the draft.

    Raises:
      ConfigError: the target has no such layer.
    """
    last = target.num_layers - 1
    if config.from_layers is None:
        return tuple(round(each) for each in np.linspace(0, last, config.layers))
    for layer in config.from_layers:
        if layer > last:
            raise ConfigError(
                f"from_layers names layer {layer}, but the target's last layer is {last}."
            )
    return tuple(config.from_layers)


def _with_layers(target: TransformerConfig, layers: tuple[int, ...]) -> TransformerConfig:
    """The shape of some of the target's layers."""
    by_position = target.resized(len(layers)).layers
    stack = tuple(
        dataclasses.replace(layer, mlp=target.layers[source].mlp)
        for layer, source in zip(by_position, layers, strict=True)
    )
    return dataclasses.replace(target, layers=stack)


def trained_names(model: Model, config: TrainingConfig) -> list[str]:
    """Names of the weights that training changes."""
    frozen = BORROWED if config.embedding == "shared" else ()
    return [name for name in model.weights if not name.startswith(frozen)]


def _resized(target: TransformerConfig, width: int) -> TransformerConfig:
    """The target's shape at another width, with heads of the same size."""
    heads, remainder = divmod(width * target.num_heads, target.embed_size)
    if remainder or not heads:
        raise ConfigError(
            f"width is {width}, which is not an integer number of the target's heads of "
            f"{target.head_dim}; give a multiple of {target.embed_size // target.num_heads}."
        )
    kv_heads = max(n for n in range(1, target.num_kv_heads + 1) if heads % n == 0)

    def narrowed(size: int) -> int:
        return max(1, size * width // target.embed_size)

    experts = target.experts
    return dataclasses.replace(
        target,
        embed_size=width,
        num_heads=heads,
        num_kv_heads=kv_heads,
        mlp_size=narrowed(target.mlp_size),
        experts=experts and dataclasses.replace(experts, size=narrowed(experts.size)),
    )
