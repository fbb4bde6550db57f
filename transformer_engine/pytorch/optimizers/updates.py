# SPDX-License-Identifier: Apache-2.0
"""One pass of the C library over lists of tensors, whatever their devices, dtypes and strides."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.execution.overrides import of_lists
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

Lists = Sequence[Sequence[Tensor]]

_GRAD = 0


def local_part(param: Tensor) -> Tensor:
    """Part of a parameter that this rank has."""
    return getattr(param, "_local_tensor", param)


def wide_copy(param: Tensor) -> Tensor:
    """A copy of a parameter in fp32, of a quantized one too, and of one that is sharded."""
    local = local_part(param)
    if local is param or not is_quantized(local):
        return param.detach().clone().float()
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.detach().dequantize(dtype=torch.float32), param.device_mesh, param.placements,
        run_check=False, shape=param.size(), stride=param.stride(),
    )  # fmt: skip


def checked_lists(op: str, lists: Lists, *counts: int) -> list[list[Tensor]]:
    """The lists; ValueError for another number or other lengths, TypeError for no lists."""
    if not all(hasattr(each, "__len__") for each in lists):
        refuse_others(op, lists)
    if len(lists) not in counts or len({len(each) for each in lists}) > 1:
        expected = " or ".join(map(str, counts))
        raise ValueError(
            f"{op}: tensor_lists of {[len(each) for each in lists]} tensors, expected {expected} "
            "lists of one length"
        )
    return [list(each) for each in lists]


def refuse_others(op: str, lists: Any) -> None:
    """Raise a TypeError for lists of anything but tensors, of which None is no list."""
    for i, each in enumerate(lists if isinstance(lists, list | tuple) else [lists]):
        if each is not None and not isinstance(each, list | tuple):
            raise TypeError(f"{op}: tensor_lists[{i}]: {type(each).__name__}, expected a list")
        for j, tensor in enumerate(each or ()):
            if not isinstance(tensor, Tensor):
                found = type(tensor).__name__
                raise TypeError(f"{op}: tensor_lists[{i}][{j}]: {found}, expected a tensor")


def _on(device: torch.device, dtype: torch.dtype, number: Any) -> Tensor | None:
    """A number that the device reads; None for one of the host, and None for None."""
    if not isinstance(number, Tensor):
        return None
    return number.detach().reshape(1).to(device, dtype)


def _host(number: Any) -> float:
    """A number of the host; that of a device is not read."""
    return 0.0 if isinstance(number, Tensor) else float(number)


def run_update(
    kind: int,
    flags: int,
    lists: list,
    flag: Tensor | None,
    numbers: dict[str, Any],
    step: Any = 1,
    casts: Sequence[dict] | None = None,
) -> None:
    """Update lists of tensors in place; nothing is read from a device.

    Parameters
    ----------
    kind, flags : int
        ``_core.UPDATE_*``.
    lists : list
        Of `_core.update`; gradients, values, ..., None where there is none.
    flag : Tensor, optional
        int32 [1], on any device.
    numbers : dict
        ``lr``, ``betas``, ``eps``, ``decay``, ``grad_scale``, ``momentum``, ``dampening``, ``top``:
        floats; `lr` and `grad_scale` may be tensors of one element.
    step : int or Tensor
        int32 [1].
    casts : sequence of dict, optional
        Of each tensor, fields of `_core.quantize`: how its new values are cast.
    """
    beta1, beta2 = numbers.get("betas", (0.0, 0.0))
    lr, scale = numbers.get("lr", 0.0), numbers.get("grad_scale", 1.0)
    given = (
        *(_host(lr), beta1, beta2, numbers.get("eps", 0.0), numbers.get("decay", 0.0)),
        *(_host(scale), numbers.get("momentum", 0.0), numbers.get("dampening", 0.0)),
        numbers.get("top", 0.0),
    )
    call = kind, flags, flag, given, (lr, scale, step)
    with torch.no_grad():
        if not _updated_as_they_are(call, lists, casts):
            _update_by_groups(call, lists, casts)


def _run(call: tuple, device: torch.device, lists: Sequence, casts: Sequence[dict] | None) -> None:
    """Update dense tensors of one device and, list by list, of one dtype."""
    kind, flags, flag, given, (lr, scale, step) = call
    local = None if flag is None else flag.detach().to(device)
    on_device = (
        _on(device, torch.float32, lr),
        _on(device, torch.float32, scale),
        _on(device, torch.int32, step),
    )
    count = 1 if isinstance(step, Tensor) else int(step)
    cast = None if casts is None else tuple(casts)
    update = of_lists("update", device)
    update(kind, flags, tuple(lists), local, given, count, on_device, cast)
    if local is not None and kind == _core.UPDATE_SCALE and local.device != flag.device:
        flag.copy_(torch.maximum(flag, local.to(flag.device)))


def _updated_as_they_are(call: tuple, lists: list, casts: Sequence[dict] | None) -> bool:
    """Update all at once; False, and nothing is written, where they are not dense and alike."""
    if not lists[_GRAD]:
        return True
    try:
        _run(call, lists[_GRAD][0].device, lists, casts)
    except (AttributeError, TypeError, ValueError):  # all is checked before anything is written
        return False
    first = 0 if call[1] & _core.UPDATE_WRITE_GRAD else 1
    torch.autograd.graph.increment_version([t for each in lists[first:] if each for t in each])
    return True


def _update_by_groups(call: tuple, lists: list, casts: Sequence[dict] | None) -> None:
    """Update those of one device and the same dtypes together, copies of those not dense.

    What is wrong with one group leaves the others as they are, too.
    """
    refuse_others("update", lists)
    groups: dict[tuple, list[int]] = {}
    for i, grad in enumerate(lists[_GRAD]):
        key = grad.device, *(each[i].dtype for each in lists if each is not None)
        groups.setdefault(key, []).append(i)
    first = 0 if call[1] & _core.UPDATE_WRITE_GRAD else 1
    found = []
    for (device, *_), places in groups.items():
        chosen = tuple(None if each is None else [each[i] for i in places] for each in lists)
        for tensor in (t for each in chosen[1:] for t in each or ()):
            check_apart("update", tensor)
        dense = tuple(
            None if each is None else [t.resolve_neg().contiguous() for t in each]
            for each in chosen
        )
        given = device, dense, None if casts is None else [casts[i] for i in places]
        if len(groups) > 1:
            _run((call[0], call[1] | _core.UPDATE_CHECK, *call[2:]), *given)
        found.append((given, chosen))
    for given, chosen in found:
        _run(call, *given)
        _wrote(chosen[first:], given[1][first:])


def check_apart(op: str, tensor: Tensor) -> None:
    """ValueError for a tensor to be written of which elements share memory, so have two values."""
    if _once(tensor, tensor) is not tensor:
        raise ValueError(
            f"{op}: shape {tuple(tensor.shape)} and strides {tensor.stride()} of what is written: "
            "elements share memory: clone it"
        )


def _once(tensor: Tensor, like: Tensor) -> Tensor:
    """One of those elements of a tensor that share their memory in an expanded one of its shape."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _wrote(chosen: tuple, dense: tuple) -> None:
    """Copy what was written to copies, and have autograd know of the rest."""
    written = []
    for each, copies in zip(chosen, dense, strict=True):
        for tensor, copy in zip(each or (), copies or (), strict=True):
            if copy is tensor:
                written.append(tensor)
            else:
                _once(tensor, tensor).copy_(_once(copy, tensor))
    torch.autograd.graph.increment_version(written)
