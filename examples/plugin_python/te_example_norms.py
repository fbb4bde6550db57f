# SPDX-License-Identifier: Apache-2.0
"""RMSNorm and its gradient in plain torch, as implementations of a vendor."""

import torch

from transformer_engine.plugin.core import BackendImplKind, OpImpl


def _factor(weight, zero_centered):
    return weight.float() + 1 if zero_centered else weight.float()


def rmsnorm_fwd(input, weight, eps, ln_out, quantizer, otype, sm_margin, zero_centered_gamma):
    """(Output, None, 1 / sigma of each row); the arguments are those of the operator."""
    x = input.float()
    rsigma = torch.rsqrt(x.square().mean(-1) + eps)
    out = (x * rsigma[:, None] * _factor(weight, zero_centered_gamma)).to(otype)
    return out if ln_out is None else ln_out.copy_(out), None, rsigma


def rmsnorm_bwd(dz, x, rsigma, gamma, sm_margin=0, zero_centered_gamma=False):
    """(Gradient of the input, gradient of the weight)."""
    normed = x.float() * rsigma[:, None]
    scaled = dz.float() * _factor(gamma, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return dx.to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)


def _takes(input, weight, eps, ln_out, quantizer, *others):
    """Calls that cast nothing: the others run by whoever is asked next."""
    return quantizer is None


def register(registry):
    """Register both: the forward's statistics are what the backward reads."""
    common = {"kind": BackendImplKind.VENDOR, "vendor": "example"}
    registry.register_many(
        [
            OpImpl("rmsnorm_fwd", "vendor.example", fn=rmsnorm_fwd, supports=_takes, **common),
            OpImpl("rmsnorm_bwd", "vendor.example", fn=rmsnorm_bwd, **common),
        ]
    )
