# SPDX-License-Identifier: Apache-2.0
"""True where an implementation of an operator is right: cases, and definitions in float64.

`check` runs the cases of an operator against an implementation and returns a table, so that who
writes a kernel for a device knows that it computes what the operator is, and which calls it does
not take. The same cases hold this library's own implementations.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from transformer_engine.plugin.adapters import LIBRARY, NATIVE
from transformer_engine.plugin.builtin import ABSENT, OPERATORS
from transformer_engine.plugin.conformance.cases import (
    CASES,
    Case,
    Draw,
    Kept,
    dtype_of,
    errors_of,
    recipe_of,
    snapshot,
)
from transformer_engine.plugin.conformance.definition import compared, defined
from transformer_engine.plugin.core import get_registry
from transformer_engine.plugin.core.types import BackendImplKind, OpImpl

__all__ = ["WITHOUT_CASES", "Report", "Row", "check", "groups", "operators"]

_GROUPS = ("layers", "casts", "scaling", "optimizers", "attention", "layouts")
WITHOUT_CASES = {
    **dict.fromkeys(
        "create_fp8_tensor_meta get_cublasLt_version get_cudnn_version get_fused_attn_backend "
        "get_num_cublas_streams".split(),
        "it computes nothing",
    ),
    **dict.fromkeys(ABSENT, "it is not built yet"),
}
"""Operators that have no cases, and why."""
_FORWARD_OF = {"dropout_bwd": "dropout_fwd", "fused_attn_bwd": "fused_attn_fwd"}
"""Operators that read random masks, and whose these are."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Row(NamedTuple):
    """Outcome of a case."""

    case: str
    outcome: str  # "passed", "failed", or "refused": it does not take the call
    error: float  # the largest of its results, relative to what is allowed; above 1 it fails
    why: str  # of what did not pass
    dtype: str = ""  # of the first tensor in high precision
    recipe: str = "none"  # of its quantized tensors and quantizers


class Report(NamedTuple):
    """Result of `check`; ``str()`` of it is a table."""

    op_name: str
    impl_id: str
    rows: tuple[Row, ...]

    @property
    def passed(self) -> bool:
        """No case failed, and not all were refused."""
        outcomes = {row.outcome for row in self.rows}
        return "failed" not in outcomes and "passed" in outcomes

    def __str__(self) -> str:
        counts = [
            f"{sum(row.outcome == outcome for row in self.rows)} {outcome}"
            for outcome in ("passed", "failed", "refused")
        ]
        lines = [f"{self.op_name} by {self.impl_id}: {', '.join(counts)}"]
        width = max((len(row.case) for row in self.rows), default=0)
        lines += [
            f"    {row.case:{width}}  {row.outcome:8} {row.error:9.3g}  {row.why}".rstrip()
            for row in self.rows
        ]
        return "\n".join(lines)


def _cases() -> dict[str, Callable[[Draw], Iterable[Case]]]:
    for group in _GROUPS:
        importlib.import_module(f"{__name__}.{group}")
    return CASES


def operators() -> tuple[str, ...]:
    """Operators of `transformer_engine_torch` that have cases; all of the C library have."""
    return tuple(sorted(_cases()))


def check(
    impl: OpImpl | Callable[..., Any],
    op_name: str | None = None,
    *,
    device: Any = "cpu",
    seed: int = 0,
    dtypes: Iterable[torch.dtype] = _DTYPES,
    match: str = "",
    forward: Callable[..., Any] | None = None,
) -> Report:
    """Run the cases of an operator against an implementation.

    Parameters
    ----------
    impl : OpImpl or callable
        The implementation; `supports`, `supported_dtypes` and `min_arch` of an `OpImpl` are asked
        as a call would ask them.
    op_name : str, optional
        The operator, for a callable: one of `transformer_engine_torch`, or ``te_<name>``, one of
        the C library, whose function gets the fields of a call as a dict. While an operator of the
        C library is checked, calls of other threads on such devices reach the implementation, too.
    device : torch.device or str, default "cpu"
        Where the tensors are: any device that torch knows.
    seed : int, default 0
        Of the random data.
    dtypes : iterable of torch.dtype
        Dtypes in high precision of the cases.
    match : str, default ""
        Cases whose name has this in it alone.
    forward : callable, optional
        For `dropout_bwd` and `fused_attn_bwd`: the forward whose random masks the gradient reads,
        which are an implementation's own. That of the same `impl_id` where an `OpImpl` is given and
        the registry has one; without one gradients of attention are checked without dropout.

    Returns
    -------
    Report
        A row for each case. Errors are mean squares, relative to the exact values, in units of what
        a few roundings to the result's dtype and the sums in fp32 allow.

    Raises
    ------
    TypeError
        `impl` is None, as a registry gives what it lacks, or can not be called.
    ValueError
        There is no such operator, no name of one, or no forward for `dropout_bwd`.
    NotImplementedError
        The operator has no cases.
    """
    if not isinstance(impl, OpImpl):
        if not callable(impl):
            raise TypeError(f"check: impl: {impl!r}, expected an OpImpl or a function")
        if op_name is None:
            raise ValueError("check: op_name: which operator is it?")
        impl = OpImpl(op_name, getattr(impl, "__name__", "it"), BackendImplKind.REFERENCE, impl)
    name = impl.op_name if op_name is None else op_name
    if name in LIBRARY and name not in OPERATORS:
        draw = Draw(torch.device(device), seed, tuple(dtypes))
        return Report(name, impl.impl_id, tuple(_of_library(impl, draw, match)))
    if name not in OPERATORS:
        raise ValueError(
            f"check: {name!r} is no operator of transformer_engine_torch, or te_<name> of the C "
            "library"
        )
    if name in WITHOUT_CASES:
        raise NotImplementedError(f"check: {name} has no cases: {WITHOUT_CASES[name]}")
    cases = _cases()[name]
    forward = forward or _forward_of(name, impl.impl_id)
    draw = Draw(torch.device(device), seed, tuple(dtypes), forward)
    rows = [_run(name, impl, case) for case in cases(draw) if match in case.name]
    return Report(name, impl.impl_id, tuple(rows))


def groups(op_name: str) -> tuple[tuple[str, str], ...]:
    """(dtype, recipe) of the cases of an operator, as of `Row`, each once; () where it has none.

    They are found by drawing the cases, on the CPU.
    """
    from transformer_engine.plugin.conformance import library

    draw = Draw(torch.device("cpu"), 0, _DTYPES, _forward_of(op_name, NATIVE))
    if op_name in LIBRARY:
        cases = (case for _, _, case in library.cases_of(LIBRARY[op_name], draw, _cases()))
    else:
        cases = iter(_cases().get(op_name, lambda draw: ())(draw))
    return tuple(dict.fromkeys((dtype_of(case), recipe_of(case)) for case in cases))


def _forward_of(op_name: str, impl_id: str) -> Callable[..., Any] | None:
    """The forward whose random masks a gradient reads; None where there is none."""
    if op_name not in _FORWARD_OF:
        return None
    found = get_registry().get_implementation(_FORWARD_OF[op_name], impl_id)
    return None if found is None else found.fn


def _of_library(impl: OpImpl, draw: Draw, match: str) -> Iterator[Row]:
    """Rows of an implementation of an operator of the C library."""
    from transformer_engine.plugin.conformance import library

    checked = library.Checked(impl)
    for op, function, case in library.cases_of(checked.op, draw, _cases()):
        case = replace(case, name=f"{op}: {case.name}") if op else case
        if match not in case.name:
            continue
        taken, checked.said = checked.taken, "no call came to it"
        within = OpImpl(op, impl.impl_id, BackendImplKind.REFERENCE, checked.within(function, draw))
        row = _run(op, within, case)
        took_none = checked.taken == taken and row.outcome == "passed"
        yield row._replace(outcome="refused", error=0.0, why=checked.said) if took_none else row


def _run(op: str, impl: OpImpl, case: Case) -> Row:
    """Row of a case."""
    row = _outcome(op, impl, case)
    return row._replace(dtype=dtype_of(case), recipe=recipe_of(case))


def _outcome(op: str, impl: OpImpl, case: Case) -> Row:
    before, exact = snapshot(case), defined(op, case)
    try:
        answer = impl.takes is None or impl.takes(*case.args, **case.kwargs)
        if isinstance(answer, str) or not answer:
            return _refused(case, before, answer or "supports")
        with torch.no_grad():
            found = impl.fn(*case.args, **case.kwargs)
    except NotImplementedError as error:
        return _refused(case, before, str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the case failed
        return Row(case.name, "failed", float("inf"), f"{type(error).__name__}: {error}")
    try:
        error, why = errors_of(compared(case, found, exact), before)
    except NotImplementedError as error:  # of a class, which the case itself calls
        return Row(case.name, "refused", 0.0, str(error))
    except Exception as problem:  # noqa: BLE001 - a result that nothing can be done with
        return Row(case.name, "failed", float("inf"), f"the result: {problem}")
    return Row(case.name, "failed" if why else "passed", error, why)


def _refused(case: Case, before: list[Kept], why: str) -> Row:
    """Somebody else may take the call then, as it was."""
    if any(kept.touched() for kept in before):
        return Row(case.name, "failed", float("inf"), f"it wrote, and then refused: {why}")
    return Row(case.name, "refused", 0.0, why)
