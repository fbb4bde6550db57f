# SPDX-License-Identifier: Apache-2.0
"""Managers of implementations that give their own names, for tests of what is selected."""

from transformer_engine.plugin.core import (
    BackendImplKind,
    OpImpl,
    OpManager,
    OpRegistry,
)

KINDS = {"flagos": BackendImplKind.DEFAULT, "vendor": BackendImplKind.VENDOR,
         "reference": BackendImplKind.REFERENCE}  # fmt: skip
ALL = "flagos.f", "vendor.CUDA", "vendor.amd", "reference.torch"


def impl(impl_id, answer=None, op="op", **options):
    """An implementation that gives its own name, or what it is told."""
    kind, _, vendor = impl_id.partition(".")
    options.setdefault("vendor", vendor if kind == "vendor" else None)
    options.setdefault("fn", lambda *args, **kwargs: impl_id if answer is None else answer)
    return OpImpl(op, impl_id, KINDS[kind], **options)


def manager_of(*impls):
    registry = OpRegistry()
    registry.register_many(impls)
    return OpManager(registry)
