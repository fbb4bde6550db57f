# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors that autograd functions of programs save: as parts that autograd can keep."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def prepare_for_saving(*tensors: Any) -> tuple[list[Tensor | None], list[Any]]:
    """Return arguments of ``save_for_backward`` for tensors and storages, and what else to keep.

    Storages are emptied. Undo with `restore_from_saved`. TypeError for anything else but None.
    """
    for at, tensor in enumerate(tensors):
        if tensor is not None and not isinstance(tensor, Tensor):
            _require(tensor, "prepare_for_saving", f"prepare_for_saving: argument {at}", "")
    saved: list[Tensor | None] = []
    objects: list[Any] = []
    for tensor in tensors:
        if tensor is None or isinstance(tensor, Tensor):
            saved.append(tensor)
            objects.append(None)
        else:
            parts, kept = tensor.prepare_for_saving()
            saved += parts
            objects.append(kept)
    return saved, objects


def restore_from_saved(
    tensors: list[Any], saved_tensors: Sequence[Tensor | None], return_saved_tensors: bool = False
) -> Any:
    """Tensors and storages of what `prepare_for_saving` gave, in its two parts swapped.

    With `return_saved_tensors` a pair of these, and of saved tensors that were left over. TypeError
    and ValueError for what it did not give.
    """
    return _restored("restore_from_saved", tensors, saved_tensors, return_saved_tensors)


def restore_from_func_ctx(ctx: Any, return_saved_tensors: bool = False) -> Any:
    """`restore_from_saved` of a context that has ``tensor_objects``; it lets these go.

    TypeError for what is no such context, RuntimeError where they are gone.
    """
    for name in ("tensor_objects", "saved_tensors"):
        if not hasattr(ctx, name):
            raise TypeError(
                f"restore_from_func_ctx: ctx: {type(ctx).__name__} object without {name}; give the "
                "context of an autograd function whose forward has set ctx.tensor_objects and "
                "called ctx.save_for_backward with what prepare_for_saving gave"
            )
    if ctx.tensor_objects is None:
        raise RuntimeError(
            "restore_from_func_ctx: ctx.tensor_objects is None: the backward has restored them "
            "before, or the forward set none; keep what restore_from_func_ctx returned"
        )
    objects, saved = ctx.tensor_objects, ctx.saved_tensors
    found = _restored("restore_from_func_ctx", objects, saved, return_saved_tensors)
    ctx.tensor_objects = None
    return found


def _restored(what: str, tensors: Any, saved: Any, return_saved_tensors: bool) -> Any:
    for name, given in (("tensors", tensors), ("saved_tensors", saved)):
        if not isinstance(given, list | tuple):
            raise TypeError(
                f"{what}: {name}: {type(given).__name__} object, expected a list or tuple, as "
                "prepare_for_saving gives them: objects to keep and tensors to save"
            )
    for at, kept in enumerate(tensors):
        if kept is not None:
            _require(kept, "restore_from_saved", f"{what}: tensors[{at}]", "None or ")
    rest, made = list(saved), []
    for at, kept in enumerate(tensors):
        if kept is None:
            if not rest:
                raise ValueError(
                    f"{what}: tensors[{at}] has no saved tensor left of {len(saved)}; give all "
                    "that prepare_for_saving gave, in its order"
                )
            made.append(rest.pop(0))
        else:
            rest = kept.restore_from_saved(rest)
            made.append(kept)
    return (made, rest) if return_saved_tensors else made


def _require(given: Any, method: str, place: str, none: str) -> None:
    """Raise a TypeError for what has no method of storages."""
    if isinstance(given, Tensor) or not callable(getattr(given, method, None)):
        expected = f"{none}a storage of quantized data" if none else "a tensor, a storage or None"
        raise TypeError(f"{place}: {type(given).__name__} object, expected {expected}")
