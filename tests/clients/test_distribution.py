# SPDX-License-Identifier: Apache-2.0
"""Clients find the distribution by its metadata, here and in a process of their own."""

import importlib.metadata
import subprocess
import sys

import transformer_engine


def test_the_metadata_has_the_version_of_the_package():
    assert importlib.metadata.version("transformer-engine") == transformer_engine.__version__
    assert importlib.metadata.metadata("transformer_engine")["Name"] == "transformer_engine"


def test_a_child_process_finds_both(tmp_path):
    script = (
        "import importlib.metadata as m, transformer_engine as t;"
        "print(m.version('transformer-engine') == t.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
