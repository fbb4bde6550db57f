# SPDX-License-Identifier: Apache-2.0
"""``te_activation`` and its gradient by operators of `transformer_engine_torch`."""

from typing import Any

from torch import Tensor

from transformer_engine import _core
from transformer_engine.plugin.builtin import ACTIVATIONS
from transformer_engine.plugin.slots.fields import Choices, Fields, apart, reads, written
from transformer_engine.plugin.slots.values import CAST_FIELDS, are_cast, deliver, ours

_KINDS = tuple(_core.activation_names())
_CLAMPED = "clamped_swiglu"
_NUMBERS = ("limit", "alpha", "linear_offset")


def _numbers(kind: str, fields: Fields) -> tuple | None:
    """Further arguments of an operator; None where it can not be told one."""
    if kind != _CLAMPED:
        return ()
    return (fields["limit"], fields["alpha"]) if fields["linear_offset"] == 1.0 else None


def _made(name: str, choices: Choices, fields: Fields, kind: str, *tensors: Tensor) -> Any:
    """Call the operator `name`; NotImplemented where nobody takes it."""
    if name not in choices:
        return NotImplemented
    numbers = _numbers(kind, fields)
    if numbers is None:
        choices.unexpressed(name)
    return choices[name](*tensors, None, *numbers, out=(_place(fields, *tensors),))


def _place(fields: Fields, *read: Tensor) -> Tensor | None:
    """Where the values of a call go; None where they are cast, too."""
    return None if are_cast(fields) else apart(fields["wide"], *read)


@reads("input", "kind", *CAST_FIELDS[:-1], *_NUMBERS)
def forward(choices: Choices, fields: Fields) -> None:
    """An activation, cast as asked, from the dtype in which the implementation returns it."""
    kind, inp = _KINDS[fields["kind"]], fields["input"]
    made = _made(kind, choices, fields, kind, inp)
    if made is NotImplemented:
        shape = inp.shape[0], inp.shape[1] // (2 if kind.endswith("glu") else 1)
        made = ours(_core.activation, shape, fields, choices, "input", "kind", *_NUMBERS)
    deliver(kind, fields, made, choices)


@reads("grad_output", "input", "kind", *CAST_FIELDS, *_NUMBERS)
def backward(choices: Choices, fields: Fields) -> None:
    """The gradient of an activation, cast as asked, and its column sums."""
    kind, inp, grad = _KINDS[fields["kind"]], fields["input"], fields["grad_output"]
    name, sums = ACTIVATIONS[kind][0], fields["bias_grad"]
    made: Any = NotImplemented
    if sums is not None:
        with_sums = choices.followed(f"dbias_{name}", name)
        found = with_sums(grad, inp, None, out=(sums, _place(fields, grad, inp)))
        if found is not NotImplemented:
            total, made = found
            written(f"dbias_{name}", "the gradient of the bias", sums, total)
            fields = {**fields, "bias_grad": None}
    if made is NotImplemented:
        made = _made(name, choices, fields, kind, grad, inp)
    if made is NotImplemented:
        names = "grad_output", "input", "kind", *_NUMBERS
        made = ours(_core.activation_backward, inp.shape, fields, choices, *names)
    deliver(name, fields, made, choices)


@reads("input", "cap", "grad_output", *CAST_FIELDS[:-1])
def softcap(choices: Choices, fields: Fields) -> None:
    """A softcap of this library, whose cast is somebody else's."""
    names = "input", "cap", "grad_output"
    made = ours(_core.softcap, fields["input"].shape, fields, choices, *names)
    deliver("softcap", fields, made, choices)
