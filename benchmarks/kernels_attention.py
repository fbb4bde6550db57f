# SPDX-License-Identifier: Apache-2.0
"""Memory-bound operators around attention: softmax, dropout with its additions, rotary embedding.

As in kernels.py: bytes that can not be avoided a second, beside a plain copy measured in the same
turns. Keys that a causal mask forbids need no reading, but zeros are written in their place.
Dropout makes a random word for every element, which costs about half as much arithmetic as a copy
takes time; the cases without it show what that is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from kernels import COLUMNS, Effort, figures, launch_time
from timing import Machine, Report, parser, start
from torch import Tensor

import transformer_engine.pytorch  # noqa: F401 - hands torch to the extension
from transformer_engine import _core
from transformer_engine.pytorch.torchside.device import prepare_device

BF16, F32 = torch.bfloat16, torch.float32
DROPOUT = 0.1
FORMS = {"operator": "<16s", "shape": "<17s"}  # wider than those of kernels.py


@dataclass(frozen=True)
class Work:
    """One call of an operator on tensors of its own.

    Attributes
    ----------
    run : callable
        Makes the call.
    bytes : int
        What can not be avoided.
    """

    run: Callable[[], Any]
    bytes: int


def size(*tensors: Tensor | None) -> int:
    """Bytes of all of them together; None has none."""
    return sum(t.numel() * t.itemsize for t in tensors if t is not None)


class Maker:
    """Random inputs and empty outputs of one shape.

    Parameters
    ----------
    shape : tuple of int
        Of the tensor that an operator reads.
    device : torch.device
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.rng = torch.randint(1 << 31, (2,), dtype=torch.int64, device=device)

    def random(self, dtype: torch.dtype = BF16, shape: tuple[int, ...] | None = None) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape or self.shape, dtype=dtype, device=self.device)

    def softmax(self, *, dropout: float = 0.0, causal: bool = False, **wanted: bool) -> Work:
        """[batch, heads, queries, keys]; `wanted` of mask, bias and probabilities."""
        batch, _, queries, keys = self.shape
        x = self.random()
        out = torch.empty_like(x)
        keywords: dict[str, Any] = {"scale": 0.125}
        read, other = size(x), 0
        if dropout > 0:
            keywords |= {"dropout": dropout, "rng": self.rng}
        if causal:
            keywords |= {"window_right": 0, "diagonal": keys - queries}
            read = read * (keys + 1) // (2 * keys) if queries == keys else read
        if wanted.get("mask"):
            mask = torch.rand(batch, 1, queries, keys, device=self.device) < 0.1
            keywords["mask"] = mask
            other += size(mask)
        if wanted.get("bias"):
            keywords["bias"] = self.random(shape=(1, *self.shape[1:]))
            other += size(keywords["bias"])
        if wanted.get("probabilities"):
            keywords["probabilities"] = torch.empty_like(x)
            other += size(x)
        return Work(lambda: _core.softmax(x, out, **keywords), read + size(out) + other)

    def softmax_backward(self, *, dropout: float = 0.0) -> Work:
        """[batch, heads, queries, keys]."""
        grad, probabilities = self.random(), torch.rand(self.shape, device=self.device).to(BF16)
        out = torch.empty_like(grad)
        keywords: dict[str, Any] = {"scale": 0.125}
        if dropout > 0:
            keywords |= {"dropout": dropout, "rng": self.rng}
        return Work(
            lambda: _core.softmax_backward(grad, probabilities, out, **keywords),
            size(grad, probabilities, out),
        )

    def dropout_add(
        self, *, dtype: torch.dtype = BF16, dropout: float = DROPOUT, drop_path: float = 0.0,
        **wanted: bool,
    ) -> Work:  # fmt: skip
        """[rows, columns]; `wanted` of bias and residual."""
        x = self.random(dtype)
        out = torch.empty_like(x)
        bias = self.random(dtype, (self.shape[1],)) if wanted.get("bias") else None
        residual = self.random(dtype) if wanted.get("residual") else None
        keywords: dict[str, Any] = {"bias": bias, "residual": residual, "dropout": dropout}
        if dropout > 0 or drop_path > 0:
            keywords |= {"rng": self.rng, "drop_path": drop_path}
        if drop_path > 0:
            keywords["samples"] = math.gcd(4, self.shape[0])
        return Work(
            lambda: _core.dropout_add(x, out, **keywords),
            size(x, out, bias, residual),
        )

    def dropout_backward(self, *, dtype: torch.dtype = BF16, bias_grad: bool = False) -> Work:
        """[rows, columns]."""
        grad = self.random(dtype)
        out = torch.empty_like(grad)
        sums = torch.empty(self.shape[1], dtype=dtype, device=self.device) if bias_grad else None
        keywords = {"grad_input": out, "bias_grad": sums, "rng": self.rng, "dropout": DROPOUT}
        return Work(lambda: _core.dropout_backward(grad, **keywords), size(grad, out, sums))

    def rope(self, *, layout: str = "bshd", rotary: float = 1.0, **flags: bool) -> Work:
        """[batch, sequence, heads, dim] in memory of `layout`; "thd" packs the batch.

        `rotary` is the part of the channels that turns.
        """
        batch, sequence, heads, dim = self.shape
        channels = int(dim * rotary)
        turns = torch.arange(channels // 2, device=self.device) * (-2.0 / channels)
        angles = torch.arange(sequence, device=self.device)[:, None] * 10000.0**turns
        freqs = torch.cat((angles, angles), dim=-1)
        keywords: dict[str, Any] = dict(flags)
        if layout == "thd":
            x = self.random(shape=(batch * sequence, heads, dim))
            limits = torch.arange(batch + 1, dtype=torch.int32, device=self.device)
            keywords["cu_seqlens"] = limits * sequence
        elif layout == "sbhd":
            x = self.random(shape=(sequence, batch, heads, dim)).transpose(0, 1)
        else:
            x = self.random()
        out = torch.empty_like(x)
        return Work(lambda: _core.rope(x, out, freqs=freqs, **keywords), size(x, out, freqs))

    def rope_qkv(self, *, groups: int, backward: bool = False) -> Work:
        """A projection [sequence, batch, groups, ..] with `heads` queries, or its gradient."""
        batch, sequence, heads, dim = self.shape
        groups = min(groups, heads)
        turns = torch.arange(dim // 2, device=self.device) * (-2.0 / dim)
        angles = torch.arange(sequence, device=self.device)[:, None] * 10000.0**turns
        freqs = torch.cat((angles, angles), dim=-1)
        sizes = [heads // groups * dim, dim, dim]
        whole = self.random(shape=(sequence, batch, groups, sum(sizes)))
        packed = [part.transpose(0, 1) for part in whole.split(sizes, -1)]
        dense = [torch.empty_like(part.transpose(0, 1)).transpose(0, 1) for part in packed]
        given, made = (dense, packed) if backward else (packed, dense)
        keywords = {"key": given[1], "key_output": made[1], "key_freqs": freqs}
        keywords |= {"value": given[2], "value_output": made[2], "channels": dim}
        return Work(
            lambda: _core.rope(given[0], made[0], freqs=freqs, backward=backward, **keywords),
            size(whole, *dense, freqs),
        )

    def cache(self, *, gather: bool, page: int = 0) -> Work:
        """Keys and values [batch, tokens, heads, dim] to pages of `page` tokens, or from them.

        0: the cache is one piece for each sequence.
        """
        batch, tokens, heads, dim = self.shape
        page = min(page, tokens) or tokens
        pages = -(-tokens // page)
        caches = [self.random(shape=(batch * pages, page, heads, dim)) for _ in range(2)]
        new = [self.random() for _ in range(2)]
        order = torch.randperm(batch * pages, device=self.device).to(torch.int32)
        table = order.view(batch, pages) if pages > 1 else None
        numbers = torch.zeros(batch, dtype=torch.int32, device=self.device)
        if gather:
            lengths = numbers + tokens
            run = lambda: _core.cache_gather(*caches, lengths, *new, page_table=table)  # noqa: E731
        else:
            run = lambda: _core.cache_append(*new, *caches, numbers, page_table=table)  # noqa: E731
        return Work(run, 2 * size(*new))

    def merge(self, *, dtype: torch.dtype = BF16, statistics: bool = True) -> Work:
        """Outputs [batch, tokens, heads, dim] of a step to those of the steps before, in place."""
        batch, tokens, heads, _ = self.shape
        total, step = self.random(F32), self.random(dtype)
        sums = [self.random(F32, (batch, tokens, heads, 1)) for _ in range(2 * statistics)]
        moved = size(total, step, total) + (size(*sums, sums[0]) if statistics else 0)
        named = {}
        if statistics:
            named = {"total_statistics": sums[0], "step_statistics": sums[1]}
            named["statistics"] = sums[0]
        return Work(lambda: _core.attention_merge(total, step, total, **named), moved)


Case = tuple[str, str, Callable[[Maker], Work]]

ATTENTION: list[Case] = [
    ("softmax", "no mask", lambda m: m.softmax()),
    ("softmax", "causal", lambda m: m.softmax(causal=True)),
    ("softmax", "mask", lambda m: m.softmax(mask=True)),
    ("softmax", "bias", lambda m: m.softmax(bias=True)),
    ("softmax", "no mask, dropout", lambda m: m.softmax(dropout=DROPOUT)),
    (
        "softmax",
        "dropout and probabilities",
        lambda m: m.softmax(dropout=DROPOUT, probabilities=True),
    ),
    (
        "softmax",
        "causal, dropout, probs",
        lambda m: m.softmax(dropout=DROPOUT, causal=True, probabilities=True),
    ),
    ("softmax_backward", "plain", lambda m: m.softmax_backward()),
    ("softmax_backward", "dropout", lambda m: m.softmax_backward(dropout=DROPOUT)),
]

HIDDEN: list[Case] = [
    ("dropout_add", "no dropout, bias, residual",
     lambda m: m.dropout_add(dropout=0.0, bias=True, residual=True)),
    ("dropout_add", "dropout", lambda m: m.dropout_add()),
    ("dropout_add", "dropout, residual", lambda m: m.dropout_add(residual=True)),
    ("dropout_add", "dropout, bias, residual",
     lambda m: m.dropout_add(bias=True, residual=True)),
    ("dropout_add", "f32 dropout, bias, residual",
     lambda m: m.dropout_add(dtype=F32, bias=True, residual=True)),
    ("dropout_add", "drop path, residual",
     lambda m: m.dropout_add(dropout=0.0, drop_path=0.1, residual=True)),
    ("dropout_backward", "gradient", lambda m: m.dropout_backward()),
    ("dropout_backward", "with bias gradient", lambda m: m.dropout_backward(bias_grad=True)),
    ("dropout_backward", "f32 with bias gradient",
     lambda m: m.dropout_backward(dtype=F32, bias_grad=True)),
]  # fmt: skip

ROTARY: list[Case] = [
    ("rope", "bshd", lambda m: m.rope()),
    ("rope", "sbhd", lambda m: m.rope(layout="sbhd")),
    ("rope", "thd", lambda m: m.rope(layout="thd")),
    ("rope", "interleaved", lambda m: m.rope(interleaved=True)),
    ("rope", "half of the channels", lambda m: m.rope(rotary=0.5)),
    ("rope", "backward", lambda m: m.rope(backward=True)),
    ("rope", "projection", lambda m: m.rope_qkv(groups=m.shape[2])),
    ("rope", "projection, 8 groups", lambda m: m.rope_qkv(groups=8)),
    ("rope", "projection, backward", lambda m: m.rope_qkv(groups=8, backward=True)),
    ("cache_append", "one piece", lambda m: m.cache(gather=False)),
    ("cache_append", "pages", lambda m: m.cache(gather=False, page=64)),
    ("cache_gather", "pages", lambda m: m.cache(gather=True, page=64)),
    ("attention_merge", "outputs", lambda m: m.merge()),
    ("attention_merge", "fp32 outputs", lambda m: m.merge(dtype=F32)),
    ("attention_merge", "gradients", lambda m: m.merge(statistics=False)),
]


def shapes(machine: Machine) -> list[tuple[list[Case], list[tuple[int, ...]]]]:
    """The cases with the tensors that they read: a layer's, longer, shorter, an odd one."""
    if machine.quick:
        return [(ATTENTION, [(1, 2, 8, 16)]), (HIDDEN, [(8, 16)]), (ROTARY, [(2, 4, 2, 16)])]
    if not machine.cuda:
        return [
            (ATTENTION, [(1, 4, 512, 512)]),
            (HIDDEN, [(512, 1024), (511, 1023)]),
            (ROTARY, [(1, 512, 8, 64)]),
        ]
    attention = [(4, 32, 2048, 2048), (16, 16, 512, 512), (1, 16, 8192, 8192), (8, 16, 1023, 1023)]
    hidden = [(8192, 4096), (32768, 768), (8191, 4095)]
    return [
        (ATTENTION, attention),
        (HIDDEN, hidden),
        (ROTARY, [(4, 2048, 32, 128), (8, 1024, 12, 64)]),
    ]


def all_rows(machine: Machine, only: str, sized: str, effort: Effort) -> Iterator[dict[str, Any]]:
    """All cases whose operator and label contain `only`, of shapes that contain `sized`."""
    for cases, sizes in shapes(machine):
        for shape in sizes:
            written = "x".join(map(str, shape))
            for operator, label, make in cases:
                if only not in f"{operator} {label}" or sized not in written:
                    continue

                def one(
                    make: Callable[[Maker], Work] = make, shape: tuple[int, ...] = shape
                ) -> Work:
                    return make(Maker(shape, machine.device))

                named = {"operator": operator, "case": label, "shape": written}
                yield named | figures(machine, one, effort)


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--only", default="", help="cases whose name contains this")
    options.add_argument("--shape", default="", help="shapes that contain this, as 1023x1023")
    options = options.parse_args()
    report: Report = start("kernels_attention", options)
    machine = report.machine
    prepare_device(machine.device)
    effort = Effort(20, 11) if machine.cuda else Effort(2, 2) if machine.quick else Effort(2, 5)
    copy = machine.copy_rate()
    report.limit("copy TB/s", copy.median * 1e-12, "device copy, read and write counted")
    if machine.spec is not None:
        report.limit("claimed memory TB/s", machine.spec.memory * 1e-12, "data sheet")
    report.limit("kernel us", launch_time(machine, effort) * 1e6, "a kernel without work")
    columns = [dataclasses.replace(c, form=FORMS.get(c.key, c.form)) for c in COLUMNS]
    report.table(
        "operators around attention",
        columns,
        all_rows(machine, options.only, options.shape, effort),
    )
    report.finish()


if __name__ == "__main__":
    main()
