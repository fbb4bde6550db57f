# SPDX-License-Identifier: Apache-2.0
"""FP8 layers for JAX: functions, and `transformer_engine.jax.flax` with Flax modules of them."""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "transformer_engine.jax needs jax and flax: pip install transformer_engine[jax]",
        name=error.name,
    ) from error

from transformer_engine.common import absent
from transformer_engine.jax.quantize import (
    NVTE_FP8_COLLECTION_NAME,
    autocast,
    fp8_autocast,
    update_collections,
)
from transformer_engine.jax.sharding import MeshResource

_SUBMODULES = (
    "activation attention checkpoint_policies cpp_extensions dense flax layernorm layernorm_dense "
    "layernorm_mlp quantize sharding softmax version_utils"
).split()
"""Submodules that are imported when they are asked for."""

__all__ = [
    "NVTE_FP8_COLLECTION_NAME",
    "MeshResource",
    "autocast",
    "fp8_autocast",
    "update_collections",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals(), _SUBMODULES)
