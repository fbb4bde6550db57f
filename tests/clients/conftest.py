# SPDX-License-Identifier: Apache-2.0
"""What released client packages need: this package as a distribution, and their own warnings.

They run unpatched. Where the package runs from its folder, without having been installed, its
metadata is made for the length of the session: clients ask `importlib.metadata` for the
distribution `transformer-engine`. Processes that tests start find package and metadata by
PYTHONPATH.
"""

import importlib.metadata
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from clean_state import clean as clean

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
# A warning of a client's own is not ours to mend; one that our code is the cause of is an error.
WARNINGS = ("default", "error:::transformer_engine")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


def pytest_configure(config):
    paths = [str(ROOT)]
    try:
        importlib.metadata.distribution("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        scratch = tempfile.TemporaryDirectory()
        config.add_cleanup(scratch.cleanup)
        command = [sys.executable, "setup.py", "-q", "dist_info", "-o", scratch.name]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        sys.path.append(scratch.name)
        paths.append(scratch.name)
    present = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *([present] if present else [])])
    os.environ.update(OFFLINE)


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings(*WARNINGS), append=False)


@pytest.fixture
def fetched():
    """Find what `make test-clients` fetched into build/clients; skip where it did not."""

    def find(name):
        folder = ROOT / "build/clients" / name
        if not folder.is_dir():
            pytest.skip(f"{folder} is not there; `make test-clients` fetches it")
        return folder

    return find
