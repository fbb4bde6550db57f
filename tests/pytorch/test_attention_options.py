# SPDX-License-Identifier: Apache-2.0
"""One options object from a layer to its attention; submodules that must be called as modules."""

import copy
import inspect

import pytest
import torch
from device_kinds import every_device
from pytorch import attention_model
from pytorch.helpers import RECIPES, assert_same_bits
from tols import BF16

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.problem import AttentionOptions
from transformer_engine.pytorch.torchside.modes import only_forwards

pytestmark = every_device

HIDDEN, FFN, HEADS, LENGTH, BATCH = 32, 64, 4, 6, 2


def make(device, **options):
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16, **options}
    layer = te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, **given)
    attention_model.randomise(layer)
    return layer


def states(device):
    return torch.randn(LENGTH, BATCH, HIDDEN).to(device, BF16).requires_grad_()


def padding(device):
    mask = torch.zeros(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    mask[0, ..., -int(torch.randint(1, LENGTH - 1, ())) :] = True
    return mask.to(device)


def bias(device):
    return torch.randn(1, HEADS, LENGTH, LENGTH).to(device, BF16).requires_grad_()


def angles(device):
    return te.RotaryPositionEmbedding(HIDDEN // HEADS)(LENGTH).to(device)


def lengths(device):
    return torch.tensor([0, LENGTH - 2, 2 * LENGTH - 2], dtype=torch.int32, device=device)


OPTIONS = {
    "none": lambda d: {},
    "is_first_microbatch": lambda d: {"is_first_microbatch": True},
    "self_attn_mask_type": lambda d: {"self_attn_mask_type": "no_mask"},
    "attention_mask": lambda d: {"attention_mask": padding(d), "self_attn_mask_type": "padding"},
    "arbitrary": lambda d: {
        "attention_mask": torch.rand(BATCH, 1, LENGTH, LENGTH, device=d) < 0.5,  # not a tolerance
        "self_attn_mask_type": "arbitrary",
    },
    "window_size": lambda d: {"window_size": (2, 0)},
    "bottom_right_diagonal": lambda d: {
        "self_attn_mask_type": "no_mask", "window_size": (1, 2), "bottom_right_diagonal": False
    },
    "softcap": lambda d: {"softcap": 0.5},
    "checkpoint_core_attention": lambda d: {"checkpoint_core_attention": True},
    "rotary_pos_emb": lambda d: {"rotary_pos_emb": angles(d)},
    "core_attention_bias": lambda d: {
        "core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias(d)
    },
    "alibi_slopes": lambda d: {
        "core_attention_bias_type": "alibi", "alibi_slopes": torch.rand(HEADS, device=d)
    },
    "cu_seqlens": lambda d: {
        "self_attn_mask_type": "padding_causal",
        "cu_seqlens_q": lengths(d),
        "cu_seqlens_kv": lengths(d),
    },
    "ignored": lambda d: {
        "cu_seqlens_q_padded": lengths(d), "cu_seqlens_kv_padded": lengths(d),
        "max_seqlen_q": LENGTH, "max_seqlen_kv": LENGTH, "fast_zero_fill": False,
        "pad_between_seqs": False,
    },
}  # fmt: skip
DECODER = {
    "decoder": lambda d: {},
    "enc_dec_attn_mask": lambda d: {
        "enc_dec_attn_mask": (padding(d), padding(d)), "enc_dec_attn_mask_type": "padding"
    },
    "enc_dec_window_size": lambda d: {
        "enc_dec_window_size": (2, 1), "enc_dec_bottom_right_diagonal": False
    },
}  # fmt: skip


def outcome(layer, x, options, recipe=None):
    """Output and all gradients of a call."""
    te.reset()
    layer.zero_grad()
    inputs = [x, *(t for t in options.values() if isinstance(t, torch.Tensor) and t.requires_grad)]
    with te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]()):
        out = layer(x, **options)
    return [out, *torch.autograd.grad(out.float().square().sum(), [*inputs, *layer.parameters()])]


def attentions(layer):
    kinds = (te.MultiheadAttention, te.DotProductAttention)
    return [m for m in layer.modules() if isinstance(m, kinds)]


@pytest.mark.parametrize("recipe", [None, "delayed"])
@pytest.mark.parametrize("name", [*OPTIONS, *DECODER])
def test_called_as_modules_they_give_the_same_bits(device, name, recipe):
    kind = "decoder" if name in DECODER else "encoder"
    layer = make(device, layer_type=kind)
    x = states(device)
    options = {**OPTIONS, **DECODER}[name](device)
    if kind == "decoder":
        options["encoder_output"] = states(device)
    hooked = copy.deepcopy(layer)
    calls = []
    for module in attentions(hooked):
        module.register_forward_hook(lambda module, *_: calls.append(type(module)))
    expected = outcome(layer, x, options, recipe)
    assert all(only_forwards(module) for module in attentions(layer))
    assert_same_bits(outcome(hooked, x, options, recipe), expected)
    each = [te.DotProductAttention, te.MultiheadAttention]
    assert calls == (each if kind == "encoder" else each * 2)


# ---- what asks for a call ------------------------------------------------------------------------


def arguments_of(function, arguments):
    """By name, without those that have their defaults."""
    bound = inspect.signature(function).bind(*arguments)
    return {
        name: value
        for name, value in bound.arguments.items()
        if value is not inspect.signature(function).parameters[name].default
    }


def test_hooks_see_the_documented_arguments(device):
    layer = make(device, layer_type="decoder")
    mask = padding(device)
    seen = {}
    for name in ("self_attention", "inter_attention"):
        attention = getattr(layer, name)
        for module in (attention, attention.core_attention):
            label = f"{name}.{type(module).__name__}"
            module.register_forward_pre_hook(
                lambda module, args, label=label: seen.update(
                    {label: arguments_of(type(module).forward, (module, *args))}
                )
            )
    source = states(device)
    options = {"window_size": (3, 0), "enc_dec_attn_mask": (mask, mask)}
    layer(
        states(device),
        encoder_output=source,
        enc_dec_attn_mask_type="padding",
        checkpoint_core_attention=True,
        cu_seqlens_q_padded=lengths(device),
        max_seqlen_q=LENGTH,
        fast_zero_fill=False,
        **options,
    )
    own = {"window_size", "checkpoint_core_attention", "cu_seqlens_q_padded", "max_seqlen_q"}
    layers = {"self", "query_layer", "key_layer", "value_layer", "fast_zero_fill"}
    assert set(seen["self_attention.DotProductAttention"]) == own | layers
    own |= {"self", "hidden_states", "fast_zero_fill"}
    assert set(seen["self_attention.MultiheadAttention"]) == own
    crossed = {"attention_mask", "attn_mask_type", "checkpoint_core_attention", "fast_zero_fill"}
    crossed |= {"cu_seqlens_q_padded", "max_seqlen_q"}  # it has the same queries
    found = seen["inter_attention.MultiheadAttention"]
    assert set(found) == crossed | {"self", "hidden_states", "encoder_output"}
    assert found["encoder_output"] is source and found["attention_mask"] == (mask, mask)
    found = seen["inter_attention.DotProductAttention"]
    assert set(found) == crossed | layers
    assert found["attn_mask_type"] == "padding" and found["attention_mask"] == (mask, mask)


class _Loud(te.MultiheadAttention):
    def forward(self, hidden_states, attention_mask=None, *others):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(hidden_states, attention_mask, *others)


class _LoudCore(te.DotProductAttention):
    def forward(self, query_layer, key_layer, value_layer, *others):
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(query_layer, key_layer, value_layer, *others)


class _Wrapper(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, *args):
        self.calls += 1
        return self.inner(*args)


def _subclass(layer):
    layer.self_attention.__class__ = _Loud
    layer.self_attention.core_attention.__class__ = _LoudCore
    return layer.self_attention, layer.self_attention.core_attention


def _wrap(layer):
    layer.self_attention.core_attention = _Wrapper(layer.self_attention.core_attention)
    layer.self_attention = _Wrapper(layer.self_attention)
    return layer.self_attention, layer.self_attention.inner.core_attention


def _replace(layer):
    """As accelerate puts its hooks around a forward."""
    found = attentions(layer)
    for module in found:
        module.calls = 0

        def forward(*args, module=module, inner=module.forward):
            module.calls += 1
            return inner(*args)

        module.forward = forward
    return found


@pytest.mark.parametrize("change", [_subclass, _wrap, _replace])
def test_other_forwards_are_called(device, change):
    layer = make(device)
    x, options = states(device), {"window_size": (2, 0)}
    expected = outcome(layer, x, options)
    changed = change(layer)
    assert_same_bits(outcome(layer, x, options), expected)
    assert [module.calls for module in changed] == [1, 1]


@pytest.mark.parametrize("kind", [te.MultiheadAttention, te.DotProductAttention])
def test_a_forward_put_in_place_of_the_classs_is_called(device, kind, monkeypatch):
    layer = make(device)
    x, calls, original = states(device), [], kind.forward
    expected = outcome(layer, x, {})

    def forward(self, *args):
        calls.append(self)
        return original(self, *args)

    monkeypatch.setattr(kind, "forward", forward)
    assert_same_bits(outcome(layer, x, {}), expected)
    assert [type(module) for module in calls] == [kind]


def test_what_asks_for_a_call(device):
    module = te.DotProductAttention(HEADS, HIDDEN // HEADS)
    assert only_forwards(module)
    assert not only_forwards(torch.nn.Linear(2, 2, device=device))
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
        torch.nn.modules.module.register_module_forward_hook,
        torch.nn.modules.module.register_module_forward_pre_hook,
        torch.nn.modules.module.register_module_full_backward_hook,
    ):
        handle = register(lambda *_: None)
        assert not only_forwards(module)
        handle.remove()
        assert only_forwards(module)
    module.compile(backend="eager")
    assert not only_forwards(module)


# ---- the object ----------------------------------------------------------------------------------


def test_the_fields_are_the_arguments_of_the_forward():
    """Names, order and defaults."""
    parameters = list(inspect.signature(te.MultiheadAttention.forward).parameters.values())[2:]
    assert AttentionOptions._fields == tuple(p.name for p in parameters)
    assert AttentionOptions._field_defaults == {p.name: p.default for p in parameters}


def test_the_core_gets_each_argument_in_its_place():
    options = AttentionOptions(*AttentionOptions._fields)
    parameters = list(inspect.signature(te.DotProductAttention.forward).parameters)[4:]
    given = dict(zip(parameters, options.for_core(), strict=False))
    assert given.pop("qkv_format") is None
    given |= options.named_for_core()
    assert AttentionOptions().named_for_core() == {}
    assert all(name == value for name, value in given.items())
    projections = {"encoder_output", "is_first_microbatch", "rotary_pos_emb"}
    assert set(given) == set(AttentionOptions._fields) - projections
    defaults = AttentionOptions().for_core()
    signature = inspect.signature(te.DotProductAttention.forward).parameters
    assert defaults == tuple(signature[name].default for name in parameters[: len(defaults)])
