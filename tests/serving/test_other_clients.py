"""Clients of other makers, unchanged, and the lines of docs/serving.md."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from spec_jax import SamplingParams
from tests.serving.conftest import NAME

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"
DOCUMENTED = "http://127.0.0.1:8000"


class Weather(BaseModel, extra="forbid"):
    """Small: the context has 128 tokens, and a random model likes white space."""

    sky: Literal["clear", "cloudy"]


@pytest.fixture
def chain(address):
    return ChatOpenAI(
        base_url=f"{address}/v1", api_key="any", model=NAME, temperature=1, seed=1, max_retries=0
    )


def test_langchain_gets_the_text_of_chat(chain, plain):
    params = SamplingParams(max_tokens=20, temperature=1, seed=1)
    (expected,) = plain.chat([{"role": "user", "content": "the thin"}], params)
    answer = chain.bind(max_tokens=20).invoke("the thin")
    assert answer.content == expected.text
    assert answer.usage_metadata["output_tokens"] == len(expected.token_ids)
    pieces = [each.content for each in chain.bind(max_tokens=20).stream("the thin")]
    assert "".join(pieces) == expected.text and len(pieces) > 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain_gets_an_object_of_its_class(chain, method):
    asking = chain.with_structured_output(Weather, method=method)
    assert isinstance(asking.invoke("the thin"), Weather)


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_lines_of_the_page_get_answers(address):
    lines = [each for each in blocks("sh") if each.startswith("curl")]
    assert lines
    for line in lines:
        assert DOCUMENTED in line
        command = line.replace(DOCUMENTED, address)
        done = subprocess.run(["bash", "-c", command], capture_output=True, timeout=60)
        (choice,) = json.loads(done.stdout)["choices"]
        assert choice["message"]["role"] == "assistant"


def test_the_pages_program_prints_an_answer(address, capsys):
    (program,) = [each for each in blocks("python") if each.startswith("from openai")]
    assert DOCUMENTED in program
    program = program.replace(DOCUMENTED, address).replace("smollm2-135m-instruct", NAME)
    exec(program, {})
    assert capsys.readouterr().out.strip()


def test_a_stream_that_is_closed_early_leaves_the_client_usable(client):
    shape = {"model": NAME, "prompt": "the thin", "max_tokens": 30, "temperature": 0}
    with client.completions.create(stream=True, **shape) as events:
        next(iter(events))
    assert client.completions.create(**shape).choices[0].text
