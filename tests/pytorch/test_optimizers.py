# SPDX-License-Identifier: Apache-2.0
"""`FusedAdam` and `FusedSGD` against their definitions, and what is kept between steps."""

import copy
import inspect

import pytest
import torch
from comparators import assert_bits, assert_within
from device_kinds import every_device, our_kernels
from pytorch.optimizer_parameters import DTYPES, gradients_of, parameters_of, views_of
from tols import EPS
from torch.utils._python_dispatch import TorchDispatchMode

from transformer_engine.plugin.builtin import SHARED, register_builtins
from transformer_engine.plugin.core import get_registry
from transformer_engine.pytorch import optimizers
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD, fused_adam

pytestmark = every_device


def test_steps_over_lists_are_those_of_tex():
    """Their definitions are tested with `transformer_engine_torch`."""
    registry = get_registry()
    register_builtins(registry)
    names = [name for name in optimizers.__all__ if name in SHARED["optimizers"].split()]
    assert len(names) == 11
    steps = [name for name in names if "norm" not in name and name != "multi_tensor_scale"]
    for name in steps:
        function = registry.get_implementation(name, "default.native").fn
        assert inspect.unwrap(getattr(optimizers, name)) is inspect.unwrap(function.func)


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


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_of_any_size_and_place(device, dtype, masters):
    params, grads = views_of(device, dtype)
    optimizer = FusedAdam(params, master_weights=masters, **OPTIONS)
    expected = []
    for p, g in zip(params, grads, strict=True):
        p.grad = g
        expected.append(Adam64(True, True).step(p, g))
    optimizer.step()
    for p, (new, terms) in zip(params, expected, strict=True):
        assert_within(p, new, terms, depth=2)


@pytest.mark.gpu
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("remainders", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adam_has_the_same_bits_on_every_device(dtype, remainders, moments):
    params, grads = views_of("cpu", dtype)
    others = [torch.nn.Parameter(p.detach().cuda()) for p in params]
    found = []
    for given in (params, others):
        optimizer = FusedAdam(
            given, master_weights=True, store_param_remainders=remainders,
            exp_avg_dtype=moments, exp_avg_sq_dtype=moments, **OPTIONS,
        )  # fmt: skip
        for _ in range(3):
            for p, g in zip(given, grads, strict=True):
                p.grad = g.to(p.device, copy=True)
            optimizer.step()
        found.append([t for p in given for t in (p.detach(), *optimizer.state[p].values())])
    for one, other in zip(*found, strict=True):
        assert_bits(other.cpu(), one)


STATES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8)


@pytest.mark.parametrize("second", STATES, ids=str)
@pytest.mark.parametrize("first", STATES, ids=str)
def test_states_of_other_dtypes(device, first, second):
    """A step is that of fp32 states that hold what the narrow ones do; they keep what fits."""
    params = parameters_of(device, torch.bfloat16)
    dtypes = {"exp_avg_dtype": first, "exp_avg_sq_dtype": second}
    narrow = FusedAdam(params, master_weights=True, **dtypes, **OPTIONS)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    wide = FusedAdam(copies, master_weights=True, **OPTIONS)
    for _ in range(3):
        wide.load_state_dict(copy.deepcopy(narrow.state_dict()))
        for p, c, g in zip(params, copies, gradients_of(params), strict=True):
            p.grad, c.grad = g, g.clone()
        narrow.step()
        wide.step()
        for p, c in zip(params, copies, strict=True):
            assert_bits(p, c)
            assert_bits(narrow.state[p]["master_param"], wide.state[c]["master_param"])
            for name, dtype in (("exp_avg", first), ("exp_avg_sq", second)):
                kept = narrow.get_unscaled_state(p, name)
                assert kept.dtype is torch.float32
                assert_state(kept, wide.state[c][name], dtype)


def assert_state(kept, exact, dtype):
    """A state is the nearest of its dtype, at the scale of the largest value."""
    if kept.numel() == 0:
        return
    top = exact.abs().max()
    scale = {torch.float16: 65504.0 / 2 / top, torch.uint8: 448.0 / top}.get(dtype, 1.0)
    kind = torch.float8_e4m3fn if dtype is torch.uint8 else dtype
    info = torch.finfo(kind)
    margin = exact.abs() * info.eps + info.smallest_normal * info.eps / scale
    assert ((kept - exact).abs() <= margin).all()


def test_remainders_are_the_rest_of_masters(device):
    params = parameters_of(device, torch.bfloat16)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = FusedAdam(params, master_weights=True, store_param_remainders=True, **OPTIONS)
    theirs = FusedAdam(copies, master_weights=True, **OPTIONS)
    for step in range(4):
        for p, c, g in zip(params, copies, gradients_of(params), strict=True):
            p.grad, c.grad = g, g.clone()
        ours.step()
        theirs.step()
        if step == 1:
            ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    for p, c in zip(params, copies, strict=True):
        rest = ours.state[p]["master_param"]
        assert rest.dtype is torch.int16
        high = p.detach().view(torch.int16).int() - (rest < 0).int()
        whole = (high << 16 | (rest.int() & 0xFFFF)).view(torch.float32)
        assert_bits(whole, theirs.state[c]["master_param"])


@pytest.mark.parametrize("dtype", [None, *DTYPES], ids=str)
def test_masters_of_other_dtypes(device, dtype):
    params = parameters_of(device, torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True, master_weight_dtype=dtype, **OPTIONS)
    kind = dtype or torch.float32
    expected = []
    for p, g in zip(params, gradients_of(params), strict=True):
        p.grad = g
        expected.append(Adam64(True, True).step(p, g))
    optimizer.step()
    for p, (exact, terms) in zip(params, expected, strict=True):
        assert optimizer.state[p]["master_param"].dtype is kind
        # The master is rounded when it is made, and when it is written.
        rounded = terms * (EPS[kind] / EPS[torch.float32])
        master = optimizer.get_unscaled_state(p, "master_param")
        assert master.dtype is torch.float32
        assert_within(master, exact, rounded, depth=2)
        assert_within(p, exact, rounded, depth=2)


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_capturable_steps_are_those_of_the_host(device, dtype, masters):
    params = parameters_of(device, dtype)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    ours = FusedAdam(params, capturable=True, master_weights=masters, **OPTIONS)
    theirs = FusedAdam(copies, master_weights=masters, **OPTIONS)
    for _ in range(3):
        for p, c, g in zip(params, copies, gradients_of(params), strict=True):
            p.grad, c.grad = g, g.clone()
        with Reads() as reads:
            ours.step()
        assert reads.count == 0
        theirs.step()
    assert ours.param_groups[0]["step"].tolist() == [3]
    for p, c in zip(params, copies, strict=True):
        assert_bits(p, c)


@our_kernels
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_capturable_steps_with_a_grad_scaler(device):
    (param, *_) = parameters_of(device, torch.float32)
    copied = torch.nn.Parameter(param.detach().clone())
    ours = FusedAdam([param], capturable=True, **OPTIONS)
    theirs = FusedAdam([copied], **OPTIONS)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=10000)
    for infinite in (False, True, False):
        grad = torch.randn_like(param)
        param.grad = scaler.scale(grad).detach()
        copied.grad = grad
        if infinite:
            param.grad.view(-1)[3] = float("inf")
        else:
            theirs.step()
        scaler.step(ours)
        scaler.update()
        assert_bits(param, copied)
    with pytest.raises(RuntimeError, match="capturable=False: call grad_scaler.step"):
        theirs.step(grad_scaler=scaler)


def test_states_of_torch_are_loaded(device):
    params = parameters_of(device, torch.float32)[:2]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    theirs = torch.optim.AdamW(copies, **OPTIONS)
    for c in copies:
        c.grad = torch.randn_like(c)
    theirs.step()
    ours = FusedAdam(params, **OPTIONS)
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert ours.param_groups[0]["step"] == 1
    for p, c in zip(params, copies, strict=True):
        assert_bits(ours.state[p]["exp_avg"], theirs.state[c]["exp_avg"])


def test_programs_may_replace_parts(device, monkeypatch):
    """The calls of NeMo AutoModel 0.7.0, nemo_automodel/shared/te_patches.py."""
    names = list(inspect.signature(FusedAdam._initialize_state).parameters)
    assert names == ["self", "param", "state_name", "zero_buffer", "store_param_remainders"]
    assert inspect.getsource(FusedAdam._initialize_state)
    original, called = fused_adam.multi_tensor_applier, []

    def applier(op, noop_flag_buffer, tensor_lists, *args):
        called.append([len(each) for each in tensor_lists])
        return original(op, noop_flag_buffer, tensor_lists, *args)

    monkeypatch.setattr(fused_adam, "multi_tensor_applier", applier)
    params = [torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(1025)]
    optimizer = FusedAdam(params, lr=0.5, eps=0.0)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert called == [[1024] * 4, [1] * 4]
    assert all(p.tolist() == [-0.5, -0.5] for p in params)


def test_errors():
    parameter = torch.nn.Parameter(torch.zeros(3))
    with pytest.raises(NotImplementedError, match=r"FusedAdam\(amsgrad=True\) is not"):
        FusedAdam([parameter], amsgrad=True)
    for name, value in {
        "exp_avg_dtype": torch.int8,
        "exp_avg_sq_dtype": torch.float64,
        "master_weight_dtype": torch.uint8,
    }.items():
        with pytest.raises(ValueError, match=rf"{name}={value!r}, expected one of torch.float32"):
            FusedAdam([parameter], **{name: value})
    for options in (
        {"store_param_remainders": True},
        {"master_weights": True, "master_weight_dtype": torch.float16},
        {"exp_avg_dtype": torch.bfloat16},
    ):
        with pytest.raises(RuntimeError, match="capturable=True"):
            FusedAdam([parameter], capturable=True, **options)
    for name in ("lr", "eps", "weight_decay"):
        for value in (-1.0, float("nan")):
            with pytest.raises(ValueError, match=f"FusedAdam: {name}={value!r}, expected"):
                FusedAdam([parameter], **{name: value})
    with pytest.raises(ValueError, match=r"betas=\(0.9, 1.0\), expected two numbers"):
        FusedAdam([parameter], betas=(0.9, 1.0))
    for betas in (0.9, ("0.9", 0.99), (None, 0.9), (0.9,), (0.9, 0.9, 0.9), "ab"):
        for given in ({"betas": betas}, {"params": [{"params": [parameter], "betas": betas}]}):
            with pytest.raises(TypeError, match="FusedAdam: betas=.*, expected two numbers"):
                FusedAdam(**{"params": [parameter], **given})
    for kind, first in ((FusedAdam, {}), (FusedSGD, {"lr": 0.1})):
        for number in ({"lr": "1e-3"}, {"weight_decay": "0.1"}):
            (name,) = number
            with pytest.raises(TypeError, match=f"{kind.__name__}: {name}='.*', expected a number"):
                kind([{"params": [parameter], **number}], **first)
        with pytest.raises(TypeError, match="param_group must be a dict"):
            kind([parameter], **first).add_param_group([torch.nn.Parameter(torch.ones(1))])
    optimizer = FusedAdam([parameter])
    parameter.grad = torch.ones(3).to_sparse()
    with pytest.raises(TypeError, match="gradient of torch.float32, torch.sparse_coo: expected"):
        optimizer.step()
    with pytest.raises(TypeError, match="FusedSGD: a gradient of torch.float32, torch.sparse_coo"):
        FusedSGD([parameter], 0.1).step()
    for options in ({"lr": -1.0}, {"lr": 0.1, "momentum": -1.0}, {"lr": 0.1, "nesterov": True}):
        with pytest.raises(ValueError, match="FusedSGD: "):
            FusedSGD([parameter], **options)
        with pytest.raises(ValueError, match="FusedSGD: "):
            FusedSGD([{"params": [parameter], **options}], nesterov=options.get("nesterov", False))
    with pytest.raises(ValueError, match="FusedSGD: no lr for a group of parameters"):
        FusedSGD([parameter])
    with pytest.raises(TypeError, match="FusedSGD: lr='1e-3', expected a number"):
        FusedSGD([{"params": [parameter], "lr": "1e-3"}])


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


@our_kernels
def test_steps_that_find_their_rows_again(device):
    """States and gradients that change between steps are those of the next one."""
    params = parameters_of(device, torch.bfloat16)
    optimizer = FusedAdam(params, master_weights=True, **OPTIONS)
    twins = [torch.nn.Parameter(p.detach().clone()) for p in params]
    other = FusedAdam(twins, master_weights=True, **OPTIONS)
    for step in range(4):
        for p, q in zip(params, twins, strict=True):
            p.grad = torch.randn_like(p) if step != 1 or p is params[0] else None
            q.grad = None if p.grad is None else p.grad.clone()
        if step == 2:
            optimizer.state[params[0]]["exp_avg"] = torch.ones_like(params[0], dtype=torch.float32)
            saved = copy.deepcopy(other.state_dict())
            saved["state"][0]["exp_avg"].fill_(1.0)
            other.load_state_dict(saved)
        optimizer.step()
        other.step()
        for p, q in zip(params, twins, strict=True):
            assert_bits(p, q)
    params[0].grad = torch.ones_like(params[0]).to_sparse()
    with pytest.raises(TypeError, match="a gradient of torch.bfloat16, torch.sparse_coo"):
        optimizer.step()


def test_updates_of_what_lies_in_other_ways(device):
    """Strided, negative and mixed tensors of one list are updated as dense ones are."""
    grads = [torch.randn(4, 6, device=device) for _ in range(3)]
    values = [torch.randn(6, 4, device=device).t(), torch.randn(4, 6, device=device)]
    values.append(torch.randn(4, 6, device=device).bfloat16())
    given = [torch._neg_view(grads[0].clone()), grads[1].t().contiguous().t(), grads[2]]
    dense = [value.clone(memory_format=torch.contiguous_format) for value in values]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    numbers = 0.1, 0.0, 0.0, 0.5, False, False, False, 1.0
    optimizers.multi_tensor_sgd(1, flag, [given, values, values], *numbers)
    for value, before, grad in zip(values, dense, (-grads[0], *grads[1:]), strict=True):
        expected = before.float() - 0.5 * (grad + 0.1 * before.float())
        assert_within(value, expected.double(), expected.double().abs() + 1.0, depth=4)
