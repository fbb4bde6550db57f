# SPDX-License-Identifier: Apache-2.0
"""Operators of torch on quantized tensors: what stays quantized, what is read, what is written."""

import copy

import pytest
import torch
from device_kinds import every_device
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import (
    assert_same_tensor,
    current,
    delayed,
    parameter,
    quantized,
)

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import IdentityTensor

pytestmark = every_device

STAY = {
    "view": lambda t: t.view(4, 8, 48),
    "view -1": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(2, -1, 48),
    "flatten": lambda t: t.flatten(),
    "slice": lambda t: t[3:9],
    "columns": lambda t: t[:, 16:32],
    "row": lambda t: t[5],
    "narrow": lambda t: t.narrow(0, 2, 7),
    "unsqueeze": lambda t: t[None],
    "squeeze": lambda t: t[None].squeeze(0),
    "split": lambda t: t.split(8)[2],
    "split sizes": lambda t: t.split([10, 22])[1],
    "chunk": lambda t: t.chunk(2, dim=1)[1],
    "unbind": lambda t: t.unbind()[3],
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "to": lambda t: t.to(t.device),
    "cpu": lambda t: t.cpu(),
}
ARE_READ = {
    "transposed copy": lambda t: t.t().contiguous(),
    "expanded copy": lambda t: t.expand(2, 32, 48).clone(),
    "cat": lambda t: torch.cat([t, t]),
    "sum": lambda t: t.sum(0),
    "matmul": lambda t: t @ t.t(),
    "add": lambda t: 2 + t,
    "compare": lambda t: t > 0,
    "zeros_like": torch.zeros_like,
    "full_like": lambda t: torch.full_like(t, 3),
    "index_select": lambda t: t.index_select(0, torch.tensor([1, 3], device=t.device)),
    "foreach": lambda t: torch._foreach_mul([t], 2)[0],
}
WRITE = {
    "copy_": lambda t, v: t.copy_(v),
    "zero_": lambda t, v: t.zero_(),
    "fill_": lambda t, v: t.fill_(3),
    "add_": lambda t, v: t.add_(v, alpha=2),
    "mul_": lambda t, v: t.mul_(0.5),
    "clamp_": lambda t, v: t.clamp_(-0.5, 0.5),
    "addcdiv_": lambda t, v: t.addcdiv_(v, v.abs() + 1),
    "row": lambda t, v: t[3].copy_(v[3]),
    "part": lambda t, v: t.view(-1)[5:20].zero_(),
    "split": lambda t, v: t.split(8)[1].mul_(4),
    "strided": lambda t, v: t[:, ::2].zero_(),
    "element": lambda t, v: t[1, 2].fill_(9),
    "of a split": lambda t, v: t.split(8)[1].chunk(2)[0].copy_(v[8:12]),
    "set item": lambda t, v: t.__setitem__((slice(1, 4), slice(2, 9)), 7.0),
    "mask": lambda t, v: t.masked_fill_(v > 0, 0.25),
    "foreach add": lambda t, v: torch._foreach_add_([t], [v]),
    "foreach copy": lambda t, v: torch._foreach_copy_([t], [v]),
    "foreach lerp": lambda t, v: torch._foreach_lerp_([t], [v], 0.3),
    "normal": lambda t, v: torch.nn.init.constant_(t, 0.1),
    "out": lambda t, v: torch.add(v, 1, out=t),
}


@pytest.mark.parametrize("operator", STAY)
@pytest.mark.parametrize("shape", [(32, 48), (32, 49)])
def test_what_stays_quantized(device, operator, shape):
    """With the codes of the values that torch gives; not where padded rows do not lie that way."""
    if shape[1] % 16 != 0 and operator == "chunk":
        shape = (32, 50)
    tensor = quantized(device, shape)
    if shape[1] != 48 and operator in ("view", "reshape"):
        operator = "slice"
    found, expected = STAY[operator](tensor), STAY[operator](tensor.dequantize())
    assert found.shape == expected.shape and found.dtype == expected.dtype
    if shape[1] == 48 or operator not in ("view -1", "flatten"):
        assert isinstance(found, te.Float8Tensor)
        assert_same_bits(found._scale_inv, tensor._scale_inv.to(found.device))
    assert_same_bits(found.dequantize(), expected)


@pytest.mark.parametrize("operator", ARE_READ)
def test_what_reads_the_values(device, operator):
    tensor = quantized(device)
    found, expected = ARE_READ[operator](tensor), ARE_READ[operator](tensor.dequantize())
    assert type(found) is torch.Tensor
    assert_same_bits(found, expected)


@pytest.mark.parametrize("operator", WRITE)
@pytest.mark.parametrize("columnwise", [True, False])
def test_what_writes_is_quantized_again(device, operator, columnwise):
    """The whole is cast once, with the scale that fits, into the memory that it has."""
    tensor = quantized(device, columnwise=columnwise)
    values = tensor.dequantize()
    other = torch.randn(32, 48, device=device, dtype=torch.bfloat16)
    version, place = tensor._version, tensor._data.data_ptr()
    WRITE[operator](tensor, other)
    WRITE[operator](values, other)
    assert_same_tensor(tensor, current(columnwise=columnwise)(values))
    assert tensor._version > version and tensor._data.data_ptr() == place
    if columnwise:
        assert_same_bits(tensor._transpose, tensor._data.t().contiguous())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, ::2],
        lambda t: t[3, 4],
        lambda t: t[2:, 5],
        lambda t: t.t()[4:],
        lambda t: t.permute(1, 0)[3:5],
        lambda t: t.diagonal(-2),
    ],
)
def test_views_that_have_no_codes_of_their_own(device, view):
    """They are in high precision; what is written to them goes to the tensor."""
    tensor = quantized(device)
    found = view(tensor)
    assert isinstance(found, IdentityTensor)
    assert_same_bits(found.dequantize(), view(tensor.dequantize()))
    assert_same_bits(found + 1, view(tensor.dequantize()) + 1)
    found.zero_()
    assert view(tensor.dequantize()).abs().max() == 0 and tensor.dequantize().abs().max() > 0


def test_conversions_do_not_round_to_the_nominal_dtype(device):
    tensor = quantized(device)
    assert_same_bits(tensor.float(), tensor.dequantize(dtype=torch.float32))
    assert_same_bits(tensor.half(), tensor.float().half())
    assert_same_bits(tensor.bfloat16(), tensor.dequantize())
    for dtype in (torch.float32, torch.float64, torch.float16):
        for found in (tensor.to(dtype), tensor.type(dtype), tensor.to(tensor.device, dtype)):
            assert_same_bits(found, tensor.dequantize(dtype=torch.float32).to(dtype))
        with torch.inference_mode():
            assert_same_bits(tensor.to(dtype), tensor.dequantize(dtype=dtype))


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_would_change_the_shape_is_refused(device, mode):
    """And has changed nothing."""
    tensor = quantized(device)
    other = torch.randn(9, 9, device=device, dtype=tensor.dtype)
    values = tensor.dequantize()
    calls = [
        lambda: tensor.t_(),
        lambda: tensor.unsqueeze_(0),
        lambda: tensor.resize_(3, 4),
        lambda: tensor.resize_as_(other),
        lambda: tensor.set_(other),
        lambda: torch.add(other, 1, out=tensor),
        lambda: tensor.view(torch.int16),
        lambda: tensor.view(torch.uint8),
    ]
    for call in calls:
        with mode(), pytest.raises(NotImplementedError, match="[tT]ensor"):
            call()
        assert tensor.shape == values.shape
        assert_same_bits(tensor.dequantize(), values)
    with mode():
        assert tensor.resize_(tensor.shape) is tensor and tensor.resize_as_(values) is tensor
        assert tensor.view(tensor.dtype).shape == tensor.shape and tensor.detach_() is tensor


def test_what_inference_mode_leaves_whole(device):
    """Is what it is made of, whether it returns a tensor as it came or a copy."""
    with torch.inference_mode():
        tensor = quantized(device)
        values = tensor.dequantize()
        for function in (
            lambda t: torch.nn.functional.dropout(t, training=False),
            lambda t: torch.broadcast_tensors(t[:1], t[:1])[0],
            lambda t: torch.atleast_3d(t)[4:],
            lambda t: t.T.reshape(6, 8, 32)[1],
        ):
            found, expected = function(tensor), function(values)
            assert_same_bits(found.dequantize(), expected)
            if expected.is_contiguous():
                found.zero_()
                expected.zero_()
            assert_same_bits(tensor.dequantize() == 0, values == 0)


def test_views_by_strides_are_of_the_whole(device):
    """As those of plain tensors: of the memory, wherever a view begins in it."""
    tensor = quantized(device)
    values = tensor.dequantize()
    for view in (
        lambda t: t.as_strided((5, 3), (97, 2)),
        lambda t: t[4:].as_strided((5, 3), (48, 1)),
        lambda t: t[4:, 3:9].as_strided((5, 3), (48, 1), 7),
        lambda t: t[:, ::2].t()[3:].as_strided((7,), (11,)),
    ):
        assert_same_bits(view(tensor).dequantize(), view(values))
        view(tensor).fill_(3)
        view(values).fill_(3)
        values = current()(values).dequantize()
        assert_same_bits(tensor.dequantize(), values)


def test_in_place_operators_return_their_tensor(device):
    tensor = quantized(device)
    assert tensor.add_(1) is tensor and tensor.copy_(tensor + 1) is tensor


def test_a_copy_of_the_same_kind_copies_codes(device):
    """Without a second rounding; a delayed one takes the scale along."""
    for make in (current, lambda: delayed(device)):
        one, other = (make()(torch.randn(32, 48, device=device)) for _ in range(2))
        one.copy_(other)
        assert_same_tensor(one, other)
    plain = torch.empty(32, 48, device=device, dtype=torch.float16)
    plain.copy_(one)
    assert_same_bits(plain, one.dequantize(dtype=torch.float32).half())


def test_empty_tensors_are_of_the_same_kind(device):
    tensor = quantized(device)
    found = torch.empty_like(tensor)
    assert isinstance(found, te.Float8Tensor) and found._quantizer is not None
    found.copy_(tensor)
    assert_same_bits(found.dequantize(), tensor.dequantize())
    assert torch.empty_like(tensor, device="meta").is_meta
    assert type(torch.empty_like(tensor, dtype=torch.float32)) is torch.Tensor


def test_gradients_go_through_views_and_readers(device):
    weight = parameter(device)
    values = weight.dequantize().detach().requires_grad_()
    for w in (weight, values):
        (w.view(4, 8, 48)[1:] * w[:8]).sum().backward()
    assert type(weight.grad) is torch.Tensor and weight.grad.dtype is torch.bfloat16
    assert_same_bits(weight.grad, values.grad)


def test_data_can_be_assigned(device):
    weight = parameter(device)
    other = quantized(device, dtype=torch.float16)
    weight.data = other
    assert isinstance(weight, torch.nn.Parameter) and weight.requires_grad
    assert weight.dtype is torch.float16 and weight._data is other._data
    plain = torch.randn(8, 16, device=device)
    weight.data = plain
    assert weight.shape == (8, 16)
    assert_same_bits(weight.dequantize(), current()(plain).dequantize())
    weight.data.zero_()
    assert weight.dequantize().abs().max() == 0


def test_sharing_between_processes_on_the_cpu():
    tensor = quantized("cpu")
    assert not tensor.is_shared() and tensor.share_memory_() is tensor and tensor.is_shared()


@pytest.mark.gpu
def test_moving_between_devices():
    tensor = quantized("cpu")
    there = tensor.cuda()
    assert isinstance(there, te.Float8Tensor) and there.is_cuda and there._data.is_cuda
    assert_same_bits(there.cpu().dequantize(), tensor.dequantize())
    pinned = tensor.pin_memory()
    assert pinned.is_pinned() and pinned._data.is_pinned()
    assert_same_bits(pinned.to("cuda", non_blocking=True).dequantize(), there.dequantize())
    there.record_stream(torch.cuda.Stream())


# ---- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False, fused=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused adam": lambda p: te.optimizers.FusedAdam(p, lr=0.1),
    "fused sgd": lambda p: te.optimizers.FusedSGD(p, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_update_in_place(device, name):
    """A step is that on the values, and one cast for each of the writes that torch makes."""
    weight = parameter(device, dtype=torch.float32)
    optimizer = OPTIMIZERS[name]([weight])
    version, place = weight._version, weight._data.data_ptr()
    for _ in range(2):
        values = weight.dequantize().detach().requires_grad_()
        known = OPTIMIZERS[name]([values])
        known.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        gradient = torch.randn_like(values)
        weight.grad, values.grad = gradient.clone(), gradient.clone()
        optimizer.step()
        known.step()
        written = current(columnwise=False)(values.detach())
        if not name.startswith("adamw") or name == "adamw fused":
            assert_same_tensor(weight.detach(), written)
        else:  # the decay is a write of its own, so values are rounded twice: by half of 2^-3 each
            assert (weight.dequantize() - values).abs().max() <= values.abs().max() * 2**-3
    assert weight._version > version and weight._data.data_ptr() == place
    assert all(
        type(value) is torch.Tensor and value.dtype is torch.float32
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    )


def test_masters_are_cast_into_the_parameters(device):
    weight = torch.nn.Parameter(quantized(device, columnwise=False))
    optimizer = te.optimizers.FusedAdam([weight], lr=0.01, master_weights=True)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
        master = optimizer.state[weight]["master_param"]
        assert type(master) is torch.Tensor and master.dtype is torch.float32
        assert_same_tensor(weight.detach(), current(columnwise=False)(master, dtype=weight.dtype))


def test_gradients_are_clipped_and_parameters_are_averaged(device):
    weight = parameter(device)
    weight.grad = torch.ones_like(weight.dequantize().detach())
    torch.nn.utils.clip_grad_norm_([weight], 1.0)
    assert type(weight.grad) is torch.Tensor and weight.grad.float().norm() < 1.5
    vector = torch.nn.utils.parameters_to_vector([weight])
    assert_same_bits(vector, weight.dequantize().view(-1))
    torch.nn.utils.vector_to_parameters(2 * vector, [weight])
    assert_same_bits(weight.dequantize(), current()(2 * vector.detach()).dequantize().view(32, 48))
