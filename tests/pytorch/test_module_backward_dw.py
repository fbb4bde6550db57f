# SPDX-License-Identifier: Apache-2.0
"""Delayed weight gradients of linear modules: `delay_wgrad_compute=True` and `backward_dw`."""

import itertools

import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device
from layer_reference import wide
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    assert_same_gemm,
    counted,
    high_precision_bound,
)
from pytorch.module_cases import (
    FEW,
    IN,
    RECIPE_NAMES,
    ROWS,
    SPLIT,
    batch,
    copy_values,
    count_of,
    gemms_of,
    make,
    outputs_of,
    region,
    step,
    weights_of,
    whole,
)
from pytorch.module_pairs import Pair, assert_added, run_with
from tols import tol

pytestmark = every_device

FP32, BF16 = torch.float32, torch.bfloat16
# Both dtypes and both kinds of gradients, with the norm's output and without.
VARIANTS = [
    (FP32, False, False),
    (BF16, False, False),
    (BF16, False, True),
    (FP32, True, False),
    (FP32, True, True),
]


@pytest.mark.parametrize(
    ("kind", "dtype", "fused", "normed"),
    [(k, *v) for k, v in itertools.product(FEW, VARIANTS) if k != "linear" or not v[2]],
    ids=lambda v: str(v).removeprefix("torch."),
)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_first_in_first_out(device, kind, dtype, recipe, fused, normed):
    """Each call computes the oldest; the sum is that of the usual backwards, bit for bit."""
    pair = Pair(kind, device, dtype, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    if normed:
        pair.plain.return_layernorm_output = pair.module.return_layernorm_output = True
    pair.main_grads(torch.zeros)
    full, parts = gemms_of(pair.plain), len(pair.weights)
    expected = []
    for _ in range(3):
        data = pair.batch()
        grads = []
        for module in (pair.plain, pair.module):
            x = data[0].clone().requires_grad_()
            with counted() as gemms:
                with region(recipe):
                    outputs = module(x)
                outputs = outputs if normed else (outputs,)
                torch.autograd.backward(outputs, [data[1], data[0]][: len(outputs)])
            assert count_of(gemms, recipe) == full - parts * (module is pair.module)
            grads.append([x.grad, *(o.detach() for o in outputs)])
        assert_same_bits(*grads)
        expected.append({n: pair.plain.get_parameter(n).grad.clone() for n in pair.weights})
        pair.plain.zero_grad()
        assert all(w.grad is None for w in pair.weights.values())
        others = [p for n, p in pair.module.named_parameters() if n not in pair.weights]
        assert all(p.grad is not None for p in others)
    totals = {n: torch.zeros_like(w) for n, w in pair.weights.items()}
    for gradients in expected:
        with counted() as gemms:
            pair.module.backward_dw()
        assert count_of(gemms, recipe) == parts
        for name, weight in pair.weights.items():
            totals[name] += gradients[name]
            if not fused:
                assert_same_gemm(weight.grad, totals[name], device, recipe, ROWS, name)
                continue
            if recipe is None:
                bound = 2 * high_precision_bound(FP32, ROWS)
                assert_nmse(weight.main_grad, wide(totals[name]), bound, name)
            else:
                zeros = torch.zeros_like(weight)
                assert_added(weight.main_grad, zeros, totals[name], FP32, FP32)
    with pytest.raises(RuntimeError, match=r"backward_dw: no weight gradient is pending"):
        pair.module.backward_dw()


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("first", [True, False, None])
def test_into_main_grad(device, kind, recipe, first):
    """It is added or written, and told to frameworks, when the gradient is computed."""
    pair = Pair(kind, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.randn)
    before = {}
    for name, weight in pair.weights.items():
        weight.grad_added_to_main_grad = False
        before[name] = weight.main_grad.clone()
    data = pair.batch()
    pair.step(pair.plain, recipe, data)
    pair.step(pair.module, recipe, data, is_first_microbatch=first)
    assert_same_bits({n: w.main_grad for n, w in pair.weights.items()}, before)
    assert not any(w.grad_added_to_main_grad for w in pair.weights.values())
    with counted() as gemms:
        pair.module.backward_dw()
    assert count_of(gemms, recipe) == len(pair.weights)
    for name, weight in pair.weights.items():
        assert weight.grad_added_to_main_grad is True
        gradient = pair.plain.get_parameter(name).grad
        if first:
            assert_same_gemm(weight.main_grad, gradient, device, recipe, ROWS, name)
        else:
            assert_added(weight.main_grad, before[name], gradient, FP32, FP32)


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("fused", [False, True])
def test_frameworks_see_each_gradient(device, kind, fused):
    """By their hooks: of `backward_dw` for marked parameters, of the backward for the others."""
    pair = Pair(kind, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    pair.main_grads(torch.zeros)
    seen = []

    def hook_of(name, parameter):
        def see(*_):
            grad = parameter.main_grad if fused and name in pair.weights else parameter.grad
            seen.append((name, grad.clone()))

        return see

    nodes = []
    for name, parameter in pair.module.named_parameters():
        if getattr(parameter, "skip_backward_post_hook", False):
            hook = hook_of(name, parameter)
            pair.module.register_wgrad_accumulation_and_reduce_hooks(hook)
        else:
            nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(hook_of(name, parameter))
    data = pair.batch()
    for module in (pair.plain, pair.module):
        pair.step(module, None, data)
    pair.module.backward_dw()
    names = {name for name, _ in pair.module.named_parameters()}
    assert sorted(name for name, _ in seen) == sorted(names)
    for name, grad in seen:
        wanted = pair.plain.get_parameter(name).grad
        if name in pair.weights:
            assert_same_gemm(grad, wanted, device, None, ROWS, name)
        else:
            assert_nmse(grad, wide(wanted), 2 * tol("sum", FP32, ROWS), name)
    assert not any(hasattr(p, "skip_backward_post_hook") for p in pair.plain.parameters())


def subsets_of(module):
    """Sets of parameters that are trained: one, all but one, the norm, a bias."""
    names = set(dict(module.named_parameters()))
    weights = list(weights_of(module))
    first = module.LINEARS[0]
    yield from ({name} for name in weights)
    yield {f"{first}weight", f"{first}bias"}
    yield {f"{module.LINEARS[-1]}bias"}
    yield from (names - {name} for name in weights)
    if "layer_norm_weight" in names:
        yield {"layer_norm_weight"}


@pytest.mark.parametrize("kind", FEW)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_some_weights(device, kind, recipe):
    """Frozen weights have nothing pending; the others have what they have without the option."""
    late = make(kind, device, delay_wgrad_compute=True)
    now = make(kind, device)
    copy_values(now, late)
    data = [torch.randn(ROWS, n, device=device) for n in (IN, outputs_of(late))]
    for needs in subsets_of(late):
        for module in (late, now):
            run_with(module, needs, recipe and RECIPES[recipe](), data, steps=1)
        if weights_of(late).keys() & needs:
            late.backward_dw()
        with pytest.raises(RuntimeError, match="pending"):
            late.backward_dw()
        for name, parameter in late.named_parameters():
            gradient = now.get_parameter(name).grad
            assert (parameter.grad is None) == (name not in needs), (needs, name)
            if name.endswith("bias") and name in needs and recipe is None:
                assert_nmse(parameter.grad, wide(gradient), 2 * tol("sum", FP32, ROWS))
            elif name in needs:
                assert_same_gemm(parameter.grad, gradient, device, recipe, ROWS)


@pytest.mark.parametrize("kind", SPLIT)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_split_parameters(device, kind, recipe, frozen):
    pair = Pair(kind, device, delay_wgrad_compute=True)
    pair.module.b_weight.requires_grad_(not frozen)
    data = pair.batch()
    expected, found = (pair.step(m, recipe, data) for m in (pair.plain, pair.module))
    assert_same_bits(found[:2], expected[:2])
    assert pair.module.a_weight.grad is None
    pair.module.backward_dw()
    gradient = pair.plain.weight.grad
    if frozen:
        assert pair.module.b_weight.grad is None
        gradient, rows = gradient.chunk(2)[0], pair.module.a_weight.grad
    else:
        rows = whole(pair.module, "weight", lambda p: p.grad)
    assert_same_gemm(rows, gradient, device, recipe, ROWS)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_the_original_input(device, recipe):
    pair = Pair("linear", device, delay_wgrad_compute=True, save_original_input=True)
    data = pair.batch()
    pair.step(pair.plain, recipe, data)
    pair.step(pair.module, recipe, data)
    pair.module.backward_dw()
    assert_same_bits(pair.module.weight.grad, pair.plain.weight.grad)


@pytest.mark.parametrize("kind", FEW)
def test_under_torch_autocast(device, kind):
    pair = Pair(kind, device, delay_wgrad_compute=True)
    x, grad = pair.batch()
    with torch.autocast(device, dtype=BF16):
        for _ in range(2):
            for module in (pair.plain, pair.module):
                module(x).backward(grad.bfloat16())
            pair.module.backward_dw()
    for name, weight in pair.weights.items():
        assert weight.grad.dtype == FP32
        gradient = pair.plain.get_parameter(name).grad
        assert_nmse(weight.grad, wide(gradient), 4 * high_precision_bound(BF16, ROWS))


@pytest.mark.parametrize("kind", FEW)
def test_without_the_option_nothing_is_done(device, kind):
    module = make(kind, device)
    module.backward_dw()
    assert all(p.grad is None for p in module.parameters())
    found = step(module, batch(device))[2]
    module.backward_dw()
    assert_same_bits({n: p.grad for n, p in module.named_parameters()}, found)


@pytest.mark.parametrize("kind", FEW)
def test_a_gradient_survives_a_call_that_raises(device, kind):
    pair = Pair(kind, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=True)
    pair.main_grads(torch.zeros)
    last = list(pair.weights.values())[-1]
    main_grad = last.main_grad
    data = pair.batch()
    pair.step(pair.plain, "current", data)
    pair.step(pair.module, "current", data)
    with counted() as gemms:
        last.main_grad = None
        with pytest.raises(RuntimeError, match="main_grad"):
            pair.module.backward_dw()
        last.main_grad = main_grad
        pair.module.backward_dw()
    assert count_of(gemms, "current") == len(pair.weights)
    for name, weight in pair.weights.items():
        gradient = pair.plain.get_parameter(name).grad
        assert_added(weight.main_grad, torch.zeros_like(weight), gradient, FP32, FP32)
    with pytest.raises(RuntimeError, match="no weight gradient is pending"):
        pair.module.backward_dw()


def test_checkpoint_is_refused():
    with pytest.raises(NotImplementedError, match="checkpoint=True with delay_wgrad_compute=True"):
        make("gelu checkpoint", "cpu", delay_wgrad_compute=True)
