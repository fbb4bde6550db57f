# SPDX-License-Identifier: Apache-2.0
"""`quantization` under the path that most programs import."""

from transformer_engine.pytorch.quantization import *  # noqa: F403
from transformer_engine.pytorch.quantization import __all__  # noqa: F401
