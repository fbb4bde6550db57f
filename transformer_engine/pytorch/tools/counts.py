# SPDX-License-Identifier: Apache-2.0
"""Counters of the work that was handed to the device; and the scales of a model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from transformer_engine import _core
from transformer_engine.common.contexts import Context
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.tools.skip import check_model

_FP8 = {"e4m3", "e5m2"}


class Counters(dict[str, int]):
    """Counts by name, without zeros.

    ``gemm.<device>.<a>.<b>`` are matrix products by the dtypes of their operands,
    ``op.<device>.<operator>`` calls of operators, ``fallback.<why>`` calls that needed more than
    the one fast path, ``emulated.<format>`` matrix products of a format that no kernel multiplies:
    its operands were multiplied out, and so are those that ``gemm`` counts of it.
    """

    @property
    def fp8_gemms(self) -> int:
        """Matrix products of two FP8 operands."""
        return sum(n for operands, n in self._gemms() if operands <= _FP8)

    @property
    def other_gemms(self) -> int:
        """Matrix products of other operands."""
        return sum(n for operands, n in self._gemms() if not operands <= _FP8)

    @property
    def emulated_gemms(self) -> int:
        """Matrix products of operands that were multiplied out: they are among `other_gemms`."""
        return sum(n for name, n in self.items() if name.startswith("emulated."))

    def _gemms(self) -> Iterator[tuple[set[str], int]]:
        for name, count in self.items():
            kind, _, *operands = name.split(".")
            if kind == "gemm":
                yield set(operands), count


def counters() -> Counters:
    """A copy of what has run since the process began or `reset_counters` was called.

    The counts are those of the process: of all models, threads and devices. What a CUDA graph
    replays is not counted, as the host does nothing then; nor is what torch runs itself.
    """
    return Counters(_core.counters())


def reset_counters() -> None:
    """Set all counts to 0, for the whole process."""
    _core.reset_counters()


class counting(Context):  # noqa: N801 - reads as what it does, as `autocast`
    """Count what runs in a ``with`` block, in any thread.

    ``as`` gives `Counters`, empty inside the block; filled when it is left. Blocks nest.
    `reset_counters` inside of one makes its counts meaningless.
    """

    def _enter(self) -> Counters:
        self._ran, self._before = Counters(), _core.counters()
        return self._ran

    def _left(self, *error: Any) -> None:
        for name, count in _core.counters().items():
            if count > self._before.get(name, 0):
                self._ran[name] = count - self._before.get(name, 0)


class Scaling(NamedTuple):
    """Delayed-scaling state of one tensor."""

    scale: float  # what the next cast multiplies by; 1 until an amax was seen
    amax: float  # largest magnitude that the history knows
    history: tuple[float, ...]
    """amaxes of the finished steps, the newest first; 0 where nothing was recorded."""
    pending: float  # amax of the casts since the last update


TENSORS = (("forward", 3, ("input", "weight")), ("backward", 2, ("grad_output",)))
"""For each direction the slots of a linear layer, and the tensors that the first ones belong to."""


def scales(module: torch.nn.Module) -> dict[str, Scaling]:
    """Return the delayed-scaling state of every module in a model, or in a module of this package.

    It is by the path of the module and the tensor: ``"layers.0.input"``, ``"layers.0.weight"``,
    ``"layers.0.grad_output"``; of the two linear layers of a `LayerNormMLP` ``"mlp.fc1_input"`` and
    so on. Modules that never ran under delayed scaling have none.
    """
    check_model("scales", module, "module")
    found = {}
    for path, inner in module.named_modules():
        if isinstance(inner, LinearBase):
            prefix = f"{path}." if path else ""
            found.update({prefix + name: value for name, value in _scales_of(inner).items()})
    return found


def _scales_of(module: LinearBase) -> dict[str, Scaling]:
    values = module._state_values()
    if values is None:
        return {}
    found = {}
    for part, name in enumerate(module.LINEARS):
        for direction, slots, tensors in TENSORS:
            scale, history = (tensor.tolist() for tensor in values[direction])
            for at, tensor in enumerate(tensors, part * slots):
                pending, *finished = (row[at] for row in history)
                newest_first = tuple(reversed(finished))
                amax = max(pending, *finished, 0.0)
                found[name + tensor] = Scaling(scale[at], amax, newest_first, pending)
    return found
