"""The flags that name a model and say how it is held. Imports no JAX."""

from collections.abc import Callable, Sequence
from typing import Any

from spec_jax.cli.parser import Parser, whole
from spec_jax.config import (
    DTYPES,
    KV_CACHE_DTYPES,
    LLM_DTYPES,
    OFFLOADS,
    PLAN_QUANTIZATIONS,
    QUANTIZATIONS,
)
from spec_jax.errors import ConfigError, did_you_mean

LLM_OPTIONS = (
    *("layout", "dtype", "quantization", "kv_cache_dtype"),
    *("offload", "resident_layers", "max_model_len"),
)
"""Arguments of `LLM` that are flags of every command that makes one."""

SHAPE_DTYPE = "bfloat16"
"""The default dtype of a model whose weights are not read."""


def require_target(given: dict[str, Any], dtypes: Sequence[str] = DTYPES) -> None:
    """Checks the arguments that every command that loads a model has in common."""
    if not given.get("target"):
        raise ConfigError(
            "no target given; name the model with --target: a Hugging Face directory, a .gguf "
            "file, a recipe (.toml) or a hub id."
        )
    check_names(
        ("dtype", given.get("dtype"), dtypes),
        ("quantization", given.get("quantization"), QUANTIZATIONS),
        ("kv_cache_dtype", given.get("kv_cache_dtype"), KV_CACHE_DTYPES),
        ("offload", given.get("offload"), OFFLOADS),
    )


def require_shape(given: dict[str, Any]) -> None:
    """Checks the arguments that every command that reads only a model's shape has in common."""
    if not given.get("target"):
        raise ConfigError("no target given; name the target model with --target.")
    if not given.get("layout"):
        raise ConfigError("no layout given; name the layout with --layout, such as tpu-v4-16.")
    quantization = given.get("quantization")
    check_names(
        ("dtype", given.get("dtype"), DTYPES),
        *(
            ("quantization", each, PLAN_QUANTIZATIONS)
            for each in ([quantization] if isinstance(quantization, str) else quantization or ())
        ),
        ("kv_cache_dtype", given.get("kv_cache_dtype"), KV_CACHE_DTYPES),
        ("offload", given.get("offload"), OFFLOADS),
    )


def check_names(*fields: tuple[str, str | None, Sequence[str]]) -> None:
    """Refuses a field whose value, if any, is none of those known."""
    for field, name, known in fields:
        if name is not None and name not in known:
            raise ConfigError(f"{field} is {name!r}.{did_you_mean(name, known)}")


def add_reference(
    group: Any, dtypes: Sequence[str] = DTYPES, dtype_note: str = "of weights and caches"
) -> None:
    """The flags that name a model, its layout and its dtype."""
    group.add_argument(
        "--target",
        "--model",
        metavar="REF",
        help="the model: a Hugging Face directory, one that `spec-jax convert` wrote, a .gguf "
        "file, a recipe (.toml), a name such as smollm2-135m-instruct, gs://BUCKET/FOLDER, "
        "s3://BUCKET/FOLDER or a hub id org/name[@revision]",
    )
    group.add_argument(
        "--layout",
        metavar="FILE",
        help="how models are sharded over several devices or processes: a layout file, or a name "
        "such as cpu-8 (default: one device)",
    )
    group.add_argument(
        "--dtype", metavar="|".join(dtypes), help=f"{dtype_note} (default: {dtypes[0]})"
    )


def add_shape(group: Any, quantization: Callable[[str], Any] = str) -> None:
    """The flags that name a model of which only the shape is read, its layout and its dtypes.

    Args:
      group: of flags.
      quantization: `type=` of its flag.
    """
    group.add_argument(
        "--target",
        "--model",
        metavar="REF",
        help="target model, of which only the shape is read: a Hugging Face directory, a .gguf "
        "file, a recipe (.toml) or a hub id",
    )
    group.add_argument("--layout", metavar="FILE", help="topology and sharding (sharding/*.toml)")
    group.add_argument(
        "--dtype",
        metavar="|".join(DTYPES),
        help=f"of weights and caches (default: {SHAPE_DTYPE})",
    )
    group.add_argument(
        "--quantization",
        type=quantization,
        metavar="|".join(PLAN_QUANTIZATIONS),
        help="of the matrices of both models (default: none)",
    )


def add_caches(group: Any) -> None:
    """The flags that say what caches hold."""
    group.add_argument(
        "--kv-cache-dtype",
        metavar="|".join(KV_CACHE_DTYPES),
        help="int8 keeps keys and values in 8 bits (default: auto, not rounded)",
    )
    group.add_argument(
        "--max-model-len",
        type=whole,
        metavar="N",
        help="most tokens of prompt and completion together (default: the model's context)",
    )


def add_model(parser: Parser) -> Any:
    """The flags of the target and of what it may hold; returns their group."""
    group = parser.add_argument_group("model")
    add_reference(
        group,
        LLM_DTYPES,
        "of weights and caches; auto is the machine's fastest that keeps what is stored",
    )
    group.add_argument(
        "--quantization",
        metavar="|".join(QUANTIZATIONS),
        help="how the target's matrices are kept: int8 and int4 round them, gguf keeps a .gguf "
        "file's own blocks (default: auto)",
    )
    add_caches(group)
    group.add_argument(
        "--offload",
        metavar="|".join(OFFLOADS),
        help="host keeps the target's layers in host memory and streams them in every call, for "
        "targets that do not fit in the devices' memory (default: none)",
    )
    group.add_argument(
        "--resident-layers",
        type=whole,
        metavar="N",
        help="with --offload host, layers that stay on the devices: as many as fit (default: 0)",
    )
    return group
