# SPDX-License-Identifier: Apache-2.0
"""The pages on several GPUs run on several ranks (test_code_blocks.py runs them on one)."""

import json
from pathlib import Path

import processes
import pytest
import torch
from markdown_pages import ROOT, blocks

PAGES = {ROOT / "docs/several_gpus.md": 6, ROOT / "docs/distributed.md": 1}
"""By page, how often it calls `backward` at least."""
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


@pytest.mark.skipif(
    not all(page.exists() for page in PAGES), reason="docs are not part of an installed package"
)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_on_two_ranks(page, tmp_path):
    found = list(blocks(page, page.read_text(encoding="utf-8")))
    found = [b for b in found if b.language == "python" and "gpu" not in b.needs]
    pieces = [piece for b in found for piece in b.pieces()]
    for status, said in run_ranks(pieces, tmp_path):
        assert status == 0, said
    assert sum(piece["text"].count("backward()") for piece in pieces) >= PAGES[page]


def test_a_rank_that_fails_is_noticed(tmp_path):
    text = 'import os\nassert os.environ["RANK"] == "0"'
    piece = {"path": "page.md", "line": 1, "text": text, "raises": ""}
    (first, _), (second, said) = run_ranks([piece], tmp_path)
    assert first == 0 and second == 1 and "AssertionError" in said
