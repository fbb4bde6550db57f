# SPDX-License-Identifier: Apache-2.0
"""From a module's settings to the graph that it computes: values and nodes."""

from collections.abc import Container
from typing import Any, NamedTuple

from transformer_engine import _core
from transformer_engine.common.flags import flags_of
from transformer_engine.common.operand_casts import HIGH_PRECISION, Quantization
from transformer_engine.common.plan_text import Plan, make_plan

Link = tuple[str, int]
"""What a buffer is, equal in all plans of a graph: a kind ("value", "gradient", "row", ...) and the
number of the value, node or operand that it belongs to (`te_link` of the C header)."""

# Flags of one linear layer in a call (`LinearSpec.flags`).
(
    BIAS,
    DGRAD,
    WGRAD,
    SAVE_INPUT,
    NO_AMAX,
    ALLOW_TF32,
    ACCUMULATE,
    OVERWRITE,
    DEFER,
    ZERO_CENTERED,
    GRAD_GAMMA,
    GRAD_BETA,
    RETURN_NORM,
    NO_GAMMA,
    NO_BETA,
    # GIVEN: the quantized forms of input, weight, gradient of the output are arguments of the plan,
    # which casts nothing. KEPT: the plan returns the forms that it has made, for a cache.
    INPUT_GIVEN,
    WEIGHT_GIVEN,
    GRAD_GIVEN,
    INPUT_KEPT,
    WEIGHT_KEPT,
    GRAD_KEPT,
    # Besides GIVEN or KEPT: the row-wise form alone, which a backward transposes.
    INPUT_ROWS,
    WEIGHT_ROWS,
    GRAD_ROWS,
    WEIGHT_WIDE,  # besides WEIGHT_GIVEN: in high precision too
    # Delayed scaling: input and weight, the gradient of the output are measured before they are
    # cast, for slots that have recorded nothing.
    MEASURE_OPERANDS,
    MEASURE_GRAD,
    MEASURE_RETURNED,  # likewise what is returned quantized
    # The output, or the gradient of the input, is returned quantized.
    RETURN_OUTPUT,
    RETURN_GRAD,
) = (1 << bit for bit in range(30))


WEIGHT_CACHED = WEIGHT_GIVEN | WEIGHT_WIDE
"""The quantized forms of a weight are given, and the weight in high precision too."""


_, _, GRAD, OUTPUT, GRAD_INPUT = range(_core.OPERAND_ROLES)
"""Number of an operand among those of its node: input, weight and gradient of the output, which the
GEMMs multiply; then output and gradient of the input, which may be returned quantized. Added to an
entry of `Graph.operands` it is the number of the operand in links."""


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
    flags: int  # `BIAS`, `DGRAD`, `WGRAD`, ... of this call
    bias_grad: bool = False  # the bias needs a gradient
    external: frozenset[int] = frozenset()
    """Stages that the caller runs, numbers of ``_core.LINEAR_STAGES``."""
    gather: int = 1  # ranks from which the quantized input is gathered before the GEMM
    halves: frozenset[int] = frozenset()  # of the external ones those in two halves


class Norm(NamedTuple):
    """The norm before a linear layer."""

    kind: int  # ``_core.NORM_*``
    dtype: int  # ``_core.DTYPE_*`` of gamma and beta
    eps: float  # added to the variance


class Activation(NamedTuple):
    """The activation between two linear layers."""

    kind: int  # ``_core.ACTIVATION_*``
    limit: float = 0.0  # of clamped_swiglu
    alpha: float = 0.0  # of clamped_swiglu
    linear_offset: float = 0.0  # of clamped_swiglu


class CallSpec(NamedTuple):
    """One way to call a module made of a norm, one or two linear layers and an activation."""

    parts: tuple[LinearSpec, ...]  # one linear layer, or two with the activation between them
    norm: Norm | None = None  # before the first
    activation: Activation | None = None  # with two layers
    recompute: bool = False
    """The backward repeats norm, first layer and activation instead of reading what they made."""
    names: tuple[str, ...] = ("",)  # prefix of the names of each part's node and parameters


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

    def node(  # noqa: PLR0913 - the fields of a node
        self,
        kind: int,
        inputs: tuple,
        output: int,
        *,
        name: str = "",
        variant: int = 0,
        flags: int = 0,
        numbers: tuple = (),
        slices: tuple = (),
        quantization: Quantization = HIGH_PRECISION,
        owner: int = 0,
        slots: tuple[int, int] = (0, 0),
        gather: int = 1,
        external: tuple = (),
        halves: tuple = (),
    ) -> None:
        """Add a node; `slices` are the fields of ``_core.Slice``."""
        node = _core.Node(
            name=name,
            kind=kind,
            variant=variant,
            flags=flags,
            inputs=inputs,
            output=output,
            numbers=numbers,
            slices=tuple(_core.Slice(*each) for each in slices),
            quantization=quantization,
            owner=owner,
            slots=slots,
            gather=gather,
            external=external,
            halves=halves,
        )
        self.nodes.append(node)

    def append(
        self, other: "Graph", x: int, prefix: str, output: str, owner: int
    ) -> dict[int, int]:
        """Add the nodes of the graph of a module, with value `x` for its input.

        `prefix` comes before the names of nodes and values, `output` is the name of its result,
        `owner` the module's number among those that have slots. Its parameters become tensors of
        this graph. Returns the numbers of its values here.
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
                shape = tuple(here if extent == rows else extent for extent in value.shape)
                self.values.append(value._replace(name=name, flags=flags, shape=shape))
                numbers[number] = len(self.values) - 1
        before = len(self.nodes)
        for node in other.nodes:
            inputs = tuple(numbers[i] for i in node.inputs)
            places = {"inputs": inputs, "output": numbers[node.output], "owner": owner}
            self.nodes.append(node._replace(name=prefix + node.name, **places))

        def moved(links: list) -> list:
            return [None if link is None else ("value", numbers[link[1]]) for link in links]

        self.tensors += moved(other.tensors[1:])
        self.drawn += moved(other.drawn)
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

        def moved(links: list) -> list:
            return [None if link is None else ("value", numbers[link[1]]) for link in links]

        made = Graph(self.flags)
        made.values = [self.values[number] for number in numbers if number >= 0]
        for node in self.nodes:
            inputs = tuple(numbers[i] for i in node.inputs)
            made.nodes.append(node._replace(inputs=inputs, output=numbers[node.output]))
        made.tensors, made.results = moved(tensors), moved(self.results)
        made.parts, made.operands, made.drawn = self.parts, self.operands, moved(self.drawn)
        made.weights = [numbers[number] for number in self.weights]
        return made

    def with_gradient(self, bits: int) -> "Graph":
        """The same where the gradient of the first result arrives quantized.

        `bits` are flags, `GRAD_GIVEN` and maybe `GRAD_ROWS`. That result is in high precision.
        """
        made = self.ordered(self.tensors)
        (_, at), *_ = made.results
        cleared = _core.VALUE_RETURN_QUANTIZED | _core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE
        flags = made.values[at].flags & ~cleared | form_flags(bits, GRAD_GIVEN, 0, GRAD_ROWS)
        made.values[at] = made.values[at]._replace(flags=flags)
        return made

    def norm_parameters(
        self, norm: Norm, features: int, flags: int, prefix: str = ""
    ) -> tuple[int, int]:
        """Add gamma and beta, as far as the norm has them."""
        wanted = (GRAD_GAMMA, GRAD_BETA)
        absent = (NO_GAMMA, NO_GAMMA | NO_BETA)
        kinds = (_core.NORM_LAYERNORM, _core.NORM_RMSNORM), (_core.NORM_LAYERNORM,)
        numbers = []
        for name, gradient, lacks, of in zip(("gamma", "beta"), wanted, absent, kinds, strict=True):
            if flags & lacks or norm.kind not in of:
                numbers.append(self.absent())
                continue
            bits = _core.VALUE_PARAMETER | (_core.VALUE_GRADIENT if flags & gradient else 0)
            numbers.append(self.tensor(prefix + name, norm.dtype, (features,), bits))
        return numbers[0], numbers[1]

    def linear_parameters(self, spec: LinearSpec, prefix: str) -> tuple[int, int]:
        """Add weight and bias."""
        flags = spec.flags
        bits = _core.VALUE_PARAMETER | form_flags(flags, WEIGHT_GIVEN, WEIGHT_KEPT, WEIGHT_ROWS)
        bits |= _core.VALUE_ALSO_WIDE if flags & WEIGHT_WIDE else 0
        if flags & WGRAD:
            bits |= _core.VALUE_GRADIENT | flags_of(
                (
                    (_core.VALUE_ACCUMULATE, flags & ACCUMULATE),
                    (_core.VALUE_OVERWRITE, flags & OVERWRITE),
                    (_core.VALUE_DEFER, flags & DEFER),
                )
            )
        shape = (spec.out_features, spec.in_features)
        weight = self.tensor(f"{prefix}weight", spec.weight, shape, bits, spec.grad_weight)
        self.weights.append(weight)
        if not flags & BIAS:
            return weight, self.absent()
        bits = _core.VALUE_PARAMETER | (_core.VALUE_GRADIENT if spec.bias_grad else 0)
        return weight, self.tensor(f"{prefix}bias", spec.bias, (spec.out_features,), bits)

    def add_norm(
        self, norm: Norm, inputs: tuple, output: int, zero_centered: int, name: str = ""
    ) -> None:
        """Add a norm."""
        flags = _core.NODE_ZERO_CENTERED if zero_centered else 0
        options = {"variant": norm.kind, "flags": flags, "numbers": (norm.eps,), "name": name}
        self.node(_core.NODE_NORM, inputs, output, **options)

    def add_linear(
        self, spec: LinearSpec, inputs: tuple, output: int, name: str, part: int
    ) -> None:
        """Add a linear layer, which has the slots of its part of the module's."""
        if spec.quantization.grad.options & _core.CAST_STOCHASTIC:
            of = ("rng", "grad_input_rng")[: 1 + bool(spec.flags & RETURN_GRAD)]
            inputs = (*inputs, *(self.pair(name + each) for each in of))
        flags = spec.quantization.fast | flags_of(
            (
                (_core.LINEAR_SAVE_INPUT, spec.flags & SAVE_INPUT),
                (_core.LINEAR_NO_AMAX, spec.flags & NO_AMAX),
                (_core.LINEAR_ALLOW_TF32, spec.flags & ALLOW_TF32),
                (_core.LINEAR_MEASURE_OPERANDS, spec.flags & MEASURE_OPERANDS),
                (_core.LINEAR_MEASURE_GRAD, spec.flags & MEASURE_GRAD),
                (_core.LINEAR_MEASURE_RETURNED, spec.flags & MEASURE_RETURNED),
            )
        )
        self.operands.append(len(self.nodes) * _core.OPERAND_ROLES)
        self.parts.append(spec)
        self.node(
            _core.NODE_LINEAR,
            inputs,
            output,
            name=name,
            flags=flags,
            quantization=spec.quantization,
            slots=(3 * part, 2 * part),
            gather=spec.gather,
            external=tuple(sorted(spec.external)),
            halves=tuple(sorted(spec.halves)),
        )


RESULT = _core.VALUE_RESULT | _core.VALUE_LEADING


def input_flags(wants_grad: int) -> int:
    """`VALUE_*` of a graph's input."""
    gradient = _core.VALUE_GRADIENT if wants_grad else 0
    return _core.VALUE_INPUT | _core.VALUE_LEADING | gradient


def form_flags(flags: int, given: int, kept: int, rows: int) -> int:
    """`VALUE_*` of an operand whose quantized forms are given, or returned."""
    return flags_of(
        (
            (_core.VALUE_QUANTIZED, flags & given),
            (_core.VALUE_KEEP_QUANTIZED, flags & kept),
            (_core.VALUE_ROW_WISE, flags & rows),
        )
    )


def _returned_flags(spec: LinearSpec, flag: int, forms: int) -> int:
    """`VALUE_*` of what is returned quantized, where it is: with one scale row-wise alone.

    `forms` are those of what arrives under the same value: both, where that comes in both.
    """
    if not spec.flags & flag:
        return 0
    rows = spec.quantization.input.recipe in _ONE_SCALE
    rows &= forms & (_core.VALUE_QUANTIZED | _core.VALUE_ROW_WISE) != _core.VALUE_QUANTIZED
    return _core.VALUE_RETURN_QUANTIZED | (_core.VALUE_ROW_WISE if rows else 0)


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
    first, last = spec.parts[0], spec.parts[-1]
    graph = Graph(_core.GRAPH_RECOMPUTE if spec.recompute else 0)
    shape = (ROWS, first.in_features)
    forms = form_flags(first.flags, INPUT_GIVEN, INPUT_KEPT, INPUT_ROWS)
    forms |= _returned_flags(first, RETURN_GRAD, forms)
    x = graph.tensor("input", first.input, shape, input_flags(first.flags & DGRAD) | forms)
    affine: tuple = ()
    if spec.norm is not None:
        affine = graph.norm_parameters(spec.norm, first.in_features, first.flags)
    pairs = list(zip(spec.parts, spec.names, strict=True))
    parameters = [graph.linear_parameters(part, name) for part, name in pairs]
    rows = _core.Extent(symbol=_core.SYMBOL_ROWS, multiply=last.gather)
    forms = form_flags(last.flags, GRAD_GIVEN, GRAD_KEPT, GRAD_ROWS)
    forms |= _returned_flags(last, RETURN_OUTPUT, forms)
    y = graph.value("output", last.output, (rows, last.out_features), RESULT | forms)
    if spec.norm is not None:
        flags = RESULT if first.flags & RETURN_NORM else _core.VALUE_LEADING
        normed = graph.value("norm_output", first.output, shape, flags)
        graph.add_norm(spec.norm, (x, *affine), normed, first.flags & ZERO_CENTERED)
        x = normed
    for i, (part, name) in enumerate(pairs):
        if i > 0:
            after = graph.value(f"{name}input", part.input, (ROWS, part.in_features))
            kind, *numbers = spec.activation
            options = {"variant": kind, "numbers": tuple(numbers)}
            graph.node(_core.NODE_ACTIVATION, (x,), after, **options)
            x = after
        made = y
        if i < len(pairs) - 1:
            made = graph.value(f"{name}output", part.output, (ROWS, part.out_features))
        graph.add_linear(part, (x, *parameters[i]), made, name, i)
        x = made
    return graph


def norm_graph(features: int, norm: Norm, dtypes: tuple[int, int], flags: int) -> Graph:
    """Graph of a norm by itself; arguments as of `plans.norm_plans`."""
    graph = Graph()
    x = graph.tensor("input", dtypes[0], (ROWS, features), input_flags(flags & DGRAD))
    affine = graph.norm_parameters(norm, features, flags)
    y = graph.value("output", dtypes[1], (ROWS, features), RESULT)
    graph.add_norm(norm, (x, *affine), y, flags & ZERO_CENTERED)
    return graph
