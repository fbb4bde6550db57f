# SPDX-License-Identifier: Apache-2.0
"""What is active around a layer or its backward: what its modules would do there, it does.

Calls that keep their key stay one call; where something watches or transforms operators the
layer calls its modules. Bits are the same throughout.
"""

import copy

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.layer_ways import (
    DROPS,
    HIDDEN,
    LAYER,
    LENGTH,
    RECIPE_NAMES,
    assert_modules,
    assert_same_error,
    assert_whole,
    both_ways,
    by_modules,
    dtype_of,
    error_of,
    gradients,
    inputs_of,
    make_layer,
    region,
    states,
    watched,
)
from tols import BF16, F32
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te

# ---- modes and transforms ------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_autocast_of_torch(device, recipe):
    layer, x = make_layer(device, **DROPS), torch.randn(LENGTH, 2, HIDDEN, device=device)

    def run(layer):
        own = x.clone().requires_grad_()
        found = []
        for enabled in (True, False, True):
            with torch.autocast(device, BF16, enabled=enabled), region(recipe):
                out = layer(own)
            found += gradients(layer, own, out)
        return found

    whole = device == "cpu"  # in fp32, which no attention of a plan takes on a GPU
    with watched() as found:
        both_ways(layer, run, None)
    assert [taken for name, taken in found if name == LAYER][:3] == [True, whole, True]


def test_fake_tensors(device):
    layer = make_layer(device, dtype_of(device))
    x = states(layer)
    expected = assert_whole(layer, hidden_states=x)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        out = assert_modules(layer, hidden_states=mode.from_tensor(x.detach()))
        assert out.shape == expected.shape and out.dtype is expected.dtype
    assert_same_bits(assert_whole(layer, hidden_states=x), expected)


def test_the_meta_device():
    layer = make_layer("meta", F32)
    out = assert_modules(layer, hidden_states=torch.empty(LENGTH, 2, HIDDEN, device="meta"))
    assert out.is_meta and out.shape == (LENGTH, 2, HIDDEN)


def test_gradients_of_functions(device):
    """`torch.func.grad` by its input and by its parameters."""
    layer = make_layer(device, dtype_of(device))
    x = states(layer).detach()

    def run(layer):
        layer(x)  # a call that is kept
        parameters = {name: p.detach() for name, p in layer.named_parameters()}

        def loss(parameters, x):
            return torch.func.functional_call(layer, parameters, (x,)).float().square().sum()

        by_parameters, by_input = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
        return list(by_parameters.values()), by_input, layer(x)

    with watched() as found:
        both_ways(layer, run, None)
    assert [taken for name, taken in found if name == LAYER][:3] == [True, False, True]


def test_transforms_that_are_refused(device):
    layer = make_layer(device, dtype_of(device))
    x = states(layer).detach()
    text = assert_same_error(layer, lambda: torch.func.jvp(layer, (x,), (x,)))
    assert "jvp" in text
    text = assert_same_error(layer, lambda: torch.func.vmap(layer)(torch.stack([x, x])))
    assert "vmap" in text


@pytest.mark.parametrize("frozen", [False, True])
def test_forward_gradients_are_refused(device, frozen):
    """Also where no gradient in reverse is wanted."""
    layer = make_layer(device, dtype_of(device)).requires_grad_(not frozen)
    x = states(layer).detach()

    def run():
        with torch.autograd.forward_ad.dual_level():
            layer(torch.autograd.forward_ad.make_dual(x, x))

    assert "jvp" in assert_same_error(layer, run)


def test_second_derivatives_are_refused(device):
    layer = make_layer(device, dtype_of(device))
    x = states(layer)

    def run():
        out = layer(x).float().square().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.sum().backward()

    text = error_of(run)[1]
    assert "second derivative" in text
    layer(x).sum().backward()


@pytest.mark.parametrize("recipe", [None, "delayed"])
def test_compiled(device, recipe):
    """A graph calls the modules; eager calls before and after it are one."""
    layer = make_layer(device, dtype_of(device, recipe))
    x = states(layer)
    results = []
    own = copy.deepcopy(layer)
    for kind in ("eager", "compiled", "eager"):
        with region(recipe):
            called = torch.compile(own, backend="aot_eager") if kind == "compiled" else own
            with watched() as found:
                out = called(x)
        results.append(gradients(own, x, out))
        assert kind == "compiled" or found == [(LAYER, True)]
    te.reset()
    with by_modules():
        for ours in results:
            with region(recipe):
                out = layer(x)
            assert_same_bits(ours, gradients(layer, x, out))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
def test_exported(device):
    layer = make_layer(device, dtype_of(device)).eval()
    x = states(layer).detach()
    expected = assert_whole(layer, hidden_states=x)
    program = torch.export.export(layer, (x,), strict=False).module()
    assert_same_bits(program(x), expected)
    assert_same_bits(assert_whole(layer, hidden_states=x), expected)


# ---- recompute -----------------------------------------------------------------------------------

CHECKPOINTS = {
    "own": lambda f, x: te.checkpoint(f, x),
    "own, hooked": lambda f, x: te.checkpoint(f, x, use_reentrant=False),
    "torch": lambda f, x: torch_checkpoint(f, x, use_reentrant=True),
    "torch, hooked": lambda f, x: torch_checkpoint(f, x, use_reentrant=False),
}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recompute(device, kind, recipe):
    """By turns with calls that are not repeated, and one that no gradient is wanted of."""
    layer = make_layer(device, dtype_of(device, recipe), **DROPS)

    def run(layer):
        x, found = states(layer), []
        for step in range(6):
            with region(recipe):
                out = layer(x) if step % 3 == 0 else CHECKPOINTS[kind](layer, x)
                with torch.no_grad():
                    found.append(layer(x * 0.5))
            found += gradients(layer, x, out)
        return found

    both_ways(layer, run, None)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_recompute_of_two_layers(device, kind):
    """In one region, with one layer under the checkpoint and one not."""
    pair = torch.nn.Sequential(make_layer(device, BF16, **DROPS), make_layer(device, BF16))

    def run(pair):
        x, found = states(pair[0]), []
        for _ in range(3):
            with region("delayed"):
                out = pair[1](CHECKPOINTS[kind](pair[0], x))
            found += gradients(pair, x, out)
        return found

    both_ways(pair, run, None)


# ---- autograd ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "current"])
def test_a_backward_that_is_run_twice(device, recipe):
    """And for some inputs alone: gradients of the others are computed for nothing."""
    layer = make_layer(device, dtype_of(device, recipe), layer_type="decoder", **DROPS)

    def run(layer):
        given = inputs_of(layer)
        with region(recipe):
            out = layer(**given).float().square().sum()
        found = []
        leaves = [given["hidden_states"], given["encoder_output"], *layer.parameters()]
        found += torch.autograd.grad(out, leaves, retain_graph=True)
        found += torch.autograd.grad(out, leaves[:1], retain_graph=True)
        found += torch.autograd.grad(out, leaves[1:2], retain_graph=True)
        found += torch.autograd.grad(out, leaves[2:])
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(out, leaves)
        return found

    both_ways(layer, run)


def test_saved_tensors_hooks(device):
    """What is saved goes through them; what they give back is what the backward reads.

    They are no checkpoint, so such a layer is one call.
    """
    layer = make_layer(device, dtype_of(device), **DROPS)
    packed = []

    def pack(tensor):
        packed.append(tensor.numel())
        return tensor.detach().cpu().clone(), tensor.device

    def run(layer):
        x = states(layer)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[0].to(kept[1])):
            out = layer(x)
        return gradients(layer, x, out)

    both_ways(layer, run)
    assert packed


def test_tensors_saved_on_the_cpu(device):
    layer = make_layer(device, dtype_of(device), **DROPS)

    def run(layer):
        x, found = states(layer), []
        for _ in range(2):
            with torch.autograd.graph.save_on_cpu(), region("current"):
                out = layer(x)
            found += gradients(layer, x, out)
        return found

    both_ways(layer, run)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_detection(device):
    layer = make_layer(device, dtype_of(device), **DROPS)

    def run(layer):
        x = states(layer)
        with torch.autograd.set_detect_anomaly(True):
            return gradients(layer, x, layer(x))

    both_ways(layer, run)


def test_what_the_backward_reads_must_not_change(device):
    layer = make_layer(device, dtype_of(device))
    for change in (layer.self_attention.proj.weight, layer.layernorm_mlp.fc1_weight):
        out = layer(states(layer))
        with torch.no_grad():
            change.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_the_name_of_the_node(device):
    """Messages and profilers name the layer."""
    layer = make_layer(device, dtype_of(device))
    for name, label in (("third", f"{LAYER}[third]"), ("last", f"{LAYER}[last]"), (None, LAYER)):
        layer.name = name
        node = assert_whole(layer, hidden_states=states(layer)).grad_fn
        assert type(node).__name__ == f"{label}Backward"
