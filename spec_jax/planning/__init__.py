"""Plans: the memory and time of a target and its draft on a layout, without the devices."""

from spec_jax.planning.compiled import Program
from spec_jax.planning.plan import derived_draft, make_plan
from spec_jax.planning.report import Plan, Replicated, Section

__all__ = ["Plan", "Program", "Replicated", "Section", "derived_draft", "make_plan"]
