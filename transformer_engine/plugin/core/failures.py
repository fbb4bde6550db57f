# SPDX-License-Identifier: Apache-2.0
"""Messages about calls that an implementation could not do."""

import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

RAISED_BY = "raised by "
"""How a note about an implementation begins."""
_LONGEST = 60
"""Characters of an argument that is no tensor."""


class NobodyError(RuntimeError):
    """An operator has no implementation that can be called."""


def is_of_implementation(error: BaseException) -> bool:
    """Return whether an implementation has raised an error."""
    return any(note.startswith(RAISED_BY) for note in getattr(error, "__notes__", ()))


def nearest(word: str, known: Iterable[str]) -> str:
    """Suggest known words like one that is not known, as the end of a sentence; ""."""
    import difflib

    found = difflib.get_close_matches(word, list(known), 3)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def described(
    op: str, impl_id: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str:
    """Whose call it was, with its arguments: types, shapes, and which are not what they should be.

    Called by the dispatcher where an implementation has raised; the text becomes a note of the
    error.
    """
    lines = [f"{RAISED_BY}{impl_id}, an implementation of {op}"]
    parameters = _parameters(function)
    named = dict(zip(parameters, args, strict=False))
    unnamed = args[len(named) :]
    named.update(kwargs)
    shown = [f"{name}={_shown(value)}" for name, value in named.items()]
    lines.append(f"called with ({', '.join([*shown, *map(_shown, unnamed)])})")
    lines += _wrong(named, parameters)
    return "; ".join(lines)


def _parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Of a function, those that are given one by one; empty where it does not tell."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {name: one for name, one in found.items() if one.kind not in several}


def _is_tensor(value: Any) -> bool:
    """Also of a quantized one that is no torch tensor."""
    try:
        return hasattr(value, "shape") and (hasattr(value, "dtype") or hasattr(value, "dequantize"))
    except Exception:  # noqa: BLE001 - an attribute of its own that fails
        return False


def _shown(value: Any) -> str:
    try:
        return _text(value)
    except Exception:  # noqa: BLE001 - what is told is another error
        return type(value).__name__


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        ends = "[]" if isinstance(value, list) else "()"
        first = [_shown(one) for one in value[:3]] + ["..."] * (len(value) > 3)
        return f"{ends[0]}{', '.join(first)}{ends[1]}"
    if not _is_tensor(value):
        simple = value is None or isinstance(value, bool | int | float | str)
        text = repr(value) if simple else ""
        return text if simple and len(text) <= _LONGEST else type(value).__name__
    kind = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if hasattr(type(value), "dequantize") and type(value).__name__ not in ("Tensor", "Parameter"):
        kind = type(value).__name__
    where = str(getattr(value, "device", "cpu"))
    return f"{kind}{list(value.shape)}{'' if where == 'cpu' else f' on {where}'}"


def _wrong(named: dict[str, Any], parameters: dict[str, inspect.Parameter]) -> Iterator[str]:
    """Of arguments that are no tensors where the signature has one."""
    for name, value in named.items():
        wanted = parameters[name].annotation if name in parameters else None
        kinds = wanted.__args__ if isinstance(wanted, types.UnionType) else (wanted,)
        if not any(getattr(kind, "__name__", "") == "Tensor" for kind in kinds):
            continue
        if _is_tensor(value) or (value is None and type(None) in kinds):
            continue
        if not any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds):
            yield f"{name} is a {type(value).__name__}, expected a Tensor"
