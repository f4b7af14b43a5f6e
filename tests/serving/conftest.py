"""A server of a tiny model in a thread of the tests' process."""

import asyncio
import contextlib
import socket
import threading

import openai
import pytest

from spec_jax import LLM
from spec_jax.async_llm import AsyncLLM
from spec_jax.serving.server import Server
from spec_jax.serving.service import Service
from tests.checkpoints import tiny

NAME = "tiny"


@pytest.fixture(scope="package")
def directories(tmp_path_factory):
    return tiny.write_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="package")
def plain(directories):
    return LLM(str(directories / "target"), max_num_seqs=4)


@contextlib.contextmanager
def serving(llm, *, names=(NAME,), max_queue=None, request_seconds=None, **options):
    """Serves a model; yields its address without a slash at the end."""
    listening = socket.create_server(("127.0.0.1", 0))
    ready, started = threading.Event(), {}

    async def serve():
        service = Service(AsyncLLM(llm, max_queue), names, request_seconds=request_seconds)
        server = Server(service, on_ready=ready.set, shutdown_seconds=5, **options)
        started.update(server=server, service=service, loop=asyncio.get_running_loop())
        await server.run(listening)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(200)
        address = Address(f"http://127.0.0.1:{listening.getsockname()[1]}")
        address.service = started["service"]
        yield address
    finally:
        started["loop"].call_soon_threadsafe(started["server"].stop)
        thread.join(30)
        listening.close()
        assert not thread.is_alive()


class Address(str):
    """An address, and the service behind it."""

    service: Service


@pytest.fixture(scope="package", params=["prompt_lookup"])
def method(request):
    return request.param


@pytest.fixture(scope="package")
def drafting(plain, directories):
    return plain.with_speculation(
        {
            "method": "draft_model",
            "draft": str(directories / "draft"),
            "draft_length_policy": "constant",
        }
    )


@pytest.fixture(scope="package")
def address(drafting):
    with serving(drafting) as address:
        yield address


@pytest.fixture
def client(address):
    with openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0) as client:
        yield client
