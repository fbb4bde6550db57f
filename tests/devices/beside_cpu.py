# SPDX-License-Identifier: Apache-2.0
"""Models on the device npu, beside the same ones on the CPU whose operators run by definition.

The device's kernels are those of the CPU, and both run the same definitions in torch: all bits are
equal, of outputs, gradients and scaling state. How near definitions are to the C code is tested
where the definitions are.
"""

import contextlib
import copy

import torch
from definitions import by_definition
from pytorch.helpers import assert_same_bits, states_of
from torch.utils._pytree import tree_map_only

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin.definitions import DEFINITIONS
from transformer_engine.pytorch import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.torchside.device import type_name
from transformer_engine_torch import DType

WIDTH, FFN, HEADS, TOKENS, BATCH = 32, 64, 4, 16, 2
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

MODULES = {
    "Linear": lambda **o: te.Linear(WIDTH, FFN, **o),
    "LayerNorm": lambda **o: te.LayerNorm(WIDTH, **o),
    "RMSNorm": lambda **o: te.RMSNorm(WIDTH, **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(WIDTH, FFN, normalization="RMSNorm", **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(WIDTH, FFN, activation="swiglu", **o),
    "MultiheadAttention": lambda **o: te.MultiheadAttention(
        WIDTH, HEADS, attention_dropout=0.0, input_layernorm=True, **o
    ),
    "TransformerLayer": lambda **o: te.TransformerLayer(WIDTH, FFN, HEADS, **NO_DROPOUT, **o),
}


def quantizers(role):
    """Of a custom recipe: the scale of each tensor, in the format of its role."""
    kind = DType.kFloat8E5M2 if role.tensor_type == "grad_output" else DType.kFloat8E4M3
    return Float8CurrentScalingQuantizer(kind)


RECIPES = {
    "none": None,
    "delayed": lambda: recipes.DelayedScaling(amax_history_len=3),
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "row": recipes.Float8RowScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": lambda: recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "custom": lambda: recipes.CustomRecipe(quantizers),
}


def region(recipe, **options):
    """`te.autocast` with a recipe of a name in RECIPES; nothing for "none"."""
    made = RECIPES[recipe]
    if made is None:
        return contextlib.nullcontext()
    return te.autocast(recipe=made(), **options)


@contextlib.contextmanager
def on_the_cpu():
    """A block in which calls on the CPU run the definitions, too."""
    with by_definition(*DEFINITIONS):
        yield


def ran():
    """Devices on which operators have run since the counters were reset."""
    return {name.split(".")[1] for name in _core.counters() if name.startswith("op.")}


def train(model, inputs, run, optimizer=None):
    """Outputs, gradients and scaling state of one step for each input: ``run(model, x, step)``.

    The gradient of an output is itself.
    """
    found = []
    for step, x in enumerate(inputs):
        model.zero_grad()
        x = x.detach().clone().requires_grad_()
        out = run(model, x, step)
        out.backward(out.detach())
        found.append([out.detach(), x.grad, {n: p.grad for n, p in model.named_parameters()}])
        if optimizer is not None:
            optimizer.step()
    return tree_map_only(torch.Tensor, torch.clone, [found, states_of(model)])


def assert_as_on_the_cpu(model, inputs, run, device, plain=None):
    """Steps of a copy of a model on a device have the bits of the steps on the CPU.

    ``run(model, x, step)`` gives an output; on the CPU `plain` does, if it is given.
    """
    there, seed = copy.deepcopy(model).to(device), int(torch.randint(2**31, ()))
    te.reset()
    torch.manual_seed(seed)  # of the device, too, whose generator draws what that of the CPU does
    with on_the_cpu():
        expected = train(model, inputs, plain or run)
    te.reset()
    torch.manual_seed(seed)
    _core.reset_counters()
    found = train(there, [x.to(device) for x in inputs], run)
    assert ran() == {type_name(device)}
    assert found[0][0][0].device == device
    assert_same_bits(found, expected)


def eager(recipe):
    """A step of a model under a recipe: run(model, x, number of the step)."""

    def run(model, x, step):
        del step
        with region(recipe):
            return model(x)

    return run
