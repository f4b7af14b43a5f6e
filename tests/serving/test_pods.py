"""Two processes serve as one: the first one takes requests, and the other decodes the same."""

import asyncio
import json
import signal

import httpx2 as httpx
import numpy as np
import pytest

from spec_jax import LLM, AsyncLLM, SamplingParams, async_llm
from spec_jax.distributed import messages as channel
from spec_jax.distributed.messages import Messages
from spec_jax.engine import following
from spec_jax.engine.following import Lead, follow
from spec_jax.errors import PEER_LOST, ConfigError
from tests.cli.test_serve import wait_ready
from tests.test_distributed import LAYOUT, free_port, start

LOOKUP = {
    "method": "prompt_lookup",
    "num_speculative_tokens": 3,
    "draft_length_policy": "constant",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


class Board:
    """JAX's key-value store, of one process."""

    def __init__(self):
        self.entries = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.entries
        self.entries[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        return self.entries[key]

    def key_value_dir_get(self, place):
        return [(key, text) for key, text in self.entries.items() if key.startswith(place)]

    def key_value_delete(self, key):
        del self.entries[key]


def test_messages_come_in_order_and_are_deleted_once_all_have_read_them(monkeypatch):
    monkeypatch.setattr(channel, "_READ_EVERY", 4)
    board = Board()
    sender, *receivers = (Messages(board, number, 3) for number in range(3))
    for at in range(40):
        sender.send({"at": at, "text": "ä"})
        assert [each.receive() for each in receivers] == [{"at": at, "text": "ä"}] * 2
    assert len(board.entries) < 12
    slow = Messages(board, 2, 3)
    slow._place = receivers[1]._place
    for at in range(40, 80):  # nothing that the second one lacks is deleted
        sender.send(at)
        assert receivers[0].receive() == at
    assert [slow.receive() for _ in range(40)] == [*range(40, 80)]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7, top_p=0.9, seed=2**63 + 1, max_tokens=7, n=1),
        SamplingParams(logit_bias={3: -1.5, 4: float("-inf")}, stop=["a", "ß"], logprobs=3),
        SamplingParams(bad_words=["the"], stop_token_ids=[5], min_tokens=2, max_tokens=None),
        SamplingParams(structured_outputs={"json": SCHEMA}, repetition_penalty=1.1),
        SamplingParams(allowed_token_ids=[3, 4], ignore_eos=True, truncate_prompt_tokens=3),
    ],
)
def test_a_request_is_the_same_in_all_processes(plain, sampling):
    llm = plain.with_speculation(LOOKUP)
    ((request, _),) = llm.requests([[5, 6, 7, 8, 9]], sampling, may_draft=False, prediction="the")
    message = json.loads(json.dumps(following._as_json(request)))
    made = following._from_json(message, llm.request)
    assert list(made.prompt_token_ids) == list(request.prompt_token_ids)
    assert made.key.tolist() == request.key.tolist() and made.key.dtype == np.uint32
    for name in ("stop_token_ids", "max_length", "may_draft", "timestamps"):
        assert getattr(made, name) == getattr(request, name)
    assert list(made.prediction) == list(request.prediction) != []
    assert [*map(tuple, made.bad_words)] == [*map(tuple, request.bad_words)]
    assert (made.grammar is None) == (request.grammar is None)
    ours = SamplingParams(**vars(sampling) | {"truncate_prompt_tokens": None})
    assert made.sampling == ours


def test_a_follower_decodes_what_the_first_process_does(directories):
    """Both in this process: the messages of one are replayed by the other."""
    first, second = (
        LLM(str(directories / "target"), speculative_config=LOOKUP, max_num_seqs=3, seed=5)
        for _ in range(2)
    )
    board = Board()
    lead = Lead(Messages(board, 0, 2), first.dispatcher.scheduler)
    seen = []
    scheduler = second.dispatcher.scheduler
    step = scheduler.step
    scheduler.step = lambda: seen.extend(step())

    async def main():
        engine = AsyncLLM(first)
        engine._lead = lead
        rng = np.random.default_rng(0)

        async def one(i):
            await asyncio.sleep(rng.random() / 2)
            prompt = rng.integers(3, 200, rng.integers(1, 90)).tolist()
            sampling = SamplingParams(temperature=i % 2, max_tokens=int(rng.integers(1, 60)))
            tokens = []
            async for chunk in engine.generate([prompt], sampling):
                tokens += chunk.token_ids
                if i % 5 == 0:
                    break
            return tokens

        answers = await asyncio.gather(*map(one, range(25)))
        await engine.shutdown()
        return answers

    answers = asyncio.run(main())
    follow(Messages(board, 1, 2), scheduler, second.request)
    assert not scheduler.busy
    replayed = {}
    for number, chunk in seen:
        replayed.setdefault(number, []).extend(chunk.token_ids)
    complete = [each for i, each in enumerate(answers) if i % 5]
    assert sorted(complete) == sorted(each for each in replayed.values() if each in complete), (
        "tokens of complete answers are the same"
    )


def test_only_the_first_process_takes_requests(plain, monkeypatch):
    monkeypatch.setattr(async_llm.distributed, "process", lambda: (1, 2))
    with pytest.raises(ConfigError, match=r"process 1 of 2; call follow\(llm\) instead"):
        AsyncLLM(plain)
    monkeypatch.setattr(async_llm.distributed, "process", lambda: (0, 2))
    with pytest.raises(ConfigError, match="process 0 of 2 leads"):
        async_llm.follow(plain)


@pytest.fixture
def pod(directories):
    processes = []

    def serve(*flags):
        port, coordinator = free_port(), free_port()
        arguments = ("serve", "--target", str(directories / "target"), "--layout", LAYOUT)
        for number in range(2):
            more = (*arguments, "--port", str(port), *flags)
            processes.append(start(number, 2, coordinator, *more))
        return processes, f"http://127.0.0.1:{port}"

    yield serve
    for process in processes:
        process.kill()
        process.communicate()


def test_a_pod_answers_as_one_process_does(pod, plain):
    processes, address = pod("--method", "prompt_lookup", "--lazy", "--max-num-seqs", "4")
    wait_ready(processes[0], address)
    bodies = [
        {"prompt": [5, 6, 7, 5, 6], "temperature": 0, "max_tokens": 40},
        {"prompt": "the thin", "seed": 7, "max_tokens": 30},
        {"prompt": "a", "seed": 8, "top_p": 0.8, "max_tokens": 30, "logit_bias": {"5": -100}},
        {"prompt": "in", "temperature": 0, "structured_outputs": {"regex": "[a-c]{3,9}"}},
        {"prompt": [3] * 60, "temperature": 0, "n": 2, "max_tokens": 12, "ignore_eos": True},
    ]

    async def main():
        async with httpx.AsyncClient(base_url=address, timeout=120) as client:

            async def leave():
                body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True}
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        break

            ask = (client.post("/v1/completions", json=each) for each in bodies)
            *answers, _ = await asyncio.gather(*ask, leave())
            return [each.json() for each in answers]

    for body, answer in zip(bodies, asyncio.run(main()), strict=True):
        names = ("temperature", "seed", "top_p", "max_tokens", "n", "ignore_eos")
        sampling = {"temperature": 1.0, "max_tokens": 16}
        sampling |= {name: body[name] for name in names if name in body}
        sampling |= {"structured_outputs": body.get("structured_outputs")}
        sampling |= {"logit_bias": {int(k): v for k, v in body.get("logit_bias", {}).items()}}
        (expected,) = plain.generate([body["prompt"]], SamplingParams(**sampling))
        texts = [each["text"] for each in answer["choices"]]
        assert texts == [each.text for each in expected.outputs], body
    processes[0].send_signal(signal.SIGTERM)
    processes[1].send_signal(signal.SIGTERM)  # as an orchestrator does
    for process in processes:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said


def test_a_lost_process_ends_the_server_with_a_sentence(pod):
    processes, address = pod("--lazy")
    wait_ready(processes[0], address)
    body = {"prompt": "the", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4}
    with (
        pytest.raises(httpx.HTTPError),
        httpx.stream("POST", f"{address}/v1/completions", json=body, timeout=60) as response,
    ):
        for at, _ in enumerate(response.iter_lines()):
            if at == 3:
                processes[1].kill()
    _, said = processes[0].communicate(timeout=60)
    assert processes[0].returncode == PEER_LOST
    assert "process 0 of 2 ends" in said and "Traceback" not in said
