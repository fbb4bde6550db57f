# SPDX-License-Identifier: Apache-2.0
"""Quantized weights that `torch.distributed.fsdp.fully_shard` has sharded: ranks gather codes.

FSDP2 asks the part of a rank what to gather (`before_gather`), and hands out what has arrived
(`after_gather`). The whole weight is a tensor over that memory, which FSDP2 frees and fills again;
what autograd saves of it is that memory, too. What does not lie there as plans read it (scales with
padding, forms that a plan does not make for itself) is in buffers that FSDP2 frees likewise. With
one scale for the tensor all parts have the same one, and codes alone travel. Values in high
precision travel where the parts of a format do not join (`_parts`).

FSDP2 asks for each weight, in each forward and each backward: what does not change between is kept
(`Sent`), and what need not be written again is not.
"""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.pytorch.tensor import casts
from transformer_engine.pytorch.tensor.joints import Part, joints_of, parts_of
from transformer_engine.pytorch.tensor.quantizer_arguments import FP8
from transformer_engine.pytorch.torchside.modes import versions_kept

_SHARED = ("_scales", "_amax_rowwise", "_amax_columnwise", "_quantizer")
"""Fields that all parts have alike, unless they are exchanged."""


class Gathered(NamedTuple):
    """What a rank knows of a weight that is being gathered."""

    mine: Any  # its part
    parts: list[Part] | None  # what travels of it; None: its values
    ranks: int
    shape: tuple[int, ...]  # of the weight
    shared: tuple[str, ...]  # fields of the part that the weight has, too
    moved: tuple[int, ...]  # parts that do not lie in the weight as they arrive


class Sent(NamedTuple):
    """What a rank gives of its part of a weight, while the part consists of the same memory."""

    asked: tuple  # mesh, size of the weight and dtype of values, as FSDP2 says them
    places: tuple[int, ...]  # of the part's tensors; see `_places`
    tensors: tuple[Tensor, ...]
    about: tuple  # `Gathered`, but for the part


class BeforeGather:
    """``fsdp_pre_all_gather`` of a class, and of a part of a weight.

    FSDP2 reads the signature before each call: that of a method takes longer than the call.
    """

    __slots__ = ("_mine",)

    def __init__(self, mine: Any = None) -> None:
        self._mine = mine

    def __get__(self, mine: Any, _: type) -> "BeforeGather":
        """Return that of an instance, as a method is."""
        return self if mine is None else BeforeGather(mine)

    def __call__(
        self,
        mesh: Any,
        orig_size: Sequence[int] | None = None,
        contiguous_orig_stride: Any = None,
        module: Any = None,
        mp_policy: Any = None,
    ) -> tuple[tuple[Tensor, ...], Gathered]:
        """Return what FSDP2 gathers of the part, codes and scales, and what it hands on with it.

        `mesh` are the ranks that share the weight, `orig_size` is its size.
        """
        del contiguous_orig_stride, module
        dtype = None if mp_policy is None else mp_policy.param_dtype
        return before_gather(self._mine, mesh, orig_size, dtype)


_CALL = inspect.signature(BeforeGather.__call__)
BeforeGather.__signature__ = _CALL.replace(parameters=list(_CALL.parameters.values())[1:])


def travels(kind: type, square: bool, forms: list[str], rows: int, ranks: int) -> bool:
    """Return whether codes of a format travel, of a weight of so many rows; else values do."""
    if kind._ONE_SCALE:
        return True
    if rows % ranks != 0:
        return False
    sent = ["rowwise"] if square else forms
    part = rows // ranks if ranks > 1 else 0
    return "rowwise" in forms and joints_of(kind, square, sent, part) is not None


def before_gather(mine: Any, mesh: Any, size: tuple | None, dtype: torch.dtype | None) -> tuple:
    """Return the tensors to gather of this rank's part, and a `Gathered`.

    `mesh` are the ranks; `size` is that of the weight, None where all parts have equally many rows;
    `dtype` is that of values, the nominal one where None.
    """
    mine._settle()
    sent = mine._sent
    if sent is not None and sent.asked == (mesh, size, dtype) and sent.places == _places(mine):
        return sent.tensors, Gathered(mine, *sent.about)
    ranks, values = mesh.size(), dtype or mine.dtype
    rows = mine.shape[0] * ranks if size is None else size[0]
    with torch.no_grad():
        parts = _parts(mine, ranks, rows)
        sent = [part.name for part in parts or ()]
        shared = tuple([n for n in _SHARED if n in mine.__dict__ and n not in sent])
        moved = tuple(
            [i for i, part in enumerate(parts or ()) if i > 0 and not _is_there(part, ranks)]
        )
        about = parts, ranks, (rows, *mine.shape[1:]), shared, moved if ranks > 1 else ()
        if parts is None:
            return (mine._dequantized(values, tuple(mine.shape)),), Gathered(mine, *about)
        tensors = tuple([part.tensor for part in parts])
        if rows % ranks == 0:  # else FSDP2 compares sizes
            tensors = tuple([_as_values(t, values) for t in tensors])
    own = {t.untyped_storage().data_ptr() for t in mine.get_data_tensors() if t is not None}
    if all(t.untyped_storage().data_ptr() in own for t in tensors):  # no copies of values
        mine._sent = Sent((mesh, size, dtype), _places(mine), tensors, about)
    return tensors, Gathered(mine, *about)


def _as_values(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The same bytes under a dtype: FSDP2 views all of a module's as bytes where dtypes differ."""
    fits = tensor.dim() > 0 and tensor.shape[-1] * tensor.itemsize % dtype.itemsize == 0
    return tensor.view(dtype) if fits else tensor


def _places(mine: Any) -> tuple[int, ...]:
    """Where the tensors lie that a part consists of."""
    return tuple([0 if t is None else t.data_ptr() for t in mine.get_data_tensors()])


def _parts(mine: Any, ranks: int, rows: int) -> list[Part] | None:
    """What travels of a part; None where that are its values."""
    square, own = mine._turns(), mine.get_usages()
    forms = [form for form in own if own[form]]
    kind = getattr(type(mine), "_STORAGE", type(mine))
    if not travels(kind, square, forms, rows, ranks):
        return None
    if mine._ONE_SCALE:
        data = casts.padded(mine._data)
        missing = -(-rows // ranks) - data.shape[0]
        if missing:
            data = torch.nn.functional.pad(data, (0, 0, 0, missing))
        return [Part("_data", data, 0, 1)]
    sent = ["rowwise"] if square else forms
    joints = joints_of(kind, square, sent, rows // ranks if ranks > 1 else 0)
    return [part._replace(tensor=_lines(mine, part)) for part in parts_of(mine, joints)]


def _lines(mine: Any, part: Part) -> Tensor:
    """The tensor of a part in one piece; lines of FP8 codes with their padding."""
    codes = part.name.endswith("_data") and mine._fp8_dtype in FP8
    return casts.padded(part.tensor) if codes else part.tensor.contiguous()


def after_gather(
    outputs: tuple[Tensor, ...], gathered: Gathered, dtype: torch.dtype, out: Any
) -> tuple[Any, tuple[Tensor, ...]] | None:
    """The whole weight over what has arrived, and buffers that are filled anew each time.

    None where `out`, an alias of an earlier one, has been made so.
    """
    parts = gathered.parts
    if out is not None:
        _check_place(outputs[0], out if parts is None else getattr(out, parts[0].name))
        if parts is not None:
            _share(gathered, out)
            _fill(out, outputs, gathered)
        return None
    if parts is None:
        return outputs[0], ()
    with torch.no_grad():
        made = type(gathered.mine)._made(_made_fields(outputs, gathered), dtype, gathered.shape)
        _share(gathered, made)
        _fill(made, outputs, gathered)
        # As lines over all of their memory, whose size FSDP2 goes by.
        return made, tuple(
            [
                t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0)
                for t in _buffers(made, outputs, gathered)
            ]
        )


def _made_fields(outputs: tuple, gathered: Gathered) -> dict[str, Any]:
    """Fields of the whole weight, without what `_fill` writes."""
    mine, parts, ranks, shape, *_ = gathered
    codes = parts[0].tensor
    first = outputs[0].view(codes.dtype).view(ranks * codes.shape[0], -1)[: shape[0]]
    fields = mine._of_shape(mine._fields(), shape)
    length = getattr(mine, parts[0].name).shape[1]
    fields[parts[0].name] = first[:, :length]
    if ranks > 1:
        for part, arrived in zip(parts[1:], outputs[1:], strict=True):
            fields[part.name] = _whole_of(part, arrived, ranks)
    if mine._turns():
        fields.update(mine._memory_of_columns(fields, shape))
    return fields


def _share(gathered: Gathered, whole: Any) -> None:
    """Give the whole weight what all parts have alike."""
    fields = gathered.mine.__dict__
    for name in gathered.shared:
        setattr(whole, name, fields[name])
    if "_amax_columnwise" in gathered.shared and whole._turns():
        whole._amax_columnwise = whole._amax_rowwise


def _is_there(part: Part, ranks: int) -> bool:
    """Return whether the parts of ranks arrive as they lie in the whole."""
    return part.dim == 0 and (ranks * part.tensor.shape[0]) % part.align == 0


def _whole_of(part: Part, arrived: Tensor, ranks: int) -> Tensor:
    """The memory of a part of the whole: that of what arrives, or a buffer."""
    shape = list(part.tensor.shape)
    shape[part.dim] *= ranks
    if _is_there(part, ranks):
        return arrived.view(part.tensor.dtype).view(shape)
    shape[part.dim] += -shape[part.dim] % part.align
    return part.tensor.new_empty(shape)


def _buffers(whole: Any, outputs: tuple, gathered: Gathered) -> list[Tensor]:
    """Tensors of the whole weight that lie neither in what has arrived nor in the part."""
    known = {t.untyped_storage().data_ptr() for t in outputs}
    known |= {
        t.untyped_storage().data_ptr() for t in gathered.mine.get_data_tensors() if t is not None
    }
    return [
        t
        for t in whole.get_data_tensors()
        if t is not None and t.untyped_storage().data_ptr() not in known
    ]


def _fill(whole: Any, outputs: tuple, gathered: Gathered) -> None:
    """Write the buffers of the whole weight; autograd, which has saved them, takes no notice."""
    turns = getattr(whole, whole._FORMS[1][0]) is not None and whole._turns()
    if not (gathered.moved or turns):
        return
    names = [gathered.parts[i].name for i in gathered.moved]
    names += whole._FORMS[1] if turns else ()
    written = [getattr(whole, name) for name in names]
    kept = [t for t in written if isinstance(t, Tensor) and not t.is_inference()]
    with torch.no_grad(), versions_kept(kept):
        for i in gathered.moved:
            part = gathered.parts[i]
            _put(part, outputs[i], getattr(whole, part.name), gathered.ranks)
        if turns:
            whole._turn()


def _put(part: Part, arrived: Tensor, whole: Tensor, ranks: int) -> None:
    """Write the parts of all ranks side by side, and zeros behind them."""
    parts = arrived.view(part.tensor.dtype).view(ranks, *part.tensor.shape).movedim(0, part.dim)
    parts = parts.flatten(part.dim, part.dim + 1)
    length = parts.shape[part.dim]
    whole.narrow(part.dim, 0, length).copy_(parts)
    whole.narrow(part.dim, length, whole.shape[part.dim] - length).zero_()


def _check_place(arrived: Tensor, out: Tensor) -> None:
    """RuntimeError where FSDP2 has gathered to other memory than before."""
    if out.data_ptr() != arrived.data_ptr():
        raise RuntimeError(
            "fsdp_post_all_gather: FSDP2 gathered to memory other than out; this version of torch "
            "is not supported"
        )
