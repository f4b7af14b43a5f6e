"""Evaluation: the losslessness audit that users run on their own pair of models."""

from spec_jax.evaluation.audit import audit
from spec_jax.evaluation.verdict import Check, Report

__all__ = ["Check", "Report", "audit"]
