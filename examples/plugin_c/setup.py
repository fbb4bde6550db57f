# SPDX-License-Identifier: Apache-2.0
"""Have make build the shared object into the package."""

import subprocess
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py


class Build(build_py):
    """The package, with what the Makefile makes."""

    def run(self):
        super().run()
        out = Path(self.build_lib, "te_example_rmsnorm/rmsnorm.so").resolve()
        subprocess.run(["make", "-s", f"PYTHON={sys.executable}", f"OUT={out}"], check=True)


class Native(Distribution):
    """Has the wheel named after the platform that it was built on."""

    def has_ext_modules(self):
        return True


setup(distclass=Native, cmdclass={"build_py": Build})
