"""Requests and batches: compiled programs, host rounds, methods, detokenization."""
