"""The code of the pages in docs/ runs as it stands."""

import functools
import json
import re
from pathlib import Path

import pytest

import spec_jax
from spec_jax import testing
from spec_jax.checkpoints import reference
from tests.checkpoints.tiny import write_directory, write_json

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE = DOCS / "vllm.md"


def blocks():
    """Each block of Python, under the heading before it."""
    heading, parts = "", r"^## ([^\n]+)|^```python\n(.*?)^```"
    for title, code in re.findall(parts, PAGE.read_text(), re.MULTILINE | re.DOTALL):
        heading = title or heading
        if code:
            yield pytest.param(code, id=heading)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Whatever is fetched from the hub is a tiny model."""
    path = write_directory(tmp_path_factory.mktemp("hub") / "tiny")
    write_json(path / "generation_config.json", {"do_sample": True, "max_new_tokens": 16})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "fetch_from_hub", lambda *args, **options: path)
        yield


@pytest.mark.parametrize("code", list(blocks()))
def test_the_page_for_users_of_vllm(hub, code, capsys):
    names = {}
    exec(compile(code, str(PAGE), "exec"), names)
    said = capsys.readouterr().out
    assert said.strip()
    if "description" in names:
        assert names["sentiment"] in ("Positive", "Negative")
        assert re.fullmatch(r"[a-z]{1,9}@[a-z]{1,9}\.com\n", names["address"])
        assert names["statement"].startswith("SELECT ")
        description = names["description"]
        assert len(description) >= 40 or set(json.loads(description)) == {"brand", "doors"}


def test_every_block_is_found():
    assert len(list(blocks())) == PAGE.read_text().count("```python") == 6


def test_a_drafter_of_ones_own(forgotten, tmp_path, monkeypatch, capsys):
    """With a tiny model, and fewer samples than users take."""
    model, real = str(write_directory(tmp_path / "target")), spec_jax.LLM

    def make(reference, *, max_model_len, **options):
        return real(model, **options)

    monkeypatch.setattr(spec_jax, "LLM", make, raising=False)
    few = functools.partial(testing.check_lossless, samples=1024)
    monkeypatch.setattr(testing, "check_lossless", few)
    names = {}
    code = re.findall(r"```python\n(.*?)```", (DOCS / "drafter.md").read_text(), re.S)
    assert len(code) == 3
    for each in code:
        exec(each, names)
    assert names["output"].metrics.draft_tokens > 0
    assert capsys.readouterr().out.endswith("PASS\n")
    lines = code[0].partition("@pytree")[2].splitlines()
    assert len([line for line in lines if line.strip()]) <= 22
