"""Models from files: Hugging Face directories, GGUF files, recipes, buckets and the hub.

Weights are read from safetensors, GGUF, Orbax and CTranslate2 files only. Nothing is unpickled,
and no code that comes with a checkpoint is run.
"""

from spec_jax.checkpoints.checkpoint import Checkpoint
from spec_jax.checkpoints.conversion import convert
from spec_jax.checkpoints.generation_config import default_sampling_params
from spec_jax.checkpoints.loading import OpenCheckpoint, load, open_checkpoint
from spec_jax.checkpoints.reference import draft_form, locate

__all__ = [
    "Checkpoint",
    "OpenCheckpoint",
    "convert",
    "default_sampling_params",
    "draft_form",
    "load",
    "locate",
    "open_checkpoint",
]
