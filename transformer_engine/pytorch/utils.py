# SPDX-License-Identifier: Apache-2.0
"""Helpers that programs import: sizes, dtypes, initialisation, profiler ranges."""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent, decode_cudnn_version
from transformer_engine.common.contexts import Context
from transformer_engine.pytorch.torch_version import torch_version as torch_version
from transformer_engine.pytorch.torchside.device import (
    can_alias,
    canonicalize_device,
    get_device_compute_capability,
    get_sm_count as get_sm_count,
    is_bf16_available,
    profiler_ranges,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

__getattr__, __dir__ = absent.attach(globals())


# ---- numbers and sizes -------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise a ValueError where there is a remainder."""
    if numerator % denominator != 0:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


def divide(numerator: int, denominator: int) -> int:
    """Quotient; a ValueError where there is a remainder."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def ceil_div(numerator: int, denominator: int) -> int:
    """The smallest integer that is not below the quotient; `denominator` is not 0."""
    return -(-numerator // denominator)


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` (not 0) that is not below `value`."""
    if multiple == 0:
        raise ValueError("round_up_to_nearest_multiple: multiple=0, expected another number")
    return ceil_div(value, multiple) * multiple


def check_dim_for_fp8_exec(tensor: Tensor) -> bool:
    """Return whether FP8 GEMMs take a tensor without padding it: rows by 8, columns by 16.

    The modules pad by themselves.
    """
    return tensor.shape[:-1].numel() % 8 == 0 and tensor.shape[-1] % 16 == 0


def assert_dim_for_fp8_exec(*tensors: Tensor) -> None:
    """Raise a ValueError for tensors that `check_dim_for_fp8_exec` is False for."""
    for tensor in tensors:
        if not check_dim_for_fp8_exec(tensor):
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)}: without padding, FP8 GEMMs take the "
                "product of the leading dims by 8 and the last dim by 16"
            )


def check_gemm_dims(inp: Tensor, weight: Tensor, fp8: bool) -> None:
    """Raise a ValueError where inp [..., k] and weight [n, k] can not be multiplied.

    With `fp8` also where `assert_dim_for_fp8_exec` does: the modules pad by themselves.
    """
    if inp.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"check_gemm_dims: inp {tuple(inp.shape)}, weight {tuple(weight.shape)}: expected last "
            "dims of one size"
        )
    if fp8:
        assert_dim_for_fp8_exec(inp, weight)


# ---- devices and dtypes ------------------------------------------------------------------------


def get_cudnn_version() -> tuple[int, int, int]:
    """(major, minor, patch) of the cuDNN that torch uses; zeros without it."""
    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return decode_cudnn_version(version or 0)


is_bf16_compatible = is_bf16_available


def is_non_tn_fp8_gemm_supported() -> bool:
    """Return whether the current device's FP8 GEMMs take operands that are not transposed."""
    capability = get_device_compute_capability()
    return (10, 0) <= capability < (12, 0) or capability >= (13, 0)


def devices_match(device1: torch.device, device2: torch.device) -> bool:
    """Return whether two are the same device; ``cuda`` is the current CUDA device."""
    return canonicalize_device(device1) == canonicalize_device(device2)


def canonicalize_process_group(group: Any) -> Any:
    """A group of ranks; that of all processes for None, which has to be initialised."""
    return torch.distributed.group.WORLD if group is None else group


gpu_autocast_ctx = functools.partial(torch.amp.autocast, device_type="cuda")
"""A context in which torch's operators on CUDA tensors cast; arguments as of `torch.autocast`."""


def torch_get_autocast_gpu_dtype() -> torch.dtype:
    """The dtype that such a context casts to."""
    return torch.get_autocast_dtype("cuda")


def canonicalize_dtype(dtype: torch.dtype | None) -> torch.dtype:
    """A dtype; torch's default one for None."""
    return torch.get_default_dtype() if dtype is None else dtype


def cast_if_needed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The tensor in a dtype, itself where it is of it; None for None."""
    return None if tensor is None else tensor.to(dtype)


# ---- initialisation ----------------------------------------------------------------------------


def init_method_normal(sigma: float) -> Callable[[Tensor], Tensor]:
    """A function that fills a tensor from N(0, sigma)."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=sigma)


def scaled_init_method_normal(sigma: float, num_layers: int) -> Callable[[Tensor], Tensor]:
    """A function that fills a tensor from N(0, sigma / sqrt(2 * num_layers))."""
    return init_method_normal(sigma / math.sqrt(2.0 * num_layers))


def init_method_constant(val: float) -> Callable[[Tensor], Tensor]:
    """A function that fills a tensor with a number."""
    return functools.partial(torch.nn.init.constant_, val=val)


def get_default_init_method() -> Callable[[Tensor], Tensor]:
    """How weights begin that are given no `init_method`: N(0, 0.023)."""
    return init_method_normal(0.023)


# ---- tensors -----------------------------------------------------------------------------------


def requires_grad(*tensors: Any) -> bool:
    """Return whether one of the arguments is a tensor that requires a gradient."""
    return any(isinstance(each, Tensor) and each.requires_grad for each in tensors)


def all_close(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal up to `torch.testing`'s tolerances for their dtype."""
    try:
        torch.testing.assert_close(a, b)
    except AssertionError:
        return False
    return True


def compare_tensors(a: Tensor, b: Tensor) -> None:
    """Print shapes, dtypes and the largest difference of two tensors."""
    print(f"{tuple(a.shape)} {a.dtype}, {tuple(b.shape)} {b.dtype}")
    if a.shape == b.shape and a.numel() > 0:
        print(f"largest difference: {(a.double() - b.double()).abs().max().item()}")


def print_rank_0(*args: Any) -> None:
    """Print on the first of all ranks, or where torch.distributed is not initialised."""
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized() and distributed.get_rank()):
        print(*args, flush=True)


def needs_quantized_gemm(obj: Any, rowwise: bool = True) -> bool:
    """Tell whether an operand is a quantized tensor, so that its GEMM is one of quantized operands.

    Both forms of a tensor here are of one kind: `rowwise` makes no difference.
    """
    del rowwise
    return is_quantized(obj)


@functools.lru_cache(maxsize=64)
def get_cached_ones_tensor(num_elements: int, dtype: torch.dtype, device: Any) -> Tensor:
    """Ones [num_elements], one memory for all calls with the same arguments: do not write to it."""
    return torch.ones(num_elements, dtype=dtype, device=device)


def split_tensor_along_dim(
    tensor: Tensor, dim: int, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of a tensor, views of it, or contiguous copies with `contiguous_split_chunks`."""
    parts = torch.split(tensor, divide(tensor.shape[dim], num_partitions), dim=dim)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


def assert_viewless_tensor(tensor: Any, extra_msg: str | None = None) -> Any:
    """A tensor, or a list of them, none of which is a view of another one: ValueError else.

    What is no tensor passes. `extra_msg` ends the message.
    """
    if isinstance(tensor, list):
        return [assert_viewless_tensor(each, extra_msg) for each in tensor]
    if isinstance(tensor, Tensor) and tensor._base is not None:
        raise ValueError(
            f"a view of a tensor of shape {tuple(tensor._base.shape)}, whose memory it keeps; "
            f"expected a tensor of its own. {extra_msg or ''}".rstrip()
        )
    return tensor


def safely_set_viewless_tensor_data(tensor: Tensor, new_data_tensor: Tensor) -> None:
    """Give a tensor that is no view the memory of another one."""
    assert_viewless_tensor(tensor, f"The new data has shape {tuple(new_data_tensor.shape)}")
    tensor.data = new_data_tensor


def validate_ctx_manager(ctx: Callable) -> None:
    """Raise a TypeError where what a function gives can not be entered by ``with``."""
    made = ctx()
    if not (hasattr(made, "__enter__") and hasattr(made, "__exit__")):
        raise TypeError(f"{ctx!r} gives a {type(made).__name__} object, expected a context manager")


def validate_rng_states_func(get_rng_tracker: Callable) -> None:
    """Raise a TypeError for what gives no tracker of random states as `CudaRNGStatesTracker`.

    It is called without arguments, and what it gives has ``get_states``, ``set_states`` and
    ``fork``, which makes a context manager.
    """
    if not callable(get_rng_tracker):
        raise TypeError(f"get_rng_tracker={get_rng_tracker!r}, expected a function")
    tracker = get_rng_tracker()
    lacking = [n for n in ("get_states", "set_states", "fork") if not hasattr(tracker, n)]
    if lacking:
        raise TypeError(
            f"get_rng_tracker() gives a {type(tracker).__name__} object without "
            f"{', '.join(lacking)}"
        )
    validate_ctx_manager(tracker.fork)


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Write -10000 into scores whose mask is True, in place."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


class _SplitAlongDim:
    """Split a tensor; ``apply`` is called as that of a `torch.autograd.Function`."""

    @staticmethod
    def apply(
        mixed_x_layer: Tensor,
        split_dim: int,
        split_size_or_sections: int | Sequence[int],
        squeeze: bool = False,
    ) -> tuple[Tensor, ...]:
        """Views of the parts, as of `torch.split`.

        `squeeze` drops the split dim, which is 1 in every part.
        """
        parts = torch.split(mixed_x_layer, split_size_or_sections, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts


SplitAlongDim = _SplitAlongDim


def combine_tensors(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Stack tensors of one shape along a new dim."""
    return torch.stack(tuple(tensors), dim=dim)


def clear_tensor_data(*tensors: Any) -> None:
    """Free the memory of tensors that are not read any more; None and `_do_not_clear` are kept."""
    for tensor in tensors:
        if tensor is not None and not getattr(tensor, "_do_not_clear", False):
            tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)


def _blocks(tensor: Tensor, interleave_size: int) -> int:
    """Blocks of each half of the rows."""
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        found = "a scalar" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"tensor: {found}, expected a tensor of rows [gate; up]")
    if not isinstance(interleave_size, int):
        raise TypeError(f"interleave_size={interleave_size!r}, expected a positive int")
    rows = tensor.shape[0]
    if interleave_size < 1 or rows % (2 * interleave_size) != 0:
        raise ValueError(
            f"{rows} rows are no two halves of blocks of interleave_size={interleave_size}"
        )
    return rows // (2 * interleave_size)


def interleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Rows [gate; up] as blocks of `interleave_size` rows, in turn of gate and of up."""
    shape = (2, _blocks(tensor, interleave_size), interleave_size, *tensor.shape[1:])
    return tensor.reshape(shape).transpose(0, 1).reshape(tensor.shape)


def deinterleave_glu_tensor(tensor: Tensor, interleave_size: int) -> Tensor:
    """Undo `interleave_glu_tensor`."""
    shape = (_blocks(tensor, interleave_size), 2, interleave_size, *tensor.shape[1:])
    return tensor.reshape(shape).transpose(0, 1).reshape(tensor.shape)


def make_weak_ref(x: Any) -> Any:
    """Tensors that share memory with others and do not keep it alive.

    For a tensor, a number, None, or a list, tuple or dict of these it gives the same structure: an
    alias of a CUDA tensor, a tensor of another device itself. Reading an alias after its memory was
    freed reads what is there then. TypeError for other objects.
    """
    if isinstance(x, Tensor):
        return _alias(x) if can_alias(x) else x
    if isinstance(x, list | tuple):
        made = [make_weak_ref(each) for each in x]
        return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
    if isinstance(x, dict):
        return {key: make_weak_ref(each) for key, each in x.items()}
    if x is None or isinstance(x, int | float | bool | str):
        return x
    raise TypeError(
        f"make_weak_ref: {type(x).__name__} object, expected tensors, numbers, strings, None, and "
        "lists, tuples and dicts of these"
    )


def _alias(x: Tensor) -> Tensor:
    """A tensor over the memory of another one, without a reference to it."""
    size = x.untyped_storage().nbytes() - x.storage_offset() * x.element_size()
    if size <= 0 or x.data_ptr() == 0:
        return torch.empty_like(x)
    memory = {"data": (x.data_ptr(), False), "shape": (size,), "typestr": "|u1", "version": 3}
    owner = SimpleNamespace(__cuda_array_interface__={**memory, "strides": None})
    raw = torch.as_tensor(owner, device=x.device)
    size -= size % x.element_size()
    alias = raw[:size].view(x.dtype).as_strided(x.shape, x.stride())
    return alias.requires_grad_(x.requires_grad)


# ---- profiler ranges ---------------------------------------------------------------------------

_RANGES: list[str] = []
"""Messages of the ranges that are open."""


def nvtx_range_push(msg: str) -> None:
    """Begin a range of the profiler; nothing where the accelerator has no such ranges."""
    _RANGES.append(msg)
    ranges = profiler_ranges()
    if ranges is not None:
        ranges.range_push(msg)


def nvtx_range_pop(msg: str | None = None) -> None:
    """End the innermost range, which began with `msg` where one is given.

    RuntimeError where no range is open, ValueError where it began with another message.
    """
    if not _RANGES:
        raise RuntimeError("nvtx_range_pop: no range is open")
    if msg is not None and _RANGES[-1] != msg:
        raise ValueError(f"nvtx_range_pop: {msg!r}, but the innermost range is {_RANGES[-1]!r}")
    _RANGES.pop()
    ranges = profiler_ranges()
    if ranges is not None:
        ranges.range_pop()


class get_nvtx_range_context(Context, contextlib.ContextDecorator):  # noqa: N801 - users' name
    """A range of the profiler around a ``with`` block, or the calls of a function."""

    def __init__(self, msg: str) -> None:
        self._message = msg

    def _recreate_cm(self) -> "get_nvtx_range_context":
        """Give each call of a decorated function a range of its own."""
        return get_nvtx_range_context(self._message)

    def _enter(self) -> None:
        self._undo_by(_pop_to, len(_RANGES))
        nvtx_range_push(self._message)


def _pop_to(count: int) -> None:
    """End the ranges that have begun inside of a number of others."""
    while len(_RANGES) > count:
        nvtx_range_pop()


# ---- graphs of torch.compile -------------------------------------------------------------------

_DISABLED: list[str] = []
"""Reasons that `record_compile_disabled` was given and `warn_if_compile_disabled` has not told."""


def record_compile_disabled(reason: str) -> None:
    """Remember why something is not to be compiled. Modules of this library record nothing."""
    if reason not in _DISABLED:
        _DISABLED.append(reason)


def warn_if_compile_disabled() -> None:
    """Warn of each reason that was recorded, once."""
    while _DISABLED:
        warn_compile_eager_fallback(_DISABLED.pop(0))


def warn_compile_eager_fallback(reason: str) -> None:
    """Warn that something runs outside of the graph of `torch.compile`."""
    warnings.warn(f"runs outside of the compiled graph: {reason}", UserWarning, stacklevel=2)
