"""The examples of the documentation run as they stand."""

import functools
import re
from pathlib import Path

import spec_jax
from spec_jax import testing
from tests.checkpoints import tiny

DOCS = Path(__file__).resolve().parents[1] / "docs"


def test_a_drafter_of_ones_own(forgotten, tmp_path, monkeypatch, capsys):
    """With a tiny model, and fewer samples than users take."""
    model, real = str(tiny.write_directory(tmp_path / "target")), spec_jax.LLM

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
