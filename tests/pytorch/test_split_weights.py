# SPDX-License-Identifier: Apache-2.0
"""Split weights: storages of their own in one allocation, seen by autograd one by one."""

import copy
import gc
import io
import pickle
import threading

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine import _core

SPLIT = {"query": 32, "key": 16, "value": 16}
KINDS = {"Linear": te.Linear, "LayerNormLinear": te.LayerNormLinear}
RECIPE_NAMES = [None, "delayed", "current"]


def make(kind="Linear", device="cpu", dtype=torch.float32, **options):
    return KINDS[kind](32, 64, parameters_split=SPLIT, device=device, params_dtype=dtype, **options)


def parts(layer, kind="weight"):
    return [getattr(layer, f"{name}_{kind}") for name in SPLIT]


def lie_in_one(tensors):
    """Whether each begins where the one before it ends."""
    ends = [t.data_ptr() + t.nbytes for t in tensors]
    return [t.data_ptr() for t in tensors[1:]] == ends[:-1]


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


def moved(layer, how):
    if how == "made":
        return layer
    if how == "converted":
        return layer.to(torch.bfloat16)
    if how == "deepcopy":
        return copy.deepcopy(layer)
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("how", ["made", "converted", "deepcopy", "pickle"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_part_has_a_storage_of_its_own_in_one_allocation(device, kind, how):
    layer = moved(make(kind, device), how)
    for tensors in (parts(layer), parts(layer, "bias")):
        assert lie_in_one(tensors)
        for tensor in tensors:
            assert tensor.untyped_storage().data_ptr() == tensor.data_ptr()
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_one_part_is_saved_without_the_others(device):
    layer = make(device=device)
    sizes = []
    for weight in parts(layer):
        file = io.BytesIO()
        torch.save(weight, file)
        sizes.append(file.tell() - weight.nbytes)
        file.seek(0)
        assert_same_bits(torch.load(file).detach(), weight.detach())
    assert max(sizes) < min(weight.nbytes for weight in parts(layer))


def gradients(layer, x, recipe):
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    with region(recipe):
        out = layer(x)
    out.backward(torch.ones_like(out))
    return [out.detach(), x.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.parametrize("calls", [1, 3])
def test_a_part_changed_before_the_backward_is_an_error(device, kind, name, recipe, calls):
    """As of `torch.nn.Linear`, at the first call and at those that take the short way."""
    layer = make(kind, device)
    twin = torch.nn.Linear(32, 64, device=device)
    for number in range(calls):
        x = torch.randn(16, 32, device=device, requires_grad=True)
        with region(recipe):
            out, reference = layer(x), twin(x)
        if number + 1 < calls:
            out.sum().backward()
    with torch.no_grad():
        getattr(layer, f"{name}_weight").mul_(2.0)
        twin.weight[:16].mul_(2.0)
    for result in (reference, out):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_an_update_between_steps_counts(device, recipe):
    layer, whole = make(device=device), te.Linear(32, 64, device=device)
    for _ in range(3):
        with torch.no_grad():
            for tensor in (*parts(layer), *parts(layer, "bias")):
                tensor.copy_(torch.randn_like(tensor))
            whole.weight.copy_(torch.cat(parts(layer)))
            whole.bias.copy_(torch.cat(parts(layer, "bias")))
        x = torch.randn(16, 32, device=device)
        out, grad, *rest = gradients(layer, x, recipe)
        expected_out, expected_grad, weight, bias = gradients(whole, x, recipe)
        assert_same_bits([out, grad], [expected_out, expected_grad])
        assert_same_bits([torch.cat(rest[:3]), torch.cat(rest[3:])], [weight, bias])


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("how", ["parameter", "data", "load_state_dict(assign=True)"])
def test_replaced_parts_give_the_same_bits(device, recipe, how):
    layer = make(device=device)
    twin = copy.deepcopy(layer)
    x = torch.randn(16, 32, device=device)
    assert_same_bits(gradients(layer, x, recipe), gradients(twin, x, recipe))
    before = layer.key_weight.data_ptr()
    if how == "parameter":
        layer.key_weight = torch.nn.Parameter(layer.key_weight.detach().clone())
    elif how == "data":
        layer.key_weight.data = layer.key_weight.detach().clone()
    else:
        state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
    assert layer.key_weight.data_ptr() != before
    assert_same_bits(gradients(layer, x, recipe), gradients(twin, x, recipe))


def test_replaced_parts_free_the_allocation():
    """A framework that takes the parameters over does not pay for them twice."""
    layer = make()
    layer(torch.randn(4, 32)).sum().backward()
    whole = layer._joined["weight"]._whole
    assert whole() is not None
    for name in SPLIT:
        setattr(layer, f"{name}_weight", torch.nn.Parameter(torch.randn(SPLIT[name], 32)))
    layer(torch.randn(4, 32)).sum().backward()
    gc.collect()
    assert whole() is None


def test_a_compiled_call_is_not_fooled_by_a_change():
    """A graph keeps a copy of the joined weight: the gradient is that of the forward's weights."""
    layer = make()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(16, 32)
    expected = gradients(layer, x, None)
    x.requires_grad_()
    out = compiled(x)
    with torch.no_grad():
        layer.value_weight.mul_(2.0)
    out.backward(torch.ones_like(out))
    assert_same_bits(x.grad, expected[1])


def test_shared_memory_stays_shared():
    layer = make().share_memory()
    assert all(p.is_shared() for p in layer.parameters())
    twin = copy.deepcopy(layer)
    x = torch.randn(16, 32)
    assert_same_bits(gradients(layer, x, None), gradients(twin, x, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32])
def test_split_storage_shares_memory(device, dtype):
    whole = torch.randn(9, 3, device=device).mul(100).to(dtype)
    first, second = _core.split_storage(whole, (2, 6))
    assert torch.equal(first, whole[:2]) and torch.equal(second, whole[2:8])
    second.zero_()
    assert not whole[2:8].any() and whole.data_ptr() == first.data_ptr()


def test_split_storage_releases_on_any_thread():
    """The last reference may go where no Python code runs, and without the GIL."""
    whole = torch.randn(4, 4)
    pieces = list(_core.split_storage(whole, (1, 3)))
    alive = torch.utils.weak.TensorWeakRef(whole)
    del whole
    thread = threading.Thread(target=pieces.clear)
    thread.start()
    thread.join()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("tensor", "rows", "error", "text"),
    [
        (torch.randn(4, 4), (2, 3), ValueError, "rows: 3 is out of range"),
        (torch.randn(4, 4), (0, 4), ValueError, "rows: 0 is out of range"),
        (torch.randn(4, 4), [2, 2], TypeError, "expected a tuple"),
        (torch.randn(4, 4), (2, "x"), TypeError, "rows"),
        (torch.randn(4, 4).t(), (2, 2), ValueError, "contiguous"),
        (torch.tensor(1.0), (1,), ValueError, "0 dims"),
        (torch.empty(4, 4, device="meta"), (2, 2), TypeError, "tensor"),
        (torch.nn.Parameter(torch.randn(4, 4)), (2, 2), TypeError, "plain"),
        ("x", (2, 2), TypeError, "plain"),
    ],
    ids=[
        "more rows than there are",
        "no rows",
        "a list",
        "no numbers",
        "transposed",
        "no dims",
        "meta",
        "a parameter",
        "no tensor",
    ],
)
def test_split_storage_refuses(tensor, rows, error, text):
    with pytest.raises(error, match=text):
        _core.split_storage(tensor, rows)
