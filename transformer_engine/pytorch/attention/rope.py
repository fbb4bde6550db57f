# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: the angles, and their application to queries and keys."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import absent
from transformer_engine.pytorch.execution.autograd import run_call
from transformer_engine.pytorch.execution.custom_ops import (
    OperatorCall,
    contiguous_like,
    operator,
    traceable,
)
from transformer_engine.pytorch.module.parameters import default_device, positive_sizes
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

__getattr__, __dir__ = absent.attach(globals())
__all__ = [
    "RotaryPositionEmbedding",
    "apply_fused_qkv_rotary_pos_emb",
    "apply_rotary_pos_emb",
    *absent.names_of(__name__),
]

_NAME, _FUSED = "apply_rotary_pos_emb", "apply_fused_qkv_rotary_pos_emb"

FORMATS = {"sbhd": 4, "bshd": 4, "thd": 3}
"""Dims of a tensor of each format: s sequence, b batch, h heads, d channels, t packed tokens."""


MAX_POSITION = 2**24
"""From here on fp32 does not have every integer."""


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
    "bool interleaved, int cp_size, int cp_rank, bool backward",
    "output",
    lambda inp, *_: contiguous_like(inp),
    unit_stride="input",
    by_sequence="input output",
)


class _Rope(OperatorCall):
    """Settings: the format is sbhd, pairs are interleaved, `cp_size`, `cp_rank`."""

    label = _NAME

    def run_forward(self, tensors: tuple) -> tuple[Tensor, tuple]:
        return _rotate(self.traced, *tensors, *self.settings, False), tensors[1:]

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        grad = _rotate(self.traced, *grads, *saved, *self.settings, True)
        return None, grad, None, None, None


# ---- the parts of a projection -------------------------------------------------------------------


def _empty_parts(qkv: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values that `_split_parts` makes."""
    *lead, groups, _ = qkv.shape
    query, key, value = arguments[4]
    shapes = (groups * (query // key), key), (groups, key), (groups, value)
    return tuple(qkv.new_empty(*lead, *shape) for shape in shapes)


def _empty_whole(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    """The projection whose parts these are."""
    return key.new_empty(*key.shape[:-1], sum(arguments[4]))


_obeying_rope = _core.obeying("rope")


def _rotate_parts(parts: tuple, made: tuple, options: tuple, backward: bool) -> None:
    """Rotate queries and keys and copy values, all of them [.., groups, channels of the group]."""
    q_freqs, k_freqs, cu_seqlens, starts, sizes, sequence_first, pairs, cp_size, cp_rank = options
    if sequence_first:
        parts, made = ([part.transpose(0, 1) for part in each] for each in (parts, made))
    _obeying_rope(
        parts[0], made[0], freqs=q_freqs, key=parts[1], key_output=made[1], key_freqs=k_freqs,
        value=parts[2], value_output=made[2], cu_seqlens=cu_seqlens, start_positions=starts,
        channels=sizes[1], cp_size=cp_size, cp_rank=cp_rank, interleaved=pairs, backward=backward,
    )  # fmt: skip


def _split_parts(qkv: Tensor, *options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Take queries, keys and values apart and rotate them."""
    made = _empty_parts(qkv, *options)
    query = made[0].view(*qkv.shape[:-1], options[4][0])
    _rotate_parts(qkv.split(options[4], -1), (query, *made[1:]), options, False)
    return made


def _join_parts(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> Tensor:
    """Rotate the gradients of queries, keys and values back, into that of the projection."""
    made = _empty_whole(query, key, value, *options)
    query = query.reshape(*key.shape[:-1], options[4][0])
    _rotate_parts((query, key, value), made.split(options[4], -1), options, True)
    return made


_OPTIONS = (
    "Tensor q_freqs, Tensor k_freqs, Tensor? cu_seqlens, Tensor? start_positions, int[] sizes, "
    "bool sequence_first, bool interleaved, int cp_size, int cp_rank"
)
_split = traceable("rope_qkv", f"Tensor qkv, {_OPTIONS}", 3, _split_parts, _empty_parts)
_join = traceable(
    "rope_qkv_backward", f"Tensor query, Tensor key, Tensor value, {_OPTIONS}", 1, _join_parts,
    _empty_whole,
)  # fmt: skip


class _RopeOfParts(OperatorCall):
    """Settings: sizes of the parts, and those of `_Rope`."""

    label = _FUSED

    def run_forward(self, tensors: tuple) -> tuple[tuple, tuple]:
        return _split(self.traced, *tensors, *self.settings), tensors[1:]

    def run_backward(self, grads: tuple, saved: tuple) -> tuple[Tensor | None, ...]:
        grad = _join(self.traced, *grads, *saved, *self.settings)
        return None, grad, None, None, None, None


# ---- arguments -----------------------------------------------------------------------------------


def _length(t: Tensor, tensor_format: str) -> int:
    """Tokens of a sequence on this rank, which all have as many."""
    return t.shape[0 if tensor_format == "sbhd" else 1]


class Positions(NamedTuple):
    """How the tokens of a call find their angles."""

    tensor_format: str
    start_positions: Tensor | None
    interleaved: bool
    cu_seqlens: Tensor | None
    cp_size: int
    cp_rank: int

    @property
    def settings(self) -> tuple[bool, bool, int, int]:
        """Arguments of the operators: the format is sbhd, and those of their names."""
        return self.tensor_format == "sbhd", self.interleaved, self.cp_size, self.cp_rank

    def checked(self, name: str, t: Tensor) -> "Positions":
        """These for a tensor; TypeError or ValueError for one that is none of the format.

        Likewise where it has not a rank's two chunks, and for what is no rank of context
        parallelism; `name` begins with that of the function.
        """
        expect_tensor(name, t)
        function, form = name.partition(":")[0], self.tensor_format
        if form not in FORMATS:
            known = ", ".join(FORMATS)
            raise ValueError(f"{function}: tensor_format={form!r}, expected one of {known}")
        if t.dim() != FORMATS[form]:
            raise ValueError(f"{name}: shape {tuple(t.shape)}, {form} has {FORMATS[form]} dims")
        if form == "thd" and self.cu_seqlens is None:
            raise ValueError(f"{function}: tensor_format='thd' needs cu_seqlens")
        cp_size, cp_rank = self.cp_size, self.cp_rank
        if cp_size < 1 or not 0 <= cp_rank < cp_size:
            raise ValueError(
                f"{function}: cp_size={cp_size}, cp_rank={cp_rank}: expected a number of ranks, "
                "and one of them"
            )
        if cp_size > 1 and form != "thd" and _length(t, form) % 2 != 0:
            raise ValueError(
                f"{function}: cp_size={cp_size}: {_length(t, form)} tokens of a sequence, expected "
                "two chunks of one length: pad the sequence"
            )
        unread = form != "thd" and self.cu_seqlens is not None
        return self._replace(cu_seqlens=None) if unread else self

    def check_angles(self, function: str, name: str, freqs: Tensor, t: Tensor) -> None:
        """Raise for angles (TypeError, ValueError) that are not those of the tokens."""
        expect_tensor(f"{function}: {name}", freqs)
        shape, batch = tuple(freqs.shape), 1
        if self.tensor_format != "thd" and function == _NAME:
            batch = t.shape[1 if self.tensor_format == "sbhd" else 0]
        if len(shape) != 4 or shape[1] not in (1, batch) or shape[2] != 1:
            raise ValueError(
                f"{function}: {name}: shape {shape}, expected [s, 1, 1, d]"
                + (f" or [s, {batch}, 1, d]" if batch > 1 else "")
            )
        if shape[1] > 1 and self.start_positions is not None:
            raise ValueError(
                f"{function}: {name}: shape {shape}: angles of each batch entry begin with those "
                "of its first token, so there are no start_positions"
            )
        if self.tensor_format == "thd":
            return
        length = _length(t, self.tensor_format) * self.cp_size
        if shape[0] < length:
            raise ValueError(f"{function}: {length} positions, but {name} has {shape[0]}")

    def angles(self, freqs: Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Angles [positions, channels] in fp32, and where in them the sequences start."""
        positions, batch, _, channels = freqs.shape
        starts = self.start_positions
        if batch > 1:  # one behind the other
            freqs = freqs.transpose(0, 1)
            starts = torch.arange(0, batch * positions, positions, dtype=torch.int32, device=device)
        flat = freqs.reshape(batch * positions, channels)
        return flat.to(device, torch.float32).contiguous(), starts

    def of_tokens(self, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Position of each token, [s, b], [b, s] or [tokens]; whether it is of a sequence."""
        inside, starts = None, self.start_positions
        if self.tensor_format == "thd":
            limits = self.cu_seqlens.long() // self.cp_size
            tokens = torch.arange(t.shape[0], device=t.device)
            entry = torch.searchsorted(limits[1:].contiguous(), tokens, right=True)
            inside = (entry < len(limits) - 1) & (tokens >= limits[0])
            entry = torch.where(inside, entry, 0)
            at, length = tokens - limits[entry], limits[entry + 1] - limits[entry]
            starts = None if starts is None else starts[entry]
        else:
            length = _length(t, self.tensor_format)
            at = torch.arange(length, device=t.device)
            if self.tensor_format == "sbhd":
                at = at[:, None]
            elif starts is not None:
                starts = starts[:, None]
        if self.cp_size > 1:
            counterpart = 2 * (self.cp_size - 1) - self.cp_rank
            at = at + torch.where(at < length // 2, self.cp_rank, counterpart) * (length // 2)
        at = at if starts is None else at + starts
        return at if inside is None else torch.where(inside, at, 0), inside


def rotate_by_torch(t: Tensor, freqs: Tensor, positions: Positions) -> Tensor:
    """`apply_rotary_pos_emb` by torch's operators, which give angles gradients, too.

    In fp32; of float64 in that.
    """
    at, inside = positions.of_tokens(t)
    if freqs.shape[1] > 1:
        batch = torch.arange(freqs.shape[1], device=t.device)
        batch = batch if positions.tensor_format == "sbhd" else batch[:, None]
        angles = freqs[at.to(freqs.device), batch.to(freqs.device)]
    else:
        angles = freqs[at.to(freqs.device), 0]
    wide = torch.promote_types(t.dtype, torch.float32)
    made = turn(t, angles.to(t.device, wide), positions.interleaved)
    return made if inside is None else torch.where(inside[:, None, None], made, t)


def turn(t: Tensor, angles: Tensor, interleaved: bool, backward: bool = False) -> Tensor:
    """Compute t cos + rot(t) sin over the first channels, in the dtype of the angles.

    `angles` broadcast to [.., rotated channels]; the other channels are passed on. `backward`: the
    transposed map, of gradients.
    """
    rotary = angles.shape[-1]
    rotated, rest = t.split([rotary, t.shape[-1] - rotary], -1)
    values, sines = rotated.to(angles.dtype), angles.sin()
    if backward:
        turned = values * angles.cos() - _partners(values * sines, interleaved)
    else:
        turned = values * angles.cos() + _partners(values, interleaved) * sines
    return torch.cat((turned.to(t.dtype), rest), -1)


def _partners(values: Tensor, interleaved: bool) -> Tensor:
    """(-second half, first half), or pairs (-odd, even)."""
    if interleaved:
        pairs = values.unflatten(-1, (-1, 2))
        return torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    half = values.shape[-1] // 2
    return torch.cat((-values[..., half:], values[..., :half]), -1)


# ---- application ---------------------------------------------------------------------------------


def rotary_backward(
    grad: Tensor, freqs: Tensor, interleaved: bool, form: str, cu_seqlens: Any, *ranks: int
) -> Tensor:
    """Gradient of `t` of `apply_rotary_pos_emb`, by that of its result; without autograd.

    `ranks` are cp_size and cp_rank.
    """
    positions = Positions(form, None, interleaved, cu_seqlens, *ranks)
    positions = positions.checked(f"{_NAME}: grad", grad)
    positions.check_angles(_NAME, "freqs", freqs, grad)
    angles, starts = positions.angles(freqs, grad.device)
    return _rotate(False, grad, angles, positions.cu_seqlens, starts, *positions.settings, True)


def fused_qkv_rotary_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    freqs: tuple[Tensor, Tensor],
    sizes: list[int],
    interleaved: bool,
    form: str,
    *ranks: int,
) -> Tensor:
    """Gradient of `qkv` of `apply_fused_qkv_rotary_pos_emb`, by those of its results.

    Without autograd and start positions; `freqs` are those of queries and keys.
    """
    positions = Positions(form, None, interleaved, None, *ranks)
    for name, grad in zip("qkv", grads, strict=True):
        positions.checked(f"{_FUSED}: {name}_grad", grad)
    for name, each in zip("qk", freqs, strict=True):
        positions.check_angles(_FUSED, f"{name}_freqs", each, grads[1])
    angles = [positions.angles(each, grads[1].device)[0] for each in freqs]
    return _join(False, *grads, *angles, None, None, sizes, *positions.settings)


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
        [positions, 1, 1, rotated channels] angles, as `RotaryPositionEmbedding` gives them; or
        [positions, b, 1, rotated channels], of each batch entry (not thd). Where they require a
        gradient, torch's operators compute.
    tensor_format : str, default "sbhd"
        "sbhd", "bshd" or "thd".
    start_positions : Tensor, optional
        [b] int32: position of the first token of each sequence.
    interleaved : bool, default False
        How `freqs` was made.
    fused : bool, default False
        Accepted for its callers: one kernel runs in either case, with the same result.
    cu_seqlens : Tensor, optional
        [b + 1] int32: first token of each sequence (thd), counted over all ranks. Tokens of no
        sequence are passed on.
    cp_size, cp_rank : int
        Ranks of context parallelism, and which of them this is. A sequence is ``2 cp_size`` chunks
        of one length; a rank has the one of its number, and behind it its counterpart from the end.

    Returns
    -------
    Tensor
        Shape and dtype of `t`.

    Raises
    ------
    TypeError, ValueError
        Shapes or arguments that do not go together.
    """
    del fused
    given = tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank
    positions = Positions(*given).checked(f"{_NAME}: t", t)
    positions.check_angles(_NAME, "freqs", freqs, t)
    if freqs.requires_grad and torch.is_grad_enabled():
        return rotate_by_torch(t, freqs, positions)
    angles, starts = positions.angles(freqs, t.device)
    return run_call(_Rope(t, *positions.settings), t, angles, positions.cu_seqlens, starts)


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
    """Take queries, keys and values apart and rotate queries and keys, in one pass.

    The backward writes the gradient of `qkv` in one pass likewise.

    Parameters
    ----------
    qkv : Tensor
        [s, b, h, q + k + v] (sbhd), [b, s, h, q + k + v] (bshd) or [tokens, h, q + k + v] (thd):
        for each of h groups the queries of its heads, the key and the value.
    q_freqs, k_freqs : Tensor
        Angles [positions, 1, 1, rotated channels], as of `apply_rotary_pos_emb`. Cosines and sines
        of one tensor serve both. They have no gradients.
    qkv_split_arg_list : sequence of int
        q, k and v; q is a multiple of k, which is the size of a head.
    tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank
        As of `apply_rotary_pos_emb`.

    Returns
    -------
    (Tensor, Tensor, Tensor)
        Queries [.., h * q / k, k], keys [.., h, k] and values [.., h, v], contiguous.

    Raises
    ------
    TypeError, ValueError
        Shapes or arguments that do not go together; angles that require a gradient.
    """
    given = tensor_format, start_positions, interleaved, cu_seqlens, cp_size, cp_rank
    positions = Positions(*given).checked(f"{_FUSED}: qkv", qkv)
    sizes = [int(size) for size in qkv_split_arg_list]
    if len(sizes) != 3 or min(sizes) < 1 or sum(sizes) != qkv.shape[-1] or sizes[0] % sizes[1] != 0:
        raise ValueError(
            f"{_FUSED}: qkv {tuple(qkv.shape)}, qkv_split_arg_list {list(sizes)}: expected three "
            "sizes, of queries (a multiple of the keys'), keys and values, that make up the last "
            "dim"
        )
    for name, freqs in (("q_freqs", q_freqs), ("k_freqs", k_freqs)):
        positions.check_angles(_FUSED, name, freqs, qkv)
        if freqs.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{_FUSED}: {name} requires a gradient: use {_NAME} for each part")
    q_angles, k_angles = (positions.angles(freqs, qkv.device)[0] for freqs in (q_freqs, k_freqs))
    call = _RopeOfParts(qkv, sizes, *positions.settings)
    return run_call(call, qkv, q_angles, k_angles, positions.cu_seqlens, start_positions)
