# SPDX-License-Identifier: Apache-2.0
"""Pickles of quantized tensors: names, numbers and plain tensors, checked when they are read."""

from typing import Any

import torch
from torch import Tensor

from transformer_engine.pytorch import tensor as formats
from transformer_engine.pytorch.constants import DType


def pickled_class(kind: type) -> Any:
    """Return a pickle's reference to a class: its name, but a class of a program itself."""
    name = kind.__name__
    known = getattr(formats, name, None)
    return name if known is kind else kind


def _named_class(kind: Any, base: str, what: str) -> type:
    """The class that `pickled_class` has named; ValueError for one that is none of a base."""
    made = kind
    if isinstance(kind, str):
        made = getattr(formats, kind, None) if kind in formats.__all__ else None
    whole = getattr(formats, base)
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
    of the class: a file may not put something in place of a method; TypeError or ValueError for
    what is no shape, dtype or pair.
    """
    from transformer_engine.pytorch.tensor.quantizer_arguments import checked_shape

    made = _named_class(kind, "QuantizedTensor", "quantized tensors")
    label = f"a pickled {made.__name__}"
    fields = _fields_of(made, fields, dtype, recast)
    shape = checked_shape(label, shape)
    requires_grad, is_parameter, attributes = _items(label, about, bool, bool, dict)
    taken = [name for name in attributes if not isinstance(name, str) or hasattr(made, name)]
    if taken:
        raise ValueError(
            f"{label}: attributes {taken}: the class itself has these names, and they are not "
            "overwritten"
        )
    tensor = made._made(fields, dtype, shape, requires_grad)
    tensor._written()
    tensor.__dict__.update(attributes)
    if is_parameter:
        tensor._is_param = True
    return tensor


def _items(label: str, given: Any, *kinds: Any) -> tuple:
    """A tuple of so many items of these classes; ValueError for anything else."""
    legal = isinstance(given, tuple) and len(given) == len(kinds)
    if not legal or not all(map(isinstance, given, kinds)):
        names = ", ".join(getattr(kind, "__name__", str(kind)) for kind in kinds)
        raise ValueError(f"{label}: {given!r}, expected a tuple of {names}")
    return given


def _fields_of(made: Any, fields: Any, dtype: Any, recast: Any) -> dict[str, Any]:
    """The fields of a pickle as a class takes them; ValueError for others than it has."""
    from transformer_engine.pytorch.tensor.quantizer_arguments import checked_dtype

    label, names = f"a pickled {made.__name__}", _field_names(made, fields)
    checked_dtype(f"{label}: dtype", dtype)
    if not isinstance(fields, dict) or not fields.keys() <= names:
        found = sorted(map(str, fields)) if isinstance(fields, dict) else type(fields).__name__
        raise ValueError(f"{label}: fields {found}, expected some of {sorted(names)}")
    try:
        restored = made._restored(fields)
    except KeyError as error:
        raise ValueError(f"{label}: its field {error} is missing") from error
    if recast is not None:
        restored["_quantizer"] = rebuild_quantizer(*_items(label, recast, str | type, dict))
    return restored


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
    fields = _fields_of(made, fields, dtype, recast)
    if recast is not None:
        fields["_quantizer"].internal = True
    storage = made._made(fields, dtype)
    storage._written()
    return storage


def rebuild_quantizer(kind: Any, arguments: dict) -> Any:
    """Make a quantizer of what a pickle says; ValueError for a class that is none."""
    made: Any = _named_class(kind, "Quantizer", "quantizers")
    return made._of_plain(arguments)


# A quantizer of a program is pickled by its attributes, of which element types are some.
rebuild_quantized.__module__ = "transformer_engine.pytorch.tensors"  # as checkpoints have it
torch.serialization.add_safe_globals([rebuild_quantized, DType])
