"""From options to a model that is ready."""

import secrets

from spec_jax.cli.arguments import Options
from spec_jax.cli.screen import Screen
from spec_jax.llm import LLM


def load(options: Options, screen: Screen) -> LLM:
    """Loads target and draft, showing progress.

    Requests without a seed of their own get random ones.
    """
    screen.progress("loading")
    return LLM(
        options.target,
        speculative_config=options.speculative,
        seed=secrets.randbits(32),
        on_progress=screen.progress,
        **options.llm,
    )
