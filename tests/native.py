# SPDX-License-Identifier: Apache-2.0
"""What the tests of `_core` share: instances of the module, plans, and tensors for these."""

import importlib.machinery
import importlib.util
from typing import Any

import torch

from transformer_engine import _core as shared

K, N, ROWS, SLOTS = 24, 40, 6, 8


def fresh_core(bind: bool = True):
    """Make a new instance of the module, with a state of its own."""
    loader = importlib.machinery.ExtensionFileLoader(shared.__name__, shared.__file__)
    spec = importlib.util.spec_from_loader(shared.__name__, loader)
    core = importlib.util.module_from_spec(spec)
    loader.exec_module(core)
    if bind:
        core.bind_torch(torch)
    return core


def rows_dim(core) -> shared.Extent:
    """The leading dims of the first input."""
    return shared.Extent(symbol=core.SYMBOL_ROWS, multiply=1)


class Graph:
    """Collects float32 values and nodes; every tensor that is given has a gradient."""

    def __init__(self, core, recipe: int = 1, flags: int = 0):
        self.core, self.recipe, self.flags = core, recipe, flags
        self.values: list[shared.Value] = []
        self.nodes: list[shared.Node] = []

    def value(self, name: str, shape: tuple, flags: int = 0) -> int:
        """Add a value; return its number."""
        f32 = self.core.DTYPE_F32
        self.values.append(shared.Value(name, flags, f32, f32, shape))
        return len(self.values) - 1

    def rows(self, name: str, columns: int, flags: int = 0) -> int:
        """Add a value with the leading dims of the first input."""
        shape = (rows_dim(self.core), columns)
        return self.value(name, shape, flags | self.core.VALUE_LEADING)

    def input(self, columns: int = K, name: str = "input") -> int:
        """Add an input."""
        return self.rows(name, columns, self.core.VALUE_INPUT | self.core.VALUE_GRADIENT)

    def parameter(self, name: str, *shape: int, flags: int = 0) -> int:
        """Add a parameter."""
        flags |= self.core.VALUE_PARAMETER | self.core.VALUE_GRADIENT
        return self.value(name, shape, flags)

    def result(self, columns: int, name: str = "output") -> int:
        """Add a result."""
        return self.rows(name, columns, self.core.VALUE_RESULT)

    def node(self, kind: int, inputs: tuple, output: int, name: str = "", **fields) -> None:
        """Add a node; fields by name."""
        recipe = self.recipe if kind == self.core.NODE_LINEAR else self.core.RECIPE_NONE
        dtypes = (self.core.DTYPE_E4M3, self.core.DTYPE_E4M3, self.core.DTYPE_E5M2)
        casts = tuple(shared.OperandCast(recipe, dtype) for dtype in dtypes)
        fields = {"quantization": shared.Quantization(casts)} | fields
        fields["slices"] = tuple(shared.Slice(*each) for each in fields.get("slices", ()))
        node = {"name": name, "kind": kind, "inputs": inputs, "output": output}
        self.nodes.append(shared.Node(**node, **fields))

    def linear(self, x: int, y: int, name: str = "", bias: bool = True, **fields) -> None:
        """Add a linear node with its parameters; weight_flags are its weight's."""
        columns = [self.values[number].shape[1] for number in (y, x)]
        flags = fields.pop("weight_flags", 0)
        parameters = [self.parameter(f"{name}weight", *columns, flags=flags)]
        if bias:
            parameters.append(self.parameter(f"{name}bias", columns[0]))
        self.node(self.core.NODE_LINEAR, (x, *parameters), y, name, **fields)

    def norm(self, x: int, y: int, name: str = "") -> None:
        """Add a LayerNorm with its parameters."""
        names = f"{name}gamma", f"{name}beta"
        parameters = [self.parameter(n, self.values[x].shape[1]) for n in names]
        self.node(self.core.NODE_NORM, (x, *parameters), y, name, numbers=(1e-5,))

    def arguments(self, direction: int) -> list:
        """Arguments of make_plan."""
        return [direction, self]

    def plan(self, direction: int) -> Any:
        """Make a plan."""
        return self.core.make_plan(*self.arguments(direction))


def linear_plan(core, direction: int, recipe: int = 1, **fields) -> int:
    """Id of a plan of a linear node with the module's features; fields as of `Graph.linear`."""
    graph = Graph(core, recipe)
    x, y = graph.input(), graph.result(N)
    graph.linear(x, y, **fields)
    return graph.plan(direction)


def mlp_graph(core, recipe: int = 1, flags: int = 0) -> Graph:
    """Norm, linear, GELU, linear: every kind of node."""
    graph = Graph(core, recipe, flags)
    x, y = graph.input(), graph.result(K)
    normed = graph.rows("norm_output", K)
    before, after = (graph.rows(name, N) for name in ("fc1_output", "fc2_input"))
    graph.norm(x, normed)
    graph.linear(normed, before, "fc1_")
    graph.node(core.NODE_ACTIVATION, (before,), after, variant=core.ACTIVATION_GELU)
    graph.linear(after, y, "fc2_", slots=(3, 2))
    return graph


HEADS, HEAD = 2, 6


def attention_graph(core, recipe: int = 1, **attention) -> Graph:
    """Linear, rotary embedding of the queries, causal attention, softcap, dropout + add.

    The fields of its attention by name.
    """
    graph = Graph(core, recipe)
    width = HEADS * HEAD
    dense, *packed = [(HEADS, HEAD, i * width, HEAD) for i in (0, 0, 1, 2)]
    x, y = graph.input(width), graph.result(width)
    qkv, turned = graph.rows("qkv", 3 * width), graph.rows("turned", width)
    attended, capped = graph.rows("attended", width), graph.rows("capped", width)
    angles = graph.value("angles", (core.ANY_LENGTH, HEAD), core.VALUE_INPUT)
    graph.linear(x, qkv, "qkv_")
    graph.node(core.NODE_ROPE, (qkv, angles), turned, slices=(packed[0],))
    fields = {"numbers": (0.5, 0.0, -1.0, 0.0), "slices": (dense, *packed[1:])} | attention
    graph.node(core.NODE_ATTENTION, (turned, qkv, qkv), attended, **fields)
    graph.node(core.NODE_SOFTCAP, (attended,), capped, numbers=(30.0,))
    bias = graph.parameter("add_bias", width)
    graph.node(core.NODE_DROPOUT_ADD, (capped, bias, x), y, "add_", numbers=(0.25, 0.0), owner=1)
    return graph


def sums_graph(core, recipe: int = 1) -> Graph:
    """A linear node, whose weight is frozen, of an input that two sums read too; a norm of these.

    Little is saved, and nearly all of it not read any more when the weight is cast again.
    """
    graph = Graph(core, recipe)
    x, y = graph.input(32), graph.result(32)
    values = [graph.rows(f"v{i}", 32) for i in range(3)]
    weight = graph.value("weight", (32, 32), core.VALUE_PARAMETER)
    graph.node(core.NODE_LINEAR, (x, weight), values[0])
    for i in range(2):
        bias = graph.parameter(f"bias{i}", 32)
        graph.node(core.NODE_DROPOUT_ADD, (values[i], bias, x), values[i + 1], numbers=(0.0, 0.0))
    graph.norm(values[2], y)
    return graph


def chain_graph(core, depth: int, recipe: int = 1) -> Graph:
    """So many linear nodes in a row."""
    graph = Graph(core, recipe)
    x = graph.input()
    for i in range(depth):
        y = graph.rows(f"y{i}", K) if i < depth - 1 else graph.result(K)
        graph.linear(x, y, f"n{i}_")
        x = y
    return graph


def buffers_of(core, plan: int, *roles: str) -> list[str]:
    """Names of a plan's buffers of some roles, in plan order."""
    return [b.name for b in core.plan_describe(plan).buffers if b.role in roles]


def numbers_of(core, plan: int) -> dict[str, int]:
    """Numbers of a plan's buffers by name."""
    return {b.name: i for i, b in enumerate(core.plan_describe(plan).buffers)}


def external(core, *names: str) -> tuple[int, ...]:
    """A node's `external` with stages by name."""
    return tuple(sorted(map(core.LINEAR_STAGES.index, names)))


def state() -> tuple[torch.Tensor, torch.Tensor]:
    """A chunk of delayed scaling: scale and history."""
    return torch.ones(SLOTS), torch.zeros(4, SLOTS)


def linear_tensors() -> list[torch.Tensor]:
    """Input, weight, bias, scale and history of a delayed-scaling forward."""
    weight = torch.nn.Parameter(torch.randn(N, K))
    return [torch.randn(2, ROWS // 2, K), weight, torch.nn.Parameter(torch.randn(N)), *state()]


def fp8(*shape: int) -> torch.Tensor:
    """Zeros in e4m3."""
    return torch.zeros(*shape, dtype=torch.float8_e4m3fn)


class Sub(torch.Tensor):
    """A subclass with memory of its own."""


class Wrapper(torch.Tensor):
    """A subclass with a shape and no memory."""

    @staticmethod
    def __new__(cls, like):
        return torch.Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    def __init__(self, like):
        self.like = like

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("this tensor has no data")


def strange_tensors() -> dict[str, Any]:
    """Tensors that can not be read as a dense matrix of a known dtype, by what is strange."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.empty(ROWS, K)
    return {
        "meta": torch.empty(ROWS, K, device="meta"),
        "sparse": torch.eye(K).to_sparse(),
        "fake": fake,
        "complex": torch.zeros(ROWS, K, dtype=torch.complex64),
        "bool": torch.zeros(ROWS, K, dtype=torch.bool),
        "float64": torch.zeros(ROWS, K, dtype=torch.float64),
        "subclass": torch.zeros(ROWS, K).as_subclass(Sub),
        "wrapper": Wrapper(torch.zeros(ROWS, K)),
    }
