# SPDX-License-Identifier: Apache-2.0
"""`FusedAdam` and `FusedSGD` against their definitions, and what is kept between steps."""

import copy
import inspect

import pytest
import torch
from comparators import assert_bits, assert_within
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine.plugin.builtin import SHARED, register_builtins
from transformer_engine.plugin.core import get_registry
from transformer_engine.pytorch import optimizers
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD


def test_steps_over_lists_are_those_of_tex():
    """Their definitions are tested with `transformer_engine_torch`."""
    registry = get_registry()
    register_builtins(registry)
    names = [name for name in optimizers.__all__ if name in SHARED["optimizers"].split()]
    assert len(names) == 10
    steps = [name for name in names if "norm" not in name and name != "multi_tensor_scale"]
    for name in steps:
        function = registry.get_implementation(name, "default.native").fn
        assert getattr(optimizers, name) is inspect.unwrap(function.func)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


class Adam64:
    """The definition in float64, and the sums of the magnitudes of its terms."""

    def __init__(self, adamw, corrected):
        self.adamw, self.corrected = adamw, corrected
        self.m = self.v = self.terms_of_m = 0.0
        self.count = 0

    def step(self, p, g):
        """(new parameter, its terms) of a parameter and a gradient."""
        p, g = p.detach().cpu().double(), g.cpu().double()
        lr, (b1, b2), eps, wd = OPTIONS.values()
        self.count += 1
        if not self.adamw:
            g = g + wd * p
        self.m = b1 * self.m + (1 - b1) * g
        self.terms_of_m = b1 * self.terms_of_m + (1 - b1) * g.abs()
        self.v = b2 * self.v + (1 - b2) * g * g
        c1, c2 = (1 - b1**self.count, 1 - b2**self.count) if self.corrected else (1.0, 1.0)
        root = (self.v / c2).sqrt() + eps
        decay = wd if self.adamw else 0.0
        new = p - lr * (self.m / c1 / root + decay * p)
        return new, p.abs() + lr * (self.terms_of_m / c1 / root + decay * p.abs())


def parameters_of(device, dtype):
    return [
        torch.nn.Parameter(torch.randn(shape, device=device).to(dtype))
        for shape in ((33, 5), (7,), (0, 3))
    ]


def gradients_of(parameters):
    return [torch.randn_like(p) for p in parameters]


@pytest.mark.parametrize("corrected", [True, False], ids=["corrected", "uncorrected"])
@pytest.mark.parametrize("adamw", [True, False], ids=["adamw", "l2"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_is_its_definition(device, dtype, adamw, corrected):
    parameters = parameters_of(device, dtype)
    optimizer = FusedAdam(parameters, bias_correction=corrected, adam_w_mode=adamw, **OPTIONS)
    exact = [Adam64(adamw, corrected) for _ in parameters]
    for step in range(4):
        for p, g in zip(parameters, gradients_of(parameters), strict=True):
            p.grad = g
        expected = [e.step(p, p.grad) for e, p in zip(exact, parameters, strict=True)]
        optimizer.step()
        for p, (new, terms) in zip(parameters, expected, strict=True):
            assert_within(p, new, terms, depth=step + 1)
    assert optimizer.param_groups[0]["step"] == 4
    assert optimizer.adam_w_mode == int(adamw)
    for state in optimizer.state.values():
        assert {name: t.dtype for name, t in state.items()} == {
            "exp_avg": torch.float32,
            "exp_avg_sq": torch.float32,
        }


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_masters_are_updated_as_fp32_parameters_are(device, dtype):
    small = parameters_of(device, dtype)
    wide = [torch.nn.Parameter(p.detach().float()) for p in small]
    ours = FusedAdam(small, master_weights=True, **OPTIONS)
    theirs = FusedAdam(wide, master_weights=True, **OPTIONS)
    for _ in range(3):
        for p, w, g in zip(small, wide, gradients_of(small), strict=True):
            p.grad, w.grad = g, g.float()
        ours.step()
        theirs.step()
    for p, w in zip(small, wide, strict=True):
        assert_bits(ours.state[p]["master_param"], w)
        assert_bits(p, w.to(dtype))
        assert "master_param" not in theirs.state[w]


def test_decoupled_gradients(device):
    first, second = (parameters_of(device, torch.bfloat16)[0] for _ in range(2))
    second.data.copy_(first.data)
    gradient = torch.randn_like(first, dtype=torch.float32)
    first.grad, second.decoupled_grad = gradient.to(torch.bfloat16), gradient.to(torch.bfloat16)
    FusedAdam([first], **OPTIONS).step()
    decoupled = FusedAdam([second], use_decoupled_grad=True, **OPTIONS)
    decoupled.step()
    assert_bits(first, second)
    second.grad = torch.ones_like(second)
    decoupled.zero_grad(set_to_none=False)
    assert not second.decoupled_grad.any()
    decoupled.zero_grad()
    assert second.decoupled_grad is None
    assert second.grad is not None
    before = second.detach().clone()
    decoupled.step()  # there is none to read
    assert_bits(second, before)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_goes_on_from_its_state_dict(device, dtype, masters):
    parameters = parameters_of(device, dtype)
    optimizer = FusedAdam(parameters, master_weights=masters, **OPTIONS)
    gradients = [gradients_of(parameters) for _ in range(3)]

    def step(optimizer, parameters, gradients):
        for p, g in zip(parameters, gradients, strict=True):
            p.grad = g
        optimizer.step()

    step(optimizer, parameters, gradients[0])
    copies = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    resumed = FusedAdam(copies, master_weights=masters, **OPTIONS)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for given in gradients[1:]:
        step(optimizer, parameters, given)
        step(resumed, copies, given)
    for p, c in zip(parameters, copies, strict=True):
        assert_bits(c, p)
        for name, value in optimizer.state[p].items():
            assert_bits(resumed.state[c][name], value)


def test_state_by_name(device):
    (parameter, *_) = parameters_of(device, torch.bfloat16)
    optimizer = FusedAdam([parameter], master_weights=True, **OPTIONS)
    optimizer.initialize_state(parameter)
    assert_bits(optimizer.get_unscaled_state(parameter, "master_param"), parameter.detach().float())
    value = torch.randn_like(parameter, dtype=torch.float32)
    optimizer.set_scaled_state(parameter, "exp_avg", value)
    assert_bits(optimizer.get_unscaled_state(parameter, "exp_avg"), value)
    fresh = FusedAdam([parameter], master_weights=True, **OPTIONS)
    fresh.set_scaled_state(parameter, "master_param", value)
    assert_bits(fresh.get_unscaled_state(parameter, "master_param"), value)


def test_a_closure_is_run_with_gradients(device):
    (parameter, *_) = parameters_of(device, torch.float32)
    optimizer = FusedAdam([parameter], set_grad_none=False)

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    optimizer.zero_grad()
    assert parameter.grad is not None
    assert not parameter.grad.any()


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sgd_is_torchs(device, dtype, nesterov):
    parameters = parameters_of(device, dtype)[:2]
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    options = {"momentum": 0.9, "weight_decay": 0.1, "nesterov": nesterov}
    ours = FusedSGD(parameters, 0.1, materialize_master_grads=False, **options)
    theirs = torch.optim.SGD(others, 0.1, fused=True, **options)
    for _ in range(3):
        for p, o, g in zip(parameters, others, gradients_of(parameters), strict=True):
            p.grad, o.grad = g, g.clone()
        ours.step()
        theirs.step()
    for p, o in zip(parameters, others, strict=True):
        assert_bits(p, o)
    ours.zero_grad()
    assert all(p.grad is None for p in parameters)
    kept = FusedSGD(parameters, 0.1, set_grad_none=False)
    parameters[0].grad = torch.ones_like(parameters[0])
    kept.zero_grad()
    assert not parameters[0].grad.any()


def test_errors():
    parameter = torch.nn.Parameter(torch.zeros(3))
    for name, value in {
        "amsgrad": True,
        "capturable": True,
        "store_param_remainders": True,
        "exp_avg_dtype": torch.bfloat16,
        "exp_avg_sq_dtype": torch.uint8,
        "master_weight_dtype": torch.float16,
    }.items():
        with pytest.raises(NotImplementedError, match=rf"FusedAdam\({name}={value!r}\) is not"):
            FusedAdam([parameter], **{name: value})
    for name in ("lr", "eps", "weight_decay"):
        for value in (-1.0, float("nan")):
            with pytest.raises(ValueError, match=f"FusedAdam: {name}={value!r}, expected"):
                FusedAdam([parameter], **{name: value})
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\), expected two numbers"):
        FusedAdam([parameter], betas=(0.9, 1.0))
    optimizer = FusedAdam([parameter])
    with pytest.raises(
        NotImplementedError, match=r"initialize_state\(store_param_remainders=True\)"
    ):
        optimizer.initialize_state(parameter, True)
    with pytest.raises(NotImplementedError, match=r"FusedAdam.step\(grad_scaler=...\) is not"):
        optimizer.step(grad_scaler=object())
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match="gradient of torch.float32, torch.sparse_coo: expected"):
        optimizer.step()
    with pytest.raises(NotImplementedError, match=r"FusedSGD\(wd_after_momentum=True\) is not"):
        FusedSGD([parameter], 0.1, wd_after_momentum=True)


def test_steps_are_counted_whatever_the_default_dtype_is(device):
    """bf16 has no 301."""
    first = [p.detach() for p in parameters_of(device, torch.float32)]
    found = []
    for default in (torch.float32, torch.bfloat16):
        params = [torch.nn.Parameter(p.clone()) for p in first]
        optimizer = FusedAdam(params, **{**OPTIONS, "betas": (0.8, 0.9995)})
        optimizer.param_groups[0]["step"] = 300
        for p in params:
            p.grad = torch.ones_like(p)
        torch.set_default_dtype(default)
        try:
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(params)
    for one, other in zip(*found, strict=True):
        assert_bits(one, other)


class Reads(TorchDispatchMode):
    """Counts what is read from tensors: on a device that waits, and ends a capture."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("master", [False, True])
def test_capturable_steps_read_nothing(device, master):
    lists = [[torch.randn(5, device=device)] for _ in range(4 + master)]
    lists[3][0].abs_()
    op = optimizers.multi_tensor_adam_capturable
    op = optimizers.multi_tensor_adam_capturable_master if master else op
    noop, step = (torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, 3))
    lr, inverse = (torch.full((1,), value, device=device) for value in (0.01, 0.5))
    before = lists[1][0].clone()
    with Reads() as reads:
        op(1024, noop, lists, lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.1, inverse)
    assert reads.count == 0
    assert not torch.equal(lists[1][0], before)
