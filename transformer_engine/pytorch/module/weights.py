# SPDX-License-Identifier: Apache-2.0
"""A module with one weight and bias, kept whole or as several parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine.pytorch.module.composed import ComposedModule, PartTensors, add_grad
from transformer_engine.pytorch.module.parameters import (
    Split,
    default_device,
    initialise,
    split_rows,
)

__all__ = ["WeightModule"]


class WeightModule(ComposedModule):
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

    def _make_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
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
        if device.type != "meta":
            self.reset_parameters()

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
            bias = None
            if self.apply_bias:
                bias = parameters.get("bias")
                if bias is None:
                    bias = self.bias
            return (PartTensors(weight, bias),)
        weight = torch.cat([getattr(self, f"{label}weight") for label, _ in self._parts()])
        if not self.apply_bias:
            return (PartTensors(weight, None),)
        bias = torch.cat([getattr(self, f"{label}bias") for label, _ in self._parts()])
        return (PartTensors(weight, bias),)

    def _parameter_names(self) -> tuple[str | None, ...]:
        return ("weight", "bias") if self._split is None else (None, None)

    def _returned_bias(self, dtype: torch.dtype) -> Tensor:
        biases = [getattr(self, f"{label}bias") for label, _ in self._parts()]
        bias = biases[0] if len(biases) == 1 else torch.cat(biases)
        return bias.to(dtype)

    def _cache_sources(self, part: int, weight: Tensor) -> tuple[Tensor, ...]:
        if self._split is None:
            return (weight,)
        return tuple(getattr(self, f"{label}weight") for label, _ in self._parts())

    def _add_weight_grad(self, part: int, grad: Tensor) -> None:
        names = [f"{label}weight" for label, _ in self._parts()]
        for name, rows in zip(names, split_rows(grad, self._parts()), strict=True):
            add_grad(getattr(self, name), rows)
