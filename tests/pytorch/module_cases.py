# SPDX-License-Identifier: Apache-2.0
"""The modules that test_module_*.py is about, by kind: how they are made, run and counted.

A kind is "linear" (`Linear`), "norm-linear" (`LayerNormLinear`) or an activation
(`LayerNormMLP`), and may be followed by a variant: "linear split", "gelu checkpoint".
"""

import contextlib
import math

import torch
from pytorch.helpers import RECIPES, counted

import transformer_engine.pytorch as te
from transformer_engine import _core

KINDS = ("linear", "norm-linear", "gelu", "swiglu")
FEW = ("linear", "norm-linear", "swiglu")
"""Where the activation takes no part: one kind of each make."""
CHECKPOINTED = (*FEW, "gelu checkpoint")
SPLIT = ("linear split", "norm-linear split")
RECIPE_NAMES = (None, "delayed", "current")
IN, WIDTH, ROWS = 32, 48, 16
PIECES = ("a", "b")
"""Names of the parts of a split weight and bias."""
VARIANTS = {
    "": {},
    "split": {"parameters_split": PIECES},
    "checkpoint": {"checkpoint": True},
}


def region(recipe):
    """`autocast` with a recipe, or with that of a name in RECIPES; nothing for None."""
    if recipe is None:
        return contextlib.nullcontext()
    return te.autocast(recipe=RECIPES[recipe]() if isinstance(recipe, str) else recipe)


# ---- modules -------------------------------------------------------------------------------------


def make(kind, device, dtype=torch.float32, sizes=(IN, WIDTH), **options):
    """A module whose values between its layers are about as large as its input.

    Parameters
    ----------
    kind : str
        As at the top of this file.
    device, dtype :
        Of the parameters.
    sizes : (int, int)
        Features of a linear layer, or hidden sizes of an MLP.
    options :
        Further arguments of the module.
    """
    name, _, variant = kind.partition(" ")
    options = {"device": device, "params_dtype": dtype, **VARIANTS[variant], **options}
    if name == "linear":
        module = te.Linear(*sizes, **options)
    elif name == "norm-linear":
        module = te.LayerNormLinear(*sizes, **options)
    else:
        module = te.LayerNormMLP(*sizes, activation=name, **options)
    randomise(module)
    return module


def randomise(module):
    """New values for all parameters: weights of deviation 1/sqrt(inputs), the others about 1."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1 / math.sqrt(parameter.shape[1]))
            else:
                parameter.normal_(float(name == "layer_norm_weight"), 0.25)
            if name == "layer_norm_weight" and module.zero_centered_gamma:
                parameter.sub_(1)


def has_norm(kind):
    """Whether modules of this kind begin with a norm."""
    return not kind.startswith("linear")


def outputs_of(module):
    """Features of the output."""
    return module._sizes()[-1][1]


def weights_of(module):
    """Names to the weights of the linear layers."""
    return {name: p for name, p in module.named_parameters() if p.dim() == 2}


def last_weight(module):
    """Name of the last layer's weight."""
    return f"{module.LINEARS[-1]}weight"


def whole(module, name, value=lambda parameter: parameter, pieces=PIECES):
    """A value of a parameter, joined of those of its pieces where it is split."""
    if hasattr(module, name):
        return value(getattr(module, name))
    return torch.cat([value(getattr(module, f"{piece}_{name}")) for piece in pieces])


def copy_values(target, source, pieces=PIECES):
    """Give a module the parameters of another one, which may be split."""
    with torch.no_grad():
        for name, parameter in target.named_parameters():
            parameter.copy_(whole(source, name, pieces=pieces))


def batch(device, dtype=torch.float32):
    """Random input."""
    return torch.randn(ROWS, IN, device=device, dtype=dtype)


# ---- steps ---------------------------------------------------------------------------------------


def step(module, x, recipe=None, grad=None, **call):
    """Forward and backward of a module without gradients.

    Parameters
    ----------
    recipe : Recipe, str or None
        As of `region`.
    grad : Tensor, optional
        Gradient of the output; ones where None.

    Returns
    -------
    list
        Output, gradient of the input, names to gradients of the parameters.
    """
    module.zero_grad()
    inp = x.detach().clone().requires_grad_()
    with region(recipe):
        out = module(inp, **call)
    out.backward(torch.ones_like(out) if grad is None else grad.to(out.dtype))
    grads = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    return [out.detach(), inp.grad, grads]


def trained(kind, device, steps=3, **options):
    """A module after some steps of delayed scaling."""
    module = make(kind, device, **options)
    with counted() as gemms:
        for _ in range(steps):
            step(module, batch(device) * 5, "delayed")
    assert (gemms.fp8, gemms.other) == (steps * gemms_of(module), 0)
    return module


# ---- counts --------------------------------------------------------------------------------------


def expected_gemms(module, needs):
    """GEMMs of a forward and of the backward for gradients of `needs`: names, "x" the input."""
    before = bool({"x", "layer_norm_weight", "layer_norm_bias"} & needs)
    count = 0
    for prefix in module.LINEARS:
        weights = {name for name in weights_of(module) if name.startswith(prefix)}
        count += 1 + before + bool(weights & needs)
        if module.checkpoint and prefix == "fc2_":
            count += before or bool(weights & needs)  # fc1 runs once more
        before = before or bool(weights & needs) or f"{prefix}bias" in needs
    return count


def gemms_of(module):
    """GEMMs of a step for all gradients."""
    return expected_gemms(module, {"x", *dict(module.named_parameters())})


def count_of(gemms, recipe):
    """What `counted` counted; all of it in the precision that the recipe asks for."""
    assert (gemms.fp8 if recipe is None else gemms.other) == 0
    return gemms.fp8 if recipe is not None else gemms.other


def quantized():
    """How many quantize operators ran since the counters were reset."""
    return sum(v for n, v in _core.counters().items() if n.endswith(".quantize"))
