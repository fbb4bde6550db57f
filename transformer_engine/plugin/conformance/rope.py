# SPDX-License-Identifier: Apache-2.0
"""Cases of rotary embeddings, and their gradients."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.cases import Case, Draw, gradients, name_of, near

_TOKENS, _BATCH, _HEADS, _DIM = 8, 2, 3, 16


def exact_rope(t: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """`t` [.., heads, d] by angles [.., 1, rotated]."""
    count = angles.shape[-1]
    part, rest = t[..., :count], t[..., count:]
    if interleaved:
        partners = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
    else:
        first, second = part.chunk(2, -1)
        partners = torch.cat((-second, first), -1)
    return torch.cat((part * angles.cos() + partners * angles.sin(), rest), -1)


def _angles(draw: Draw, positions: int, count: int, interleaved: bool) -> Tensor:
    """fp32 [positions, 1, 1, count]: each frequency turns two channels."""
    rates = 10000.0 ** -(torch.arange(0, count, 2, dtype=torch.float64) / count)
    each = torch.arange(positions, dtype=torch.float64)[:, None] * rates
    both = each.repeat_interleave(2, -1) if interleaved else torch.cat((each, each), -1)
    return both.float()[:, None, None].to(draw.device)


def _places(size: int, rank: int, tokens: int) -> Tensor:
    """Positions of the tokens that a rank has: of 2 `size` chunks two, one from each end."""
    at = torch.arange(tokens)
    if size == 1:
        return at
    chunk = tokens // 2
    return torch.cat((at[:chunk] + rank * chunk, at[:chunk] + (2 * size - 1 - rank) * chunk))


def _rope(op: str, draw: Draw) -> Iterator[Case]:
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    backward = op == "fused_rope_backward"
    for dtype in draw.dtypes:
        for form in ("sbhd", "bshd", "thd"):
            for interleaved in (False, True):
                for count, (size, rank) in ((_DIM, (1, 0)), (12, (1, 0)), (12, (2, 1))):
                    freqs = _angles(draw, 4 * _TOKENS, count, interleaved)
                    kind, cu = NVTE_QKV_Format[f"NVTE_{form.upper()}"], None
                    if form == "thd":
                        shape: tuple = (12, _HEADS, _DIM)
                        lengths = (4, 0, 8)
                        at = torch.cat([_places(size, rank, n) for n in lengths])
                        cu = (
                            torch.tensor([0, 4, 4, 12], dtype=torch.int32, device=draw.device)
                            * size
                        )
                    else:
                        leading = (_TOKENS, _BATCH) if form == "sbhd" else (_BATCH, _TOKENS)
                        shape, at = (*leading, _HEADS, _DIM), _places(size, rank, _TOKENS)
                    angles = freqs[at.to(draw.device), 0].double()
                    angles = angles[:, None] if form == "sbhd" else angles
                    x = draw.normal(shape, dtype)
                    if backward:
                        args: tuple = (x, freqs, kind, interleaved, cu, size, rank)
                        (exact,) = gradients(
                            lambda t, a=angles, i=interleaved: exact_rope(t, a, i), x, x
                        )
                    else:
                        args = (x, freqs, None, kind, interleaved, cu, size, rank)
                        exact = exact_rope(x.double(), angles, interleaved)

                    def wanted(
                        found: Tensor, exact: Tensor = exact, dtype: torch.dtype = dtype
                    ) -> list:
                        return [near("the result", found, exact, dtype)]

                    how = f"{' interleaved' * interleaved} rank {rank} of {size}"
                    yield Case(f"{name_of(dtype)} {form} {count} of {_DIM}{how}", args, wanted)
        yield from _own_angles(draw, dtype, backward)


def _own_angles(draw: Draw, dtype: torch.dtype, backward: bool) -> Iterator[Case]:
    """Of sequences that begin at positions of their own, or have angles of their own."""
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    starts = torch.tensor([3, 11], dtype=torch.int32, device=draw.device)
    for form in ("sbhd", "bshd"):
        leading = (_TOKENS, _BATCH) if form == "sbhd" else (_BATCH, _TOKENS)
        kind = NVTE_QKV_Format[f"NVTE_{form.upper()}"]
        for own in ("angles",) if backward else ("angles", "positions"):  # a gradient takes none
            x = draw.normal((*leading, _HEADS, _DIM), dtype)
            if own == "positions":
                freqs = _angles(draw, 4 * _TOKENS, 12, False)
                at = starts.long() + torch.arange(_TOKENS, device=draw.device)[:, None]
                angles = freqs[at, 0].double()
            else:
                freqs = draw.normal((_TOKENS, _BATCH, 1, 12), torch.float32)
                freqs[..., 6:] = freqs[..., :6]
                angles = freqs.double()
            angles = angles if form == "sbhd" else angles.transpose(0, 1)
            exact = exact_rope(x.double(), -angles if backward else angles, False)
            given = () if backward else (starts if own == "positions" else None,)

            def wanted(found: Tensor, exact: Tensor = exact, dtype: torch.dtype = dtype) -> list:
                return [near("the result", found, exact, dtype)]

            args = (x, freqs, *given, kind, False, None, 1, 0)
            yield Case(f"{name_of(dtype)} {form} {own} of each sequence", args, wanted)


_SIZES = ((32, 16, 24), (16, 16, 16), (48, 8, 8))
"""Channels of a group of queries, of its key and of its value, in a projection."""


def _projection(op: str, draw: Draw) -> Iterator[Case]:
    """Queries, keys and values of a projection, and its gradient."""
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    backward = op == "fused_qkv_rope_backward"
    options = product(draw.dtypes, ("sbhd", "bshd"), (False, True), _SIZES, ((1, 0), (2, 1)))
    for dtype, form, interleaved, sizes, (size, rank) in options:
        own = (False, True) if size == 1 and not backward else (False,)
        for starts in own:
            at = _places(size, rank, _TOKENS)[:, None].expand(-1, _BATCH)
            first = torch.tensor([3, 11], dtype=torch.int32) if starts else None
            at = at if first is None else at + first
            freqs = [_angles(draw, 4 * _TOKENS, n, interleaved) for n in (sizes[1], sizes[1] // 2)]
            angles = [f[at.to(draw.device), 0].double() for f in freqs]
            angles = [a if form == "sbhd" else a.transpose(0, 1) for a in angles]
            leading = (_TOKENS, _BATCH) if form == "sbhd" else (_BATCH, _TOKENS)
            x = draw.normal((*leading, _HEADS, sum(sizes)), dtype)

            def parts(
                x: Tensor, sizes: tuple = sizes, angles: list = angles, how: bool = interleaved
            ) -> tuple:
                q, k, v = x.split(sizes, -1)
                q = q.reshape(*x.shape[:2], -1, sizes[1])
                return exact_rope(q, angles[0], how), exact_rope(k, angles[1], how), v.clone()

            rest = (list(sizes), NVTE_QKV_Format[f"NVTE_{form.upper()}"], interleaved, size, rank)
            exact = parts(x.double())
            if backward:
                grads = tuple(draw.normal(tuple(t.shape), dtype) for t in exact)
                exact = gradients(parts, grads, x)
                args: tuple = (*grads, *freqs, *rest)
            else:
                given = None if first is None else first.to(draw.device)
                args = (x, *freqs, given, *rest)
            names = ("the gradient",) if backward else ("queries", "keys", "values")

            def wanted(
                found: Any, exact: tuple = exact, names: tuple = names, dtype: torch.dtype = dtype
            ) -> list:
                made = (found,) if len(names) == 1 else found
                rows = zip(names, made, exact, strict=True)
                return [near(name, one, other, dtype) for name, one, other in rows]

            how = f"{' interleaved' * interleaved}{' from positions' * starts}"
            name = f"{name_of(dtype)} {form} {list(sizes)}{how} rank {rank} of {size}"
            yield Case(name, args, wanted)


CASES = {
    "fused_rope_forward": _rope,
    "fused_rope_backward": _rope,
    "fused_qkv_rope_forward": _projection,
    "fused_qkv_rope_backward": _projection,
}
