# SPDX-License-Identifier: Apache-2.0
"""Steps in CUDA graphs, gradients that steps multiply in place, errors that change nothing."""

import pytest
import torch
from comparators import assert_bits
from pytorch.helpers import assert_same_bits, captured, side_stream
from tols import BF16, F16, F32

from transformer_engine import _core
from transformer_engine.pytorch.optimizers import (
    FusedAdam,
    FusedSGD,
    checks,
    fused_adam,
    multi_tensor_adam_capturable,
    multi_tensor_scale,
    multi_tensor_sgd,
)
from transformer_engine.pytorch.optimizers.updates import run_update

ADAM = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
HALVES = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
KINDS = {
    "adam-fp32": (F32, lambda p: FusedAdam(p, capturable=True, **ADAM)),
    "adam-l2": (F32, lambda p: FusedAdam(p, capturable=True, adam_w_mode=False, **ADAM)),
    "adam-fp16": (F16, lambda p: FusedAdam(p, capturable=True, **ADAM)),
    "adam-masters": (BF16, lambda p: FusedAdam(p, capturable=True, master_weights=True, **ADAM)),
    "adam-bf16-means": (
        BF16, lambda p: FusedAdam(p, capturable=True, master_weights=True, **HALVES, **ADAM)),
    "adam-uncorrected": (F32, lambda p: FusedAdam(p, bias_correction=False, **ADAM)),
    "sgd": (BF16, lambda p: FusedSGD(p, 0.1)),
    "sgd-momentum": (
        F32, lambda p: FusedSGD(p, 0.1, momentum=0.9, dampening=0.2, weight_decay=0.1)),
    "sgd-nesterov": (BF16, lambda p: FusedSGD(p, 0.1, momentum=0.9, nesterov=True)),
}  # fmt: skip


def parameters_of(device, dtype, count=1100):
    """More than a call has, and than a launch has; two are large, some begin anywhere."""
    sizes = [40003, 16384 * 3, *(1 + i % 37 for i in range(count))]
    made = [torch.randn(n + i % 3, device=device).to(dtype)[i % 3 :] for i, n in enumerate(sizes)]
    return [torch.nn.Parameter(t) for t in made]


def all_of(optimizer, params):
    """What a step changes: parameters, gradients and states, and the steps that a device counts."""
    found = [t for p in params for t in (p.detach(), p.grad, *optimizer.state[p].values())]
    steps = [group.get("step") for group in optimizer.param_groups]
    return [t.clone() for t in (*found, *steps) if isinstance(t, torch.Tensor)]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_replays_are_steps(kind, seed):
    """With other gradients, and with other learning rates where these are on the device."""
    dtype, make = KINDS[kind]
    found = []
    for captures in (False, True):
        torch.manual_seed(seed)
        params = parameters_of("cuda", dtype)
        optimizer = make(params)
        for p in params:
            p.grad = torch.randn_like(p)
        with side_stream():
            optimizer.step()
        step = captured(optimizer.step)[0].replay if captures else optimizer.step
        for _ in range(3):
            for p in params:
                p.grad.copy_(torch.randn_like(p))
            for group in optimizer.param_groups:
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
            step()
        found.append(all_of(optimizer, params))
    assert_same_bits(*found)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
def test_replays_with_a_grad_scaler(seed):
    """Replays with an infinite gradient change nothing and are not counted."""
    found = []
    for captures in (False, True):
        torch.manual_seed(seed)
        params = parameters_of("cuda", F32, 70)
        optimizer = FusedAdam(params, capturable=True, **ADAM)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for p in params:
            p.grad = scaler.scale(torch.randn_like(p))

        def run(optimizer=optimizer, scaler=scaler):
            optimizer.step(grad_scaler=scaler)

        with side_stream():
            run()
        step = captured(run)[0].replay if captures else run
        for infinite in (False, True, False, False):
            for p in params:
                p.grad.copy_(scaler.scale(torch.randn_like(p)))
            if infinite:
                params[7].grad[-1] = torch.inf
            step()
        found.append(all_of(optimizer, params))
        assert optimizer.param_groups[0]["step"].tolist() == [4]
    assert_same_bits(*found)


def test_a_step_whose_number_would_be_captured(monkeypatch):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    optimizers = [FusedAdam([param]), FusedAdam([param], capturable=True)]
    optimizers.append(FusedAdam([param], bias_correction=False))
    monkeypatch.setattr(fused_adam, "is_capturing", lambda device: True)
    with pytest.raises(RuntimeError, match="capturable=False: every replay would correct"):
        optimizers[0].step()
    assert param.tolist() == [1.0] * 3 and "step" not in optimizers[0].param_groups[0]
    for optimizer in optimizers[1:]:
        optimizer.step()


def test_states_that_replays_would_begin_anew(monkeypatch):
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    adam, sgd = FusedAdam([param], capturable=True), FusedSGD([param], 0.5, momentum=0.9)
    begun = FusedAdam([param], capturable=True)
    begun.initialize_state(param)
    with monkeypatch.context() as patch:
        patch.setattr(checks, "is_capturing", lambda device: True)
        for optimizer in (adam, sgd, begun):  # the last has no number of its step
            with pytest.raises(RuntimeError, match="states are missing: every replay would make"):
                optimizer.step()
        FusedSGD([param], 0.0).step()
    assert param.tolist() == [1.0] * 3 and not adam.state[param] and not sgd.state[param]
    for optimizer in (adam, sgd, begun):
        optimizer.step()
        monkeypatch.setattr(checks, "is_capturing", lambda device: True)
        optimizer.step()
        monkeypatch.undo()


def test_learning_rates_on_the_device(device):
    """A schedule that writes into the tensor is obeyed by the next step."""
    ours, theirs = (parameters_of(device, F32, 3) for _ in range(2))
    for p, q in zip(ours, theirs, strict=True):
        q.data.copy_(p.data)
    optimizers = FusedAdam(ours, capturable=True, **ADAM), FusedAdam(theirs, **ADAM)
    for lr in (0.5, 0.25, 2.0):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        optimizers[0].param_groups[0]["lr"].fill_(lr)
        optimizers[1].param_groups[0]["lr"] = lr
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(ours, theirs, strict=True):
        assert_bits(p, q)


# ---- gradients that are multiplied in place ------------------------------------------------------


def scaled_twins(device, grads, **options):
    """A capturable optimizer with a scaler of 1024 and another one, in two groups each."""
    twins = []
    values = [torch.randn(grad.shape, device=device) for grad in grads]
    for capturable in (True, False):
        params = [torch.nn.Parameter(value.clone()) for value in values]
        groups = [{"params": params[:1]}, {"params": params[1:]}]
        twins.append((params, FusedAdam(groups, capturable=capturable, **ADAM, **options)))
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    scaler.scale(torch.ones(1, device=device))
    return *twins, scaler


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself:FutureWarning")
@pytest.mark.parametrize("scaled", [True, False], ids=["scaler", "plain"])
def test_parameters_that_share_a_gradient(device, scaled):
    """In one group, in two, and by views of other shapes: it is divided once."""
    grad = torch.randn(4, 6, device=device)
    views = [grad, grad, grad.view(24), grad]
    (ours, one), (theirs, other), scaler = scaled_twins(device, views)
    for _ in range(3):
        grad.normal_()
        for p, q, view in zip(ours, theirs, views, strict=True):
            p.grad, q.grad = view, view.clone()
        before = grad.clone()
        if scaled:
            grad.mul_(1024.0)
            one.step(grad_scaler=scaler)
        else:
            one.step()
        other.step()
        assert_bits(grad, before)
        for p, q in zip(ours, theirs, strict=True):
            assert_bits(p, q)


def expanded_gradients(device):
    return [
        torch.randn((), device=device).expand(5, 3),
        torch.randn(5, 1, device=device).expand(5, 4),
        torch.randn(6, 5, device=device).t(),
    ]


def test_gradients_whose_elements_share_memory(device):
    """They are read; torch's scaler refuses them, and then nothing has changed."""
    (ours, one), (theirs, other), scaler = scaled_twins(device, expanded_gradients(device))
    for _ in range(2):
        for p, q, grad in zip(ours, theirs, expanded_gradients(device), strict=True):
            p.grad, q.grad = grad, grad.clone()
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            one.step(grad_scaler=scaler)
        one.step()
        other.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p.grad, q.grad)
            assert_bits(p, q)


def test_such_gradients_times_a_factor(device):
    """Each of their elements is multiplied once."""
    grads, found = expanded_gradients(device), []
    flag, step = (torch.full((1,), n, dtype=torch.int32, device=device) for n in (0, 3))
    lr, factor = (torch.full((1,), value, device=device) for value in (0.01, 0.25))
    expected = [grad.clone() * 0.25 for grad in grads]
    for given in (grads, [grad.clone() for grad in grads]):
        rest = [[torch.ones(grad.shape, device=device) for grad in grads] for _ in range(3)]
        numbers = lr, 0.9, 0.99, 1e-8, step, 1, 1, 0.1, factor
        multi_tensor_adam_capturable(1, flag, [given, *rest], *numbers)
        assert all(torch.equal(grad, right) for grad, right in zip(given, expected, strict=True))
        found.append(rest)
    assert_same_bits(*found)


# ---- errors that change nothing ------------------------------------------------------------------


def pairs_of(device, *dtypes):
    return [torch.nn.Parameter(torch.ones(4, device=device).to(dtype)) for dtype in dtypes]


@pytest.mark.parametrize("make", [FusedAdam, lambda groups: FusedSGD(groups, 0.5)],
                         ids=["adam", "sgd"])  # fmt: skip
def test_a_gradient_that_can_not_be_in_a_later_group(device, make):
    first, second = pairs_of(device, F32, F32)
    optimizer = make([{"params": [first]}, {"params": [second]}])
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second).to_sparse()
    with pytest.raises(TypeError, match="a gradient of torch.float32, torch.sparse_coo"):
        optimizer.step()
    assert first.tolist() == [1.0] * 4
    assert "step" not in optimizer.param_groups[0]
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert_bits(first, second)


@pytest.mark.parametrize("make", [FusedAdam, lambda groups: FusedSGD(groups, 0.5)],
                         ids=["adam", "sgd"])  # fmt: skip
def test_a_parameter_that_can_not_be_in_a_later_group(device, make):
    (first,) = pairs_of(device, F32)
    shared = torch.nn.Parameter(torch.zeros(1, device=device).expand(4))
    optimizer = make([{"params": [first]}, {"params": [shared]}])
    first.grad, shared.grad = torch.ones_like(first), torch.ones(4, device=device)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Fused\w+: shape .*elements share memory: clone it"):
            optimizer.step()
    assert first.tolist() == [1.0] * 4 and not shared.any()
    assert "step" not in optimizer.param_groups[0] and not optimizer.state[first]


def test_states_begin_where_all_can_be_updated(device):
    """Masters are those of the weights at the first step that is taken."""
    first, second = pairs_of(device, BF16, BF16)
    optimizer = FusedAdam([first, second], lr=0.5, master_weights=True)
    first.grad, second.grad = torch.ones_like(first), torch.ones_like(second).to_sparse()
    with pytest.raises(TypeError, match="a gradient of torch.bfloat16, torch.sparse_coo"):
        optimizer.step()
    with torch.no_grad():
        first.fill_(3.0)  # loaded since
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert first.tolist() == [2.5] * 4 and second.tolist() == [0.5] * 4


def test_decoupled_gradients_that_can_not_be(device):
    first, second = pairs_of(device, F32, F32)
    optimizer = FusedAdam([first, second], use_decoupled_grad=True)
    first.decoupled_grad, second.decoupled_grad = torch.ones_like(first), torch.ones(5)
    with pytest.raises(ValueError, match="a decoupled_grad of 5 elements on cpu: expected 4 on"):
        optimizer.step()
    assert first.tolist() == [1.0] * 4
    second.decoupled_grad = torch.ones(2, 2, device=device)  # whatever its shape
    optimizer.step()
    assert_bits(first, second)


def test_lists_of_which_one_tensor_can_not_be(device):
    """Others of them, of another dtype, would be updated by a call of their own."""
    ones = [torch.ones(4, device=device).to(dtype) for dtype in (F32, BF16, F32)]
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    for wrong, error, text in (
        (torch.ones(5, device=device), ValueError, "value 1: 5 elements, expected the 4 of its"),
        (torch.ones(4, device=device).int(), TypeError, "value 0: dtype i32, expected f32"),
        (torch.ones((), device=device).expand(4), ValueError, "elements share memory: clone it"),
        (torch.ones(0, device=device), ValueError, "value 1: 0 elements, expected the 4 of its"),
    ):
        values = [ones[0].clone(), ones[1].clone(), wrong]
        with pytest.raises(error, match=text):
            multi_tensor_sgd(1, flag, [ones, values, values], 0, 0, 0, 0.5, False, False, False, 1)
        assert all((value == 1).all() for value in values)
    with pytest.raises(ValueError, match="value 0: 4 elements, expected the 0 of its gradient"):
        multi_tensor_scale(1, flag, [[torch.empty(0, device=device)], ones[:1]], 2.0)


@pytest.mark.parametrize("mode", ["tensor", "mxfp8"])
def test_casts_of_which_one_can_not_be(device, mode):
    """They are looked at before the pass that they follow, whether they are part of it or not."""
    scaling = getattr(_core, f"SCALING_{mode.upper()}")

    def cast():
        row = torch.zeros(128, 128, dtype=torch.float8_e4m3fn, device=device)
        if mode == "mxfp8":
            scales = torch.zeros(128, 4, dtype=torch.uint8, device=device)
            return {"mode": scaling, "row": row, "row_scales": scales}
        scales = torch.zeros(2, device=device)
        one = torch.ones(1, device=device)
        return {"mode": scaling, "row": row, "row_scales": scales, "scale": one}

    def run(casts, grads):
        lists = [grads, values, None, None, None, None]
        run_update(_core.UPDATE_SGD, 0, lists, None, {"lr": 1.0}, casts=casts)

    grads, values = ([torch.ones(128, 128, device=device) for _ in range(2)] for _ in range(2))
    good, bad = cast(), cast()
    bad["row"] = bad["row"][:64]
    for dtype in (F32, BF16):  # all at once; by groups
        with pytest.raises(ValueError, match="quantize: row: "):
            run([good, bad], [grads[0], grads[1].to(dtype)])
        assert all((value == 1).all() for value in values)
    other = cast()
    run([good, other], [grads[0], grads[1].bfloat16() * 3])
    assert (values[0] == 0).all() and (values[1] == -2).all()
    assert not good["row"].float().any() and (other["row"].float() != 0).all()
