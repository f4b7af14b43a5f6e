"""Options of the compiler: one place chooses them for every program of the package."""

import jax.numpy as jnp
from jax.typing import DTypeLike

CompilerOptions = dict[str, str | bool]

_YNNPACK = "xla_cpu_experimental_ynn_fusion_type"


def compiler_options(platform: str, dtype: DTypeLike) -> CompilerOptions:
    """The compiler options of programs whose weights have this dtype.

    XLA:CPU's default hands a product to YNNPACK together with the reduction that follows it, and
    jax 0.10.2 then computes the last of 32,769 rows wrongly (jax issue 39103). Neither setting
    below fuses the two:

    - bfloat16: YNNPACK gets single products. It has the only native bfloat16 kernel.
    - float32: YNNPACK gets nothing. For several rows it repacks the weight at every call; Eigen's
      products take as long as for one row. LLVM compiles products of one row, with vectors of 256
      bits unless told otherwise.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      dtype: of the weights.
    """
    if platform != "cpu":
        return {}
    if jnp.dtype(dtype) == jnp.float32:
        return {_YNNPACK: "", "xla_cpu_prefer_vector_width": "512"}
    return {_YNNPACK: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
