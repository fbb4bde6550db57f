# SPDX-License-Identifier: Apache-2.0
"""`LayerNorm`, `RMSNorm` and the norm without parameters: values, options, errors, compilers."""

import copy
import math
import pickle

import layer_reference
import pytest
import torch
from comparators import assert_grad64, assert_nmse
from device_kinds import every_device, our_kernels
from layer_reference import wide
from pytorch.helpers import assert_same_bits
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.module.norm import L2Normalization

pytestmark = every_device

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NORMS = {"layernorm": te.LayerNorm, "rmsnorm": te.RMSNorm}


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def make(kind, shape, device, **options):
    norm = NORMS[kind](shape, device=device, **options)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.25)
    return norm


def definition(norm, kind):
    """The norm as a function of float64 tensors by name."""
    size = math.prod(norm.normalized_shape)

    def of(x, weight, bias=None):
        gamma = weight.reshape(size) + float(norm.zero_centered_gamma)
        beta = torch.zeros_like(gamma) if bias is None else bias.reshape(size)
        return layer_reference.norm(kind, x.reshape(-1, size), gamma, beta, norm.eps).reshape(
            x.shape
        )

    return of


def step(norm, x, grad):
    """Forward and backward: (output, gradients by name)."""
    norm.zero_grad()
    inp = x.detach().clone().requires_grad_()
    out = norm(inp)
    out.backward(grad)
    return out.detach(), {"x": inp.grad} | {n: p.grad for n, p in norm.named_parameters()}


@pytest.fixture(params=NORMS)
def kind(request):
    return request.param


# ---- values --------------------------------------------------------------------------------------


AFFINE = {"no bias": {"bias": False}, "not affine": {"elementwise_affine": False}}


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("options", AFFINE)
@pytest.mark.parametrize("shape", [(96,), (17,), (3, 5, 8)], ids=str)
def test_without_parameters(device, kind, dtype, options, shape):
    """As torch.nn's: values and gradients in float64, names, repr and state dict."""
    options = AFFINE[options]
    if kind == "rmsnorm" and "bias" in options:
        with pytest.raises(TypeError, match="bias=True.*te.LayerNorm"):
            te.RMSNorm(8, bias=True)
        return
    norm = make(kind, shape, device, dtype=dtype, eps=1e-3, **options)
    theirs = {"layernorm": torch.nn.LayerNorm, "rmsnorm": torch.nn.RMSNorm}[kind]
    exact = theirs(shape, eps=1e-3, dtype=torch.float64, **options)
    assert dict(exact.named_parameters()).keys() == dict(norm.named_parameters()).keys()
    assert exact.state_dict().keys() == norm.state_dict().keys()
    assert exact._parameters.keys() == norm._parameters.keys()
    exact.load_state_dict({n: wide(t) for n, t in norm.state_dict().items()})
    text = "elementwise_affine=False" if norm.weight is None else "bias=False"
    assert text in repr(norm)
    assert copy.deepcopy(norm)(torch.ones(shape, device=device, dtype=dtype)).shape == shape
    x = torch.randn(24, *shape, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    out, grads = step(norm, x, grad)
    inp = wide(x).requires_grad_()
    result = exact(inp)
    result.backward(wide(grad))
    wanted = {"x": inp.grad} | {n: p.grad for n, p in exact.named_parameters()}
    assert grads.keys() == wanted.keys()
    assert_nmse(out, result.detach(), tol("chain", dtype, 24))
    for name, found in grads.items():
        assert_nmse(found, wanted[name], tol("chain", dtype, 24))
    with torch.no_grad():
        assert_same_bits(norm(x), out)


@our_kernels
@pytest.mark.parametrize("options", AFFINE)
def test_without_parameters_compiled(device, options):
    norm = te.LayerNorm(40, device=device, **AFFINE[options])
    x, grad = torch.randn(8, 40, device=device), torch.randn(8, 40, device=device)
    expected = step(norm, x, grad)
    compiled = torch.compile(norm, fullgraph=True, backend="aot_eager")
    inp = x.clone().requires_grad_()
    out = compiled(inp)
    norm.zero_grad()
    out.backward(grad)
    assert_same_bits([out.detach(), inp.grad], [expected[0], expected[1]["x"]])


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_rmsnorm_without_eps(device, dtype):
    """eps=None is the precision of fp32, for every dtype, as torch computes it."""
    norm = te.RMSNorm(64, eps=None, device=device, dtype=dtype)
    assert norm.eps is None and "eps=None" in repr(norm)
    x = torch.randn(8, 64, device=device, dtype=dtype) * 2.0**-12  # so small that eps counts
    same = te.RMSNorm(64, eps=torch.finfo(torch.float32).eps, device=device, dtype=dtype)
    assert_same_bits(norm(x), same(x))
    assert_nmse(norm(x), torch.nn.RMSNorm(64).to(x)(x), tol("chain", dtype, 64))


def test_parameters_taken_away(device):
    """As in torch.nn, a parameter that is set to None is left out."""
    norm = make("layernorm", (32,), device)
    x = torch.randn(4, 32, device=device)
    norm(x)
    norm.bias = None
    whole = te.LayerNorm(32, bias=False, device=device)
    whole.weight = norm.weight
    assert_same_bits(norm(x), whole(x))
    norm.weight = None
    assert_same_bits(norm(x), te.LayerNorm(32, elementwise_affine=False, device=device)(x))
    norm.bias = torch.nn.Parameter(torch.ones(32, device=device))
    with pytest.raises(ValueError, match="weight is None and bias is not"):
        norm(x)


@pytest.mark.parametrize("eps", [float("nan"), -1e-5, float("inf"), "1e-5", None, True])
@pytest.mark.parametrize(
    "make_one",
    [
        lambda eps: te.LayerNorm(8, eps),
        lambda eps: te.RMSNorm(8, eps="None" if eps is None else eps),  # None: see above
        lambda eps: te.LayerNormLinear(8, 8, eps),
        lambda eps: te.LayerNormMLP(8, 8, eps=eps),
        lambda eps: te.TransformerLayer(32, 32, 2, layernorm_epsilon=eps),
        lambda eps: L2Normalization(eps),
    ],
)
def test_wrong_eps(make_one, eps):
    with pytest.raises((TypeError, ValueError), match=r"eps=.*expected a .*1e-5"):
        make_one(eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("centred", [False, True], ids=["", "zero-centred"])
@pytest.mark.parametrize("shape", [(96,), (17,), (1,), (3, 5, 8)], ids=str)
@pytest.mark.parametrize("leading", [(24,), (5, 2, 3)], ids=str)
def test_values_and_gradients(device, kind, dtype, centred, shape, leading):
    norm = make(kind, shape, device, dtype=dtype, zero_centered_gamma=centred, eps=1e-3)
    x = torch.randn(*leading, *shape, device=device, dtype=dtype)
    grad = torch.randn_like(x)
    for _ in range(2):
        _core.reset_counters()
        out, grads = step(norm, x, grad)
        ran = {n.rpartition(".")[2]: c for n, c in _core.counters().items() if n.startswith("op.")}
        assert ran == {"norm": 1, "norm_backward": 1}
        inputs = {"x": x} | dict(norm.named_parameters())
        bound = tol("chain", dtype, math.prod(leading))
        exact = definition(norm, kind)(**{n: wide(t) for n, t in inputs.items()})
        assert out.dtype == dtype and out.shape == x.shape
        assert_nmse(out, exact, bound)
        assert all(g.dtype == dtype for g in grads.values())
        if shape == (1,):  # gradients of one number may cancel to nearly nothing
            continue
        assert_grad64(grads, definition(norm, kind), inputs, grad, bound)


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
@pytest.mark.parametrize("leading", [(24,), (5, 2, 3)], ids=str)
def test_l2(device, dtype, leading):
    norm = L2Normalization(eps=1e-4)
    assert not list(norm.parameters()) and repr(norm) == "L2Normalization(eps=0.0001)"
    x = torch.randn(*leading, 40, device=device, dtype=dtype)
    grad = torch.randn_like(x)

    def of(x):
        flat = x.reshape(-1, 40)
        one, zero = torch.ones(40).double(), torch.zeros(40).double()
        return layer_reference.norm("l2", flat, one, zero, 1e-4).reshape(x.shape)

    out, grads = step(norm, x, grad)
    assert out.dtype == dtype
    assert_nmse(out, of(wide(x)), tol("chain", dtype, 40))
    assert_grad64(grads, of, {"x": x}, grad, tol("chain", dtype, 40))
    with pytest.raises(TypeError, match=r"unknown options \['gain'\]"):
        L2Normalization(gain=2.0)


def test_near_torch(device, kind):
    """The functions that users come from."""
    norm = make(kind, 64, device)
    x = torch.randn(24, 64, device=device)
    if kind == "layernorm":
        expected = torch.nn.functional.layer_norm(x, (64,), norm.weight, norm.bias, norm.eps)
    else:
        expected = torch.nn.functional.rms_norm(x, (64,), norm.weight, norm.eps)
    assert_nmse(norm(x), expected.double(), 2 * tol("chain", torch.float32, 64))


@pytest.mark.parametrize("leading", [(0,), (2, 0)], ids=str)
def test_zero_tokens(device, kind, leading):
    norm = make(kind, 32, device)
    x = torch.randn(*leading, 32, device=device)
    out, grads = step(norm, x, torch.randn_like(x))
    assert out.shape == x.shape and grads["x"].shape == x.shape
    assert all((grads[n] == 0).all() for n, _ in norm.named_parameters())


LAYOUTS = {
    "transposed": lambda t: t.t().contiguous().t(),
    "every-second-column": lambda t: t.repeat_interleave(2, 1)[:, ::2],
    "row-slice": lambda t: torch.cat([t, t])[::2],
    "column-slice": lambda t: torch.cat([t, t, t], 1)[:, t.shape[1] : 2 * t.shape[1]],
    "expanded-rows": lambda t: t[:1].expand(t.shape),
    "offset-by-one": lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape),
    "flipped-3d": lambda t: t.view(4, -1, t.shape[1]).transpose(0, 1),
    "negative": lambda t: torch._neg_view(t),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(30,), (5, 6)], ids=str)
def test_strides(device, kind, layout, shape):
    """Any layout of the input and of the gradient gives the bits of contiguous copies."""
    norm = make(kind, shape, device, dtype=torch.bfloat16)
    odd = [LAYOUTS[layout](torch.randn(24, 30, device=device).bfloat16()) for _ in range(2)]
    results = []
    for x, grad in (odd, [t.resolve_neg().contiguous() for t in odd]):
        full = (*x.shape[:-1], *shape)
        out, grads = step(norm, x.reshape(full) if len(shape) > 1 else x, grad.reshape(full))
        results.append([out, {n: g.contiguous() for n, g in grads.items()}])
    assert_same_bits(*results)


@pytest.mark.parametrize(
    "needs", [(x, w, b) for x in (0, 1) for w in (0, 1) for b in (0, 1)], ids=str
)
def test_wanted_gradients(device, needs):
    norm = make("layernorm", 32, device)
    x, grad = (torch.randn(24, 32, device=device) for _ in range(2))
    _, everything = step(norm, x, grad)
    norm.zero_grad()
    norm.weight.requires_grad_(bool(needs[1]))
    norm.bias.requires_grad_(bool(needs[2]))
    inp = x.requires_grad_(bool(needs[0]))
    out = norm(inp)
    assert out.requires_grad == any(needs)
    if any(needs):
        out.backward(grad)
    for name, tensor, needed in zip(
        ("x", "weight", "bias"), (inp, norm.weight, norm.bias), needs, strict=True
    ):
        if needed:
            assert_same_bits(tensor.grad, everything[name])
        else:
            assert tensor.grad is None


def test_without_gradients(device, kind):
    norm = make(kind, 32, device)
    x = torch.randn(24, 32, device=device, requires_grad=True)
    expected = norm(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out = norm(x)
        assert not out.requires_grad
        assert_same_bits(out.clone(), expected.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=dtype_id)
def test_torch_autocast(device, kind, dtype):
    """Parameters in fp32, the result in the dtype of autocast, gradients in the parameters'."""
    norm = make(kind, 32, device)
    x = torch.randn(24, 32, device=device)
    grad = torch.randn(24, 32, device=device, dtype=dtype)
    with torch.autocast(device, dtype=dtype):
        out, grads = step(norm, x, grad)
    assert out.dtype == dtype and {g.dtype for g in grads.values()} == {torch.float32}
    inputs = {"x": x} | dict(norm.named_parameters())
    exact = definition(norm, kind)(**{n: wide(t) for n, t in inputs.items()})
    assert_nmse(out, exact, tol("chain", dtype, 24))
    assert_grad64(grads, definition(norm, kind), inputs, grad, tol("chain", dtype, 24))


def test_fp8_regions_change_nothing(device, kind):
    norm = make(kind, 32, device)
    x = torch.randn(24, 32, device=device)
    expected = norm(x)
    with te.autocast():
        assert_same_bits(norm(x), expected)


# ---- parameters ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [48, (48,), [3, 16], torch.Size([2, 24])], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "no-bias"])
def test_state_dicts_of_torch(device, shape, affine):
    """A torch.nn.LayerNorm's loads with strict=True, and back; an RMSNorm's likewise."""
    ours, theirs = (te.LayerNorm, torch.nn.LayerNorm) if affine else (te.RMSNorm, torch.nn.RMSNorm)
    norm, plain = ours(shape, device=device), theirs(shape, device=device)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.normal_()
    norm.load_state_dict(plain.state_dict(), strict=True)
    x = torch.randn(4, *norm.normalized_shape, device=device)
    if not affine:
        plain.eps = norm.eps
    assert_nmse(norm(x), plain(x).double(), 2 * tol("chain", torch.float32, 48))
    back = theirs(shape, device=device)
    back.load_state_dict(norm.state_dict(), strict=True)
    assert_same_bits(dict(back.named_parameters()), dict(plain.named_parameters()))
    assert norm.state_dict().keys() == plain.state_dict().keys()


@our_kernels
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("how", ["reset", "to_empty"])
def test_meta_device(device, kind, centred, how):
    norm = NORMS[kind]((4, 8), zero_centered_gamma=centred, sequence_parallel=True, device="meta")
    assert {p.device.type for p in norm.parameters()} == {"meta"}
    norm.weight.mark = "kept"
    norm.reset_parameters(defer_init=True)
    assert norm.weight.is_meta
    if how == "to_empty":
        norm.to_empty(device=device)
    norm.reset_parameters()
    assert how == "to_empty" or norm.weight.mark == "kept"
    home = device if how == "to_empty" else "cuda" if torch.cuda.is_available() else "cpu"
    assert {p.device.type for p in norm.parameters()} == {home}
    assert (norm.weight == float(not centred)).all()
    assert kind == "rmsnorm" or (norm.bias == 0).all()
    assert all(p.sequence_parallel is True for p in norm.parameters())
    assert norm.to(device)(torch.randn(3, 4, 8, device=device)).isfinite().all()


@our_kernels
def test_older_names_and_defaults(device, kind):
    make_one = NORMS[kind]
    assert make_one(hidden_size=8, device=device).normalized_shape == (8,)
    assert make_one(8, params_dtype=torch.float16, device=device).weight.dtype == torch.float16
    assert make_one(8, dtype=torch.bfloat16, device=device).weight.dtype == torch.bfloat16
    norm = make_one(8)
    home = "cuda" if torch.cuda.is_available() else "cpu"
    assert norm.weight.device.type == home and norm.eps == 1e-5
    assert not hasattr(norm.weight, "sequence_parallel")
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert make_one(8, device=device).weight.dtype == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
    make_one(8, sm_margin={"forward": 0, "backward": 0}, device=device)
    shown = repr(make_one((3, 4), eps=0.5, zero_centered_gamma=True, device=device))
    for part in ("(3, 4)", "eps=0.5", "zero_centered_gamma=True"):
        assert part in shown


def test_settings_changed_after_calls(device, kind):
    """They count from the next call on."""
    norm = make(kind, 32, device)
    x = torch.randn(24, 32, device=device)
    norm(x)
    for name, value in (("eps", 0.5), ("zero_centered_gamma", True)):
        setattr(norm, name, value)
        inputs = {"x": x} | dict(norm.named_parameters())
        exact = definition(norm, kind)(**{n: wide(t) for n, t in inputs.items()})
        assert_nmse(norm(x), exact, tol("chain", torch.float32, 32))


def test_lives(device, kind):
    """Copies, other dtypes, reassigned and shared parameters, functional calls."""
    norm = make(kind, 32, device)
    x, grad = (torch.randn(24, 32, device=device) for _ in range(2))
    expected = step(norm, x, grad)
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert_same_bits(step(twin, x, grad), expected)
    other = make(kind, 32, device)
    values = dict(norm.named_parameters())
    assert_same_bits(torch.func.functional_call(other, values, (x,)), expected[0])
    other.weight = norm.weight
    if kind == "layernorm":
        other.bias = norm.bias
    assert_same_bits(step(other, x, grad), expected)
    assert other.weight.grad is norm.weight.grad
    made = make(kind, 32, device, dtype=torch.bfloat16)
    norm.bfloat16()
    made.load_state_dict(norm.state_dict())
    data = x.bfloat16(), grad.bfloat16()
    assert_same_bits(step(norm, *data), step(made, *data))


# ---- autograd and compilers ----------------------------------------------------------------------


@pytest.mark.parametrize("loss", [torch.Tensor.square, torch.Tensor.clone], ids=["square", "sum"])
def test_double_backward_is_a_clear_error(device, kind, loss):
    """Also where the output's gradient is a constant: the input's depends on the input."""
    x = torch.randn(4, 32, device=device, requires_grad=True)
    out = make(kind, 32, device)(x)
    (dx,) = torch.autograd.grad(loss(out).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative is not supported"):
        dx.sum().backward()


@pytest.mark.parametrize("grad", [True, False])
def test_jit_trace_is_refused(device, kind, grad):
    """It would record the output as a constant."""
    module = make(kind, 32, device)
    with torch.set_grad_enabled(grad), pytest.raises(NotImplementedError, match="jit.trace"):
        torch.jit.trace(module, torch.randn(4, 32, device=device))


def test_changes_in_place_before_the_backward_are_detected(device, kind):
    norm = make(kind, 32, device)
    for name in ("weight", "input"):
        x = torch.randn(4, 32, device=device, requires_grad=True) * 1
        out = norm(x)
        with torch.no_grad():
            (x if name == "input" else norm.weight).add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@our_kernels
@pytest.mark.parametrize("name", ["layernorm", "rmsnorm", "l2", "multi-dim"])
@pytest.mark.parametrize(
    "options",
    [{"backend": "aot_eager"}, pytest.param({}, marks=pytest.mark.gpu, id="inductor")],
)
def test_compile(device, name, options):
    """One graph with the bits of eager mode; other token counts make no new ones."""
    if device == "cpu" and not options:
        pytest.skip("Inductor on a CPU needs a C++ compiler")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    shape = (4, 8) if name == "multi-dim" else (32,)
    norm = (
        L2Normalization()
        if name == "l2"
        else make(name if name in NORMS else "layernorm", shape, device)
    )
    compiled = torch.compile(norm, fullgraph=True, **options)
    for number, tokens in enumerate((16, 24, 33, 5)):
        torch._dynamo.config.error_on_recompile = number >= 2
        x = torch.randn(tokens, *shape, device=device)
        results = []
        for forward in (norm, compiled):
            norm.zero_grad()
            inp = x.clone().requires_grad_()
            out = forward(inp)
            out.square().sum().backward()
            results.append([out.detach(), inp.grad, [p.grad.clone() for p in norm.parameters()]])
        assert_same_bits(*results)
    torch._dynamo.config.error_on_recompile = False
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


# ---- errors --------------------------------------------------------------------------------------


def test_wrong_arguments(kind):
    make_one = NORMS[kind]
    for both in ({}, {"normalized_shape": 8, "hidden_size": 8}):
        with pytest.raises(RuntimeError, match="normalized_shape=.* hidden_size=.*exactly one"):
            make_one(**both, device="cpu")
    with pytest.raises(ValueError, match="dtype=torch.float16 and params_dtype=torch.float32"):
        make_one(8, dtype=torch.float16, params_dtype=torch.float32, device="cpu")
    for shape in (0, (), (4, -1)):
        with pytest.raises(ValueError, match="normalized_shape=.*expected positive sizes"):
            make_one(shape, device="cpu")
    for margin in (4, {"forward": 0, "backward": 2}):
        with pytest.raises(NotImplementedError, match="sm_margin="):
            make_one(8, sm_margin=margin, device="cpu")


WRONG = {
    "list": (lambda d: [1.0] * 32, TypeError, "inp: list, expected a tensor"),
    "scalar": (
        lambda d: torch.tensor(1.0, device=d),
        ValueError,
        r"shape \(\), expected \[..., 32\]",
    ),
    "shape": (
        lambda d: torch.ones(4, 31, device=d),
        ValueError,
        r"\(4, 31\), expected \[..., 32\]",
    ),
    "int64": (
        lambda d: torch.ones(4, 32, device=d).long(),
        TypeError,
        "inp is torch.int64.*float32",
    ),
    "meta": (lambda d: torch.ones(4, 32, device="meta"), TypeError, "meta"),
    "sparse": (lambda d: torch.ones(4, 32, device=d).to_sparse(), TypeError, "sparse"),
}


@our_kernels
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_inputs(device, kind, wrong):
    given, exception, text = WRONG[wrong]
    norm = make(kind, 32, device)
    with pytest.raises(exception, match=text):
        norm(given(device))
    assert norm(torch.randn(4, 32, device=device)).isfinite().all()


def test_dtypes_that_no_operator_has(device, kind):
    norm = make(kind, 32, device, dtype=torch.float64)
    with pytest.raises(TypeError, match="inp is torch.float64, expected torch.float32"):
        norm(torch.ones(4, 32, device=device, dtype=torch.float64))
    with pytest.raises(TypeError, match="inp is torch.int64, expected torch.float32"):
        L2Normalization()(torch.ones(4, 32, device=device, dtype=torch.int64))
    with pytest.raises((TypeError, ValueError)):
        L2Normalization()(torch.tensor(1.0, device=device))
