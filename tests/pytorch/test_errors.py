# SPDX-License-Identifier: Apache-2.0
"""Wrong inputs of a module: the exception names argument, value and fix; nothing has changed."""

import pytest
import torch
from pytorch.helpers import RECIPES, assert_same_bits, counted, state_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import transformer_engine.pytorch as te
from transformer_engine.pytorch.execution.thread_state import current_state

IN, OUT, ROWS = 32, 48, 16


def fake(device):
    with FakeTensorMode():
        return torch.empty(ROWS, IN, device=device)


def normal(device, *shape):
    return torch.randn(*(shape or (ROWS, IN)), device=device)


# name: (input on a device, exception, what its text must contain)
WRONG = {
    "list": (lambda d: [1.0] * IN, TypeError, ("inp: list", "tensor")),
    "none": (lambda d: None, TypeError, ("inp: NoneType", "tensor")),
    "scalar": (lambda d: torch.tensor(1.0, device=d), ValueError, ("inp: shape ()", "[..., 32]")),
    "shape": (lambda d: normal(d, 4, 31), ValueError, ("inp: shape (4, 31)", "[..., 32]")),
    "transposed": (lambda d: normal(d, IN, 3), ValueError, ("inp: shape (32, 3)", "[..., 32]")),
    "float16": (lambda d: normal(d).half(), TypeError, ("float16", "weight torch.float32")),
    "float64": (lambda d: normal(d).double(), TypeError, ("float64", "torch.autocast")),
    "int64": (lambda d: normal(d).long(), TypeError, ("int64", "convert the input")),
    "bool": (lambda d: normal(d) > 0, TypeError, ("bool", "convert the input")),
    "complex": (lambda d: normal(d).to(torch.complex64), TypeError, ("complex64", "convert")),
    "fp8": (lambda d: normal(d).to(torch.float8_e4m3fn), TypeError, ("float8_e4m3fn", "convert")),
    "meta": (
        lambda d: torch.empty(4, IN, device="meta"),
        TypeError,
        ("inp is on meta", "has memory"),
    ),
    "fake": (fake, TypeError, ("FakeTensor", "convert it to a plain torch.Tensor")),
    "wrapper": (lambda d: TwoTensor(normal(d), normal(d)), TypeError, ("TwoTensor", "plain")),
    "sparse": (lambda d: normal(d).to_sparse(), TypeError, ("input", "sparse", "dense")),
    "compressed": (lambda d: normal(d).to_sparse_csr(), TypeError, ("input", "sparse", "dense")),
    "nested": (
        lambda d: torch.nested.nested_tensor([normal(d)], layout=torch.jagged),
        TypeError,
        ("NestedTensor", "plain"),
    ),
}

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta", "ignore:The PyTorch API of nested tensors"
)


def region(recipe):
    return te.autocast(enabled=recipe is not None, recipe=recipe and RECIPES[recipe]())


@pytest.fixture(params=[None, "delayed", "current"])
def recipe(request):
    return request.param


MODULES = [te.Linear, te.LayerNormLinear, te.LayerNormMLP]


@pytest.fixture
def make():
    """The module under test."""
    return te.Linear


@pytest.fixture
def used(device, recipe, make):
    """A layer after a step, and what must not change."""
    layer = make(IN, OUT, device=device)
    with region(recipe):
        out = layer(normal(device).requires_grad_())
    out.sum().backward()
    return layer


def untouched(layer):
    """What a failed call must leave alone."""
    parameters = list(layer.parameters())
    return [
        state_of(layer),
        [p.detach().clone() for p in parameters],
        [p.grad.clone() for p in parameters],
    ]


NO_GRADIENT = ("list", "none", "int64", "bool", "complex")
READ_BY_NORMS = ("float16", "float64")  # of another dtype than the weights
INPUTS = [
    (m, w, g)
    for m in MODULES
    for w in WRONG
    for g in (False, True)
    if not (g and (w in NO_GRADIENT or m is not te.Linear))
    and not (w in READ_BY_NORMS and m is not te.Linear)
]


@pytest.mark.parametrize(("make", "wrong", "needs_grad"), INPUTS)
def test_wrong_input(device, used, recipe, wrong, needs_grad):
    make, exception, parts = WRONG[wrong]
    value = make(device)
    if needs_grad:
        value.requires_grad_()
    before = untouched(used)
    with counted() as gemms:
        with region(recipe):
            owed = current_state().owes_update
            with pytest.raises(exception) as caught:
                used(value)
            assert current_state().owes_update == owed  # the next module is the first one
            # Leave by an exception: this region is not to update anything.
            assert_same_bits(untouched(used), before)
    assert gemms.fp8 == gemms.other == 0
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("wrong", ["shape", "complex", "meta", "sparse", "wrapper"])
@pytest.mark.parametrize("make", MODULES)
def test_the_next_call_is_not_upset(device, recipe, wrong, make):
    """A step with a failed call inside has the bits of a step without."""
    layer = make(IN, OUT, device=device)
    bad = WRONG[wrong][0](device)
    x = normal(device)
    results = []
    for fails in (False, True):
        te.reset()
        layer.zero_grad()
        with region(recipe):
            if fails:
                with pytest.raises(WRONG[wrong][1]):
                    layer(bad)
            out = layer(x.clone().requires_grad_())
        out.sum().backward()
        grads = [p.grad.clone() for p in layer.parameters()]
        results.append([out.detach(), grads, state_of(layer)])
    assert_same_bits(*results)


@pytest.mark.parametrize("make", MODULES)
def test_module_of_a_dtype_that_no_gemm_has(device, recipe, make):
    dtype = torch.float64
    layer = make(IN, OUT, device=device, params_dtype=dtype)
    with (
        region(recipe),
        pytest.raises(TypeError, match=f"(inp|output) is {dtype}, expected torch.float32"),
    ):
        layer(torch.ones(ROWS, IN, device=device, dtype=dtype))
    layer.float()
    with counted() as gemms, region(recipe):
        layer(normal(device))
    assert (gemms.fp8 if recipe else gemms.other) == (2 if make is te.LayerNormMLP else 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
@pytest.mark.parametrize("make", MODULES)
def test_input_dtype_under_torch_autocast(device, dtype, make):
    """In high precision autocast converts it; FP8 casts the input as it is."""
    layer = make(IN, OUT, device=device)
    x = torch.ones(ROWS, IN, device=device, dtype=dtype)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
        with region("current"), pytest.raises(TypeError, match=f"inp is {dtype}, expected"):
            layer(x)


@pytest.mark.parametrize("make", MODULES)
def test_module_on_the_meta_device(device, recipe, make):
    layer = make(IN, OUT, device="meta")
    name = "weight" if make is te.Linear else "gamma"
    with region(recipe), pytest.raises(TypeError, match=f"{name}: it has no memory to read"):
        layer(normal(device))


@pytest.mark.parametrize("kind", ["sparse", "wrapper"])
@pytest.mark.parametrize("make", MODULES)
def test_wrong_gradient(device, used, recipe, kind):
    """The backward of another function hands over something that can not be read."""
    columns = IN if isinstance(used, te.LayerNormMLP) else OUT

    class Hand(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            grad = torch.ones(ROWS, columns, device=device)
            return grad.to_sparse() if kind == "sparse" else TwoTensor(grad, grad.clone())

    with region(recipe):
        out = Hand.apply(used(normal(device).requires_grad_()))
    before = untouched(used)
    text = "grad_output: .*sparse" if kind == "sparse" else "TwoTensor"
    with counted() as gemms, pytest.raises(TypeError, match=text):
        out.sum().backward()
    assert gemms.fp8 == gemms.other == 0
    assert_same_bits(untouched(used), before)


def test_labels_are_no_wrappers(device, recipe):
    """A subclass without a dispatch of its own is a plain tensor with another name."""

    class Label(torch.Tensor):
        pass

    layer = te.Linear(IN, OUT, device=device)
    x = normal(device)
    with region(recipe):
        expected = layer(x)
    te.reset()
    with counted() as gemms, region(recipe):
        out = layer(x.as_subclass(Label))
    assert (gemms.fp8 if recipe else gemms.other) == 1
    assert_same_bits(out.as_subclass(torch.Tensor), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("where", [("cpu", "cuda"), ("cuda", "cpu")], ids=str)
@pytest.mark.parametrize("make", MODULES)
def test_mixed_devices(where, recipe, make):
    layer = make(IN, OUT, device=where[0])
    with region(recipe), pytest.raises((TypeError, ValueError), match="cpu.*cuda|cuda.*cpu"):
        layer(normal(where[1]))
    with counted() as gemms, region(recipe):
        layer(normal(where[0]))
    assert (gemms.fp8 if recipe else gemms.other) == (2 if make is te.LayerNormMLP else 1)


def test_recipe_of_a_wrong_type_inside_a_region(device):
    layer = te.Linear(IN, OUT, device=device)
    with te.autocast(recipe=RECIPES["delayed"]()):
        with pytest.raises(TypeError, match="recipe: dict object, expected a recipe"):
            te.autocast(recipe={"margin": 0})
        with counted() as gemms:
            layer(normal(device))
    assert gemms.fp8 == 1


def test_backward_under_a_closed_context_is_made_again(device, used, recipe):
    """The module's own contexts come back when they are needed."""
    from transformer_engine import _core

    x = normal(device).requires_grad_()
    with region(recipe):
        out = used(x)
    _core.close_contexts()
    with counted() as gemms:
        out.sum().backward()
    assert (gemms.fp8 if recipe else gemms.other) == 2 and x.grad.isfinite().all()
