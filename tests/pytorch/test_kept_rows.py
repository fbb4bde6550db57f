# SPDX-License-Identifier: Apache-2.0
"""What optimizers keep between steps: states that are moved, parameters that change, copies."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from comparators import assert_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD


def stepped(dtype=torch.bfloat16, **options):
    """A parameter, and an optimizer that has stepped it."""
    param = torch.nn.Parameter(torch.randn(8, 8).to(dtype))
    param.grad = torch.randn_like(param)
    optimizer = FusedAdam([param], lr=0.1, **options)
    optimizer.step()
    return param, optimizer


@pytest.mark.parametrize("remainders", [False, True], ids=["master", "remainders"])
def test_states_that_are_moved_are_let_go(remainders):
    """Programs copy states to the host between steps, for their memory."""
    param, optimizer = stepped(master_weights=True, store_param_remainders=remainders)
    state = optimizer.state[param]
    twin = copy.deepcopy(optimizer)
    other = twin.param_groups[0]["params"][0]
    old = [weakref.ref(value) for value in state.values()]
    for name in list(state):
        state[name] = state[name].clone()
    gc.collect()
    assert len(old) == 3
    assert all(ref() is None for ref in old)
    param.grad = torch.randn_like(param)
    other.grad = param.grad.clone()
    optimizer.step()
    twin.step()
    assert_bits(param.detach(), other.detach())
    for name, value in state.items():
        assert_bits(value, twin.state[other][name])


def test_parameters_that_left_their_group_are_let_go():
    param, optimizer = stepped()
    stays = torch.nn.Parameter(torch.randn(4))
    stays.grad = torch.randn(4)
    optimizer.add_param_group({"params": [stays]})
    optimizer.step()
    optimizer.param_groups[0]["params"] = []
    del optimizer.state[param]
    ref = weakref.ref(param)
    del param
    optimizer.step()
    gc.collect()
    assert ref() is None


def test_a_parameter_that_becomes_narrow_gets_a_master():
    param, optimizer = stepped(torch.float32, master_weights=True)
    param.data = param.data.bfloat16()
    begin = param.detach().float()
    param.grad = torch.full_like(param, 1e-4)
    for group in optimizer.param_groups:
        group["lr"] = 1e-6  # too little for bf16
    optimizer.step()
    master = optimizer.state[param]["master_param"]
    assert master.dtype is torch.float32
    assert not torch.equal(master, begin)
    assert_bits(param.detach(), master.bfloat16())


def test_a_state_that_lacks_a_mean_is_refused():
    param, optimizer = stepped()
    del optimizer.state[param]["exp_avg_sq"]
    with pytest.raises(RuntimeError, match=r"has \['exp_avg'\], expected exp_avg and exp_avg_sq"):
        optimizer.step()


def test_a_parameter_that_becomes_quantized_is_cast():
    param, optimizer = stepped(torch.float32)
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cpu"))
    other = torch.nn.Parameter(quantizer(torch.randn(8, 8)))
    expected = torch.nn.Parameter(other.detach().dequantize(dtype=torch.float32))
    del param.grad
    torch.utils.swap_tensors(param, other)
    param.grad = torch.randn(8, 8)
    expected.grad = param.grad.clone()
    twin = FusedAdam([expected], lr=0.1)
    twin.initialize_state(expected)
    for name, value in optimizer.state[param].items():
        twin.state[expected][name].copy_(value)
    twin.param_groups[0]["step"] = optimizer.param_groups[0]["step"]
    optimizer.step()
    twin.step()
    assert_bits(param.detach().dequantize(), quantizer(expected.detach()).dequantize())


WAYS = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),  # noqa: S301
}
OPTIMIZERS = {
    "adam": lambda params: FusedAdam(params, lr=0.1, adam_w_mode=False, weight_decay=0.1),
    "masters": lambda params: FusedAdam(params, lr=0.1, master_weights=True),
    "scales": lambda params: FusedAdam(params, lr=0.1, exp_avg_dtype=torch.float16),
    "capturable": lambda params: FusedAdam(params, lr=0.1, capturable=True),
    "sgd": lambda params: FusedSGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.1, wd_after_momentum=True
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_copies_step_as_the_original(name, way):
    param = torch.nn.Parameter(torch.randn(8, 8).bfloat16())
    param.grad = torch.randn_like(param)
    optimizer = OPTIMIZERS[name]([param])
    optimizer.step()
    made = WAYS[way](optimizer)
    other = made.param_groups[0]["params"][0]
    assert other is not param
    for _ in range(2):
        param.grad = torch.randn_like(param)
        other.grad = param.grad.clone()
        optimizer.step()
        made.step()
        assert_bits(param.detach(), other.detach())
