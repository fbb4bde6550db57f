# SPDX-License-Identifier: Apache-2.0
"""Layers as graphs of the C library, and what the dims of their arrays stand for.

A layer is a norm, one or two dense layers and the activation between them, in this order. Its graph
is that of the PyTorch modules (`common.graphs`), with kernels that are [in, out].

Each dim of an array is a *factor*: "b0", "b1", .. of a batch, "i0", .. what the first dense layer
sums over, "m0", "m1" what lies between two dense layers (functions of the activation, intermediate
features), "o0", .. the features of the result. A mesh cuts factors; all arrays that have one are
cut alike.
"""

import enum
import functools
import math
from typing import NamedTuple

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.operand_casts import (
    BACKWARDS,
    OperandCast,
    Quantization,
    flags_of,
)
from transformer_engine.common.plans import CallPlans, plans_of
from transformer_engine.jax import linear
from transformer_engine.jax.activation import ActivationPlan
from transformer_engine.jax.custom_calls import code_of
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.layernorm import NormPlan
from transformer_engine.jax.operator_calls import ACTIVATIONS, NORMS


class Layer(NamedTuple):
    """How a layer computes; static."""

    linears: tuple[linear.LinearPlan, ...]  # one, or two with the activation between them
    norm: NormPlan | None = None
    activation: ActivationPlan | None = None


WHOLE_TENSORS = {
    ScalingMode.NO_SCALING,
    ScalingMode.DELAYED_TENSOR_SCALING,
    ScalingMode.CURRENT_TENSOR_SCALING,
}
"""How casts may scale over a mesh: with one scale for a tensor, which all devices agree on."""


def modes_of(layer: Layer) -> set[ScalingMode]:
    """How a layer scales."""
    return {operand.mode for of in layer.linears for operand in (of.x, of.kernel, of.grad)}


# ---- casts ---------------------------------------------------------------------------------------

_RECIPES = {
    ScalingMode.DELAYED_TENSOR_SCALING: _core.RECIPE_DELAYED,
    ScalingMode.CURRENT_TENSOR_SCALING: _core.RECIPE_CURRENT,
    ScalingMode.BLOCK_1D_SCALING: _core.RECIPE_BLOCK,
    ScalingMode.BLOCK_2D_SCALING: _core.RECIPE_BLOCK,
    ScalingMode.ROW_SCALING: _core.RECIPE_ROW,
    ScalingMode.MXFP8_1D_SCALING: _core.RECIPE_MXFP8,
}


def _cast(cast: Cast | None) -> OperandCast:
    if cast is None:
        return OperandCast()
    if cast.mode.is_nvfp4_scaling:
        return OperandCast(_core.RECIPE_NVFP4, _core.DTYPE_U8, options=cast.options)
    options = flags_of(
        (
            (_core.CAST_POWER_2, cast.power_2),
            (_core.CAST_TILES_2D, cast.square or cast.mode is ScalingMode.BLOCK_2D_SCALING),
        )
    )
    # The margin of delayed scaling is that of its updates.
    margin = cast.margin if cast.mode is ScalingMode.MXFP8_1D_SCALING else 0
    dtype = code_of(cast.dtype)
    return OperandCast(_RECIPES[cast.mode], dtype, cast.epsilon, options, margin)


def _quantization(plan: linear.LinearPlan) -> Quantization:
    casts = [_cast(operand.cast) for operand in (plan.x, plan.kernel, plan.grad)]
    return Quantization(*casts, plan.fast, BACKWARDS[plan.backward])


# ---- plans ---------------------------------------------------------------------------------------

Factors = tuple[str, ...]


class Kernel(NamedTuple):
    """A kernel: its dims, and its dtype."""

    inside: tuple[int, ...]  # dims that are summed over
    outside: tuple[int, ...]
    dtype: int

    @property
    def matrix(self) -> tuple[int, int]:
        """The same as [in, out]."""
        return math.prod(self.inside), math.prod(self.outside)


class Ranks(NamedTuple):
    """Among how many devices a layer is spread, each of which runs a plan; 0: sums are whole."""

    before: int = 0  # gradients of the input are sums over so many
    behind: int = 0  # results are
    gathers: bool = False  # a device has a part of the rows of the input
    scatters: bool = False  # it has a part of those of the result
    measured: bool = False  # amaxes of current scaling are those of all devices


class Facts(NamedTuple):
    """What the plans of a layer depend on."""

    layer: Layer
    dtype: int  # of input and output
    norm: int  # dtype of gamma and beta
    has_beta: bool
    kernels: tuple[Kernel, ...]
    biases: tuple[int | None, ...]  # dtypes
    wanted: tuple[bool, tuple, tuple, tuple]
    """Whether the gradients of input, gamma and beta, kernels, biases are."""
    ranks: Ranks = Ranks()


def _parameter(wanted: bool) -> int:
    return _core.VALUE_PARAMETER | _core.VALUE_GRADIENT * wanted


_REDUCED = frozenset(
    number
    for number, name in enumerate(_core.LINEAR_STAGES)
    if name in ("reduce_amax_input", "reduce_amax_weight", "reduce_amax_grad_output")
)


def graph_of(facts: Facts) -> graphs.Graph:
    """The graph of a layer."""
    layer, ranks, parts = facts.layer, facts.ranks, []
    of_x, of_affine, of_kernels, of_biases = facts.wanted
    for i, kernel in enumerate(facts.kernels):
        flags = graphs.LinearFlags(
            node=_core.LINEAR_WEIGHT_TRANSPOSED,
            input=_core.VALUE_GRADIENT * of_x,
            weight=_parameter(of_kernels[i]),
            bias=0 if facts.biases[i] is None else _parameter(of_biases[i]),
        )
        bias = facts.dtype if facts.biases[i] is None else facts.biases[i]
        dtypes = facts.dtype, kernel.dtype, bias, facts.dtype, kernel.dtype
        how = _quantization(layer.linears[i]), flags, _REDUCED if ranks.measured else frozenset()
        parts.append(graphs.LinearSpec(*kernel.matrix, *dtypes, *how))
    norm = activation = before = behind = None
    if layer.norm is not None:
        kind, centered, epsilon = layer.norm
        gamma, beta = map(_parameter, of_affine)
        flags = gamma, beta * facts.has_beta, _core.NODE_ZERO_CENTERED * centered
        norm = graphs.Norm(NORMS[kind], facts.norm, epsilon, *flags)
    if layer.activation is not None:
        kinds, numbers = layer.activation
        activation = graphs.Activation(ACTIVATIONS[kinds], *numbers)
    if ranks.before:
        kind = _core.COLLECTIVE_GATHER if ranks.gathers else _core.COLLECTIVE_COPY
        forms = ranks.gathers and layer.linears[0].is_quantized
        before = graphs.Collective(kind, ranks.before, forms)
    if ranks.behind:
        kind = _core.COLLECTIVE_REDUCE_SCATTER if ranks.scatters else _core.COLLECTIVE_ALL_REDUCE
        forms = ranks.scatters and layer.linears[-1].is_quantized
        behind = graphs.Collective(kind, ranks.behind, forms)
    names = ("",) if len(parts) == 1 else ("fc1_", "fc2_")
    spec = graphs.CallSpec(
        tuple(parts), norm, activation, names=names, before=before, behind=behind
    )
    return graphs.call_graph(spec)


class Side(enum.Enum):
    """Where in a layer rows are: they may be cut more often at its ends."""

    INPUT = "input"
    INNER = "inner"
    OUTPUT = "output"


class Dims(NamedTuple):
    """What the dims of an array are."""

    factors: Factors
    side: Side


# ---- dims ----------------------------------------------------------------------------------------

FORWARD_SLOTS, BACKWARD_SLOTS = 3, 2
"""Slots of a dense layer in a state; the last one is that of what is returned."""


class LayerPlans:
    """The plans of a layer, and the factors of what they are given and give."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.call: CallPlans = plans_of(graph_of(facts))
        count = len(facts.kernels)
        inside = tuple(f"i{n}" for n in range(len(facts.kernels[0].inside)))
        outside = tuple(f"o{n}" for n in range(len(facts.kernels[-1].outside)))
        between = ("m0", "m1")
        # Of each dense layer: what it sums over, and what it makes.
        self.inside = (inside, between[1:])[:count]
        self.outside = (outside,) if count == 1 else (between, outside)
        self._of_values = self._values()
        # The bias that is added behind a sum over devices; None: there is none.
        self.added = self.call.graph.tensors[-1] if facts.ranks.behind else None

    def _values(self) -> dict[int, tuple[bool, Dims]]:
        """Of each value of the graph: whether it has rows, and its other factors."""
        graph, count = self.call.graph, len(self.facts.kernels)
        found: dict[int, tuple[bool, Dims]] = {}
        x, *others = graph.tensors
        found[x[1]] = True, Dims(self.inside[0], Side.INPUT)
        if self.facts.layer.norm is not None:
            affine, others = others[:2], others[2:]
            of = Dims(self.inside[0], Side.INPUT)
            found |= {link[1]: (False, of) for link in affine if link is not None}
        ends = (*(Side.INNER,) * (count - 1), Side.OUTPUT)  # of what each dense layer makes
        for part, (kernel, bias) in enumerate(zip(others[::2], others[1::2], strict=True)):
            both = (*self.inside[part], *self.outside[part])
            found[kernel[1]] = False, Dims(both, Side.INNER)
            if bias is not None:
                found[bias[1]] = False, Dims(self.outside[part], ends[part])
        part = 0
        for node in graph.nodes:
            rows, of = found[node.inputs[0]]
            if node.kind == _core.NODE_LINEAR:
                of, part = Dims(self.outside[part], ends[part]), part + 1
            if node.kind == _core.NODE_ACTIVATION:
                of = Dims(of.factors[1:], of.side)
            found[node.output] = rows, of
        return found

    def dims(self, buffer: _core.Buffer, batch: Factors) -> Dims | None:
        """What the dims of a buffer are; None of one whose dims stand for no factors.

        `batch` are the factors of rows.
        """
        link, of = buffer.link, buffer.of
        if link in ("value", "gradient") and of in self._of_values:  # no random pair
            rows, others = self._of_values[of]
            return Dims((*batch * rows, *others.factors), others.side)
        if link in ("mean", "rsigma"):
            return Dims(batch, Side.INPUT)
        if link in ("row", "column"):
            return self._dims_of_form(buffer, batch)
        return None

    def _dims_of_form(self, buffer: _core.Buffer, batch: Factors) -> Dims | None:
        part, role = self._operand(buffer.of)
        if role > 1 or modes_of(self.facts.layer) - WHOLE_TENSORS:
            return None  # it lies otherwise
        (size, out), side = self.facts.kernels[part].matrix, Side.INNER
        inside, outside = self.inside[part], self.outside[part]
        pair, lengths = (inside, outside), [size, out]
        if role == 0:
            pair, lengths = (batch, inside), [None, size]
            side = side if part else Side.INPUT
        if buffer.link == "column":
            pair, lengths = pair[::-1], lengths[::-1]
        found = [None if e.symbol == _core.SYMBOL_ROWS else e.add for e in buffer.shape]
        return Dims((*pair[0], *pair[1]), side) if found == lengths else None  # else padded

    def _operand(self, of: int) -> tuple[int, int]:
        """The dense layer, and which of its operands."""
        first = of - of % _core.OPERAND_ROLES
        return self.call.graph.operands.index(first), of - first

    def measured(self, stage: _core.Stage, batch: Factors) -> Dims:
        """What a stage ``reduce_amax_*`` is about: the operand that was measured."""
        part, _ = self._operand(stage.node * _core.OPERAND_ROLES)
        name = _core.LINEAR_STAGES[stage.step]
        inside, outside = self.inside[part], self.outside[part]
        last = part == len(self.inside) - 1
        return {
            "reduce_amax_input": Dims((*batch, *inside), Side.INNER if part else Side.INPUT),
            "reduce_amax_weight": Dims((*inside, *outside), Side.INNER),
            "reduce_amax_grad_output": Dims(
                (*batch, *outside), Side.OUTPUT if last else Side.INNER
            ),
        }[name]


@functools.lru_cache(maxsize=512)
def layer_plans(facts: Facts) -> LayerPlans:
    """Plans of a layer; those of the last ones are kept."""
    return LayerPlans(facts)
