# SPDX-License-Identifier: Apache-2.0
"""`TransformerLayer` and `RelativePositionBiases`, modules of Flax."""

import functools
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from transformer_engine.jax.flax import whole_layer
from transformer_engine.jax.flax.attention import (
    DotProductAttention,
    LoRAScope,
    MultiHeadAttention,
    Sequences,
    _canonicalize_lora_scope as _canonicalize_lora_scope,
    batch_sequence_axes,
    rotary_pos_emb,
)
from transformer_engine.jax.flax.layernorm_mlp import LayerNormMLP
from transformer_engine.jax.flax.linear import Initializer, LayerNorm
from transformer_engine.jax.flax.parameters import parameter
from transformer_engine.jax.sharding import (
    HIDDEN_AXES,
    HIDDEN_TP_AXES,
    W_FSDP_AXES,
    W_JOINED_AXES,
    W_NO_SHARD_AXES,
    W_TP_AXES,
    get_sharding_map_logic_axis_to_mesh_axis,
    with_sharding_constraint_by_logical_axes,
)

__all__ = [
    "DotProductAttention",
    "LoRAScope",
    "MultiHeadAttention",
    "RelativePositionBiases",
    "TransformerLayer",
    "TransformerLayerType",
    "extend_logical_axis_rules",
    "rotary_pos_emb",
]

Rules = Sequence[tuple[str, str | tuple[str, ...] | None]]


def extend_logical_axis_rules(rules: Rules) -> tuple:
    """Add the names of axes of this package to rules of Flax; call it within `autocast`.

    Parameters
    ----------
    rules : sequence of (str, str or None)
        Axis of the mesh by name of an axis, as `flax.linen.logical_axis_rules` takes them.

    Raises
    ------
    ValueError
        Rules send one of our names elsewhere.
    """
    ours = get_sharding_map_logic_axis_to_mesh_axis()
    for name, axis in rules:
        if name in ours and ours[name] != axis:
            raise ValueError(f"the rules have {name!r} on {axis!r}, autocast has {ours[name]!r}")
    given = {name for name, _ in rules}
    return *rules, *((name, axis) for name, axis in ours.items() if name not in given)


class RelativePositionBiases(nn.Module):
    """Biases of scores by the distance of key and query, in buckets that grow with it.

    Half of the buckets are for one distance each; the others up to `max_distance` are as wide in
    the logarithm.

    Attributes
    ----------
    num_buckets : int
        Buckets; half of them for keys behind the query where these have their own.
    max_distance : int
        Distance from which all share the last bucket.
    num_attention_heads : int
        Heads.
    embedding_init : initializer
        Of ``rel_embedding`` [heads, buckets].
    embedding_axes : tuple of str, default ("heads", "relpos_buckets")
        Names of its axes.
    dtype : dtype, default float32
        Of the parameter.
    """

    num_buckets: int
    max_distance: int
    num_attention_heads: int
    embedding_init: Initializer = nn.linear.default_embed_init
    embedding_axes: tuple[str, ...] = ("heads", "relpos_buckets")
    dtype: Any = jnp.float32

    def _buckets(self, queries, keys, bidirectional):
        """Bucket of each pair of query and key."""
        before = np.arange(queries)[:, None] - np.arange(keys)
        count, first = self.num_buckets, 0
        if bidirectional:
            count //= 2
            first = np.where(before < 0, count, 0)
            before = np.abs(before)
        before = np.maximum(before, 0)
        exact = count // 2
        # Distances that are exact powers belong to the wider bucket, whatever way logarithms round.
        growth = np.log(np.maximum(before, 1) / exact + np.finfo(np.float32).eps)
        wide = exact + growth / math.log(self.max_distance / exact) * (count - exact)
        wide = np.minimum(wide.astype(np.int32), count - 1)
        return first + np.where(before < exact, before, wide)

    @nn.compact
    def __call__(self, q_seqlen: int, k_seqlen: int, bidirectional: bool = True) -> Array:
        """Return biases [1, heads, queries, keys].

        Parameters
        ----------
        q_seqlen, k_seqlen : int
            Numbers of queries and keys.
        bidirectional : bool, default True
            Keys behind the query have buckets of their own; otherwise all have bucket 0.
        """
        shape = (self.num_attention_heads, self.num_buckets)
        table = parameter(self, "rel_embedding", self.embedding_init, self.embedding_axes, shape)
        return jnp.take(table, self._buckets(q_seqlen, k_seqlen, bidirectional), axis=1)[None]


class TransformerLayerType(Enum):
    """What a layer attends to."""

    ENCODER = "encoder"
    """Its input."""
    DECODER = "decoder"
    """Its input, and what an encoder has made."""


class TransformerLayer(nn.Module):
    """One layer of a Transformer: attention and MLP with norms, dropouts and residuals.

    x = x + dropout(attention(norm(x))); for a decoder x = x + dropout(attention of norm(x) to
    ``encoded``); x = x + dropout(mlp(norm(x))).

    Attributes
    ----------
    hidden_size : int, default 512
        Features of a token.
    mlp_hidden_size : int, default 2048
        Columns within the MLP.
    num_attention_heads : int, default 8
        Heads, of hidden_size / num_attention_heads channels.
    hidden_dropout : float, default 0.1
        Probability that an element of a branch is dropped.
    hidden_dropout_dims : tuple of int, default ()
        Dims along which all elements are dropped or none.
    intermediate_dropout : float, default 0.1
        Of the MLP, behind the activation.
    intermediate_dropout_dims : tuple of int, default ()
        Its dims.
    mha_kernel_init, mlp_kernel_init : initializer, optional
        By default variance scaling (1.0, fan_in), normal and truncated normal.
    mlp_activations, mlp_activation_params
        `activations` and `activation_params` of `LayerNormMLP`.
    apply_residual_connection_post_layernorm : bool, default False
        The residual is what the norm made, not its input.
    output_layernorm : bool, default False
        Normalize the result, not the input of the attention.
    float32_attention_logits : bool, default False
        Scores are fp32 either way.
    layer_type : TransformerLayerType
        ENCODER by default.
    self_attn_mask_type, self_attn_bias_type
        Of the attention to itself; that to ``encoded`` has the mask type "padding".
    enable_relative_embedding : bool, default True
        Whether scores have biases by distance.
    relative_embedding : Module, optional
        What makes them; by default `RelativePositionBiases` of 32 buckets up to 128.
    drop_path : float, default 0
        Probability that a branch is dropped for a sample.
    num_gqa_groups, layernorm_type, layernorm_epsilon, zero_centered_gamma, attention_dropout, \
dropout_rng_name, use_bias, bias_init, enable_rotary_pos_emb, rotary_pos_emb_windows, \
rotary_pos_emb_group_method, low_rank_adaptation_scope, low_rank_adaptation_dim, \
low_rank_adaptation_alpha, dtype, fuse_qkv_params, transpose_batch_sequence, \
enable_sequence_parallel, scale_attn_logits, scaled_query_init, window_size, softmax_type
        As of `MultiHeadAttention`.
    """

    hidden_size: int = 512
    mlp_hidden_size: int = 2048
    num_attention_heads: int = 8
    num_gqa_groups: int | None = None
    layernorm_type: str = "layernorm"
    layernorm_epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    hidden_dropout: float = 0.1
    hidden_dropout_dims: Sequence[int] = ()
    attention_dropout: float = 0.1
    intermediate_dropout: float = 0.1
    intermediate_dropout_dims: Sequence[int] = ()
    dropout_rng_name: str = "dropout"
    mha_kernel_init: Initializer | None = None
    mlp_kernel_init: Initializer | None = None
    mlp_activations: Sequence[str | Callable] = ("gelu",)
    mlp_activation_params: dict | None = None
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    apply_residual_connection_post_layernorm: bool = False
    output_layernorm: bool = False
    float32_attention_logits: bool = False
    layer_type: TransformerLayerType = TransformerLayerType.ENCODER
    self_attn_mask_type: str = "causal"
    self_attn_bias_type: str | None = None
    enable_relative_embedding: bool = True
    relative_embedding: nn.Module | None = None
    enable_rotary_pos_emb: bool = False
    rotary_pos_emb_windows: tuple[int, int] = (1, 10000)
    rotary_pos_emb_group_method: str = "consecutive"
    low_rank_adaptation_scope: str | LoRAScope = "none"
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    dtype: Any = jnp.float32
    drop_path: float = 0.0
    fuse_qkv_params: bool = True
    transpose_batch_sequence: bool = False
    enable_sequence_parallel: bool = False
    scale_attn_logits: bool = False
    scaled_query_init: bool = True
    window_size: tuple[int, int] | None = None
    softmax_type: str = "vanilla"

    def _attention(self, name, **options):
        """An attention module."""
        return MultiHeadAttention(
            head_dim=self.hidden_size // self.num_attention_heads,
            num_attention_heads=self.num_attention_heads, num_gqa_groups=self.num_gqa_groups,
            attention_dropout=self.attention_dropout, dropout_rng_name=self.dropout_rng_name,
            layernorm_type=self.layernorm_type, layernorm_epsilon=self.layernorm_epsilon,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            zero_centered_gamma=self.zero_centered_gamma, kernel_init=self.mha_kernel_init,
            use_bias=self.use_bias, bias_init=self.bias_init,
            enable_rotary_pos_emb=self.enable_rotary_pos_emb,
            rotary_pos_emb_windows=self.rotary_pos_emb_windows,
            rotary_pos_emb_group_method=self.rotary_pos_emb_group_method,
            low_rank_adaptation_scope=self.low_rank_adaptation_scope,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha, dtype=self.dtype,
            fuse_qkv_params=self.fuse_qkv_params,
            transpose_batch_sequence=self.transpose_batch_sequence,
            enable_sequence_parallel=self.enable_sequence_parallel,
            scale_attn_logits=self.scale_attn_logits, scaled_query_init=self.scaled_query_init,
            float32_logits=self.float32_attention_logits, window_size=self.window_size,
            softmax_type=self.softmax_type, name=name, **options,
        )  # fmt: skip

    def _mlp(self):
        """The MLP module."""
        first = batch_sequence_axes(self.transpose_batch_sequence)
        spread = batch_sequence_axes(self.transpose_batch_sequence, self.enable_sequence_parallel)
        scope = _canonicalize_lora_scope(self.low_rank_adaptation_scope)
        return LayerNormMLP(
            layernorm_type=self.layernorm_type, zero_centered_gamma=self.zero_centered_gamma,
            epsilon=self.layernorm_epsilon, intermediate_dim=self.mlp_hidden_size,
            activations=tuple(self.mlp_activations), activation_params=self.mlp_activation_params,
            intermediate_dropout_rng_name=self.dropout_rng_name,
            intermediate_dropout_rate=self.intermediate_dropout,
            intermediate_hidden_dropout_dims=self.intermediate_dropout_dims, dtype=self.dtype,
            return_layernorm_output=self.apply_residual_connection_post_layernorm,
            scale_axes=(W_NO_SHARD_AXES,), ln_bias_axes=(W_NO_SHARD_AXES,),
            kernel_init=self.mlp_kernel_init,
            kernel_axes_1=(W_FSDP_AXES, W_JOINED_AXES, W_TP_AXES),
            kernel_axes_2=(W_TP_AXES, W_FSDP_AXES), use_bias=self.use_bias,
            bias_init=self.bias_init, bias_axes_1=(W_JOINED_AXES, W_TP_AXES),
            bias_axes_2=(W_NO_SHARD_AXES,), enable_low_rank_adaptation=scope.mlp,
            low_rank_adaptation_dim=self.low_rank_adaptation_dim,
            low_rank_adaptation_alpha=self.low_rank_adaptation_alpha,
            layernorm_input_axes=(*spread, HIDDEN_AXES), dot_1_input_axes=(*first, HIDDEN_AXES),
            dot_2_input_axes=(*first, HIDDEN_TP_AXES),
            transpose_batch_sequence=self.transpose_batch_sequence, name="mlp",
        )  # fmt: skip

    def _bias(self, length, decode, max_decode_length):
        """Biases by distance; None where the layer has none."""
        if not self.enable_relative_embedding:
            return None
        module = self.relative_embedding or RelativePositionBiases(
            num_buckets=32, max_distance=128, num_attention_heads=self.num_attention_heads,
            embedding_init=nn.initializers.variance_scaling(1.0, "fan_avg", "uniform"),
            dtype=self.dtype, name="relpos_bias",
        )  # fmt: skip
        length = max_decode_length if decode and max_decode_length else length
        return module(length, length, self.layer_type is TransformerLayerType.ENCODER)

    @nn.compact
    def __call__(
        self,
        inputs: Array,
        encoded: Array | None = None,
        attention_mask: Sequences = None,
        encoder_decoder_mask: Sequences = None,
        deterministic: bool = False,
        decode: bool = False,
        max_decode_length: int | None = None,
    ) -> Array:
        """Return what the layer makes, of the shape and dtype of `inputs`.

        Parameters
        ----------
        inputs : Array
            [batch, sequence, hidden_size].
        encoded : Array, optional
            What an encoder has made, [batch, keys, hidden]; for a decoder.
        attention_mask, encoder_decoder_mask : SequenceDescriptor or Array, optional
            `mask` of `MultiHeadAttention`, for the attention to itself and to `encoded`.
        deterministic : bool, default False
            Without dropout.
        decode : bool, default False
            As of `MultiHeadAttention`.
        max_decode_length : int, optional
            Length of the cache, which biases by distance need while decoding.

        Raises
        ------
        ValueError
            A decoder without `encoded`; hidden states of another size.
        NotImplementedError
            Decoding in a decoder with a rotary embedding or a window, which are those of its
            attention to `encoded` too.
        """
        if inputs.shape[-1] != self.hidden_size or self.hidden_size % self.num_attention_heads:
            raise ValueError(f"inputs of {inputs.shape[-1]} features, hidden_size="
                             f"{self.hidden_size}, {self.num_attention_heads} heads")  # fmt: skip
        decoder = self.layer_type is TransformerLayerType.DECODER
        if decoder and encoded is None:
            raise ValueError("a decoder attends to what an encoder made: encoded is None")
        if decoder and decode and (self.enable_rotary_pos_emb or self.window_size is not None):
            raise NotImplementedError(
                "TransformerLayer(layer_type=DECODER): decode=True with enable_rotary_pos_emb or "
                "window_size, where attention to encoded reads the position of a query"
            )
        batch_dim, dim = (1, 0) if self.transpose_batch_sequence else (0, 1)
        axes = batch_sequence_axes(self.transpose_batch_sequence, self.enable_sequence_parallel)
        dropout = functools.partial(
            nn.Dropout, rng_collection=self.dropout_rng_name, deterministic=deterministic
        )
        samples = tuple(d for d in range(inputs.ndim) if d != batch_dim)

        def join(branch, residual, normed, drop_path):
            branch = dropout(self.hidden_dropout, self.hidden_dropout_dims)(branch)
            if drop_path:
                branch = dropout(self.drop_path, samples)(branch)
            post = self.apply_residual_connection_post_layernorm and normed is not None
            return branch + (normed if post else residual)

        inputs = with_sharding_constraint_by_logical_axes(inputs, (*axes, HIDDEN_AXES))
        alone = not (decoder or decode or self.enable_relative_embedding)
        if alone and whole_layer.runs(self, inputs, not deterministic):
            return whole_layer.run(self, inputs, not deterministic)
        bias = self._bias(inputs.shape[dim], decode, max_decode_length)
        x, normed = self._attention(
            "self_attention" if decoder else "attention",
            input_layernorm=not self.output_layernorm, attn_mask_type=self.self_attn_mask_type,
            attn_bias_type=self.self_attn_bias_type,
        )(inputs, inputs, attention_mask, bias, decode=decode,
          deterministic=deterministic)  # fmt: skip
        x = join(x, inputs, normed, True)
        if decoder:
            cross = self._attention("encoder_decoder_attention", attn_mask_type="padding",
                                    attn_bias_type="no_bias")  # fmt: skip
            y, normed = cross(x, encoded, encoder_decoder_mask, deterministic=deterministic)
            x = join(y, x, normed, False)
        x = with_sharding_constraint_by_logical_axes(x, (*axes, HIDDEN_AXES))
        z, normed = self._mlp()(x, deterministic=deterministic)
        z = join(z, x, normed, True)
        if not self.output_layernorm:
            return z
        z = with_sharding_constraint_by_logical_axes(z, (*axes, HIDDEN_AXES))
        return LayerNorm(
            layernorm_type=self.layernorm_type, zero_centered_gamma=self.zero_centered_gamma,
            epsilon=self.layernorm_epsilon, scale_axes=(W_NO_SHARD_AXES,),
            bias_axes=(W_NO_SHARD_AXES,), dtype=self.dtype,
            transpose_batch_sequence=self.transpose_batch_sequence, name="output_layernorm",
        )(z)  # fmt: skip
