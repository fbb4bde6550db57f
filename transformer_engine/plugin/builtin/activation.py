# SPDX-License-Identifier: Apache-2.0
"""Activations and their gradients, by ``_core.activation`` and ``_core.activation_backward``."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from transformer_engine import _core
from transformer_engine.pytorch.cpp_extensions.values import placed, quantized, wide

_KINDS = {name: kind for kind, name in enumerate(_core.activation_names())}


_Places = Sequence[Tensor | None] | None
"""Where results go; see `values.placed`."""


def _run(op: str, kind: str, input: Any, quantizer: Any, places: _Places, **numbers: float) -> Any:
    inp = wide(op, "input", input)
    columns = inp.shape[-1]
    if kind.endswith("glu"):
        if columns % 2:
            raise ValueError(f"{op}: input: {columns} columns, expected two halves")
        columns //= 2
    made = placed(places, 0, inp, (*inp.shape[:-1], columns))
    _core.activation(inp, _KINDS[kind], wide=made, **numbers)
    return quantized(op, made, quantizer)


def _run_backward(
    op: str,
    kind: str,
    grad: Any,
    fwd_input: Any,
    bias_grad: Tensor | None,
    places: _Places,
    **numbers: float,
) -> Tensor:
    inp = wide(op, "fwd_input", fwd_input)
    made = placed(places, -1, inp, inp.shape)
    given = {"wide": made, "bias_grad": bias_grad, **numbers}
    _core.activation_backward(wide(op, "grad", grad), inp, _KINDS[kind], **given)
    return made


def _forward(name: str) -> Callable:
    def run(input: Tensor, quantizer: Any, *, out: _Places = None) -> Any:
        return _run(name, name, input, quantizer, out)

    halves = "; of a gated one, [..., 2 columns]: the first half is activated, the second a factor"
    run.__doc__ = f"""`{name}` of [..., columns]{halves if name.endswith("glu") else ""}.

    In fp32, rounded to the dtype of `input`; cast by `quantizer` where that is not None. `out`:
    where the result goes, see `values.placed`.
    TypeError or ValueError for other arguments.
    """
    return _named(run, name)


def _gradient(name: str) -> Callable:
    def run(grad: Tensor, fwd_input: Tensor, quantizer: Any, *, out: _Places = None) -> Any:
        made = _run_backward(f"d{name}", name, grad, fwd_input, None, out)
        return quantized(f"d{name}", made, quantizer)

    run.__doc__ = f"""Gradient of the input of `{name}`, of the shape and dtype of `fwd_input`.

    `grad` is that of its result; cast by `quantizer` where that is not None.
    """
    return _named(run, f"d{name}")


def _gradient_and_bias(name: str) -> Callable:
    op = f"dbias_d{name}"

    def run(
        grad: Tensor, fwd_input: Tensor, quantizer: Any, *, out: _Places = None
    ) -> tuple[Tensor, Any]:
        inp, given = wide(op, "fwd_input", fwd_input), wide(op, "grad", grad)
        sums = placed(out, 0, inp, inp.shape[-1:], given.dtype)
        made = _run_backward(op, name, given, inp, sums, out)
        return sums, quantized(op, made, quantizer)

    run.__doc__ = f"""(gradient of the bias before `{name}`, `d{name}`).

    The first are the column sums of the second before its cast, [columns] in the dtype of `grad`.
    """
    return _named(run, op)


def _named(run: Callable, name: str) -> Callable:
    run.__name__ = run.__qualname__ = name
    return run


gelu, dgelu, dbias_dgelu = _forward("gelu"), _gradient("gelu"), _gradient_and_bias("gelu")
qgelu, dqgelu, dbias_dqgelu = _forward("qgelu"), _gradient("qgelu"), _gradient_and_bias("qgelu")
relu, drelu, dbias_drelu = _forward("relu"), _gradient("relu"), _gradient_and_bias("relu")
srelu, dsrelu, dbias_dsrelu = _forward("srelu"), _gradient("srelu"), _gradient_and_bias("srelu")
silu, dsilu, dbias_dsilu = _forward("silu"), _gradient("silu"), _gradient_and_bias("silu")
glu, dglu = _forward("glu"), _gradient("glu")
geglu, dgeglu = _forward("geglu"), _gradient("geglu")
qgeglu, dqgeglu = _forward("qgeglu"), _gradient("qgeglu")
reglu, dreglu = _forward("reglu"), _gradient("reglu")
sreglu, dsreglu = _forward("sreglu"), _gradient("sreglu")
swiglu, dswiglu = _forward("swiglu"), _gradient("swiglu")


def clamped_swiglu(
    input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    *,
    out: _Places = None,
) -> Any:
    """Compute a' sigmoid(alpha a') (b' + 1), a' = min(a, limit), b' = clamp(b, ±limit), of [a b].

    Else as `swiglu`.
    """
    op = "clamped_swiglu"
    return _run(op, op, input, quantizer, out, limit=limit, alpha=alpha)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    *,
    out: _Places = None,
) -> Any:
    """Gradient of the input of `clamped_swiglu`; else as `dswiglu`."""
    op = "clamped_dswiglu"
    numbers = {"limit": limit, "alpha": alpha}
    made = _run_backward(op, "clamped_swiglu", grad, fwd_input, None, out, **numbers)
    return quantized(op, made, quantizer)
