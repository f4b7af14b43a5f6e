"""Models that the tests of plans share: small, and of more than one depth."""

from spec_jax.checkpoints.shape import Shape
from spec_jax.models.config import TransformerConfig
from spec_jax.sharding import Layout
from tests.reshaped import reshaped

VOCAB = 2560
TARGET = TransformerConfig.of(
    vocab_size=VOCAB,
    embed_size=256,
    num_layers=2,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    mlp_size=512,
    max_position=512,
)


def shape(**changes) -> Shape:
    return Shape("tiny", reshaped(TARGET, **changes))


def shape_for(layout: Layout, **changes) -> Shape:
    """The same with heads enough for every chip of a layout."""
    heads = max(TARGET.num_heads, layout.size)
    return shape(num_heads=heads, num_kv_heads=heads, **changes)


def keeps_its_caches(section) -> bool:
    """Whether the results of a compiled program take the place of all its caches."""
    return section.program.aliased_bytes >= section.cache_bytes
