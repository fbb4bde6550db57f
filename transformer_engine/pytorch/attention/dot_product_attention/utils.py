# SPDX-License-Identifier: Apache-2.0
"""Helpers of attention that programs import; see `common.absent` for what is not built."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = absent.names_of(__name__)
