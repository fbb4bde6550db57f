# SPDX-License-Identifier: Apache-2.0
"""Process groups of the test device: the backend "npucl", copies on the host that gloo sends."""

import functools

import torch.distributed as dist
from devices import build


@functools.cache
def register():
    """Make the backend known to torch, as that of tensors on npu."""
    native = build.load("npu_group")

    def create(store, rank, size, timeout):
        return native.make(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("npucl", create, devices=["npu"])
