"""Layouts: how the logical axes of models lie on a mesh of devices."""

from spec_jax.sharding.layout import Layout
from spec_jax.sharding.layout_file import ROLES, Chip, Rule
from spec_jax.sharding.placement import HOST_MEMORY, Placement

__all__ = ["HOST_MEMORY", "ROLES", "Chip", "Layout", "Placement", "Rule"]
