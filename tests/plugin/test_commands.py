# SPDX-License-Identifier: Apache-2.0
"""`python -m transformer_engine.plugin`, and conformance of operators of the C library."""

import json

import pytest
import torch
from c_plugins import build, needs_compiler, usual
from thinning import one_each

import transformer_engine.plugin as plugins
from transformer_engine import _core
from transformer_engine.plugin import __main__ as program, core as plugin, definitions
from transformer_engine.plugin.conformance import matrix

pytestmark = pytest.mark.usefixtures("manager")
WRONG = {  # fields that each definition is given wrong, by operator
    "fill": {"value": 3.0},
    "norm": {"eps": 0.5},
    "gemm": {"b_transposed": 0},
    "activation": {"kind": 0},
    "dropout_add": {"residual": None},
    "quantize": {"column": None},
}


def implementation(op, vendor="acme", **changed):
    """A vendor's, by the definition of the operator, with fields changed."""
    function = definitions.definition(op)
    return plugin.OpImpl(
        f"te_{op}", f"vendor.{vendor}", plugin.BackendImplKind.VENDOR,
        lambda fields: function({**fields, **changed}), vendor=vendor,
    )  # fmt: skip


def gelu(input, quantizer):
    return torch.nn.functional.gelu(input.float(), approximate="tanh").to(input.dtype)


def takes(input, quantizer):
    return quantizer is None or "it casts nothing"


def register(op, fn, vendor="acme", supports=takes):
    kind = plugin.BackendImplKind.VENDOR
    impl = plugin.OpImpl(op, f"vendor.{vendor}", kind, fn, vendor=vendor, supports=supports)
    plugin.get_registry().register(impl)


# ---- operators of the C library ------------------------------------------------------------------


@one_each(op=[op for op in _core.op_names() if not op.startswith("attention")])
def test_definitions_conform(op):
    report = plugins.check(implementation(op), dtypes=[torch.bfloat16])
    assert report.passed and report.op_name == f"te_{op}", report
    assert {row.outcome for row in report.rows} == {"passed"}, report


@pytest.mark.parametrize("op", WRONG)
def test_wrong_ones_fail(op):
    report = plugins.check(implementation(op, **WRONG[op]), dtypes=[torch.float32])
    assert not report.passed, report
    assert any(row.outcome == "failed" for row in report.rows)


def test_what_is_refused_says_why():
    impl = plugin.OpImpl(
        "te_norm", "vendor.acme", plugin.BackendImplKind.VENDOR, lambda fields: None,
        vendor="acme", supports=lambda fields: "no norms today",
    )  # fmt: skip
    report = plugins.check(impl, dtypes=[torch.float32], match="rmsnorm")
    assert {(row.outcome, row.why) for row in report.rows} == {("refused", "no norms today")}
    assert not report.passed


def test_nothing_stays_registered():
    """A check leaves no backend behind, whatever the implementation raises."""

    def fails(fields):
        raise ValueError("no")

    impl = plugin.OpImpl("te_fill", "reference.x", plugin.BackendImplKind.REFERENCE, fails)
    assert not plugins.check(impl, dtypes=[torch.float32]).passed
    x = torch.zeros(2, 2)
    _core.fill(x, 2.0)
    assert bool((x == 2.0).all())


def test_what_can_not_be_checked():
    with pytest.raises(NotImplementedError, match="te_fill: this library's own"):
        plugins.check(plugins.core.get_manager().explain("te_fill").selected)
    with pytest.raises(ValueError, match="te_nothing"):
        plugins.check(print, "te_nothing")


@needs_compiler
def test_a_shared_object():
    """Its fill adds a half: it is wrong, and says what it does not take."""
    plugin.register_library(plugin.get_registry(), usual())
    report = plugins.check(plugin.get_registry().get_implementation("te_fill", "vendor.mine"))
    outcomes = {(row.dtype, row.outcome) for row in report.rows}
    assert outcomes == {("float32", "failed"), ("bfloat16", "refused"), ("float16", "refused")}


@needs_compiler
def test_a_right_shared_object(tmp_path):
    path = build(tmp_path, "right", NAME="right", ADDED="0.0F")
    plugin.register_library(plugin.get_registry(), path)
    impl = plugin.get_registry().get_implementation("te_fill", "vendor.right")
    assert plugins.check(impl).passed
    assert impl.fn.calls == 3


# ---- commands ------------------------------------------------------------------------------------


def test_coverage_is_written(tmp_path, capsys):
    register("gelu", gelu)
    register("silu", gelu)
    plugin.get_registry().register(implementation("fill"))
    files = [str(tmp_path / name) for name in ("made.md", "made.json")]
    assert program.main(["coverage", "--markdown", files[0], "--json", files[1]]) == 0
    said = capsys.readouterr()
    assert "silu by vendor.acme" in said.err and "absent" in said.out
    page = (tmp_path / "made.md").read_text()
    assert "| `gelu` | acme | float32 | none | passes" in page
    assert "| `gelu` | acme | float32 | current | refused 1: it casts nothing |" in page
    found = json.loads((tmp_path / "made.json").read_text())
    outcomes = {(cell["op_name"], cell["recipe"], cell["outcome"]) for cell in found["cells"]}
    assert ("silu", "none", "failed") in outcomes and ("te_fill", "none", "passes") in outcomes
    assert ("rmsnorm_fwd", "none", "absent") in outcomes
    failed = [cell for cell in found["cells"] if cell["outcome"] == "failed"]
    assert all("off by" in cell["why"] and cell["failed"] for cell in failed)


def test_what_a_vendor_lacks_is_told_by_dtype_and_recipe():
    """In the cells in which it would be if he had it."""
    ops = ["te_fill", "te_quantize", "te_amax", "gelu", "get_cudnn_version"]
    made = {op: definitions.definition(op[3:]) for op in ops if op.startswith("te_")}
    for op, function in made.items():
        whole = plugin.OpImpl(
            op, "vendor.whole", plugin.BackendImplKind.VENDOR, function, vendor="whole"
        )
        plugin.get_registry().register(whole)
    register("silu", gelu)
    cells = matrix.matrix(named=["acme", "whole"], ops=ops).cells

    def of(vendor, op):
        found = [cell for cell in cells if (cell.vendor, cell.op_name) == (vendor, op)]
        absent = {cell.outcome == "absent" for cell in found}
        return sorted((cell.dtype, cell.recipe) for cell in found), absent

    for op in made:
        assert of("acme", op) == (of("whole", op)[0], {True}) and of("whole", op)[1] == {False}
    dtypes = ("bfloat16", "float16", "float32")
    assert of("acme", "te_fill")[0] == [(dtype, "none") for dtype in dtypes]
    assert {recipe for _, recipe in of("acme", "te_quantize")[0]} > {"delayed", "mxfp8", "nvfp4"}
    assert ("bfloat16", "current") in of("acme", "gelu")[0]
    assert of("acme", "get_cudnn_version") == ([("", "")], {True})


@pytest.mark.parametrize("op", ["gelu", "silu"])
def test_check_ends_with_its_status(op, capsys):
    register(op, gelu)
    assert program.main(["check", "ACME"]) == (op == "silu")
    assert ("failed: silu by vendor.acme" in capsys.readouterr().out) == (op == "silu")


def test_check_of_what_refuses_everything(capsys):
    register("gelu", gelu, supports=lambda *args: "not today")
    assert program.main(["check", "acme"]) == 1
    assert "no case passed" in capsys.readouterr().err


def test_wrong_arguments(capsys):
    assert program.main(["coverage"]) == 2
    assert "no plug-in has registered" in capsys.readouterr().err
    register("gelu", gelu)
    assert program.main(["check", "nobody"]) == 2
    assert "who has: acme" in capsys.readouterr().err
    assert program.main(["check", "acme", "--device", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        program.main([])


def test_this_librarys_own():
    found = matrix.matrix("cpu", ["default.native"], ["gelu", "swap_first_dims"])
    assert {cell.op_name for cell in found.cells} == {
        "gelu",
        "swap_first_dims",
    } and not found.failed
    assert {cell.outcome for cell in found.cells} == {"passes"}


@needs_compiler
def test_other_devices_and_unknown_operators_are_refused():
    plugin.register_library(plugin.get_registry(), usual())
    register("mine_alone", gelu)
    made = matrix.matrix("meta", ["acme"], lacking=False)
    found = {cell.op_name: cell for cell in made.cells}
    assert found["te_fill"].outcome == "refused" and found["te_fill"].why == "it is for cpu"
    assert found["mine_alone"].why == "it is no operator of this library"


def test_an_operator_that_there_is_not(capsys):
    register("gelu", gelu)
    assert program.main(["coverage", "--op", "te_nrom"]) == 2
    assert "no operator te_nrom" in capsys.readouterr().err
