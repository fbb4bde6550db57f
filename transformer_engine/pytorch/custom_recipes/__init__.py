# SPDX-License-Identifier: Apache-2.0
"""Functions and quantizers for `CustomRecipe`: ready ones, mixed ones, and references."""

from transformer_engine.common import absent

__all__ = (
    "gemm quantizer_factories quantizer_factory_zoo reference_current_scaling reference_nvfp4 "
    "reference_utils"
).split()
__getattr__, __dir__ = absent.attach(globals(), __all__)
