# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and its gradient in plain torch, as implementations of a vendor."""

import torch

from transformer_engine.plugin.core import BackendImplKind, OpImpl


def _factor(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


def _rows(tensor):
    """[rows, columns] of [..., columns]."""
    return tensor.float().reshape(-1, tensor.shape[-1])


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """(Output, None, 1 / sigma of each row); the arguments are those of the operator."""
    x = _rows(input)
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    out = (x * rsigma[:, None] * _factor(weight, zero_centered_gamma)).to(otype).view(input.shape)
    return out if ln_out is None else ln_out.copy_(out), None, rsigma


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin=0, zero_centered_gamma=False):
    """(Gradient of the input, gradient of the weight)."""
    grad, normed = _rows(dz), _rows(x) * rsigma[:, None]
    scaled = grad * _factor(gamma, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype).view(x.shape), (grad * normed).sum(0).to(gamma.dtype)


def _takes(input, weight, eps, ln_out, quantizer, *others):
    """True, or a text that says why not; then whoever is asked next runs the call."""
    return quantizer is None or "it casts nothing"


def register(registry):
    """Register both: the forward's statistics are what the backward reads."""
    common = {"kind": BackendImplKind.VENDOR, "vendor": "example"}
    registry.register_many(
        [
            OpImpl("rmsnorm_fwd", "vendor.example", fn=rmsnorm_fwd, supports=_takes, **common),
            OpImpl("rmsnorm_bwd", "vendor.example", fn=rmsnorm_bwd, **common),
        ]
    )
