# SPDX-License-Identifier: Apache-2.0
"""Single operations: names that are not built yet."""

from transformer_engine.common import absent

__getattr__, __dir__ = absent.attach(
    globals(),
    ("grouped_linear",),
    {"is_op_fuser_grouped_tensor_path_supported": f"{__name__}.grouped_linear"},
)
__all__ = ["is_op_fuser_grouped_tensor_path_supported", *absent.names_of(__name__)]
