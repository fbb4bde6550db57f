# SPDX-License-Identifier: Apache-2.0
"""Configurations of megatron-core that it passes on to this package: recipes, quantized parameters.

Before this package reported version 2.20 the checks of megatron-core refused some of them.
"""

from megatron_gpt import DELAYED, trained

import transformer_engine.pytorch as te

FACTORIES = "transformer_engine.pytorch.custom_recipes.quantizer_factories"
CURRENT = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
BLOCKS = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
MXFP8 = {"fp8": "e4m3", "fp8_recipe": "mxfp8"}
NVFP4 = {"fp4": "e2m1", "fp4_recipe": "nvfp4"}
CUSTOM = {"fp8": "e4m3", "fp8_recipe": "custom"}
CUSTOM_FP4 = {"fp4": "e2m1", "fp4_recipe": "custom"}

RECIPES = {
    "mxfp8": MXFP8,
    "blockwise": BLOCKS,
    "blockwise_hybrid": {**BLOCKS, "fp8": "hybrid"},
    "custom_current": {**CUSTOM, "fp8_quantizer_factory": f"{FACTORIES}.current_scaling_factory"},
    "custom_mxfp8": {**CUSTOM, "fp8_quantizer_factory": f"{FACTORIES}.mxfp8_factory"},
    "custom_nvfp4": {**CUSTOM_FP4, "fp4_quantizer_factory": f"{FACTORIES}.nvfp4_factory"},
    "param_delayed": {**DELAYED, "fp8_param": True},
    "param_current": {**CURRENT, "fp8_param": True},
    "param_blockwise": {**BLOCKS, "fp8_param": True},
    "param_mxfp8": {**MXFP8, "fp8_param": True},
    "param_nvfp4": {**NVFP4, "fp4_param": True},
    "attention": {**DELAYED, "fp8_dot_product_attention": True},
    "attention_current": {**CURRENT, "fp8_dot_product_attention": True},
    "attention_mha": {
        **DELAYED,
        "fp8_dot_product_attention": True,
        "fp8_multi_head_attention": True,
    },
    "first_layer_bf16": {
        **CURRENT,
        "first_last_layers_bf16": True,
        "num_layers_at_start_in_bf16": 1,
        "num_layers_at_end_in_bf16": 0,
    },
    "symmetric": {"symmetric_ar_type": "multimem_all_reduce"},
}
"""Options of a configuration by the name of a case."""

GATHERED = {"delayed": DELAYED, "current": CURRENT, "blockwise": BLOCKS}
"""Of quantized parameters that the distributed optimizer gathers in FP8. It has MXFP8 gathered in
bf16 alone (reuse_grad_buf_for_mxfp8_param_ag)."""


def run(device, name):
    """Train under a configuration: losses, counts, and the formats of the weights afterwards."""
    formats = []

    def look(model):
        weights = [p for p in model.parameters() if isinstance(p, te.QuantizedTensor)]
        formats.extend(type(weight).__name__ for weight in weights)

    facts = trained(device, after=look, **RECIPES[name])
    counted = te.counters()
    emulated = {kind: counted.get(f"emulated.{kind}", 0) for kind in ("mxfp8", "nvfp4")}
    attention = sum(
        count
        for key, count in counted.items()
        if key.startswith("attention.") and key.endswith(".e4m3")
    )
    return {**facts, "formats": formats, "emulated": emulated, "attention": attention}
