# SPDX-License-Identifier: Apache-2.0
"""Stages of modules with a norm: what `explain` prints, what Python may run.

Those of `Linear` and collectives: test_stages.py.
"""

import io

import pytest
import torch
from comparators import assert_nmse
from layer_reference import wide
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    counted,
    quantize_like_the_library,
    state_of,
    sum_bound,
)
from pytorch.module_cases import make, region
from pytorch.module_reference import norm64, values_of
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.execution.thread_state import current_state

FP8 = [None, "delayed", "current"]
KINDS = ["norm-linear", "gelu", "swiglu"]
GEMMS = {"norm-linear": 3, "gelu": 6, "swiglu": 6}
ROWS, IN, WIDTH = 7, 40, 24


def module_of(kind, device, **options):
    return make(kind, device, sizes=(IN, WIDTH), **options)


def text_of(module, x, recipe, **kwargs):
    file = io.StringIO()
    with region(recipe):
        te.explain(module, x, file=file, **kwargs)
    return file.getvalue()


# ---- explain -------------------------------------------------------------------------------------

STAGES = {
    ("norm-linear", None): [
        "produce_input [norm] -> gemm_output [gemm]\n",
        "gemm_grad_weight [gemm] -> gemm_grad_input [gemm] -> norm_backward [norm_backward]\n",
    ],
    ("norm-linear", "delayed"): [
        "quantize_input [norm] -> quantize_weight [quantize] -> cast_bias [cast] -> gemm_output",
        "quantize_grad_output [quantize] -> gemm_grad_weight [gemm] -> requantize_weight",
    ],
    ("norm-linear", "current"): [
        "amax_input [norm] -> quantize_input [norm] -> amax_weight [amax]"
    ],
    ("gelu", None): [  # in bf16, which is activated in the GEMM's epilogue
        "fc1_produce_input [norm] -> fc1_gemm_output [gemm] -> fc2_gemm_output [gemm]\n",
        "fc1_produce_grad_output [activation_backward] -> fc1_gemm_grad_weight [gemm]",
    ],
    ("swiglu", None): [
        "fc1_gemm_output [gemm] -> fc2_produce_input [activation] -> fc2_gemm_output [gemm]\n"
    ],
    ("swiglu", "delayed"): [
        "fc1_quantize_input [norm] -> fc1_quantize_weight [quantize]",
        "fc2_quantize_input [activation] -> fc2_quantize_weight [quantize]",
        "fc1_quantize_grad_output [activation_backward] -> fc1_gemm_grad_weight [gemm]",
        "norm_backward [norm_backward]\n",
    ],
    ("gelu", "current"): [
        "fc2_amax_input [activation] -> fc2_quantize_input [activation]",
        "fc1_amax_grad_output [activation_backward] -> fc1_quantize_grad_output",
    ],
}


@pytest.mark.parametrize(("kind", "recipe"), STAGES, ids=lambda v: str(v))
def test_stages(device, kind, recipe):
    """No cast and no copy but those that the numbers need; sizes are those of the call."""
    dtype = torch.bfloat16 if recipe is None else torch.float32
    module = module_of(kind, device, dtype=dtype)
    x = torch.randn(2, 8, IN, device=device, dtype=dtype, requires_grad=True)
    text = text_of(module, x, recipe)
    for part in STAGES[kind, recipe]:
        assert part in text
    assert "forward: plan " in text and "backward: plan " in text and "wgrad: plan" not in text
    assert repr(module) in text
    with region(recipe):
        out = module(x)
    packed = sum(t.nbytes for t in out.grad_fn.saved_tensors if t.dtype == torch.uint8)
    assert text.count(f"saved for backward: {packed} bytes") == 2  # written and read


def test_stages_follow_the_call(device):
    x = torch.randn(16, IN, device=device, requires_grad=True)
    module = module_of("swiglu", device)
    assert "forward: plan" in text_of(module, x, None)
    with torch.no_grad():
        assert "backward: plan" not in text_of(module, x, None)
    cached = text_of(module, x, "current", is_first_microbatch=True)
    assert "fc1_weight_column" in cached and "requantize_weight" not in cached
    again = text_of(module_of("swiglu", device, checkpoint=True), x, "delayed")
    assert "fc1_requantize_input [norm]" in again and "fc2_requantize_input [activation]" in again
    late = text_of(module_of("swiglu", device, delay_wgrad_compute=True), x, "delayed")
    assert "wgrad: plan" in late and "fc2_gemm_grad_weight [gemm] -> fc1_gemm_grad_weight" in late


def test_explain_changes_and_runs_nothing(device):
    module = module_of("swiglu", device)
    x = torch.randn(16, IN, device=device, requires_grad=True)
    with region("delayed"):
        module(x)
    before, slots = state_of(module), module._slots
    _core.reset_counters()
    with te.autocast(recipe=RECIPES["delayed-e4m3"]()):
        te.explain(module, x, file=io.StringIO())
        assert current_state().owes_update
    assert {name.rpartition(".")[2] for name in _core.counters()} <= {"scaling_update"}
    assert module._slots is slots
    assert_same_bits(state_of(module)["backward"], before["backward"])


# ---- overridden stages ---------------------------------------------------------------------------


def steps(module, x, recipe, count=2):
    """Outputs, gradients and state of a few steps from the start."""
    te.reset()
    seen = []
    for _ in range(count):
        module.zero_grad()
        inp = x.clone().requires_grad_()
        with region(recipe):
            out = module(inp)
        out.square().sum().backward()
        seen.append([out.detach(), inp.grad, [p.grad.clone() for p in module.parameters()]])
    return seen, state_of(module) or {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_external_quantizers_see_what_is_cast(device, kind, recipe, dtype):
    """A Python quantizer of each input gets what norm and activation made, in the output's dtype.

    In fp32 that loses nothing: the bits are those of the fused operators.
    """
    module = module_of(kind, device, dtype=dtype)
    x = torch.randn(ROWS, IN, device=device, dtype=dtype)
    expected = steps(module, x, recipe)
    seen, stages = {}, {}
    for number, prefix in enumerate(module.LINEARS):

        def quantize_input(buffers, prefix=prefix, slot=3 * number):
            made = buffers["norm_output" if prefix != "fc2_" else "fc2_input"]
            seen[prefix] = (made.clone(), buffers.get("fc1_output", made).clone())
            quantize_like_the_library(made, buffers, f"{prefix}input", buffers.slot + slot)

        def quantize_weight(buffers, prefix=prefix, slot=3 * number + 1):
            weight = buffers[f"{prefix}weight"]
            quantize_like_the_library(weight, buffers, f"{prefix}weight", buffers.slot + slot)

        stages[f"{prefix}quantize_input"] = quantize_input
        stages[f"{prefix}quantize_weight"] = quantize_weight
    module.override_stages(**stages)
    with counted() as gemms:
        found = steps(module, x, recipe)
    assert (gemms.fp8, gemms.other) == (2 * GEMMS[kind], 0)
    normed, _ = seen[module.LINEARS[0]]
    assert normed.dtype == dtype
    assert_nmse(normed, norm64(module, wide(x), values_of(module)), tol("chain", dtype, IN))
    if kind == "swiglu":
        made, before = seen["fc2_"]
        a, b = before.double().chunk(2, 1)
        assert_nmse(made, torch.nn.functional.silu(a) * b, tol("chain", dtype))
    if dtype is torch.float32:
        assert_same_bits(found, expected)
    module.override_stages()
    assert_same_bits(steps(module, x, recipe), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_external_quantizer_of_the_activation_gradient(device, kind, recipe):
    """It gets the product with the derivative, and gives the bias gradient, too."""
    module = module_of(kind, device)
    x = torch.randn(ROWS, IN, device=device)
    expected = steps(module, x, recipe)
    prefix = module.LINEARS[0]

    def quantize_grad(buffers):
        grad = buffers["grad_output" if kind == "norm-linear" else "grad_fc1_output"]
        buffers[f"grad_{prefix}bias"].copy_(grad.double().sum(0))
        limit = torch.tensor(57344.0, device=x.device)
        pair = buffers[f"{prefix}grad_output_scales"]
        if "scale" in buffers:
            scale, history = buffers["scale"][buffers.slot].clone(), buffers["history"]
            history[0, buffers.slot] = torch.maximum(history[0, buffers.slot], grad.abs().max())
        else:
            scale = limit / grad.abs().max()
        pair.copy_(torch.stack([1.0 / scale, scale]))
        codes = (grad * scale).clamp(-limit, limit).to(torch.float8_e5m2).view(torch.uint8)
        for usage, data in (("row", codes), ("column", codes.t())):
            out = buffers[f"{prefix}grad_output_{usage}"].view(torch.uint8)
            out.zero_()
            out[:, : data.shape[1]] = data

    module.override_stages(**{f"{prefix}quantize_grad_output": quantize_grad})
    (found, state), (wanted, state_wanted) = steps(module, x, recipe), expected
    assert_same_bits(state, state_wanted)
    names = [n for n, _ in module.named_parameters()]
    for one, other in zip(found, wanted, strict=True):
        assert_same_bits(one[:2], other[:2])
        for name, mine, theirs in zip(names, one[2], other[2], strict=True):
            if name == f"{prefix}bias":  # summed up in another order
                assert_nmse(mine, theirs.double(), 2 * tol("sum", torch.float32, ROWS))
            else:
                assert_same_bits(mine, theirs, name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("which", [0, 1])
def test_gemms_overridden_by_python(device, kind, recipe, which):
    """A GEMM in float64 takes the place of the library's, in either layer."""
    dtype = torch.bfloat16 if recipe is None else torch.float32
    module = module_of(kind, device, dtype=dtype)
    prefix = module.LINEARS[min(which, len(module.LINEARS) - 1)]
    x = torch.randn(ROWS, IN, device=device, dtype=dtype)
    calls = []

    def gemm_output(buffers):
        calls.append(buffers.rows)
        if recipe is None:
            wide_input = buffers["fc2_input" if prefix == "fc2_" else "norm_output"]
            a, b, bias = wide_input, buffers[f"{prefix}weight"], buffers[f"{prefix}bias"]
        else:
            a = (
                buffers[f"{prefix}input_row"].double()
                * buffers[f"{prefix}input_scales"][0].double()
            )
            b = (
                buffers[f"{prefix}weight_row"].double()
                * buffers[f"{prefix}weight_scales"][0].double()
            )
            bias = buffers[f"{prefix}bias_cast"]
        made = a.double() @ b.double().t() + bias.double()
        if prefix == "fc1_" and recipe is None and kind == "gelu":  # its epilogue
            buffers["fc2_input"].copy_(torch.nn.functional.gelu(made, approximate="tanh"))
        buffers["fc1_output" if prefix == "fc1_" else "output"].copy_(made)

    expected = steps(module, x, recipe, 1)
    module.override_stages(**{f"{prefix}gemm_output": gemm_output})
    with counted() as gemms:
        found = steps(module, x, recipe, 1)
    assert calls == [ROWS]
    assert (gemms.fp8 if recipe else gemms.other) == GEMMS[kind] - 1
    bound = sum_bound(device, dtype, 2 * IN, True)
    if recipe is not None and prefix == "fc1_":  # its cast may go the other way here and there
        bound += tol("recast", torch.float8_e4m3fn) / (ROWS * WIDTH)
    assert_nmse(found[0][0][0], expected[0][0][0].double(), 4 * bound)


@pytest.mark.parametrize("kind", KINDS)
def test_external_reduction_of_the_amax(device, kind):
    """Between measuring and casting: doubling the maxima halves the scales."""
    module = module_of(kind, device)
    x = torch.randn(ROWS, IN, device=device)
    prefix = module.LINEARS[-1]
    scales = []

    def reduce(buffers):
        buffers["partials"].mul_(2.0)

    def note(buffers):
        scales.append(buffers[f"{prefix}input_scales"][1].item())
        a = buffers[f"{prefix}input_row"].double() * buffers[f"{prefix}input_scales"][0].double()
        b = buffers[f"{prefix}weight_row"].double() * buffers[f"{prefix}weight_scales"][0].double()
        buffers["output"].copy_(a @ b.t() + buffers[f"{prefix}bias_cast"].double())

    for stages in ({}, {f"{prefix}reduce_amax_input": reduce}):
        module.override_stages(**{f"{prefix}gemm_output": note}, **stages)
        with torch.no_grad(), region("current"):
            module(x)
    assert scales[0] == 2 * scales[1]


def test_unknown_stages(device):
    module = module_of("gelu", device)
    for name in ("quantize_input", "fc3_quantize_input", "fc1_quantise_input"):
        with pytest.raises(ValueError, match=f"stage '{name}' does not exist; there are .*'fc1_"):
            module.override_stages(**{name: print})
    with pytest.raises(ValueError, match="fc1_quantize_input"):
        module_of("norm-linear", device).override_stages(fc1_quantize_input=print)
