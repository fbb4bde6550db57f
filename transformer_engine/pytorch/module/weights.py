# SPDX-License-Identifier: Apache-2.0
"""A module with one weight and bias, kept whole or as several parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine.pytorch.module.composed import ComposedModule
from transformer_engine.pytorch.module.joined import JoinedRows, SplitTensors
from transformer_engine.pytorch.module.operands import PartTensors
from transformer_engine.pytorch.module.parameters import (
    Split,
    add_grad,
    bias_to_return,
    default_device,
    have_memory,
    initialise,
    split_rows,
)
from transformer_engine.pytorch.parallel import TensorParallel, mark_linear

__all__ = ["WeightModule"]


class WeightModule(TensorParallel, ComposedModule):
    """Base of modules around one weight [out_features, in_features] and bias [out_features].

    The subclass sets what is declared here, then calls `_make_parameters`.
    """

    in_features: int
    out_features: int
    use_bias: bool
    """There is a bias."""
    apply_bias: bool
    """The module adds it."""
    _split: Split | None
    _init_method: Callable | None
    _rng: tuple[Callable | None, str | None]

    _joined: dict[str, JoinedRows]
    """How split weights, and split biases, lie together."""

    def _make_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
        if self._split is not None:
            kinds = ("weight", "bias") if self.use_bias else ("weight",)
            self._joined = {kind: JoinedRows(self._split.rows) for kind in kinds}
        for label, rows in self._parts():
            weight = torch.empty(rows, self.in_features, device=device, dtype=dtype)
            self.register_parameter(f"{label}weight", Parameter(weight))
        if self.use_bias:
            for label, rows in self._parts():
                bias = torch.empty(rows, device=device, dtype=dtype)
                self.register_parameter(f"{label}bias", Parameter(bias))
        else:
            for label, _ in self._parts():
                setattr(self, f"{label}bias", torch.empty(0, device=device, dtype=dtype))
        if have_memory(self):
            self._pack()
            self.reset_parameters()
        labels = [label for label, _ in self._parts()]
        weights = [getattr(self, f"{label}weight") for label in labels]
        biases = [getattr(self, f"{label}bias") for label in labels] if self.use_bias else []
        mark_linear(weights, biases, self.parallel_mode)

    def _pack(self) -> None:
        """Lay split weights one after the other, so that a call reads them as one.

        Values and parameters stay the same; where a parameter is replaced later, a call copies.
        """
        if self._split is None:
            return
        for kind, joined in self._joined.items():
            parameters = [self._parameters.get(f"{label}{kind}") for label, _ in self._parts()]
            if any(type(p) is not Parameter or p.device.type == "meta" for p in parameters):
                continue
            if len({(p.dtype, p.device) for p in parameters}) > 1:
                continue
            if any(p.is_shared() for p in parameters if p.is_cpu):
                continue  # other processes read them where they are
            joined.lay_together(parameters)

    def __setstate__(self, state: dict) -> None:
        """Restore a copy or a pickle; split weights are laid together again."""
        super().__setstate__(state)
        self._pack()

    def _apply(self, fn: Callable, recurse: bool = True) -> "WeightModule":
        """Convert or move the parameters, and keep split ones together."""
        super()._apply(fn, recurse)
        self._pack()
        return self

    def _check_split(self) -> None:
        if self._split is not None and self.fuse_wgrad_accumulation:
            raise ValueError(
                f"{type(self).__name__}: fuse_wgrad_accumulation and parameters_split: the split "
                "weights have no common main_grad"
            )

    def _flags_text(self) -> list[str]:
        parts = super()._flags_text()
        if self._split is not None:
            parts.append(f"parameters_split={dict(self._split.parts)}")
        return parts

    def _parts(self) -> list[tuple[str, int]]:
        """(prefix of the parameter names, rows) of each weight."""
        if self._split is None:
            return [("", self.out_features)]
        return [(f"{name}_", rows) for name, rows in self._split.parts]

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Initialise the parameters; those on the meta device are made on the default device first.

        Parameters
        ----------
        defer_init : bool, default False
            Do nothing.
        """
        if defer_init:
            return
        for label, _ in self._parts():
            initialise(self, f"{label}weight", self._init_method, self._rng)
            if self.use_bias:
                initialise(self, f"{label}bias", torch.nn.init.zeros_, self._rng)
            else:
                empty = getattr(self, f"{label}bias")
                if empty.device.type == "meta":
                    empty = torch.empty(0, dtype=empty.dtype, device=default_device())
                    setattr(self, f"{label}bias", empty)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a name that `parameters_split` replaced is an error."""
        split = self.__dict__.get("_split")
        if split is not None and name in ("weight", "bias"):
            raise AttributeError(
                f"{type(self).__name__}: {name} is split into "
                f"{', '.join(f'{part}_{name}' for part, _ in split.parts)}: assign those"
            )
        super().__setattr__(name, value)

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        return ((self.in_features, self.out_features),)

    def _part_tensors(self) -> tuple[PartTensors, ...]:
        parameters = self._parameters
        if self._split is None:
            weight = parameters.get("weight")
            if weight is None:  # replaced by a parametrization, or a plain tensor
                weight = self.weight
            if not self.apply_bias:
                return (PartTensors((weight,), ()),)
            bias = parameters.get("bias")
            return (PartTensors((weight,), (self.bias if bias is None else bias,)),)
        labels = [label for label, _ in self._parts()]
        weights = tuple(getattr(self, f"{label}weight") for label in labels)
        if not self.apply_bias:
            return (PartTensors(weights, ()),)
        return (PartTensors(weights, tuple(getattr(self, f"{label}bias") for label in labels)),)

    def _split_tensors(self) -> SplitTensors | None:
        if self._split is None:
            return None
        return SplitTensors(
            self._joined["weight"], self._joined["bias"] if self.apply_bias else None
        )

    def _parameter_names(self) -> tuple[str | None, ...]:
        labels = [label for label, _ in self._parts()]
        weights = [f"{label}weight" for label in labels]
        return (*weights, *([f"{label}bias" for label in labels] if self.apply_bias else [None]))

    def _returned_bias(self, dtype: torch.dtype) -> Tensor:
        biases = [getattr(self, f"{label}bias") for label, _ in self._parts()]
        return bias_to_return(biases[0] if len(biases) == 1 else torch.cat(biases), dtype)

    def _add_weight_grad(self, part: int, grad: Tensor) -> None:
        names = [f"{label}weight" for label, _ in self._parts()]
        for name, rows in zip(names, split_rows(grad, self._parts()), strict=True):
            add_grad(getattr(self, name), rows)
