"""Drafting methods, one per file, behind the protocol in `base`."""
