# SPDX-License-Identifier: Apache-2.0
"""The test device "npu": a torch device of a third party (PrivateUse1), as a vendor would ship one.

Two devices, "npu:0" and "npu:1". Their memory is that of the host under pointers that the host can
not read; their kernels are those of the CPU, which have run when a call returns. Kernels refuse
tensors of two devices, save for scalars of the host. `register` makes ``torch.npu``, this module.

Registering changes the process: torch.accelerator finds the device, and backward passes that began
before know of none. So it comes before the first backward, in a process of its own
(`devices.process`).
"""

import contextlib
import sys

import torch

from devices import build

_native = None
_initialized = True  # torch's checkpoints keep random states of devices that say so
default_generators = ()


def register():
    """Make the device known to torch; does nothing the second time.

    Raises
    ------
    devices.build.NoCompilerError
        The device has to be built, and no C++ compiler is found.
    """
    global _native, default_generators
    if _native is not None:
        return
    native = build.load("npu_device")
    torch.utils.rename_privateuse1_backend("npu")
    native.register_hooks()
    _native = native
    default_generators = tuple(native.default_generator(n) for n in range(device_count()))
    torch._register_device_module("npu", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def is_registered():
    """Whether `register` has been called in this process."""
    return _native is not None


def register_with_compiler():
    """Tell torch.compile of the device's streams, as vendors do; torch._dynamo takes 2 s to import.

    Graphs without streams need none of it.
    """
    from torch._dynamo import device_interface

    here = sys.modules[__name__]
    names = ("Event", "Stream", "current_device", "current_stream", "device", "device_count",
             "exchange_device", "is_available", "is_bf16_supported", "maybe_exchange_device",
             "memory_allocated", "set_device", "set_stream", "stream", "synchronize")  # fmt: skip
    members = {
        name: value if isinstance(value, type) else staticmethod(value)
        for name, value in ((name, getattr(here, name)) for name in names)
    }
    interface = type("NpuInterface", (device_interface.DeviceInterface,), members)
    device_interface.register_interface_for_device("npu", interface)
    for number in range(device_count()):
        device_interface.register_interface_for_device(f"npu:{number}", interface)


# ---- devices -------------------------------------------------------------------------------------


def is_available():
    return True


def is_initialized():
    return _initialized


def init():
    """Do nothing: the device is ready when it is registered."""


def _is_in_bad_fork():
    return False


def device_count():
    return _native.device_count()


def current_device():
    return _native.current_device()


def exchange_device(index):
    """Make another device the current one; return the index of that before."""
    return _native.exchange_device(index)


def maybe_exchange_device(index):
    """As `exchange_device`; a negative index changes nothing."""
    return exchange_device(current_device() if index < 0 else index)


def set_device(device):
    exchange_device(_index(device))


def _index(device):
    """Index of a device as a program names it: the current one by default."""
    if device is None:
        return current_device()
    if isinstance(device, int):
        return device
    device = torch.device(device)
    if device.type != "npu":
        raise ValueError(f"no device of npu: {device}")
    return current_device() if device.index is None else device.index


class device:  # noqa: N801 - the name that device modules have
    """A context in which another device is the current one; None changes nothing."""

    def __init__(self, device):
        self._index = -1 if device is None else _index(device)

    def __enter__(self):
        self._before = maybe_exchange_device(self._index)

    def __exit__(self, *error):
        exchange_device(self._before)


class device_of(device):  # noqa: N801
    """The same with the device of a tensor, where it is one of npu."""

    def __init__(self, tensor):
        super().__init__(tensor.device if tensor.device.type == "npu" else None)


def synchronize(device=None):
    torch.accelerator.synchronize(_index(device))


def get_device_name(device=None):
    return f"test device {_index(device)}"


def get_device_capability(device=None):
    _index(device)
    return (1, 0)


# ---- streams and events --------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of the device; calls on it have run when they return."""

    def __new__(cls, device=None, priority=0, **numbers):
        if numbers:
            return super().__new__(cls, priority=priority, **numbers)
        return super().__new__(cls, torch.device("npu", _index(device)), priority=priority)


Event = torch.Event
"""Without a device it is one of npu. torch measures no time between events of a class of its own."""


def current_stream(device=None):
    return torch.accelerator.current_stream(_index(device))


def default_stream(device=None):
    return Stream(stream_id=0, device_index=_index(device), device_type=_type_number())


def _type_number():
    return current_stream().device_type


def set_stream(stream):
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(stream):
    """A context in which a stream is the current one; None changes nothing."""
    if stream is None:
        yield
        return
    with stream:
        yield


def is_current_stream_capturing():
    return False


class NPUGraph:
    """A captured graph, which this device has none of."""

    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            "npu: no graph can be captured, because kernels run on the host while they are called"
        )


graph = NPUGraph

# ---- dtypes --------------------------------------------------------------------------------------


def is_bf16_supported(including_emulation=True):
    return True


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16]


# ---- random numbers ------------------------------------------------------------------------------


def _generator(device):
    return default_generators[_index(device)]


def manual_seed(seed):
    """Seed the generator of the current device."""
    _generator(None).manual_seed(int(seed))


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed():
    _generator(None).seed()


def seed_all():
    manual_seed_all(torch.Generator().seed())


def initial_seed():
    return _generator(None).initial_seed()


def get_rng_state(device="npu"):
    return _generator(device).get_state()


def set_rng_state(new_state, device="npu"):
    _generator(device).set_state(new_state)


def get_rng_state_all():
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states):
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)


# ---- memory --------------------------------------------------------------------------------------


def empty_cache():
    """Do nothing: no memory is kept."""


def memory_stats(device=None):
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device=None):
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None):
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device=None):
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device=None):
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats(_index(device))


def mem_get_info(device=None):
    return torch.accelerator.get_memory_info(_index(device))


def device_index_of(pointer):
    """Index of the device that has the memory at an address; -1 where the host has it."""
    return _native.device_index_of(pointer)
