"""`spec-jax serve` as a process: it says where it is, answers, and ends as it is told to."""

import json
import signal
import socket
import subprocess
import time

import httpx2 as httpx
import pytest

from tests.cli.harness import spawn
from tests.serving.conftest import directories  # noqa: F401 (a fixture)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@pytest.fixture
def served(directories):  # noqa: F811
    processes = []

    def start(*flags):
        port = free_port()
        target = ("--target", str(directories / "target"), "--port", str(port))
        process = spawn("serve", *target, *flags, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        return process, f"http://127.0.0.1:{port}"

    yield start
    for process in processes:
        process.kill()
        process.wait()
        process.stderr.close()


def wait_ready(process, address):
    """Waits until it takes requests; before, it answers that it does not, or not at all."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert process.poll() is None, process.stderr.read()
        try:
            status = httpx.get(f"{address}/health").status_code
        except httpx.ConnectError:
            status = None
        if status == 200:
            return
        assert status in (None, 503)
        time.sleep(0.2)
    raise AssertionError("it is not ready")


def test_sigterm_ends_it_once_answers_are_complete(served):
    process, address = served("--lazy", "--served-model-name", "a", "--served-model-name", "b")
    wait_ready(process, address)
    names = [each["id"] for each in httpx.get(f"{address}/v1/models").json()["data"]]
    assert names == ["a", "b"]
    body = {"prompt": "the", "max_tokens": 300, "ignore_eos": True, "stream": True, "model": "b"}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert json.loads(next(lines)[6:])["model"] == "a"
        process.send_signal(signal.SIGTERM)
        last = [each for each in lines if each][-2:]
    assert json.loads(last[0][6:])["choices"][0]["finish_reason"] == "length"
    assert last[1] == "data: [DONE]"
    assert process.wait(30) == 0
    said = process.stderr.read()
    assert f"serving a on {address}" in said and "Traceback" not in said


def test_a_second_signal_ends_it_at_once(served):
    process, address = served("--lazy", "--shutdown-timeout", "300")
    wait_ready(process, address)
    body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 64}
    with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        process.wait(30)
    assert time.monotonic() - begin < 10


def test_mistakes_are_found_before_a_model_is_loaded(served, directories):  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        process, _ = served("--port", port)
        assert process.wait(60) == 2
        assert f"port {port}" in process.stderr.read()
    process, _ = served("--host", "no.such.host.invalid")
    assert process.wait(60) == 2 and "no.such.host.invalid" in process.stderr.read()


def test_an_open_server_says_that_it_is_open(served):
    process, address = served("--host", "0.0.0.0", "--max-num-seqs", "1")
    wait_ready(process, address)
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert "--api-key" in process.stderr.read()
