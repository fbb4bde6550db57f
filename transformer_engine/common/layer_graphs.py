# SPDX-License-Identifier: Apache-2.0
"""Graphs of whole layers: calls of modules with attention and residual additions between them.

Attention by itself, of heads that a caller gives, is the smallest of them.
"""

from typing import NamedTuple

from transformer_engine import _core
from transformer_engine.common.flags import flags_of
from transformer_engine.common.graphs import (
    DGRAD,
    RESULT,
    RETURN_NORM,
    ROWS,
    ZERO_CENTERED,
    CallSpec,
    Graph,
    LinearSpec,
    Norm,
    input_flags,
)
from transformer_engine.common.operand_casts import Quantization

_NORMED = ("query_", "key_")
"""Prefixes of the norms of heads."""

_SOURCE = _core.Extent(symbol=_core.SYMBOL_SOURCE_ROWS, multiply=1)
_SEQUENCES = tuple(
    tuple(_core.Extent(symbol=rows + dim, multiply=1) for dim in range(3))
    for rows in (_core.SYMBOL_ROWS, _core.SYMBOL_SOURCE_ROWS)
)
"""Rows and the two leading dims as extents, of queries and of keys of their own."""
_OFFSETS = 4
"""Where those of queries are among an attention's limits, before those of keys."""
_PAIR = 11
"""Where the random pair of a dropout is among the inputs of an attention."""


class AttentionSpec(NamedTuple):
    """Attention between the projections of a branch."""

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
    packed: tuple[int, int, int] | None = None
    """Packed sequences: how many, and bounds of their queries and of their keys."""
    sink: bool = False  # the softmax has a term without a key
    sink_grad: bool = False  # which has a gradient
    slopes: int = 0  # of ALiBi, how many dims they have: 0, none; 1, [heads]; 2, [batch, heads]
    quantization: Quantization | None = None  # of queries, keys and values; None: high precision
    fp8_gradient: bool = False  # the gradients are computed in FP8 too
    no_amax: bool = False  # with a quantization: none is recorded in the forward
    fp8_output: bool = False
    """With a quantization: the output goes on in FP8, to the projection behind or to the caller."""
    softcap: float = 0.0  # bounds the scaled scores; 0: nothing does


class CoreSpec(NamedTuple):
    """Attention by itself, to heads where they lie."""

    attention: AttentionSpec
    dtype: int  # ``_core.DTYPE_*`` of queries, keys and values
    gradient: bool  # they have gradients
    joined: int = 0
    """How many of queries, keys and values one tensor holds: 0; 2, keys and values; 3, all."""

    @property
    def parts(self) -> tuple[LinearSpec, ...]:
        """The linear layers: none."""
        return ()


class AddSpec(NamedTuple):
    """How the output of a branch joins the residual stream."""

    dropout: float = 0.0
    drop_path: float = 0.0
    bias: int | None = None  # ``_core.DTYPE_*`` of the bias that is added first
    bias_grad: bool = False  # that has a gradient


class BranchSpec(NamedTuple):
    """Attention or MLP."""

    name: str  # prefix of its nodes
    calls: tuple[CallSpec, ...]
    """The MLP; or the projections before the attention (of all three, or of the queries and then of
    keys and values) and the one behind it."""
    attention: AttentionSpec | None = None  # between the projections
    add: AddSpec | None = None  # joins the output to the residual stream; None: it is the result
    norms: tuple[tuple[Norm, int], ...] = ()
    """Of the heads of queries and of keys, each with flags (`GRAD_GAMMA`, ...); or none."""
    residual_is_norm: bool = False  # the residual is the output of the branch's norm, not its input


class LayerSpec(NamedTuple):
    """A layer."""

    branches: tuple[BranchSpec, ...]  # one after the other
    parallel: AddSpec | None = None
    """All branches read the input, and their sum joins the residual stream."""

    @property
    def parts(self) -> tuple[LinearSpec, ...]:
        """The linear layers."""
        return tuple(part for b in self.branches for call in b.calls for part in call.parts)


class _Given(NamedTuple):
    """Values that a branch is given: parameters of its calls, bias of its addition, and inputs."""

    calls: tuple
    bias: int
    source: int
    angles: tuple[int, ...]
    limits: tuple[int, ...]
    norms: tuple[tuple[int, int], ...] = ()  # gamma and beta of each norm of heads


def layer_graph(spec: LayerSpec) -> Graph:
    """Graph of a layer.

    Its tensors are the input; for each branch what its attention is given (source, angles, mask,
    bias, lengths, offsets, sink, slopes); for each branch the parameters of its calls, the bias of
    its addition, and gamma and beta of the norms of its heads.
    """
    graph = Graph()
    first, last = spec.branches[0].calls[0].parts[0], spec.branches[-1].calls[-1].parts[-1]
    wanted = any(b.calls[0].parts[0].flags & DGRAD for b in spec.branches[:1])
    x = graph.tensor("input", first.input, (ROWS, first.in_features), input_flags(wanted))
    inputs = [_attention_inputs(graph, branch) for branch in spec.branches]
    given = []
    for branch, tensors in zip(spec.branches, inputs, strict=True):
        names = _call_names(branch)
        pairs = zip(branch.calls, names, strict=True)
        calls = tuple(graph.call_parameters(_inner(call), name) for call, name in pairs)
        bias = _bias(graph, branch.name, branch.add, last)
        norms = tuple(
            graph.norm_parameters(norm, branch.attention.slices[i][1], flags, branch.name + prefix)
            for i, (prefix, (norm, flags)) in enumerate(zip(_NORMED, branch.norms, strict=False))
        )
        given.append(_Given(calls, bias, *tensors, norms))
    y = graph.value("output", _streams(spec)[-1], (ROWS, last.out_features), RESULT)
    _add_branches(graph, spec, given, x, y)
    return graph


def _sum_dtype(*terms: int) -> int:
    """The dtype of a sum: that of all its terms, or fp32."""
    return terms[0] if len({*terms}) == 1 else _core.DTYPE_F32


def _streams(spec: LayerSpec) -> list[int]:
    """The dtype of the residual stream behind each branch; the last one is that of the result."""
    found, stream = [], spec.branches[0].calls[0].parts[0].input
    made = [branch.calls[-1].parts[-1].output for branch in spec.branches]
    if spec.parallel is not None:
        return [_sum_dtype(_sum_dtype(*made), stream)]
    for branch, output in zip(spec.branches, made, strict=True):
        first = branch.calls[0]
        if branch.residual_is_norm and first.norm is not None:
            stream = first.parts[0].output
        stream = output if branch.add is None else _sum_dtype(output, stream)
        found.append(stream)
    return found


def _add_branches(graph: Graph, spec: LayerSpec, given: list, x: int, y: int) -> None:
    """Add the nodes of all branches, from `x` to `y`."""
    dtypes, features = _streams(spec), graph.values[y].shape[1]
    owner, made, stream = 0, [], x
    attention = sum(len(branch.calls) for branch in spec.branches)  # behind all modules
    for i, (branch, tensors) in enumerate(zip(spec.branches, given, strict=True)):
        alone = branch.add is None and spec.parallel is None
        dtype = branch.calls[-1].parts[-1].output
        out = y if alone else graph.value(f"{branch.name}branch", dtype, (ROWS, features))
        normed = _add_branch(graph, branch, tensors, (stream, out), (owner, attention))
        owner += len(branch.calls)
        attention += branch.attention is not None and branch.attention.quantization is not None
        made.append(out)
        if branch.add is not None:
            last = i == len(spec.branches) - 1
            residual = normed if branch.residual_is_norm else stream
            after = y
            if not last:
                after = graph.value(f"{branch.name}output", dtypes[i], (ROWS, features))
            _add(graph, branch.name, branch.add, (out, tensors.bias, residual), after)
            stream = after
    if spec.parallel is not None:
        dtype = _sum_dtype(*(graph.values[each].dtype for each in made))
        both = graph.value("branches", dtype, (ROWS, features))
        _add(graph, "sum_", AddSpec(), (made[0], -1, made[1]), both)
        _add(graph, "", spec.parallel, (both, -1, x), y)


def _add(graph: Graph, name: str, add: AddSpec, inputs: tuple, output: int) -> None:
    numbers = (add.dropout, add.drop_path)
    if any(numbers):
        inputs = (*inputs, graph.pair(f"{name}rng"))
    graph.node(_core.NODE_DROPOUT_ADD, inputs, output, name=name, numbers=numbers)


def _inner(call: CallSpec) -> CallSpec:
    """A call whose norm's output is no result of the graph."""
    first, *rest = call.parts
    return call._replace(parts=(first._replace(flags=first.flags & ~RETURN_NORM), *rest))


def _call_names(branch: BranchSpec) -> tuple[str, ...]:
    names = {1: ("",), 2: ("qkv_", "proj_"), 3: ("query_", "kv_", "proj_")}[len(branch.calls)]
    return tuple(branch.name + name for name in names)


def _bias(graph: Graph, name: str, add: AddSpec | None, last: LinearSpec) -> int:
    """Add the bias of an addition, or leave it out."""
    if add is None or add.bias is None:
        return -1
    flags = _core.VALUE_PARAMETER | (_core.VALUE_GRADIENT if add.bias_grad else 0)
    return graph.tensor(f"{name}added_bias", add.bias, (last.out_features,), flags)


def _attention_inputs(graph: Graph, branch: BranchSpec) -> tuple:
    """Add what the attention of a branch is given: source, angles, and limits."""
    attention, name = branch.attention, branch.name
    if attention is None:
        return -1, (), ()
    source = -1
    if len(branch.calls) == 3:
        part = branch.calls[1].parts[0]
        flags = input_flags(part.flags & DGRAD)
        source = graph.tensor(f"{name}source", part.input, (_SOURCE, part.in_features), flags)
    given = _core.VALUE_INPUT
    angles = tuple(
        graph.tensor(f"{name}angles_{i}", _core.DTYPE_F32, (_core.ANY_LENGTH, channels), given)
        for i, channels in enumerate(attention.angles)
    )
    return source, angles, _limits(graph, attention, name, source >= 0)


def _limits(graph: Graph, attention: AttentionSpec, name: str, crossed: bool) -> tuple:
    """Add mask, bias, lengths, offsets, sink and slopes, as far as they are there.

    `crossed`: the keys are of the source.
    """
    given, dims, limits = _core.VALUE_INPUT, _score_dims(attention, crossed), []
    wanted = given | (_core.VALUE_GRADIENT if attention.bias_grad else 0)
    tensors = (
        ("mask", attention.mask, _core.DTYPE_U8, given),
        ("scores_bias", attention.bias, attention.bias_dtype, wanted),
    )
    for what, shape, dtype, flags in tensors:
        if shape is None:
            limits.append(-1)
            continue
        full = tuple(n or dim for n, dim in zip(shape, dims, strict=True))
        limits.append(graph.tensor(name + what, dtype, full, flags))
    batch = dims[0] if attention.packed is None else attention.packed[0]
    for i, what in enumerate(("query_lengths", "key_lengths")):
        is_there = i < attention.lengths
        number = graph.tensor(name + what, _core.DTYPE_I32, (batch,), given) if is_there else -1
        limits.append(number)
    for what in ("query_offsets", "key_offsets"):
        is_there = attention.packed is not None
        number = graph.tensor(name + what, _core.DTYPE_I32, (batch + 1,), given) if is_there else -1
        limits.append(number)
    wanted = given | (_core.VALUE_GRADIENT if attention.sink_grad else 0)
    of_heads = ("sink", int(attention.sink), wanted), ("slopes", attention.slopes, given)
    for what, count, flags in of_heads:
        shape = (batch, dims[1])[2 - count :]
        number = graph.tensor(name + what, _core.DTYPE_F32, shape, flags) if count else -1
        limits.append(number)
    while limits and limits[-1] < 0:
        limits.pop()
    return tuple(limits)


def _score_dims(attention: AttentionSpec, crossed: bool) -> tuple:
    """[batch, heads, queries, keys] as extents."""
    (_, *dims), (_, *keys) = _SEQUENCES
    first = not attention.sequence_first  # where the sequence stands
    return dims[not first], attention.slices[0][0], dims[first], (keys if crossed else dims)[first]


def _add_branch(
    graph: Graph, branch: BranchSpec, given: _Given, ends: tuple[int, int], owners: tuple[int, int]
) -> int:
    """Add the nodes of a branch; return the output of its norm, or its input.

    `ends` are its input and output, `owners` the numbers of its first module and of its attention.
    """
    (x, out), (owner, of_attention) = ends, owners
    names = _call_names(branch)
    if branch.attention is None:
        call = _inner(branch.calls[0])
        return graph.add_call(call, given.calls[0], x, out, prefix=names[0], owner=owner)
    last = len(branch.calls) - 1
    projected, normed = [], x
    for i, call in enumerate(branch.calls[:last]):
        part, rows = call.parts[-1], _SOURCE if i else ROWS
        made = graph.value(f"{names[i]}made", part.output, (rows, part.out_features))
        options = {"prefix": names[i], "owner": owner + i}
        normed_here = graph.add_call(
            _kept_norm(branch, call, i), given.calls[i], given.source if i else x, made, **options
        )
        normed = normed if i else normed_here
        projected.append(made)
    context = _attend(graph, branch, projected, given, of_attention)
    options = {"prefix": names[last], "owner": owner + last}
    graph.add_call(branch.calls[last], given.calls[last], context, out, **options)
    return normed


def _kept_norm(branch: BranchSpec, call: CallSpec, i: int) -> CallSpec:
    """The call with its norm's output as a result, where the branch alone is the layer."""
    return call if i == 0 and branch.add is None else _inner(call)


def _heads(graph: Graph, x: int, slice_: tuple, name: str) -> int:
    """Add the dense matrix of heads of `x`."""
    rows, _ = graph.values[x].shape
    heads, channels, *_ = slice_
    return graph.value(name, graph.values[x].dtype, (rows, heads * channels))


def _order(attention: AttentionSpec) -> int:
    """Flags that say in which order of memory heads lie."""
    return flags_of(
        [
            (_core.NODE_SEQUENCE_FIRST, attention.sequence_first),
            (_core.NODE_PACKED, attention.packed is not None),
        ]
    )


def _turn(  # noqa: PLR0913 - as of `_normalize`
    graph: Graph, branch: BranchSpec, i: int, x: int, slice_: tuple, given: _Given, name: str
) -> int:
    """Add the rotary embedding of queries (`i` 0) or keys, or a copy where there are no angles."""
    attention, angles = branch.attention, given.angles
    turned = _heads(graph, x, slice_, name.removesuffix("_"))
    flags = _order(attention) | (_core.NODE_INTERLEAVED if attention.interleaved else 0)
    starts = () if attention.packed is None else (given.limits[_OFFSETS + i],)
    inputs = (x, angles[min(i, len(angles) - 1)] if angles else -1, *starts)
    graph.node(_core.NODE_ROPE, inputs, turned, flags=flags, slices=(slice_,), name=name)
    return turned


def _normalize(  # noqa: PLR0913 - as of `_turn`
    graph: Graph, branch: BranchSpec, i: int, x: int, slice_: tuple, given: _Given, name: str
) -> int:
    """Add the norm of the heads of queries (`i` 0) or keys."""
    norm, flags = branch.norms[i]
    normed = _heads(graph, x, slice_, f"{name}normed")
    bits = _core.NODE_ZERO_CENTERED if flags & ZERO_CENTERED else 0
    options = {"variant": norm.kind, "flags": bits, "numbers": (norm.eps,), "slices": (slice_,)}
    graph.node(_core.NODE_HEAD_NORM, (x, *given.norms[i]), normed, name=name, **options)
    return normed


def _attend(
    graph: Graph, branch: BranchSpec, projected: list[int], given: _Given, owner: int
) -> int:
    """Add norms of heads, the rotary embedding and the attention; return its output."""
    name, attention = branch.name, branch.attention
    values = [projected[0], projected[-1], projected[-1]]
    slices = list(attention.slices)
    steps = [_turn] * bool(attention.angles) + [_normalize] * bool(branch.norms)
    if attention.norms_first:
        steps.reverse()
    taken = [(step, i) for step in steps for i in range(2)]  # turned together where nothing differs
    if not steps:  # several heads together, which attention can not read
        taken = [(_turn, i) for i in range(2) if len(slices[i]) > 4]
    for step, i in taken:
        values[i] = step(graph, branch, i, values[i], slices[i], given, name + _NORMED[i])
        heads, channels, *_ = slices[i]
        slices[i] = heads, channels, 0, channels
    heads, channels = slices[0][0], slices[2][1]
    shape = (ROWS, heads * channels)
    dtype = graph.values[projected[0]].dtype
    handed_over = _core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE if attention.fp8_output else 0
    context = graph.value(f"{name}context", dtype, shape, _core.VALUE_LEADING | handed_over)
    attention = attention._replace(slices=tuple(slices))
    _add_attention(graph, attention, (*values, *given.limits), context, f"{name}core_", owner)
    return context


def _add_attention(  # noqa: PLR0913 - as of `_normalize`
    graph: Graph,
    attention: AttentionSpec,
    inputs: tuple,
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
        ]
    )
    cast = {}
    if attention.quantization is not None:
        casts = attention.quantization._replace(backward=_core.BACKWARD_QUANTIZED)
        cast = {"quantization": casts, "owner": owner}
    if attention.dropout:
        absent = (-1,) * (_PAIR - len(inputs))
        inputs = (*inputs, *absent, graph.pair(f"{name}rng"))
    graph.node(
        _core.NODE_ATTENTION,
        inputs,
        context,
        name=name,
        flags=_order(attention) | flags,
        numbers=(
            attention.scale,
            attention.dropout,
            *map(float, (*attention.window, *(attention.packed or (0, 0, 0))[1:])),
            attention.softcap,
        ),
        slices=attention.slices,
        **cast,
    )


def core_graph(spec: CoreSpec) -> Graph:
    """Graph of attention by itself.

    Its tensors are queries, keys and values, [dim 0, dim 1, heads, channels] or packed [rows,
    heads, channels], whatever their strides, or what holds several of them, [.., columns]; then
    what limits the attention, as of `layer_graph`. What is cast to FP8 is [.., columns] too.
    """
    graph, attention, joined = Graph(), spec.attention, spec.joined
    flags, values = input_flags(spec.gradient), []
    names = ("query", "key", "value")
    for i, (heads, channels, *_) in enumerate(attention.slices[: 3 - joined]):
        rows, first, second = _SEQUENCES[i > 0]
        lead = (first, second) if attention.packed is None else (rows,)
        shape = (*lead, heads, channels)
        if attention.quantization is not None:
            shape = (rows, heads * channels)
        values.append(graph.tensor(names[i], spec.dtype, shape, flags))
    if joined:
        columns = sum(heads * channels for heads, channels, *_ in attention.slices[3 - joined :])
        shape = (_SEQUENCES[joined == 2][0], columns)
        values += [graph.tensor("_".join(names[3 - joined :]), spec.dtype, shape, flags)] * joined
    limits = _limits(graph, attention, "", joined != 3)
    columns = attention.slices[0][0] * attention.slices[2][1]
    returned = _core.VALUE_RETURN_QUANTIZED | _core.VALUE_ROW_WISE if attention.fp8_output else 0
    context = graph.value("output", spec.dtype, (ROWS, columns), RESULT | returned)
    _add_attention(graph, attention, (*values, *limits), context, "")
    return graph
