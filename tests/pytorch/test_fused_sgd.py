# SPDX-License-Identifier: Apache-2.0
"""`FusedSGD` against its definition, resumed, and with groups."""

import copy

import pytest
import torch
from comparators import assert_bits, assert_within
from device_kinds import every_device
from pytorch.optimizer_parameters import DTYPES, gradients_of, views_of

from transformer_engine.pytorch.optimizers import FusedSGD

pytestmark = every_device


def descend64(options, p, g, momentum):
    """(new parameter, its terms, new momentum, its terms) of float64 tensors, by definition."""
    lr, decay, factor = options["lr"], options["weight_decay"], options["momentum"]
    after, nesterov = options["wd_after_momentum"], options["nesterov"]
    decayed = 0.0 if after else decay * p
    update, terms = g + decayed, g.abs() + (0.0 if after else decay * p.abs())
    if factor:
        old, old_terms = momentum or (None, None)
        share = 1 - options["dampening"]
        new = update if old is None else factor * old + share * update
        new_terms = terms if old is None else factor * old_terms + abs(share) * terms
        update = update + factor * new if nesterov else new
        terms = terms + factor * new_terms if nesterov else new_terms
        momentum = new, new_terms
    if after:
        update, terms = update + decay * p, terms + decay * p.abs()
    return p - lr * update, p.abs() + lr * terms, momentum


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("momentum", "dampening", "nesterov"), [(0.0, 0.0, False), (0.9, 0.3, False), (0.9, 0.0, True)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sgd_is_its_definition(device, dtype, momentum, dampening, nesterov, after):
    options = {"lr": 0.1, "momentum": momentum, "dampening": dampening, "weight_decay": 0.1}
    options |= {"nesterov": nesterov, "wd_after_momentum": after}
    params, _ = views_of(device, dtype)
    optimizer = FusedSGD(params, materialize_master_grads=False, **options)
    kept = [None] * len(params)
    for step in range(3):
        for i, (p, g) in enumerate(zip(params, gradients_of(params), strict=True)):
            p.grad = g
            wide = [t.detach().cpu().double() for t in (p, g)]
            kept[i] = descend64(options, *wide, kept[i] and kept[i][2])
        optimizer.step()
        for p, (exact, terms, _) in zip(params, kept, strict=True):
            assert_within(p, exact, terms, depth=step + 2)
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_sgd_goes_on_from_its_state_dict(device):
    params, grads = views_of(device, torch.bfloat16)
    ours = FusedSGD(params, 0.1, momentum=0.9, set_grad_none=False)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    ours.step()
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = FusedSGD(copies, 0.1, momentum=0.9)
    resumed.load_state_dict(copy.deepcopy(ours.state_dict()))
    for p, c in zip(params, copies, strict=True):
        c.grad = p.grad.clone()
    ours.step()
    resumed.step()
    for p, c in zip(params, copies, strict=True):
        assert_bits(c, p)
        assert ours.state[p]["momentum_buffer"].dtype is torch.float32
    ours.zero_grad()
    assert all(p.grad is not None and not p.grad.any() for p in params)


def test_sgd_with_a_learning_rate_for_each_group(device):
    weights = [torch.nn.Parameter(torch.zeros(70, device=device)) for _ in range(2)]
    groups = [{"params": [w], "lr": lr} for w, lr in zip(weights, (0.5, 0.25), strict=True)]
    optimizer = FusedSGD(groups)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    for weight, lr in zip(weights, (0.5, 0.25), strict=True):
        assert (weight == -lr).all()
