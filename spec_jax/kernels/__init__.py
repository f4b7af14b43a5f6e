"""Products of activations with weights: plain arrays, quantized, or packed for native code."""

from spec_jax.kernels.experts import Tiles, expert_products
from spec_jax.kernels.packed_weight import PackedWeight
from spec_jax.kernels.products import Weight, columns, precision_of, products, take_outputs
from spec_jax.kernels.quantize import INT4, INT8, Quantized, QuantizedForm, quantize
from spec_jax.kernels.quantized_weight import QuantizedWeight, part_specs

__all__ = [
    "INT4",
    "INT8",
    "PackedWeight",
    "Quantized",
    "QuantizedForm",
    "QuantizedWeight",
    "Tiles",
    "Weight",
    "columns",
    "expert_products",
    "part_specs",
    "precision_of",
    "products",
    "quantize",
    "take_outputs",
]
