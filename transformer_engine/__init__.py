# SPDX-License-Identifier: Apache-2.0
"""Low-precision Transformer training and inference.

Importing this package imports nothing else: take `transformer_engine.pytorch` for PyTorch modules
and `transformer_engine.common` for recipes.
"""

__version__ = "2.6.0"
