"""Plans: what a target and its draft will take on a layout, before a chip is rented."""

from spec_jax.planning.plan import make_plan
from spec_jax.planning.report import Plan, Replicated, Section

__all__ = ["Plan", "Replicated", "Section", "make_plan"]
