# SPDX-License-Identifier: Apache-2.0
"""Mistaken arguments of every module and helper that takes such: words, functions, tensors."""

import inspect

import pytest
import torch
from pytorch.small_calls import x

import transformer_engine.pytorch as te

KINDS = (
    (te.Linear, (32, 32)),
    (te.LayerNormLinear, (32, 32)),
    (te.LayerNormMLP, (32, 64)),
    (te.LayerNorm, (32,)),
    (te.RMSNorm, (32,)),
    (te.DotProductAttention, (2, 16)),
    (te.MultiheadAttention, (32, 2)),
    (te.TransformerLayer, (32, 64, 2)),
)
FREE = {"name", "ub_name", "rng_tracker_name", "device"}  # any word is one, or torch reads it


def words_of(function):
    """Arguments of a function that choose by a word."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is not p.empty and "str" in str(p.annotation)}


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=lambda given: getattr(given, "__name__", ""))
def test_words_that_choose_nothing(kind, sizes, device):
    """Each argument that chooses by a word takes no other, whatever else is given or kept."""
    for name in words_of(kind.__init__) - FREE:
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=f"{name}.*'junk'"):
            kind(*sizes, **{name: "junk"})
    module = kind(*sizes).to(device)
    shapes = [(4, 2, 2, 16)] * 3 if kind is te.DotProductAttention else [(4, 2, 32)]
    tensors = [x(device, *shape) for shape in shapes]
    for name in words_of(kind.forward):
        for _ in range(3):  # the calls in between are kept
            with pytest.raises(ValueError, match=f"{name}.*'junk'"):
                module(*tensors, **{name: "junk"})
            module(*tensors)


@pytest.mark.parametrize(("kind", "sizes"), KINDS, ids=lambda given: getattr(given, "__name__", ""))
def test_functions_that_can_not_be_called(kind, sizes):
    for p in inspect.signature(kind.__init__).parameters.values():
        if "Callable" in str(p.annotation):
            for value in ("normal", 0.02, [torch.nn.init.zeros_]):
                with pytest.raises(TypeError, match=f"{p.name}=.*, expected a function or None"):
                    kind(*sizes, **{p.name: value})
        if p.name == "layer_number":
            for value in ("1", [1], 1.5, 0):
                with pytest.raises(ValueError, match="layer_number=.*: an int that counts from 1"):
                    kind(*sizes, layer_number=value)


@pytest.mark.parametrize(("kind", "sizes"), KINDS[-3:], ids=lambda g: getattr(g, "__name__", ""))
@pytest.mark.parametrize("name", ["alibi_slopes", "core_attention_bias"])
def test_what_is_no_tensor_of_numbers(kind, sizes, name, device):
    module = kind(*sizes).to(device)
    shapes = [(4, 2, 2, 16)] * 3 if kind is te.DotProductAttention else [(4, 2, 32)]
    tensors = [x(device, *shape) for shape in shapes]
    options = {"core_attention_bias_type": "alibi" if "slopes" in name else "post_scale_bias"}
    shape = (2,) if "slopes" in name else (1, 2, 4, 4)
    complex_ones, marks = (torch.ones(shape, device=device, dtype=d) for d in (torch.cfloat, bool))
    for given in ([0.5, 0.25], "0.5", 0.5, complex_ones, marks):
        with pytest.raises(TypeError, match=f"DotProductAttention: {name}.*, expected"):
            module(*tensors, **options, **{name: given})


def test_what_is_no_tensor_in_helpers(device):
    ones = torch.ones(4, 4, device=device)
    scale, amax = torch.ones(1, device=device), torch.zeros(1, device=device)
    quantizer = te.Float8Quantizer(scale, amax, te.DType.kFloat8E4M3)
    for name, call in {
        "softcap: inp": lambda x: te.attention.softcap(x, 1.0),
        "parallel_cross_entropy: inp": lambda x: te.parallel_cross_entropy(x, ones),
        "parallel_cross_entropy: target": lambda x: te.parallel_cross_entropy(ones, x),
        "replace_raw_data: new_raw_data": lambda x: te.tensor.utils.replace_raw_data(
            quantizer(ones), x
        ),
        "gather_along_first_dim: inp": lambda x: te.distributed.gather_along_first_dim(x, None),
        "gather_along_first_dim: output_tensor": lambda x: te.distributed.gather_along_first_dim(
            ones, None, output_tensor=x
        ),
        "reduce_scatter_along_first_dim: output": (
            lambda x: te.distributed.reduce_scatter_along_first_dim(ones, None, output=x)
        ),
        "allreduce: inp": lambda x: te.distributed.allreduce(x),
    }.items():
        for given in ([1.0], "x", 2.0):
            with pytest.raises(TypeError, match=f"{name}: .*, expected a tensor"):
                call(given)


def test_angles_that_are_no_pair(device):
    angles = te.RotaryPositionEmbedding(16).to(device)(4)
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"rotary_pos_emb: {count}, expected one or a pair"):
            te.MultiheadAttention(32, 2).to(device)(
                x(device, 4, 2, 32), rotary_pos_emb=[angles] * count
            )
