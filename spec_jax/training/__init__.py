"""Training drafts: a wide and shallow model is distilled from its target."""
