"""Configs of models with other options."""

import dataclasses

from spec_jax.models.config import LAYER_OPTIONS, TransformerConfig, layer_stack


def reshaped(config: TransformerConfig, **options) -> TransformerConfig:
    """The config with other options of `TransformerConfig.of`; its layers follow none but these."""
    rules = {name: options.pop(name) for name in LAYER_OPTIONS if name in options}
    rules = {"num_layers": config.num_layers} | rules
    is_sparse = options.get("experts", config.experts) is not None
    return dataclasses.replace(config, **options, layers=layer_stack(**rules, is_sparse=is_sparse))
