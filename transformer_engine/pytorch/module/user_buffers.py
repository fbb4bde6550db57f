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
    LAYERS,
    Overlaps,
    UserBufferQuantizationMode,
    choose,
    gemms_of,
    is_ub_initialized,
)
from transformer_engine.pytorch.module.parameters import default_device, one_of
from transformer_engine.pytorch.scaling_state.autocast import autocast
from transformer_engine.pytorch.torchside.device import module_of, random_kept

_METHODS = {"bulk": False, "pipeline": True, "ring_exchange": True, "external": True}
"""Ways of a configuration: whether the GEMM runs in pieces."""
_GEMMS = [f"{layer}_{gemm}" for layer in LAYERS for gemm in ("fprop", "dgrad", "wgrad")]
_WIDTHS = {"qkv": 3, "proj": 1, "fc1": 4, "fc2": 4}
"""Features on the other side of a layer, to those of `shape`."""
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
    *,
    widths: Mapping[str, int] | None = None,
) -> None:
    """Choose where GEMMs run in pieces, for modules that are made after it.

    All ranks call it. It measures the linear layers of a Transformer, each of its own shape,
    forward and backward, with and without pieces, on the current device, and takes the faster. A
    module follows the layer of its `ub_name`; without a name, and in a mode that was not measured,
    it runs not in pieces. There are no buffers to be made: the collectives are those of
    torch.distributed.

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
        By name of a layer ("qkv", "proj", "fc1", "fc2") and its GEMM ("fc1_fprop", "proj_dgrad",
        "qkv_wgrad") a dict whose "method" is taken
        instead of a measurement: "bulk", not in pieces; "ring_exchange", "pipeline" and "external",
        in pieces. Other keys change nothing.
    bootstrap_backend : {None, "nccl", "mpi", "gloo"}
        Changes nothing.
    with_cublasmp : bool
        Not there.
    widths : dict, optional
        By name of a layer its features on the other side than those of `shape`, of all ranks: of
        outputs ("qkv", "fc1") or inputs ("proj", "fc2"). Those of a Transformer with keys for all
        heads, and an MLP of four times the features without a gate, where not given.

    Raises
    ------
    RuntimeError
        It was called before, without `destroy_ub`; torch.distributed is not initialised.
    ValueError
        No such shape, size, dtype, layer, method or backend.
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
    sizes = _sizes(widths or {}, shape[1], tp_size)
    default = UserBufferQuantizationMode.FP8 if use_fp8 else UserBufferQuantizationMode.NONE
    modes = [default] if quantization_modes is None else list(quantization_modes)
    told = ub_cfgs or {}
    configurations = [told] * len(modes) if isinstance(told, Mapping) else list(told)
    if len(configurations) != len(modes):
        raise ValueError(f"initialize_ub: {len(configurations)} ub_cfgs of {len(modes)} modes")
    pairs = zip(modes, configurations, strict=True)
    found = [(UserBufferQuantizationMode(mode), _methods(how)) for mode, how in pairs]
    group = None
    if tp_size > 1:
        group, _ = torch.distributed.new_subgroups(group_size=tp_size)
    for mode, methods in found:
        measured = {} if group is None else _measure(group, shape, sizes, dtype, mode)
        choose(mode, measured | methods)
    if group is not None:
        torch.distributed.destroy_process_group(group)


def _sizes(widths: Mapping[str, int], features: int, ranks: int) -> dict[str, int]:
    """Features on the other side of each layer, of all ranks; `widths` are those given."""
    one_of("initialize_ub", LAYERS, **{f"widths: {name}": name for name in widths})
    sizes = {name: widths.get(name, times * features) for name, times in _WIDTHS.items()}
    if any(size < 1 or size % ranks for size in sizes.values()):
        raise ValueError(f"initialize_ub: widths={sizes}, expected multiples of {ranks}")
    return sizes


def _methods(configuration: Mapping) -> dict[str, bool]:
    found = {}
    one_of("initialize_ub", _GEMMS, **{f"ub_cfgs: {gemm}": gemm for gemm in configuration})
    for gemm, how in configuration.items():
        method = how.get("method")
        if method is not None and method not in _METHODS:
            names = ", ".join(map(repr, _METHODS))
            raise ValueError(f"initialize_ub: {gemm}: method={method!r}, expected one of {names}")
        if method is not None:
            found[gemm] = _METHODS[method]
    return found


def _measure(
    group: Any,
    shape: Sequence[int],
    widths: Mapping[str, int],
    dtype: torch.dtype,
    mode: UserBufferQuantizationMode,
) -> dict[str, bool]:
    """Where pieces are faster for all ranks of a group: by the names of GEMMs."""
    device, (rows, features) = default_device(), shape
    quantized = mode is UserBufferQuantizationMode.FP8
    recipe = DelayedScaling() if quantized else None
    times = []
    with random_kept(device), torch.enable_grad():
        for name, parallel in LAYERS.items():
            columns = parallel == "column"
            sizes = (features, widths[name]) if columns else (widths[name], features)
            layer = Linear(
                *sizes, bias=False, params_dtype=dtype, device=device, parallel_mode=parallel,
                tp_group=group, sequence_parallel=True,
            )  # fmt: skip
            own = (rows // group.size(), features) if columns else (rows, layer.in_features)
            x = torch.randn(own, dtype=dtype, device=device, requires_grad=True)
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
    faster: dict[str, bool] = {}
    for (name, parallel), whole, pieces in zip(
        LAYERS.items(), found[::2].tolist(), found[1::2].tolist(), strict=True
    ):
        gather, *of_sum = gemms_of(name, name)
        gemms = [gather] if parallel == "column" else of_sum
        faster |= {g: p < w for g, p, w in zip(gemms, pieces, whole, strict=False)}
    return faster


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
