# SPDX-License-Identifier: Apache-2.0
"""The examples of plug-ins, out of the tree: installed by pip, found by their entry points."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from c_plugins import CC, needs_compiler
from comparators import assert_nmse
from tols import tol

import transformer_engine

ROOT = Path(__file__).resolve().parents[2]
OUTER = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")  # of the make that runs these tests
NAMES = {
    "plugin_c": ["te_norm/vendor.example_c"],
    "plugin_python": ["rmsnorm_fwd/vendor.example", "rmsnorm_bwd/vendor.example"],
}

EPS = 1e-4

PROGRAM = f"""
import itertools
import sys
import torch
import transformer_engine.pytorch as te
from transformer_engine.plugin import core, counts

torch.manual_seed(1)
made = []
for dtype, zero_centered in itertools.product((torch.float32, torch.bfloat16), (False, True)):
    module = te.RMSNorm(
        96, eps={EPS}, zero_centered_gamma=zero_centered, dtype=dtype, device="cpu"
    )
    with torch.no_grad():
        module.weight.uniform_(-1, 1)
    x = torch.randn(2, 7, 96, dtype=dtype, requires_grad=True)
    grad = torch.randn(2, 7, 96, dtype=dtype)
    y = module(x)
    results = y, *torch.autograd.grad(y, (x, module.weight), grad)
    made.append([t.detach() for t in (x, module.weight + zero_centered, grad, *results)])
torch.save(made, sys.argv[1])
print(core.get_discovered_plugin())
print(counts())
"""

CHECK = """
import torch
import transformer_engine.pytorch
from transformer_engine.plugin import check
from transformer_engine.plugin.core import OpImpl, get_registry


def by_slot(slot):
    def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
        if quantizer is not None:
            raise NotImplementedError("the slot casts nothing")
        out = torch.empty_like(input, dtype=otype) if ln_out is None else ln_out
        matrix, wide = (t.view(-1, t.shape[-1]) if t.is_contiguous() else t for t in (input, out))
        rsigma = input.new_empty(input.shape[:-1].numel(), dtype=torch.float32)
        given = {"wide": wide, "gamma": weight, "rsigma": rsigma, "eps": eps}
        given["zero_centered"] = zero_centered_gamma
        if matrix.dim() != 2 or wide.dim() != 2 or not slot.supports(matrix, 1, **given):
            raise NotImplementedError("the slot does not take it")
        slot(matrix, 1, **given)
        return out, None, rsigma

    return rmsnorm_fwd


for name in get_registry().list_operators():
    for impl in get_registry().get_implementations(name):
        if (impl.vendor or "") == "example":
            given = by_slot(impl.fn), "rmsnorm_fwd"
            report = check(*(given if name == "te_norm" else (impl,)), device="cpu")
            passed = sum(row.outcome == "passed" for row in report.rows)
            print(report if not report.passed else f"{name} passed {passed}")
"""

pytestmark = [
    needs_compiler,
    pytest.mark.skipif(
        not (ROOT / "examples").exists() or shutil.which("make") is None,
        reason="needs the source tree and make",
    ),
]


def environment(*folders, **variables):
    kept = {k: v for k, v in os.environ.items() if k not in OUTER and not k.startswith("TE_FL_")}
    package = str(Path(transformer_engine.__file__).parents[1])
    return {**kept, "PYTHONPATH": os.pathsep.join([*map(str, folders), package]), **variables}


@pytest.fixture(scope="module", params=list(NAMES))
def installed(request, tmp_path_factory):
    """(Name of the example, where pip has installed it)."""
    folder = tmp_path_factory.mktemp(request.param)
    source, site = folder / "source", folder / "site"
    unwanted = shutil.ignore_patterns("*.so", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT / "examples" / request.param, source, ignore=unwanted)
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [sys.executable, *install, "--target", str(site), str(source)],
        cwd=folder, env=environment(CC=CC), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source)
    return request.param, site


def run(folder, site, **variables):
    """What the program says; its numbers are those of torch."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder / "made.pt")],
        cwd=folder, env=environment(site, **variables), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for x, weight, grad, *results in torch.load(folder / "made.pt"):
        x, weight = (t.double().requires_grad_() for t in (x, weight))
        y = torch.nn.functional.rms_norm(x, (96,), weight, EPS)
        exact = y.detach(), *torch.autograd.grad(y, (x, weight), grad.double())
        for found, wanted in zip(results, exact, strict=True):
            assert_nmse(found, wanted, tol("chain", found.dtype, 96))
    return done.stdout


def test_modules_run_it_with_the_numbers_of_torch(installed, tmp_path):
    name, site = installed
    said = run(tmp_path, site, TE_FL_PREFER="vendor")
    assert "'entry_point', True)" in said
    for counted in NAMES[name]:
        assert f"'{counted}': 4" in said


def test_nobody_runs_it_who_does_not_ask(installed, tmp_path):
    said = run(tmp_path, installed[1])
    assert "'entry_point', True)" in said and "vendor.example" not in said


def test_it_passes_the_check(installed, tmp_path):
    name, site = installed
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=tmp_path, env=environment(site), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(NAMES[name]), done.stdout
    for line, counted in zip(sorted(lines), sorted(NAMES[name]), strict=True):
        op, said, number = line.split()
        assert (op, said) == (counted.partition("/")[0], "passed") and int(number) > 20


def test_the_c_file_is_short():
    assert len((ROOT / "examples/plugin_c/rmsnorm.c").read_text().splitlines()) < 100
