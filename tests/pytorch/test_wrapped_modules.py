# SPDX-License-Identifier: Apache-2.0
"""Layers whose linear modules another package has wrapped, as adapters do."""

import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits
from tols import tol
from torch import nn

import transformer_engine.pytorch as te


class Adapter(nn.Module):
    """Compute with what the wrapped module returns, which has to be a tensor."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x, *args):
        return self.base(x, *args) * 1.0


def make(device, drop, **options):
    layer = te.TransformerLayer(
        32, 64, 4, hidden_dropout=drop, attention_dropout=0.0, device=device, **options
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.2)
    return layer


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
def test_wrapped_modules_add_their_bias(device, layer_type):
    """A layer without dropout has them add it from the start."""
    layer, plain = (make(device, drop, layer_type=layer_type) for drop in (0.3, 0.0))
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(8, 2, 32, device=device)
    context = {"encoder_output": torch.randn(8, 2, 32, device=device)}
    context = context if layer_type == "decoder" else {}
    attentions = [layer.self_attention]
    if layer_type == "decoder":
        attentions.append(layer.inter_attention)
    for attention in attentions:
        attention.proj = Adapter(attention.proj)
    layer.layernorm_mlp = Adapter(layer.layernorm_mlp)
    layer.eval()
    plain.eval()
    assert_same_bits(layer(x, **context), plain(x, **context))
    for attention in attentions:  # and unwrapped again
        attention.proj = attention.proj.base
    layer.layernorm_mlp = layer.layernorm_mlp.base
    assert_same_bits(layer(x, **context), plain(x, **context))


def test_the_bias_counts_in_training(device):
    layer = make(device, 0.5)
    layer.self_attention.proj = Adapter(layer.self_attention.proj)
    out = layer(torch.randn(8, 2, 32, device=device))
    out.sum().backward()
    assert layer.self_attention.proj.base.bias.grad.abs().sum() > 0


def test_attention_that_returns_its_bias_says_that_it_is_added(device):
    attention = te.MultiheadAttention(32, 4, return_bias=True, bias=True, device=device)
    with torch.no_grad():
        attention.proj.bias.normal_()
    x = torch.randn(8, 2, 32, device=device)
    attention.eval()
    apart, bias = attention(x)
    attention.proj = Adapter(attention.proj)
    out, none = attention(x)
    assert none is None
    assert_nmse(out, apart.double() + bias, tol("sum", torch.float32, 32))
