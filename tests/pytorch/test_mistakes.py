# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users make: each gets an error that names the argument, the value and what to do.

The words of a case are these three, in this order. test_what_works.py has what looks like a mistake
in a program for `torch.nn` and does what its author meant.
"""

from functools import partial

import numpy as np
import pytest
import torch
from pytorch.small_calls import fp8, linear, x

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.utils import deinterleave_glu_tensor

DELAYED, CURRENT = recipes.DelayedScaling, recipes.Float8CurrentScaling


def attention(device, shape=(8, 2, 4, 16), **options):
    q, k, v = (x(device, *shape) for _ in range(3))
    return te.DotProductAttention(4, 16)(q, k, v, **options)


def layer(device, **options):
    return te.TransformerLayer(32, 64, 4, device=device, **options)


def changed_in_place(device):
    module = linear(device)
    out = module(x(device, requires_grad=True))
    with torch.no_grad():
        module.weight.add_(1.0)
    out.sum().backward()


def input_changed_in_place(device):
    inp = x(device, requires_grad=True)
    hidden = inp * 1.0
    out = linear(device)(hidden)
    hidden.zero_()
    out.sum().backward()


def backward_twice(device):
    out = linear(device)(x(device))
    out.sum().backward()
    out.sum().backward()


def second_derivative(device):
    inp = x(device, requires_grad=True)
    (grad,) = torch.autograd.grad(linear(device)(inp).sum(), inp, create_graph=True)
    grad.sum().backward()


def enter_twice(device):
    region = te.autocast()
    with region, region:
        pass


def set_to_none(device, module, name):
    setattr(module, name, None)
    module(x(device))


def load(device, state):
    linear(device).load_state_dict(state)


def damaged_state(device):
    module = linear(device)
    fp8(device, module, x(device))
    state = module.state_dict()
    state["_extra_state"][60] ^= 1
    module.load_state_dict(state)


def other_module_in_recompute(device):
    first, second, calls = linear(device), linear(device), []

    def function(inp):
        calls.append(1)
        return first(inp) if len(calls) == 1 else second(inp)

    with te.autocast():
        out = te.checkpoint(function, x(device, requires_grad=True))
    out.sum().backward()


def without_main_grad(device):
    te.Linear(32, 32, device=device, fuse_wgrad_accumulation=True)(x(device)).sum().backward()


# name: (what is done on a device, exception, words of its text)
MISTAKES = {
    # ---- construction ----
    "a negative size": (lambda d: te.Linear(32, -1), ValueError, "out_features|-1|positive int"),
    "a size that is a float": (lambda d: te.Linear(32.0, 8), ValueError, "in_features|32.0|int"),
    "sizes in a tuple": (lambda d: te.Linear((32, 8), 8), ValueError, "in_features|(32, 8)|int"),
    "FP8 parameters": (
        lambda d: te.Linear(32, 8, dtype=torch.float8_e4m3fn),
        TypeError,
        "params_dtype|float8_e4m3fn|te.autocast",
    ),
    "integer parameters": (
        lambda d: te.LayerNormLinear(32, 8, params_dtype=torch.int8),
        TypeError,
        "params_dtype|torch.int8|torch.bfloat16",
    ),
    "a dtype by its name": (
        lambda d: te.LayerNormMLP(32, 8, params_dtype="bfloat16"),
        TypeError,
        "params_dtype|'bfloat16'|torch.bfloat16",
    ),
    "two dtypes": (
        lambda d: te.Linear(32, 8, dtype=torch.float16, params_dtype=torch.float32),
        ValueError,
        "dtype|torch.float16|differ",
    ),
    "a misspelt keyword": (lambda d: te.Linear(32, 8, biass=False), TypeError, "biass|unexpected"),
    "an unknown activation": (
        lambda d: te.LayerNormMLP(32, 64, activation="mish"),
        NotImplementedError,
        "activation|mish|gelu",
    ),
    "an unknown norm": (
        lambda d: te.LayerNormLinear(32, 8, normalization="BatchNorm"),
        ValueError,
        "normalization|'BatchNorm'|RMSNorm",
    ),
    "eps is NaN": (lambda d: te.LayerNorm(32, eps=float("nan")), ValueError, "eps|nan|1e-5"),
    "eps is a str": (lambda d: te.RMSNorm(32, eps="1e-6"), TypeError, "eps|'1e-6'|number"),
    "LayerNorm(eps=None)": (lambda d: te.LayerNorm(32, eps=None), TypeError, "eps|None|1e-5"),
    "RMSNorm with a bias": (
        lambda d: te.RMSNorm(32, bias=True),
        TypeError,
        "bias|True|te.LayerNorm",
    ),
    "a norm of nothing": (lambda d: te.LayerNorm(()), ValueError, "normalized_shape|()|positive"),
    "both names of the shape": (
        lambda d: te.LayerNorm(32, hidden_size=64),
        RuntimeError,
        "hidden_size|64|exactly one",
    ),
    "heads that do not divide": (
        lambda d: te.TransformerLayer(30, 64, 4),
        ValueError,
        "hidden_size|30|num_attention_heads",
    ),
    "groups that do not divide": (
        lambda d: te.MultiheadAttention(32, 4, num_gqa_groups=3),
        ValueError,
        "num_gqa_groups|3|divi",
    ),
    "dropout in percent": (
        lambda d: te.TransformerLayer(32, 64, 4, hidden_dropout=10),
        ValueError,
        "hidden_dropout|10|from 0 to 1",
    ),
    "dropout as a str": (
        lambda d: te.DotProductAttention(4, 16, attention_dropout="0.1"),
        TypeError,
        "attention_dropout|'0.1'|number",
    ),
    "a learning rate as a str": (
        lambda d: te.optimizers.FusedAdam(linear(d).parameters(), lr="1e-3"),
        TypeError,
        "lr|'1e-3'|number",
    ),
    "a momentum as a str": (
        lambda d: te.optimizers.FusedSGD(linear(d).parameters(), lr=0.1, momentum="0.9"),
        TypeError,
        "momentum|'0.9'|number",
    ),
    "an unknown mask type": (
        lambda d: te.DotProductAttention(4, 16, attn_mask_type="caussal"),
        ValueError,
        "attn_mask_type|'caussal'|causal",
    ),
    "an unknown layout": (
        lambda d: te.DotProductAttention(4, 16, qkv_format="bhsd"),
        ValueError,
        "qkv_format|'bhsd'|bshd",
    ),
    "an unknown kind of layer": (
        lambda d: te.TransformerLayer(32, 64, 4, layer_type="both"),
        ValueError,
        "layer_type|'both'|decoder",
    ),
    "a group that is a number": (
        lambda d: te.DotProductAttention(4, 16, cp_group=3),
        TypeError,
        "cp_group|3|new_group",
    ),
    "an unknown reduction": (
        lambda d: te.LayerNormMLP(32, 64, symmetric_ar_type="junk"),
        ValueError,
        "symmetric_ar_type|'junk'|'two_shot'",
    ),
    "two ranks without a group": (
        lambda d: te.Linear(32, 8, tp_size=2, parallel_mode="column", device=d)(x(d)),
        RuntimeError,
        "tp_size=2|no tp_group|set_tensor_parallel_group",
    ),
    "a dot in the name of a part": (
        lambda d: te.Linear(32, 8, parameters_split=("q.proj", "k")),
        ValueError,
        "parameters_split|'q.proj'|underscores",
    ),
    "parts that do not add up": (
        lambda d: te.Linear(32, 8, parameters_split={"q": 4, "k": 2}),
        ValueError,
        "parameters_split|{'q': 4, 'k': 2}|add up to 8",
    ),
    "an odd rotary dim": (
        lambda d: te.RotaryPositionEmbedding(7),
        ValueError,
        "dim|7|even",
    ),
    # ---- regions and recipes ----
    "a recipe as `enabled`": (
        lambda d: te.autocast(CURRENT()),
        TypeError,
        "enabled|Float8|recipe=",
    ),
    "the class of a recipe": (
        lambda d: te.autocast(recipe=DELAYED),
        TypeError,
        "recipe|DelayedScaling|DelayedScaling()",
    ),
    "a recipe by its name": (
        lambda d: te.autocast(recipe="delayed"),
        TypeError,
        "recipe|'delayed'|DelayedScaling()",
    ),
    "a format as a recipe": (
        lambda d: te.fp8_autocast(fp8_recipe=recipes.Format.HYBRID),
        TypeError,
        "recipe|Format|DelayedScaling()",
    ),
    "the base of recipes": (
        lambda d: te.autocast(recipe=recipes.Recipe()),
        TypeError,
        "recipe|Recipe|DelayedScaling()",
    ),
    "both names of the recipe": (
        lambda d: te.autocast(recipe=DELAYED(), fp8_recipe=CURRENT()),
        TypeError,
        "fp8_recipe|recipe|give one",
    ),
    "a decorator without parentheses": (
        lambda d: te.autocast(lambda inp: inp),
        TypeError,
        "enabled|lambda|@autocast()",
    ),
    "a region that is entered twice": (
        enter_twice,
        RuntimeError,
        "autocast|active already|another",
    ),
    "a region that was never entered": (
        lambda d: te.autocast().__exit__(None, None, None),
        RuntimeError,
        "autocast|not active|with block",
    ),
    "a misspelt field": (
        lambda d: DELAYED(amax_histroy_len=3),
        TypeError,
        "amax_histroy_len|3|amax_history_len",
    ),
    "a rank as the group": (
        lambda d: te.autocast(amax_reduction_group=0),
        TypeError,
        "amax_reduction_group|0|new_group",
    ),
    "a history of no length": (
        lambda d: DELAYED(amax_history_len=0),
        ValueError,
        "amax_history_len|0|1",
    ),
    "an unknown amax algorithm": (
        lambda d: DELAYED(amax_compute_algo="mean"),
        ValueError,
        "amax_compute_algo|'mean'|most_recent",
    ),
    "a format by a wrong name": (
        lambda d: DELAYED(fp8_format="E3M4"),
        (TypeError, ValueError),
        "fp8_format|'E3M4'|HYBRID",
    ),
    # ---- inputs ----
    "a list": (lambda d: linear(d)([1.0] * 32), TypeError, "inp|list|tensor"),
    "a numpy array": (
        lambda d: linear(d)(np.ones((8, 32), np.float32)),
        TypeError,
        "inp|ndarray|tensor",
    ),
    "no input": (lambda d: te.LayerNorm(32, device=d)(None), TypeError, "inp|NoneType|tensor"),
    "token ids": (
        lambda d: linear(d)(torch.zeros(8, 32, dtype=torch.long, device=d)),
        TypeError,
        "inp|torch.int64|convert",
    ),
    "another dtype": (
        lambda d: linear(d)(x(d).bfloat16()),
        TypeError,
        "inp|torch.bfloat16|torch.autocast",
    ),
    "double": (
        lambda d: linear(d).double()(x(d).double()),
        TypeError,
        "inp|torch.float64|torch.bfloat16",
    ),
    "an input of another width": (
        lambda d: linear(d)(x(d, 8, 31)),
        ValueError,
        "inp|(8, 31)|[..., 32]",
    ),
    "a scalar": (lambda d: linear(d)(torch.tensor(1.0)), ValueError, "inp|()|[..., 32]"),
    "a meta tensor": (
        lambda d: linear(d)(torch.empty(8, 32, device="meta")),
        TypeError,
        "inp|meta|has memory",
    ),
    "a sparse tensor": (
        lambda d: linear(d)(x(d).to_sparse()),
        TypeError,
        "input|sparse|dense",
    ),
    "FP8 output": (
        lambda d: fp8(
            d,
            partial(linear(d), fp8_output=True),
            x(d),
            recipe=recipes.CustomRecipe(lambda role: te.MXFP8Quantizer(te.DType.kFloat8E4M3)),
        ),
        NotImplementedError,
        "Linear|fp8_output=True|CustomRecipe|DelayedScaling",
    ),
    "no main_grad": (
        without_main_grad,
        RuntimeError,
        "fuse_wgrad_accumulation|main_grad|assign",
    ),
    "no pending weight gradient": (
        lambda d: linear(d, delay_wgrad_compute=True).backward_dw(),
        RuntimeError,
        "backward_dw|no weight gradient|backward",
    ),
    "heads in the wrong place": (
        lambda d: attention(d, (8, 4, 2, 16)),
        ValueError,
        "query|4|heads",
    ),
    "queries of two dims": (
        lambda d: attention(d, (8, 64)),
        ValueError,
        "query|(8, 64)|4 heads of 16",
    ),
    "a mask of floats": (
        lambda d: attention(
            d, attn_mask_type="arbitrary", attention_mask=torch.zeros(2, 1, 8, 8, device=d)
        ),
        TypeError,
        "attention_mask|float32|bool",
    ),
    "a mask of another shape": (
        lambda d: attention(
            d,
            attn_mask_type="arbitrary",
            attention_mask=torch.zeros(3, 1, 8, 8, dtype=torch.bool, device=d),
        ),
        ValueError,
        "attention_mask|3, 1, 8, 8|2",
    ),
    "packed sequences without lengths": (
        lambda d: attention(d, (16, 4, 16), qkv_format="thd"),
        ValueError,
        "cu_seqlens_q|None|sums of the lengths",
    ),
    "sums of lengths in a list": (
        lambda d: attention(d, attn_mask_type="padding", cu_seqlens_q=[0, 4, 8]),
        TypeError,
        "cu_seqlens_q|[0, 4, 8]|torch.int32 tensor",
    ),
    "sums of packed lengths in a list": (
        lambda d: attention(
            d, (8, 4, 16), qkv_format="thd", attn_mask_type="padding", cu_seqlens_q=[0, 8]
        ),
        TypeError,
        "cu_seqlens_q|[0, 8]|torch.int32 tensor",
    ),
    "no tensor for the layout of flash": (
        lambda d: tex.fa_prepare_fwd([1.0]),
        TypeError,
        "fa_prepare_fwd|qkvi|list",
    ),
    "a scalar for the layout of flash": (
        lambda d: tex.fa_prepare_fwd(torch.tensor(1.0)),
        ValueError,
        "fa_prepare_fwd|()|[s, b, heads, d]",
    ),
    "no tensor for the gradient of an activation": (
        lambda d: tex.dbias_dqgelu(x(d), None, None),
        TypeError,
        "dbias_dqgelu|fwd_input|NoneType",
    ),
    "no tensor of interleaved rows": (
        lambda d: deinterleave_glu_tensor([1.0], 32),
        TypeError,
        "tensor|list|rows",
    ),
    "a window of one number": (
        lambda d: attention(d, window_size=128),
        (TypeError, ValueError),
        "window_size|128|left",
    ),
    "a rotary embedding by its module": (
        lambda d: te.apply_rotary_pos_emb(x(d, 8, 2, 4, 16), te.RotaryPositionEmbedding(16)),
        TypeError,
        "freqs|RotaryPositionEmbedding|tensor",
    ),
    "too few angles": (
        lambda d: te.apply_rotary_pos_emb(
            x(d, 8, 2, 4, 16), te.RotaryPositionEmbedding(16).to(d)(4)
        ),
        ValueError,
        "8 positions|freqs|4",
    ),
    "positions that fp32 has not": (
        lambda d: te.RotaryPositionEmbedding(16)(8, offset=2**70),
        ValueError,
        "offset|1180591620717411303424|2^24",
    ),
    # ---- life of a module ----
    "weight = None": (
        lambda d: set_to_none(d, linear(d), "weight"),
        TypeError,
        "weight|None|assign a parameter",
    ),
    "bias = None": (
        lambda d: set_to_none(d, linear(d), "bias"),
        TypeError,
        "bias|None|bias=False",
    ),
    "a weight that is split": (
        lambda d: setattr(
            linear(d, parameters_split=("q", "k")), "weight", torch.nn.Parameter(x(d, 32, 32))
        ),
        AttributeError,
        "weight|q_weight|assign those",
    ),
    "a weight on the meta device": (
        lambda d: te.Linear(32, 32, device="meta")(x(d)),
        TypeError,
        "weight|meta|reset_parameters",
    ),
    "FP8 on the meta device": (
        lambda d: fp8(d, te.Linear(32, 32, device="meta"), x(d)),
        TypeError,
        "weight|meta|reset_parameters",
    ),
    "a weight changed before the backward": (
        changed_in_place,
        RuntimeError,
        "modified by an inplace operation|version",
    ),
    "an input changed before the backward": (
        input_changed_in_place,
        RuntimeError,
        "modified by an inplace operation|version",
    ),
    "a second backward": (backward_twice, RuntimeError, "second time|retain_graph"),
    "a second derivative": (
        second_derivative,
        NotImplementedError,
        "Linear: a second derivative is not",
    ),
    "another module in the recompute": (
        other_module_in_recompute,
        RuntimeError,
        "recompute|Linear|must do the same",
    ),
    "a state dict of another size": (
        lambda d: load(d, te.Linear(32, 16).state_dict()),
        RuntimeError,
        "weight|[16, 32]|size mismatch",
    ),
    "a state dict of another module": (
        lambda d: load(d, te.LayerNorm(32).state_dict()),
        RuntimeError,
        "weight|size mismatch",
    ),
    "a damaged scaling state": (
        damaged_state,
        ValueError,
        "_extra_state|checksum|undamaged copy",
    ),
    "explain(None)": (lambda d: te.explain(None), TypeError, "module|NoneType|expected a module"),
    "explain of another module": (
        lambda d: te.explain(torch.nn.Linear(32, 8), x(d)),
        TypeError,
        "explain|Linear|no plans",
    ),
    "an unknown stage": (
        lambda d: linear(d).override_stages(gemm=print),
        ValueError,
        "stage|'gemm'|gemm_output",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, device):
    wrong, exception, words = MISTAKES[name]
    with pytest.raises(exception) as caught:
        wrong(device)
    text = str(caught.value)
    missing = [word for word in words.split("|") if word not in text]
    assert not missing, text


def test_there_are_enough():
    assert len(MISTAKES) >= 60
