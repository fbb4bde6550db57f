# SPDX-License-Identifier: Apache-2.0
"""The grouped layer of fused operations, which is not built yet, and the names of its buffers."""

from typing import Any

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "GRAD_INPUT_BUFFER_KEY",
    "OUTPUT_BUFFER_KEY",
    "is_op_fuser_grouped_tensor_path_supported",
    *absent.names_of(__name__),
]

OUTPUT_BUFFER_KEY = "output"
"""Keyword argument: memory for the output."""
GRAD_INPUT_BUFFER_KEY = "grad_input"
"""Keyword argument: memory for the gradient of the input."""


def is_op_fuser_grouped_tensor_path_supported(recipe: Any, dtype: Any) -> bool:
    """Return whether grouped operations keep weights in one tensor: never, as there are none."""
    del recipe, dtype
    return False
