# SPDX-License-Identifier: Apache-2.0
"""Parameters that a call reads as one: split weights and biases, rows after rows.

Each parameter has a storage of its own, as programs that save or share tensors expect, and all of
them lie in one allocation, one after the other, so that a GEMM reads them as one weight.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core


class JoinedRows:
    """Several tensors of so many `rows` each as one, whose rows theirs are."""

    def __init__(self, rows: tuple[int, ...]) -> None:
        self.rows = rows
        # The storages of the pieces hold the allocation. Were it held here too, a framework that
        # replaces parameters (FSDP) could not free it.
        self._whole: weakref.ref | None = None

    def __reduce__(self) -> tuple:
        """Copy and pickle the rows: a copy's parameters lie elsewhere."""
        return JoinedRows, (self.rows,)

    def lay_together(self, parameters: Sequence[Tensor]) -> None:
        """Move parameters into one allocation, where they do not lie in one already.

        They are [rows, ...] each, of one dtype and device, and stay the same objects.
        """
        if self._found(parameters) is not None:
            return
        with torch.inference_mode(False), torch.no_grad():
            whole = torch.cat([parameter.detach() for parameter in parameters])
            pieces = _core.split_storage(whole, self.rows)
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter.data = piece
        self._whole = weakref.ref(whole)

    def join(self, pieces: Sequence[Tensor], traced: bool) -> Tensor:
        """One tensor [sum of rows, ...]: the allocation that the pieces lie in, else a copy.

        Always a copy where a graph is traced, which knows no addresses. Changes of the pieces do
        not count in its version.
        """
        whole = None if traced else self._found(pieces)
        return torch.cat(tuple(pieces)) if whole is None else whole

    def _found(self, pieces: Sequence[Tensor]) -> Tensor | None:
        """The allocation, where the pieces lie in it as `lay_together` left them."""
        whole = None if self._whole is None else self._whole()
        if whole is None:
            return None
        return whole if _core.lie_in(whole, tuple(pieces), self.rows) else None


class SplitTensors(NamedTuple):
    """How some tensors of a call make up one weight and one bias."""

    weight: JoinedRows  # of the weights
    bias: JoinedRows | None
    """Of the biases; None where the call adds none, and has None in their place."""
    begin: int = 0
    """Place of the first weight among the tensors of the call; biases come behind the weights."""
    part: int = 0
    """Number of the weight among those of the call."""

    @property
    def count(self) -> int:
        """How many tensors there are."""
        return len(self.weight.rows) + (1 if self.bias is None else len(self.weight.rows))

    def weights(self, tensors: tuple) -> tuple[Tensor, ...]:
        """Return the weights among a call's tensors."""
        return tensors[self.begin : self.begin + len(self.weight.rows)]

    def join(self, tensors: tuple, traced: bool) -> tuple[Tensor | None, ...]:
        """Return the tensors with one weight and one bias in the place of these."""
        begin, end = self.begin, self.begin + len(self.weight.rows)
        weight, bias = self.weight.join(tensors[begin:end], traced), None
        begin, end = end, self.begin + self.count
        if self.bias is not None:
            bias = self.bias.join(tensors[begin:end], traced)
        return (*tensors[: self.begin], weight, bias, *tensors[end:])

    def spread(self, found: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the gradients with those of the weight and the bias by rows."""
        weight, bias = found[self.begin : self.begin + 2]
        rows = self.weight.rows
        none: tuple[Any, ...] = (None,) * len(rows)
        of_bias = (None,) if self.bias is None else none
        return [
            *found[: self.begin],
            *(none if weight is None else weight.split_with_sizes(rows)),
            *(of_bias if bias is None else bias.split_with_sizes(rows)),
            *found[self.begin + 2 :],
        ]
