# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the angles, and their application to queries and keys."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.function import run_call
from transformer_engine.pytorch.module.parameters import default_device, positive_sizes
from transformer_engine.pytorch.operators import OperatorCall, contiguous_like, operator

__all__ = ["RotaryPositionEmbedding", "apply_fused_qkv_rotary_pos_emb", "apply_rotary_pos_emb"]

_NAME = "apply_rotary_pos_emb"

FORMATS = {"sbhd": 4, "bshd": 4, "thd": 3}
"""Dims of a tensor of each format: s sequence, b batch, h heads, d channels, t packed tokens."""


MAX_POSITION = 2**24
"""From here on fp32 has no place for every integer."""


def _check_positions(length: int, offset: int) -> None:
    for name, value in (("max_seq_len", length), ("offset", offset)):
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"RotaryPositionEmbedding: {name}={value!r}, expected an int")
    if length < 0 or abs(offset) > MAX_POSITION or length + offset > MAX_POSITION:
        raise ValueError(
            f"RotaryPositionEmbedding: max_seq_len={length}, offset={offset}: expected a length "
            f"from 0 on and positions up to 2^24 = {MAX_POSITION}: beyond, fp32 can not tell "
            "neighbours apart"
        )


class RotaryPositionEmbedding(torch.nn.Module):
    """Angles of the rotary position embedding.

    Parameters
    ----------
    dim : int
        Channels of a head.
    rotary_percent : float, default 1
        Share of the channels that are rotated.
    seq_len_interpolation_factor : float, optional
        Positions are divided by it, if `pretrained_max_position_embeddings` is given too.
    pretrained_max_position_embeddings : int, optional
        Longest sequence of the training. A sequence longer than it times the factor has its
        positions divided by its length over this number instead. Without a factor it counts for
        nothing.
    rotary_base : float, default 10000
        Base of the frequencies.
    interleaved : bool, default False
        Channels 2i and 2i + 1 make a pair; else i and i + half of the rotated ones.

    Raises
    ------
    ValueError
        The number of rotated channels is odd or not positive.
    """

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: float | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        positive_sizes("RotaryPositionEmbedding", dim=dim)
        for name, value in (("rotary_percent", rotary_percent), ("rotary_base", rotary_base)):
            if not isinstance(value, int | float) or not 0.0 < value < math.inf:
                raise ValueError(
                    f"RotaryPositionEmbedding: {name}={value!r}, expected a positive number"
                )
        rotated = int(dim * rotary_percent) if rotary_percent < 1.0 else dim
        if rotated < 2 or rotated % 2 != 0:
            raise ValueError(
                f"RotaryPositionEmbedding: dim={dim}, rotary_percent={rotary_percent}: {rotated} "
                "rotated channels, expected a positive even number"
            )
        self.rotary_base = rotary_base
        self.interleaved = interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        self.pretrained_max_position_embeddings = pretrained_max_position_embeddings
        self._rotated = rotated
        self.register_buffer("inv_freq", self._frequencies(default_device()), persistent=False)

    def reset_parameters(self) -> None:
        """Compute the frequencies anew: those of a module made by ``to_empty`` have no values."""
        device = self.inv_freq.device
        self.inv_freq = self._frequencies(default_device() if device.type == "meta" else device)

    def _frequencies(self, device: torch.device | str) -> Tensor:
        exponents = torch.arange(0, self._rotated, 2, dtype=torch.float32, device=device)
        return 1.0 / self.rotary_base ** (exponents / self._rotated)

    def _apply(self, fn: Callable, recurse: bool = True) -> "RotaryPositionEmbedding":
        """Move the frequencies; a cast to 16 bits leaves them alone: angles need fp32."""
        super()._apply(fn, recurse)
        if self.inv_freq.dtype is not torch.float32:
            self.inv_freq = self._frequencies(self.inv_freq.device)
        return self

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *given: Any) -> None:
        """Load nothing: the frequencies follow from the arguments, whoever saved them."""
        super()._load_from_state_dict(state_dict, prefix, *given)
        unexpected_keys = given[3]
        if f"{prefix}inv_freq" in unexpected_keys:
            unexpected_keys.remove(f"{prefix}inv_freq")

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        """Angles of `max_seq_len` positions from `offset`, [max_seq_len, 1, 1, rotated channels].

        They are fp32, on the device of the module. TypeError or ValueError for no ints, a negative
        length, or positions beyond 2^24, which fp32 can not tell apart.
        """
        if not torch.compiler.is_compiling():
            _check_positions(max_seq_len, offset)
        device = self.inv_freq.device
        positions = torch.arange(max_seq_len, dtype=torch.float32, device=device) + offset
        longest = self.pretrained_max_position_embeddings
        factor = self.seq_len_interpolation_factor
        if longest is not None and factor is not None:
            if max_seq_len > longest * factor:
                positions = positions * (longest / max_seq_len)
            else:
                positions = positions * (1 / factor)
        angles = positions[:, None] * self.inv_freq
        if self.interleaved:
            angles = torch.repeat_interleave(angles, 2, dim=-1)
        else:
            angles = torch.cat((angles, angles), dim=-1)
        return angles[:, None, None, :]


_rotate = operator(
    "rope",
    "Tensor input, Tensor freqs, Tensor? cu_seqlens, Tensor? start_positions, bool sequence_first, "
    "bool interleaved, bool backward",
    "output",
    lambda inp, *_: contiguous_like(inp),
    unit_stride="input",
    by_sequence="input output",
)


class _Rope(OperatorCall):
    """Settings: the format is sbhd, pairs are interleaved."""

    label = _NAME

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return _rotate(self.traced, *tensors, *self.settings, False), tensors[1:]

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        grad = _rotate(self.traced, *grads, *saved, *self.settings, True)
        return None, grad, None, None, None


def _check(t: Tensor, freqs: Tensor, tensor_format: str, cu_seqlens: Tensor | None) -> None:
    """Raise for what the operator can not tell from shapes."""
    for name, value in (("t", t), ("freqs", freqs)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{_NAME}: {name}: {type(value).__name__}, expected a tensor")
    if tensor_format not in FORMATS:
        known = ", ".join(FORMATS)
        raise ValueError(f"{_NAME}: tensor_format={tensor_format!r}, expected one of {known}")
    dims = FORMATS[tensor_format]
    if t.dim() != dims:
        raise ValueError(f"{_NAME}: t: shape {tuple(t.shape)}, {tensor_format} has {dims} dims")
    if freqs.dim() != 4 or freqs.shape[1] != 1 or freqs.shape[2] != 1:
        raise ValueError(f"{_NAME}: freqs: shape {tuple(freqs.shape)}, expected [s, 1, 1, d]")
    if freqs.requires_grad:
        raise NotImplementedError(f"{_NAME}: gradients of freqs")
    if tensor_format == "thd":
        if cu_seqlens is None:
            raise ValueError(f"{_NAME}: tensor_format='thd' needs cu_seqlens")
        return
    length = t.shape[0] if tensor_format == "sbhd" else t.shape[1]
    if freqs.shape[0] < length:
        raise ValueError(f"{_NAME}: {length} positions, but freqs has {freqs.shape[0]}")


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """Rotate the first channels of queries or keys by their positions' angles.

    t cos + rot(t) sin on the channels that `freqs` has, the others are passed on. rot(t) is
    (-second half, first half), or (-odd, even) pairs where interleaved; computed in fp32.

    Parameters
    ----------
    t : Tensor
        [s, b, h, d] (sbhd), [b, s, h, d] (bshd) or [tokens, h, d] (thd); fp32, fp16 or bf16.
    freqs : Tensor
        [positions, 1, 1, rotated channels] angles, as `RotaryPositionEmbedding` gives them.
    tensor_format : str, default "sbhd"
        "sbhd", "bshd" or "thd".
    start_positions : Tensor, optional
        [b] int32: position of the first token of each sequence.
    interleaved : bool, default False
        How `freqs` was made.
    fused : bool, default False
        Accepted for its callers: one kernel runs in either case, with the same result.
    cu_seqlens : Tensor, optional
        [b + 1] int32: first token of each sequence (thd).
    cp_size, cp_rank : int
        Context parallelism: not there yet, only the defaults are accepted.

    Returns
    -------
    Tensor
        Shape and dtype of `t`.

    Raises
    ------
    ValueError
        Shapes or arguments that do not go together.
    NotImplementedError
        For `cp_size` above 1, and for `freqs` that require gradients.
    """
    del fused, cp_rank
    if cp_size > 1:
        raise NotImplementedError(f"{_NAME}: cp_size={cp_size}")
    _check(t, freqs, tensor_format, cu_seqlens)
    if tensor_format != "thd":
        cu_seqlens = None
    angles = freqs.reshape(freqs.shape[0], freqs.shape[3]).to(t.device, torch.float32)
    call = _Rope(t, tensor_format == "sbhd", interleaved)
    return run_call(call, t, angles, cu_seqlens, start_positions)


def apply_fused_qkv_rotary_pos_emb(
    qkv: Tensor,
    q_freqs: Tensor,
    k_freqs: Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values apart and rotate queries and keys by their angles.

    Parameters
    ----------
    qkv : Tensor
        [s, b, h, q + k + v] (sbhd) or [b, s, h, q + k + v] (bshd): for each of h groups the
        queries of its heads, the key and the value.
    q_freqs, k_freqs : Tensor
        Angles, as of `apply_rotary_pos_emb`.
    qkv_split_arg_list : sequence of int
        q, k and v; q is a multiple of k, which is the size of a head.
    tensor_format : str, default "sbhd"
        "sbhd" or "bshd".
    start_positions, interleaved, cu_seqlens, cp_size, cp_rank
        As of `apply_rotary_pos_emb`.

    Returns
    -------
    (Tensor, Tensor, Tensor)
        Queries [.., h * q / k, k], keys [.., h, k] and values [.., h, v], contiguous.

    Raises
    ------
    ValueError
        The sizes do not make up the last dim, or the format is another one.
    """
    sizes = tuple(qkv_split_arg_list)
    if tensor_format not in ("sbhd", "bshd"):
        raise ValueError(
            f"apply_fused_qkv_rotary_pos_emb: tensor_format={tensor_format!r}, expected 'sbhd' or "
            "'bshd'"
        )
    if qkv.dim() != 4 or len(sizes) != 3 or sum(sizes) != qkv.shape[3] or sizes[0] % sizes[1] != 0:
        raise ValueError(
            f"apply_fused_qkv_rotary_pos_emb: qkv {tuple(qkv.shape)}, qkv_split_arg_list "
            f"{list(sizes)}: expected four dims and three sizes, of queries (a multiple of the "
            "keys'), keys and values, that make up the last one"
        )
    query, key, value = qkv.split(sizes, dim=3)
    query = query.reshape(*qkv.shape[:2], -1, sizes[1])
    options = (tensor_format, start_positions, interleaved, True, cu_seqlens, cp_size, cp_rank)
    return (
        apply_rotary_pos_emb(query, q_freqs, *options),
        apply_rotary_pos_emb(key, k_freqs, *options),
        value.contiguous(),
    )
