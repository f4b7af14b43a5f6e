"""Asks a server thousands of mixed requests: growth of memory, and failures.

    python -m benchmarks.server_soak                   # 10,000 requests of a tiny model
    python -m benchmarks.server_soak --minutes 60

Requests differ in length, sampling, grammar and endpoint; a part of the clients leaves early, reads
slowly, sends half a request and waits, or sends a body without end. Resident memory of the server
is read in the second half; the line through the readings says how much it grows.
"""

import argparse
import asyncio
import contextlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
import numpy as np
import psutil

from tests.checkpoints.tiny import CONFIG, llama_tensors, write_directory

CLIENTS = 24
READINGS = 40
"""How often memory is read in the second half."""
WORDS = ("the", "thin", "inn", "end", "a")


class Soak:
    """Clients of one server, and what they saw."""

    def __init__(self, address: str, process: psutil.Process, count: int, seconds: float):
        self.address, self._process = address, process
        self._count, self._seconds = count, seconds
        self._began = time.monotonic()
        self.asked = 0
        self.statuses: dict[int | str, int] = {}
        self.readings: list[tuple[int, int]] = []

    @property
    def done(self) -> float:
        """The part of the requests, or of the time, that is over."""
        return max(self.asked / self._count, (time.monotonic() - self._began) / self._seconds)

    async def run(self, seed: int, client: httpx2.AsyncClient) -> None:
        """Asks until the end."""
        rng = random.Random(seed)
        while self.done < 1:
            self.asked += 1
            try:
                status = await self._ask(rng, client)
            except (httpx2.HTTPError, OSError) as error:
                status = type(error).__name__
            self.statuses[status] = self.statuses.get(status, 0) + 1
            if self.done > 0.5 + len(self.readings) / (2 * READINGS):
                self.readings.append((self.asked, self._process.memory_info().rss))

    async def _ask(self, rng: random.Random, client: httpx2.AsyncClient) -> int | str:
        kind = rng.random()
        if kind < 0.01:
            return await self._half(
                rng.choice((b"POST /v1/com", b"POST / HTTP/1.1\r\nHost: x\r\n"))
            )
        if kind < 0.02:
            return await self._endless(client)
        path, body = self._request(rng)
        if rng.random() < 0.5:
            return (await client.post(path, json=body)).status_code
        leaves, pause = rng.random() < 0.2, rng.choice((0, 0, 0, 0.02))
        async with client.stream("POST", path, json={**body, "stream": True}) as response:
            async for _ in response.aiter_lines():
                await asyncio.sleep(pause)
                if leaves and rng.random() < 0.2:
                    return "left"
        return response.status_code

    def _request(self, rng: random.Random) -> tuple[str, dict]:
        text = " ".join(rng.choices(WORDS, k=rng.choice((1, 5, 40, 120))))
        body = {
            "max_tokens": rng.choice((1, 8, 16, 40)),
            **rng.choice(({}, {"temperature": 0}, {"top_p": 0.9}, {"seed": rng.randint(0, 99)})),
            **rng.choice(({}, {}, {}, {"stop": [rng.choice(WORDS)]}, {"frequency_penalty": 0.5})),
        }
        if rng.random() < 0.02:
            body["structured_outputs"] = {"regex": "[a-z]{2,6}( [0-9]{2})?"}
        if rng.random() < 0.02:
            body["max_tokens"] = -1
        if rng.random() < 0.5:
            return "/v1/completions", {"prompt": text, **body}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **body}

    async def _half(self, begin: bytes) -> str:
        host, port = self.address.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(begin)
        await asyncio.sleep(1)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return "half a request"

    async def _endless(self, client: httpx2.AsyncClient) -> int | str:
        async def parts():
            for _ in range(100):
                yield b" " * 2**20

        try:
            return (await client.post("/v1/completions", content=parts())).status_code
        except httpx2.HTTPError:
            return 413  # the answer came while the body was sent, and the connection was closed


async def soak(address: str, process: psutil.Process, count: int, seconds: float) -> Soak:
    """Asks with all clients."""
    result = Soak(address, process, count, seconds)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(base_url=address, timeout=120, limits=limits) as client:
        await asyncio.gather(*(result.run(seed, client) for seed in range(CLIENTS)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=0.0)
    options = parser.parse_args()
    count, seconds = options.requests, 1e9
    if options.minutes:
        count, seconds = 10**9, 60 * options.minutes
    config = CONFIG | {"max_position_embeddings": 512}
    with tempfile.TemporaryDirectory() as scratch, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        path = write_directory(Path(scratch) / "tiny", config, llama_tensors(config))
        command = [sys.executable, "-m", "spec_jax", "serve", "--target", str(path)]
        flags = ["--port", str(port), "--method", "prompt_lookup", "--max-queue", "16"]
        with subprocess.Popen([*command, *flags]) as server:
            try:
                address = f"http://127.0.0.1:{port}"
                while not _is_ready(address):
                    time.sleep(0.5)
                process = psutil.Process(server.pid)
                begin, result = (
                    time.monotonic(),
                    asyncio.run(soak(address, process, count, seconds)),
                )
            finally:
                server.terminate()
        code = server.wait()
    asked, bytes_ = np.array(result.readings, float).T
    growth = float(np.polyfit(asked, bytes_, 1)[0]) * (asked[-1] - asked[0]) / 1e6
    print(f"{result.asked} requests in {time.monotonic() - begin:.0f} s: {result.statuses}")
    print(f"memory {bytes_[0] / 1e6:.0f} to {bytes_[-1] / 1e6:.0f} MB, {growth:+.1f} MB by a line")
    print(f"exit code {code}")


def _is_ready(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health").is_success
    except httpx2.HTTPError:
        return False


if __name__ == "__main__":
    main()
