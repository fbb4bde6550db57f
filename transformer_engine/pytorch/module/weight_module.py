# SPDX-License-Identifier: Apache-2.0
"""A module with one weight and bias, kept whole or as several parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.common.graphs import LinearFlags
from transformer_engine.pytorch.module.joined import JoinedRows, SplitTensors
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.operands import LinearTensors
from transformer_engine.pytorch.module.parallel import TensorParallel, mark_linear
from transformer_engine.pytorch.module.parameters import (
    Split,
    add_grad,
    bias_to_return,
    functions,
    have_memory,
    make_bias,
    make_weight,
    positive_sizes,
    split_rows,
)


class WeightModule(TensorParallel, LinearBase):
    """Base of modules around one weight [out_features, in_features] and bias [out_features].

    The subclass calls `_set_linear`, then `_make_parameters`.
    """

    SLOTS = (3, 2)

    _split: Split | None
    """How the weight is kept as several parameters."""
    _joined: dict[str, JoinedRows]
    """How split weights, and split biases, lie together."""

    def _set_linear(
        self,
        in_features: int,
        out_features: int,
        parameters_split: Any,
        init_method: Callable | None,
        rng: tuple[Callable | None, str | None],
    ) -> None:
        """Check and keep the arguments about the parameters, after `_begin`."""
        kind = type(self).__name__
        positive_sizes(kind, in_features=in_features, out_features=out_features)
        self._split = Split.of(kind, parameters_split, out_features)
        if self.parallel_mode == "column":
            out_features = self._share(out_features, "out_features")
            if self._split is not None:
                parts = self._split.pieces
                sizes = [self._share(rows, f"parameters_split: {name}") for name, rows in parts]
                self._split = Split(
                    tuple((n, rows) for (n, _), rows in zip(parts, sizes, strict=True))
                )
        elif self.parallel_mode == "row":
            in_features = self._share(in_features, "in_features")
        functions(kind, init_method=init_method, get_rng_state_tracker=rng[0])
        self.in_features = in_features
        self.out_features = out_features
        self._init_method = init_method
        self._rng = rng
        if self._split is not None and self.fuse_wgrad_accumulation:
            raise ValueError(
                f"{kind}: fuse_wgrad_accumulation and parameters_split: the split weights have no "
                "common main_grad: leave one of them out"
            )

    def _make_parameters(self, device: torch.device, dtype: torch.dtype) -> None:
        if self._split is not None:
            kinds = ("weight", "bias") if self.use_bias else ("weight",)
            self._joined = {kind: JoinedRows(self._split.rows) for kind in kinds}
        for prefix, rows in self._pieces():
            make_weight(self, prefix, (self.in_features, rows), device, dtype)
        for prefix, rows in self._pieces():
            make_bias(self, prefix, rows, device, dtype)
        if have_memory(self):
            self._pack()
            self.reset_parameters()
        biases = self._tensors("bias") if self.use_bias else ()
        mark_linear(
            self._tensors("weight"), biases, self.parallel_mode, self.sequence_parallel,
            self.delay_wgrad_compute,
        )  # fmt: skip

    def _pack(self) -> None:
        """Lay split weights one after the other, so that a call reads them as one.

        Values and parameters stay the same; where a parameter is replaced later, a call copies.
        """
        if self._split is None:
            return
        for kind, joined in self._joined.items():
            parameters = [self._parameters.get(name) for name in self._names(kind)]
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

    def extra_repr(self) -> str:
        """Sizes and what differs from the defaults."""
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return ", ".join([sizes, f"bias={self.use_bias}", *self._flags_text()])

    def _flags_text(self) -> list[str]:
        parts = super()._flags_text()
        if self._split is not None:
            parts.append(f"parameters_split={dict(self._split.pieces)}")
        return parts

    def _pieces(self) -> list[tuple[str, int]]:
        """(prefix of the parameter names, rows) of each weight."""
        if self._split is None:
            return [("", self.out_features)]
        return [(f"{name}_", rows) for name, rows in self._split.pieces]

    def _names(self, kind: str) -> tuple[str, ...]:
        return tuple(f"{prefix}{kind}" for prefix, _ in self._pieces())

    @property
    def weight_names(self) -> list[str]:
        """Names of the weights."""
        return [*self._names("weight")]

    @property
    def bias_names(self) -> list[str]:
        """Names of the biases, whether there is one or not."""
        return [*self._names("bias")]

    def _tensors(self, kind: str) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self._names(kind))

    def _initialisers(self) -> Iterable[tuple[str, Callable | None]]:
        return ((prefix, self._init_method) for prefix, _ in self._pieces())

    def forward(
        self,
        inp: Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """Apply the layer, after the norm of one that has a norm.

        Parameters
        ----------
        inp : Tensor
            [..., in_features] in the dtype of the parameters, or in any of fp32, fp16 and bf16
            under `torch.autocast`.
        is_first_microbatch : bool, optional
            With gradient accumulation: True for the first microbatch of a step (the weight is
            quantized and kept), False for the others (the kept one is used). None quantizes the
            weight at each call and keeps nothing.
        fp8_output : bool
            In FP8, return the output as a quantized tensor: cast as an input is by the recipe, with
            a scale of its own under delayed scaling. The next module multiplies it as it is.
        fp8_grad : bool
            The same of the gradient of `inp`, which is cast as a gradient is.

        Returns
        -------
        Tensor or tuple of Tensor
            [..., out_features]; then the bias, not added, with `return_bias`; then the norm's
            output [..., in_features] with `return_layernorm_output`.

        Raises
        ------
        TypeError
            dtypes or kinds of tensors that do not go together.
        ValueError
            The last dim is not `in_features`.
        NotImplementedError
            `fp8_output` or `fp8_grad` under a `CustomRecipe`, in `torch.export` or in a
            transform of torch.func. `torch.compile` leaves such a call outside of its graphs.
        """
        returns = None
        if fp8_output or fp8_grad:
            flag = _core.VALUE_RETURN_QUANTIZED
            returns = LinearFlags(input=flag * bool(fp8_grad), output=flag * bool(fp8_output))
        out = self._call(inp, is_first_microbatch, returns)
        return self._results(inp, out) if self.return_bias or self.return_layernorm_output else out

    _FORWARD = forward

    def _check_name(self, name: str) -> None:
        """AttributeError for a name that `parameters_split` replaced."""
        split = self.__dict__.get("_split")
        if split is not None and name in ("weight", "bias"):
            raise AttributeError(
                f"{type(self).__name__}: {name} is split into "
                f"{', '.join(f'{piece}_{name}' for piece, _ in split.pieces)}: assign those"
            )

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        return ((self.in_features, self.out_features),)

    def _linear_tensors(self) -> tuple[LinearTensors, ...]:
        parameters = self._parameters
        if self._split is None:
            weight = parameters.get("weight")
            if weight is None:  # replaced by a parametrization, or a plain tensor
                weight = self.weight
            if not self.apply_bias:
                return (LinearTensors((weight,), ()),)
            bias = parameters.get("bias")
            return (LinearTensors((weight,), (self.bias if bias is None else bias,)),)
        return (
            LinearTensors(
                self._tensors("weight"), self._tensors("bias") if self.apply_bias else ()
            ),
        )

    def _split_tensors(self) -> SplitTensors | None:
        if self._split is None:
            return None
        return SplitTensors(
            self._joined["weight"], self._joined["bias"] if self.apply_bias else None
        )

    def _parameter_names(self) -> tuple[str | None, ...]:
        return (*self._names("weight"), *(self._names("bias") if self.apply_bias else (None,)))

    def _returned_bias(self, dtype: torch.dtype) -> Tensor:
        biases = self._tensors("bias")
        return bias_to_return(biases[0] if len(biases) == 1 else torch.cat(biases), dtype)

    def _add_weight_grad(self, part: int, grad: Tensor) -> None:
        for weight, rows in zip(
            self._tensors("weight"), split_rows(grad, self._pieces()), strict=True
        ):
            add_grad(weight, rows)
