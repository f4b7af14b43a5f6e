"""How an `LLM` holds its models."""

from typing import ClassVar

from spec_jax.config.choices import Activations, KvCacheDtype, LlmDtype, Offload, Quantization
from spec_jax.config.fields import AtLeast0, config_class


@config_class
class LoadingOptions:
    """How an `LLM` holds its target, its draft and their caches."""

    GROUP: ClassVar[str] = "model"

    dtype: LlmDtype = "auto"
    """Dtype of weights and caches; auto is the machine's fastest that keeps what is stored."""
    quantization: Quantization = "auto"
    """How the target's matrices are kept: int8 and int4 round them, gguf keeps the blocks of a GGUF
    file."""
    activations: Activations = "auto"
    """What products with quantized matrices round their inputs to: int8 gives 32 neighbouring
    inputs 8 bits and a scale, as llama.cpp does; auto is int8 in native code on a CPU, else
    float32."""
    kv_cache_dtype: KvCacheDtype = "auto"
    """What caches hold: int8 keeps keys and values in 8 bits (default: auto, not rounded)."""
    offload: Offload = "none"
    """Host keeps the target's layers in host memory and streams them in every call, for targets
    that do not fit in the devices' memory."""
    resident_layers: AtLeast0 = 0
    """With --offload host, layers that stay on the devices: as many as fit."""
