"""`spec-jax serve`: an HTTP server."""

import asyncio
import ipaddress
import socket
import threading

from spec_jax.async_llm import AsyncLLM
from spec_jax.cli.decoding_options import ServeOptions
from spec_jax.cli.loading import load
from spec_jax.cli.screen import Screen
from spec_jax.config import SamplingParams
from spec_jax.errors import ConfigError, extra
from spec_jax.sharding import Layout

WAYS = (SamplingParams(), SamplingParams(temperature=1), SamplingParams(temperature=1, top_p=0.9))
"""Ways of sampling that nobody waits for the compiler with."""


def run(options: ServeOptions, screen: Screen) -> int:
    """Serves until a signal comes; returns the exit code."""
    with extra("serve"):
        from spec_jax.serving.server import Server
        from spec_jax.serving.service import Service
    layout = options.llm.get("layout")
    if layout and (count := Layout.read(layout).processes) > 1:
        raise ConfigError(
            f"layout {layout} is for {count} processes, and a server is one; give serve a "
            "layout of one process, and start several servers behind a load balancer."
        )
    listening = _listen(options.host, options.port)  # a taken port is found before a model loads
    with listening:

        def show(message: str) -> None:
            # While it serves, nobody watches what is compiled.
            if threading.current_thread() is threading.main_thread():
                screen.progress(message)

        llm = load(options, screen, chat=True, on_progress=show)
        names = options.served_model_name or (llm.name,)
        address = f"http://{options.host}:{listening.getsockname()[1]}"

        def announce() -> None:
            screen.settle()
            screen.note(f"serving {names[0]} on {address}")

        def warm_up() -> None:
            if not options.lazy:
                llm.warm_up_batches(WAYS)

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
            await server.run(listening)

        asyncio.run(serve())
    return 0


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
