# SPDX-License-Identifier: Apache-2.0
"""What the tests of savers share: one layer of each kind, used or not, and what must come back."""

import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, states_of

import transformer_engine.pytorch as te

HIDDEN, HEADS = 32, 4


def _layer(**options):
    return lambda device: te.TransformerLayer(
        HIDDEN, 48, HEADS, hidden_dropout=0.0, attention_dropout=0.0, device=device, **options
    )


def _split(kind):
    parts = {"query": 32, "key": 16, "value": 16}
    return lambda device: kind(HIDDEN, 64, parameters_split=parts, device=device)


LAYERS = {
    "Linear": lambda device: te.Linear(HIDDEN, 48, device=device),
    "Linear-split": _split(te.Linear),
    "LayerNormLinear": lambda device: te.LayerNormLinear(HIDDEN, 48, device=device),
    "LayerNormLinear-split": _split(te.LayerNormLinear),
    "LayerNormMLP": lambda device: te.LayerNormMLP(HIDDEN, 48, device=device),
    "MultiheadAttention": lambda device: te.MultiheadAttention(
        HIDDEN, HEADS, attention_dropout=0.0, input_layernorm=True, device=device
    ),
    "TransformerLayer": _layer(),
    "TransformerLayer-fused": _layer(fuse_qkv_params=True),
    "TransformerLayer-decoder": _layer(layer_type="decoder"),
    "LayerNorm": lambda device: te.LayerNorm(HIDDEN, device=device),
    "RMSNorm": lambda device: te.RMSNorm(HIDDEN, device=device),
}
STATELESS = ("LayerNorm", "RMSNorm")
USES = [None, "delayed"]
"""Not used, or trained with a recipe."""


class Model(torch.nn.Module):
    """A layer under a prefix; the second input of a decoder is its first."""

    def __init__(self, kind, device="cpu"):
        super().__init__()
        self.body = torch.nn.ModuleList([LAYERS[kind](device)])
        self.decoder = kind.endswith("decoder")

    def forward(self, x):
        """Run the layer, over [sequence, batch, hidden]."""
        return self.body[0](x, **({"encoder_output": x} if self.decoder else {}))


def made(kind, use, device="cpu"):
    """Make a model with random parameters everywhere, and train it a little."""
    model = Model(kind, device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.1)
    if use is not None:
        train(model, use)
        assert bool(states_of(model)) is (kind not in STATELESS)
    return model


def train(model, use, steps=3):
    """Run steps without an optimizer; return the last output and gradients."""
    device = next(model.parameters()).device
    recipe = RECIPES[use]() if use else None
    for _ in range(steps):
        model.zero_grad()
        x = torch.randn(16, 2, HIDDEN, device=device) * 5
        with counted() as gemms, te.autocast(enabled=use is not None, recipe=recipe):
            out = model(x)
        stateless = isinstance(model.body[0], te.LayerNorm | te.RMSNorm)
        assert (gemms.fp8 > 0) is (use is not None and not stateless)
        out.float().square().mean().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters())]


def assert_came_back(loaded, saved, use):
    """Assert that parameters and scales have the same bits, and so has the next step."""
    assert_same_bits(dict(loaded.state_dict()), dict(saved.state_dict()))
    assert_same_bits(dict(loaded.named_parameters()), dict(saved.named_parameters()))
    assert_same_bits(states_of(loaded), states_of(saved))
    seed = int(torch.randint(2**31, ()))
    results = []
    for model in (loaded, saved):
        torch.manual_seed(seed)
        results.append([train(model, use, 2), states_of(model)])
    assert_same_bits(*results)


def content(model):
    """Bytes of all that has to be saved, by key."""
    return {key: tensor.nbytes for key, tensor in model.state_dict().items()}
