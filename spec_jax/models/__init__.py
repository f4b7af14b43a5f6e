"""The model stack, and one small file per family."""
