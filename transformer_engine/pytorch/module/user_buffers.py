# SPDX-License-Identifier: Apache-2.0
"""`initialize_ub`: measure where GEMMs in pieces are faster (`overlap`)."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.overlap import (
    Overlaps,
    UserBufferQuantizationMode,
    choose,
    is_ub_initialized,
)
from transformer_engine.pytorch.module.parameters import default_device
from transformer_engine.pytorch.scaling_state.autocast import autocast
from transformer_engine.pytorch.torchside.device import module_of, random_kept

_METHODS = {"bulk": False, "pipeline": True, "ring_exchange": True, "external": True}
"""Ways of a configuration: whether the GEMM runs in pieces."""
_BACKENDS = (None, "nccl", "mpi", "gloo")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_REPEATS, _WARM = 10, 3


def initialize_ub(  # noqa: PLR0913 - as the incumbent has it
    shape: Sequence[int],
    tp_size: int,
    use_fp8: bool = False,
    quantization_modes: Sequence[UserBufferQuantizationMode] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    ub_cfgs: Mapping | Sequence[Mapping] | None = None,
    bootstrap_backend: str | None = None,
    with_cublasmp: bool = False,
) -> None:
    """Choose where GEMMs run in pieces, for modules that are made after it.

    All ranks call it. It measures linear layers of `shape`, forward and backward, with and without
    pieces, on the current device, and takes the faster. There are no buffers to be made: the
    collectives are those of torch.distributed.

    Parameters
    ----------
    shape : (int, int)
        Rows of all ranks of a group, and features.
    tp_size : int
        Ranks of a group, of neighbours.
    use_fp8 : bool, default False
        Measure FP8 instead of high precision, where `quantization_modes` is not given.
    quantization_modes : sequence of UserBufferQuantizationMode, optional
        What to measure.
    dtype : torch.dtype
        Of activations.
    ub_cfgs : dict or a sequence of one for each mode, optional
        By name of a layer and its GEMM ("fc1_fprop", "proj_dgrad") a dict whose "method" is taken
        instead of a measurement: "bulk", not in pieces; "ring_exchange", "pipeline" and "external",
        in pieces. Other keys change nothing.
    bootstrap_backend : {None, "nccl", "mpi", "gloo"}
        Changes nothing.
    with_cublasmp : bool
        Not there.

    Raises
    ------
    RuntimeError
        It was called before, without `destroy_ub`; torch.distributed is not initialised.
    ValueError
        No such shape, size, dtype, method or backend.
    NotImplementedError
        `with_cublasmp`.
    """
    if with_cublasmp:
        raise NotImplementedError("initialize_ub: with_cublasmp=True is not there: leave it out")
    if is_ub_initialized():
        raise RuntimeError("initialize_ub: it was called before: call destroy_ub first")
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise RuntimeError("initialize_ub: torch.distributed is not initialised")
    if bootstrap_backend not in _BACKENDS:
        raise ValueError(f"initialize_ub: bootstrap_backend={bootstrap_backend!r}")
    world = torch.distributed.get_world_size()
    if tp_size < 1 or world % tp_size:
        raise ValueError(f"initialize_ub: tp_size={tp_size} of {world} ranks")
    if len(shape) != 2 or min(shape) < 1 or any(size % tp_size for size in shape):
        raise ValueError(f"initialize_ub: shape={tuple(shape)}, expected multiples of {tp_size}")
    if dtype not in _DTYPES:
        raise ValueError(f"initialize_ub: dtype={dtype}")
    default = UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE
    modes = [default] if quantization_modes is None else list(quantization_modes)
    given = ub_cfgs or {}
    configurations = [given] * len(modes) if isinstance(given, Mapping) else list(given)
    if len(configurations) != len(modes):
        raise ValueError(f"initialize_ub: {len(configurations)} ub_cfgs of {len(modes)} modes")
    pairs = zip(modes, configurations, strict=True)
    found = [(UserBufferQuantizationMode(mode), _methods(how)) for mode, how in pairs]
    group = None
    if tp_size > 1:
        group, _ = torch.distributed.new_subgroups(group_size=tp_size)
    for mode, methods in found:
        measured = Overlaps() if group is None else _measure(group, shape, dtype, mode)
        choose(mode, measured, methods)
    if group is not None:
        torch.distributed.destroy_process_group(group)


def _methods(configuration: Mapping) -> dict[str, bool]:
    found = {}
    for gemm, how in configuration.items():
        method = how.get("method")
        if method is not None and method not in _METHODS:
            names = ", ".join(map(repr, _METHODS))
            raise ValueError(f"initialize_ub: {gemm}: method={method!r}, expected one of {names}")
        if method is not None:
            found[gemm] = _METHODS[method]
    return found


def _measure(
    group: Any, shape: Sequence[int], dtype: torch.dtype, mode: UserBufferQuantizationMode
) -> Overlaps:
    """Where pieces are faster for all ranks of a group."""
    device, (rows, features) = default_device(), shape
    quantized = mode is UserBufferQuantizationMode.FP8
    own, inner = rows // group.size(), 4 * features
    recipe = DelayedScaling() if quantized else None
    times = []
    with random_kept(device), torch.enable_grad():
        for parallel, sizes, lead, width in (
            ("column", (features, inner), own, features),
            ("row", (inner, features), rows, inner // group.size()),
        ):
            layer = Linear(
                *sizes, bias=False, params_dtype=dtype, device=device, parallel_mode=parallel,
                tp_group=group, sequence_parallel=True,
            )  # fmt: skip
            x = torch.randn(lead, width, dtype=dtype, device=device, requires_grad=True)
            made: list[Tensor] = []

            def forward(layer: Any = layer, x: Tensor = x, made: list = made) -> None:
                with autocast(enabled=quantized, recipe=recipe, amax_reduction_group=group):
                    made[:] = [layer(x)]

            def backward(made: list = made) -> None:
                made[0].backward(torch.ones_like(made[0]))

            for does in (False, True):
                layer.overlaps = (Overlaps(does, does, does),) * 2
                times.append(_times((forward, backward), device))
    found = torch.tensor(times, device=device)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX, group=group)
    (gather, _), (gather_pieces, _), row, row_pieces = found.tolist()
    return Overlaps(gather_pieces < gather, row_pieces[0] < row[0], row_pieces[1] < row[1])


def _times(functions: Sequence[Callable], device: torch.device) -> list[float]:
    """Shortest seconds of functions that are called in turn."""
    module, found = module_of(device.type), []
    for _ in range(_REPEATS + _WARM):
        each = []
        for function in functions:
            if module is not None:
                module.synchronize(device)
            begin = time.perf_counter()
            function()
            if module is not None:
                module.synchronize(device)
            each.append(time.perf_counter() - begin)
        found.append(each)
    return [min(column) for column in zip(*found[_WARM:], strict=True)]
