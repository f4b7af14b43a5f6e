"""Logits to tokens: what target and drafters share, so that they cannot differ."""
