"""Public test tools: tiny models, an exact decoder, and the battery that a drafter must pass."""

from spec_jax.evaluation.reference import ReferenceDecoder, reference_probabilities
from spec_jax.testing.lossless import check_lossless
from spec_jax.testing.models import first_layers, tiny_checkpoint, tiny_model

__all__ = [
    "ReferenceDecoder",
    "check_lossless",
    "first_layers",
    "reference_probabilities",
    "tiny_checkpoint",
    "tiny_model",
]
