"""`spec-jax serve`: an HTTP server."""

import asyncio
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from spec_jax import distributed
from spec_jax.async_llm import AsyncLLM, follow
from spec_jax.audio.wave import RATE
from spec_jax.cli.loading import connect, load
from spec_jax.cli.screen import Screen
from spec_jax.cli.server_options import ServeOptions
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError, extra
from spec_jax.llm import LLM

_KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1},
    {"temperature": 1, "top_p": 0.9},
    {"presence_penalty": 0.1},
    {"temperature": 1, "top_p": 0.9, "presence_penalty": 0.1},
)
WAYS = [SamplingParams(**kind, logprobs=count) for count in (None, 0) for kind in _KINDS]
"""Ways of sampling that nobody waits for the compiler with."""


def run(options: ServeOptions, screen: Screen) -> int:
    """Serves until a signal comes; returns the exit code."""
    with extra("serve"):
        from spec_jax.serving.server import Server
        from spec_jax.serving.service import Service
    connect(options.llm.get("layout"), screen)
    number, count = distributed.process()
    listening: socket.socket | None = None

    def listen() -> None:
        nonlocal listening
        listening = _listen(options.host, options.port)

    distributed.from_first(listen)  # a taken port is found before a model loads

    def show(message: str) -> None:
        # While it serves, nobody watches what is compiled.
        if threading.current_thread() is threading.main_thread():
            screen.progress(message)

    llm = load(options, screen, chat=True, on_progress=show)
    if count > 1 and llm.reads_speech:
        raise ConfigError(
            f"{llm.name} reads speech, which is served by one process; give serve a layout of one."
        )

    def warm_up() -> None:
        if options.lazy:
            return
        if llm.reads_speech:
            llm.transcribe(np.zeros((RATE,), np.float32))
        else:
            llm.warm_up(WAYS, num_seqs=llm.max_num_seqs)

    if number > 0:
        _follow(llm, warm_up)
        return 0
    assert listening is not None
    with listening as connected:
        names = options.served_model_name or (llm.name,)
        address = f"http://{options.host}:{listening.getsockname()[1]}"

        def announce() -> None:
            screen.settle()
            screen.note(f"serving {names[0]} on {address}")

        if not options.api_key and not _is_local(options.host):
            screen.note(
                f"whoever reaches {address} may ask: there is no API key; give one with --api-key."
            )

        if not options.lazy:
            screen.progress("compiling")  # here: a screen belongs to the main thread

        async def serve() -> None:
            server = Server(
                Service(
                    AsyncLLM(llm, options.max_queue),
                    names,
                    options.metrics_prefix,
                    options.request_timeout,
                ),
                warm_up=warm_up,
                shutdown_seconds=options.shutdown_timeout,
                api_keys=options.api_key,
                origins=options.allow_origin,
                on_ready=announce,
            )
            server.stop_at_signals()
            await server.run(connected)

        asyncio.run(serve())
    return 0


def _follow(llm: LLM, warm_up: Callable[[], None]) -> None:
    """Decodes with process 0, which ends when a signal comes, and then ends this process too."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: None)
    warm_up()
    follow(llm)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error}; give another --host or --port."
        ) from error
    return listening


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
