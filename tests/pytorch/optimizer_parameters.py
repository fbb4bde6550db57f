# SPDX-License-Identifier: Apache-2.0
"""Parameters of optimizers, and gradients."""

import torch

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def parameters_of(device, dtype):
    return [
        torch.nn.Parameter(torch.randn(shape, device=device).to(dtype))
        for shape in ((33, 5), (7,), (0, 3))
    ]


def gradients_of(parameters):
    return [torch.randn_like(p) for p in parameters]


SIZES = (1, 2, 7, 8, 33, 64, 511, 1023, 4097, 40003)


def views_of(device, dtype, sizes=SIZES):
    """Parameters of many sizes that begin anywhere, and gradients likewise."""
    params, grads = [], []
    for i, size in enumerate(sizes):
        for skipped in (0, 1 + i % 3):
            made = [torch.randn(size + skipped, device=device).to(dtype) for _ in range(2)]
            params.append(torch.nn.Parameter(made[0][skipped:]))
            grads.append(made[1][skipped:])
    return params, grads
