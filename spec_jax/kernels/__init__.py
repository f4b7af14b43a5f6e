"""Products of activations with weights: plain arrays, quantized, or packed for native code."""

from spec_jax.kernels.products import Weight, columns, precision_of, products, take_outputs
from spec_jax.kernels.quantize import Quantized, quantize
from spec_jax.kernels.weights import PackedWeight, QuantizedWeight

__all__ = [
    "PackedWeight",
    "Quantized",
    "QuantizedWeight",
    "Weight",
    "columns",
    "precision_of",
    "products",
    "quantize",
    "take_outputs",
]
