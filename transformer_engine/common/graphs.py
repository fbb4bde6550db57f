# SPDX-License-Identifier: Apache-2.0
"""From a module's settings to the graph that it computes: values and nodes."""

from collections.abc import Container
from typing import Any, NamedTuple

from transformer_engine import _core
from transformer_engine.common.operand_casts import HIGH_PRECISION, Quantization
from transformer_engine.common.plan_text import Plan, make_plan

Link = tuple[str, int]
"""What a buffer is, equal in all plans of a graph: a kind ("value", "gradient", "row", ...) and the
number of the value, node or operand that it belongs to (`te_link` of the C header)."""

_, _, GRAD, OUTPUT, GRAD_INPUT, *_ = range(_core.OPERAND_ROLES)
"""Number of an operand among those of its node: input, weight and gradient of the output, which the
GEMMs multiply; output and gradient of the input, which may be returned quantized; then input and
gradient of the output as they are gathered from all ranks. Added to an entry of `Graph.operands` it
is the number of the operand in links."""


WEIGHT_CACHED = _core.VALUE_QUANTIZED | _core.VALUE_ALSO_WIDE
"""Of a weight whose quantized forms are given, and that is there besides."""


class LinearFlags(NamedTuple):
    """Flags of the node of a linear layer and of its values, as of the C library."""

    node: int = 0  # ``_core.LINEAR_*``
    input: int = 0  # ``_core.VALUE_*``, likewise the others; of the first layer of a module
    weight: int = 0
    bias: int = 0  # 0: there is none
    output: int = 0  # of the last layer

    def joined(self, other: "LinearFlags") -> "LinearFlags":
        """Those of both."""
        return LinearFlags(*[a | b for a, b in zip(self, other, strict=True)])

    def of_weight(self, bits: int) -> "LinearFlags":
        """The same with others for the weight: torch 2.11 traces no `_replace` as a constant."""
        return LinearFlags(self.node, self.input, bits, self.bias, self.output)


class LinearSpec(NamedTuple):
    """One linear layer of a call; everything but the number of tokens."""

    in_features: int
    out_features: int
    input: int  # ``_core.DTYPE_*``
    weight: int  # ``_core.DTYPE_*``
    bias: int  # ``_core.DTYPE_*``
    output: int  # ``_core.DTYPE_*``
    grad_weight: int  # ``_core.DTYPE_*``
    quantization: Quantization  # how the operands are cast
    flags: LinearFlags
    external: frozenset[int] = frozenset()
    """Stages that the caller runs, numbers of ``_core.LINEAR_STAGES``."""
    halves: frozenset[int] = frozenset()  # of the external ones those in two halves


class Norm(NamedTuple):
    """The norm before a linear layer."""

    kind: int  # ``_core.NORM_*``
    dtype: int  # ``_core.DTYPE_*`` of gamma and beta
    eps: float  # added to the variance
    gamma: int = _core.VALUE_PARAMETER  # ``_core.VALUE_*`` of it; 0: there is none
    beta: int = 0  # likewise
    node: int = 0  # ``_core.NODE_ZERO_CENTERED``
    output: int = _core.VALUE_LEADING  # ``_core.VALUE_*`` of it, before a linear layer


class Activation(NamedTuple):
    """The activation between two linear layers."""

    kind: int  # ``_core.ACTIVATION_*``
    limit: float = 0.0  # of clamped_swiglu
    alpha: float = 0.0  # of clamped_swiglu
    linear_offset: float = 0.0  # of clamped_swiglu


class Collective(NamedTuple):
    """What ranks make together before the first linear layer of a call, or behind the last."""

    kind: int  # ``_core.COLLECTIVE_*``
    ranks: int
    forms: bool = False  # quantized forms are gathered, not values
    halves: tuple[int, ...] = ()  # its steps in two halves, `te_collective_step`
    pieces: int = 0  # ``_core.COLLECTIVE_PIECES_*``: the GEMMs beside it run in pieces
    rank: int = 0  # which rank this is; of one without pieces 0


class CallSpec(NamedTuple):
    """One way to call a module made of a norm, one or two linear layers and an activation.

    A bias is added behind a sum over ranks.
    """

    parts: tuple[LinearSpec, ...]  # one linear layer, or two with the activation between them
    norm: Norm | None = None  # before the first
    activation: Activation | None = None  # with two layers
    recompute: bool = False
    """The backward repeats norm, first layer and activation instead of reading what they made."""
    names: tuple[str, ...] = ("",)  # prefix of the names of each part's node and parameters
    before: Collective | None = None  # over the input of the first layer: a gather, or a copy
    behind: Collective | None = None  # over the output of the last one: a sum
    returns_gathered: bool = False
    """The norm's output is returned as `before` gathers it, where it is returned."""


ROWS = _core.Extent(symbol=_core.SYMBOL_ROWS, multiply=1)


class Graph:
    """Values and nodes of a module, as ``_core.make_plan`` takes them.

    What a call, its plans and their caches need to know of a module is asked of this, once it is
    complete. Equal graphs have equal plans.
    """

    def __init__(self, flags: int = 0) -> None:
        self.flags = flags
        self.values: list[_core.Value] = []
        self.nodes: list[_core.Node] = []
        # Inputs and parameters in the order of a call; None for one that the call lacks.
        self.tensors: list[Link | None] = []
        self.results: list[Link] = []  # what the module returns
        self.parts: list[LinearSpec] = []  # the linear layers, in order
        self.weights: list[int] = []  # value of each one's weight
        # The number of its input as a quantized operand; those of weight and gradient follow.
        self.operands: list[int] = []
        self.drawn: list[Link] = []  # random pairs (seed, offset), in the order of their nodes

    def _content(self) -> tuple:
        known = self.tensors, self.results, self.parts
        return self.flags, tuple(self.values), tuple(self.nodes), *map(tuple, known)

    def __eq__(self, other: object) -> bool:
        """Return whether it is the same graph; neither may change any more."""
        return isinstance(other, Graph) and self._content() == other._content()

    def __hash__(self) -> int:
        """Hash of what `__eq__` compares."""
        return hash(self._content())

    def make(self, direction: int) -> Plan:
        """Make a plan of it."""
        return make_plan(direction, self)

    # ---- what it is --------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """True where there is a backward."""
        return any(value.flags & _core.VALUE_GRADIENT for value in self.values)

    @property
    def defers(self) -> bool:
        """True where a backward puts weight gradients off."""
        return any(self.values[of].flags & _core.VALUE_DEFER for of in self.weights)

    @property
    def normed(self) -> int:
        """The output of the norm that it begins with, else its input."""
        first = self.nodes[0]
        return first.output if first.kind == _core.NODE_NORM else first.inputs[0]

    def flags_of(self, link: Link | None) -> int:
        """`VALUE_*` of a value, by its link."""
        return 0 if link is None else self.values[link[1]].flags

    def read(self) -> set[int]:
        """The values that nodes read; -1 among them stands for none."""
        return {number for node in self.nodes for number in node.inputs}

    def maker_of(self, link: Link) -> int:
        """Number of the node that makes a value."""
        return next(n for n, node in enumerate(self.nodes) if node.output == link[1])

    # ---- values and nodes --------------------------------------------------------------------

    def value(
        self, name: str, dtype: int, shape: tuple, flags: int = 0, grad_dtype: int | None = None
    ) -> int:
        """Add a value; return its number."""
        grad = dtype if grad_dtype is None else grad_dtype
        self.values.append(_core.Value(name, flags, dtype, grad, shape))
        if flags & _core.VALUE_RESULT:
            self.results.append(("value", len(self.values) - 1))
        return len(self.values) - 1

    def tensor(self, *value: Any) -> int:
        """Add a value that a call is given."""
        number = self.value(*value)
        self.tensors.append(("value", number))
        return number

    def pair(self, name: str) -> int:
        """Add a random pair (seed, offset), which each call draws."""
        number = self.value(name, _core.DTYPE_I64, (2,), _core.VALUE_INPUT)
        self.drawn.append(("value", number))
        return number

    def absent(self) -> int:
        """Leave a tensor of a call out."""
        self.tensors.append(None)
        return -1

    def node(  # noqa: PLR0913 - and those of `fields`
        self,
        kind: int,
        inputs: tuple,
        output: int,
        *,
        slices: tuple = (),
        quantization: Quantization = HIGH_PRECISION,
        **fields: Any,
    ) -> None:
        """Add a node; `slices` are the fields of ``_core.Slice``, `fields` others of the node."""
        fields |= {"kind": kind, "inputs": inputs, "output": output, "quantization": quantization}
        self.nodes.append(_core.Node(slices=tuple(_core.Slice(*of) for of in slices), **fields))

    def append(
        self, other: "Graph", x: int, prefix: str, output: str, owner: int
    ) -> dict[int, int]:
        """Add the nodes of the graph of a module, with value `x` for its input.

        `prefix` comes before the names of nodes and values, `output` is the name of its result,
        `owner` the module's number among those that have slots. Its parameters become tensors of
        this graph, its rows those of `x`, a multiple. Returns the numbers of its values here.
        """
        inp, result = other.tensors[0][1], other.results[0][1]
        numbers = {-1: -1, inp: x}
        rows, here = other.values[inp].shape[0], self.values[x].shape[0]
        for number, value in enumerate(other.values):
            if number != inp:
                name = output if number == result else prefix + value.name
                flags = value.flags & ~_core.VALUE_RESULT
                if number == result:
                    flags = flags & ~_core.VALUE_LEADING | _core.VALUE_ROUNDED
                shape = tuple(_in_place_of(extent, rows, here) for extent in value.shape)
                self.values.append(value._replace(name=name, flags=flags, shape=shape))
                numbers[number] = len(self.values) - 1
        before = len(self.nodes)
        for node in other.nodes:
            inputs = tuple(numbers[i] for i in node.inputs)
            places = {"inputs": inputs, "output": numbers[node.output], "owner": owner}
            self.nodes.append(node._replace(name=prefix + node.name, **places))
        self.tensors += _moved(other.tensors[1:], numbers)
        self.drawn += _moved(other.drawn, numbers)
        self.parts += other.parts
        self.weights += [numbers[of] for of in other.weights]
        self.operands += [of + before * _core.OPERAND_ROLES for of in other.operands]
        return numbers

    def returns(self, results: list[int]) -> None:
        """Make values the results, the first one by the name "output"."""
        for i, number in enumerate(results):
            value = self.values[number]
            name = value.name if i else "output"
            self.values[number] = value._replace(name=name, flags=value.flags | RESULT)
        self.results = [("value", number) for number in results]

    def order(self, tensors: list[Link | None]) -> dict[int, int]:
        """The number of each value in `ordered`, in their order; that of -1, behind them, is -1."""
        first = [number for _, number in filter(None, tensors)]
        first += [number for _, number in self.results]
        first += [i for i in range(len(self.values)) if i not in set(first)]
        return {number: i for i, number in enumerate(first)} | {-1: -1}

    def ordered(self, tensors: list[Link | None]) -> "Graph":
        """The same with tensors in this order, and their values, then results, before all others.

        So a plan is given its arguments in the order of a call.
        """
        numbers = self.order(tensors)
        made = Graph(self.flags)
        made.values = [self.values[number] for number in numbers if number >= 0]
        for node in self.nodes:
            inputs = tuple(numbers[i] for i in node.inputs)
            made.nodes.append(node._replace(inputs=inputs, output=numbers[node.output]))
        made.tensors, made.results = _moved(tensors, numbers), _moved(self.results, numbers)
        made.parts, made.operands = self.parts, self.operands
        made.drawn = _moved(self.drawn, numbers)
        made.weights = [numbers[number] for number in self.weights]
        return made

    def with_gradient(self, flags: int) -> "Graph":
        """The same where the gradient of the first result arrives quantized.

        `flags` are `VALUE_QUANTIZED` and maybe `VALUE_ROW_WISE`. That result is in high precision.
        """
        made = self.ordered(self.tensors)
        (_, at), *_ = made.results
        cleared = _core.VALUE_RETURN_QUANTIZED | _core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE
        made.values[at] = made.values[at]._replace(flags=made.values[at].flags & ~cleared | flags)
        return made

    def norm_parameters(self, norm: Norm, features: int, prefix: str = "") -> tuple[int, int]:
        """Add gamma and beta, as far as the norm has them."""
        gamma, beta = [
            self.tensor(prefix + name, norm.dtype, (features,), flags) if flags else self.absent()
            for name, flags in (("gamma", norm.gamma), ("beta", norm.beta))
        ]
        return gamma, beta

    def linear_parameters(self, spec: LinearSpec, prefix: str) -> tuple[int, int]:
        """Add weight and bias."""
        flags, shape = spec.flags, (spec.out_features, spec.in_features)
        if flags.node & _core.LINEAR_WEIGHT_TRANSPOSED:
            shape = shape[::-1]
        weight = self.tensor(f"{prefix}weight", spec.weight, shape, flags.weight, spec.grad_weight)
        self.weights.append(weight)
        if not flags.bias:
            return weight, self.absent()
        return weight, self.tensor(f"{prefix}bias", spec.bias, (spec.out_features,), flags.bias)

    def add_norm(self, norm: Norm, inputs: tuple, output: int, **options: Any) -> None:
        """Add a norm; `options` as of `node`."""
        how = {"variant": norm.kind, "flags": norm.node, "numbers": (norm.eps,)}
        self.node(_core.NODE_NORM, inputs, output, **how, **options)

    def add_collective(self, of: Collective, x: int, y: int, name: str) -> None:
        """Add a collective that makes `y` of `x`."""
        flags = (_core.COLLECTIVE_FORMS if of.forms else 0) | of.pieces
        how = {"variant": of.kind, "flags": flags, "ranks": of.ranks, "rank": of.rank}
        self.node(_core.NODE_COLLECTIVE, (x,), y, name=name, halves=of.halves, **how)

    def add_linear(
        self, spec: LinearSpec, inputs: tuple, output: int, name: str, part: int
    ) -> None:
        """Add a linear layer, which has the slots of its part of the module's."""
        if spec.quantization.grad.options & _core.CAST_STOCHASTIC:
            returned = bool(spec.flags.input & _core.VALUE_RETURN_QUANTIZED)
            of = ("rng", "grad_input_rng")[: 1 + returned]
            inputs = (*inputs, *(self.pair(name + each) for each in of))
        self.operands.append(len(self.nodes) * _core.OPERAND_ROLES)
        self.parts.append(spec)
        self.node(
            _core.NODE_LINEAR,
            inputs,
            output,
            name=name,
            flags=spec.flags.node | spec.quantization.fast,
            quantization=spec.quantization,
            slots=(3 * part, 2 * part),
            external=tuple(sorted(spec.external)),
            halves=tuple(sorted(spec.halves)),
        )


def rows_of(ranks: int) -> _core.Extent:
    """Rows of so many ranks."""
    return ROWS._replace(multiply=ranks)


def _in_place_of(extent: Any, rows: _core.Extent, here: _core.Extent) -> Any:
    """An extent of a graph whose rows, which are `rows`, stand for `here`."""
    if isinstance(extent, int) or extent.symbol != rows.symbol or extent.multiply == 0:
        return extent
    times = extent.multiply * (here.multiply // rows.multiply)
    return extent._replace(symbol=here.symbol, multiply=times)


def _moved(links: list, numbers: dict[int, int]) -> list:
    """Links of the same values where these have other numbers."""
    return [None if link is None else ("value", numbers[link[1]]) for link in links]


RESULT = _core.VALUE_RESULT | _core.VALUE_LEADING


def input_flags(wants_grad: int) -> int:
    """`VALUE_*` of a graph's input."""
    gradient = _core.VALUE_GRADIENT if wants_grad else 0
    return _core.VALUE_INPUT | _core.VALUE_LEADING | gradient


def _with_rows(spec: LinearSpec, flags: int) -> int:
    """`VALUE_*` of what may be returned quantized: with one scale row-wise alone.

    Both forms where what arrives under the same value comes in both.
    """
    both = flags & (_core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE) == _core.VALUE_QUANTIZED
    rows = spec.quantization.input.recipe in _ONE_SCALE and not both
    return flags | (_core.VALUE_ROW_WISE if flags & _core.VALUE_RETURN_QUANTIZED and rows else 0)


_ONE_SCALE = (_core.RECIPE_DELAYED, _core.RECIPE_CURRENT)


def forms_of(operand: int, known: Container[Link]) -> tuple[Link, ...]:
    """Links of the quantized forms of an operand, of their scales and of their amaxes.

    `known` are the links of a plan that has a form: they tell whether both share their scales, and
    whether there are amaxes.
    """
    names = ["row", "column"]
    names += ["scales"] if ("scales", operand) in known else ["row_scales", "column_scales"]
    if ("row_amax", operand) in known or ("column_amax", operand) in known:
        names += ["row_amax", "column_amax"]
    return tuple((name, operand) for name in names)


def call_graph(spec: CallSpec) -> Graph:
    """Graph of a call."""
    first, last, before, behind = spec.parts[0], spec.parts[-1], spec.before, spec.behind
    gathers = before is not None and before.kind == _core.COLLECTIVE_GATHER
    scatters = behind is not None and behind.kind == _core.COLLECTIVE_REDUCE_SCATTER
    inner = rows_of(before.ranks if gathers else behind.ranks if scatters else 1)
    outer = ROWS if gathers else inner
    graph = Graph(_core.GRAPH_RECOMPUTE if spec.recompute else 0)
    shape, leading = (outer, first.in_features), _core.VALUE_INPUT | _core.VALUE_LEADING
    x = graph.tensor("input", first.input, shape, leading | _with_rows(first, first.flags.input))
    affine: tuple = ()
    if spec.norm is not None:
        affine = graph.norm_parameters(spec.norm, first.in_features)
    pairs = list(zip(spec.parts, spec.names, strict=True))
    parameters = [graph.linear_parameters(part, name) for part, name in pairs]
    flags, out = RESULT | _with_rows(last, last.flags.output), (last.output, last.out_features)
    y = graph.value("output", out[0], (ROWS if scatters else inner, out[1]), flags)
    wide, taken_flags = 0 if spec.norm is None else spec.norm.output, 0
    if spec.returns_gathered and gathers:
        wide, taken_flags = _core.VALUE_LEADING, wide
    if spec.norm is not None:
        normed = graph.value("norm_output", first.output, shape, wide)
        graph.add_norm(spec.norm, (x, *affine), normed)
        x = normed
    if before is not None:
        name, dtype = spec.names[0], graph.values[x].dtype
        taken = graph.value(f"{name}taken", dtype, (inner, first.in_features), taken_flags)
        graph.add_collective(before, x, taken, name)
        x = taken
    for i, (part, name) in enumerate(pairs):
        if i > 0:
            after = graph.value(f"{name}input", part.input, (inner, part.in_features))
            kind, *numbers = spec.activation
            options = {"variant": kind, "numbers": tuple(numbers)}
            graph.node(_core.NODE_ACTIVATION, (x,), after, **options)
            x = after
        made, given = y, (x, *parameters[i])
        if i < len(pairs) - 1:
            made = graph.value(f"{name}output", part.output, (inner, part.out_features))
        elif behind is not None:
            made = graph.value(f"{name}partial", out[0], (inner, out[1]))
            given = given[:2] + (-1,)
        graph.add_linear(part, given, made, name, i)
        x = made
    if behind is not None:
        _add_sum(graph, behind, x, y, spec.names[-1], parameters[-1][1])
    return graph


def _add_sum(graph: Graph, behind: Collective, x: int, y: int, name: str, bias: int) -> None:
    """Add a sum over ranks, and a bias behind it; -1: there is none."""
    made = y
    if bias >= 0:
        made = graph.value(f"{name}sum", graph.values[y].dtype, graph.values[y].shape)
    graph.add_collective(behind, x, made, name)
    if bias >= 0:
        graph.node(_core.NODE_DROPOUT_ADD, (made, bias, -1), y, name=name, numbers=(0.0, 0.0))


def norm_graph(features: int, norm: Norm, dtypes: tuple[int, int], wanted: bool) -> Graph:
    """Graph of a norm by itself; arguments as of `plans.norm_plans`."""
    graph = Graph()
    x = graph.tensor("input", dtypes[0], (ROWS, features), input_flags(wanted))
    affine = graph.norm_parameters(norm, features)
    y = graph.value("output", dtypes[1], (ROWS, features), RESULT)
    graph.add_norm(norm, (x, *affine), y)
    return graph
