"""Runs the application: from the first compiled program to the last answer."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence

import uvicorn
from starlette.applications import Starlette

from spec_jax.serving.app import make_app
from spec_jax.serving.service import Service

KEEP_ALIVE_SECONDS = 30
"""How long an idle connection stays open."""


class Server:
    """A server of one model.

    `stop` lets it take no more requests, finish those that it has within `shutdown_seconds`, and
    end; called again, it ends at once.

    Args:
      service: the model.
      warm_up: compiles programs before the server is ready; runs in a thread.
      shutdown_seconds: how long requests may take after `stop`.
      api_keys, origins: see `make_app`.
      on_ready: called once requests are taken.
    """

    def __init__(
        self,
        service: Service,
        *,
        warm_up: Callable[[], None] = lambda: None,
        shutdown_seconds: float = 30.0,
        api_keys: Sequence[str] = (),
        origins: Sequence[str] = (),
        on_ready: Callable[[], None] = lambda: None,
    ):
        self._service, self._warm_up = service, warm_up
        self._shutdown_seconds, self._on_ready = shutdown_seconds, on_ready
        app = make_app(service, api_keys=api_keys, origins=origins, lifespan=self._lifespan)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,  # what is left then is cut off
            server_header=False,
        )
        self._uvicorn = _Uvicorn(config)
        self._stopping = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self, listening: socket.socket) -> None:
        """Serves on a socket until it is stopped.

        Raises:
          Exception: the error of a warm-up that failed.
        """
        await self._uvicorn.serve([listening])
        if self._failure is not None:
            raise self._failure

    def stop_at_signals(self) -> None:
        """Lets SIGTERM and SIGINT stop it; in the main thread alone."""
        for each in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(each, self.stop)

    def stop(self) -> None:
        """Ends it; in the event loop's thread."""
        self._service.is_ready = False
        if self._stopping.is_set():
            self._uvicorn.force_exit = True
            self._uvicorn.should_exit = True
        self._stopping.set()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(each) for each in (self._make_ready(), self._drain())]
        try:
            yield
        finally:
            for each in tasks:
                each.cancel()
            await self._service.engine.shutdown()

    async def _make_ready(self) -> None:
        try:
            await asyncio.to_thread(self._warm_up)
        except Exception as error:
            self._failure = error
            self._uvicorn.should_exit = True
            return
        if not self._stopping.is_set():
            self._service.is_ready = True
            self._on_ready()

    async def _drain(self) -> None:
        await self._stopping.wait()
        deadline = asyncio.get_running_loop().time() + self._shutdown_seconds
        while self._service.engine.num_calls and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # the last events are on their way
        self._uvicorn.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Leaves signals to `Server`."""

    @contextlib.contextmanager
    def capture_signals(self):
        yield
