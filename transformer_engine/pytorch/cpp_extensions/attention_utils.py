# SPDX-License-Identifier: Apache-2.0
"""What programs import from ``attention.dot_product_attention.utils``.

`get_attention_backend` says by which backend an attention would run. The others are about lengths
of sequences, masks, layouts and windows: the modules behind `DotProductAttention` under the names
that programs of NVIDIA Transformer Engine use. Nothing in this library calls them.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.attention import fp8, masks
from transformer_engine.pytorch.attention.backends import (
    BIAS_TYPES,
    SOFTMAX_TYPES,
    kind_of_call,
    refusals,
)
from transformer_engine.pytorch.attention.core import DotProductAttention
from transformer_engine.pytorch.attention.masks import CallKind
from transformer_engine.pytorch.attention.problem import (
    MIXED,
    AttentionOptions,
    Heads,
    check_format,
    layout_parts,
)
from transformer_engine.pytorch.attention.scores import checked_score_mod
from transformer_engine.pytorch.cpp_extensions.fused_attn import FusedAttnBackend
from transformer_engine.pytorch.module.operands import DTYPES
from transformer_engine.pytorch.module.parameters import one_of, refuse_options
from transformer_engine.pytorch.torchside.device import accelerator

__all__ = [
    "AttentionLogging",
    "AttentionParams",
    "check_set_window_size",
    "get_attention_backend",
    "get_cu_seqlens",
    "get_cu_seqlens_and_indices",
    "get_full_cu_seqlens",
    "get_indices",
    "get_padding_mask",
    "get_qkv_format",
    "get_qkv_layout",
    "maybe_contiguous",
    "no_op_logger",
]

# ---- backends ------------------------------------------------------------------------------------


FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


class AttentionLogging:
    """The logger of `get_attention_backend`: what it chose at INFO, why not others at DEBUG.

    Its level is that of Python's `logging`; no variable of the environment sets it.
    """

    fa_logger = logging.getLogger("DotProductAttention")
    _is_logging_setup = False

    @staticmethod
    def setup_logging() -> None:
        """Let the logger write to stderr, once."""
        if not AttentionLogging._is_logging_setup:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(levelname)s %(name)s] %(message)s"))
            AttentionLogging.fa_logger.addHandler(handler)
            AttentionLogging._is_logging_setup = True


no_op_logger = logging.Logger("DotProductAttention")
"""A logger that writes nothing, whatever it is told."""
no_op_logger.disabled = True


@dataclass
class AttentionParams:
    """Arguments of a question about attention: sizes, layout, mask, bias and the rest.

    The shapes are those of `DotProductAttention`: `alibi_slopes_shape` [heads] or [batch, heads],
    `core_attention_bias_shape` one of "bhss", "1hss", "b1ss", "11ss", "111s", or the four sizes.
    `qkv_layout` is a name as "sbhd_sbhd_sbhd", "bs3hd", "thd_bshd_bshd" or
    "paged_kv_bshd_bshd_bshd" (`problem.LAYOUTS`). With `fp8` the attention is in a region of
    ``fp8_meta["recipe"]``, or where None of a `DelayedScaling` that attends in FP8; without, in
    none, whichever is in force. A call of a padding type is one with lengths of its sequences.

    `qkv_dtype` is a dtype of FP8 where what is given is: quantized tensors (`qkv_type` is their
    class), or any in an attention in FP8; `nominal_dtype` is then what they stand for, bf16 where
    None. `num_tokens_q` and `num_tokens_kv` are the tokens of packed sequences, all of full length
    where 0. With `inference_params` the keys are those of its cache. `fp8_output`,
    `checkpoint_core_attention`, `num_splits`, `cuda_graph` and `softmax_scale` change no answer.
    """

    qkv_type: type = torch.Tensor
    qkv_dtype: torch.dtype = torch.bfloat16
    nominal_dtype: torch.dtype | None = None
    qkv_layout: str = "sbh3d"
    batch_size: int = 1
    num_heads: int = 16
    num_gqa_groups: int = 16
    max_seqlen_q: int = 128
    max_seqlen_kv: int = 128
    num_tokens_q: int = 0
    num_tokens_kv: int = 0
    head_dim_qk: int = 64
    head_dim_v: int = 64
    attn_mask_type: str = "no_mask"
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = True
    softcap: float = 0.0
    alibi_slopes_shape: Any = None
    core_attention_bias_type: str = "no_bias"
    core_attention_bias_shape: Any = None
    core_attention_bias_requires_grad: bool = True
    pad_between_seqs: bool = False
    attention_dropout: float = 0.0
    context_parallel: bool = False
    cp_comm_type: str = "p2p"
    cp_size: int = 1
    cp_size_a2a: int = 1
    deterministic: bool = False
    is_training: bool = True
    fp8: bool = False
    fp8_meta: Any = None
    inference_params: Any = None
    softmax_type: str = "vanilla"
    return_max_logit: bool = False
    cuda_graph: bool = False
    num_splits: int | None = 1
    softmax_scale: float = 1.0
    fp8_output: bool = False
    checkpoint_core_attention: bool = False
    has_score_mod: bool = False
    has_score_mod_bprop: bool = False


def _dtype_of(params: AttentionParams) -> torch.dtype:
    """The dtype of queries, keys and values as attention sees them; TypeError: it takes none."""
    dtype = params.qkv_dtype
    if dtype in FP8_DTYPES and (params.fp8 or hasattr(params.qkv_type, "_TE_QUANTIZED")):
        dtype = torch.bfloat16 if params.nominal_dtype is None else params.nominal_dtype
    cache = params.inference_params
    if dtype not in DTYPES or (cache is not None and cache.dtype is not dtype):
        expected = (
            "torch.float32, torch.float16 or torch.bfloat16" if cache is None else cache.dtype
        )
        raise TypeError(f"get_attention_backend: qkv_dtype={params.qkv_dtype}, expected {expected}")
    return dtype


def _call_kind_of(params: AttentionParams) -> CallKind:
    """The kind of call that is described; raises what `DotProductAttention` would."""
    refuse_options(
        "get_attention_backend", context_parallel=(params.context_parallel, False),
        cp_size=(params.cp_size, 1), cp_size_a2a=(params.cp_size_a2a, 1),
    )  # fmt: skip
    like: dict[str, Any] = {"dtype": _dtype_of(params), "device": "meta"}
    bias_type = params.core_attention_bias_type
    mods = [repr if asked else None for asked in (params.has_score_mod, params.has_score_mod_bprop)]
    modified = checked_score_mod(*mods, None, None, bias_type) is not None
    module = DotProductAttention(
        params.num_heads, (params.head_dim_qk, params.head_dim_v), params.num_gqa_groups,
        params.attention_dropout, attn_mask_type=params.attn_mask_type,
        softmax_type=params.softmax_type, return_max_logit=params.return_max_logit,
        softcap=params.softcap,
    )  # fmt: skip
    batch, queries, keys = params.batch_size, params.max_seqlen_q, params.max_seqlen_kv
    bias, slopes, mask, sums = None, None, None, None
    if bias_type in ("pre_scale_bias", "post_scale_bias"):
        shape = params.core_attention_bias_shape or "1hss"
        if isinstance(shape, str):
            full = batch, params.num_heads, queries, keys
            shape = tuple(1 if c == "1" else n for c, n in zip(shape, full, strict=True))
        trains = params.is_training and params.core_attention_bias_requires_grad
        bias = torch.empty(shape, **like, requires_grad=trains)
    if params.alibi_slopes_shape is not None:
        slopes = torch.empty(params.alibi_slopes_shape, device="meta")
    if params.attn_mask_type == "arbitrary":
        mask = torch.empty(batch, 1, queries, keys, **like)
    packed = layout_parts(params.qkv_layout)[0] == "thd"
    if packed or masks.mask_type(params.attn_mask_type).padding:
        sums = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    options = AttentionOptions(
        mask, window_size=params.window_size, bottom_right_diagonal=params.bottom_right_diagonal,
        core_attention_bias_type=bias_type, core_attention_bias=bias,
        alibi_slopes=slopes, pad_between_seqs=params.pad_between_seqs,
        inference_params=params.inference_params, cu_seqlens_q=sums, cu_seqlens_kv=sums,
        max_seqlen_q=queries, max_seqlen_kv=keys,
    )  # fmt: skip
    of_queries, of_keys = (batch, queries), (batch, keys)
    if packed:
        of_queries = (params.num_tokens_q or batch * queries,)
        of_keys = (params.num_tokens_kv or batch * keys,)
    shapes = (
        (*of_queries, params.num_heads, params.head_dim_qk),
        (*of_keys, params.num_gqa_groups, params.head_dim_qk),
        (*of_keys, params.num_gqa_groups, params.head_dim_v),
    )
    given = Heads(tuple(torch.empty(shape, **like) for shape in shapes))
    device = torch.device(accelerator())
    form = "thd" if packed else "bshd"
    call_kind = kind_of_call(module, given, options, form, modified, device)
    if params.deterministic:
        switches = call_kind.switches._replace(nondeterministic=False)
        call_kind = call_kind._replace(switches=switches)
    recipe = _recipe_of(params, module)
    in_fp8 = recipe is not None
    return call_kind._replace(
        fp8=in_fp8,
        fp8_dropout=in_fp8 and params.is_training and params.attention_dropout > 0.0,
        unsupported_fp8=fp8.unsupported_name(recipe),
    )


def _recipe_of(params: AttentionParams, module: DotProductAttention) -> Any:
    """The recipe that the attention runs by; None: in high precision."""
    if not params.fp8:
        return None
    meta = {"recipe": DelayedScaling(fp8_dpa=True)} if params.fp8_meta is None else params.fp8_meta
    return fp8.recipe_of(meta["recipe"], module)


def get_attention_backend(
    attention_params: AttentionParams | None = None,
) -> tuple[bool, Any, bool, Any, bool, list[bool]]:
    """Which kind of backend runs an attention, and which ones could, on the current device.

    That is CUDA where there is a device, else the CPU. The answers are those of
    `te.explain_attention`, whose backends count as two kinds: "native" and "sdpa" are fused,
    "unfused" is unfused. flash-attn is never used.

    Parameters
    ----------
    attention_params : AttentionParams, optional
        What is asked about; where None, what all its defaults say.

    Returns
    -------
    tuple
        (flash-attn is used, its version: None, a fused backend is used, 1 for the library's own (in
        FP8 2) and None for torch's or none, the unfused one is used, [flash-attn, a fused one, the
        unfused one could be used]).

    Raises
    ------
    ValueError
        A mask type, layout, bias type or softmax type that there is not. For values that do not go
        together, what no backend runs, or is not built, there is no error, and nothing that could
        be used: `DotProductAttention` raises there.
    """
    params = AttentionParams() if attention_params is None else attention_params
    masks.mask_type(params.attn_mask_type)
    layout_parts(params.qkv_layout)
    bias_type = params.core_attention_bias_type
    one_of("get_attention_backend", BIAS_TYPES, core_attention_bias_type=bias_type)
    one_of("get_attention_backend", SOFTMAX_TYPES, softmax_type=params.softmax_type)
    try:
        call_kind = _call_kind_of(params)
    except (NotImplementedError, TypeError, ValueError) as error:
        AttentionLogging.fa_logger.info("no backend: %s", error)
        return False, None, False, None, False, [False, False, False]
    found = refusals(call_kind)
    for name, refusal in found.items():
        if refusal is not None:
            AttentionLogging.fa_logger.debug("not %s: %s", name, refusal)
    runs = [name for name, refusal in found.items() if refusal is None]
    chosen = runs[0] if runs else None
    AttentionLogging.fa_logger.info("backend: %s", chosen)
    fused = [name for name in runs if name in ("native", "sdpa")]
    own = FusedAttnBackend.FP8 if call_kind.fp8 else FusedAttnBackend.F16_arbitrary_seqlen
    number = own if chosen == "native" else None
    available = [False, bool(fused), "unfused" in runs]
    return False, None, chosen in fused, number, chosen == "unfused", available


# ---- tensors and windows -------------------------------------------------------------------------


def maybe_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a contiguous copy where its last dim has another stride than 1."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def check_set_window_size(
    attn_mask_type: str, window_size: tuple[int, int] | None = None
) -> tuple[int, int]:
    """The window (left, right) that attention applies with a mask type.

    (-1, 0) for causal types without one, (-1, -1) for others. ValueError for a window that does not
    go with the type.
    """
    return masks.effective_window(window_size, masks.mask_type(attn_mask_type))


# ---- lengths -------------------------------------------------------------------------------------


def _unmasked(mask: Any) -> Tensor:
    """Which tokens a padding mask [batch, 1, 1, length] (True: masked out) leaves, two dims."""
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or mask.dim() != 4:
        found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise ValueError(f"mask: {found}, expected torch.bool [batch, 1, 1, length]")
    if tuple(mask.shape[1:3]) != (1, 1):
        raise ValueError(f"mask: shape {tuple(mask.shape)}, expected [batch, 1, 1, length]")
    return ~mask[:, 0, 0]


def _sums(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def get_cu_seqlens(mask: Tensor) -> Tensor:
    """Sums of the lengths [batch + 1] int32 of a padding mask [batch, 1, 1, length] bool.

    True: masked out. ValueError for another mask.
    """
    return _sums(_unmasked(mask).sum(1))


def get_full_cu_seqlens(batch_size: int, max_seqlen: int, device: torch.device) -> Tensor:
    """Sums of the lengths [batch + 1] int32 of sequences that all have `max_seqlen` tokens."""
    return torch.arange(batch_size + 1, dtype=torch.int32, device=device) * max_seqlen


def get_cu_seqlens_and_indices(mask: Tensor) -> tuple[Tensor, Tensor]:
    """`get_cu_seqlens`, and which tokens of the padded batch are none of padding.

    The second is [batch * length, 1, 1] int64: positions in the flattened batch, in order, and
    behind them batch * length in place of each token of padding, so that its size says nothing of
    the lengths.
    """
    unmasked = _unmasked(mask)
    return get_cu_seqlens(mask), _positions(unmasked)


def get_indices(max_seqlen: int, cu_seqlens: Tensor) -> Tensor:
    """The second result of `get_cu_seqlens_and_indices`, of sums of lengths [batch + 1]."""
    row = torch.arange(max_seqlen, device=cu_seqlens.device)
    return _positions(row < cu_seqlens.diff()[:, None])


def _positions(unmasked: Tensor) -> Tensor:
    count = unmasked.numel()
    positions = torch.arange(count, device=unmasked.device)
    found = torch.where(unmasked.flatten(), positions, count)
    return found.sort().values[:, None, None]


def get_padding_mask(
    batch_size: int,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    attention_type: str = "self",
) -> Any:
    """The padding mask [batch, 1, 1, length] bool (True: masked out) of sums of lengths.

    For `attention_type` "cross" a pair, of queries and of keys; for "self" that of the queries. A
    length that is not given is that of the longest sequence, for which the host waits. TypeError
    for sums that are missing, ValueError for those of another shape or dtype than [batch + 1]
    int32, and for sizes that are none.
    """
    name = "get_padding_mask"
    one_of(name, ("self", "cross"), attention_type=attention_type)
    sizes = {"batch_size": batch_size, "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv}
    for label, size in sizes.items():
        optional = size is None and label != "batch_size"
        if not optional and (not hasattr(size, "__index__") or size < 0):
            raise ValueError(f"{name}: {label}={size!r}, expected a number from 0")
    of_queries = _length_mask(cu_seqlens_q, batch_size, max_seqlen_q, "cu_seqlens_q")
    if attention_type == "self":
        return of_queries
    return of_queries, _length_mask(cu_seqlens_kv, batch_size, max_seqlen_kv, "cu_seqlens_kv")


def _length_mask(sums: Any, batch: int, longest: int | None, label: str) -> Tensor:
    lengths = masks.sequence_lengths(sums, batch, label)
    if longest is None:
        longest = int(lengths.max()) if batch > 0 else 0
    return masks.padding_mask(lengths, longest)


# ---- layouts -------------------------------------------------------------------------------------


def get_qkv_format(
    qkv_layout: str = "bshd_bshd_bshd", inference_params: Any = None
) -> tuple[str, str, str]:
    """Formats of a layout: as a call says it, of the queries, and of keys and values.

    With `inference_params` keys and values are those of its cache.
    """
    from_cache = "paged_kv_" if getattr(inference_params, "is_paged", False) else ""
    prefix = from_cache if not qkv_layout.startswith("paged_kv_") else ""
    of_queries, of_keys = layout_parts(prefix + qkv_layout)
    both = of_queries if of_queries == of_keys else f"{of_queries}_2{of_keys}"
    return both, of_queries, of_keys


def get_qkv_layout(
    q: Tensor, k: Tensor, v: Tensor, qkv_format: str = "sbhd", inference_params: Any = None
) -> tuple[str, Tensor, Tensor, Tensor, str, str]:
    """How queries, keys and values lie in memory.

    Parameters
    ----------
    q, k, v : Tensor
        [s, b, heads, channels] (sbhd), [b, s, heads, channels] (bshd) or [t, heads, channels]
        (thd).
    qkv_format : str, default "sbhd"
        One of these, or a mixed one as "thd_2bshd".
    inference_params : InferenceParams, optional
        Its cache has the keys and values.

    Returns
    -------
    tuple
        (layout, q, k, v, format of the queries, format of keys and values). Layouts are those of
        `AttentionParams`: "sb3hd" or "sbh3d" where the three are views of one tensor that counts
        them before or behind its heads, "sbhd_sb2hd" or "sbhd_sbh2d" where keys and values are,
        else "sbhd_sbhd_sbhd". Tensors whose channels are apart are copied.

    Raises
    ------
    ValueError
        A format that there is not.
    """
    check_format(qkv_format, mixed=True)
    q, k, v = map(maybe_contiguous, (q, k, v))
    if qkv_format in MIXED:
        of_queries, of_keys = qkv_format.split("_2")
        layout = f"{of_queries}_{of_keys}_{of_keys}"
    else:
        of_queries = of_keys = qkv_format
        lead = qkv_format[:-2]
        layout = "_".join([qkv_format] * 3)
        three, two = _joined((q, k, v)), _joined((k, v))
        if three:
            layout = lead + three
        elif two:
            layout = f"{qkv_format}_{lead}{two}"
    if getattr(inference_params, "is_paged", False):
        layout = f"paged_kv_{of_queries}_{of_keys}_{of_keys}"
    return layout, q, k, v, of_queries, of_keys


def _joined(parts: Sequence[Tensor]) -> str:
    """How parts lie in one tensor, "3hd" or "h3d" (or with 2); "" where they are no such views."""
    first, count = parts[0], len(parts)
    for dim, name in ((-3, f"{count}hd"), (-2, f"h{count}d")):
        shape = list(first.shape)
        shape.insert(len(shape) + 1 + dim, count)
        views = torch.empty(shape, device="meta").unbind(dim)
        if all(
            part.shape == view.shape
            and part.dtype is first.dtype
            and part.stride() == view.stride()
            and part.storage_offset() - first.storage_offset() == view.storage_offset()
            and part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            for part, view in zip(parts, views, strict=True)
        ):
            return name
    return ""
