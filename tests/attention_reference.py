# SPDX-License-Identifier: Apache-2.0
"""What softmax, dropout and rotary embedding must compute: float64, and Philox in numpy."""

import numpy as np
import torch
from tols import F32

# ---- random decisions ----------------------------------------------------------------------------

_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter, key):
    """Philox4x32-10: words [n, 4] for counters [n, 4] and one key of two words, low words first."""
    c = np.asarray(counter, dtype=np.uint64).T
    for step in range(10):
        k = [np.uint64((key[0] + step * 0x9E3779B9) & 0xFFFFFFFF)]
        k.append(np.uint64((key[1] + step * 0xBB67AE85) & 0xFFFFFFFF))
        even, odd = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = (odd >> _HALF) ^ c[1] ^ k[0], odd & _LOW, (even >> _HALF) ^ c[3] ^ k[1], even & _LOW
    return np.stack(c, axis=1)


def new_pair(rng):
    """A random (seed, offset)."""
    return tuple(int(value) for value in rng.integers(-(2**63), 2**63, 2))


def pair_on(device, pair):
    """(seed, offset) as operators read it."""
    return torch.tensor(pair, dtype=torch.int64, device=device)


def uniforms(pair, count):
    """The numbers in [0, 1) of elements 0 .. count - 1; pair is (seed, offset), as in `rng`."""
    seed, offset = (int(value) & (2**64 - 1) for value in pair)
    at = np.arange(-(-count // 4), dtype=np.uint64) + np.uint64(offset)  # wraps
    zeros = np.zeros_like(at)
    words = philox(np.stack([at & _LOW, at >> _HALF, zeros, zeros], axis=1), (seed, seed >> 32))
    return torch.from_numpy((words.flatten()[:count] >> np.uint64(8)).astype(np.float64) / 2**24)


def kept(pair, shape, probability):
    """Bool tensor: which elements of a dense tensor a dropout keeps."""
    threshold = torch.tensor(probability, dtype=F32).double()
    return uniforms(pair, int(np.prod(shape))).reshape(shape) >= threshold


def drop_factors(pair, shape, probability):
    """What the elements are multiplied by, in float64: 0 or 1 / (1 - p)."""
    if probability == 0:
        return torch.ones(shape, dtype=torch.float64)
    p = float(torch.tensor(probability, dtype=F32))
    return kept(pair, shape, probability) * (1 / (1 - p) if p < 1 else 0.0)


def path_factors(pair, shape, probability, samples):
    """The same of drop path, [rows, 1] for a matrix of this shape."""
    rows, columns = shape
    pair = (pair[0], pair[1] + -(-rows * columns // 4))
    return drop_factors(pair, (samples,), probability).repeat_interleave(rows // samples)[:, None]


# ---- softmax -------------------------------------------------------------------------------------

WINDOWS = {
    "full": {},
    "causal": {"window_right": 0},
    "bottom right": {"window_right": 0, "bottom_right": 1},
    "window": {"window_left": 7, "window_right": 3, "bottom_right": 1},
    "far": {"window_left": 30, "diagonal": 5},
}
"""Options of a call by what they limit: of sequences, packed ones too."""


def allowed(shape, mask=None, left=-1, right=-1, diagonal=0):
    """Bool tensor [batch, heads, queries, keys]: the keys that a query may attend."""
    distance = torch.arange(shape[3]) - torch.arange(shape[2])[:, None] - diagonal
    may = torch.ones(shape[2:], dtype=torch.bool)
    if left >= 0:
        may &= distance >= -left
    if right >= 0:
        may &= distance <= right
    may = may.expand(shape)
    return may if mask is None else may & ~mask.bool()


def softmax(scores, may, sink=None):
    """Softmax over the last dim of what is allowed; 0 elsewhere, and in rows without keys.

    The sums are those of one score more, `sink` [heads], which belongs to no key.
    """
    if scores.shape[-1] == 0:
        return scores
    scores = scores.masked_fill(~may, -torch.inf)
    top = scores.amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(scores.dtype)[:, None, None]
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == -torch.inf, 0.0).detach()
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total = total + (sink - top).exp()
    return weights / total.masked_fill(total == 0, 1.0)


def slope_bias(slopes, sizes, diagonals):
    """-slope * |key - diagonal's key| [batch, heads, queries, keys] in float64.

    `diagonals` [batch] are the keys on the diagonals of query 0.
    """
    distance = torch.arange(sizes[3]) - torch.arange(sizes[2])[:, None]
    distance = (distance - torch.as_tensor(diagonals)[:, None, None, None]).abs().double()
    return -slopes.double().reshape(-1, sizes[1], 1, 1) * distance


def softmax_terms(scores, may):
    """Terms of each probability: a rounding of a score is a relative error of that size of e^it."""
    size = scores.masked_fill(~may, 0.0).abs().amax(-1, keepdim=True)
    return softmax(scores, may) * (1 + size)


# ---- rotary embedding ----------------------------------------------------------------------------


def rotate(x, interleaved):
    """rot(x): (-second half, first half), or the pairs (-odd, even)."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def rope(x, angles, interleaved=False):
    """The first channels become x cos + rot(x) sin; angles [..., rotary] broadcast against x."""
    turned, rest = x[..., : angles.shape[-1]], x[..., angles.shape[-1] :]
    turned = turned * angles.cos() + rotate(turned, interleaved) * angles.sin()
    return torch.cat([turned, rest], -1)


def cp_positions(length, ranks, rank):
    """Positions of a sequence of all ranks that one has: its chunk and that from the end."""
    chunks = torch.arange(length).chunk(2 * ranks) if length else [torch.arange(0)] * 2 * ranks
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])
