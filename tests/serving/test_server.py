"""What surrounds an answer: keys, sizes, full queues, clients that leave, the end of the server."""

import asyncio
import json
import random
import socket
import time

import httpx2 as httpx
import pytest

from spec_jax import LLM, SamplingParams
from spec_jax.async_llm import AsyncLLM
from spec_jax.cli.serve import WAYS
from spec_jax.engine import programs
from spec_jax.serving.server import Server
from spec_jax.serving.service import Service
from tests.checkpoints import tiny
from tests.serving.conftest import NAME, serving

PROMPTS = ["the thin thing in the", "a", "and then the end of the the the", "in the end"]
LOOKUP = {"method": "prompt_lookup", "draft_length_policy": "constant"}
LONG = {"prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def error_of(response):
    (error,) = response.json().values()
    assert set(error) == {"message", "type", "param", "code"}
    return response.status_code, error["code"], error["message"]


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_key_is_asked_for_everywhere_but_where_orchestrators_look(plain):
    keys = {"api_keys": ("one", "two")}
    with serving(plain, **keys) as address, httpx.Client(base_url=address) as client:
        for path in ("/health", "/metrics", "/version"):
            assert client.get(path).status_code == 200
        assert error_of(client.get("/v1/models"))[:2] == (401, "invalid_api_key")
        for key in ("three", "onetwo", "\u00ff"):
            headers = {b"authorization": f"Bearer {key}".encode()}
            assert client.get("/v1/models", headers=headers).status_code == 401
        for headers in ({"Authorization": "Bearer two"}, {"X-Api-Key": "one"}):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.post("/detokenize", json={"tokens": [1]}).status_code == 401


@pytest.mark.parametrize(
    ("content", "status", "said"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b"[1]", 400, "no object"),
        (b'{"prompt": NaN}', 400, "NaN"),
        (b"\xff", 400, "not JSON"),
        (b"[" * 100_000, 400, "not JSON"),
        (b" " * (2**25 + 1), 413, "33554432 bytes"),
    ],
)
def test_a_body_that_is_no_request_is_refused(address, content, status, said):
    response = httpx.post(f"{address}/v1/completions", content=content)
    assert error_of(response)[0] == status and said in error_of(response)[2]


@pytest.mark.parametrize("path", ["/v1/completions", "/nowhere"])
def test_a_client_that_sends_first_and_reads_later_gets_its_answer(address, path):
    """Closing a connection with unread bytes makes the kernel drop what was sent to the client."""
    host, port = address.removeprefix("http://").split(":")
    body = b" " * (2**25 + 1)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    for _ in range(5):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            received = b""
            while part := connection.recv(2**16):
                received += part
        assert received.startswith(b"HTTP/1.1 4") and received.endswith(b"}")


def test_a_body_of_unknown_length_is_bounded(address):
    def endless():
        while True:
            yield b" " * 2**20

    response = httpx.post(f"{address}/v1/completions", content=endless())
    assert error_of(response)[0] == 413


def test_routes_that_there_are_not_answer_in_the_same_form(address):
    assert error_of(httpx.get(f"{address}/v1/nothing"))[0] == 404
    assert error_of(httpx.get(f"{address}/v1/completions"))[0] == 405


def test_tokens_there_and_back(address, plain):
    text = "the thin grüße"
    body = {"prompt": text, "add_special_tokens": False, "return_token_strs": True}
    answer = httpx.post(f"{address}/tokenize", json=body).json()
    assert answer["tokens"] == plain.tokenizer.encode(text, False)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == plain.max_model_len
    back = httpx.post(f"{address}/detokenize", json={"tokens": answer["tokens"]}).json()
    assert back == {"prompt": text}
    messages = [{"role": "user", "content": "the"}]
    ids = httpx.post(f"{address}/tokenize", json={"messages": messages}).json()["tokens"]
    assert ids == plain.encode_chat(messages)
    wrong = httpx.post(f"{address}/detokenize", json={"tokens": [-1]})
    assert error_of(wrong)[0] == 400


def test_a_full_queue_answers_at_once_and_nobody_starves(plain, monkeypatch):
    monkeypatch.setattr(plain, "max_num_seqs", 2)

    async def ask(client):
        begin = time.perf_counter()
        response = await client.post("/v1/completions", json=LONG)
        return response.status_code, time.perf_counter() - begin, response

    async def main(address):
        limits = httpx.Limits(max_connections=32)
        async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(ask(client) for _ in range(16)))

    with serving(plain, max_queue=3) as address:
        answers = asyncio.run(main(address))
        refused = [each for each in answers if each[0] == 429]
        assert len(answers) - len(refused) == 5 == sum(each[0] == 200 for each in answers)
        for _, _, response in refused:
            assert response.headers["retry-after"] == "1"
            assert error_of(response)[1] == "queue_full"
        wait_until(lambda: address.service.engine.num_unfinished == 0)
        assert httpx.post(f"{address}/v1/completions", json=LONG).status_code == 200
        # More than there can ever be room for is no matter of waiting.
        too_many = httpx.post(f"{address}/v1/completions", json=LONG | {"n": 6})
        assert error_of(too_many)[0] == 400


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_ends_its_request(address, streams):
    """Also one that has sent its request and reads nothing."""
    engine, host = address.service.engine, address.removeprefix("http://").split(":")
    body = json.dumps(LONG | {"stream": streams}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host[0], int(host[1]))) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: engine.num_unfinished == 1)
    wait_until(lambda: engine.num_unfinished == 0)
    wait_until(lambda: engine.llm.dispatcher.scheduler.num_running == 0)


def test_a_time_limit_ends_a_request(plain):
    with serving(plain, request_seconds=0.2) as address:
        body = LONG | {"n": 4, "max_tokens": 480}
        response = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
        assert error_of(response)[:2] == (504, "timeout")
        wait_until(lambda: address.service.engine.num_unfinished == 0)
        with httpx.stream(
            "POST", f"{address}/v1/completions", json=body | {"stream": True}
        ) as events:
            lines = [each for each in events.iter_lines() if each]
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert lines[-1] == "data: [DONE]"


def test_metrics_count_what_was_decoded(plain):
    with serving(plain) as address:
        answer = httpx.post(f"{address}/v1/completions", json=LONG | {"max_tokens": 9}).json()
        text = httpx.get(f"{address}/metrics").text
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
        label = f'{{engine="0",model_name="{NAME}"}}'
        assert float(values[f"spec_jax:generation_tokens_total{label}"]) == 9
        prompt = answer["usage"]["prompt_tokens"]
        assert float(values[f"spec_jax:prompt_tokens_total{label}"]) == prompt
        assert float(values[f"spec_jax:num_requests_running{label}"]) == 0
        assert float(values[f"spec_jax:spec_decode_num_plain_rounds_total{label}"]) == 9
        assert 0 < float(values[f"spec_jax:generation_tokens_per_second{label}"]) <= 9 / 0.001
        assert float(values[f"spec_jax:spec_decode_draft_length{label}"]) == 0
        assert float(values[f"spec_jax:e2e_request_latency_seconds_count{label}"]) == 1
        assert float(values[f"spec_jax:inter_token_latency_seconds_count{label}"]) in range(5, 9)


def test_answers_do_not_depend_on_who_comes_and_goes(address, plain):
    assert check_schedule(address, plain, seed=0, count=100, seconds=3) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_schedules(address, plain):
    left = [check_schedule(address, plain, seed, count=12, seconds=0.5) for seed in range(1, 201)]
    assert sum(left) > 200


def check_schedule(address, plain, seed, count, seconds):
    """Random arrivals, streams and disconnections: the others' tokens are offline's.

    Returns:
      How many clients left before their answer was complete.
    """
    rng = random.Random(seed)
    requests = [
        {
            "prompt": rng.choice(PROMPTS),
            "max_tokens": rng.randint(1, 40),
            "temperature": rng.choice([0, 0, 0.9]),
            "seed": rng.randint(-5, 2**40),
            "ignore_eos": True,
            "stream": rng.random() < 0.5,
            "return_token_ids": True,
        }
        for _ in range(count)
    ]

    async def ask(client, body):
        await asyncio.sleep(rng.random() * seconds)
        leaves = rng.random() < 0.25
        post = client.stream("POST", "/v1/completions", json=body)
        async with post as response:
            assert response.status_code == 200
            if not body["stream"]:
                if leaves:
                    return None
                return json.loads(await response.aread())["choices"][0]["token_ids"]
            ids, pieces = [], rng.randint(0, 3)
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    ids += json.loads(line[6:])["choices"][0]["token_ids"]
                    pieces -= 1
                    if leaves and pieces < 0:
                        return None
            return ids

    async def main():
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            return await asyncio.gather(*(ask(client, each) for each in requests))

    answers = asyncio.run(main())
    fields = ("max_tokens", "temperature", "ignore_eos")
    params = [
        SamplingParams(seed=each["seed"] % 2**64, **{name: each[name] for name in fields})
        for each in requests
    ]
    expected = plain.generate([each["prompt"] for each in requests], params)
    for answer, output in zip(answers, expected, strict=True):
        assert answer in (None, list(output.token_ids))
    wait_until(lambda: address.service.engine.num_unfinished == 0)
    return sum(each is None for each in answers)


def test_the_end_waits_for_answers_and_takes_no_more(plain):
    with serving(plain) as address:
        service = address.service
        body = LONG | {"stream": True, "max_tokens": 200}
        with httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as events:
            lines = events.iter_lines()
            next(lines)
            service.is_ready = False
            assert error_of(httpx.get(f"{address}/health"))[0] == 503
            refused = httpx.post(f"{address}/v1/completions", json=LONG)
            assert error_of(refused)[0] == 503 and "retry-after" in refused.headers
            assert [each for each in lines if each][-1] == "data: [DONE]"


def test_a_warm_up_that_fails_ends_the_server(plain):
    def warm_up():
        raise MemoryError("full")

    async def serve():
        service = Service(AsyncLLM(plain), [NAME])
        with socket.create_server(("127.0.0.1", 0)) as listening:
            await Server(service, warm_up=warm_up).run(listening)

    with pytest.raises(MemoryError, match="full"):
        asyncio.run(asyncio.wait_for(serve(), 30))


@pytest.mark.parametrize("method", [LOOKUP, pytest.param({}, marks=pytest.mark.slow)])
def test_after_the_warm_up_nobody_waits_for_the_compiler(tmp_path, monkeypatch, method):
    """Prompts of any length, alone and beside others, with and without a common beginning."""
    # Other tests' programs take this process's memory maps, so that some would be dropped.
    monkeypatch.setattr(programs, "maps_taken", lambda: 0.0)
    config = tiny.CONFIG | {"max_position_embeddings": 1024}
    tiny.write_directory(tmp_path / "tiny", config, tiny.llama_tensors(config))
    llm = LLM(str(tmp_path / "tiny"), max_num_seqs=4, speculative_config=method or None)
    engine = llm.engine

    async def ask(client, wait, body):
        await asyncio.sleep(wait)
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text

    async def main(address, rng):
        common = rng.choices(range(3, 200), k=500)
        kinds = [{"temperature": 0}, {}, {"top_p": 0.5}, {"presence_penalty": 0.5}, {"logprobs": 2}]
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:
            bodies = [
                {
                    "prompt": [
                        *common[: rng.choice([0, 0, 60, 150, 500])],
                        *rng.choices(range(3, 200), k=rng.choice([1, 20, 33, 70, 140, 300])),
                    ],
                    "max_tokens": rng.randint(1, 30),
                    **rng.choice(kinds),
                }
                for _ in range(30)
            ]
            await asyncio.gather(*(ask(client, 2 * rng.random(), each) for each in bodies))

    with serving(llm, warm_up=lambda: llm.warm_up(WAYS, num_seqs=4)) as address:
        traces, programs_before = engine.traces, {*engine.compiler.names()}
        for seed in range(4):
            asyncio.run(main(address, random.Random(seed)))
        assert {*engine.compiler.names()} - programs_before == set()
    assert engine.traces == traces
