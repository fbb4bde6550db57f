# SPDX-License-Identifier: Apache-2.0
"""Which gradients LayerNormLinear and LayerNormMLP compute, where they put them, and when."""

import itertools

import pytest
import torch
from comparators import assert_nmse
from layer_reference import wide
from pytorch.helpers import (
    RECIPES,
    assert_same_bits,
    assert_same_gemm,
    counted,
    high_precision_bound,
    state_of,
)
from pytorch.module_reference import definition, make, region, values_of
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core

FP8 = [None, "delayed", "current"]
KINDS = ["linear", "gelu", "swiglu", "gelu-checkpoint"]
IN, WIDTH, ROWS = 32, 48, 16


def recipe_of(name):
    return None if name is None else RECIPES[name]()


def make_kind(kind, device, **options):
    kind, _, checkpoint = kind.partition("-")
    if checkpoint:
        options["checkpoint"] = True
    return make(kind, device, sizes=(IN, WIDTH), **options)


def outputs_of(module):
    return module._sizes()[-1][1]


def weights_of(module):
    return {f"{prefix}weight": getattr(module, f"{prefix}weight") for prefix in module.PARTS}


def count_of(gemms, recipe):
    assert (gemms.other if recipe else gemms.fp8) == 0
    return gemms.fp8 if recipe else gemms.other


# ---- which -----------------------------------------------------------------------------------------


def expected_gemms(module, needs):
    """GEMMs of a forward and the backward that `needs` asks for."""
    before = bool({"x", "layer_norm_weight", "layer_norm_bias"} & needs)
    count = 0
    for prefix in module.PARTS:
        count += 1 + before + (f"{prefix}weight" in needs)
        if module.checkpoint and prefix == "fc2_":
            count += before or "fc2_weight" in needs  # fc1 runs once more
        before = before or bool({f"{prefix}weight", f"{prefix}bias"} & needs)
    return count


def run_with(module, needs, recipe, data, steps=2):
    """Steps with gradients of `needs` only: (outputs and gradients by name, counts)."""
    te.reset()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name in needs)
    trace, counts = [], []
    for _ in range(steps):  # the second one goes the short way
        module.zero_grad()
        x = data[0].clone().requires_grad_("x" in needs)
        with counted() as gemms:
            with region(recipe):
                outputs = module(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [(o, g) for o, g in zip(outputs, data[1:], strict=True) if o.requires_grad]
            if wanted:
                torch.autograd.backward(*zip(*wanted, strict=True))
        counts.append(count_of(gemms, recipe))
        found = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
        found |= {"x": x.grad} | {n: p.grad for n, p in module.named_parameters()}
        trace.append(found)
    return trace, counts, [o.requires_grad for o in outputs]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("normed", [False, True], ids=["", "norm-output"])
def test_every_set_of_wanted_gradients(device, kind, recipe, normed):
    """Each gradient has the bits it has among all; nothing else is computed or kept."""
    module = make_kind(kind, device, return_layernorm_output=normed)
    made = recipe_of(recipe)
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
                        bound = 2 * tol("sum", torch.float32, ROWS)
                        assert_nmse(value, wide(all_of_them[name]), bound)
                    else:
                        what = f"{name} of {needs}"
                        assert_same_gemm(value, all_of_them[name], device, recipe, 2 * WIDTH, what)
