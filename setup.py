"""Builds wheels, with SPEC_JAX_PREBUILD=1 including the native code of this kind of machine.

    SPEC_JAX_PREBUILD=1 pip wheel --no-deps --no-build-isolation .

works in an environment that has spec-jax and a C++ compiler. All else is in pyproject.toml.
"""

import os
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

PREBUILD = os.environ.get("SPEC_JAX_PREBUILD") == "1"


class BuildWithNativeCode(build_py):
    """Adds the libraries to the package."""

    def run(self):
        super().run()
        if PREBUILD:
            sys.path.insert(0, str(Path(__file__).parent))
            from spec_jax.kernels.native import prebuild

            prebuild(Path(self.build_lib) / "spec_jax" / "kernels" / "prebuilt")


class PlatformWheel(bdist_wheel):
    """The libraries depend on the machine, and on no version of Python."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = not PREBUILD

    def get_tag(self):
        python, abi, machine = super().get_tag()
        return ("py3", "none", machine) if PREBUILD else (python, abi, machine)


setup(cmdclass={"build_py": BuildWithNativeCode, "bdist_wheel": PlatformWheel})
