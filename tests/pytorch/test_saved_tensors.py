# SPDX-License-Identifier: Apache-2.0
"""What `prepare_for_saving` and its kin are given wrongly: name, value, what to do."""

import types

import pytest
import torch

import transformer_engine.pytorch as te


def storage():
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3)
    quantizer.internal = True
    return quantizer(torch.ones(16, 16))


def context(**fields):
    return types.SimpleNamespace(**fields)


@pytest.mark.parametrize("wrong", [5, "x", object(), [torch.ones(1)], 1.5])
def test_what_can_not_be_saved(wrong):
    kind = type(wrong).__name__
    kept = storage()
    with pytest.raises(TypeError, match=f"prepare_for_saving: argument 2: {kind} object, expected"):
        te.prepare_for_saving(torch.ones(1), kept, wrong)
    assert kept.dequantize().sum() == 256  # nothing was taken out


@pytest.mark.parametrize("wrong", [5, "x", object(), torch.ones(1)])
def test_what_was_not_prepared(wrong):
    kind = type(wrong).__name__
    match = rf"restore_from_saved: tensors\[1\]: {kind} object, expected None or a storage"
    with pytest.raises(TypeError, match=match):
        te.restore_from_saved([None, wrong], [torch.ones(1)])
    with pytest.raises(TypeError, match=f"restore_from_saved: tensors: {kind} object, expected a"):
        te.restore_from_saved(wrong, [])
    with pytest.raises(TypeError, match=f"restore_from_saved: saved_tensors: {kind} object"):
        te.restore_from_saved([None], wrong)


def test_too_few_tensors():
    with pytest.raises(ValueError, match=r"restore_from_saved: tensors\[1\] has no saved tensor"):
        te.restore_from_saved([None, None], [torch.ones(1)])
    saved, objects = te.prepare_for_saving(storage())
    with pytest.raises(ValueError, match="Storage.restore_from_saved: 1 tensors, expected"):
        te.restore_from_saved(objects, saved[:1])
    assert te.restore_from_saved(objects, saved)[0].dequantize().sum() == 256


@pytest.mark.parametrize("ctx", [object(), None, 5, context(saved_tensors=())])
def test_no_context(ctx):
    match = f"restore_from_func_ctx: ctx: {type(ctx).__name__} object without tensor_objects; give"
    with pytest.raises(TypeError, match=match):
        te.restore_from_func_ctx(ctx)


def test_contexts_that_lack_something():
    with pytest.raises(TypeError, match="ctx: SimpleNamespace object without saved_tensors"):
        te.restore_from_func_ctx(context(tensor_objects=[None]))
    with pytest.raises(TypeError, match="restore_from_func_ctx: tensors: int object"):
        te.restore_from_func_ctx(context(tensor_objects=5, saved_tensors=()))
    with pytest.raises(ValueError, match=r"restore_from_func_ctx: tensors\[0\] has no saved"):
        te.restore_from_func_ctx(context(tensor_objects=[None], saved_tensors=()))


def test_a_second_restoring():
    saved, objects = te.prepare_for_saving(storage(), torch.ones(2))
    ctx = context(tensor_objects=objects, saved_tensors=tuple(saved))
    cast, plain = te.restore_from_func_ctx(ctx)
    assert cast.dequantize().sum() == 256 and plain.sum() == 2
    with pytest.raises(RuntimeError, match="ctx.tensor_objects is None: the backward has restored"):
        te.restore_from_func_ctx(ctx)
