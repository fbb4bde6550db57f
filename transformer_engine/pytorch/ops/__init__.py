# SPDX-License-Identifier: Apache-2.0
"""Fused operations: names that are not built yet."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals(), ("basic",))
__all__ = absent.names_of(__name__)
