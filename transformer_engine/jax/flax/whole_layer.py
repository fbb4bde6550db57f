# SPDX-License-Identifier: Apache-2.0
"""`TransformerLayer` as one plan: which calls are, and what a plan is given of its modules."""

import math
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from transformer_engine.common.attention_graphs import AttentionSpec
from transformer_engine.jax import linear
from transformer_engine.jax.activation import activation_plan
from transformer_engine.jax.attention import canonicalize_attn_mask_type
from transformer_engine.jax.attention_calls import pair_of
from transformer_engine.jax.definitions import are_custom_calls_on
from transformer_engine.jax.flax.linear import random_metas
from transformer_engine.jax.layernorm import norm_plan
from transformer_engine.jax.operator_calls import ACTIVATIONS, is_on_one_device
from transformer_engine.jax.planned_layer import LayerPlan, Parameters, transformer_layer
from transformer_engine.jax.quantize import (
    NVTE_FP8_COLLECTION_NAME,
    QuantizeMeta,
    QuantizeMetaSet,
    QuantizerFactory,
    get_quantize_config,
)

_LINEARS = (("attention/qkv", ""), ("attention/out", ""), ("mlp", "_0"), ("mlp", "_1"))
"""Path of each linear layer, and how the names of its scales end."""
_NORMS = ("attention/qkv", "mlp")
_KERNELS = ("attention/qkv/kernel", "attention/out/kernel", "mlp/wi_kernel", "mlp/wo_kernel")
_BIASES = ("attention/qkv/bias", "attention/out/bias", "mlp/wi_bias", "mlp/wo_bias")


def runs(module: Any, x: Array, dropped: bool) -> bool:
    """Return whether a call of a `TransformerLayer` without decoding or biases is one plan.

    Others run module by module: what a plan does not hold, and what programs see modules of
    (`init`, captured results). `dropped`: there is dropout.
    """
    heads, mask = (
        module.num_attention_heads,
        canonicalize_attn_mask_type(module.self_attn_mask_type),
    )
    rates = (module.hidden_dropout, module.attention_dropout) if dropped else ()
    others = (
        module.output_layernorm, module.apply_residual_connection_post_layernorm,
        module.enable_rotary_pos_emb, module.hidden_dropout_dims, mask.is_padding(),
        module.low_rank_adaptation_scope not in ("none", None), module.softmax_type != "vanilla",
        (module.num_gqa_groups or heads) != heads, not module.fuse_qkv_params,
        dropped and (module.drop_path or module.intermediate_dropout),
        module.is_initializing(), module.is_mutable_collection("intermediates"),
    )  # fmt: skip
    channels = module.hidden_size // heads
    return (
        are_custom_calls_on() and is_on_one_device() and not any(others)
        and tuple(module.mlp_activations) in ACTIVATIONS
        and all(rate < 1.0 for rate in rates)
        and x.dtype in (jnp.float16, jnp.bfloat16) and x.ndim == 3
        and channels % 8 == 0 and channels <= 256
    )  # fmt: skip


def _leaf(tree: Any, path: str) -> Any:
    """The item at a path; None where there is none."""
    for name in path.split("/"):
        tree = tree.get(name) if tree else None
    return tree


def _quantizer_sets(module: nn.Module) -> list:
    """Those of the linear layers, as the modules would make them."""
    config, made = get_quantize_config(), []
    for path, postfix in _LINEARS:
        if config.has_state:
            own = _leaf(module.variables[NVTE_FP8_COLLECTION_NAME], path)
            names = [f"{name}{postfix}" for name in ("x", "kernel", "grad")]
            metas = QuantizeMetaSet(
                *(QuantizeMeta(own[f"{n}_scale"], own[f"{n}_amax_history"]) for n in names)
            )
        else:
            metas = random_metas(module, config)
        made.append(QuantizerFactory.create_set(quantize_meta_set=metas))
    return made


def _attention(module: Any, dropped: bool) -> AttentionSpec:
    heads, channels = module.num_attention_heads, module.hidden_size // module.num_attention_heads
    mask = canonicalize_attn_mask_type(module.self_attn_mask_type)
    left, right = module.window_size or (-1, -1)
    if mask.is_causal():
        right = 0
    return AttentionSpec(
        slices=tuple((heads, channels, i * module.hidden_size, channels) for i in range(3)),
        sequence_first=module.transpose_batch_sequence,
        scale=1.0 / math.sqrt(channels) if module.scale_attn_logits else 1.0,
        dropout=module.attention_dropout if dropped else 0.0,
        window=(left, right),
        bottom_right=mask.is_bottom_right(),
    )


def run(module: Any, x: Array, dropped: bool) -> Array:
    """Run a layer of which `runs` is true."""
    params = nn.unbox(module.variables["params"])
    plans, uses = zip(*map(linear.plan_of_set, _quantizer_sets(module)), strict=True)
    affine = []
    for path in _NORMS:
        pair = _leaf(params, f"{path}/scale"), _leaf(params, f"{path}/ln_bias")
        affine.append(tuple(None if each is None else each.astype(x.dtype) for each in pair))
    norms = [
        norm_plan(module.layernorm_type, module.zero_centered_gamma, module.layernorm_epsilon, beta)
        for _, beta in affine
    ]
    attention, rate = _attention(module, dropped), module.hidden_dropout if dropped else 0.0
    pairs = [
        pair_of(module.make_rng(module.dropout_rng_name)) if each else None
        for each in (attention.dropout, rate, rate)
    ]
    activation = activation_plan(module.mlp_activations, module.mlp_activation_params)
    plan = LayerPlan(tuple(norms), plans, activation, attention, rate)
    kernels, biases = (tuple(_leaf(params, p) for p in ps) for ps in (_KERNELS, _BIASES))
    given = Parameters(tuple(affine), kernels, biases)
    return transformer_layer(plan, x, given, uses, tuple(pairs))
