# SPDX-License-Identifier: Apache-2.0
"""Operators of torch on quantized tensors, for all formats.

Copies and views stay quantized as far as a format has them (`_viewed_fields`); all other views are
in high precision, and what is written to them is written to the tensor (`_view_of`). All else reads
the values in high precision; what an operator writes to is quantized again afterwards. Which of
these an operator without a handler is, its schema says (`_way_of`): no list of names can forget it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch import tensor as formats
from transformer_engine.pytorch.tensor import parts
from transformer_engine.pytorch.torchside.modes import (
    aliasing,
    is_composite,
    is_traced_or_faked,
    mapped_tensors,
    run_composite,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

aten = torch.ops.aten

_HANDLERS: dict[Any, Callable] = {}


def _handles(*operators: Any) -> Callable:
    def register(function: Callable) -> Callable:
        _HANDLERS.update(dict.fromkeys(operators, function))
        return function

    return register


def run(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator whose arguments have quantized tensors among them."""
    handler = _HANDLERS.get(func)
    if handler is not None:
        result = handler(func, args, kwargs)
        if result is not NotImplemented:
            return result
    return _way_of(func)(func, args, kwargs)


@functools.cache
def _way_of(func: Any) -> Callable:
    """Handlers of operators without one of their own, by what their schemas say of memory."""
    if torch.Tag.inplace_view in func.tags:
        return _refuse
    if func._schema.is_mutable:
        return _in_high_precision
    if is_composite(func):  # inference mode alone leaves it whole
        return run_composite
    if any(made.alias_info is not None for made in func._schema.returns):
        return _window
    return _in_high_precision


def _refuse(func: Any, args: tuple, kwargs: dict) -> Any:
    del args, kwargs
    raise NotImplementedError(
        f"{func}: a quantized tensor keeps its shape, strides and memory: make a view or assign "
        "tensor.data"
    )


def _in_high_precision(func: Any, args: tuple, kwargs: dict) -> Any:
    """Run an operator on plain values, and quantize those again that it has changed."""
    values: dict[int, tuple[Any, Tensor]] = {}

    def plain(tensor: Tensor) -> Tensor:
        if not is_quantized(tensor):
            return tensor
        if id(tensor) not in values:
            made = tensor._dequantized(tensor.dtype, tuple(tensor.shape))
            values[id(tensor)] = tensor, made
        return values[id(tensor)][1]

    result = func(*mapped_tensors(Tensor, plain, args), **mapped_tensors(Tensor, plain, kwargs))
    if func._schema.is_mutable:
        written_to: dict[type, list[tuple[Any, Tensor]]] = {}
        for tensor in _written(func, args, kwargs):
            known = values.pop(id(tensor), None)
            if known is not None:
                _check_shape(func, *known)
                written_to.setdefault(type(tensor), []).append(known)
                values[id(known[1])] = known
        for kind, pairs in written_to.items():
            kind._write_each(pairs)
    written = {key: known[0] for key, known in values.items() if key == id(known[1])}
    return mapped_tensors(Tensor, lambda t: written.get(id(t), t), result)


def _check_shape(func: Any, tensor: Tensor, values: Tensor) -> None:
    """NotImplementedError where an operator has resized what it writes to."""
    if values.shape != tensor.shape:
        raise NotImplementedError(
            f"{func}: it resizes what it writes to from {tuple(tensor.shape)} to "
            f"{tuple(values.shape)}: a {type(tensor).__name__} keeps its shape"
        )


def _written(func: Any, args: tuple, kwargs: dict) -> list:
    """Tensors that an operator writes to, those of lists too."""
    found: list = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = args[i] if i < len(args) else kwargs.get(argument.name)
        found += given if isinstance(given, list | tuple) else [given]
    return [tensor for tensor in found if is_quantized(tensor)]


# ---- copies --------------------------------------------------------------------------------------


@_handles(aten.detach_.default)
def _detach_in_place(func: Any, args: tuple, kwargs: dict) -> Any:
    del func, kwargs
    return args[0]  # autograd has let the graph go; inference mode has none


@_handles(aten.resize_.default, aten.resize_as_.default)
def _resize(func: Any, args: tuple, kwargs: dict) -> Any:
    """Resize `out` as functions of torch do: not at all, where it has that shape."""
    tensor, size = args[:2]
    size = size.shape if isinstance(size, Tensor) else tuple(size)
    if is_quantized(tensor) and size != tensor.shape:
        return NotImplemented
    return tensor if is_quantized(tensor) else func(tensor, *args[1:], **kwargs)


@_handles(aten.detach.default, aten.alias.default, aten.lift_fresh.default)
def _detach(func: Any, args: tuple, kwargs: dict) -> Any:
    (tensor,) = args
    # Below autograd an alias would count its changes by itself, and transposes go by that.
    fields = tensor._mapped(func) if is_traced_or_faked() else None
    made = tensor._like(fields, stride=tensor.stride())
    made._take_view(tensor)
    return aliasing(func, args, kwargs, made)


@_handles(aten.clone.default, aten.contiguous.default)
def _clone(func: Any, args: tuple, kwargs: dict) -> Any:
    del kwargs
    tensor = args[0]
    if func is aten.contiguous.default and tensor.is_contiguous():
        return tensor
    if tensor._is_window():
        return tensor._dequantized(tensor.dtype, tuple(tensor.shape)).contiguous()
    in_rows = functools.partial(Tensor.clone, memory_format=torch.contiguous_format)
    return tensor._like(tensor._mapped(in_rows))


@_handles(aten._to_copy.default, aten.empty_like.default)
def _like_it(func: Any, args: tuple, kwargs: dict) -> Any:
    """Another device takes the data along; another dtype is one of high precision.

    Without values it is of the same kind, too: modules are moved off the meta device with it.
    """
    tensor, options = args[0], dict(kwargs)
    dtype = options.pop("dtype", None)
    if dtype is not None and dtype != tensor.dtype:  # rounded once, not to the nominal one before
        return func(tensor._dequantized(dtype, tuple(tensor.shape)), **kwargs)
    options.pop("memory_format", None)
    options.pop("layout", None)
    return tensor._like(tensor._mapped(lambda t: func(t, **options)))


@_handles(aten.pin_memory.default, aten._pin_memory.default)
def _pin(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor = args[0]
    return tensor._like(tensor._mapped(lambda t: func(t, *args[1:], **kwargs)))


@_handles(aten.is_pinned.default)
def _is_pinned(func: Any, args: tuple, kwargs: dict) -> Any:
    tensors = [t for t in args[0].get_data_tensors() if t is not None]
    return all(func(t, *args[1:], **kwargs) for t in tensors)


@_handles(aten.record_stream.default)
def _record_stream(func: Any, args: tuple, kwargs: dict) -> Any:
    del kwargs
    for tensor in args[0].get_data_tensors():
        if tensor is not None:
            func(tensor, args[1])


@_handles(aten.copy_.default)
def _copy(func: Any, args: tuple, kwargs: dict) -> Any:
    """Values are quantized, where the other side is not of the same kind; else bytes are copied."""
    into, source, *_ = args
    if not is_quantized(into):
        source = source._dequantized(source.dtype, tuple(source.shape))
        return func(into, source, *args[2:], **kwargs)
    if is_quantized(source):
        takes = into._takes(source)
        if takes:
            source._settle()
            if into._viewed is not None:
                into._settle()
            into.copy_from_storage(source)
        if takes or parts.copy_rows(into, source):
            into._changed()
            parts.count_in_wholes(into)
            return into
        dtype = source.dtype
        if parts.is_part(into):  # rounded by the cast alone
            dtype = torch.promote_types(dtype, torch.float32)
        source = source._dequantized(dtype, tuple(source.shape))
    if source.shape != into.shape:
        source = source.expand(into.shape)
    into._write(source.to(into.device))
    return into


@_handles(aten._foreach_copy_.default)
def _copy_each(func: Any, args: tuple, kwargs: dict) -> Any:
    """As many copies: each from the values as they are, not rounded to the nominal dtype first."""
    del func
    for into, source in zip(*args[:2], strict=True):
        into.copy_(source, *args[2:], **kwargs)


@_handles(aten.cat.default)
def _cat(func: Any, args: tuple, kwargs: dict) -> Any:
    """Matrices of one format, row after row, stay in it where no scale is of rows of two."""
    del func
    parts, dim = args[0], [*args[1:], kwargs.get("dim", 0)][0]
    if dim not in (0, -2) or not is_quantized(parts[0]):
        return NotImplemented
    fields = parts[0]._joined_fields(parts)
    if fields is None:
        return NotImplemented
    shape = sum(part.shape[0] for part in parts), parts[0].shape[1]
    return parts[0]._like(fields, shape=shape)


@_handles(aten.new_zeros.default)
def _new_zeros(func: Any, args: tuple, kwargs: dict) -> Any:
    """FSDP2 pads the part of a weight with zeros: these stay quantized, with one scale."""
    del func
    tensor, size = args
    options = [value for value in kwargs.values() if value is not None and value is not False]
    if options or not tensor._is_shard() or tuple(size[1:]) != tuple(tensor.shape[1:]):
        return NotImplemented
    return tensor._zeros(size[0])


# ---- views ---------------------------------------------------------------------------------------

_ROWS = (aten.slice.Tensor, aten.narrow.default)


@_handles(
    aten.view.default,
    aten._unsafe_view.default,
    aten.slice.Tensor,
    aten.select.int,
    aten.narrow.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze.default,
)
def _view(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor, *rest = args
    view = functools.partial(_call, func, rest, kwargs)
    fields = tensor._viewed_fields(view)
    if fields is None:
        return _view_of(tensor, None, view)
    if func in _ROWS and tensor._viewed is None and not is_traced_or_faked():
        like = view(parts.on_meta(tensor))
        if like.shape == tensor.shape:  # all of it
            return aliasing(func, args, kwargs, tensor._like(stride=tensor.stride()))
    return aliasing(func, args, kwargs, _view_of(tensor, fields, view))


@_handles(aten.as_strided.default, aten._reshape_alias.default)
def _as_strided(func: Any, args: tuple, kwargs: dict) -> Any:
    """A view by strides: in the memory that plain values of the outermost whole lie in."""
    del func
    whole, size, stride, *offset = [*args, *kwargs.values()]
    same = (tuple(size), tuple(stride)) == (tuple(whole.shape), tuple(whole.stride()))
    if same and offset in ([], [None], [0]) and whole._viewed is None:
        return whole.detach()
    whole, view = parts.outermost(whole)
    like = parts.on_meta(whole)
    if not like.is_contiguous():
        raise NotImplementedError(
            f"as_strided of a {type(whole).__name__} of strides {tuple(whole.stride())}: its "
            "values do not lie like that: make another view, or dequantize it"
        )
    like = view(like)
    at = like.storage_offset() if offset in ([], [None]) else offset[0]
    view = functools.partial(_call, aten.as_strided.default, [size, stride, at], {})
    return _view_of(whole, None, view)


@_handles(aten.view.dtype)
def _reinterpret(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor, dtype = [*args, *kwargs.values()]
    if dtype == tensor.dtype:
        return tensor.view(tensor.shape)
    raise NotImplementedError(
        f"view({dtype}) of a {type(tensor).__name__}: it has no memory of its nominal dtype: "
        f"tensor.dequantize().view({dtype})"
    )


@_handles(
    aten.split.Tensor,
    aten.split.sizes,
    aten.split_with_sizes.default,
    aten.chunk.default,
    aten.unbind.int,
)
def _split(func: Any, args: tuple, kwargs: dict) -> Any:
    tensor, *rest = args

    def part(at: int, values: Tensor) -> Tensor:
        return func(values, *rest, **kwargs)[at]

    shape = torch.empty(tensor.shape, device="meta")
    made = []
    for i in range(len(func(shape, *rest, **kwargs))):
        view = functools.partial(part, i)
        fields = tensor._viewed_fields(view)
        made.append(_view_of(tensor, fields, view))
    return made


def _window(func: Any, args: tuple, kwargs: dict) -> Any:
    """Any other view: none that a format may have codes of."""
    at = next(i for i, given in enumerate(func._schema.arguments) if given.alias_info is not None)
    tensor = args[at]
    if not is_quantized(tensor):
        return _in_high_precision(func, args, kwargs)

    def view(values: Tensor) -> Tensor:
        return func(*args[:at], values, *args[at + 1 :], **kwargs)

    return _view_of(tensor, None, view)


def _call(func: Any, rest: list, kwargs: dict, values: Tensor) -> Tensor:
    return func(values, *rest, **kwargs)


def _view_of(tensor: Any, fields: dict | None, view: Callable) -> Any:
    """A view that writes go through to the tensor.

    Of the values in high precision where the format has none of its data (`fields` is None).
    """
    if fields is None:
        return formats.IdentityTensor._window_of(tensor, view)
    like = view(parts.on_meta(tensor))
    made = tensor._like(fields, shape=like.shape, stride=like.stride())
    made._viewed = tensor, view
    return made
