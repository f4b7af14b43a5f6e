"""Tokenizers, grammars, vocabularies, and translation between them."""
