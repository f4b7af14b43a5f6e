"""`spec-jax serve` beside llama-cpp-python's server and offline decoding, on the same requests.

    python -m benchmarks.servers --target checkpoints/smollm2-135m-instruct.toml \\
      --gguf model.gguf --llama-python /path/to/python

Both servers run one after the other in each repeat, with the machine's threads; clients ask in a
closed loop. Offline, `LLM.generate` decodes the same requests at once. The questions are chat
prompts of a set, answered greedily up to a number of tokens.
"""

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import httpx2

from spec_jax.benchmarking import prompts
from spec_jax.benchmarking.server_load import LoadClient, Question, Summary, closed_loop


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Serving:
    """A server as a process, while it is asked."""

    def __init__(self, command: list[str], port: int):
        nowhere = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=nowhere, stderr=nowhere)
        self.address = f"http://127.0.0.1:{port}"

    def __enter__(self) -> "Serving":
        end = time.monotonic() + 900
        while time.monotonic() < end:
            assert self._process.poll() is None, "the server has ended"
            try:
                if httpx2.get(f"{self.address}/v1/models", timeout=5).is_success:
                    health = httpx2.get(f"{self.address}/health", timeout=5)
                    if health.status_code in (200, 404):
                        return self
            except httpx2.HTTPError:
                pass
            time.sleep(0.5)
        raise TimeoutError("the server is not ready")

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait(60)


async def measure(address: str, questions: list[Question], clients: int, fields: dict) -> Summary:
    async with LoadClient(address, None, fields) as client:
        await client.choose_model(None)
        await client.ask(questions[0], 0.0)
        return Summary.of(await closed_loop(client, questions, clients), 1.0, 0.1)


def offline(options: argparse.Namespace, chosen: list, clients: int) -> float:
    """Tokens a second of `LLM.generate`, the second time."""
    from spec_jax import LLM, SamplingParams

    config = {"method": options.method} if options.method else None
    if options.draft:
        config = {"draft": options.draft}
    llm = LLM(options.target, speculative_config=config, max_num_seqs=min(clients, options.slots))
    ids = [llm.encode_chat([{"role": "user", "content": each.text}]) for each in chosen]
    sampling = SamplingParams(max_tokens=options.max_tokens, ignore_eos=True)
    speeds = []
    for _ in range(1 + options.repeats):
        begin = time.perf_counter()
        outputs = llm.generate(ids, sampling)
        tokens = sum(len(each.token_ids) for each in outputs)
        speeds.append(tokens / (time.perf_counter() - begin))
    return statistics.median(speeds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--method", default="")
    parser.add_argument("--gguf", help="the target's file, for llama-cpp-python")
    parser.add_argument("--llama-python", help="an interpreter with llama-cpp-python[server]")
    parser.add_argument("--prompt-set", default="chat")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--slots", type=int, help="rows of a batch (default: the most clients)")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    options.slots = options.slots or max(options.clients)
    few = prompts.load(options.prompt_set).some(options.requests).prompts
    chosen = [few[i % len(few)] for i in range(options.requests)]
    questions = [Question.of(each) for each in chosen]
    fields = {"max_tokens": options.max_tokens, "temperature": 0}
    results: dict[tuple[str, int], list[Summary]] = {}
    for repeat in range(options.repeats):
        for name in ("spec-jax", "llama.cpp") if options.llama_python else ("spec-jax",):
            port = free_port()
            command = [sys.executable, "-m", "spec_jax", "serve", "--target", options.target]
            command += ["--port", str(port), "--max-num-seqs", str(options.slots)]
            command += ["--draft", options.draft] if options.draft else []
            command += ["--method", options.method] if options.method else []
            more = {"ignore_eos": True}
            if name == "llama.cpp":
                threads = str(os.cpu_count())
                command = [options.llama_python, "-m", "llama_cpp.server"]
                command += ["--model", options.gguf, "--port", str(port), "--n_ctx", "4096"]
                command += ["--n_threads", threads, "--n_threads_batch", threads]
                command += ["--interrupt_requests", "false"]  # it would end one for the next
                more = {}
            with Serving(command, port) as server:
                for clients in options.clients:
                    summary = asyncio.run(
                        measure(server.address, questions, clients, fields | more)
                    )
                    results.setdefault((name, clients), []).append(summary)
                    print(repeat, name, clients, summary, flush=True)
    for (name, clients), several in results.items():
        speed = statistics.median(each.tokens_per_second for each in several)
        first = statistics.median(each.first[0] for each in several)
        print(f"{name}, {clients} clients: {speed:.1f} tokens/s, first {1000 * first:.0f} ms")
    for clients in options.clients:
        print(f"offline, {clients} at once: {offline(options, chosen, clients):.1f} tokens/s")


if __name__ == "__main__":
    main()
