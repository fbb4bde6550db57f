# SPDX-License-Identifier: Apache-2.0
"""Parameters of modules: where they are made, how they begin, how a weight is split."""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, SupportsFloat

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from transformer_engine.pytorch.torchside.device import accelerator
from transformer_engine.pytorch.torchside.modes import active_device
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized, local_of

WEIGHT_DEVIATION = 0.023
"""Standard deviation of weights without an `init_method`."""
MARKS = frozenset(
    ("tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel")
    + ("skip_backward_post_hook", "allreduce", "average_gradients_across_tp_domain")
)
"""Attributes by which modules and frameworks tell programs what to do with a parameter."""


def default_device() -> torch.device:
    """Device of modules that are told none.

    What an enclosing ``with torch.device(...)`` or `torch.set_default_device` says; else the
    machine's accelerator, "cuda" say, where it has one, else "cpu".
    """
    chosen = active_device()
    return torch.device(accelerator()) if chosen is None else chosen


def device_of(device: torch.device | str | int | None) -> torch.device:
    """Device of a constructor's argument; `default_device` for None."""
    return default_device() if device is None else torch.device(device)


def have_memory(module: Module) -> bool:
    """Return whether the parameters of a module that was just made can be given values.

    Not by the device that they were asked for: a framework that loads large models replaces
    `torch.nn.Module.register_parameter`, so that they come out on the meta device.
    """
    return not any(parameter.is_meta for parameter in module.parameters(recurse=False))


def marks_of(parameter: Tensor) -> dict[str, Any]:
    """Those of `MARKS` that a parameter has, with their values."""
    return {name: value for name, value in vars(parameter).items() if name in MARKS}


def keep_marks_of(former: Tensor | None, parameter: Tensor | None) -> None:
    """Give a parameter that is assigned the marks of the former one, of which it is another form.

    That is a part or a whole (FSDP2), or a cast. A plain one in place of a plain one is a new one,
    which its program marks: megatron-core refuses one that has marks already.
    """
    if former is None or parameter is None:
        return
    if any(local_of(p) is not p or is_quantized(p) for p in (former, parameter)):
        keep_marks(marks_of(former), parameter)


def keep_marks(marks: Mapping[str, Any], parameter: Tensor) -> None:
    """Give a parameter the marks of the one whose place it takes, as far as it has none itself."""
    for name, value in marks.items():
        vars(parameter).setdefault(name, value)


def refuse_options(module: str, **arguments: tuple[Any, Any]) -> None:
    """Raise NotImplementedError for an argument, name=(given, default), that is not its default."""
    for name, (value, default) in arguments.items():
        if value is not default and value != default:
            raise NotImplementedError(
                f"{module}: {name}={value!r} is not there yet: leave it out, or give {default!r}"
            )


def one_of(module: str, allowed: Iterable, **values: Any) -> None:
    """Raise a ValueError for a value, given by name, that is none of the allowed ones."""
    for label, value in values.items():
        if value not in allowed:
            names = ", ".join(map(str, allowed))
            raise ValueError(f"{module}: {label}={value!r}, expected one of {names}")


def positive_sizes(module: str, **sizes: Any) -> None:
    """Raise a ValueError for a size, given by name, that is no positive int."""
    for label, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(f"{module}: {label} = {size!r}, expected a positive int")


def checked_dtype(
    module: str, params_dtype: torch.dtype | None, dtype: torch.dtype | None = None
) -> torch.dtype:
    """The dtype of parameters: as given under either name, else torch's default dtype.

    TypeError for no dtype that parameters can have, ValueError where the two differ.
    """
    if dtype is not None and params_dtype is not None and dtype != params_dtype:
        raise ValueError(f"{module}: dtype={dtype} and params_dtype={params_dtype} differ")
    found = params_dtype if dtype is None else dtype
    if found is None:
        return torch.get_default_dtype()
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise TypeError(
            f"{module}: params_dtype={found!r}: expected torch.float32, torch.float16 or "
            "torch.bfloat16; FP8 copies of the parameters are made inside te.autocast"
        )
    return found


def checked_eps(module: str, eps: Any) -> float:
    """An ``eps`` argument as a float; TypeError or ValueError for what can be added to no sum."""
    if isinstance(eps, bool) or not isinstance(eps, SupportsFloat):
        raise TypeError(f"{module}: eps={eps!r}, expected a number from 0 on, say 1e-5")
    if not 0.0 <= float(eps) < math.inf:
        raise ValueError(f"{module}: eps={eps!r}, expected a finite number from 0 on, say 1e-5")
    return float(eps)


def probabilities(module: str, **values: Any) -> None:
    """Raise for a value, given by name, that is no number (TypeError) from 0 to 1 (ValueError)."""
    for label, value in values.items():
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"{module}: {label}={value!r}, expected a number from 0 to 1")
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{module}: {label}={value!r}, expected a number from 0 to 1")


def functions(module: str, **values: Any) -> None:
    """Raise a TypeError for a value, given by name, that can not be called and is not None."""
    for label, value in values.items():
        if value is not None and not callable(value):
            raise TypeError(f"{module}: {label}={value!r}, expected a function or None")


class Split(NamedTuple):
    """How a weight is kept as several parameters."""

    pieces: tuple[tuple[str, int], ...]  # name and rows of each

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of each piece."""
        return tuple(rows for _, rows in self.pieces)

    @classmethod
    def of(cls, module: str, split: Any, rows: int) -> "Split | None":
        """Read a ``parameters_split`` argument of a weight with `rows` rows; None gives None.

        Equal pieces for a sequence of names, rows by name for a dict; a trailing "_" of a name is
        dropped. TypeError for no collection of names, ValueError where the pieces do not make up
        the weight, or two have one name.
        """
        if split is None:
            return None
        if isinstance(split, str) or not isinstance(split, Iterable):
            raise TypeError(
                f"{module}: parameters_split={split!r}: expected a sequence of names or a dict of "
                "sizes"
            )
        if isinstance(split, Mapping):
            pieces = tuple((str(name).rstrip("_"), size) for name, size in split.items())
        else:
            names = [str(name).rstrip("_") for name in split]
            if not names or rows % len(names) != 0:
                raise ValueError(
                    f"{module}: parameters_split={split!r}: {rows} outputs are no {len(names)} "
                    "equal pieces; give a dict of sizes"
                )
            pieces = tuple((name, rows // len(names)) for name in names)
        for name, _ in pieces:
            if not name.isidentifier():
                raise ValueError(
                    f"{module}: parameters_split={split!r}: {name!r} can not be part of a "
                    "parameter's name: use letters, digits and underscores"
                )
        sizes = [size for _, size in pieces]
        if not all(isinstance(n, int) and n > 0 for n in sizes) or sum(sizes) != rows:
            raise ValueError(
                f"{module}: parameters_split={split!r}: the sizes must be positive and add up to "
                f"{rows}"
            )
        if len({name for name, _ in pieces}) != len(pieces):
            raise ValueError(f"{module}: parameters_split={split!r}: a name occurs twice")
        return cls(pieces)


def split_rows(weight: Tensor, pieces: list[tuple[str, int]]) -> tuple[Tensor, ...]:
    """Rows of a whole weight (or its gradient) for each piece; the whole itself for one piece."""
    if len(pieces) == 1:
        return (weight,)
    return weight.split([rows for _, rows in pieces])


def bias_to_return(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """A bias for the caller to add, in the dtype of the output.

    Where gradients are off it is never the parameter itself: a reentrant checkpoint makes outputs
    of its node of what its forward returns, and a parameter would be a leaf no longer.
    """
    bias = bias.to(dtype)
    return bias if torch.is_grad_enabled() else bias.detach()


def initialise(
    module: Module,
    name: str,
    init_method: Callable[[Tensor], Any] | None,
    rng: tuple[Callable | None, str | None],
) -> None:
    """Give a parameter its first values, on the default device where it is on the meta device.

    `init_method` initialises a tensor in place; None: normal, deviation `WEIGHT_DEVIATION`. `rng`:
    (function that returns a random-state tracker or None, name to fork or None).
    """
    parameter = getattr(module, name)
    if parameter.device.type == "meta":
        made = Parameter(
            torch.empty_like(parameter, device=default_device()),
            requires_grad=parameter.requires_grad,
        )
        attributes = parameter.__dict__
        setattr(module, name, made)  # which puts it back to meta in accelerate's empty models
        parameter = getattr(module, name)
        parameter.__dict__.update(attributes)
    tracker, fork = rng
    context = contextlib.nullcontext()
    if tracker is not None:
        context = tracker().fork(fork) if fork is not None else tracker().fork()
    with context, torch.no_grad():
        (init_method or partial(torch.nn.init.normal_, std=WEIGHT_DEVIATION))(parameter)


def make_weight(
    module: Module, prefix: str, sizes: tuple[int, int], device: torch.device, dtype: torch.dtype
) -> None:
    """Give a module the parameter ``<prefix>weight`` of (columns, rows), without values."""
    columns, rows = sizes
    weight = torch.empty(rows, columns, device=device, dtype=dtype)
    module.register_parameter(f"{prefix}weight", Parameter(weight))


def make_bias(
    module: Module, prefix: str, rows: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Give a module ``<prefix>bias``: a parameter; an empty tensor unless it has ``use_bias``."""
    if module.use_bias:
        bias = torch.empty(rows, device=device, dtype=dtype)
        module.register_parameter(f"{prefix}bias", Parameter(bias))
    else:
        setattr(module, f"{prefix}bias", torch.empty(0, device=device, dtype=dtype))


def reset_linear(module: Module, prefix: str, init_method: Callable[[Tensor], Any] | None) -> None:
    """Give what `make_weight` and `make_bias` made its first values; see `initialise`."""
    initialise(module, f"{prefix}weight", init_method, module._rng)
    bias = getattr(module, f"{prefix}bias")
    if module.use_bias:
        initialise(module, f"{prefix}bias", torch.nn.init.zeros_, module._rng)
    elif bias.is_meta:
        setattr(module, f"{prefix}bias", torch.empty_like(bias, device=default_device()))


def reset_norm(module: Module, prefix: str = "") -> None:
    """Give gamma 1 (0 where it is zero-centred) and beta 0, as far as a norm has them."""
    gamma = torch.nn.init.zeros_ if module.zero_centered_gamma else torch.nn.init.ones_
    for name, fill in (("weight", gamma), ("bias", torch.nn.init.zeros_)):
        if getattr(module, prefix + name, None) is not None:
            initialise(module, prefix + name, fill, (None, None))


def add_grad(parameter: Tensor, grad: Tensor) -> None:
    """Add to a parameter's ``grad``, as a backward does."""
    if not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = grad.to(parameter.dtype)
    else:
        parameter.grad.add_(grad)


def refuse_distributed(kind: str, name: str, parameter: Any) -> None:
    """Raise NotImplementedError for a `distributed_weight.DistributedWeight` as a parameter."""
    if hasattr(parameter, "materialize_group_for_forward"):
        raise NotImplementedError(
            f"{kind}: {name}: a DistributedWeight ({type(parameter).__name__}): modules do not "
            "put weights together; shard them by FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
