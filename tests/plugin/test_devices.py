# SPDX-License-Identifier: Apache-2.0
"""What a vendor of a chip gets: plug-ins on a device that this library has no kernels for."""

import ctypes
import json

import pytest
import torch
from c_plugins import build, needs_compiler
from comparators import assert_bits
from devices import acme
from plugged import FFN, HIDDEN, RECIPES, SAME, TOKENS, bound_of, data, distance, made, ran, step
from thinning import one_each

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.plugin import core as plugin, definitions

pytestmark = [pytest.mark.npu, pytest.mark.usefixtures("manager")]
BY_DEFINITION = "/reference.torch"


def policy(strict=False, **orders):
    """Vendors first; with orders of operators."""
    return plugin.policy_context(
        plugin.SelectionPolicy.from_dict("vendor", strict=strict, per_op_order=orders)
    )


def vendor():
    found = acme.Vendor()
    found.register(plugin.get_registry())
    return found


def models(device, dtype=torch.float32):
    """Layers that have all operators of the vendor."""
    options = {"params_dtype": dtype, "device": device}
    return torch.nn.Sequential(
        te.TransformerLayer(HIDDEN, FFN, 4, hidden_dropout=0.0, attention_dropout=0.0, **options),
        te.LayerNormMLP(HIDDEN, FFN, normalization="RMSNorm", activation="swiglu", **options),
    )


def taken(found):
    """Operators of those implementations that a vendor has run."""
    return {key.partition("/")[0] for key in found if key.endswith("/vendor.acme")}


# ---- a vendor of ten operators -------------------------------------------------------------------


@one_each(recipe=["plain", "delayed", "mxfp8"], strict=[False, True], compiled=[False, True])
def test_a_vendor_takes_exactly_its_operators(npu, recipe, strict, compiled):
    model, x = models(npu), data(npu)
    wanted = step(model, x, RECIPES[recipe])
    te.reset()
    found, before = vendor(), plugins.counts()
    call = torch.compile(model, backend="aot_eager") if compiled else model
    got = step(call, x, RECIPES[recipe], policy(strict))
    done = ran(before)
    expected = set(acme.OPERATORS) - ({"quantize"} if recipe == "plain" else set())
    assert taken(done) == expected
    counted = {key.partition("/")[0]: n for key, n in done.items() if key.endswith("acme")}
    assert counted == dict(found.calls)
    left = {key.partition("/")[0] for key in done if key.endswith(BY_DEFINITION)}
    replaced = {"te_norm", "te_activation", "te_attention", "te_gemm"}
    assert not left & (replaced | {f"{op}_backward" for op in replaced})
    for one, exact in zip(got, wanted, strict=True):
        assert distance(one, exact) < bound_of(recipe)


def test_the_usual_policy(npu):
    """Ours come first, and there are none: so the vendor's do, before definitions, on npu alone."""
    found, model, x = vendor(), models(npu), data(npu)
    before = plugins.counts()
    models("cpu")(data("cpu"))
    assert not ran(before)
    step(model, x)
    assert set(found.calls) == set(acme.OPERATORS) - {"quantize"}
    called = found.calls.copy()
    order = plugin.SelectionPolicy(per_op_order=[("*", ("reference",))])
    step(model, x, None, plugin.policy_context(order))
    assert found.calls == called


@pytest.mark.parametrize("op", ["layernorm_fwd", "gelu", "fused_attn_bwd", "quantize"])
def test_conformance_there(npu, op):
    vendor()
    impl = plugin.get_registry().get_implementation(op, "vendor.acme")
    report = plugins.check(impl, device=npu, dtypes=[torch.bfloat16])
    assert report.passed, report
    assert {row.dtype for row in report.rows} <= {"bfloat16", ""}


# ---- orders --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["plain", "current"])
@pytest.mark.parametrize("order", ["reference", "vendor|reference", "vendor|flagos", "vendor"])
def test_orders_of_every_operator(npu, order, recipe):
    """Definitions run where an order names them, or this library's own, which they are there."""
    vendor()
    module, x = made("LayerNormMLP", npu), data(npu)
    wanted = step(module, x, RECIPES[recipe])
    tokens = order.split("|")
    only = plugin.policy_context(plugin.SelectionPolicy(per_op_order=[("*", tokens)]))
    if order == "vendor":  # nobody adds residuals, or casts in other directions
        with pytest.raises(NotImplementedError, match="on npu:0") as caught:
            step(made("TransformerLayer", npu), x, RECIPES["delayed"], only)
        assert "te_" in str(caught.value)
        return
    got = step(module, x, RECIPES[recipe], only)
    for one, exact in zip(got, wanted, strict=True):
        assert distance(one, exact) < bound_of(recipe)


def test_an_order_without_definitions_says_whom_it_has_asked(npu):
    def takes(fields):
        return "rows are odd"

    register_fields("norm", lambda fields: None, supports=takes)
    module, x = made("RMSNorm", npu), data(npu)
    with policy(te_norm=["vendor"]), pytest.raises(NotImplementedError) as caught:
        module(x)
    text = str(caught.value)
    assert "te_norm" in text and "vendor.test (rows are odd)" in text
    with policy(te_norm=["vendor", "reference"]):
        module(x)


# ---- functions of fields -------------------------------------------------------------------------


def register_fields(op, function, **options):
    impl = plugin.OpImpl(
        f"te_{op}", "vendor.test", plugin.BackendImplKind.VENDOR, function, vendor="test", **options
    )
    plugin.get_registry().register(impl)
    return impl


def by_definition(op):
    """A vendor's function that is the definition."""
    return definitions.definition(op)


def training(device):
    """Programs that run all operators of the C library but those of caches and soft caps."""
    options = {"activation": "swiglu", "params_dtype": torch.bfloat16, "device": device}
    layer = te.TransformerLayer(HIDDEN, FFN, 4, **options)
    return layer, data(device, torch.bfloat16)


@pytest.mark.parametrize("recipe", ["plain", "delayed", "mxfp8"])
@pytest.mark.parametrize("where", ["npu", "cpu"])
def test_functions_take_every_operator(where, recipe):
    """Strictly, each of the operators by a function of Python: no definition of ours runs."""
    device = torch.device(where)
    for op in _core.op_names():
        register_fields(op, by_definition(op))
    module, x = training(device)
    before = plugins.counts()
    step(module, x, RECIPES[recipe], policy(strict=True))
    done = ran(before)
    assert done and all(key.endswith("/vendor.test") for key in done)
    wanted = {"norm", "gemm", "activation", "attention", "dropout_add"}
    assert {key.partition("/")[0] for key in done} >= {f"te_{op}" for op in wanted} | {
        f"te_{op}_backward" for op in ("norm", "activation", "attention", "dropout")
    }


def test_a_function_is_asked_before_adapters_and_may_refuse(npu):
    found = vendor()
    register_fields(
        "norm", by_definition("norm"), supports=lambda f: f["input"].shape[0] < 8 or "long"
    )
    module, x = made("RMSNorm", npu), data(npu)
    with policy():
        module(x)
        module(x[:2])
    assert found.calls["rmsnorm_fwd"] == 1 and plugins.counts()["te_norm/vendor.test"] == 1
    assert "long" in str(plugins.explain("te_norm", device=npu))


def test_what_no_other_operator_expresses(npu):
    """The norm of heads, soft caps, caches and copies: the function gets the calls."""
    for op in ("norm", "softcap", "cache_gather", "cast", "amax"):
        register_fields(op, by_definition(op))
    x, place = data(npu).view(-1, HIDDEN), torch.empty(TOKENS, HIDDEN, device=npu)
    caches = [torch.randn(2, 8, 2, 8, device=npu) for _ in range(2)]
    lengths = torch.tensor([3, 8], dtype=torch.int32, device=npu)
    calls = {
        "norm": ((x, _core.NORM_L2), {"wide": place, "eps": 1e-5}),
        "softcap": ((x, 30.0), {"wide": place}),
        "cache_gather": ((*caches, lengths, *(c.clone() for c in caches)), {}),
        "cast": ((x, torch.empty_like(x, dtype=torch.bfloat16)), {}),
        "amax": ((x, torch.empty(_core.AMAX_PARTIALS, device=npu)), {"hadamard": 1}),
    }
    before = plugins.counts()
    with policy(strict=True):
        for op, (args, fields) in calls.items():
            _core.obeying(op)(*args, **fields)
    assert ran(before) == {f"te_{op}/vendor.test": 1 for op in calls}


def test_limits_of_a_function(npu):
    """`supported_dtypes` is asked of the fields."""
    register_fields("fill", lambda f: f["output"].zero_(), supported_dtypes={"float32"})
    fill = _core.obeying("fill")
    with policy():
        for dtype, value in ((torch.float32, 0.0), (torch.bfloat16, 2.0)):
            x = torch.ones(2, 3, dtype=dtype, device=npu)
            fill(x, 2.0)
            assert_bits(x, torch.full_like(x, value))
            plugin.get_manager().operator("te_fill")(x, 2.0)
            assert_bits(x, torch.full_like(x, value))


def test_casts_of_programs(npu):
    """Quantizers that a program calls itself ask the selection, and what they made does, too."""
    for op in ("quantize", "dequantize"):
        register_fields(op, by_definition(op))
    before = plugins.counts()
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, npu)
    with policy():
        quantizer(data(npu)).dequantize()
    done = ran(before)
    assert done["te_quantize/vendor.test"] == 1 and done["te_dequantize/vendor.test"] == 1


def test_what_a_function_raises_says_whose_it_is(npu):
    def fails(fields):
        raise ValueError("the queue is gone")

    register_fields("norm", fails)
    with policy(), pytest.raises(ValueError, match="the queue is gone") as caught:
        made("RMSNorm", npu)(data(npu))
    assert any("vendor.test" in note for note in caught.value.__notes__)


# ---- coverage ------------------------------------------------------------------------------------


def test_coverage(npu):
    bare = plugins.coverage("npu")
    assert set(bare.of("reference")) >= {f"te_{op}" for op in _core.op_names()}
    assert not bare.of("nobody")
    vendor()
    model, x = models(npu), data(npu)
    with policy():
        model(x)  # the first call of a process runs module by module
    with policy():
        before = plugins.coverage(npu).row("te_dropout_add").runners[0].calls
        model(x)
        found = plugins.coverage(npu)
    assert set(found.of("vendor")) >= acme.REPLACED
    norm, add = found.row("te_norm"), found.row("te_dropout_add")
    assert [one.impl_id for one in norm.runners][-1] == "reference.torch"
    assert {one.op_name for one in norm.runners if one.calls} >= {"layernorm_fwd", "rmsnorm_fwd"}
    assert [one.kind for one in add.runners] == ["reference"] and add.runners[0].calls > before
    assert norm.runs and "vendor.acme (rmsnorm_fwd) x" in str(found)
    assert "| `te_norm` |" in found.to_markdown()
    rows = {row["op_name"]: row for row in json.loads(found.to_json())["operators"]}
    assert rows["te_norm"]["runners"][0]["vendor"] == "acme"
    only = plugin.SelectionPolicy(per_op_order=[("*", ("vendor",))])
    closed = plugins.coverage("npu", only)
    assert "te_fill" in closed.of("nobody") and "vendor" in closed.row("te_fill").closed
    assert [one.kind for one in plugins.coverage("cpu").row("te_norm").runners] == ["flagos"]


def test_explanation_there(npu):
    text = str(plugins.explain("te_gemm", device=npu))
    assert "no kernels for npu" in text and " 1  reference.torch" in text
    with policy(te_gemm=["vendor"]):
        assert plugins.explain("te_gemm", device=npu).selected is None


# ---- shared objects ------------------------------------------------------------------------------


@needs_compiler
def test_a_shared_object_for_its_own_device(npu, tmp_path):
    """It adds the type of device by the host table, and works on that device's memory."""
    path = build(tmp_path, "chip", source="c_plugins_npu.c")
    plugin.register_library(plugin.get_registry(), path)
    x = torch.randn(6, 32, device=npu)
    module = te.RMSNorm(32, device=npu)
    wanted = module(x).detach()
    before = plugins.counts()
    with policy():
        got = module(x).detach()
        _core.obeying("fill")(x, 3.0)
        te.RMSNorm(32, device="cpu")(x.cpu())  # not its device
    assert_bits(x, torch.full_like(x, 3.0))
    assert distance(got, wanted) < SAME
    found = ran(before)
    assert found["te_norm/vendor.chip"] == 1 and found["te_fill/vendor.chip"] == 1
    row = plugins.coverage(npu, plugin.SelectionPolicy("vendor")).row("te_norm")
    assert row.runners[0].impl_id == "vendor.chip"
    elsewhere = plugins.coverage("cpu", plugin.SelectionPolicy("vendor")).row("te_norm")
    assert "vendor.chip" not in elsewhere.in_words()
    impl = plugin.get_registry().get_implementation("te_fill", "vendor.chip")
    report = plugins.check(impl, device=npu)
    assert report.passed and any(row.outcome == "refused" for row in report.rows), report


@needs_compiler
def test_a_shared_object_gets_the_current_stream(npu, tmp_path, monkeypatch):
    """Under each torch; of streams whose package tells no handle it gets NULL."""
    path = build(tmp_path, "streamed", source="c_plugins_npu.c")
    (slot,) = [slot for slot in _core.load_plugin(path) if slot.op == "fill"]
    filled_on = ctypes.CDLL(str(path)).chip_filled_on
    filled_on.restype = ctypes.c_void_p
    there = [torch.zeros(2, 3, device=f"npu:{index}") for index in range(2)]

    def handles(index):
        return [(slot(x, 1.0), filled_on())[1] for x in (there[index], there[1 - index])]

    streams = [torch.npu.Stream(index) for index in (0, 1, 0, 1)]
    for stream in streams:
        index = stream.device_index
        assert handles(index) == [None, None]
        with torch.npu.stream(stream):
            assert stream.stream_id and handles(index) == [stream.stream_id, None]
    monkeypatch.setattr(torch.npu, "current_stream", Silent)
    assert handles(0) == [None, None]


class Silent:
    """A stream of a package that tells no handles."""

    def __init__(self, index):
        del index

    @property
    def native_handle(self):
        raise RuntimeError("Backend doesn't support getting stream native handle.")
