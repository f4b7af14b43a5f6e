"""`spec-jax chat --url` and `spec-jax bench --serve`, against a server in a thread."""

import asyncio
import itertools
import json
import random

import httpx2 as httpx
import pytest

from spec_jax import SamplingParams
from spec_jax.benchmarking.server_load import LoadClient, Question, ServedAnswer, Summary, open_loop
from tests.cli.harness import Stdin, failure, run
from tests.serving.conftest import NAME, serving

KEY = "secret"


@pytest.fixture(scope="module")
def guarded(drafting):
    with serving(drafting, api_keys=[KEY]) as address:
        yield address


def chat(capsys, monkeypatch, lines, *flags):
    monkeypatch.setattr("sys.stdin", Stdin(lines))
    return run(capsys, "chat", "--url", *flags)


def test_chat_with_a_server_answers_as_the_model_does(capsys, monkeypatch, guarded, plain):
    flags = (f"{guarded}/v1", "--api-key", KEY, "--max-tokens", "12", "--temperature", "0")
    code, out, err = chat(capsys, monkeypatch, "the thin\n\nthing\n/reset\nthe thin\n", *flags)
    assert code == 0, err
    sampling = SamplingParams(max_tokens=12)
    messages = [{"role": "user", "content": "the thin"}]
    first = plain.chat(messages, sampling)[0].outputs[0].text
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "thing"}]
    second = plain.chat(messages, sampling)[0].outputs[0].text
    assert out == f"{first}\n{second}\n{first}\n"
    assert err.count("12 tokens, ") == 3 and "per target call" in err
    assert "a new conversation starts" in err


def test_chat_says_what_the_server_refuses(capsys, monkeypatch, guarded):
    code, _, err = chat(capsys, monkeypatch, "the\n", guarded)
    assert code == 2 and "the server answers 401: the API key is missing or wrong" in err
    flags = (guarded, "--api-key", KEY, "--model", "other")
    code, _, err = chat(capsys, monkeypatch, "the\nthe\n", *flags)
    assert code == 2 and err.count("the server answers 404: model 'other' is not served here") == 2
    code, _, err = chat(capsys, monkeypatch, "the\n", "http://127.0.0.1:9")
    assert code == 2 and "cannot reach http://127.0.0.1:9" in err and "check --url" in err
    code, _, err = chat(capsys, monkeypatch, "the\n", "no address")
    assert code == 2 and "cannot reach no address" in err


def test_bench_of_a_server_counts_what_it_answers(capsys, guarded, tmp_path):
    lengths, out = tmp_path / "lengths.txt", tmp_path / "requests.jsonl"
    lengths.write_text("20 5\n3,9\n")
    flags = ("--serve", guarded, "--api-key", KEY, "--lengths", lengths, "--num-requests", "6")
    code, text, err = run(capsys, "bench", *flags, "--concurrency", "1,3", "--out", out)
    assert code == 0, err
    rows = [line.split() for line in text.splitlines() if "clients" in line]
    assert [row[:2] for row in rows] == [["1", "clients"], ["3", "clients"]]
    lines = [json.loads(each) for each in out.read_text().splitlines()]
    assert [each["load"] for each in lines] == ["1 clients"] * 6 + ["3 clients"] * 6
    assert sorted(each["num_tokens"] for each in lines) == [5] * 6 + [9] * 6
    assert {(each["prompt_tokens"], each["num_tokens"]) for each in lines} == {(20, 5), (3, 9)}
    assert all(0 <= each["begin"] < each["first"] <= each["ended"] for each in lines)
    assert any(each["drafted"] for each in lines)
    # One client asks one after the other.
    alone = lines[:6]
    assert all(a["ended"] <= b["begin"] for a, b in itertools.pairwise(alone))
    code, _, err = run(capsys, "bench", *flags, "--out", out)
    assert code == 2 and "nothing is overwritten" in err


def test_bench_of_a_server_says_what_fails(capsys, guarded, tmp_path):
    flags = ("--serve", guarded, "--api-key", KEY, "--num-requests", "3")
    code, text, err = run(capsys, "bench", *flags, "--model", "other", "--rate", "50")
    assert code == 1 and "model 'other' is not served here" in err
    assert text.splitlines()[-1].split()[-1] == "3"
    bad = tmp_path / "bad.txt"
    bad.write_text("3 4\n5 x\n")
    code, _, err = run(capsys, "bench", *flags, "--lengths", bad)
    assert code == 2 and "line 2 is '5 x'; give tokens of a prompt and of an answer" in err
    assert "name the server with --serve" in failure(capsys, "bench", "--serve", "")
    code, _, err = run(capsys, "bench", "--serve", "http://127.0.0.1:9")
    assert code == 2 and "cannot reach http://127.0.0.1:9" in err and "check --serve" in err


def test_a_server_that_counts_no_tokens_is_counted_by_its_pieces():
    piece = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    answer = httpx.Response(200, content=3 * piece + b"data: [DONE]\n\n")
    transport = httpx.MockTransport(lambda request: answer)
    client = LoadClient("http://any", None, {})
    client._client = httpx.AsyncClient(base_url="http://any", transport=transport)
    asked = asyncio.run(client.ask(Question("/v1/chat/completions", {}), 0.0))
    assert (asked.pieces, asked.num_tokens, asked.error) == (3, 3, None)


def test_figures_of_a_load():
    answers = [
        ServedAnswer(
            begin=i / 100, first=i / 100 + 0.1, ended=i / 100 + 0.1 + 0.01 * (i + 1), num_tokens=2
        )
        for i in range(100)
    ]
    answers += [ServedAnswer(begin=0.0, first=None, ended=5.0, error="no")]
    summary = Summary.of(answers, 0.2, 0.5)
    assert summary.num_failed == 1 and summary.acceptance is None
    assert summary.tokens_per_second == pytest.approx(200 / 5)
    assert summary.first == (pytest.approx(0.1), pytest.approx(0.1))
    assert summary.token == (pytest.approx(0.5), pytest.approx(0.99))
    assert summary.goodput == pytest.approx(50 / 5)


def test_requests_come_at_the_rate_and_wait_for_no_answer():
    class Slow:
        def __init__(self):
            self.times = []

        async def ask(self, question, began):
            self.times.append(asyncio.get_running_loop().time())
            await asyncio.sleep(0.3)
            return ServedAnswer(0.0)

    slow = Slow()
    answers = asyncio.run(open_loop(slow, [None] * 40, 100.0, random.Random(3)))
    assert len(answers) == 40
    took = slow.times[-1] - slow.times[0]
    assert 0.2 < took < 0.8  # 39 gaps of 10 ms


def test_a_server_with_another_name_is_asked_by_it(guarded, capsys):
    flags = ("--serve", guarded, "--api-key", KEY, "--model", NAME, "--num-requests", "2")
    code, text, err = run(capsys, "bench", *flags, "--concurrency", "2", "--max-tokens", "4")
    assert code == 0, err
    assert text.splitlines()[-1].split()[-1] != "2"
