# SPDX-License-Identifier: Apache-2.0
"""A vendor of a chip with ten operators, of which six have gradients, in plain torch.

It computes as the definitions do, and counts its calls itself.
"""

import collections
import functools

from transformer_engine.plugin.core import BackendImplKind, OpImpl

WITH_GRADIENTS = {
    "rmsnorm_fwd": "rmsnorm_bwd",
    "layernorm_fwd": "layernorm_bwd",
    "gelu": "dgelu",
    "swiglu": "dswiglu",
    "fused_attn_fwd": "fused_attn_bwd",
}
OPERATORS = (*WITH_GRADIENTS, *WITH_GRADIENTS.values(), "generic_gemm", "quantize")
REPLACED = {f"te_{op}" for op in ("norm", "gemm", "activation", "attention", "quantize")}
"""Operators of the C library whose calls these take, but for gradients."""


class Vendor:
    """`register` is what its package exports; `calls` are those that it ran, by operator."""

    def __init__(self, name="acme"):
        self.name, self.calls = name, collections.Counter()

    def register(self, registry):
        for op in OPERATORS:
            of = "default.native" if op == "quantize" else "reference.torch"
            function = registry.get_implementation(op, of).fn
            made = OpImpl(
                op, f"vendor.{self.name}", BackendImplKind.VENDOR,
                functools.partial(self._run, op, function), vendor=self.name,
            )  # fmt: skip
            registry.register(made)

    def _run(self, op, function, *args, **kwargs):
        self.calls[op] += 1
        return function(*args, **kwargs)
