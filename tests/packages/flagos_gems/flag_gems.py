# SPDX-License-Identifier: Apache-2.0
"""A stand-in for flag_gems: the functions that `te_flagos_gems` calls, in plain torch."""

import contextlib

CALLS = []


@contextlib.contextmanager
def use_gems():
    """Where flag_gems has its kernels in the place of torch's."""
    CALLS.append("use_gems")
    yield


def mm(a, b):
    CALLS.append("mm")
    return a @ b


def rms_norm_forward(x, normalized_shape, weight, eps):
    CALLS.append("rms_norm_forward")
    rows = x.float()
    inverse = (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    return (rows * inverse * weight.float()).to(x.dtype), inverse.squeeze(-1)


def rms_norm_backward(grad, x, inverse, normalized_shape, weight, eps):
    CALLS.append("rms_norm_backward")
    inverse, rows = inverse.reshape(*x.shape[:-1], 1), x.float()
    normal, scaled = rows * inverse, grad.float() * weight.float()
    dx = inverse * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    dweight = (grad.float() * normal).reshape(-1, x.shape[-1]).sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype)
