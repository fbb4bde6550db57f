# SPDX-License-Identifier: Apache-2.0
"""Cases of rotary embeddings, and their gradients."""

from collections.abc import Iterator

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
                        lengths = (4, 8)
                        at = torch.cat([_places(size, rank, n) for n in lengths])
                        cu = torch.tensor([0, 4, 12], dtype=torch.int32, device=draw.device) * size
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


CASES = {"fused_rope_forward": _rope, "fused_rope_backward": _rope}
