# SPDX-License-Identifier: Apache-2.0
"""`TransformerLayer` as one plan: which calls are, and what a plan is given of its modules."""

import math
from typing import Any

import jax
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
from transformer_engine.jax.operator_calls import ACTIVATIONS
from transformer_engine.jax.planned_layer import (
    LayerPlan,
    Parameters,
    States,
    transformer_layer,
)
from transformer_engine.jax.quantize import (
    NVTE_FP8_COLLECTION_NAME,
    QuantizeConfig,
    get_quantize_config,
)
from transformer_engine.jax.quantize.state import Drawn, Rule, usable_scale

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
        are_custom_calls_on() and not any(others)
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


def _states_of(module: nn.Module, config: QuantizeConfig) -> tuple[States, tuple[Rule, ...]]:
    """States of delayed scaling, from the variables of the modules, and how they follow."""
    rules = tuple(Rule(cast, config.amax_compute_algo) for cast in config.casts)
    scales, histories = [], []
    for path, postfix in _LINEARS:
        own = _leaf(module.variables[NVTE_FP8_COLLECTION_NAME], path)
        for name, rule in zip(("x", "kernel", "grad"), rules, strict=True):
            pair = own[f"{name}{postfix}_scale"], own[f"{name}{postfix}_amax_history"]
            if not isinstance(pair[0], jax.core.Tracer):
                usable_scale(*pair, rule)  # raises where that is no state
            scales.append(pair[0])
            histories.append(pair[1])
    return States(
        jnp.concatenate(scales).reshape(-1, 3), jnp.stack(histories).reshape(len(_LINEARS), 3, -1)
    ), rules


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
    config, states, rules = get_quantize_config(), None, None
    if config.has_state:
        states, rules = _states_of(module, config)
    casts = (linear.OperandPlan(cast) for cast in config.casts)
    own = linear.LinearPlan(*casts, config.backward_override, config.fast)
    metas = [random_metas(module, config) for _ in _LINEARS]
    drawn = [m and Drawn(m.grad.stochastic_rounding_rng_state) for m in metas]
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
    plan = LayerPlan(tuple(norms), (own,) * len(_LINEARS), activation, attention, rate, rules)
    kernels, biases = (tuple(_leaf(params, p) for p in ps) for ps in (_KERNELS, _BIASES))
    given = Parameters(tuple(affine), kernels, biases)
    return transformer_layer(plan, x, given, states, tuple(drawn), tuple(pairs))
