# SPDX-License-Identifier: Apache-2.0
"""tools/scaling_out.py: its bytes are those that collectives send, its table is in the docs."""

import subprocess
import sys
from pathlib import Path

import pytest
from pytorch.scaling_programs import counted, scaling_out
from scaling_out import Device, Layout, Model, needs, sent_bytes

ROOT = Path(__file__).resolve().parents[2]
SMALL = Model("small", layers=4, hidden=256, ffn=512, heads=4, kv_heads=2, vocabulary=1000)
ONE = Layout(length=128, sequences=8)


@pytest.mark.parametrize("by_rows", [False, True], ids=["columns", "rows"])
def test_bytes_are_those_that_ranks_send(ranks, by_rows, rng):
    columns, outputs, rows = (int(n) * 16 for n in rng.integers(1, 9, 3) * 2)
    for found, said in ranks.run(counted, columns, outputs, by_rows, rows):
        assert found == said and (found > 0) == (ranks.size > 1)


def test_what_a_gather_in_fp8_sends():
    """Row-wise bytes in the forward and again in the backward; sums in bf16."""
    plans = scaling_out.CallPlans(scaling_out.linear_graph(256, 512, 4, False))
    whole = 4 * 32 * 256
    sent = scaling_out.sent_by(plans, 4, 32)
    assert sum(sent) == (whole + whole + 2 * whole) * 3 // 4
    assert sent.alone == whole * 3 // 4  # the forward's gather, which its GEMM waits for


def test_one_rank_sends_nothing():
    found = needs(SMALL, ONE, Device())
    assert set(found.sent.values()) == {0} and set(found.exposed.values()) == {0}
    assert found.step == found.compute and found.memory == found.state + found.activations


@pytest.mark.parametrize("kind", ["tp", "cp", "pp", "fsdp", "dp"])
def test_each_kind_sends_alone(kind):
    sent = sent_bytes(SMALL, Layout(128, 8, **{kind: 2}))
    assert [name for name, count in sent.items() if count] == [kind]


def test_sharding_divides_what_a_rank_holds():
    whole = needs(SMALL, ONE, Device())
    for kind in ("tp", "pp"):
        assert needs(SMALL, Layout(128, 8, **{kind: 2}), Device()).state == whole.state // 2
    sharded = needs(SMALL, Layout(128, 8, fsdp=2), Device())
    assert sharded.state == whole.state // 2 + 2 * SMALL.layer_weights
    assert needs(SMALL, Layout(128, 8, dp=2), Device()).state == whole.state
    assert needs(SMALL, Layout(256, 8, cp=2), Device()).activations == whole.activations


def test_parameters_of_llama():
    """What the names say, in billions: the norms are not counted."""
    for name, count in {"8B": 8.03, "70B": 70.6, "405B": 405.9}.items():
        assert round(scaling_out.MODELS[name].parameters / 1e9, 4 - len(name)) == round(
            count, 4 - len(name)
        )


def test_the_table_is_up_to_date():
    command = [sys.executable, ROOT / "tools/scaling_out.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
