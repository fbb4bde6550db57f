# SPDX-License-Identifier: Apache-2.0
"""Single operations under the names that programs import: `tex`.

Every one has a form ``_jax_...`` that runs by the definitions in jax.numpy, whatever is in force.
"""

from transformer_engine.common import absent
from transformer_engine.jax.cpp_extensions.casts import (
    dequantize,
    quantize,
    quantize_dact_dbias,
    quantize_dbias,
)
from transformer_engine.jax.cpp_extensions.collective import (
    CollectiveOp,
    CollectiveOpSet,
    noop_collective_op_set,
)
from transformer_engine.jax.cpp_extensions.layers import (
    act_lu,
    dact_lu,
    gemm,
    is_softmax_kernel_available,
    layernorm_bwd,
    layernorm_fwd,
    normalization_bwd,
    normalization_fwd,
    rmsnorm_bwd,
    rmsnorm_fwd,
)
from transformer_engine.jax.definitions import by_definition

_jax_act_lu = by_definition(act_lu)
_jax_dact_lu = by_definition(dact_lu)
_jax_dequantize = by_definition(dequantize)
_jax_gemm = by_definition(gemm)
_jax_layernorm = by_definition(layernorm_fwd)
_jax_quantize = by_definition(quantize)
_jax_quantize_dact_dbias = by_definition(quantize_dact_dbias)
_jax_quantize_dbias = by_definition(quantize_dbias)
_jax_rmsnorm = by_definition(rmsnorm_fwd)

__all__ = [
    "CollectiveOp",
    "CollectiveOpSet",
    "act_lu",
    "dact_lu",
    "dequantize",
    "gemm",
    "is_softmax_kernel_available",
    "layernorm_bwd",
    "layernorm_fwd",
    "noop_collective_op_set",
    "normalization_bwd",
    "normalization_fwd",
    "quantize",
    "quantize_dact_dbias",
    "quantize_dbias",
    "rmsnorm_bwd",
    "rmsnorm_fwd",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals())
