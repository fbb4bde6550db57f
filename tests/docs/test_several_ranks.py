# SPDX-License-Identifier: Apache-2.0
"""The page on several GPUs runs on several ranks (test_code_blocks.py runs it on one)."""

import json
from pathlib import Path

import processes
import pytest
import torch
from markdown_pages import ROOT, blocks

PAGE = ROOT / "docs/several_gpus.md"
RUN = Path(__file__).with_name("run_pieces.py")


def run_ranks(pieces, folder, size=2):
    """Run pieces of Python in as many processes; return the status and the words of each."""
    fresh = torch.cuda.is_available()
    running = [
        processes.start(
            RUN, folder=folder, path=[ROOT], input=json.dumps(pieces), fresh=fresh,
            RANK=str(rank), WORLD_SIZE=str(size), STORE=str(folder / "store"),
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ended = [process.wait(200, check=False) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(done.returncode, done.stdout + done.stderr) for done in ended]


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
