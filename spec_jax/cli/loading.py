"""From options to a model that is ready."""

import secrets
from typing import Any

from spec_jax import distributed
from spec_jax.cli.devices import ignore_absent_tpu
from spec_jax.cli.options import SpeculationOptions
from spec_jax.cli.screen import Screen
from spec_jax.llm import LLM
from spec_jax.sharding import Layout


def connect(file: str | None, screen: Screen) -> Layout | None:
    """Reads a layout file and joins the other processes; only the first process prints."""
    ignore_absent_tpu()
    if file is None:
        return None
    layout = Layout.read(file)
    if layout.processes > 1:
        screen.claim_output()
    screen.progress("waiting for the devices")
    distributed.start(layout)
    if distributed.process()[0] > 0:
        screen.silence()
    return layout


def job_summary(options: SpeculationOptions, llm: LLM) -> dict[str, Any]:
    """What a command was job_summary to look at, as its record and its first line have it."""
    how = options.speculative
    return {
        "target": options.target,
        "draft": how.draft,
        "method": how.method,
        "verification": how.verification,
        "num_speculative_tokens": how.lookahead,
        "dtype": llm.dtype,
        "quantization": llm.quantization,
    }


def load(options: SpeculationOptions, screen: Screen) -> LLM:
    """Loads target and draft, showing progress.

    Requests without a seed get random ones.
    """
    screen.progress("loading")
    arguments = dict(options.llm)
    layout = connect(arguments.pop("layout", None), screen)
    return LLM(
        options.target,
        speculative_config=options.speculative,
        layout=layout,
        seed=distributed.from_first(lambda: secrets.randbits(32)),
        on_progress=screen.progress,
        **arguments,
    )
