"""Checkouts in which the launch scripts run without a network on stand-ins for what they call."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Notes what it is asked to install, and installs a spec-jax that says how it was called.
PIP = """
import pathlib, sys
if "install" in sys.argv:
    venv = pathlib.Path(sys.prefix)
    with open(venv.parent / "installed", "a") as log:
        print(sys.argv[-1], file=log)
    script = venv / "bin" / "spec-jax"
    script.write_text((venv.parent / "stand-in").read_text())
    script.chmod(0o755)
"""
PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then
  {sys.executable!r} -m venv --without-pip "$3" &&
    cp "${{0%/*}}/pip.py" "$3"/lib/python3*/site-packages
else
  exec {sys.executable!r} "$@"
fi
"""
# One call a line: the name, the words, and what of the environment matters.
SAY = """#!{python}
import json, os, sys
kept = {{key: value for key, value in os.environ.items() if key.startswith(("JAX_", "HF_"))}}
with open({calls!r}, "a") as log:
    print(json.dumps([os.path.basename(sys.argv[0]), sys.argv[1:], kept]), file=log)
"""


class Checkout:
    """A copy of what the launch scripts need, and stand-ins for all that they call.

    Attributes:
      root: the copy.
      commands: a folder that is first on the PATH; `command` adds to it.
      env: the environment that scripts run in.
    """

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        weights = shutil.ignore_patterns("*.safetensors")  # no script reads them
        for name in ("launch", "sharding", "checkpoints"):
            shutil.copytree(ROOT / name, self.root / name, ignore=weights)
        for name in ("pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        self.commands = folder / "commands"
        self.commands.mkdir()
        (self.commands / "pip.py").write_text(PIP)
        self._calls = folder / "calls"
        self.stand_in = SAY.format(python=sys.executable, calls=str(self._calls))
        (self.root / "stand-in").write_text(self.stand_in)
        python = self.command("python3", PYTHON)
        foreign = ("JAX_", "HF_", "SLURM_", "CUDA_", "TPU_", "XDG_CACHE_HOME", "XLA_")
        self.env = {key: value for key, value in os.environ.items() if not key.startswith(foreign)}
        self.env["PYTHON"] = str(python)
        self.env["PATH"] = f"{self.commands}{os.pathsep}{self.env['PATH']}"

    def command(self, name: str, text: str | None = None) -> Path:
        """Adds a command; by default it only says how it was called."""
        path = self.commands / name
        path.write_text(self.stand_in if text is None else text)
        path.chmod(0o755)
        return path

    def spec_jax(self, text: str) -> None:
        """What spec-jax shall do, once it is installed."""
        (self.root / "stand-in").write_text(text)

    def run(self, script: str, *words: str, **options) -> subprocess.CompletedProcess[str]:
        """Runs a launch script from another folder."""
        return self.shell(str(self.root / "launch" / script), *words, **options)

    def shell(self, *words: str, env=None, **options) -> subprocess.CompletedProcess[str]:
        """Runs a command in the environment of the checkout."""
        if "input" not in options:
            options.setdefault("stdin", subprocess.DEVNULL)
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            env=self.env | (env or {}),
            cwd=self.commands.parent,
            timeout=120,
            **options,
        )

    def said(self) -> list[list]:
        """What the stand-ins said since then: name, words, variables of JAX and of the hub."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return [json.loads(line) for line in lines]

    def installed(self) -> list[str]:
        """What pip was asked for, one entry for each call."""
        path = self.root / "installed"
        return path.read_text().splitlines() if path.exists() else []
