# SPDX-License-Identifier: Apache-2.0
"""Quantizers, tensors in low precision, and the recipe in force."""

from transformer_engine.common import absent
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.quantize.helper import (
    NVTE_FP8_COLLECTION_NAME,
    autocast,
    fp8_autocast,
    get_global_quantize_recipe,
    get_quantize_config,
    get_quantize_config_with_recipe,
    get_supported_quantization_recipes,
    get_supported_scaling_modes,
    is_fp8_available,
    is_scaling_mode_supported,
    update_collections,
)
from transformer_engine.jax.quantize.metadata import QuantizeMeta, QuantizeMetaSet
from transformer_engine.jax.quantize.quantizer import (
    BlockScaleQuantizer,
    CurrentScaleQuantizer,
    DelayedScaleQuantizer,
    NVFP4Quantizer,
    Quantizer,
    QuantizerFactory,
    QuantizerSet,
    noop_quantizer_set,
)
from transformer_engine.jax.quantize.recipes import QuantizeConfig
from transformer_engine.jax.quantize.tensor import (
    NoScaleTensor,
    QuantizeLayout,
    ScaledTensor,
    ScaledTensor1x,
    ScaledTensor2x,
    ScaledTensorFactory,
    TensorSource,
    TensorUsage,
)

__all__ = [
    "BlockScaleQuantizer",
    "Cast",
    "CurrentScaleQuantizer",
    "DelayedScaleQuantizer",
    "NVFP4Quantizer",
    "NVTE_FP8_COLLECTION_NAME",
    "NoScaleTensor",
    "QuantizeConfig",
    "QuantizeLayout",
    "QuantizeMeta",
    "QuantizeMetaSet",
    "Quantizer",
    "QuantizerFactory",
    "QuantizerSet",
    "ScaledTensor",
    "ScaledTensor1x",
    "ScaledTensor2x",
    "ScaledTensorFactory",
    "ScalingMode",
    "TensorSource",
    "TensorUsage",
    "autocast",
    "fp8_autocast",
    "get_global_quantize_recipe",
    "get_quantize_config",
    "get_quantize_config_with_recipe",
    "get_supported_quantization_recipes",
    "get_supported_scaling_modes",
    "is_fp8_available",
    "is_scaling_mode_supported",
    "noop_quantizer_set",
    "update_collections",
    *absent.names_of(__name__),
]

__getattr__, __dir__ = absent.attach(globals())
