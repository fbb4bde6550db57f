# SPDX-License-Identifier: Apache-2.0
"""The page on several GPUs runs on several ranks (test_code_blocks.py runs it on one)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_pages import ROOT, blocks

PAGE = ROOT / "docs/several_gpus.md"
RUN = Path(__file__).with_name("run_pieces.py")


def run_ranks(pieces, folder, size=2):
    """Run pieces of Python in as many processes; return the status and the words of each."""
    running = []
    for rank in range(size):
        said = open(folder / f"said-{rank}", "w+")  # noqa: SIM115 - closed below
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(size),
            "STORE": str(folder / "store"), "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        process = subprocess.Popen(
            [sys.executable, str(RUN)], cwd=folder, env=env,
            stdin=subprocess.PIPE, stdout=said, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        process.stdin.write(json.dumps(pieces))
        process.stdin.close()
        running.append((process, said))
    results = []
    try:
        for process, _ in running:
            process.wait(timeout=200)
    finally:
        for process, said in running:
            process.kill()
            process.wait()
            said.seek(0)
            results.append((process.returncode, said.read()))
            said.close()
    return results


@pytest.mark.skipif(not PAGE.exists(), reason="docs are not part of an installed package")
def test_the_page_runs_on_two_ranks(tmp_path):
    found = list(blocks(PAGE, PAGE.read_text(encoding="utf-8")))
    pieces = [piece for b in found if b.language == "python" for piece in b.pieces()]
    for status, said in run_ranks(pieces, tmp_path):
        assert status == 0, said
    assert sum(piece["text"].count("backward()") for piece in pieces) >= 6


def test_a_rank_that_fails_is_noticed(tmp_path):
    text = 'import os\nassert os.environ["RANK"] == "0"'
    piece = {"path": "page.md", "line": 1, "text": text, "raises": ""}
    (first, _), (second, said) = run_ranks([piece], tmp_path)
    assert first == 0 and second == 1 and "AssertionError" in said
