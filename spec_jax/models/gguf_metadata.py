"""Metadata and tensor names that GGUF files of all architectures share.

The keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Missing metadata have the same
defaults as in llama.cpp. GGUF does not name activations; families do.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from spec_jax.errors import CheckpointError
from spec_jax.models.config import Experts, TransformerConfig
from spec_jax.models.family import (
    Config,
    Part,
    TensorStore,
    WeightTable,
    fused,
    get,
    halves,
    in_qkv,
    integer,
    number,
    qkv_sizes,
    window,
)
from spec_jax.models.rotary import LongRopeScaling, RopeScaling, YarnScaling

GGUF_WEIGHTS: WeightTable = {
    "embed": "token_embd",
    "blocks.{}.attention_norm": "blk.{}.attn_norm",
    "blocks.{}.attention.query": "blk.{}.attn_q",
    "blocks.{}.attention.key": "blk.{}.attn_k",
    "blocks.{}.attention.value": "blk.{}.attn_v",
    "blocks.{}.attention.output": "blk.{}.attn_output",
    "blocks.{}.mlp_norm": "blk.{}.ffn_norm",
    "blocks.{}.mlp.gate": "blk.{}.ffn_gate",
    "blocks.{}.mlp.up": "blk.{}.ffn_up",
    "blocks.{}.mlp.down": "blk.{}.ffn_down",
    "final_norm": "output_norm",
    "head": "output",
}

EXPERTS_OF_GGUF: WeightTable = {
    "blocks.{}.mlp.router": "blk.{}.ffn_gate_inp",
    "blocks.{}.mlp.expert_gate": "blk.{}.ffn_gate_exps",
    "blocks.{}.mlp.expert_up": "blk.{}.ffn_up_exps",
    "blocks.{}.mlp.expert_down": "blk.{}.ffn_down_exps",
}

FUSED_QKV = in_qkv(lambda which: fused("blk.{}.attn_qkv", qkv_sizes, which))

QK_NORMS: WeightTable = {
    "blocks.{}.attention.query_norm": "blk.{}.attn_q_norm",
    "blocks.{}.attention.key_norm": "blk.{}.attn_k_norm",
}


def gguf_shape(
    metadata: Config,
    tensors: TensorStore,
    architecture: str,
    *,
    norm: Literal["rms", "layer"] = "rms",
    partial: bool = False,
    windowed: bool = True,
) -> dict[str, Any]:
    """Sizes, rotary positions, window and biases, whose keys all architectures share.

    Args:
      metadata: the metadata of the file.
      tensors: the tensors of the file.
      architecture: `general.architecture`, with which the keys begin.
      norm: the kind of its norms.
      partial: whether a part of each head may be rotated.
      windowed: whether layers may have a window; if not, GGUF does not say which ones do.

    Raises:
      CheckpointError: something is missing, or not supported.
    """

    def size(name: str, default: int | None = None) -> int:
        return integer(metadata, f"{architecture}.{name}", default)

    max_position = size("context_length")
    embed_size, num_heads = size("embedding_length"), size("attention.head_count")
    head_dim = size("attention.key_length", embed_size // num_heads)
    if "token_embd.weight" not in tensors.shapes:
        raise CheckpointError("the GGUF file has no tensor 'token_embd.weight'.")
    epsilon = "layer_norm_rms_epsilon" if norm == "rms" else "layer_norm_epsilon"
    sliding_window = window(metadata, f"{architecture}.attention.sliding_window", max_position)
    if sliding_window is not None and not windowed:
        raise CheckpointError(
            f"{architecture}.attention.sliding_window is {sliding_window}, less than the context "
            f"of {max_position}; spec-jax supports {architecture} without windows only."
        )

    def biased(*names: str) -> bool:
        return any(f"blk.0.{name}.bias" in tensors.shapes for name in names)

    return {
        "vocab_size": tensors.shapes["token_embd.weight"][0],
        "embed_size": embed_size,
        "num_layers": size("block_count"),
        "num_heads": num_heads,
        "num_kv_heads": size("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "mlp_size": size("feed_forward_length"),
        "max_position": max_position,
        "norm": norm,
        "norm_eps": number(metadata, f"{architecture}.attention.{epsilon}"),
        "qkv_bias": biased("attn_q", "attn_qkv"),
        "output_bias": biased("attn_output"),
        "mlp_bias": biased("ffn_up", "ffn_down"),
        **_rope(metadata, tensors, architecture, head_dim, partial),
        "sliding_window": sliding_window,
        "tied_head": "output.weight" not in tensors.shapes,
    }


def gguf_config(
    architecture: str,
    *,
    norm: Literal["rms", "layer"] = "rms",
    partial: bool = False,
    windowed: bool = True,
    sparse: bool = False,
    **fields: Any,
) -> Callable[[Config, TensorStore], TransformerConfig]:
    """Translates the metadata of one architecture.

    Args:
      architecture: see `gguf_shape`.
      norm: see `gguf_shape`.
      partial: see `gguf_shape`.
      windowed: see `gguf_shape`.
      sparse: whether models may have experts.
      **fields: arguments of `TransformerConfig.of` that all its models share.
    """

    def config_from_gguf(metadata: Config, tensors: TensorStore) -> TransformerConfig:
        shape = gguf_shape(
            metadata, tensors, architecture, norm=norm, partial=partial, windowed=windowed
        )
        experts = _experts(metadata, architecture, shape) if sparse else None
        return TransformerConfig.of(**{**shape, "experts": experts, **fields})

    return config_from_gguf


def _experts(metadata: Config, architecture: str, shape: Mapping[str, Any]) -> Experts | None:
    """The experts that GGUF metadata describe, in every layer."""
    if not metadata.get(f"{architecture}.expert_count"):
        return None
    return Experts(
        count=integer(metadata, f"{architecture}.expert_count"),
        per_token=integer(metadata, f"{architecture}.expert_used_count"),
        size=integer(metadata, f"{architecture}.expert_feed_forward_length", shape["mlp_size"]),
    )


def _paired(name: str, heads: str) -> Part:
    """A projection whose stored heads rotate neighbouring features; `heads` is their number."""

    def rows(config: TransformerConfig) -> np.ndarray:
        return halves(getattr(config, heads), config.head_dim, config.head_dim)

    return Part(name, rows)


PAIRED_QK: WeightTable = {
    "blocks.{}.attention.query": _paired("blk.{}.attn_q", "num_heads"),
    "blocks.{}.attention.key": _paired("blk.{}.attn_k", "num_kv_heads"),
}
"""Names of Llama and of architectures that llama.cpp rotates in the same way."""


def _rope(
    metadata: Config, tensors: TensorStore, architecture: str, head_dim: int, partial: bool
) -> dict[str, Any]:
    """`rope_theta`, `rope_fraction`, `rope_factor` and `rope_scaling` of `layer_stack`."""
    rope = f"{architecture}.rope"
    theta = number(metadata, f"{rope}.freq_base", 10000.0)
    rotated = integer(metadata, f"{rope}.dimension_count", head_dim)
    if rotated != head_dim and not partial:
        raise CheckpointError(
            f"{rope}.dimension_count is {rotated}; expected the full width of a head, {head_dim}."
        )
    fraction = rotated / head_dim
    if int(head_dim * fraction) < rotated:  # by rounding
        fraction = math.nextafter(fraction, 1.0)
    kind = get(metadata, f"{rope}.scaling.type", "none")
    factor, scaling = 1.0, None
    if "rope_factors_long.weight" in tensors.shapes:
        scaling = _longrope(metadata, tensors, rope)
    elif kind == "linear":
        factor = number(metadata, f"{rope}.scaling.factor")
    elif kind == "yarn":
        scaling = _yarn(metadata, rope)
    elif kind != "none":
        raise CheckpointError(
            f"the GGUF file has {rope}.scaling.type = {kind!r}; supported: none, linear, yarn, and "
            "LongRoPE's factors as tensors."
        )
    if "rope_freqs.weight" in tensors.shapes:
        scaling = _llama3(tensors, rotated, theta)
    return {
        "rope_theta": theta,
        "rope_fraction": fraction,
        "rope_factor": factor,
        "rope_scaling": scaling,
    }


def _yarn(metadata: Config, rope: str) -> YarnScaling:
    factor = number(metadata, f"{rope}.scaling.factor")
    return YarnScaling(
        factor=factor,
        original_max_position=integer(metadata, f"{rope}.scaling.original_context_length"),
        fast=number(metadata, f"{rope}.scaling.yarn_beta_fast", 32.0),
        slow=number(metadata, f"{rope}.scaling.yarn_beta_slow", 1.0),
        truncate=True,
        amplitude=(0.1 * math.log(factor) + 1.0)
        * number(metadata, f"{rope}.scaling.attn_factor", 1.0),
    )


def _longrope(metadata: Config, tensors: TensorStore, rope: str) -> LongRopeScaling:
    def divisors(name: str) -> tuple[float, ...]:
        if name not in tensors.shapes:
            raise CheckpointError(f"the GGUF file has no tensor {name!r}.")
        return tuple(float(each) for each in tensors.read(name))

    return LongRopeScaling(
        short=divisors("rope_factors_short.weight"),
        long=divisors("rope_factors_long.weight"),
        original_max_position=integer(metadata, f"{rope}.scaling.original_context_length"),
        amplitude=number(metadata, f"{rope}.scaling.attn_factor", 1.0),
    )


def _llama3(tensors: TensorStore, rotary_size: int, theta: float) -> RopeScaling:
    """Llama 3's scaling, which GGUF stores as one divisor per rotary frequency.

    All Llama 3 models share three of the four numbers; the fourth is the largest divisor.
    """
    divisors = tensors.read("rope_freqs.weight")
    scaling = RopeScaling(
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    exponents = np.arange(0, rotary_size, 2) / rotary_size
    wavelengths = 2 * math.pi * theta**exponents
    keep = np.clip((scaling.original_max_position / wavelengths - 1.0) / (4.0 - 1.0), 0.0, 1.0)
    expected = 1.0 / ((1 - keep) / scaling.factor + keep)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise CheckpointError(
            "tensor 'rope_freqs.weight' scales the rotary frequencies in another way than "
            "Llama 3, which is the only one supported."
        )
    return scaling
