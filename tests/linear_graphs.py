# SPDX-License-Identifier: Apache-2.0
"""A linear layer as a graph, and its plans run over memory by link."""

import torch

from transformer_engine import _core
from transformer_engine.common import graphs
from transformer_engine.common.operand_casts import OperandCast, Quantization

K, N, ROWS = 24, 40, 6  # none of them a multiple of 16, which the forms are padded to
WIDE = 48  # columns of a weight that is transposed


class Flags(graphs.LinearFlags):
    """Flags of a linear layer, to be joined with others."""

    def __or__(self, other):
        return Flags(*self.joined(other))

    def __and__(self, other):
        return any(a & b for a, b in zip(self, other, strict=True))


class Flag:
    """Flags by what they say: of input, weight or gradient that they are given quantized, ..."""

    NONE = Flags()
    DGRAD, WGRAD = Flags(input=_core.VALUE_GRADIENT), Flags(weight=_core.VALUE_GRADIENT)
    DEFER = Flags(weight=_core.VALUE_DEFER)
    SAVE_INPUT = Flags(_core.LINEAR_SAVE_INPUT)
    NO_AMAX = Flags(_core.LINEAR_NO_AMAX)
    MEASURE_RETURNED = Flags(_core.LINEAR_MEASURE_RETURNED)
    INPUT_GIVEN, WEIGHT_GIVEN, GRAD_GIVEN = (
        Flags(**{of: _core.VALUE_QUANTIZED}) for of in ("input", "weight", "output")
    )
    INPUT_KEPT, WEIGHT_KEPT, GRAD_KEPT = (
        Flags(**{of: _core.VALUE_KEEP_QUANTIZED}) for of in ("input", "weight", "output")
    )
    INPUT_ROWS, WEIGHT_ROWS, GRAD_ROWS = (
        Flags(**{of: _core.VALUE_ROW_WISE}) for of in ("input", "weight", "output")
    )
    WEIGHT_CACHED = Flags(weight=graphs.WEIGHT_CACHED)
    RETURN_GRAD, RETURN_OUTPUT = (
        Flags(**{of: _core.VALUE_RETURN_QUANTIZED}) for of in ("input", "output")
    )


GRADIENTS = Flag.DGRAD | Flag.WGRAD


def graph_of(flags, recipe=_core.RECIPE_DELAYED, wanted=GRADIENTS, bias_grad=False, columns=K):
    """A linear layer with a bias."""
    f32 = _core.DTYPE_F32
    dtypes = _core.DTYPE_E4M3, _core.DTYPE_E4M3, _core.DTYPE_E5M2
    quantization = Quantization(*(OperandCast(recipe, dtype) for dtype in dtypes))
    affine = Flags(weight=_core.VALUE_PARAMETER, bias=_core.VALUE_PARAMETER)
    flags = flags | wanted | affine | Flags(bias=_core.VALUE_GRADIENT * bias_grad)
    part = graphs.LinearSpec(columns, N, f32, f32, f32, f32, f32, quantization, flags)
    return graphs.call_graph(graphs.CallSpec((part,)))


def buffers(plan, *roles):
    """Links of its buffers of these roles, in the order of a call."""
    return [(b.link, b.of) for b in plan.described.buffers if b.role in roles]


def run(plan, memory, packed=None):
    """Run a plan over what is in `memory` by link; put its outputs there, return what it packs."""
    given = [memory[link] for link in buffers(plan, "input", "parameter", "state")]
    forward = plan.described.direction == "forward"
    leads = any(b.role == "input" and b.leading for b in plan.described.buffers)
    rows = () if leads else (ROWS,)
    extra = () if forward or not buffers(plan, "saved") else (packed,)
    *outputs, made = _core.run(plan.native, 0, 0, *given, *extra, *rows)
    memory.update(zip(buffers(plan, "output"), outputs, strict=True))
    return made


def run_all(graph, memory):
    """Forward, backward, deferred weight gradient."""
    packed = run(graph.make(_core.DIRECTION_FORWARD), memory)
    run(graph.make(_core.DIRECTION_BACKWARD), memory, packed)
    if graph.defers:
        run(graph.make(_core.DIRECTION_DEFERRED), memory, packed)
    return memory


def fresh_memory(columns=K):
    """What a call is given."""
    return {
        ("value", 0): torch.randn(2, ROWS // 2, columns),
        ("value", 1): torch.randn(N, columns),
        ("value", 2): torch.randn(N),
        ("gradient", 3): torch.randn(2, ROWS // 2, N),
        ("scale", 0): torch.tensor([4.0, 2.0, 8.0, 1.0]),
        ("history", 0): torch.zeros(4, 4),
    }
