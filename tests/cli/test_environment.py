"""`spec-jax env`."""

import json

from spec_jax import __version__
from tests.cli.harness import run


def test_env_reports_versions_and_devices_and_no_secret(capsys, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    code, out, err = run(capsys, "env", "--json")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["spec-jax"] == __version__
    assert {"jax", "jaxlib", "flax", "transformers"} <= set(report["packages"])
    assert report["jax"]["backend"] == "cpu" and report["jax"]["devices"]
    assert report["environment"]["XLA_FLAGS"] == "--xla_dump_to=/nowhere"
    assert "secret" not in out
    code, text, _ = run(capsys, "env")
    assert code == 0 and "secret" not in text
    assert f"spec-jax: {__version__}" in text and "  backend: cpu" in text


def test_env_reports_that_jax_does_not_start(capsys, monkeypatch):
    def broken():
        raise RuntimeError("no such platform")

    monkeypatch.setattr("jax.default_backend", broken)
    code, out, _ = run(capsys, "env")
    assert code == 0 and "RuntimeError: no such platform" in out
