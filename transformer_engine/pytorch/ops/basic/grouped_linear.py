# SPDX-License-Identifier: Apache-2.0
"""The grouped layer of fused operations, which is not built yet, and the names of its buffers."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["GRAD_INPUT_BUFFER_KEY", "OUTPUT_BUFFER_KEY", *absent.names_of(__name__)]

OUTPUT_BUFFER_KEY = "output"
"""Keyword argument: memory for the output."""
GRAD_INPUT_BUFFER_KEY = "grad_input"
"""Keyword argument: memory for the gradient of the input."""
