# SPDX-License-Identifier: Apache-2.0
"""The benchmarks, tiny: they run, their tables and files are what they promise."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import processes
import pytest

import transformer_engine
from transformer_engine import _core

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ("host", "host_attention", "gemm", "kernels", "kernels_attention", "kernels_layer")
BENCHMARKS += ("attention", "parameter_memory", "overrides", "optimizers", "recipes", "host_calls")
BENCHMARKS += ("host_compiled", "compiled_gpt")
"""Those of a device; import_time, dispatch and xla_call know none."""
ATTENTION = {"softmax", "softmax_backward", "dropout_add", "dropout_backward", "rope"}
ATTENTION |= {"cache_append", "cache_gather", "attention_merge"}
LAYER = {"norm", "norm_backward", "activation", "activation_backward", "softcap"}
COMPUTE_BOUND = {"gemm", "attention", "attention_backward"}
GOALS = {
    "C: dispatch: table, slot, call, counters": 5,
    "C: what supports adds to that": 20,
    "operator -> C function, 3 arguments": 100,
    "operator -> C function, 20 arguments": 200,
    "operator -> Python function, 3 arguments": 150,
    "of that: dtypes limited, remembered": 20,
    "of that: architecture limited, remembered": 20,
    "a context made, entered and left": 500,
    "all operators choose anew: a known policy": 50_000,
    "all operators choose anew: a new policy": 50_000,
    "all operators choose anew: a late registration": 50_000,
    "the first call of a forked child": None,
    "import": 5_000_000,
}
"""Rows of dispatch, and the nanoseconds that they are to take."""
FACTS = {"date", "command", "package", "torch", "python", "device", "device_type", "processor"}
MODES = ["torch.nn.Linear", "bf16", "delayed", "current", "block", "row"]
FP8_MODES = MODES[2:]


def figures(name, device, folder):
    """Standard output and JSON of a benchmark."""
    # One is about imports, and one forks children of its own.
    fresh = device != "cpu" or name in ("import_time", "dispatch", "xla_call")
    flags = "--quick", "--device", device, "--json", f"{folder}/"
    program = ROOT / "benchmarks" / f"{name}.py"
    done = processes.run(program, *flags, limit=300, path=[ROOT], fresh=fresh, OMP_NUM_THREADS="1")
    assert "figures are void" not in done.stderr
    return done.stdout, json.loads((folder / f"{name}.json").read_text())


@pytest.fixture(scope="module")
def import_results(tmp_path_factory):
    """As `results`, of import_time."""
    return {"import_time": figures("import_time", "cpu", tmp_path_factory.mktemp("import"))}


@pytest.fixture(scope="module")
def results(request, device, tmp_path_factory):
    """Standard output and JSON by benchmark."""
    folder = tmp_path_factory.mktemp("figures")
    found = {name: figures(name, device, folder) for name in BENCHMARKS}
    return found if device == "cuda" else found | request.getfixturevalue("import_results")


def test_dispatch(tmp_path):
    """It knows no device; its figures are of the host."""
    printed, content = figures("dispatch", "cpu", tmp_path)
    (rows,) = content["tables"].values()
    named = {row["what"]: row for row in rows}
    assert all(math.isfinite(row["ns"]) for row in rows)
    for what, goal in GOALS.items():
        assert named[what]["goal_ns"] == goal
        assert what in printed
    assert named["operator -> C function, 3 arguments"]["fork_ns"] == 17_000
    kept = kept_goals("## Plug-ins: `benchmarks/dispatch.py`")
    assert kept.keys() <= named.keys() and kept.keys() >= GOALS.keys()
    assert all(goal is None or named[what]["goal_ns"] == goal for what, goal in kept.items())


def test_xla_call(tmp_path):
    """It is of the host, and says what a call costs over a program that does nothing."""
    _, content = figures("xla_call", "cpu", tmp_path)
    (rows,) = content["tables"].values()
    named = {row["what"]: row for row in rows}
    assert list(named) == ["no-op, 1 array", "operator", "no-op, 4 arrays", "plan", "run"]
    assert all(positive(row, "us", "low_us", "high_us") for row in rows)
    assert named["operator"]["limit_us"] == 15 and math.isfinite(named["plan"]["over_us"])


@pytest.mark.nightly
def test_jax_layer(device, tmp_path):
    """Layers of both packages run on the device, with the products of the recipe."""
    _, content = figures("jax_layer", device, tmp_path)
    layers, plain = content["tables"].values()
    assert [(row["way"], row["fp8_gemms"]) for row in layers] == [("PyTorch", 12), ("JAX", 12)]
    ways = [f"plain, {way}" for way in ("cudnn", "xla")[device == "cpu" :]]
    assert [row["way"] for row in plain] == [*ways, "ours, delayed"]
    assert [row["fp8_gemms"] for row in plain] == [*[0] * len(ways), 12]
    for row in (*layers, *plain):
        assert positive(row, "ms", "low", "high", "single_ms", "ratio", "limit_ms")


def kept_goals(heading):
    """Goal of each figure that RESULTS.md keeps of a benchmark, by its name in the report."""
    page = (ROOT / "benchmarks/RESULTS.md").read_text()
    section = page.split(f"{heading}\n")[1].split("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")]
    rows = {name.strip(): goal.strip().replace(",", "") for name, _, _, goal, _ in cells[2:]}
    return {
        name: int(goal) if goal else None
        for name, goal in rows.items()
        if not name.startswith("the same before")
    }


def tables(results, name):
    """Rows by title."""
    return results[name][1]["tables"]


def only_table(results, name):
    """The rows of a benchmark with one table."""
    (rows,) = tables(results, name).values()
    return rows


def positive(row, *keys):
    """True where all of these are numbers that a measurement can give."""
    return all(math.isfinite(row[key]) and row[key] > 0 for key in keys)


def test_says_what_ran_where(results, device):
    for name, (_, content) in results.items():
        assert content["benchmark"] == name
        facts = content["environment"]
        assert set(facts) >= FACTS, name
        assert facts["device_type"] == device, name
        assert facts["package"] == transformer_engine.__version__, name
        assert "--quick" in facts["command"], name
        if device == "cuda":
            assert {"gpu_at_start", "gpu_under_load", "torch_cuda", "cache_bytes"} <= set(facts)
        assert content["limits"] and all(value > 0 for value in content["limits"].values()), name


def test_prints_every_row_under_a_heading(results):
    for name, (printed, content) in results.items():
        lines = printed.splitlines()
        assert lines[0].startswith(f"{name}: ")
        assert sum(line.startswith("limit: ") for line in lines) == len(content["limits"]), name
        for title, rows in content["tables"].items():
            at = lines.index(title)
            heading, rule, *below = lines[at + 1 :]
            assert any(word in heading for word in ("limit", "ceiling", "floor"))
            assert set(rule) == {"-", " "}
            assert len(rows) > 0
            for row, line in zip(rows, below[: len(rows)], strict=True):
                assert all(value in line for value in row.values() if isinstance(value, str))


def test_host_attention(results):
    rows = only_table(results, "host_attention")
    floor = rows[-1]
    assert floor["call"] == "allocation only" and len(rows) == 6
    assert floor["forward_ratio"] == floor["backward_ratio"] == 1.0
    for row in rows:
        for part in ("forward", "backward"):
            assert row[f"{part}_us"] > 0 and row[f"{part}_ratio"] > 0


def test_overrides(results):
    rows = only_table(results, "overrides")
    assert [row["precision"] for row in rows] == ["bf16"] * 4 + ["delayed"] * 4
    assert [row["overrides"] for row in rows] == [0, 0, 4, 4] * 2
    for row in rows:
        assert positive(row, "step_us", "host_us") and math.isfinite(row["each_us"])


def test_host(results):
    rows = only_table(results, "host")
    assert [row["module"] for row in rows] == [*MODES, "allocation only"]
    for row in rows:
        times = [f"{part}_us" for part in ("forward", "backward", "step", "inference")]
        assert positive(row, *times, "ratio", "limit_us", "over_limit")
        assert row["fp8_gemms"] == (6 if row["module"] in FP8_MODES else 0)
    assert rows[0]["ratio"] == 1 and rows[-1]["over_limit"] == 1


def test_gemm(results, device):
    products, layers = tables(results, "gemm").values()
    formats = ["torch", "e4m3 x e4m3", "e5m2 x e4m3", "bf16"] + ["f32"] * (device == "cpu")
    assert [row["format"] for row in products] == formats
    for row in products:
        assert positive(row, "ms", "tflops", "ceiling", "percent", "speedup")
    assert [row["mode"] for row in layers] == MODES
    for row in layers:
        assert positive(row, "single_ms", "sustained_ms", "ratio", "limit_ms")
        assert row["fp8_gemms"] == (3 if row["mode"] in FP8_MODES else 0)


def test_kernels(results):
    rows = only_table(results, "kernels")
    elsewhere = COMPUTE_BOUND | ATTENTION | LAYER
    assert {row["operator"] for row in rows} == set(_core.op_names()) - elsewhere
    for row in rows:
        assert positive(row, "bytes", "us", "tb_s", "limit_us", "percent_of_copy")
    sizes = {(row["operator"], row["case"]): row["bytes"] for row in rows}
    matrix = 64 * 48
    assert sizes["quantize", "e4m3 both"] == matrix * (2 + 1 + 1)
    assert sizes["quantize", "e5m2 both, bias gradient"] == matrix * (2 + 1 + 1) + 48 * 2
    assert sizes["quantize", "mxfp8 both"] == matrix * (2 + 1 + 1) + 128 * 4 + 4 * 128
    pairs, scales = 64 * 24 + 48 * 32, 2 * 128 * 4
    maxima = 2 * 4 + _core.AMAX_PARTIALS * 4
    assert sizes["quantize", "nvfp4 both"] == matrix * 2 + pairs + scales + maxima
    assert sizes["dequantize", "e4m3 rows"] == matrix * (1 + 2)
    assert sizes["dequantize", "mxfp8 rows"] == matrix * (1 + 2) + 128 * 4
    assert sizes["fill", "f32"] == matrix * 4


def test_kernels_attention(results):
    rows = only_table(results, "kernels_attention")
    assert {row["operator"] for row in rows} == ATTENTION
    for row in rows:
        assert positive(row, "bytes", "us", "tb_s", "limit_us", "percent_of_copy")
    sizes = {(row["operator"], row["case"]): row["bytes"] for row in rows}
    scores, matrix = 1 * 2 * 8 * 16, 8 * 16
    assert sizes["softmax", "no mask"] == scores * (2 + 2)
    assert sizes["softmax", "dropout and probabilities"] == scores * (2 + 2 + 2)
    assert sizes["softmax_backward", "dropout"] == scores * (2 + 2 + 2)
    assert sizes["dropout_add", "dropout, residual"] == matrix * (2 + 2 + 2)
    assert sizes["dropout_backward", "f32 with bias gradient"] == matrix * (4 + 4) + 16 * 4
    assert sizes["rope", "sbhd"] == 2 * 4 * 2 * 16 * (2 + 2) + 4 * 16 * 4
    assert sizes["cache_append", "pages"] == 2 * 2 * 4 * 2 * 16 * (2 + 2)
    assert sizes["cache_gather", "pages"] == 2 * 2 * 4 * 2 * 16 * (2 + 2)
    assert sizes["attention_merge", "outputs"] == 2 * 4 * 2 * (16 * (4 + 2 + 4) + 3 * 4)
    assert sizes["attention_merge", "gradients"] == 2 * 4 * 2 * 16 * (4 + 2 + 4)


def test_attention(results, device):
    """The forward once, the gradient in each format; of all, causal and capped scores."""
    rows = only_table(results, "attention")
    ran = [(row["operator"], row["format"], row["scores"]) for row in rows]
    formats = {"attention": 2, "attention_backward": 3}
    capped = sum(formats.values()) if device == "cpu" else 2  # in FP8 it is refused on CUDA
    assert len(ran) == len(set(ran)) == 2 * sum(formats.values()) + capped
    for row in rows:
        assert positive(row, "ms", "tflops", "ceiling", "percent")


def test_optimizers(results):
    steps, norms, host = tables(results, "optimizers").values()
    names = {"FusedAdam bf16, fp32 masters", "torch AdamW fp32, fused"}
    assert names <= {row["optimizer"] for row in steps}
    assert {"l2norm bf16", "torch._foreach_norm bf16"} <= {row["norm"] for row in norms}
    for row in (*steps, *norms):
        assert positive(row, "ms", "rate", "share")
    assert names <= {row["optimizer"] for row in host}
    for row in host:
        assert positive(row, "us", "each_ns", "ratio")


def test_recipes(results, device):
    """Every recipe runs its products as it says, and its numbers are near those of bf16."""
    printed, content = results["recipes"]
    assert len(content["tables"]) == 2
    for title, rows in content["tables"].items():
        assert [row["recipe"] for row in rows] == ["bf16", *FP8_MODES, "mxfp8", "nvfp4"]
        kinds = ["12 bf16", *["12 FP8"] * len(FP8_MODES), "12 emulated", "12 emulated"]
        assert [row["products"] for row in rows] == kinds
        assert rows[0]["output"] == rows[0]["gradients"] == 0 < rows[0]["ms"]
        assert rows[0]["speed"] == 1
        for row in rows[1:]:
            assert positive(row, "ms", "speed", "limit_ms", "gradients")
            assert row["gradients"] < 0.5 and row["output"] < 0.1
            assert (row["peak_mib"] is not None) == (device == "cuda")
            assert f"| {row['recipe']} | {row['products']} |" in printed.split(f"{title}:")[1]


def test_parameter_memory(results):
    """A forward casts no quantized weight; forms that can not be turned are held for gradients."""
    rows = {row["recipe"]: row for row in only_table(results, "parameter_memory")}
    groups = ("mxfp8", "mxfp8 32x32", "nvfp4", "nvfp4 1x16")
    assert list(rows) == [*FP8_MODES, "block 1x128", *groups]
    twice = ("row", "block 1x128", "mxfp8", "nvfp4 1x16")
    for name, row in rows.items():
        assert name in groups or row["fp8_gemms"] == 4
        assert row["casts_plain"] - row["casts"] == 4
        assert row["bytes_after"] == row["bytes"]
        once, forms = 0.5 if name.startswith("nvfp4") else 1.0, 2 if name in twice else 1
        # Scales, and what stays in bf16.
        assert once * forms < row["bytes_each"] < once * forms + 0.15
        assert once < row["frozen_each"] < once + 0.08


def test_kernels_layer(results):
    rows = only_table(results, "kernels_layer")
    assert {row["operator"] for row in rows} == LAYER
    for row in rows:
        assert positive(row, "bytes", "us", "tb_s", "limit_us", "percent_of_copy")
    sizes = {
        (row["operator"], row["case"]): row["bytes"] for row in rows if row["shape"] == "16 x 48"
    }
    matrix, statistics, pair = 16 * 48, 2 * 16 * 4, 2 * 48 * 2
    assert sizes["norm", "layernorm, e4m3 both"] == matrix * (2 + 1 + 1) + statistics + pair
    assert sizes["norm_backward", "layernorm"] == matrix * (2 + 2 + 2) + statistics + pair + 48 * 2
    assert sizes["activation", "swiglu"] == matrix * (4 + 2)
    assert sizes["activation_backward", "swiglu, e5m2 both"] == matrix * (2 + 4 + 2 + 2)


def test_import_time(import_results):
    rows = only_table(import_results, "import_time")
    assert [row["what"] for row in rows] == ["torch", "transformer_engine.pytorch adds"]
    assert all(positive(row, "ms", "low_ms", "high_ms") for row in rows)
    said = import_results["import_time"][1]["environment"]["problems"]
    assert all(problem.startswith("the import adds") for problem in said)


def test_import_time_check_fails_on_what_should_not_be(tmp_path):
    """A package that starts a process while it is imported; found before the real one."""
    fake = tmp_path / "transformer_engine"
    (fake / "pytorch").mkdir(parents=True)
    (fake / "__init__.py").write_text('__version__ = "0"\n')
    (fake / "pytorch" / "__init__.py").write_text("import os\nos.system('true')\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "import_time.py"), "--check", "--quick"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "os.system" in done.stdout


def test_host_calls(results):
    """Each module in each way; `torch.autocast` does not take a call off the path of plain ones."""
    rows = only_table(results, "host_calls")
    modules = ["torch.nn.Linear", "Linear", "LayerNormLinear", "LayerNormMLP"]
    modules += ["LayerNorm", "RMSNorm", "TransformerLayer"]
    assert list(dict.fromkeys(row["module"] for row in rows)) == modules
    for row in rows:
        assert positive(row, "forward_us", "backward_us", "step_ratio", "forward_frames")
        assert row["backward_frames"] >= 0
    frames = {(row["module"], row["way"]): row["forward_frames"] for row in rows}
    block = frames["torch.nn.Linear", "amp"] - frames["torch.nn.Linear", "plain"]
    for module in modules[1:4]:
        assert frames[module, "amp"] - block < 2 * frames[module, "plain"]


def test_host_compiled(results):
    """A compiled layer is one operator in each direction, as in eager mode."""
    rows = only_table(results, "host_compiled")
    recipes = ["bf16", "delayed", "current", "block"]
    assert [(row["recipe"], row["way"]) for row in rows] == [
        (recipe, way) for recipe in recipes for way in ("eager", "compiled")
    ]
    for row in rows:
        assert row["operators"] == 2.0
        assert positive(row, "forward_us", "backward_us", "step_ratio")
        assert (row["conditions"] > 0) == (row["way"] == "compiled")


def test_compiled_gpt(results):
    rows = only_table(results, "compiled_gpt")
    assert [row["way"] for row in rows] == 4 * ["eager", "compiled"]
    for row in rows:
        assert positive(row, "ms", "ratio") and row["low"] <= row["ms"] <= row["high"]
        assert row["way"] == "compiled" or row["ratio"] == 1.0


def of_two_ranks(name, *sizes):
    """Lines that a benchmark of several ranks prints, over gloo."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, "2", ROOT / "benchmarks" / f"{name}.py", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.splitlines()


@pytest.mark.nightly
def test_context_parallel():
    """A row for one rank and one for each way."""
    sizes = "--tokens", "64", "--heads", "2", "--channels", "8", "--turns", "1", "--calls", "1"
    rows = [line.split() for line in of_two_ranks("context_parallel", *sizes)[2:]]
    assert [row[0] for row in rows] == ["one", "p2p", "all_gather", "a2a"]
    own = 32 * 2 * 8 * 4  # bytes of the queries of a rank
    ring, heads = f"{2 * own * 3 / 1e6:.3f}", f"{8 * own / 2 / 1e6:.3f}"
    assert [row[-2] for row in rows] == ["0.000", ring, ring, heads]


@pytest.mark.nightly
def test_fsdp():
    """Half of the bytes of bf16 travel, and losses differ by less than those of seeds."""
    sizes = "--hidden", "256", "--channels", "64", "--layers", "2", "--tokens", "32"
    turns = "--turns", "1", "--calls", "1", "--steps", "3", "--seeds", "2"
    _, _, _, *rows = of_two_ranks("fsdp", *sizes, *turns)
    recipes = ["delayed", "current", "block"]
    at = rows.index("losses after 3 steps, of 2 seeds")
    figures = {row.split()[0]: [float(cell) for cell in row.split()[1:]] for row in rows[:at]}
    assert list(figures) == recipes
    plain = 2 * 2 * 12 * 256**2 * 2 / 2 / 1e6  # two layers and gathers, half of the weights in bf16
    for values in figures.values():
        assert all(value > 0 for value in values[:9])
        assert values[6] == round(plain, 3)
        assert 0.5 <= values[8] <= 0.51
    losses = [(*row.split()[:2], *map(float, row.split()[2:])) for row in rows[at + 1 :]]
    assert [row[:2] for row in losses] == [(r, w) for r in recipes for w in ("DDP", "A", "B")]
    for at in range(0, len(losses), 3):
        ddp, a, b = (row[2:] for row in losses[at : at + 3])
        assert a == ddp
        spread = max(ddp) - min(ddp)
        assert all(abs(mine - plain) < spread for mine, plain in zip(b, ddp, strict=True))
