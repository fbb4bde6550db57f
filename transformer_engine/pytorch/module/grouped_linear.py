# SPDX-License-Identifier: Apache-2.0
"""Linear layers of experts: names that are not built yet, and a question about them."""

from typing import Any

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(globals())
__all__ = ["is_module_grouped_tensor_path_supported", *absent.names_of(__name__)]


def is_module_grouped_tensor_path_supported(recipe: Any, dtype: Any) -> bool:
    """Return whether grouped layers keep their weights in one tensor: never, as there are none."""
    del recipe, dtype
    return False


# Of `transformer_engine.pytorch.ops.basic.grouped_linear`:
is_op_fuser_grouped_tensor_path_supported = is_module_grouped_tensor_path_supported
OUTPUT_BUFFER_KEY = "output"
"""Keyword argument: memory for the output."""
GRAD_INPUT_BUFFER_KEY = "grad_input"
"""Keyword argument: memory for the gradient of the input."""
