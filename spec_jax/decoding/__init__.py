"""The algorithm: pure functions on device; no I/O, no tokenizer."""
