# SPDX-License-Identifier: Apache-2.0
"""Weights that put themselves together (`DistributedWeight`): what is called, and who refuses."""

import pytest
import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed_weight as dw


class Half(torch.nn.Parameter):
    """The upper half of a weight; a group makes the whole ones and takes their gradients."""

    def __new__(cls, whole, group):
        made = super().__new__(cls, whole[: len(whole) // 2].clone())
        made.whole, made.group = whole, group
        group.append(made)
        return made

    def grad_buffer(self):
        return None

    def materialize_group_for_forward(self):
        return [each.whole for each in self.group]

    def materialize_group_for_backward(self):
        return [2.0 * each.whole for each in self.group]

    def finalize_group_grads(self, wgrads):
        return [None if grad is None else grad[: len(grad) // 2] for grad in wgrads]


@pytest.fixture
def wholes():
    return [torch.randn(8, 4), torch.randn(6, 4)]


@pytest.fixture
def parts(wholes):
    group = []
    return [Half(whole, group) for whole in wholes]


def test_a_group_makes_whole_weights(wholes, parts):
    assert all(map(dw.is_distributed_weight, parts))
    for made, whole in zip(dw.materialize_weight_for_forward(parts), wholes, strict=True):
        assert torch.equal(made, whole)
    for made, whole in zip(dw.materialize_weight_for_backward(parts), wholes, strict=True):
        assert torch.equal(made, 2.0 * whole)


def test_a_group_takes_gradients(wholes, parts):
    grads = [torch.randn_like(wholes[0]), None]
    found = dw.finalize_weight_grads(parts, grads)
    assert torch.equal(found[0], grads[0][:4]) and found[1] is None


def test_plain_weights_pass(wholes):
    assert not any(map(dw.is_distributed_weight, wholes))
    for function in (dw.materialize_weight_for_forward, dw.materialize_weight_for_backward):
        assert all(made is whole for made, whole in zip(function(wholes), wholes, strict=True))
    found = dw.finalize_weight_grads(wholes, wholes)
    assert all(made is given for made, given in zip(found, wholes, strict=True))


def test_mistakes(wholes, parts):
    with pytest.raises(TypeError, match="all of a layer are distributed, or none"):
        dw.materialize_weight_for_forward([parts[0], wholes[1]])
    with pytest.raises(ValueError, match="returned 2 tensors for 1 weights"):
        dw.materialize_weight_for_forward(parts[:1])


@pytest.mark.parametrize("name", ["weight", "fc2_weight"])
def test_modules_refuse_them(name):
    """They would read the part as if it were the weight."""
    make = te.Linear if name == "weight" else te.LayerNormMLP
    module = make(4, 8, device="cpu")
    with pytest.raises(NotImplementedError, match=rf"{name}: a DistributedWeight \(Half\)"):
        setattr(module, name, Half(torch.randn_like(module.get_parameter(name)), []))
    module(torch.randn(2, 4))
