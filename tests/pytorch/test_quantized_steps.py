# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps that cast quantized parameters: the bits of an update, and of a cast after it."""

import copy
import gc
import weakref

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.quantized_cases import E4M3, E5M2, FORMATS
from thinning import pairs

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

OPTIONS = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
SHAPES = ((16, 32), (64, 64), (7, 40), (130, 72), (1, 24), (256, 200))


def delayed(dtype, **usages):
    def make(device):
        scale = torch.rand(1, device=device) * 30 + 1
        amax = torch.rand(1, device=device) * 0.1
        return te.Float8Quantizer(scale, amax, dtype, **usages)

    return make


CASTS = {
    "delayed": delayed(E4M3),
    "delayed e5m2": delayed(E5M2),
    "delayed rows": delayed(E4M3, columnwise=False),
    "delayed columns": delayed(E4M3, rowwise=False),
    "current": lambda device: te.Float8CurrentScalingQuantizer(E4M3, device),
    **{name: lambda device, make=make: make() for name, make in FORMATS.items()},
}


def makes(name, shape):
    """Whether a format holds matrices of a shape."""
    step = 16 if name.startswith("nv") else 32 if name.startswith("mx") else 1
    return all(size % step == 0 for size in shape)


def parameters_of(name, device, master):
    """Parameters, and the fp32 numbers that they begin with."""
    made, wide = [], []
    for shape in SHAPES:
        if makes(name, shape):
            values = torch.randn(shape, device=device)
            made.append(torch.nn.Parameter(CASTS[name](device)(values)))
            wide.append(values if master else made[-1].detach().dequantize(dtype=torch.float32))
    return made, wide


def data_of(tensor):
    """What a step writes of a parameter."""
    found = [t for t in tensor.get_data_tensors() if t is not None]
    amax = getattr(tensor._quantizer, "amax", None)
    return [t.clone() for t in (*found, *([] if amax is None else [amax]))]


# The cast takes what the update has made in fp32.
@pairs(name=CASTS, master=[False, True], dtype=[torch.float32, torch.bfloat16, torch.float16])
def test_adam_is_an_update_and_a_cast(device, name, master, dtype):
    params, wide = parameters_of(name, device, master)
    plain = [torch.nn.Parameter(values.clone()) for values in wide]
    given = FusedAdam(params, master_weights=master, use_decoupled_grad=True, **OPTIONS)
    other = FusedAdam(plain, use_decoupled_grad=True, **OPTIONS)
    for p, values in zip(params, wide, strict=True) if master else ():
        given.set_scaled_state(p, "master_param", values)
    for _ in range(2):
        expected = []
        for p, q in zip(params, plain, strict=True):
            if not master:
                q.data.copy_(p.detach().dequantize(dtype=torch.float32))
            p.decoupled_grad = torch.randn(p.shape, device=device).to(dtype)
            q.decoupled_grad = p.decoupled_grad.clone()
            twin = copy.deepcopy(p.detach())  # with an amax and a scale of its own
            expected.append(twin)
        versions = [p._version for p in params]
        other.step()
        given.step()
        for p, q, twin, version in zip(params, plain, expected, versions, strict=True):
            twin._quantizer.update_quantized(q.detach(), twin)
            assert_same_bits(data_of(p), data_of(twin))
            assert p._version > version
            for state in ("exp_avg", "exp_avg_sq"):
                assert_same_bits(given.state[p][state], other.state[q][state])
            if master:
                assert_same_bits(given.state[p]["master_param"], q.detach())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", ["delayed", "delayed rows", "current", "mx", "tiles"])
def test_sgd_is_an_update_and_a_cast(device, name, momentum):
    params, _ = parameters_of(name, device, False)
    plain = [torch.nn.Parameter(p.detach().dequantize(dtype=torch.float32)) for p in params]
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.1}
    given, other = FusedSGD(params, **options), FusedSGD(plain, **options)
    for _ in range(2):
        twins = [copy.deepcopy(p.detach()) for p in params]
        for p, q in zip(params, plain, strict=True):
            q.data.copy_(p.detach().dequantize(dtype=torch.float32))
            p.grad = torch.randn(p.shape, device=device)
            q.grad = p.grad.clone()
        other.step()
        given.step()
        for p, q, twin in zip(params, plain, twins, strict=True):
            twin._quantizer.update_quantized(q.detach(), twin)
            assert_same_bits(data_of(p), data_of(twin))


def pair(row, column):
    return lambda device: te.HybridQuantizer(
        rowwise_quantizer=row(device), columnwise_quantizer=column(device)
    )


SEVERAL = {
    "delayed, delayed": pair(CASTS["delayed"], CASTS["delayed"]),
    "delayed, current": pair(CASTS["delayed"], CASTS["current"]),
    "mx, delayed": pair(CASTS["mx"], CASTS["delayed"]),
    "plain, delayed": pair(lambda device: te.IdentityQuantizer(), CASTS["delayed"]),
    "plain": lambda device: te.IdentityQuantizer(),
}


@pytest.mark.parametrize("kind", ["adam", "masters", "sgd"])
@pytest.mark.parametrize("name", SEVERAL)
def test_parameters_of_several_casts_are_updated_once(device, name, kind):
    """Each form is a cast of its own: the update is one."""
    quantizer = SEVERAL[name](device)
    param = torch.nn.Parameter(quantizer(torch.randn(64, 96, device=device)))
    plain = torch.nn.Parameter(param.detach().dequantize(dtype=torch.float32).clone())
    param.grad = torch.randn(64, 96, device=device)
    plain.grad = param.grad.clone()
    if kind == "sgd":
        given, other = (FusedSGD([p], lr=0.1, momentum=0.9) for p in (param, plain))
    else:
        given = FusedAdam([param], master_weights=kind == "masters", **OPTIONS)
        other = FusedAdam([plain], **OPTIONS)
    given.step()
    other.step()
    for key, value in other.state[plain].items():
        assert_same_bits(given.state[param][key], value)
    made = param._quantizer(plain.detach())
    assert_same_bits(param.detach().dequantize(), made.dequantize())


@pytest.mark.parametrize("master", [False, True], ids=["alone", "master"])
@pytest.mark.parametrize("name", [*CASTS, *SEVERAL])
def test_a_step_that_is_left_out_leaves_all_formats(device, name, master):
    make = {**CASTS, **SEVERAL}[name]
    param = torch.nn.Parameter(make(device)(torch.randn(64, 64, device=device)))
    before = [t.clone() for t in param.get_data_tensors() if t is not None]
    optimizer = FusedAdam([param], master_weights=master, capturable=True, **OPTIONS)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    scaler.scale(torch.ones(1, device=device))
    param.grad = torch.full((64, 64), torch.inf, device=device)
    optimizer.step(grad_scaler=scaler)
    assert_same_bits([t for t in param.get_data_tensors() if t is not None], before)


def test_a_scaler_that_found_infinities_leaves_all(device):
    params, wide = parameters_of("delayed", device, True)
    optimizer = FusedAdam(params, master_weights=True, capturable=True, **OPTIONS)
    scaler = torch.amp.GradScaler(device, init_scale=4.0)
    for p, values in zip(params, wide, strict=True):
        optimizer.set_scaled_state(p, "master_param", values)
        p.grad = torch.randn(p.shape, device=device)
    params[1].grad[3, 5] = torch.inf
    scaler.scale(torch.ones(1, device=device))
    before = [data_of(p) for p in params]
    optimizer.step(grad_scaler=scaler)
    for p, found, values in zip(params, before, wide, strict=True):
        assert_same_bits(data_of(p), found)
        assert_same_bits(optimizer.state[p]["master_param"], values)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_every_device_has_the_same_bits(kind):
    params, _ = parameters_of("delayed", "cpu", False)
    quantizer = [p._quantizer for p in params]
    found = []
    grads = [torch.randn(p.shape) for p in params]
    for device in ("cpu", "cuda"):
        here = []
        for p, q in zip(params, quantizer, strict=True):
            own = te.Float8Quantizer(q.scale.to(device), q.amax.to(device, copy=True), E4M3)
            made = own(p.detach().dequantize(dtype=torch.float32).to(device))
            here.append(torch.nn.Parameter(made))
        make = FusedAdam if kind == "adam" else FusedSGD
        options = OPTIONS if kind == "adam" else {"lr": 0.1, "momentum": 0.9}
        optimizer = make(here, **options)
        for _ in range(3):
            for p, g in zip(here, grads, strict=True):
                p.grad = g.to(device, copy=True)
            optimizer.step()
        found.append([[t.cpu() for t in data_of(p)] for p in here])
    assert_same_bits(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["delayed", "mx"])
def test_a_captured_step_is_a_step(name):
    """A graph has the update and its cast; it is replayed with other gradients."""
    twins = []
    for captures in (True, False):
        torch.manual_seed(1)
        params, wide = parameters_of(name, "cuda", True)
        optimizer = FusedAdam(params, master_weights=True, capturable=True, **OPTIONS)
        for p, values in zip(params, wide, strict=True):
            optimizer.set_scaled_state(p, "master_param", values)
            p.grad = torch.randn(p.shape, device="cuda")
        optimizer.step()
        if captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                optimizer.step()
        for _ in range(2):
            for p in params:
                p.grad.copy_(torch.randn(p.shape, device="cuda"))
            if captures:
                graph.replay()
            else:
                optimizer.step()
        twins.append([[*data_of(p), *optimizer.state[p].values()] for p in params])
    assert_same_bits(*twins)


@pairs(name=CASTS, kind=[FusedAdam, FusedSGD])
def test_gradients_go_with_the_step(device, name, kind):
    """Nothing holds them until Python collects cycles."""
    params, _ = parameters_of(name, device, False)
    optimizer, held = kind(params, lr=0.01), []
    for p in params:
        p.grad = torch.randn(p.shape, device=device)
        held.append(weakref.ref(p.grad))
    gc.disable()
    try:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(grad() is None for grad in held)
    finally:
        gc.enable()


def test_refusals(device):
    value = torch.randn(4, 8, device=device)
    lists = [[torch.randn(4, 8, device=device)], [value]]
    lists += [[torch.zeros(4, 8, device=device)] for _ in range(2)]
    numbers, none = (0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 0.0, 0.0, 0.0), (None, None, None)
    row = torch.zeros(4, 16, dtype=torch.float8_e4m3fn, device=device)
    one = torch.ones(1, device=device)
    scales = torch.ones(2, device=device)
    cast = {"mode": _core.SCALING_TENSOR, "row": row, "row_scales": scales, "scale": one}

    def call(casts, kind=_core.UPDATE_ADAM, rounded=None, values=value):
        given = (lists[0], [values], *lists[2:], rounded, None)
        given = given if kind == _core.UPDATE_ADAM else (*given[:2], None, None, None, None)
        _core.update(kind, 0, given, None, numbers, 1, none, casts)

    before = value.clone()
    for error, text, arguments in (
        (TypeError, "casts: expected None, or a tuple of 1 dicts", ([cast],)),
        (TypeError, "casts: expected None, or a tuple of 1 dicts", ((cast, cast),)),
        (TypeError, "unexpected keyword argument 'rows'", (({"rows": row},),)),
        (ValueError, "noop or bias_grad is given", (({**cast, "noop": one},),)),
        (ValueError, "casts: adam with the lists", ((cast,), _core.UPDATE_ADAM, [value.clone()])),
        (ValueError, "casts: scale with the lists", ((cast,), _core.UPDATE_SCALE)),
        (ValueError, "neither scale nor partials", (({**cast, "scale": None},),)),
    ):
        with pytest.raises(error, match=text):
            call(*arguments)
    assert_same_bits(value, before)


def test_fields_of_a_cast_are_held_for_the_call():
    """A number's own code may empty the dict that it is given in."""
    fields = {}

    class Mode:
        def __index__(self):
            fields.clear()
            return _core.SCALING_TENSOR

    values = torch.randn(32, 32)
    scales = torch.zeros(2)
    fields["mode"] = Mode()
    fields["row"] = torch.zeros(32, 32, dtype=torch.float8_e4m3fn)
    fields["row_scales"], fields["scale"] = scales, torch.full((1,), 4.0)
    lists = ([torch.zeros(32, 32)], [values], None, None, None, None)
    _core.update(_core.UPDATE_SGD, 0, lists, None, (0.0,) * 9, 1, (None,) * 3, (fields,))
    assert not fields
    assert_same_bits(scales, torch.tensor([0.25, 4.0]))  # the inverse, and the scale
