"""From options to a model that is ready."""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

from spec_jax import distributed
from spec_jax.cli.devices import ignore_absent_tpu
from spec_jax.cli.options import CompletedPrompts, SpeculationOptions
from spec_jax.cli.prompts import ChatPrompt, PromptText
from spec_jax.cli.screen import Screen
from spec_jax.llm import LLM, Prompt
from spec_jax.sharding import Layout
from spec_jax.text.chat_template import renderer


def connect(file: str | None, screen: Screen) -> Layout | None:
    """Reads a layout file and connects the processes; only the first process prints."""
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


def make_llm(
    target: str,
    screen: Screen,
    *,
    layout: str | None = None,
    seed: int | None = None,
    on_progress: Callable[[str], None] | None = None,
    **arguments: Any,
) -> LLM:
    """An `LLM` on the devices of a layout file, showing progress while it loads.

    Requests without a seed get random ones if there is no seed.
    """
    screen.progress("loading")
    return LLM(
        target,
        layout=connect(layout, screen),
        seed=distributed.from_first(lambda: secrets.randbits(32)) if seed is None else seed,
        on_progress=on_progress or screen.progress,
        **arguments,
    )


def load(
    options: SpeculationOptions,
    screen: Screen,
    *,
    chat: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> LLM:
    """Loads target and draft; for chats, what renders their messages starts meanwhile."""
    if chat:
        renderer.start()
    config = options.speculative
    llm = {"speculative_config": config, "on_progress": on_progress, **options.llm}
    return make_llm(options.target, screen, **llm)


def prompts_of(llm: LLM, options: CompletedPrompts, prompts: Sequence[PromptText]) -> list[Prompt]:
    """The texts, or the token ids of conversations and of chats that ask the texts."""
    return [
        each if isinstance(each, str) and not options.chat else _encode_chat(llm, options, each)
        for each in prompts
    ]


def _encode_chat(llm: LLM, options: CompletedPrompts, prompt: PromptText) -> list[int]:
    if isinstance(prompt, str):
        prompt = ChatPrompt([{"role": "user", "content": prompt}])
    return llm.encode_chat(
        prompt.messages,
        tools=options.tools if prompt.tools is None else prompt.tools,
        chat_template_kwargs=options.chat_template_kwargs,
    )


def job_summary(options: SpeculationOptions, llm: LLM) -> dict[str, Any]:
    """The models and settings of a command, as its record and its first line show them."""
    config = options.speculative
    return {
        "target": options.target,
        "draft": config.draft,
        "method": config.method,
        "verification": config.verification,
        "num_speculative_tokens": config.lookahead,
        "dtype": llm.dtype,
        "quantization": llm.quantization,
    }
