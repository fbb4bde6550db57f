# SPDX-License-Identifier: Apache-2.0
"""Modules run what the registry selects: in eager code, graphs, captures, recomputation."""

import contextlib
import copy
import threading

import pytest
import torch
import torch._dynamo.utils
from comparators import assert_bits
from plugged import (
    HIDDEN,
    KIND,
    MODULES,
    NAMES,
    RECIPES,
    SAME,
    Recorded,
    bound_of,
    data,
    distance,
    made,
    native,
    ran,
    register,
    step,
)
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.plugin import adapters, core as plugin
from transformer_engine.pytorch.distributed import activation_recompute_forward

pytestmark = pytest.mark.usefixtures("manager")

F32_TINY = torch.finfo(torch.float32).tiny


def unsteadiness(module, x, recipe, exact):
    """How far each result of a step is moved by sums that keep 13 or 12 bits of their largest.

    Tensor cores align the FP8 products of a sum and cut them off 14 bits below the largest, always
    towards 0: codes of what they make are others in some places than those of exact sums, and
    gradients of biases, sums that cancel, have the errors of all rows.
    """
    product = plugin.get_registry().get_implementation("generic_gemm", "reference.torch").fn
    moved = [0.0] * len(exact)
    for bits in (13, 12):

        def cut(*args, bits=bits):
            made, *others = product(*args)
            if any(hasattr(type(operand), "_dequantized") for operand in (args[0], args[2])):
                unit = (made.float().abs().max() * 2.0**-bits).clamp(min=F32_TINY)
                made.copy_((made.float() / unit).trunc() * unit)
            return made, *others

        impl = register("generic_gemm", cut)
        found = step(copy.deepcopy(module), x, recipe, plugin.with_preference("vendor"))
        plugin.get_registry().unregister(impl.op_name, impl.impl_id)
        pairs = zip(found, exact, moved, strict=True)
        moved = [max(distance(one, other), most) for one, other, most in pairs]
    return moved


# ---- what runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODULES)
def test_by_the_reference(device, name, recipe):
    """The definitions in torch, in place of all kernels that have one.

    Sums in another order change fp32's last bits, and by those now and then a code.
    """
    if RECIPES[recipe] is not None and name.endswith("Norm"):
        pytest.skip("a norm by itself quantizes nothing")
    module, x = made(name, device), data(device)
    other, third = copy.deepcopy(module), copy.deepcopy(module)
    wanted = step(module, x, RECIPES[recipe])
    before = plugins.counts()
    got = step(other, x, RECIPES[recipe], plugin.with_preference("reference"))
    done = ran(before)
    assert {key.split("/")[0] for key in done} >= NAMES[name]
    assert all(key.endswith("/reference.torch") for key in done)
    moved = [0.0] * len(wanted)
    if x.is_cuda and RECIPES[recipe] is not None:
        moved = unsteadiness(third, x, RECIPES[recipe], got)
    for one, exact, most in zip(got, wanted, moved, strict=True):
        assert distance(one, exact) < bound_of(recipe) + 4 * most


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "gated", "LayerNormMLP"])
def test_delegating_changes_no_bit(device, name, recipe):
    """Implementations that call this library's own: arguments and results come through exactly."""
    for op in adapters.OPERATORS - {"bgrad_quantize"}:
        fn = native(op)
        register(op, lambda *args, fn=fn, **kwargs: fn(*args, **kwargs))
    module, x = made(name, device), data(device)
    other = copy.deepcopy(module)
    wanted = step(module, x, RECIPES[recipe])
    before = plugins.counts()
    got = step(other, x, RECIPES[recipe], plugin.with_preference("vendor"))
    done = ran(before)
    if RECIPES[recipe] is not None:
        assert done.get("quantize/vendor.test", 0) >= 3  # input, weight, gradient
    assert done["generic_gemm/vendor.test"] >= 3
    # cuBLASLt may choose another algorithm without its epilogues.
    for one, other_one in zip(got, wanted, strict=True):
        if device == "cpu":
            assert_bits(one, other_one)
        else:
            assert distance(one, other_one) < bound_of(recipe)


def reentrant(module, x):
    return torch_checkpoint(module, x, use_reentrant=True)


def not_reentrant(module, x):
    return torch_checkpoint(module, x, use_reentrant=False)


WAYS = {
    "eager": None,
    "te checkpoint": lambda module, x: te.checkpoint(module, x),
    "te checkpoint, not reentrant": lambda m, x: te.checkpoint(m, x, use_reentrant=False),
    "torch checkpoint": reentrant,
    "torch checkpoint, not reentrant": not_reentrant,
    "vjp": "vjp",
    "compiled": "compiled",
}


@pytest.mark.parametrize("way", WAYS)
def test_a_backward_is_of_its_forward(device, way):
    """The policy has ended when the backward runs."""
    module, x = made("RMSNorm", device), data(device)
    wanted = step(module, x)
    recorded = Recorded().register()
    wrap, call = WAYS[way], module
    if wrap == "compiled":
        call, wrap = torch.compile(module, fullgraph=True), None
        first = step(call, x)
        assert recorded.calls == []
        assert distance(first[1], wanted[1]) < SAME
    if wrap == "vjp":
        with plugin.with_preference("vendor"):
            y, back = torch.func.vjp(module, x)
        (grad,) = back(torch.ones_like(y))
    else:
        y, grad, gamma_grad = step(call, x, None, plugin.with_preference("vendor"), wrap)
        assert torch.equal(gamma_grad, torch.full_like(gamma_grad, 5.0))
    assert torch.equal(grad, torch.full_like(grad, 3.0))
    assert distance(y, wanted[0] + 1) < SAME
    assert recorded.ways == ["forward"] * (1 + ("checkpoint" in way)) + ["backward"]
    recorded.calls.clear()
    again = step(call, x, None, None, wrap if callable(wrap) else None)  # and nothing stays behind
    assert recorded.calls == []
    assert distance(again[0], wanted[0]) < SAME
    assert distance(again[1], wanted[1]) < SAME


@pytest.mark.parametrize("way", ["eager", "te checkpoint", "torch checkpoint, not reentrant"])
def test_a_native_forward_has_a_native_backward(device, way):
    """Whatever is in force, or was registered, when the backward runs."""
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    recorded = Recorded().register()
    wrap = WAYS[way] or (lambda module, x: module(x))
    with plugin.with_preference("flagos"):
        y = wrap(module, x)
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    y.sum().backward()
    assert recorded.calls == []


@pytest.mark.parametrize("way", ["eager", *(way for way in WAYS if "checkpoint" in way)])
@pytest.mark.parametrize("recipe", ["plain", "delayed"])
def test_a_policy_set_between_forward_and_backward(device, way, recipe):
    """The global one selects nobody in the forward: so it is in the repetition and the backward."""
    module = te.LayerNormLinear(HIDDEN, 48, normalization="RMSNorm", device=device)
    x = data(device).requires_grad_()
    recorded = Recorded().register()
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="flagos"))
    wrap = WAYS[way] or (lambda module, x: module(x))
    make_recipe = RECIPES[recipe]
    region = te.autocast(recipe=make_recipe()) if make_recipe else contextlib.nullcontext()
    with region:
        y = wrap(module, x)
    assert _core.selected().selection is None
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    y.sum().backward()
    assert recorded.calls == []
    module(x)
    assert recorded.ways == ["forward"]


class _Repeated(torch.autograd.Function):
    """A recompute that a program does by itself."""

    @staticmethod
    def forward(ctx, module, x):
        ctx.module = module
        ctx.save_for_backward(x)
        with activation_recompute_forward(True):
            return module(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), activation_recompute_forward(True, True):
            y = ctx.module(x)
        return None, torch.autograd.grad(y, x, grad)[0]


@pytest.mark.parametrize("of", ["the process", "a with block"])
def test_a_program_repeats_by_the_policy_of_its_thread(device, of):
    """And not by that of the first forward that ever was.

    On CUDA a thread of torch runs the backward, which no ``with`` block is around.
    """
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    recorded = Recorded().register()
    for prefer in ("vendor", "flagos"):
        plugin.set_global_policy(plugin.SelectionPolicy(prefer="flagos"))
        block = plugin.with_preference(prefer)
        if of == "the process":
            plugin.set_global_policy(plugin.SelectionPolicy(prefer=prefer))
            block = contextlib.nullcontext()
        with block:
            _Repeated.apply(module, x).sum().backward()
        by_vendor = prefer == "vendor"
        repeated = by_vendor and (of == "the process" or device == "cpu")
        assert recorded.ways == ["forward"] * by_vendor + ["forward", "backward"] * repeated
        recorded.calls.clear()


@pytest.mark.parametrize("prefer", ["flagos", "vendor"])
def test_a_repetition_runs_the_graph_of_its_forward(device, prefer):
    """Where the policy is the same: it is not in a scope of its own."""
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    Recorded().register()
    plugin.set_global_policy(plugin.SelectionPolicy(prefer=prefer))
    compiled = torch.compile(module, fullgraph=True)
    module(x)
    torch._dynamo.utils.counters.clear()
    for _ in range(2):
        te.checkpoint(compiled, x, use_reentrant=False).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_thread_that_was_in_no_graph_runs_those_of_others(device):
    """A backward on CUDA runs on such a thread; one that is in a scope has a graph of its own."""
    module, x = made("RMSNorm", device), data(device)
    Recorded().register()
    compiled = torch.compile(module, fullgraph=True)
    compiled(x)
    torch._dynamo.utils.counters.clear()

    def run(prefer):
        with plugin.with_preference(prefer) if prefer else contextlib.nullcontext():
            compiled(x)

    for prefer, graphs in ((None, 0), ("vendor", 1)):
        thread = threading.Thread(target=run, args=(prefer,))
        thread.start()
        thread.join()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_registered_between_forward_and_backward(device):
    """Where nobody was obeyed: the manager itself is younger than the forward."""
    _core.obey(None)
    plugin.reset_default_manager()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    y = module(x)
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    recorded = Recorded().register()
    y.sum().backward()
    assert recorded.calls == []
    module(x).sum().backward()
    assert recorded.ways == ["forward", "backward"]


def globally(policy):
    """A policy in force until the fixture resets it."""
    plugin.set_global_policy(policy)
    return contextlib.nullcontext()


USES = {
    "global": lambda: globally(plugin.SelectionPolicy(prefer="reference")),
    "context": lambda: plugin.policy_context(plugin.SelectionPolicy(prefer="reference")),
    "preference": lambda: plugin.with_preference("reference"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("reset_inside", [False, True])
def test_a_policy_counts_where_there_was_no_manager(device, environment, use, reset_inside):
    """Modules obey it from the next call on, whether one has run before, or the manager goes."""
    plugin.reset_default_manager()
    module, x = made("RMSNorm", device), data(device)
    module(x)
    with USES[use]():
        if reset_inside:
            plugin.reset_default_manager()
        module(x)
        assert te.plugin.counts() == {"rmsnorm_fwd/reference.torch": 1}
    plugin.reset_default_manager()


def test_unregistered_between_forward_and_backward(device):
    recorded = Recorded().register()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    with plugin.with_preference("vendor"):
        y = module(x)
    for op in ("rmsnorm_fwd", "rmsnorm_bwd"):
        plugin.get_registry().unregister(op, "vendor.test")
    y.sum().backward()
    assert recorded.ways == ["forward", "backward"]


def test_weight_gradients_that_were_put_off(device):
    """They are of their forward, too."""
    shapes = []
    own = native("generic_gemm")

    def gemm(*args):
        found = own(*args)
        shapes.append(tuple(found[0].shape))
        return found

    register("generic_gemm", gemm)
    module, x = te.Linear(HIDDEN, 48, device=device, delay_wgrad_compute=True), data(device)
    with plugin.with_preference("vendor"):
        y = module(x)
    y.sum().backward()
    before = len(shapes)
    module.backward_dw()
    assert shapes[before:] == [(48, HIDDEN)]


def test_unrelated_registrations_change_no_selection():
    Recorded().register()
    with plugin.with_preference("vendor"):
        number = _core.selection_number()
        assert number > 0
        plugin.get_registry().register(
            plugin.OpImpl("other", "vendor.test", KIND.VENDOR, print, vendor="test")
        )
        assert _core.selection_number() == number


def test_the_thread_of_a_policy(device):
    """A policy context is of its thread; a backward on another thread is of its forward."""
    recorded = Recorded().register()
    module, x = made("RMSNorm", device), data(device).requires_grad_()
    with plugin.with_preference("vendor"):
        y = module(x)
        other = threading.Thread(target=lambda: module(x.detach()))
        other.start()
        other.join()
    assert recorded.ways == ["forward"]
    later = threading.Thread(target=lambda: y.sum().backward())
    later.start()
    later.join()
    assert recorded.ways == ["forward", "backward"]
    assert torch.equal(x.grad, torch.full_like(x, 3.0))


def test_a_graph_of_each_selection(device):
    """Registering, a global policy and a context each make another graph, and none is confused."""
    module, x = made("LayerNormLinear", device), data(device)
    compiled = torch.compile(module, fullgraph=True)
    first = step(compiled, x)
    recorded = Recorded().register()
    assert_bits(step(compiled, x)[0], first[0])
    plugin.set_global_policy(plugin.SelectionPolicy(prefer="vendor"))
    assert distance(step(compiled, x)[0], first[0]) > SAME
    assert recorded.ways == ["forward", "backward"]
    inside = step(compiled, x, None, plugin.with_preference("flagos"))
    assert_bits(inside[0], first[0])
    plugin.get_registry().unregister("rmsnorm_fwd", "vendor.test")
    assert_bits(step(compiled, x)[0], first[0])


@pytest.mark.parametrize("name", ["LayerNormMLP", "gated"])
def test_compiled_by_the_reference(device, name):
    """Whose gradients are those of autograd, inside of the operators of a graph."""
    module, x = made(name, device), data(device)
    with plugin.with_preference("reference"):
        wanted = step(module, x)
        asked = plugins.counts()
        torch._dynamo.reset()
        found = step(torch.compile(module, backend="aot_eager"), x)
    assert asked and plugins.counts() == {name: 2 * count for name, count in asked.items()}
    for each, expected in zip(found, wanted, strict=True):
        assert_bits(each, expected)


def test_without_gradients(device):
    recorded = Recorded().register()
    module, x = made("RMSNorm", device), data(device)
    plain = module(x).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        with plugin.with_preference("vendor"), mode():
            y = module(x)
        assert distance(y, plain + 1) < SAME
    assert recorded.ways == ["forward"] * 2


@pytest.mark.gpu
def test_captured():
    """A graph of the device holds what was selected when it was captured."""
    recorded = Recorded().register()
    module, x = made("RMSNorm", "cuda"), data("cuda")
    wanted = module(x).detach() + 1
    side = torch.cuda.Stream()
    with plugin.with_preference("vendor"), torch.no_grad():
        with torch.cuda.stream(side):
            module(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = module(x)
    graph.replay()
    assert distance(y, wanted) < SAME
    assert recorded.ways == ["forward"] * 2
