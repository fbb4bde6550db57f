# SPDX-License-Identifier: Apache-2.0
"""Attention: `fused_attn`, the kinds of masks, biases and layouts that it takes.

What is computed is in `definitions/attention.py`, what a sequence is in `sequences.py`, and how
sequences over several devices attend in `context_parallel.py`.
"""

import warnings
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from transformer_engine.jax.attention_calls import attend
from transformer_engine.jax.context_parallel import Asked, attend_over, spread_over
from transformer_engine.jax.definitions.attention import Limits, Problem
from transformer_engine.jax.sequences import (
    ReorderStrategy,
    SequenceDescriptor,
    get_seqlens_and_offsets,
    inverse_reorder_causal_load_balancing,
    make_swa_mask,
    packed_rows,
    reorder_causal_load_balancing,
    run_length_fill,
)

__all__ = [
    "AttnBiasType",
    "AttnMaskType",
    "AttnSoftmaxType",
    "CPStrategy",
    "QKVFormat",
    "QKVLayout",
    "ReorderStrategy",
    "SequenceDescriptor",
    "canonicalize_attn_mask_type",
    "fused_attn",
    "get_seqlens_and_offsets",
    "inverse_reorder_causal_load_balancing",
    "is_fused_attn_kernel_available",
    "make_swa_mask",
    "reorder_causal_load_balancing",
    "run_length_fill",
]


class AttnBiasType(Enum):
    """Whether a bias joins the scores, and when."""

    NO_BIAS = "no_bias"
    PRE_SCALE_BIAS = "pre_scale_bias"
    """(q k^T + bias) * scale."""
    POST_SCALE_BIAS = "post_scale_bias"
    """q k^T * scale + bias."""


class AttnMaskType(Enum):
    """Which keys a query sees."""

    NO_MASK = "no_mask"
    PADDING_MASK = "padding"
    CAUSAL_MASK = "causal"
    PADDING_CAUSAL_MASK = "padding_causal"
    CAUSAL_BOTTOM_RIGHT_MASK = "causal_bottom_right"
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = "padding_causal_bottom_right"

    def is_causal(self) -> bool:
        """Whether a query sees no key behind its own."""
        return "causal" in self.value

    def is_padding(self) -> bool:
        """Whether sequences have lengths of their own."""
        return "padding" in self.value

    def is_bottom_right(self) -> bool:
        """Whether the last query, not the first, stands beside the key of its rank."""
        return "bottom_right" in self.value


class AttnSoftmaxType(Enum):
    """What the sum of a softmax has besides the keys."""

    VANILLA_SOFTMAX = "vanilla"
    OFF_BY_ONE_SOFTMAX = "off_by_one"
    """One score of 0."""
    LEARNABLE_SOFTMAX = "learnable"
    """One score for each head, a parameter."""

    @classmethod
    def from_str(cls, softmax_type: str) -> "AttnSoftmaxType":
        """Return the type of this name; ValueError where there is none."""
        return cls(softmax_type)


class QKVFormat(Enum):
    """Order of the dims of queries, keys and values."""

    SBHD = "sbhd"
    BSHD = "bshd"
    THD = "thd"
    """As BSHD, with several sequences in a row."""


class QKVLayout(Enum):
    """Format, and how many tensors queries, keys and values are."""

    BS3HD = "bs3hd"
    BSHD_BS2HD = "bshd_bs2hd"
    BSHD_BSHD_BSHD = "bshd_bshd_bshd"
    T3HD = "t3hd"
    THD_T2HD = "thd_t2hd"
    THD_THD_THD = "thd_thd_thd"

    def get_qkv_format(self) -> QKVFormat:
        """Return the order of dims."""
        return QKVFormat.THD if self.is_thd() else QKVFormat.BSHD

    def is_qkvpacked(self) -> bool:
        """Whether one tensor [..., 3, heads, channels] has all."""
        return "3" in self.value

    def is_kvpacked(self) -> bool:
        """Whether one tensor [..., 2, heads, channels] has keys and values."""
        return "2" in self.value

    def is_separate(self) -> bool:
        """Whether each is a tensor."""
        return not (self.is_qkvpacked() or self.is_kvpacked())

    def is_thd(self) -> bool:
        """Whether a row holds several sequences."""
        return self.value.startswith("t")


class CPStrategy(Enum):
    """How sequences that are spread over devices attend to each other."""

    DEFAULT = 0
    ALL_GATHER = 1
    RING = 2


def canonicalize_attn_mask_type(attn_mask_type: str) -> AttnMaskType:
    """Return the mask type of this name, whose words may stand in any order.

    Parameters
    ----------
    attn_mask_type : str
        A value of `AttnMaskType`, or "causal_padding" and the like.

    Raises
    ------
    ValueError
        No mask type has this name.
    """
    words = attn_mask_type.removesuffix("_mask").replace("bottom_right", "bottomright")
    for known in AttnMaskType:
        own = known.value.removesuffix("_mask").replace("bottom_right", "bottomright")
        if sorted(words.split("_")) == sorted(own.split("_")):
            return known
    names = ", ".join(known.value for known in AttnMaskType)
    raise ValueError(f"attn_mask_type={attn_mask_type!r} is none of {names}")


def is_fused_attn_kernel_available(
    is_training: bool,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: QKVLayout,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    softmax_type: AttnSoftmaxType,
    dropout_probability: float,
    q_num_heads: int,
    kv_num_heads: int,
    q_max_seqlen: int,
    kv_max_seqlen: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size: tuple[int, int] | None = None,
    **others: Any,
) -> bool:
    """Say whether `fused_attn` takes such a call.

    It takes all but packed sequences without lengths, dtypes that differ, and heads that do not
    divide among those of the keys. Sizes, which `others` may add to, change nothing.
    """
    packed_alone = qkv_layout.is_thd() and not attn_mask_type.is_padding()
    return q_dtype == kv_dtype and not q_num_heads % kv_num_heads and not packed_alone


def _separate(qkv, layout):
    """Queries, keys and values as three tensors."""
    wanted = 1 if layout.is_qkvpacked() else 2 if layout.is_kvpacked() else 3
    if len(qkv) != wanted:
        raise ValueError(f"the layout {layout.value} is of {wanted} tensors, got {len(qkv)}")
    if wanted == 3:
        return qkv
    *queries, packed = qkv
    count = 4 - wanted
    if packed.ndim != 5 or packed.shape[2] != count:
        shape = f"[batch, length, {count}, heads, channels]"
        raise ValueError(f"a packed tensor is {shape}, got {list(packed.shape)}")
    return *queries, *(packed[:, :, number] for number in range(count))


def _check_shapes(q, k, v, bias, bias_type):
    for name, one in (("queries", q), ("keys", k), ("values", v)):
        if one.ndim != 4:
            raise ValueError(f"{name} are [batch, length, heads, channels], got {list(one.shape)}")
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        shapes = f"queries {list(q.shape)}, keys {list(k.shape)}, values {list(v.shape)}"
        raise ValueError(f"{shapes} do not fit together")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"{k.shape[2]} heads of keys do not divide {q.shape[2]} of queries")
    if (bias is None) != (bias_type is AttnBiasType.NO_BIAS):
        raise ValueError(f"{bias_type} with {'no bias' if bias is None else 'a bias'}")
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    if bias is not None and (
        bias.ndim != 4 or any(b not in (1, n) for b, n in zip(bias.shape, full, strict=True))
    ):
        raise ValueError(f"a bias of {list(bias.shape)} does not broadcast to {list(full)}")


def _limits(sequences, mask_type, layout, batch, lengths, most):
    """What of the sequences, `most` a row, a mask of this type reads."""
    if not mask_type.is_padding():
        if layout.is_thd():
            raise ValueError(f"{layout.value} has sequences of their own lengths: the mask type is "
                             f"a padding one, not {mask_type.value}")  # fmt: skip
        return Limits(None, None)
    if sequences is None:
        raise ValueError(f"the mask type {mask_type.value} needs a SequenceDescriptor or a mask")
    if isinstance(sequences, SequenceDescriptor):
        sequences = sequences.over(batch, lengths)
        segments, alone = sequences.segments(lengths), sequences.lengths(layout.is_thd())
        apart = alone or sequences.is_reordered
        packed = None if apart else packed_rows(*segments, sequences.count(most))
        return Limits(segments, None, alone, packed)
    if isinstance(sequences, Limits):
        return sequences
    warnings.warn("a mask for fused_attn is deprecated: pass a SequenceDescriptor",
                  DeprecationWarning, stacklevel=3)  # fmt: skip
    return limits_of_mask(sequences)


def limits_of_mask(mask: jax.Array) -> Limits:
    """Make what `fused_attn` takes for its sequences of a mask [batch, 1, queries, keys]."""
    if mask.ndim not in (3, 4):
        raise ValueError(f"a mask is [batch, 1, queries, keys], got {list(mask.shape)}")
    return Limits(None, (mask[:, None] if mask.ndim == 3 else mask).astype(bool))


def _dropout_key(seed, rate):
    """The first key of `seed`: programs pass one for each device."""
    if not rate:
        return None
    if seed is None:
        raise ValueError(f"dropout_probability={rate} needs a seed")
    if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        return seed.reshape(-1)[0]
    return seed.reshape(-1, seed.shape[-1])[0]


def _sink(softmax_type, offset, heads):
    """Scores of no key, fp32 [heads]; None where there are none."""
    if (offset is not None) != (softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX):
        given = "no softmax_offset" if offset is None else "a softmax_offset"
        raise ValueError(f"{softmax_type} with {given}")
    if softmax_type is AttnSoftmaxType.VANILLA_SOFTMAX:
        return None
    if offset is None:
        return jnp.zeros(heads, jnp.float32)
    return offset.astype(jnp.float32).reshape(heads)


def fused_attn(
    qkv: tuple[jax.Array, ...],
    bias: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | Limits | jax.Array | None,
    seed: jax.Array | None,
    attn_bias_type: AttnBiasType,
    attn_mask_type: AttnMaskType,
    qkv_layout: QKVLayout,
    softmax_type: AttnSoftmaxType,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: tuple[int, int] | None = None,
    context_parallel_strategy: CPStrategy = CPStrategy.DEFAULT,
    context_parallel_causal_load_balanced: bool = False,
    context_parallel_axis: str = "",
    context_checkpoint_name: str = "context",
    softmax_offset: jax.Array | None = None,
    stripe_size: int | None = None,
    score_mod: Any = None,
    return_max_logit: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention: softmax(q k^T scale + bias) v.

    Scores and their softmax are fp32. Gradients are those of queries, keys, values, `bias` and
    `softmax_offset`.

    Parameters
    ----------
    qkv : tuple of jax.Array
        As `qkv_layout` says: queries [batch, queries, heads, channels]; keys and values [batch,
        keys, groups, channels], where `groups` divides `heads`; packed ones are [batch, length, 2
        or 3, heads, channels].
    bias : jax.Array, optional
        [batch or 1, heads or 1, queries or 1, keys].
    sequence_descriptor : SequenceDescriptor or jax.Array, optional
        Lengths of sequences, for the padding masks; other masks ignore it. An array (deprecated)
        is a mask [batch, 1, queries, keys] in which 1 hides a key.
    seed : jax.Array, optional
        Random key of the dropout; of several (one for each device) the first.
    attn_bias_type : AttnBiasType
        When the bias joins the scores.
    attn_mask_type : AttnMaskType
        Which keys a query sees.
    qkv_layout : QKVLayout
        Layout of `qkv`.
    softmax_type : AttnSoftmaxType
        What the sum of the softmax has besides the keys.
    scaling_factor : float
        What scores are multiplied by.
    dropout_probability : float
        Probability that a probability is dropped, where `is_training`.
    is_training : bool
        Whether there is dropout.
    max_segments_per_seq : int, default 1
        Sequences of a row at most, where segments are given; lengths say how many there are.
    window_size : tuple of int, optional
        Keys before and after a query's own that it sees; -1 is all of them.
    context_parallel_strategy : CPStrategy, default DEFAULT
        What goes from device to device where sequences are spread: by default `ALL_GATHER`.
    context_parallel_causal_load_balanced : bool, default False
        The tokens of all arrays have been dealt out by `reorder_causal_load_balancing`: packed rows
        (THD) in stripes, others in chunks.
    context_parallel_axis : str, default ""
        Axis of the mesh that sequences are spread over; by default `cp_resource` of the
        `MeshResource` in force. Nothing is spread where it has one device.
    context_checkpoint_name : str, default "context"
        Name of the output for `jax.checkpoint` policies.
    softmax_offset : jax.Array, optional
        Score of no key, [1, heads, 1, 1], of the learnable softmax.
    stripe_size : int, optional
        Tokens of a stripe, 1 by default.
    score_mod : optional
        Not there yet.
    return_max_logit : bool, default False
        Return (output, largest score of each head, fp32 [heads]).

    Returns
    -------
    jax.Array
        [batch, queries, heads, channels] in the dtype of the queries; 0 for queries without keys.

    Raises
    ------
    ValueError
        Arguments that do not fit together.
    NotImplementedError
        `score_mod`; what has no way over several devices (`context_parallel.spread_over`).
    """
    if score_mod is not None:
        raise NotImplementedError("fused_attn: score_mod")
    q, k, v = _separate(qkv, qkv_layout)
    _check_shapes(q, k, v, bias, attn_bias_type)
    rate = float(dropout_probability) if is_training else 0.0
    problem = Problem(
        scale=float(scaling_factor),
        causal=attn_mask_type.is_causal(),
        bottom_right=attn_mask_type.is_bottom_right(),
        window=(-1, -1) if window_size is None else tuple(window_size),
        bias_before_scale=attn_bias_type is AttnBiasType.PRE_SCALE_BIAS,
        dropout=rate,
        max_logit=return_max_logit,
    )
    lengths = (q.shape[1], k.shape[1])
    limits = _limits(
        sequence_descriptor, attn_mask_type, qkv_layout, q.shape[0], lengths, max_segments_per_seq
    )
    sink = _sink(softmax_type, softmax_offset, q.shape[2])
    key = _dropout_key(seed, rate)
    described = isinstance(sequence_descriptor, SequenceDescriptor)
    asked = Asked(
        axis=context_parallel_axis,
        ring=context_parallel_strategy is CPStrategy.RING,
        balanced=context_parallel_causal_load_balanced,
        striped=qkv_layout.is_thd(),
        stripe=stripe_size or 1,
        by_name=bool(context_parallel_axis)
        or context_parallel_causal_load_balanced
        or context_parallel_strategy is not CPStrategy.DEFAULT,
    )
    most = sequence_descriptor.count(max_segments_per_seq) if described else 1
    spread = spread_over(asked, problem, (q, k, v), bias, limits, most)
    if spread is None:
        output, max_logit = attend(problem, q, k, v, bias, sink, limits, key)
    else:
        tokens = spread.tokens(limits, described and sequence_descriptor.is_reordered, lengths)
        output, max_logit = attend_over(problem, spread, q, k, v, sink, tokens, key)
    output = checkpoint_name(output, context_checkpoint_name)
    return (output, max_logit) if return_max_logit else output
