"""`spec-jax env`."""

import json
import os
import subprocess
import sys

import pytest

from spec_jax import __version__
from spec_jax.cli import devices
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


@pytest.mark.skipif(devices.has_tpu(), reason="there is a TPU")
def test_libtpu_does_not_complain_where_there_is_no_tpu():
    pytest.importorskip("libtpu")
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "spec_jax", "env", "--json"]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "JAX_PLATFORMS" not in json.loads(result.stdout)["environment"]


@pytest.mark.parametrize(
    ("vendor", "kind", "found"),
    [("0x1ae0", "0x120000", True), ("0x1ae0", "0x020000", False), ("0x8086", "0x120000", False)],
    ids=["a TPU", "Google's network card", "another accelerator"],
)
def test_a_tpu_is_found_on_the_bus(tmp_path, monkeypatch, vendor, kind, found):
    device = tmp_path / "0000:00:05.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(devices, "PCI", tmp_path)
    assert devices.has_tpu() is found
