# SPDX-License-Identifier: Apache-2.0
"""Attention as nodes of a graph: what limits it, norms and rotations of heads, the attention."""

from typing import NamedTuple

from transformer_engine import _core
from transformer_engine.common.graphs import RESULT, ROWS, Graph, Norm, input_flags
from transformer_engine.common.operand_casts import Quantization, flags_of

SOURCE = _core.Extent(symbol=_core.SYMBOL_SOURCE_ROWS, multiply=1)
"""Rows of the sequence that keys and values are of, where it is another one."""
_SEQUENCES = tuple(
    tuple(_core.Extent(symbol=rows + dim, multiply=1) for dim in range(3))
    for rows in (_core.SYMBOL_ROWS, _core.SYMBOL_SOURCE_ROWS)
)
"""Rows and the two leading dims as extents, of queries and of keys of their own."""
_PREFIXES = ("query_", "key_")
_SEQUENCE_COUNT = _core.Extent(symbol=_core.SYMBOL_SEQUENCES, multiply=1)
_SUMS = _core.Extent(symbol=_core.SYMBOL_SEQUENCES, multiply=1, add=1)
_LONGEST = (
    _core.Extent(symbol=_core.SYMBOL_MAX_QUERIES, multiply=1),
    _core.Extent(symbol=_core.SYMBOL_MAX_KEYS, multiply=1),
    _core.Extent(),
)
"""The shape of the bounds, which have no elements."""


class AttentionSpec(NamedTuple):
    """Attention between projections; fields of its nodes."""

    slices: tuple
    """Of queries, keys and values in their projections: (heads, channels, offset, stride) each; of
    queries also how many lie together."""
    sequence_first: bool  # the leading dims are (sequence, batch), not (batch, sequence)
    scale: float  # this one and the next three as of ``_core.attention``
    dropout: float
    window: tuple[int, int]
    bottom_right: bool
    angles: tuple[int, ...] = ()
    """Channels that the rotary embedding of queries and of keys turns, each with angles of its own;
    one number: both with the same angles; empty: there is none."""
    interleaved: bool = False  # of the rotary embedding
    norms_first: bool = False  # norms of queries and keys come before it
    mask: tuple[int, ...] | None = None  # lengths of its dims: 1, or 0 for that of the scores
    bias: tuple[int, ...] | None = None  # likewise
    lengths: int = 0  # how many vectors of them there are: 0, or 2, of queries and of keys
    bias_dtype: int = _core.DTYPE_F32  # ``_core.DTYPE_*``
    bias_grad: bool = False  # the bias has a gradient
    deterministic: bool = False  # gradients are bitwise repeatable
    packed: bool = False  # rows are tokens of packed sequences
    sink: bool = False  # the softmax has a term without a key
    sink_grad: bool = False  # which has a gradient
    slopes: int = 0  # of ALiBi, how many dims they have: 0, none; 1, [heads]; 2, [batch, heads]
    softcap: float = 0.0  # bounds the scaled scores; 0: nothing does
    max_scores: bool = False  # the largest score of each head is a result too
    quantization: Quantization | None = None  # of queries, keys and values; None: high precision
    fp8_gradient: bool = False  # the gradients are computed in FP8 too
    no_amax: bool = False  # with a quantization: none is recorded in the forward
    fp8_output: bool = False
    """With a quantization: the output goes on in FP8, to the projection behind or to the caller."""


# ---- tensors that a call is given ----------------------------------------------------------------


def add_source(graph: Graph, name: str, dtype: int, features: int, wanted: bool) -> int:
    """Add the sequence that keys and values are of; `wanted`: its gradient is."""
    return graph.tensor(f"{name}source", dtype, (SOURCE, features), input_flags(wanted))


def add_angles(graph: Graph, attention: AttentionSpec, name: str) -> tuple[int, ...]:
    """Add the angles of rotary embeddings."""
    return tuple(
        graph.tensor(
            f"{name}angles_{i}", _core.DTYPE_F32, (_core.ANY_LENGTH, channels), _core.VALUE_INPUT
        )
        for i, channels in enumerate(attention.angles)
    )


def add_limits(graph: Graph, attention: AttentionSpec, name: str, crossed: bool) -> dict[str, int]:
    """Add mask, bias, lengths, offsets, sink, slopes and bounds, as far as they are there.

    `crossed`: the keys are of the source. Returns their values by ``_core.ATTENTION_INPUTS``.
    """
    dims, limits = _score_dims(attention, crossed), {}
    batch = _SEQUENCE_COUNT if attention.packed else dims[0]

    def add(field: str, dtype: int, shape: tuple, gradient: bool = False, kind: str = "") -> None:
        flags = _core.VALUE_INPUT | (_core.VALUE_GRADIENT if gradient else 0)
        limits[field] = graph.tensor(name + kind + field, dtype, shape, flags)

    def scores(lengths: tuple[int, ...]) -> tuple:
        return tuple(n or dim for n, dim in zip(lengths, dims, strict=True))

    if attention.mask is not None:
        add("mask", _core.DTYPE_U8, scores(attention.mask))
    if attention.bias is not None:
        shape = scores(attention.bias)
        add("bias", attention.bias_dtype, shape, attention.bias_grad, "scores_")
    for prefix in _PREFIXES[: attention.lengths]:
        add(f"{prefix}lengths", _core.DTYPE_I32, (batch,))
    for prefix in _PREFIXES if attention.packed else ():
        add(f"{prefix}offsets", _core.DTYPE_I32, (_SUMS,))
    if attention.sink:
        add("sink", _core.DTYPE_F32, (dims[1],), attention.sink_grad)
    if attention.slopes:
        add("slopes", _core.DTYPE_F32, (batch, dims[1])[2 - attention.slopes :])
    if attention.packed:
        add("bounds", _core.DTYPE_I32, _LONGEST)
    return limits


def _score_dims(attention: AttentionSpec, crossed: bool) -> tuple:
    """[batch, heads, queries, keys] as extents."""
    (_, *dims), (_, *keys) = _SEQUENCES
    first = not attention.sequence_first  # where the sequence stands
    return dims[not first], attention.slices[0][0], dims[first], (keys if crossed else dims)[first]


# ---- nodes ---------------------------------------------------------------------------------------


def _heads(graph: Graph, x: int, slice_: tuple, name: str) -> int:
    """Add the dense matrix of heads of `x`."""
    rows, _ = graph.values[x].shape
    heads, channels, *_ = slice_
    return graph.value(name, graph.values[x].dtype, (rows, heads * channels))


def _order(attention: AttentionSpec) -> int:
    """Flags that say in which order of memory heads lie."""
    first = (_core.NODE_SEQUENCE_FIRST, attention.sequence_first)
    return flags_of((first, (_core.NODE_PACKED, attention.packed)))


def add_heads_norms(
    graph: Graph, attention: AttentionSpec, norms: tuple[Norm, ...], name: str
) -> tuple:
    """Add the parameters of the norms of queries and keys; see `attend`."""
    return tuple(
        (norm, graph.norm_parameters(norm, channels, name + prefix))
        for norm, prefix, (_, channels, *_) in zip(norms, _PREFIXES, attention.slices, strict=False)
    )


def attend(
    graph: Graph,
    attention: AttentionSpec,
    projected: list[int],
    given: tuple[tuple, dict, tuple],
    name: str,
    owner: int,
) -> int:
    """Add norms of heads, the rotary embedding and the attention; return its output.

    `projected` are one projection of all three, or that of the queries and that of keys and values;
    `given` is what `add_angles`, `add_limits` and `add_heads_norms` gave; `owner` is the number of
    the attention among the modules with slots.
    """
    angles, limits, norms = given
    values = [projected[0], projected[-1], projected[-1]]
    slices = list(attention.slices)

    def turn(i: int) -> int:
        """Turn queries (0) or keys (1), or copy them where there are no angles."""
        prefix, slice_ = name + _PREFIXES[i], slices[i]
        turned = _heads(graph, values[i], slice_, prefix.removesuffix("_"))
        flags = _order(attention) | (_core.NODE_INTERLEAVED if attention.interleaved else 0)
        starts = (limits[f"{_PREFIXES[i]}offsets"],) if attention.packed else ()
        inputs = (values[i], angles[min(i, len(angles) - 1)] if angles else -1, *starts)
        graph.node(_core.NODE_ROPE, inputs, turned, flags=flags, slices=(slice_,), name=prefix)
        return turned

    def normalize(i: int) -> int:
        how, affine = norms[i]
        normed = _heads(graph, values[i], slices[i], f"{name}{_PREFIXES[i]}normed")
        options = {"variant": how.kind, "flags": how.node, "numbers": (how.eps,)}
        options |= {"slices": (slices[i],), "name": name + _PREFIXES[i]}
        graph.node(_core.NODE_HEAD_NORM, (values[i], *affine), normed, **options)
        return normed

    steps = [turn] * bool(angles) + [normalize] * bool(norms)
    if attention.norms_first:
        steps.reverse()
    taken = [(step, i) for step in steps for i in range(2)]  # turned together where nothing differs
    if not steps:  # several heads together, which attention can not read
        taken = [(turn, i) for i in range(2) if len(slices[i]) > 4]
    for step, i in taken:
        values[i] = step(i)
        heads, channels, *_ = slices[i]
        slices[i] = heads, channels, 0, channels
    heads, channels = slices[0][0], slices[2][1]
    handed_over = _core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE if attention.fp8_output else 0
    flags = _core.VALUE_LEADING | handed_over
    dtype = graph.values[projected[0]].dtype
    rows = graph.values[projected[0]].shape[0]
    context = graph.value(f"{name}context", dtype, (rows, heads * channels), flags)
    attention = attention._replace(slices=tuple(slices))
    _add_attention(graph, attention, values, limits, context, f"{name}core_", owner)
    return context


def add_dropout(
    graph: Graph,
    inputs: tuple[int, int, int],
    output: str,
    name: str,
    rates: tuple[float, float] = (0.0, 0.0),
) -> int:
    """Add ``dropout(x + bias) + residual``; return it.

    `inputs` are values, -1 for no bias; `rates` those of dropout and of dropping whole paths. The
    sum of terms of one dtype has that, any other fp32.
    """
    x, _, residual = inputs
    dtypes = {graph.values[x].dtype, graph.values[residual].dtype}
    dtype = min(dtypes) if len(dtypes) == 1 else _core.DTYPE_F32
    made = graph.value(output, dtype, graph.values[x].shape)
    if any(rates):
        inputs = (*inputs, graph.pair(f"{name}rng"))
    graph.node(_core.NODE_DROPOUT_ADD, inputs, made, name=name, numbers=rates)
    return made


def _add_attention(  # noqa: PLR0913 - what `attend` has
    graph: Graph,
    attention: AttentionSpec,
    heads: list[int],
    limits: dict[str, int],
    context: int,
    name: str,
    owner: int = 0,
) -> None:
    """Add the node of an attention; with a quantization it takes the slots of its owner."""
    flags = flags_of(
        [
            (_core.NODE_BOTTOM_RIGHT, attention.bottom_right),
            (_core.NODE_DETERMINISTIC, attention.deterministic),
            (_core.NODE_FP8_GRADIENT, attention.fp8_gradient),
            (_core.LINEAR_NO_AMAX, attention.no_amax),
            (_core.NODE_MAX_SCORES, attention.max_scores),
        ]
    )
    cast = {}
    if attention.quantization is not None:
        casts = attention.quantization._replace(backward=_core.BACKWARD_QUANTIZED)
        cast = {"quantization": casts, "owner": owner}
    given = dict(zip(("query", "key", "value"), heads, strict=True)) | limits
    if attention.dropout:
        given["rng"] = graph.pair(f"{name}rng")
    left, right = attention.window
    numbers = {**attention._asdict(), "window_left": left, "window_right": right}
    graph.node(
        _core.NODE_ATTENTION,
        tuple(given.get(field, -1) for field in _core.ATTENTION_INPUTS),
        context,
        name=name,
        flags=_order(attention) | flags,
        numbers=tuple(float(numbers[field]) for field in _core.ATTENTION_NUMBERS),
        slices=attention.slices,
        **cast,
    )


def core_graph(attention: AttentionSpec, dtype: int, gradient: bool, joined: int = 0) -> Graph:
    """Graph of attention by itself.

    `dtype` is that of queries, keys and values, ``_core.DTYPE_*``; `gradient`: they have gradients;
    `joined`: how many of them one tensor holds: 0; 2, keys and values; 3, all.

    Its tensors are queries, keys and values, [dim 0, dim 1, heads, channels] or packed [rows,
    heads, channels], whatever their strides, or what holds several of them, [.., columns]; then
    what limits the attention, as of `add_limits`. What is cast to FP8 is [.., columns] too.
    """
    graph, flags, values = Graph(), input_flags(gradient), []
    names = ("query", "key", "value")
    for i, (heads, channels, *_) in enumerate(attention.slices[: 3 - joined]):
        rows, first, second = _SEQUENCES[i > 0]
        lead = (rows,) if attention.packed else (first, second)
        shape = (*lead, heads, channels)
        if attention.quantization is not None:
            shape = (rows, heads * channels)
        values.append(graph.tensor(names[i], dtype, shape, flags))
    if joined:
        columns = sum(heads * channels for heads, channels, *_ in attention.slices[3 - joined :])
        shape = (_SEQUENCES[joined == 2][0], columns)
        values += [graph.tensor("_".join(names[3 - joined :]), dtype, shape, flags)] * joined
    limits = add_limits(graph, attention, "", joined != 3)
    columns = attention.slices[0][0] * attention.slices[2][1]
    returned = _core.VALUE_RETURN_QUANTIZED | _core.VALUE_ROW_WISE if attention.fp8_output else 0
    context = graph.value("output", dtype, (ROWS, columns), RESULT | returned)
    _add_attention(graph, attention, values, limits, context, "")
    if attention.max_scores:
        graph.results.append(("max_scores", 0))
    return graph
