# SPDX-License-Identifier: Apache-2.0
"""`IdentityTensorStorage` under the path that programs import."""

from transformer_engine.pytorch.tensor.identity import IdentityTensorStorage

__all__ = ["IdentityTensorStorage"]
