"""How large a model is, and what shape a draft for it should have. Makes no arrays."""

import dataclasses
import math

import jax

from spec_jax.errors import ConfigError
from spec_jax.models.config import TransformerConfig
from spec_jax.models.model import Model


def parameter_count(config: TransformerConfig) -> int:
    """The number of parameters, exactly; a tied head counts once."""
    return sum(
        leaf.size for leaf in jax.tree.leaves(Model.abstract(config, dtype="float32").params)
    )


def layer_parameters(model: Model) -> int:
    """The number of parameters of a model's layers: what reads the tokens of a prompt."""
    layers = [each for name, each in model.weights.items() if name.startswith("blocks.")]
    return sum(math.prod(each.shape) for each in layers)


@dataclasses.dataclass(frozen=True)
class WideShallow:
    """Derives a draft's shape from its target's: far fewer layers, hardly narrower, no experts.

    On many devices a step runs two collectives per layer one after another, so a draft is fast if
    it is shallow, and it can be wide enough to be sharded like the target
    (Chen et al. 2023, arXiv 2302.01318). For Chinchilla 70B, 80 layers of 64 heads and 8192 wide,
    the defaults give that paper's draft: 8 layers of 48 heads and 6144 wide.

    Attributes:
      width_ratio: the draft's width as a part of the target's, in (0, 1].
      depth_ratio: the draft's layers as a part of the target's, in (0, 1].
      num_shards: shards of the heads in a layout; the number of heads becomes a multiple of it.
    """

    width_ratio: float = 0.75
    depth_ratio: float = 0.1
    num_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("width_ratio", "depth_ratio"):
            if not 0 < (value := getattr(self, name)) <= 1:
                raise ConfigError(f"{name} is {value!r}; give a number in (0, 1].")
        if self.num_shards < 1:
            raise ConfigError(f"num_shards is {self.num_shards!r}; give an integer >= 1.")

    def __call__(self, target: TransformerConfig) -> TransformerConfig:
        """The draft's shape: heads as wide as the target's, everything else in proportion.

        Its MLPs are dense, and as wide as the experts that a token of the target runs through.
        """
        experts = target.experts
        mlp_size = experts.per_token * experts.size if experts else target.mlp_size
        grouped = target.num_kv_heads < target.num_heads
        # Fewer key/value heads than query heads keep their number, since a layout shards them.
        step = math.lcm(self.num_shards, target.num_kv_heads if grouped else 1)
        heads = step * max(1, round(target.num_heads * self.width_ratio / step))

        def narrowed(size: int, multiple: int) -> int:
            return multiple * max(1, round(size * heads / target.num_heads / multiple))

        layers = target.resized(max(1, round(target.num_layers * self.depth_ratio))).layers
        return dataclasses.replace(
            target,
            embed_size=narrowed(target.embed_size, 1),
            layers=tuple(dataclasses.replace(layer, mlp="dense") for layer in layers),
            num_heads=heads,
            num_kv_heads=target.num_kv_heads if grouped else heads,
            mlp_size=narrowed(mlp_size, self.num_shards),
            experts=None,
        )
