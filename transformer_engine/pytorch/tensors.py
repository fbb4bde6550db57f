# SPDX-License-Identifier: Apache-2.0
"""What is asked about tensors that are not plainly `Tensor` or `Parameter`, before any is made."""

import importlib
from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.modes import wraps_tensors

ALIGNMENT = 16
"""What native code rounds the length of a line of quantized data up to; the padding is zero."""

_QUANTIZED = "transformer_engine.pytorch.tensor"
"""The module of the classes of quantized tensors, which is loaded with the first of them."""


def plain_tensor(tensor: Tensor) -> Tensor:
    """The plain tensor over the memory of an instance of a proper subclass of `Tensor`.

    A subclass without a dispatch of its own (a `torch.nn.Buffer`, a user's ``class T(Tensor)``) is
    only a label on real memory. One with ``__torch_dispatch__`` may have no memory at all, or
    memory that means something else, so its bytes must not be read: TypeError.
    """
    kind = type(tensor)
    dispatches = kind.__torch_dispatch__ is not Tensor.__torch_dispatch__
    if dispatches or wraps_tensors(tensor):
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__}: tensors of this class have no memory that a "
            "kernel can read; convert it to a plain torch.Tensor first"
        )
    return tensor.as_subclass(Tensor)


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is a `QuantizedTensor`, without loading that class."""
    return type(tensor) is not Tensor and getattr(type(tensor), "_TE_QUANTIZED", False)


def local_of(tensor: Any) -> Any:
    """Get this rank's part of a sharded tensor (DTensor); any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def pickled_class(kind: type) -> Any:
    """What a pickle calls a class by: its name, but a class of a program itself."""
    name = kind.__name__
    known = getattr(importlib.import_module(_QUANTIZED), name, None)
    return name if known is kind else kind


def _named_class(kind: Any, base: str, what: str) -> type:
    """The class that `pickled_class` has named; ValueError for one that is none of a base."""
    classes = importlib.import_module(_QUANTIZED)
    made = kind
    if isinstance(kind, str):
        made = getattr(classes, kind, None) if kind in classes.__all__ else None
    whole = getattr(classes, base)
    legal = isinstance(made, type) and issubclass(made, whole) and made is not whole
    # Tensors have all that storages have.
    if not legal or (what == "storages" and issubclass(made, Tensor)):
        raise ValueError(f"a pickled quantized tensor: {kind!r} is no class of {what}")
    return made


def rebuild_quantized(
    kind: Any, shape: tuple, dtype: torch.dtype, fields: dict, recast: tuple | None, about: tuple
) -> Any:
    """Make a quantized tensor of what its pickle holds: names, numbers and plain tensors.

    `kind` is the name of its class, or a class of a program, `fields` are those of its storage,
    `recast` is the name of a quantizer's class and its arguments or None, `about` says whether a
    gradient is wanted, whether it is a parameter, and has attributes. ValueError for another class
    than a quantized tensor's, for fields that it does not have, and for attributes that are names
    of the class: a file may not put something in place of a method.
    """
    made = _named_class(kind, "QuantizedTensor", "quantized tensors")
    fields = _fields_of(made, fields)
    if recast is not None:
        fields["_quantizer"] = rebuild_quantizer(*recast)
    requires_grad, is_parameter, attributes = about
    taken = [name for name in attributes if not isinstance(name, str) or hasattr(made, name)]
    if taken:
        label = f"a pickled {made.__name__}"
        raise ValueError(f"{label}: attributes {taken}: the class has these names")
    tensor = made._made(fields, dtype, shape, requires_grad)
    tensor._written()
    tensor.__dict__.update(attributes)
    if is_parameter:
        tensor._is_param = True
    return tensor


def _fields_of(made: type, fields: Any) -> dict[str, Any]:
    """The fields of a pickle as a class takes them; ValueError for others than it has."""
    names = _field_names(made, fields)
    if not isinstance(fields, dict) or not fields.keys() <= names:
        found = sorted(map(str, fields)) if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(
            f"a pickled {made.__name__}: fields {found}, expected some of {sorted(names)}"
        )
    try:
        return made._restored(fields)
    except KeyError as error:
        raise ValueError(f"a pickled {made.__name__}: its field {error} is missing") from error


def _field_names(made: Any, fields: Any) -> set[str]:
    """Names of the fields of a class; of one that says none those that are no methods of it."""
    if not isinstance(made._TENSORS, property):
        return {*made._TENSORS, *made._SETTINGS}
    known = [name for name in fields if isinstance(name, str)] if isinstance(fields, dict) else ()
    return {name for name in known if not _is_method(getattr(made, name, None))}


def _is_method(value: Any) -> bool:
    return callable(value) or hasattr(type(value), "__get__")


def rebuild_storage(kind: Any, dtype: torch.dtype, fields: dict, recast: tuple | None) -> Any:
    """Make a storage of what the pickle of a tensor holds that has some as its parts.

    ValueError for a class that is none; the arguments are as of `rebuild_quantized`.
    """
    made: Any = _named_class(kind, "QuantizedTensorStorage", "storages")
    fields = _fields_of(made, fields)
    if recast is not None:
        fields["_quantizer"] = rebuild_quantizer(*recast)
        fields["_quantizer"].internal = True
    storage = made._made(fields, dtype)
    storage._written()
    return storage


def rebuild_quantizer(kind: Any, arguments: dict) -> Any:
    """Make a quantizer of what a pickle says; ValueError for a class that is none."""
    made: Any = _named_class(kind, "Quantizer", "quantizers")
    return made._of_plain(arguments)


# A quantizer of a program is pickled by its attributes, of which element types are some.
torch.serialization.add_safe_globals([rebuild_quantized, DType])
