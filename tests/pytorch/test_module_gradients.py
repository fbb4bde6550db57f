# SPDX-License-Identifier: Apache-2.0
"""Which gradients linear modules compute, and where they put them: main_grad.

Delayed weight gradients have test_module_backward_dw.py.
"""

import itertools
import re

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device, our_kernels
from layer_reference import wide
from pytorch.helpers import RECIPES, assert_same_bits, assert_same_gemm, counted, state_of
from pytorch.module_cases import (
    CHECKPOINTED,
    FEW,
    IN,
    RECIPE_NAMES,
    ROWS,
    WIDTH,
    batch,
    copy_values,
    count_of,
    expected_gemms,
    gemms_of,
    make,
    outputs_of,
    region,
    step,
    weights_of,
)
from pytorch.module_pairs import Pair, assert_added, run_with
from thinning import one_each
from tols import tol

from transformer_engine.common.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

pytestmark = every_device

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
OF_MAIN_GRADS = {
    "none": None,
    "current": Float8CurrentScaling(),
    "tiles": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
}

# ---- which ---------------------------------------------------------------------------------------


@our_kernels
@pytest.mark.parametrize(
    ("kind", "normed"),
    [*((kind, False) for kind in CHECKPOINTED), *((kind, True) for kind in CHECKPOINTED[1:])],
    ids=lambda v: {True: "norm-output", False: ""}.get(v, v),
)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_every_set_of_wanted_gradients(device, kind, recipe, normed):
    """Each gradient has the bits it has among all; nothing else is computed or kept."""
    module = make(kind, device, **({"return_layernorm_output": True} if normed else {}))
    made = recipe and RECIPES[recipe]()
    data = [torch.randn(ROWS, n, device=device) for n in (IN, outputs_of(module), IN)][: 2 + normed]
    names = ["x", *dict(module.named_parameters())]
    full, counts, _ = run_with(module, set(names), made, data)
    assert counts == [expected_gemms(module, set(names))] * 2
    norm_only = {"x", "layer_norm_weight", "layer_norm_bias"}
    for size in range(len(names)):
        for needs in map(set, itertools.combinations(names, size)):
            found, counts, requires_grad = run_with(module, needs, made, data)
            assert counts == [expected_gemms(module, needs)] * 2, needs
            assert requires_grad[0] == bool(needs), needs
            if normed:
                assert requires_grad[1] == bool(needs & norm_only), needs
            for mine, all_of_them in zip(found, full, strict=True):
                for name, value in mine.items():
                    if name not in needs and "output" not in name:
                        assert value is None, (needs, name)
                    elif name.endswith("bias") and recipe is None:  # another kernel sums it up
                        bound = 2 * tol("sum", FP32, ROWS)
                        assert_nmse(value, wide(all_of_them[name]), bound)
                    else:
                        what = f"{name} of {needs}"
                        assert_same_gemm(value, all_of_them[name], device, recipe, 2 * WIDTH, what)


# ---- main_grad -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("linear", FP32), ("linear", FP16), *((kind, BF16) for kind in CHECKPOINTED)],
    ids=lambda v: v if isinstance(v, str) else str(v).removeprefix("torch."),
)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("main", [FP32, BF16, FP16], ids=["main32", "main_bf16", "main_fp16"])
def test_accumulate_into_main_grad(device, kind, dtype, recipe, main):
    """All weights' gradients are added to their main_grad; everything else is as without.

    In the operands' dtype or another one: the sum is in fp32, and rounded once.
    """
    pair = Pair(kind, device, dtype, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.randn, main)
    for number in range(3):
        data = pair.batch()
        before = {n: w.main_grad.clone() for n, w in pair.weights.items()}
        pointers = [w.main_grad.data_ptr() for w in pair.weights.values()]
        expected = pair.step(pair.plain, recipe, data)
        if number == 2:  # overwritten where the step begins
            for weight in pair.weights.values():
                weight.overwrite_main_grad = True
            before = {n: torch.zeros_like(b) for n, b in before.items()}
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data)
        assert count_of(gemms, recipe) == gemms_of(pair.module)
        if dtype is FP16 and recipe is None:  # cuBLASLt sums columns beside fp32 in fp16 too
            grad = data[1].double()
            for vectors in (found[2], expected[2]):
                made = vectors.pop("bias")
                assert_nmse(made, grad.sum(0), 4 * tol("round", FP16), terms=grad.abs().sum(0))
        assert_same_bits(found, expected)
        assert pointers == [w.main_grad.data_ptr() for w in pair.weights.values()]
        for name, weight in pair.weights.items():
            assert weight.grad is None
            gradient = pair.plain.get_parameter(name).grad
            assert_added(weight.main_grad, before[name], gradient, main, dtype)


# Graphs hold what eager code runs, which is compared for all of these.
@our_kernels
@one_each(kind=CHECKPOINTED, recipe=OF_MAIN_GRADS)
def test_fp16_main_grad_compiled(device, kind, recipe):
    """A graph of torch adds what eager code adds, of every recipe's operands in 16 bits."""
    torch._dynamo.reset()
    modules = [make(kind, device, BF16, fuse_wgrad_accumulation=True) for _ in range(2)]
    copy_values(*modules)
    start = {n: torch.randn(w.shape, device=device) for n, w in weights_of(modules[0]).items()}
    x = torch.randn(ROWS, IN, device=device, dtype=BF16)
    compiled = torch.compile(modules[1], fullgraph=True, backend="aot_eager")
    for module, run in zip(modules, (modules[0], compiled), strict=True):
        for name, weight in weights_of(module).items():
            weight.main_grad = start[name].to(FP16, copy=True)
        for _ in range(2):
            with region(OF_MAIN_GRADS[recipe]):
                out = run(x)
            out.sum().backward()
    of_graph = weights_of(modules[1])
    for name, weight in weights_of(modules[0]).items():
        assert weight.main_grad.dtype == FP16 and weight.grad is None
        assert not torch.equal(weight.main_grad, start[name].to(FP16))
        assert_same_gemm(of_graph[name].main_grad, weight.main_grad, device, recipe, ROWS, name)


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("how", ["first-microbatch", "attribute"])
def test_overwrite_main_grad(device, kind, recipe, how):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(lambda *a, **k: torch.full(*a, 1e30, **k))
    call = {}
    if how == "attribute":
        for weight in pair.weights.values():
            weight.overwrite_main_grad = True
    else:
        call["is_first_microbatch"] = True
    data = pair.batch()
    pair.step(pair.plain, recipe, data)
    with counted() as gemms:
        pair.step(pair.module, recipe, data, **call)
    assert count_of(gemms, recipe) == gemms_of(pair.module)
    for name, weight in pair.weights.items():
        gradient = pair.plain.get_parameter(name).grad
        assert_same_gemm(weight.main_grad, gradient, device, recipe, ROWS, name)


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_microbatches_overwrite_then_accumulate(device, kind, recipe):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(lambda *a, **k: torch.full(*a, float("nan"), **k))
    totals = dict.fromkeys(pair.weights, 0.0)
    for number in range(3):
        data = pair.batch()
        pair.step(pair.plain, recipe, data)
        pair.step(pair.module, recipe, data, is_first_microbatch=number == 0)
        for name in totals:
            totals[name] += wide(pair.plain.get_parameter(name).grad)
    for name, total in totals.items():
        found = pair.weights[name].main_grad
        assert found.isfinite().all()
        # In delayed scaling the cached weights were cast with an older scale; the first layer's
        # gradient reads none of them, and where it is the only one there is no other.
        if recipe != "delayed" or len(totals) == 1:
            assert_nmse(found, total, 3 * tol("sum", FP32, ROWS))


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("zero", [None, False, True])
def test_frameworks_that_count_gradients(device, kind, zero):
    """A weight that has grad_added_to_main_grad is told, and gets a gradient for its hooks."""
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.zeros)
    hooked = []
    for name, weight in pair.weights.items():
        weight.grad_added_to_main_grad = False
        if zero is not None:
            weight.zero_out_wgrad = zero
        weight.register_hook(lambda grad, name=name: hooked.append((name, grad.shape)))
    with counted() as gemms:
        pair.step(pair.module, "delayed", pair.batch())
    assert count_of(gemms, "delayed") == gemms_of(pair.module)
    assert sorted(hooked) == [(name, w.shape) for name, w in sorted(pair.weights.items())]
    for weight in pair.weights.values():
        assert weight.grad_added_to_main_grad is True
        assert weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
        assert not zero or (weight.grad == 0).all()
        assert (weight.main_grad != 0).any()


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("delay", [False, True], ids=["", "delay"])
def test_main_grad_under_torch_autocast(device, kind, recipe, delay):
    """The parameters are fp32 and 16-bit copies feed the GEMMs: main_grad is the parameters'."""
    pair = Pair(kind, device, fuse_wgrad_accumulation=True, delay_wgrad_compute=delay)
    pair.main_grads(torch.zeros)
    data = pair.batch()
    with torch.autocast(device, dtype=BF16):
        expected = pair.step(pair.plain, recipe, data)
        with counted() as gemms:
            found = pair.step(pair.module, recipe, data)
            pair.module.backward_dw()
    assert count_of(gemms, recipe) == gemms_of(pair.plain)
    assert_same_bits(found[:2], expected[:2])
    rounded = FP32 if recipe else BF16
    for name, weight in pair.weights.items():
        gradient = pair.plain.get_parameter(name).grad
        assert_added(weight.main_grad, torch.zeros_like(gradient), gradient, FP32, rounded)


@pytest.mark.parametrize("kind", CHECKPOINTED)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_missing_and_unneeded_main_grads(device, kind, recipe):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.zeros)
    last_name, last = list(pair.weights.items())[-1]
    del last.main_grad
    x = pair.batch()[0]
    shape = re.escape(str(tuple(last.shape)))
    with region(recipe), pytest.raises(RuntimeError, match=rf"no main_grad.*{shape}"):
        pair.module(x)
    assert state_of(pair.module) is None or (state_of(pair.module)["forward"][1] == 0).all()
    with torch.no_grad(), region(recipe):  # without a gradient there is none to ask for
        pair.module(x)
    last.requires_grad_(False)
    needs = {"x", *dict(pair.module.named_parameters())} - {last_name}
    with counted() as gemms:
        pair.step(pair.module, recipe, pair.batch())
    assert count_of(gemms, recipe) == expected_gemms(pair.module, needs)
    for weight in list(pair.weights.values())[:-1]:
        assert (weight.main_grad != 0).any() and weight.grad is None


@pytest.mark.parametrize("kind", CHECKPOINTED)
def test_main_grad_of_a_wrong_shape_is_refused(device, kind):
    pair = Pair(kind, device, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.zeros)
    last = list(pair.weights.values())[-1]
    last.main_grad = torch.zeros(last.shape[::-1], device=device)
    with pytest.raises(ValueError, match="main_grad"):
        pair.step(pair.module, None, pair.batch())
    assert (last.main_grad == 0).all()


@pytest.mark.parametrize("kind", FEW)
def test_accumulation_switched_on_later(device, kind):
    """Settings that are changed after calls count from the next call on."""
    module = make(kind, device)
    x = batch(device)
    results = [step(module, x, "current")[2] for _ in range(2)]
    assert_same_bits(*results)
    for weight in weights_of(module).values():
        weight.main_grad = torch.zeros_like(weight)
    module.fuse_wgrad_accumulation = True
    with counted() as gemms:
        step(module, x, "current")
    assert count_of(gemms, "current") == gemms_of(module)
    for name, weight in weights_of(module).items():
        assert weight.grad is None
        assert_same_bits(weight.main_grad, results[0][name])
