"""Benchmarks on the user's own models: measuring, files of results, and reports of them."""
