"""From options to a model that is ready."""

import secrets

from spec_jax import distributed
from spec_jax.cli.arguments import Options
from spec_jax.cli.screen import Screen
from spec_jax.llm import LLM
from spec_jax.sharding import Layout


def load(options: Options, screen: Screen) -> LLM:
    """Joins the other processes of the layout, if any, and loads target and draft.

    Requests without a seed of their own get random ones. Processes other than the first fall
    silent.
    """
    screen.progress("loading")
    arguments = dict(options.llm)
    if "layout" in arguments:
        arguments["layout"] = layout = Layout.read(arguments["layout"])
        if layout.processes > 1:
            screen.claim_output()
        distributed.start(layout)
        if distributed.process()[0] > 0:
            screen.silence()
    return LLM(
        options.target,
        speculative_config=options.speculative,
        seed=distributed.from_first(secrets.randbits(32)),
        on_progress=screen.progress,
        **arguments,
    )
