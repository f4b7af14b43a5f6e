"""Plans: the memory and time of a target and its draft on a layout, without the devices."""

from spec_jax.planning.ahead import Compilation, Workload, compile_ahead
from spec_jax.planning.compiled import CompiledProgram
from spec_jax.planning.plan import derived_draft, make_plan
from spec_jax.planning.plan_figures import CallPlan, Plan, PrefillPlan, Replicated
from spec_jax.planning.search import LOOKAHEADS, Candidate, Search, draft_layouts, search

__all__ = [
    "LOOKAHEADS",
    "CallPlan",
    "Candidate",
    "Compilation",
    "CompiledProgram",
    "Plan",
    "PrefillPlan",
    "Replicated",
    "Search",
    "Workload",
    "compile_ahead",
    "derived_draft",
    "draft_layouts",
    "make_plan",
    "search",
]
