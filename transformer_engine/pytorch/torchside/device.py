# SPDX-License-Identifier: Apache-2.0
"""What devices can do, asked in one place; the types of devices are torch's, any of them.

A device of which nothing else is known has memory and runs operators. Whether it has streams, or
graphs of them, its module of torch says (``torch.npu`` of a device "npu"). Kernels of this library
run on the CPU, and on CUDA devices of NVIDIA.
"""

import ctypes
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common import absent, config
from transformer_engine.common.contexts import Context


def accelerator() -> str:
    """The type of device of this machine beside the CPU, "cpu" where there is none."""
    if torch.cuda.is_available():
        return "cuda"
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def canonicalize_device(device: torch.device | str | None) -> torch.device:
    """A device with an index where its type has several; the current one for None."""
    device = torch.device(accelerator() if device is None else device)
    current = getattr(module_of(device.type), "current_device", None)
    if device.index is None and current is not None:
        device = torch.device(device.type, current())
    return device


def module_of(device_type: str) -> Any:
    """The module of torch for a type of device, None for types without one: the CPU, meta."""
    if device_type in ("cpu", "meta"):
        return None
    return getattr(torch, device_type, None)


def random_kept(device: torch.device) -> AbstractContextManager:
    """A context behind which the random states of the CPU and of a device are as before."""
    if module_of(device.type) is None:
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def has_streams(device_type: str) -> bool:
    """Return whether what is called on such a device may run later, in the order of streams."""
    module = module_of(device_type)
    names = "Event", "Stream", "current_stream", "stream", "device"
    return module is not None and all(hasattr(module, name) for name in names)


def type_name(device: torch.device) -> str:
    """Type of a device as the C library names it: "rocm" where torch says "cuda" of AMD's."""
    return "rocm" if device.type == "cuda" and torch.version.hip is not None else device.type


def in_words(device: torch.device) -> str:
    """Name of a device in torch, and `type_name` where that is another one: "cuda:0 (rocm)"."""
    name = type_name(device)
    return str(device) if name == device.type else f"{device} ({name})"


def on_cuda(device: torch.device) -> bool:
    """Return whether CUDA kernels of this library run there."""
    return type_name(device) == "cuda"


def get_device_compute_capability(device: torch.device | None = None) -> tuple[int, int]:
    """(major, minor) of a CUDA device, None: the current one; (0, 0) where NVIDIA made none."""
    if torch.version.hip is not None or not torch.cuda.is_available():
        return (0, 0)
    if device is not None and device.type != "cuda":
        return (0, 0)
    return torch.cuda.get_device_capability(device)


def graph_safe_generator() -> Any:
    """The current device's generator, where torch swaps its state by reference; else None.

    CUDA graphs can use such states.
    """
    if accelerator() != "cuda" or not hasattr(torch.cuda.CUDAGraph, "register_generator_state"):
        return None
    torch.cuda.init()
    return torch.cuda.default_generators[torch.cuda.current_device()]


def get_sm_count() -> int:
    """Multiprocessors of the current device of the accelerator; 0 where it tells of none."""
    module = module_of(accelerator())
    ask = getattr(module, "get_device_properties", None)
    return 0 if ask is None else getattr(ask(module.current_device()), "multi_processor_count", 0)


def reads_vectors(tensor: Tensor) -> bool:
    """Return whether kernels on its device read 16 bytes at once, wherever the tensor begins."""
    return tensor.is_cuda


def can_alias(tensor: Tensor) -> bool:
    """Return whether torch makes a tensor of memory there that it is told by its address."""
    return tensor.is_cuda


def profiler_ranges() -> Any:
    """Module that opens ranges of the accelerator's profiler, as ``torch.cuda.nvtx``; else None."""
    return getattr(module_of(accelerator()), "nvtx", None)


@functools.cache
def can_pin(device_type: str) -> bool:
    """Return whether host memory can be pinned for copies from such devices, which wait less then.

    Torch pins for its accelerator alone, and does not tell whether it can.
    """
    if device_type == "cpu" or accelerator() != device_type:
        return False
    try:
        return torch.empty(1, pin_memory=True).is_pinned()
    except RuntimeError:  # NotImplementedError too
        return False


_TYPES = {_core.DEVICE_CPU: "cpu", _core.DEVICE_CUDA: "cuda"}
"""Names in torch of the types of devices that were met, by their numbers in the C library."""
KERNELS = ("cpu", "cuda")
"""Types of devices that this library has kernels for, as the C library names them."""


NUMBERS_OF_CUDA = range(1, 1 + _core.DEVICE_INDICES)
"""Those of `type_of_number` of devices `on_cuda`."""


def add_type(device: torch.device, dlpack: int) -> int:
    """Add the type of a device, whose DLDeviceType is told, to the C library; its number there."""
    number = _core.add_device_type(type_name(device), dlpack)
    _TYPES[number] = device.type
    return number


def stream_handle(device_type: str, index: int) -> int:
    """Native handle of torch's current stream on a device, 0 where torch tells none.

    `device_type` is torch's name. Packages of devices tell handles from torch 2.11 on, if at all.
    Default streams may have the handle 0, too.
    """
    current = getattr(module_of(device_type), "current_stream", None)
    if device_type == "cuda":
        return current(index).cuda_stream  # of AMD, for C asks for NVIDIA's; under any torch
    try:
        return 0 if current is None else current(index).native_handle
    except (AttributeError, RuntimeError):  # an older stream, or one whose package has no handles
        return 0


def number_of_type(device: torch.device) -> int:
    """Number of a device's type in the C library; ValueError for one that was not met."""
    for number in tuple(_TYPES):
        if _core.device_type_name(number) == type_name(device):
            return number
    raise ValueError(f"{in_words(device)}: no tensor of this type of device has come yet")


def has_kernels(device: torch.device) -> bool:
    """Return whether this library has kernels for a device; else operators are others' there."""
    return type_name(device) in KERNELS


def without_kernels(device: torch.device) -> str:
    """What is to be said of calls on a device for which this library has no kernels; else ""."""
    if device.type == "meta" or has_kernels(device):
        return ""
    return (
        f"{in_words(device)}: this library has no kernels for it. What no plug-in takes runs by "
        "definition, in operators of torch, which multiply FP8 and FP4 out"
    )


def type_of_number(number: int) -> str:
    """Type of a device by the number that it has in the facts of `_core.tensors_of_call`."""
    return _TYPES[(number - 1) // _core.DEVICE_INDICES + 1]


def _check_cuda() -> None:
    """Raise where the environment wants this library without CUDA."""
    if config.TE_FL_SKIP_CUDA.get():
        raise NotImplementedError(
            "TE_FL_SKIP_CUDA=1: this library's CUDA kernels are not used. Use operators of "
            "plug-ins or of plain torch, modules on the CPU, or unset it"
        )


_core.before_cuda(_check_cuda)


@functools.cache
def prepare_device(device: torch.device) -> None:
    """Hand the environment's settings to the native side before it first uses a device."""
    if not on_cuda(device) or not _core.has_cuda():
        return
    _check_cuda()
    cache = config.cache_dir()
    _core.cuda_configure(config.TE_NVRTC.get(), cache)
    if config.TE_GEMM_TUNE.get():
        file = None if cache is None else cache / "gemm"
        _core.tune_gemm(_core.DEVICE_CUDA, device.index or 0, True, file)


def is_capturing(device: torch.device) -> bool:
    """Return whether what runs on a device now becomes part of a graph of its stream."""
    ask = getattr(module_of(device.type), "is_current_stream_capturing", None)
    return ask is not None and ask()


def is_captured(tensor: Tensor) -> bool:
    """`is_capturing` of the device of a tensor, faster."""
    if tensor.is_cuda:
        return torch.cuda.is_current_stream_capturing()
    return not tensor.is_cpu and is_capturing(tensor.device)


def is_any_captured() -> bool:
    """`is_capturing` of the current device, of CUDA or of a type that was met."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return True
    return any(is_capturing(torch.device(kind)) for kind in tuple(_TYPES.values())[len(KERNELS) :])


class outside_capture(Context):  # noqa: N801 - reads as what it does
    """Keep what runs on a device inside ``with`` out of the graph that is being captured, if any.

    It runs on a stream of its own, and the end of the block waits for it: so the graph finds what
    it made. A capture forbids its thread to wait unless the thread asks to be left alone.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _enter(self) -> None:
        if not is_capturing(self._device):
            return
        if not on_cuda(self._device):
            raise RuntimeError(
                f"{in_words(self._device)}: a graph of its stream is being captured, and what "
                "shall not be in it can not be kept out: run the module once before the capture"
            )
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        mode = ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED))
        self._undo_by(exchange, mode)
        exchange(mode)  # which is the former one then
        stream = torch.cuda.Stream(self._device)
        self._undo_by(stream.synchronize)
        # To set the stream of another device makes that the current one.
        self._undo_by(torch.cuda.set_stream, torch.cuda.current_stream())
        self._undo_by(torch.cuda.set_stream, torch.cuda.current_stream(self._device))
        torch.cuda.set_stream(stream)


_CAPTURE_RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED of the driver."""


def _answer(available: bool, reason: str, return_reason: bool) -> bool | tuple[bool, str]:
    if not return_reason:
        return available
    return available, "" if available else reason


def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether FP8 GEMMs run natively on the current device.

    The CPU backend computes FP8 everywhere as a reference; it does not count as native. With
    `return_reason` the answer and why not, empty where it is True.
    """
    capability = get_device_compute_capability()
    if capability == (0, 0):
        reason = (
            "there is no CUDA device of NVIDIA; the CPU backend, and definitions in torch on other "
            "devices, run FP8 as a reference"
        )
        return _answer(False, reason, return_reason)
    reason = f"FP8 GEMMs need compute capability 8.9 or higher, this device has {capability}"
    return _answer(capability >= (8, 9), reason, return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether bf16 GEMMs run natively on the current device; as `is_fp8_available`."""
    capability = get_device_compute_capability()
    reason = f"bf16 needs a CUDA device of compute capability 8.0 or higher, not {capability}"
    return _answer(capability >= (8, 0), reason, return_reason)


_EMULATED = (
    "{} has no native GEMMs on any device: its operands are multiplied out, exactly, and counted "
    "as emulated.{} (autocast takes the recipe all the same)"
)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether GEMMs of the recipe `MXFP8BlockScaling` run natively: on no device yet.

    They are emulated everywhere: operands are multiplied out to bf16 (fp32 on the CPU), exactly.
    Arguments and result as of `is_fp8_available`.
    """
    return _answer(False, _EMULATED.format("MXFP8BlockScaling", "mxfp8"), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether GEMMs of `NVFP4BlockScaling` run natively: as `is_mxfp8_available`."""
    return _answer(False, _EMULATED.format("NVFP4BlockScaling", "nvfp4"), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether GEMMs of the recipe `Float8BlockScaling` run natively; as `is_fp8_available`.

    Those of `Float8RowScaling` run on the same devices.
    """
    capability = get_device_compute_capability()
    if capability == (0, 0):
        return is_fp8_available(return_reason)
    reason = f"scales of tiles and rows need compute capability 9.0, this device has {capability}"
    return _answer(capability == (9, 0), reason, return_reason)


def is_available(name: str, return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return whether a name of NVIDIA Transformer Engine is built, rather than importable alone.

    The name is dotted, a full one or relative to ``transformer_engine.pytorch``: "GroupedLinear",
    "permutation.moe_permute", "transformer_engine.common.recipe.MXFP8BlockScaling"; TypeError for
    no string. With `return_reason` also why not, and what to do instead, as of `is_fp8_available`.
    """
    if not isinstance(name, str):
        raise TypeError(f"is_available: name={name!r}, expected a string such as 'GroupedLinear'")
    return _answer(*absent.find(name), return_reason)
