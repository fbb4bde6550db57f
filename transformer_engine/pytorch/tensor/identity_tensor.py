# SPDX-License-Identifier: Apache-2.0
"""`identity` under the path that programs import."""

from transformer_engine.pytorch.tensor.identity import (
    IdentityQuantizer,
    IdentityTensor,
    IdentityTensorStorage,
)

__all__ = ["IdentityQuantizer", "IdentityTensor", "IdentityTensorStorage"]
