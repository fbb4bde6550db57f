# SPDX-License-Identifier: Apache-2.0
"""A TransformerLayer in FP8 from its parts: what each was given, made and handed back.

Each linear part, alone with the tensors that it met in the layer, gives the layer's bits; the tests
of the parts compare these with float64 over the dequantized operands of every GEMM. The attention
between them is compared with float64 here, and the residual sums bit by bit.
"""

import pickle

import pytest
import torch
from comparators import assert_grad64, assert_nmse
from pytorch import attention_model
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of
from tols import BF16, F32, tol

import transformer_engine.pytorch as te

HIDDEN, FFN, HEADS, LENGTH, SOURCE, BATCH = 32, 64, 4, 6, 9, 2
SELF = {"mixed": ("self_attention.layernorm_qkv",), "label": "self_attention", "keys": LENGTH}
CROSS = {
    "mixed": ("inter_attention.layernorm_query", "inter_attention.key_value"),
    "label": "inter_attention",
    "keys": SOURCE,
}


class Seen:
    """What one part met in a step: inputs, output and their gradients."""

    def __init__(self, module):
        self.module = module
        self.is_linear = not isinstance(module, te.DotProductAttention)
        self.inputs = self.out = self.grad = None
        self.grads = []

    def enter(self, module, args, kwargs):
        """Before the call: inputs become views, whose gradients are those of this call alone."""
        count = 1 if self.is_linear else 3
        self.inputs = [t.view_as(t) for t in args[:count]]
        self.grads = [None] * count
        for at, tensor in enumerate(self.inputs):
            tensor.register_hook(lambda grad, at=at: self.grads.__setitem__(at, grad.clone()))
        return (*self.inputs, *args[count:]), kwargs

    def leave(self, module, args, out):
        """After the call."""
        self.out = out.detach().clone()
        out.register_hook(lambda grad: setattr(self, "grad", grad.clone()))


def watched(layer):
    """Hooks on the parts of a layer: (what they see by name, handles)."""
    kinds = (te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.DotProductAttention)
    seen = {name: Seen(m) for name, m in layer.named_modules() if isinstance(m, kinds)}
    handles = []
    for part in seen.values():
        handles.append(part.module.register_forward_pre_hook(part.enter, with_kwargs=True))
        handles.append(part.module.register_forward_hook(part.leave))
    return seen, handles


def check_alone(part, module, state, recipe):
    """A copy of a linear part from before the step repeats what the part did."""
    module.zero_grad()
    x = part.inputs[0].detach().clone().requires_grad_()
    with counted() as gemms, te.autocast(recipe=recipe):
        out = module(x)
    out.backward(part.grad)
    assert gemms.other == 0 and gemms.fp8 > 0
    assert_same_bits([out.detach(), x.grad], [part.out, part.grads[0]])
    grads = [{n: p.grad for n, p in m.named_parameters()} for m in (module, part.module)]
    assert_same_bits(*grads)
    assert_same_bits(state_of(module), state)


def check_attention(seen, dtype, mixed, label, keys):
    """Projections to heads bit by bit, the attention against float64."""
    core = seen[f"{label}.core_attention"]
    made = torch.cat([seen[name].out for name in mixed], -1) if keys == LENGTH else None
    joined = [t.detach().flatten(2) for t in core.inputs]
    grads = [grad.flatten(2) for grad in core.grads]
    if made is not None:
        assert_same_bits(torch.cat(joined, -1), made)
        assert_same_bits(torch.cat(grads, -1), seen[mixed[0]].grad)
    else:
        assert_same_bits(joined[0], seen[mixed[0]].out)
        assert_same_bits(torch.cat(joined[1:], -1), seen[mixed[1]].out)
        assert_same_bits(grads[0], seen[mixed[0]].grad)
        assert_same_bits(torch.cat(grads[1:], -1), seen[mixed[1]].grad)
    window = (-1, 0) if keys == LENGTH else (-1, -1)
    may = attention_model.may_attend((BATCH, HEADS, LENGTH, keys), window=window)

    def exact(**qkv):
        heads = (attention_model.to_bhsd(t, "sbhd") for t in qkv.values())
        return attention_model.joined(attention_model.attention(*heads, may), "sbhd")

    named = dict(zip("qkv", core.inputs, strict=True))
    wide = {name: t.detach().cpu().double() for name, t in named.items()}
    bound = tol("attention", dtype, keys)
    assert_nmse(core.out, exact(**wide), bound)
    by_name = dict(zip("qkv", core.grads, strict=True))
    grad = core.grad.detach().cpu().double().view(*wide["q"].shape[:3], -1)
    *heads, grad = (attention_model.to_bhsd(t, "sbhd") for t in (*wide.values(), grad))
    gain = attention_model.cancellation(*heads, may, grad)
    assert_grad64({"v": by_name.pop("v")}, exact, named, core.grad, bound)
    assert_grad64(by_name, exact, named, core.grad, bound * gain)
    proj = seen[f"{label}.proj"]
    assert_same_bits([proj.inputs[0].detach(), proj.grads[0]], [core.out, core.grad])


def check_residual_sums(branches, ends, grads):
    """The stream between the branches, and its gradient, bit by bit.

    branches: (part that takes the stream, part whose output is added to it); ends: input and output
    of the layer; grads: their gradients.
    """
    stream = ends[0]
    for enters, leaves in branches:
        assert_same_bits(enters.inputs[0].detach(), stream)
        stream = stream + leaves.out
    assert_same_bits(stream, ends[1])
    after = grads[1]
    for enters, leaves in reversed(branches):
        assert_same_bits(leaves.grad, after)
        after = after + enters.grads[0]
    assert_same_bits(after, grads[0])


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_layer_is_its_parts(device, kind, recipe, dtype):
    made = RECIPES[recipe]()
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "layer_type": kind}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, params_dtype=dtype, device=device, **options)
    attention_model.randomise(layer)
    source = torch.randn(SOURCE, BATCH, HIDDEN).to(device, dtype).requires_grad_()
    arguments = {"encoder_output": source} if kind == "decoder" else {}
    x = torch.randn(LENGTH, BATCH, HIDDEN).to(device, dtype).requires_grad_()
    with te.autocast(recipe=made):  # so that delayed scaling has scales other than 1
        layer(x, **arguments).float().square().sum().backward()
    layer.zero_grad()
    x.grad = source.grad = None
    before = pickle.dumps(layer)
    seen, handles = watched(layer)
    with te.autocast(recipe=made):
        out = layer(x, **arguments)
    grad = torch.randn(out.shape).to(out)
    out.backward(grad)
    for handle in handles:
        handle.remove()
    states = {name: state_of(part.module) for name, part in seen.items() if part.is_linear}
    branches = [("self_attention.layernorm_qkv", "self_attention.proj")]
    check_attention(seen, dtype, **SELF)
    if kind == "decoder":
        branches.append(("inter_attention.layernorm_query", "inter_attention.proj"))
        check_attention(seen, dtype, **CROSS)
        assert_same_bits(seen["inter_attention.key_value"].grads[0], source.grad)
    branches.append(("layernorm_mlp", "layernorm_mlp"))
    branches = [(seen[enters], seen[leaves]) for enters, leaves in branches]
    check_residual_sums(branches, (x.detach(), out.detach()), (x.grad, grad))
    for name, state in states.items():  # a step of one moves the state of all: a new copy for each
        alone = dict(pickle.loads(before).named_modules())[name]
        check_alone(seen[name], alone, state, made)
