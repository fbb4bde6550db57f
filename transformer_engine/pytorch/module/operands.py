# SPDX-License-Identifier: Apache-2.0
"""The tensors that a call of linear layers computes with, and the rules of their dtypes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import HIGH_PRECISION, Quantization
from transformer_engine.pytorch.torchside.modes import faking, without_memory
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class LinearTensors(NamedTuple):
    """Tensors of one linear layer of a call."""

    weights: tuple[Tensor, ...]
    """[rows, in_features] each; together the weight [out_features, in_features]."""
    biases: tuple[Tensor, ...]  # [rows] each; empty where the layer adds none

    def to(self, dtype: torch.dtype) -> "LinearTensors":
        """Convert all of them."""
        weights = tuple(weight.to(dtype) for weight in self.weights)
        return LinearTensors(weights, tuple(bias.to(dtype) for bias in self.biases))


def parameter_flags(tensors: Sequence[Tensor | None], gradients: bool) -> int:
    """`VALUE_*` of the parameter that tensors make up; 0 where there is none.

    `gradients`: it has one where any of these requires it.
    """
    there = [tensor for tensor in tensors if tensor is not None]
    if not there:
        return 0
    wanted = gradients and any(tensor.requires_grad for tensor in there)
    return _core.VALUE_PARAMETER | (_core.VALUE_GRADIENT if wanted else 0)


class CallTensors(NamedTuple):
    """The tensors of a call."""

    input: Tensor  # [..., features]
    norm: tuple[Tensor, Tensor | None] | None
    """(gamma, beta or None) of the norm before the first layer; None without a norm."""
    parts: tuple[LinearTensors, ...]  # the linear layers
    output_dtype: torch.dtype  # of the result
    given: tuple[Tensor | None, ...] = ()  # these as they were before a conversion, as of `flat`

    def flat(self) -> tuple[Tensor | None, ...]:
        """Return them in the order of ``CallPlans.tensors``, None for what there is not."""
        flat = [self.input] if self.norm is None else [self.input, *self.norm]
        for weights, biases in self.parts:
            flat += weights
            flat += biases or (None,)
        return tuple(flat)


def dtypes_of(
    tensors: CallTensors, weights: Sequence[Tensor], into_main: Sequence[bool]
) -> list[torch.dtype]:
    """The dtypes that plans depend on, as `codes_of` labels them.

    `weights` are those of each part, before conversions; `into_main`: their gradients go to
    ``main_grad``.
    """
    inp = tensors.input.dtype
    dtypes = [inp, tensors.output_dtype, inp if tensors.norm is None else tensors.norm[0].dtype]
    for part, weight, main in zip(tensors.parts, weights, into_main, strict=True):
        dtype = part.weights[0].dtype
        dtypes.append(dtype)
        dtypes.append(part.biases[0].dtype if part.biases else dtype)
        dtypes.append(weight.main_grad.dtype if main else dtype)
    return dtypes


def conversions(given: tuple, read: tuple) -> tuple[torch.dtype | None, ...]:
    """The dtypes that the given tensors are read in; None: as it is, () where all are."""
    pairs = zip(given, read, strict=True)
    dtypes = tuple([None if g is None or g.dtype == r.dtype else r.dtype for g, r in pairs])
    return dtypes if any(dtypes) else ()


def refuse_memory(kind: str, inp: Tensor, tensors: list[Tensor]) -> None:
    """Raise a TypeError for tensors of a module that have memory, where its input has none."""
    for tensor in tensors:
        if tensor.device != inp.device or not without_memory(tensor):
            raise TypeError(
                f"{kind}: inp is {_what(inp)}, a parameter {_what(tensor)}: shapes alone are "
                "computed where neither has memory. Make the module under torch.device('meta') or "
                "the same FakeTensorMode, or take an input that has memory: convert it to a plain "
                "torch.Tensor"
            )


def codes_of(kind: str, labels: Iterable[str], dtypes: Sequence[torch.dtype]) -> list[int]:
    """``_core.DTYPE_*`` of dtypes, which have labels; TypeError for one that no plan takes."""
    for label, dtype in zip(labels, dtypes, strict=True):
        if dtype not in DTYPES:
            what = "the input" if label == "inp" else "the module"
            raise TypeError(
                f"{kind}: {label} is {dtype}, expected torch.float32, torch.float16 or "
                f"torch.bfloat16; convert {what}"
            )
    return [_core.dtype_code(dtype) for dtype in dtypes]


def _what(tensor: Tensor) -> str:
    return "on meta" if tensor.is_meta else f"a {type(tensor).__name__} on {tensor.device}"


def promoted(
    kind: str,
    features: int,
    given: tuple[Tensor, tuple[Tensor, Tensor | None] | None, tuple[LinearTensors, ...]],
    quantization: Sequence[Quantization],
    name: str = "inp",
) -> CallTensors:
    """Check a call's tensors, as `CallTensors` has them, and apply the dtype rules.

    `quantization` is that of each part, () without a recipe; `name` is what the caller calls the
    input.

    Outside `torch.autocast` weights and biases are of one dtype, which is that of the result and,
    without a norm, of the input; a norm reads the input and its own parameters in any. Inside, the
    result has its dtype; what a part reads that casts is left as it is, and what others read is
    converted, but for the norm's parameters.

    TypeError where the input is no tensor of the CPU, of a CUDA device or of the meta device,
    dtypes differ, or the input has no memory and the module has; ValueError where its last dim is
    not `features`.
    """
    inp, norm, parts = given
    expect_tensor(f"{kind}: {name}", inp)
    if inp.dim() == 0 or inp.size(-1) != features:
        raise ValueError(f"{kind}: {name}: shape {tuple(inp.shape)}, expected [..., {features}]")
    device = inp.device.type
    tensors = [t for part in parts for t in (*part.weights, *part.biases)]
    tensors += [t for t in norm or () if t is not None]
    if not torch.compiler.is_compiling() and without_memory(inp) and not faking():
        refuse_memory(kind, inp, tensors)
    if device != "meta" and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        casts = [each.is_quantized for each in quantization or (HIGH_PRECISION,) * len(parts)]
        inp = inp if casts[0] else inp.to(dtype)
        pairs = zip(parts, casts, strict=True)
        parts = tuple([part if of else part.to(dtype) for part, of in pairs])
        return CallTensors(inp, norm, parts, dtype)
    weights, biases = parts[0]
    dtype = inp.dtype if norm is None else weights[0].dtype
    if any(t.dtype != dtype for part in parts for t in (*part.weights, *part.biases)):
        raise TypeError(
            f"{kind}: "
            + ("" if norm is not None else f"{name} is {dtype}, ")
            + f"weight {weights[0].dtype}, bias {biases[0].dtype if biases else None}"
            ": outside torch.autocast they must be of one dtype; convert the "
            + ("module" if norm is not None else "input or the module")
        )
    if norm is not None:
        if inp.dtype is torch.float64:
            inp = inp.float()
        norm = one_dtype(*norm)
    return CallTensors(inp, norm, parts, dtype)


def one_dtype(gamma: Tensor, beta: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Parameters of a norm in one dtype, as operators read them: fp32 where they differ."""
    if beta is None or beta.dtype == gamma.dtype:
        return gamma, beta
    return gamma.float(), beta.float()
