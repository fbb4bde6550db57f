# SPDX-License-Identifier: Apache-2.0
"""No write to a quantized tensor is lost: all operators of torch that write, and all its views.

They are found by their schemas, and called with arguments that plain tensors take. Either a
quantized tensor has the values afterwards that a plain one has, cast, or the call raises.
"""

import copy
import functools
import itertools

import pytest
import torch
from pytorch.quantized_cases import E4M3, current

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import HybridQuantizer, IdentityQuantizer

QUANTIZERS = {
    "current": lambda: current(force_pow_2_scales=True),
    "tiles": lambda: te.Float8BlockQuantizer(E4M3),
    "rows": lambda: te.Float8RowQuantizer(E4M3, force_pow_2_scales=True),
    "mxfp8": lambda: te.MXFP8Quantizer(E4M3),
    "nvfp4": te.NVFP4Quantizer,
    "identity": IdentityQuantizer,
    "hybrid": lambda: HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3), columnwise_quantizer=QUANTIZERS["current"]()
    ),
}
"""Of scales by which a cast of what was cast changes nothing."""
MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
SHAPE = (4, 6)
"""Not square, so that a view that was transposed has another shape."""

PRIVATE = ("_foreach_", "_reshape_alias", "_index_put_impl_")
"""Beginnings of private names that programs reach; others want checked arguments, or crash."""
PARTS = ("native_", "cudnn_", "miopen_", "mkldnn_", "quantized_", "fbgemm_", "to_mkldnn", "fused_")
"""Beginnings of names of parts of operators, which crash, too."""
UNDEFINED = ("empty", "new_empty", "set_data")
"""Names of what leaves values undefined, and of the assignment of `tensor.data` below Python."""

CANDIDATES = {
    "Tensor": [
        lambda: torch.rand(SHAPE) + 0.25,
        lambda: torch.rand(SHAPE) > 0.5,
        lambda: torch.randint(4, SHAPE),
        lambda: torch.randint(4, (3,)),
        lambda: torch.rand(()),
        lambda: torch.rand(SHAPE[1]),
        lambda: torch.rand(SHAPE[::-1]),
    ],
    "List[Tensor]": [lambda: [torch.rand(SHAPE) + 0.25]],
    "List[Optional[Tensor]]": [lambda: [torch.tensor([1, 3])]],
    "number": [lambda: 2],
    "List[number]": [lambda: [2.0]],
    "int": [lambda: 1, lambda: 0, lambda: 2],
    "List[int]": [lambda: [1, 0], lambda: list(SHAPE), lambda: [2, 3], lambda: [2]],
    "float": [lambda: 0.5],
    "bool": [lambda: False],
    "str": [lambda: "none"],
    "Device": [lambda: torch.device("cpu")],
}
"""What is tried by type; other arguments are None."""


def operators():
    """(overload of ATen, an argument of it that it writes to or returns a view of)."""
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        if space != "aten" or name.startswith((*PARTS, *UNDEFINED)):
            continue
        if name.startswith("_") and not name.startswith(PRIVATE):
            continue
        overload = schema.overload_name or "default"
        operator = getattr(getattr(torch.ops.aten, name, None), overload, None)
        if operator is None or not torch._C._dispatch_has_kernel(operator.name()):
            continue
        for argument in operator._schema.arguments:
            if argument.alias_info is not None and "Tensor" in str(argument.type):
                yield operator, argument


def call(operator, argument, tensor, others, seed):
    """Run an operator on a tensor in one place, and with arguments in others, by their names."""
    positional, named = [], {}
    for other in operator._schema.arguments:
        value = others.get(other.name)
        if other.name == argument.name:
            value = [tensor] if str(other.type).startswith("List[") else tensor
        elif other.name not in others:
            continue
        if other.kwarg_only:
            named[other.name] = value
        else:
            positional.append(value)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed formats a stack each time
    return operator(*positional, **named)


@functools.cache
def cases():
    """(operator, argument, makers of the others by name) that a plain tensor of SHAPE goes with."""
    found = []
    for operator, argument in operators():
        needed = [
            other
            for other in operator._schema.arguments
            if other.name != argument.name and not other.has_default_value()
        ]
        names = [other.name for other in needed]
        ways = itertools.product(*(CANDIDATES.get(str(o.type), [lambda: None]) for o in needed))
        for way in itertools.islice(ways, 60):
            makers = dict(zip(names, way, strict=True))
            others = {name: make() for name, make in makers.items()}
            tensor = torch.rand(SHAPE)
            try:
                call(operator, argument, tensor, others, 0)
            except (RuntimeError, TypeError, ValueError, IndexError):
                continue
            if tensor.shape != SHAPE and torch.Tag.inplace_view not in operator.tags:
                continue  # an `out` that it resizes
            found.append((operator, argument, makers))
            break
    return found


def parts_of(result):
    return result if isinstance(result, list | tuple) else [result]


def read(tensor):
    return tensor if type(tensor) is torch.Tensor else tensor.dequantize()


def made_of_others(operator):
    """Whether it may write several times, and each write is a cast."""
    kind = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), kind)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, "no_grad") for name in QUANTIZERS]
    + [(name, "inference_mode") for name in ("current", "nvfp4", "identity")],
)
def test_no_operator_loses_a_write(name, mode):
    """What inference mode leaves whole are the same operators elsewhere, whatever the format."""
    quantizer, written, viewed, refused = QUANTIZERS[name](), 0, 0, set()
    for operator, argument, makers in cases():
        with MODES[mode]():
            tensor = quantizer(torch.rand(SHAPE) + 0.25)
            values, seed = tensor.dequantize(), int(torch.randint(2**31, ()))
            before = values.clone()
            others = {key: make() for key, make in makers.items()}
            expected = call(operator, argument, values, copy.deepcopy(others), seed)
            try:
                found = call(operator, argument, tensor, others, seed)
            except NotImplementedError:
                assert operator._schema.is_mutable or operator is torch.ops.aten.view.dtype
                refused.add(operator.name().partition(".")[0])
                continue
            assert tensor.shape == values.shape, operator
            if operator._schema.is_mutable:
                written += 1
                if not torch.equal(values, before):
                    values = quantizer(values).dequantize()
                # Those quantize after each step: each rounds by half a code, at most a sixth of the
                # largest value (NVFP4), and what follows may be scaled by another one.
                off = values.nan_to_num(posinf=0).abs().max() / 4 if made_of_others(operator) else 0
            else:
                viewed, off = viewed + 1, 0
                for part, other in zip(parts_of(found), parts_of(expected), strict=True):
                    assert_near(read(part), other, 0, f"{operator}: what it returns")
                    fresh = torch.randint(-9, 9, other.shape).to(other.dtype)
                    for one in (part, other):
                        one.copy_(fresh)
                    if not torch.equal(values, before):
                        values.copy_(quantizer(values).dequantize())
            assert_near(tensor.dequantize(), values, off, str(operator))
    assert written > 600 and viewed > 50
    assert {"aten::t_", "aten::set_", "aten::squeeze_"} <= refused


def assert_near(found, expected, off, why):
    torch.testing.assert_close(found, expected, rtol=0, atol=float(off), equal_nan=True, msg=why)


# ---- graphs --------------------------------------------------------------------------------------


def one_after_the_other(tensor):
    turned, part = tensor.t(), tensor[:, ::2]
    below, alias = turned[2:], tensor.detach()
    tensor.mul_(2)
    turned.add_(1)
    alias[0].zero_()
    below.mul_(0.5)
    return turned + 0, part + 0, below + 0, alias.dequantize()


def to_a_part(tensor):
    part = tensor.split(3, 1)[1].t()
    part.copy_(part.flip(0))
    return part.clone()


GRAPHS = {
    "transposed": lambda t: t.t().mul_(2) + 0,
    "diagonal": lambda t: t.fill_diagonal_(3.0) + 0,
    "strided": lambda t: t.as_strided((3, 4), (7, 1)).zero_() + 0,
    "columns": lambda t: t[:, ::2].add_(1) + 0,
    "several": one_after_the_other,
    "part": to_a_part,
    "returned": lambda t: t.t(),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4", "hybrid"])
def test_graphs_write_what_they_write_without_one(name, mode):
    quantizer = QUANTIZERS[name]()
    for title, function in GRAPHS.items():
        torch.compiler.reset()
        with MODES[mode]():
            source = torch.randn(16, 10)
            found, expected = quantizer(source), quantizer(source)
            results = torch.compile(function, backend="aot_eager")(found)
            for one, other in zip(parts_of(results), parts_of(function(expected)), strict=True):
                assert_near(read(one), read(other), 0, f"{title}: what it returns")
            assert_near(found.dequantize(), expected.dequantize(), 0, title)
