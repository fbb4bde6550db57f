# SPDX-License-Identifier: Apache-2.0
"""What no graph of `torch.compile` holds runs between two of them, with the bits of eager code."""

import pytest
import torch
from pytorch.helpers import assert_same_bits, state_of

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    DelayedScalingRequest,
    Float8CurrentScaling,
)

WIDTH, TOKENS = 64, 16


def by_role(role):
    """Delayed scaling, but for weights."""
    if role is not None and role.tensor_type == "weight":
        return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    return DelayedScalingRequest()


def scaled(buffers):
    """Fill the output of the forward's GEMM with twice the product."""
    buffers["output"].copy_(2 * buffers["input"].float() @ buffers["weight"].float().t())


def linear(device):
    return te.Linear(WIDTH, WIDTH, device=device)


def overridden(device):
    module = te.Linear(WIDTH, WIDTH, bias=False, device=device)
    module.override_stages(gemm_output=scaled)
    return module


def layer(device):
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "device": device}
    return te.TransformerLayer(WIDTH, 2 * WIDTH, 4, **options)


CUSTOM = {"enabled": True, "recipe": CustomRecipe(by_role)}
DELAYED = {"enabled": True, "recipe": DelayedScaling()}
CURRENT = {"enabled": True, "recipe": Float8CurrentScaling()}
CASES = {  # module, region, arguments of the calls in a row, the reason as torch.export says it
    "custom": (linear, CUSTOM, ({}, {}, {}), "CustomRecipe"),
    "custom layer": (layer, CUSTOM, ({}, {}), "CustomRecipe"),
    "microbatches": (
        linear, DELAYED,
        tuple({"is_first_microbatch": first} for first in (True, False, False, True, False)), None,
    ),
    "microbatches of a layer": (
        layer, CURRENT, tuple({"is_first_microbatch": first} for first in (True, False)), None,
    ),
    "calibrating": (
        linear, {"enabled": False, "calibrating": True, "recipe": DelayedScaling()}, ({}, {}),
        "calibrating=True",
    ),
    "stages": (overridden, {"enabled": False}, ({}, {}), "override_stages"),
    "fp8_output": (linear, CURRENT, ({"fp8_output": True},), "fp8_output=True"),
    "fp8_grad": (linear, CURRENT, ({"fp8_grad": True},), "fp8_grad=True"),
}  # fmt: skip
cases = pytest.mark.parametrize("name", CASES)


def program_of(module):
    """A program around a module, with work for a graph before and behind."""

    def program(x, **options):
        return torch.cos(module(torch.sin(x), **options).to(x.dtype))

    return program


@pytest.fixture(autouse=True)
def graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch asks non-leaves, and hides it
@cases
def test_runs_between_graphs(device, name, start, repeatable):
    make, region, calls, _ = CASES[name]
    made, found = [], []

    def backend(graph, inputs):
        made.append([node.name for node in graph.graph.nodes if node.op.startswith("call")])
        return graph.forward

    for compiled in (False, True):
        start()
        module, results = make(device), []
        program = program_of(module)
        if compiled:
            program = torch.compile(program, backend=backend)
        for options in calls:
            x = torch.randn(TOKENS, 2, WIDTH, device=device, requires_grad=True)
            with te.autocast(**region):
                out = program(x, **options)
            out.sum().backward()
            results += [out.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]
        found.append((results, state_of(module) if isinstance(module, te.Linear) else None))
    assert_same_bits(found[0][0], found[1][0])
    if found[0][1] is not None:
        assert_same_bits(found[0][1], found[1][1])
    names = [name for names in made for name in names]
    assert "sin" in names and "cos" in names  # the rest is in graphs
    assert len(made) >= 2


@cases
def test_one_graph_is_refused(device, name):
    make, region, calls, _ = CASES[name]
    program = torch.compile(program_of(make(device)), backend="eager", fullgraph=True)
    x = torch.randn(TOKENS, 2, WIDTH, device=device)
    with te.autocast(**region), pytest.raises(torch._dynamo.exc.Unsupported):
        program(x, **calls[0])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[3]])
def test_export_says_what_it_lacks(device, name):
    make, region, calls, reason = CASES[name]
    module = make(device).eval()
    x = torch.randn(TOKENS, 2, WIDTH, device=device)
    with (
        te.autocast(**region),
        pytest.raises(Exception, match=f"{reason} in torch.export: leave it out there"),
    ):
        torch.export.export(module, (x,), calls[0])
