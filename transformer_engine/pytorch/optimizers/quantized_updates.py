# SPDX-License-Identifier: Apache-2.0
"""Updates of quantized parameters: of high-precision values, which are cast then."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.constants import TE_DType
from transformer_engine.pytorch.execution.overrides import asked_of_lists
from transformer_engine.pytorch.optimizers.updates import local_part
from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.casts import Computed
from transformer_engine.pytorch.tensor.float8_tensor import (
    PerTensorQuantizer,
    by_amax,
    is_cast_alone,
)
from transformer_engine.pytorch.tensor.quantized_storage import count_writes

_obeying_quantize = _core.obeying("quantize")


class Updates:
    """Updates of quantized parameters: those whose casts are part of them are run together.

    ``apply(op, lists, *more)`` calls an operation as `multi_tensor_applier` does, with its numbers
    and with more arguments. `op` is the operator of the updates; ``casting(casts)``, an operation
    too, is this library's own that casts, as of `multi_tensor_adam_cast`. Where `flag`, int32 [1],
    is not 0 nothing is written, by casts after the updates either.
    """

    def __init__(
        self, apply: Callable, op: Callable, casting: Callable, flag: Tensor | None = None
    ) -> None:
        self.apply, self.op, self.casting = apply, op, casting
        self.noop = None if flag is None else flag.to(torch.float32)
        self.rows: list[list[Tensor]] = []
        self.casts: list[dict] = []
        self.measured: list[tuple[Any, list[Tensor]]] = []  # the amax goes before the cast
        self.written: list[Any] = []  # parameters whose casts are told by fields alone

    def add(self, param: Tensor, row: Sequence[Tensor]) -> None:
        """Update a parameter that is cast from ``row[1]``, by `flush` at the latest.

        `row` has its gradient, its values and its states. Of DTensors the part of this rank.
        """
        param, row = local_part(param), [local_part(t) for t in row]
        caster = param._caster()
        plain = is_cast_alone(param, caster)
        if by_amax(param, caster):
            self.measured.append((param, row))
        elif plain and isinstance(caster, PerTensorQuantizer):
            self.written.append(param)
            fields = caster.fields_of(param, casts.no_partials(row[1]), None)
            self.put_off(row, **casts.native_fields(param._mode(), param._code(), fields))
        elif plain:
            param._write(_Updated(self, row))
        else:
            param._write(_Updated(self, row).values(), None, self.noop)

    def put_off(self, update: list[Tensor], /, **fields: Any) -> None:
        """Run a row of tensors, and the cast of its values by these fields, with `flush`."""
        self.rows.append(update)
        self.casts.append(fields)

    def flush_by_fp8(self) -> None:
        """Have who is selected for `multi_tensor_adam_fp8` run those updates that it expresses.

        Their casts have one scale and record an amax, and row-wise codes alone.
        """
        asked = asked_of_lists("multi_tensor_adam_fp8")
        kinds: dict[torch.dtype, list[int]] = {}
        for i, fields in enumerate(self.casts if asked is not None else ()):
            one_scale = fields["mode"] == _core.SCALING_TENSOR and fields["amax"] is not None
            if one_scale and fields.get("column") is None:
                kinds.setdefault(fields["row"].dtype, []).append(i)
        done = set()
        for dtype, places in kinds.items():
            rows = [_with_scales(self.rows[i], self.casts[i]) for i in places]
            if self.apply(asked, _by_list(rows), TE_DType[dtype]) is NotImplemented:
                continue
            for i, (*_, scale, _amax, _inverse) in zip(places, rows, strict=True):
                self.casts[i]["row_scales"][1:] = scale
            done.update(places)
        rest = [i for i in range(len(self.rows)) if i not in done]
        self.rows, self.casts = [self.rows[i] for i in rest], [self.casts[i] for i in rest]

    def flush(self) -> None:
        """Run what was put off; where somebody else may update, casts are calls of their own."""
        self._flush_measured()
        rows, casts_ = self.rows, self.casts
        self.rows, self.casts = [], []
        if rows:
            lists = _by_list(rows)
            if asked_of_lists(self.op.__name__) is None and all(r[1].numel() > 0 for r in rows):
                self.apply(functools.partial(self.casting, casts_), lists)
            else:
                self.apply(self.op, lists)
                for row, fields in zip(rows, casts_, strict=True):
                    _obeying_quantize(row[1], **fields, noop=self.noop)
        written, self.written = self.written, []
        count_writes(written)

    def _flush_measured(self) -> None:
        """Run the updates of weights that are cast by their amaxes."""
        measured, self.measured = self.measured, []
        if measured:
            self.apply(self.op, _by_list([row for _, row in measured]))
        by_class: dict[type, list[tuple[Any, Tensor]]] = {}
        for param, row in measured:
            by_class.setdefault(type(param), []).append((param, row[1]))
        for kind, pairs in by_class.items():
            kind._write_each(pairs, self.noop)


def _by_list(rows: list[list[Tensor]]) -> list[list[Tensor]]:
    return [list(each) for each in zip(*rows, strict=True)]


def _with_scales(row: list[Tensor], fields: dict[str, Any]) -> list[Tensor]:
    """Tensors of a row for `multi_tensor_adam_fp8`; a scale of 0, not known yet, is 1."""
    grad, values, mean, square = row
    codes, inverse = fields["row"].view(torch.uint8), fields["row_scales"][:1]
    scale = torch.where(fields["scale"] == 0, 1.0, fields["scale"])
    return [grad, codes, mean, square, values, scale, fields["amax"], inverse]


class _Updated(Computed):
    """New values as the source of a cast: one that has to know their amax has the update run."""

    def __init__(self, updates: Updates, row: list[Tensor]) -> None:
        put_off = functools.partial(updates.put_off, row)  # no method of this: it holds gradients
        super().__init__(put_off, row[1].shape, row[1].device)
        self._updates, self._row = updates, row

    def cast(self, **fields: Any) -> None:
        """Cast them as these fields say, unless the update has left them as they are."""
        if self._values is not None:
            fields["noop"] = self._updates.noop
        super().cast(**fields)

    def values(self) -> Tensor:
        """The new values, in the memory of the old ones."""
        if self._values is None:
            self._updates.apply(self._updates.op, [[tensor] for tensor in self._row])
            self._values = self._row[1]
        return self._values
