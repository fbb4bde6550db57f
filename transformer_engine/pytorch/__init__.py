# SPDX-License-Identifier: Apache-2.0
"""FP8 modules for PyTorch: swap `torch.nn` modules for these, run the forward inside `autocast`."""

from transformer_engine.common.requirements import check_requirements

check_requirements()

import torch  # noqa: E402 - these are there, as was checked

from transformer_engine import _core  # noqa: E402
from transformer_engine.common import recipe  # noqa: E402
from transformer_engine.pytorch.tensors import plain_tensor  # noqa: E402

_core.bind_torch(torch, plain_tensor)

from transformer_engine.pytorch.attention import (  # noqa: E402 - these use the binding
    DotProductAttention,
    MultiheadAttention,
    RotaryPositionEmbedding,
    apply_rotary_pos_emb,
)
from transformer_engine.pytorch.autocast import (  # noqa: E402
    autocast,
    fp8_autocast,
    get_default_recipe,
)
from transformer_engine.pytorch.conversion import convert, convertible  # noqa: E402
from transformer_engine.pytorch.counters import (  # noqa: E402
    counters,
    counting,
    reset_counters,
    scales,
)
from transformer_engine.pytorch.device import (  # noqa: E402
    get_device_compute_capability,
    is_bf16_available,
    is_fp8_available,
)
from transformer_engine.pytorch.explain import explain  # noqa: E402
from transformer_engine.pytorch.extra_state import without_scaling_state  # noqa: E402
from transformer_engine.pytorch.module.layernorm import LayerNorm  # noqa: E402
from transformer_engine.pytorch.module.layernorm_linear import LayerNormLinear  # noqa: E402
from transformer_engine.pytorch.module.layernorm_mlp import LayerNormMLP  # noqa: E402
from transformer_engine.pytorch.module.linear import Linear  # noqa: E402
from transformer_engine.pytorch.module.rmsnorm import RMSNorm  # noqa: E402
from transformer_engine.pytorch.nonfinite import (  # noqa: E402
    NonFiniteError,
    find_nonfinite,
    watch_finite,
)
from transformer_engine.pytorch.recompute import checkpoint  # noqa: E402
from transformer_engine.pytorch.scaling import reset  # noqa: E402
from transformer_engine.pytorch.transformer import TransformerLayer  # noqa: E402

__all__ = [
    "DotProductAttention",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "NonFiniteError",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "convert",
    "convertible",
    "counters",
    "counting",
    "explain",
    "find_nonfinite",
    "fp8_autocast",
    "get_default_recipe",
    "get_device_compute_capability",
    "is_bf16_available",
    "is_fp8_available",
    "recipe",
    "reset",
    "reset_counters",
    "scales",
    "watch_finite",
    "without_scaling_state",
]
