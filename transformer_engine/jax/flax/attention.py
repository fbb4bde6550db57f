# SPDX-License-Identifier: Apache-2.0
"""Flax modules of attention: `DotProductAttention`, `MultiHeadAttention`."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    SequenceDescriptor,
    canonicalize_attn_mask_type,
    fused_attn,
    limits_of_mask,
)
from transformer_engine.jax.flax.linear import DenseGeneral, Initializer, LayerNormDenseGeneral
from transformer_engine.jax.flax.parameters import stacked_init
from transformer_engine.jax.sharding import (
    BATCH_AXES,
    HEAD_AXES,
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    SEQLEN_AXES,
    SEQLEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    with_sharding_constraint_by_logical_axes,
)

__all__ = ["DotProductAttention", "LoRAScope", "MultiHeadAttention", "rotary_pos_emb"]

Sequences = SequenceDescriptor | Array | None


@dataclass
class LoRAScope:
    """Which linear layers of a layer have a low-rank adaptation."""

    qkv_proj: bool = False
    output_proj: bool = False
    mlp: bool = False


_SCOPES = {
    "none": LoRAScope(),
    "all": LoRAScope(True, True, True),
    "qkv_proj": LoRAScope(qkv_proj=True),
    "output_proj": LoRAScope(output_proj=True),
    "mlp": LoRAScope(mlp=True),
    "exclude_qkv_proj": LoRAScope(output_proj=True, mlp=True),
    "exclude_output_proj": LoRAScope(qkv_proj=True, mlp=True),
    "exclude_mlp": LoRAScope(qkv_proj=True, output_proj=True),
}


def _canonicalize_lora_scope(scope: str | LoRAScope | None) -> LoRAScope:
    """Return the scope of a name; ValueError where there is none of this name."""
    if isinstance(scope, LoRAScope):
        return scope
    name = "none" if scope is None else scope
    if name not in _SCOPES:
        raise ValueError(f"low_rank_adaptation_scope={scope!r} is none of {', '.join(_SCOPES)}")
    return _SCOPES[name]


def batch_sequence_axes(transposed: bool, sharded: bool = False) -> tuple[str, str]:
    """Names of the first two axes of hidden states."""
    sequence = SEQLEN_TP_AXES if sharded else SEQLEN_AXES
    return (sequence, BATCH_AXES) if transposed else (BATCH_AXES, sequence)


def rotary_pos_emb(
    x: Array,
    windows: tuple[int, int] = (1, 10000),
    transpose_batch_sequence: bool = False,
    group_method: str = "consecutive",
    start: Array | int = 0,
) -> Array:
    """Rotate pairs of channels by angles that grow with the position of a token.

    The angle of pair i of n is position / (windows[0] (windows[1] / windows[0])^(i / n)).

    Parameters
    ----------
    x : Array
        [batch, sequence, heads, channels], or [sequence, batch, ..].
    windows : tuple of int, default (1, 10000)
        Time scales of the first pair, and of the one behind the last.
    transpose_batch_sequence : bool, default False
        The sequence comes first.
    group_method : str, default "consecutive"
        Pairs are channels 2i and 2i + 1; "alternate": i and i + channels / 2.
    start : int or Array, default 0
        Position of the first token.

    Raises
    ------
    ValueError
        Another method; an odd number of channels.
    """
    channels, pairs = x.shape[-1], x.shape[-1] // 2
    if group_method not in ("consecutive", "alternate") or channels % 2:
        raise ValueError(f"rotary_pos_emb_group_method={group_method!r} is 'consecutive' or "
                         f"'alternate', of an even number of channels: {channels}")  # fmt: skip
    low, high = windows
    scales = low * (high / low) ** (jnp.arange(pairs, dtype=jnp.float32) / pairs)
    dim = 0 if transpose_batch_sequence else 1
    places = (jnp.arange(x.shape[dim]) + start).astype(jnp.float32)
    angles = jnp.expand_dims(places[:, None, None] / scales, 1 - dim)
    wide = x.astype(jnp.float32)
    axis = -1 if group_method == "consecutive" else -2
    split = wide.reshape(*x.shape[:-1], *((pairs, 2) if axis == -1 else (2, pairs)))
    first, second = (jnp.take(split, number, axis=axis) for number in (0, 1))
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=axis)
    return turned.reshape(x.shape).astype(x.dtype)


class DotProductAttention(nn.Module):
    """Attention of queries to keys.

    Attributes
    ----------
    head_dim : int
        Channels of a head.
    num_attention_heads : int
        Heads of the queries.
    num_gqa_groups : int, optional
        Heads of keys and values; by default as many as of the queries.
    attention_dropout : float, default 0
        Probability that a probability is dropped.
    attn_mask_type : str, default "causal"
        Value of `AttnMaskType`. "no_mask" and the causal masks read no mask and no sequences.
    attn_bias_type : str, optional
        Value of `AttnBiasType`; by default "post_scale_bias" where there is a bias.
    dropout_rng_name : str, default "dropout"
        Stream of the random keys.
    float32_logits : bool, default False
        Scores are fp32 either way.
    qkv_layout : str, default "bshd_bshd_bshd"
        Value of `QKVLayout`.
    scale_factor : float, optional
        What scores are multiplied by; 1 / sqrt(head_dim) by default.
    transpose_batch_sequence : bool, default False
        Inputs and outputs are [sequence, batch, ..].
    window_size : tuple of int, optional
        Keys before and after a query's own that it sees; -1 is all of them.
    max_segments_per_seq : int, default 1
        As of `fused_attn`.
    softmax_type : str, default "vanilla"
        Value of `AttnSoftmaxType`; "learnable" has the parameter ``softmax_offset``, fp32
        [1, heads, 1, 1].
    return_max_logit : bool, default False
        Return (output, largest score of each head) too.
    context_parallel_causal_load_balanced, context_parallel_axis, context_parallel_strategy, \
context_checkpoint_name, stripe_size, score_mod
        As of `fused_attn`.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    dropout_rng_name: str = "dropout"
    float32_logits: bool = False
    qkv_layout: str = "bshd_bshd_bshd"
    scale_factor: float | None = None
    transpose_batch_sequence: bool = False
    window_size: tuple[int, int] | None = None
    max_segments_per_seq: int = 1
    context_parallel_causal_load_balanced: bool = False
    context_parallel_axis: str = ""
    context_parallel_strategy: str = "DEFAULT"
    context_checkpoint_name: str = "context"
    softmax_type: str = "vanilla"
    score_mod: Any = None
    return_max_logit: bool = False
    stripe_size: int | None = None

    def _check(self, query, key, value, layout):
        """Refuse tensors of other heads than those of the module."""
        groups = self.num_gqa_groups or self.num_attention_heads
        heads = {"query": self.num_attention_heads, "key": groups, "value": groups}
        if layout.is_qkvpacked() and groups != self.num_attention_heads:
            raise ValueError(
                f"{layout.value} has as many heads of keys as of queries, not {groups}"
            )
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if tensor is not None and tensor.shape[-2] != heads[name]:
                raise ValueError(f"{name} has {tensor.shape[-2]} heads, the module {heads[name]}")

    @nn.compact
    def __call__(
        self,
        query: Array,
        key: Array | None,
        value: Array | None,
        sequence_descriptor: Sequences = None,
        bias: Array | None = None,
        *,
        deterministic: bool = False,
    ) -> Array | tuple[Array, Array]:
        """Attend.

        Parameters
        ----------
        query : Array
            [batch, queries, heads, head_dim], or all three [batch, length, 3, heads, head_dim].
        key, value : Array
            [batch, keys, groups, head_dim]; of packed layouts ``key`` has both, [batch, keys, 2,
            groups, head_dim], and what is packed elsewhere is None.
        sequence_descriptor : SequenceDescriptor or Array, optional
            Lengths, or a mask [batch, 1, queries, keys] in which 1 hides a key; for padding masks.
        bias : Array, optional
            [batch or 1, heads or 1, queries or 1, keys].
        deterministic : bool, default False
            Without dropout.
        """
        layout = QKVLayout(self.qkv_layout.lower())
        self._check(query if layout.is_separate() or layout.is_kvpacked() else None,
                    key, value, layout)  # fmt: skip
        given = (query, key, value)[: 1 + (not layout.is_qkvpacked()) + layout.is_separate()]
        if self.transpose_batch_sequence:
            given = tuple(one.swapaxes(0, 1) for one in given)
        bias_type = self.attn_bias_type or ("no_bias" if bias is None else "post_scale_bias")
        softmax_type = AttnSoftmaxType.from_str(self.softmax_type)
        offset = None
        if softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            init = nn.with_logical_partitioning(
                nn.initializers.zeros, (None, HEAD_AXES, None, None)
            )
            shape = (1, self.num_attention_heads, 1, 1)
            offset = self.param("softmax_offset", init, shape, jnp.float32)
        dropped = self.attention_dropout > 0 and not deterministic
        if sequence_descriptor is not None and not isinstance(
            sequence_descriptor, SequenceDescriptor
        ):
            sequence_descriptor = limits_of_mask(sequence_descriptor)
        made = fused_attn(
            given, bias, sequence_descriptor,
            self.make_rng(self.dropout_rng_name) if dropped else None,
            AttnBiasType(bias_type.lower()), canonicalize_attn_mask_type(self.attn_mask_type),
            layout, softmax_type, self.scale_factor or 1.0 / math.sqrt(self.head_dim),
            self.attention_dropout, dropped,
            max_segments_per_seq=self.max_segments_per_seq, window_size=self.window_size,
            context_parallel_strategy=CPStrategy[self.context_parallel_strategy.upper()],
            context_parallel_causal_load_balanced=self.context_parallel_causal_load_balanced,
            context_parallel_axis=self.context_parallel_axis,
            context_checkpoint_name=self.context_checkpoint_name, softmax_offset=offset,
            stripe_size=self.stripe_size, score_mod=self.score_mod,
            return_max_logit=self.return_max_logit,
        )  # fmt: skip
        output, *largest = made if self.return_max_logit else (made,)
        output = output.swapaxes(0, 1) if self.transpose_batch_sequence else output
        return (output, *largest) if self.return_max_logit else output


class MultiHeadAttention(nn.Module):
    """Projections, attention and the output projection, with a norm before them.

    Attributes
    ----------
    head_dim, num_attention_heads, num_gqa_groups, attention_dropout, dropout_rng_name, \
attn_mask_type, attn_bias_type, float32_logits, window_size, softmax_type, \
transpose_batch_sequence
        As of `DotProductAttention`.
    input_layernorm : bool, default True
        Whether there is a norm before the projection of the queries; of the same inputs the keys
        and values are projected from what it makes.
    layernorm_type, layernorm_epsilon, zero_centered_gamma
        As of `LayerNorm`.
    return_layernorm_output : bool, default False
        Whether what the norm makes is returned.
    kernel_init : initializer, optional
        By default variance scaling (1.0, fan_in, normal).
    use_bias : bool, default False
        Whether projections have biases.
    bias_init : initializer, default zeros
        Of the biases.
    enable_rotary_pos_emb : bool, default False
        Whether queries and keys are rotated by `rotary_pos_emb`.
    rotary_pos_emb_windows, rotary_pos_emb_group_method
        As of `rotary_pos_emb`.
    low_rank_adaptation_scope : str or LoRAScope, default "none"
        Which projections have an adaptation.
    low_rank_adaptation_dim, low_rank_adaptation_alpha
        As of `DenseGeneral`.
    dtype : dtype, default float32
        Of the parameters.
    fuse_qkv_params : bool, default True
        One kernel ``qkv`` [hidden, 3, heads head_dim]; of other inputs or fewer groups ``query``
        and ``kv`` [hidden, 2, groups head_dim]. Otherwise ``query``, ``key`` and ``value``.
    enable_sequence_parallel : bool, default False
        Inputs and outputs are spread over their sequence.
    scale_attn_logits : bool, default False
        Whether scores are multiplied by 1 / sqrt(head_dim), not by 1.
    scaled_query_init : bool, default True
        Whether kernels of queries are drawn 1 / sqrt(head_dim) as large.
    """

    head_dim: int
    num_attention_heads: int
    num_gqa_groups: int | None = None
    attention_dropout: float = 0.0
    dropout_rng_name: str = "dropout"
    input_layernorm: bool = True
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    return_layernorm_output: bool = False
    zero_centered_gamma: bool = False
    kernel_init: Initializer | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    attn_mask_type: str = "causal"
    attn_bias_type: str | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str | LoRAScope = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    float32_logits: bool = False
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"

    def _inits(self):
        """Initializers of the kernels of queries, and of keys and values."""
        init = self.kernel_init or nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        depth = math.sqrt(self.head_dim) if self.scaled_query_init else 1.0
        return (lambda *args: init(*args) / jnp.asarray(depth, args[2])), init

    def _projection(self, kind, name, features, init, adapted, **options):
        """One projection, a module."""
        axes = (W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES) if len(features) == 2 else (
            W_FSDP_AXES, W_TP_AXES)  # fmt: skip
        return kind(
            features=features, kernel_init=init, kernel_axes=axes, bias_axes=axes[1:],
            use_bias=self.use_bias, bias_init=self.bias_init, dtype=self.dtype,
            enable_low_rank_adaptation=adapted,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            transpose_batch_sequence=self.transpose_batch_sequence, name=name, **options,
        )  # fmt: skip

    def _with_norm(self, name, features, init, adapted, returns):
        """A projection that begins with the norm, if there is one."""
        first = batch_sequence_axes(self.transpose_batch_sequence)
        spread = batch_sequence_axes(self.transpose_batch_sequence, self.enable_sequence_parallel)
        return self._projection(
            LayerNormDenseGeneral, name, features, init, adapted,
            enable_layernorm=self.input_layernorm, layernorm_type=self.layernorm_type,
            epsilon=self.layernorm_epsilon, zero_centered_gamma=self.zero_centered_gamma,
            scale_axes=(W_NO_SHARD_AXES,), ln_bias_axes=(W_NO_SHARD_AXES,),
            return_layernorm_output=returns, layernorm_input_axes=(*spread, HIDDEN_AXES),
            dot_input_axes=(*first, HIDDEN_AXES),
        )  # fmt: skip

    def _project(self, inputs_q, inputs_kv, adapted):
        """(Queries, keys, values [.., heads channels], what the norm made)."""
        groups = self.num_gqa_groups or self.num_attention_heads
        inner, inner_kv = self.num_attention_heads * self.head_dim, groups * self.head_dim
        of_query, of_others = self._inits()
        alone = inputs_q is inputs_kv
        if self.fuse_qkv_params and alone and inner == inner_kv:
            init = stacked_init([of_query, of_others, of_others])
            made, normed = self._with_norm(
                "qkv", (3, inner), init, adapted, self.return_layernorm_output
            )(inputs_q)
            return *(made[..., number, :] for number in range(3)), normed
        returns = self.return_layernorm_output or alone
        query, normed = self._with_norm("query", (inner,), of_query, adapted, returns)(inputs_q)
        inputs_kv = normed if alone else inputs_kv
        options = {"input_axes": (*batch_sequence_axes(self.transpose_batch_sequence), HIDDEN_AXES)}
        if self.fuse_qkv_params:
            init = stacked_init([of_others] * 2)
            both = self._projection(DenseGeneral, "kv", (2, inner_kv), init, adapted, **options)
            both = both(inputs_kv)
            return query, both[..., 0, :], both[..., 1, :], normed
        key, value = (
            self._projection(DenseGeneral, name, (inner_kv,), of_others, adapted, **options)(
                inputs_kv
            )
            for name in ("key", "value")
        )
        return query, key, value, normed

    def _cached(self, key, value):
        """All keys and values so far, and the position of the first of these; None at `init`."""
        ready = self.has_variable("cache", "cached_key")
        old = [
            self.variable("cache", f"cached_{name}", jnp.zeros, one.shape, one.dtype)
            for name, one in (("key", key), ("value", value))
        ]
        index = self.variable("cache", "cache_index", lambda: jnp.zeros((), jnp.int32))
        return (*old, index) if ready else None

    def _append(self, cache, key, value):
        """Write keys and values behind those of the cache; return all, and where they begin."""
        old_key, old_value, index = cache
        dim = 0 if self.transpose_batch_sequence else 1
        start = index.value
        for old, new in ((old_key, key), (old_value, value)):
            old.value = lax.dynamic_update_slice_in_dim(old.value, new, start, dim)
        index.value = start + key.shape[dim]
        return old_key.value, old_value.value

    def _decode_mask(self, start, queries, keys):
        """Bool [1, 1, queries, keys]: True of keys that are not there yet, or out of the window."""
        distance = jnp.arange(keys) - (start + jnp.arange(queries))[:, None]
        hidden = distance > 0
        if self.window_size is not None and self.window_size[0] >= 0:
            hidden |= distance < -self.window_size[0]
        return hidden[None, None]

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_kv: Array,
        mask: Sequences = None,
        bias: Array | None = None,
        *,
        decode: bool = False,
        deterministic: bool = False,
    ) -> tuple[Array, Array | None]:
        """Return (result, what the norm made or None), of the shape and dtype of `inputs_q`.

        Parameters
        ----------
        inputs_q : Array
            [batch, queries, hidden].
        inputs_kv : Array
            [batch, keys, hidden]; the same object as `inputs_q` for attention to itself.
        mask : SequenceDescriptor or Array, optional
            As of `DotProductAttention`. While decoding a mask [batch, 1, queries, keys of the
            cache].
        bias : Array, optional
            [batch or 1, heads, queries, keys]; while decoding rows of all positions of the cache.
        decode : bool, default False
            Keys and values join the collection ``cache`` (``cached_key``, ``cached_value``,
            ``cache_index``), which `init` has made as long as its inputs; queries see all keys so
            far.
        deterministic : bool, default False
            Without dropout.
        """
        scope = _canonicalize_lora_scope(self.low_rank_adaptation_scope)
        query, key, value, normed = self._project(inputs_q, inputs_kv, scope.qkv_proj)
        query, key, value = (
            one.reshape(*one.shape[:2], -1, self.head_dim) for one in (query, key, value)
        )
        mask_type, window = self.attn_mask_type, self.window_size
        cache = self._cached(key, value) if decode else None
        start = 0 if cache is None else cache[2].value
        if self.enable_rotary_pos_emb:
            query, key = (
                rotary_pos_emb(one, self.rotary_pos_emb_windows, self.transpose_batch_sequence,
                               self.rotary_pos_emb_group_method, start)
                for one in (query, key)
            )  # fmt: skip
        if cache is not None:
            key, value = self._append(cache, key, value)
            dim = 0 if self.transpose_batch_sequence else 1
            hidden = self._decode_mask(start, query.shape[dim], key.shape[dim])
            mask = hidden if mask is None else hidden | mask.astype(bool)
            mask_type, window = "padding", None
            if bias is not None:
                bias = lax.dynamic_slice_in_dim(bias, start, query.shape[dim], 2)
        first = batch_sequence_axes(self.transpose_batch_sequence)
        query, key, value = (
            with_sharding_constraint_by_logical_axes(one, (*first, HEAD_AXES, HIDDEN_AXES))
            for one in (query, key, value)
        )
        x = DotProductAttention(
            head_dim=self.head_dim, num_attention_heads=self.num_attention_heads,
            num_gqa_groups=self.num_gqa_groups, attention_dropout=self.attention_dropout,
            attn_mask_type=mask_type, attn_bias_type=self.attn_bias_type,
            dropout_rng_name=self.dropout_rng_name, float32_logits=self.float32_logits,
            scale_factor=1.0 / math.sqrt(self.head_dim) if self.scale_attn_logits else 1.0,
            transpose_batch_sequence=self.transpose_batch_sequence, window_size=window,
            softmax_type=self.softmax_type,
        )(query, key, value, mask, bias, deterministic=deterministic)  # fmt: skip
        x = x.reshape(*x.shape[:2], -1)
        x = with_sharding_constraint_by_logical_axes(x, (*first, HIDDEN_TP_AXES))
        init = self._inits()[1]
        out = DenseGeneral(
            features=inputs_q.shape[-1], kernel_init=init, kernel_axes=(W_TP_AXES, W_FSDP_AXES),
            use_bias=self.use_bias, bias_init=self.bias_init, bias_axes=(W_NO_SHARD_AXES,),
            enable_low_rank_adaptation=scope.output_proj,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha, dtype=self.dtype,
            input_axes=(*first, HIDDEN_TP_AXES),
            transpose_batch_sequence=self.transpose_batch_sequence, name="out",
        )(x)  # fmt: skip
        return out, normed if self.return_layernorm_output else None
