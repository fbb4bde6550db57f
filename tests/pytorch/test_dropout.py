# SPDX-License-Identifier: Apache-2.0
"""bias_dropout_add: values, decisions, gradients, random state."""

import attention_reference as reference
import pytest
import torch
from comparators import assert_grad64, assert_within
from device_kinds import every_device
from pytorch.helpers import assert_same_bits, random_of
from tols import BF16, F16, F32, tol

from transformer_engine.pytorch.execution.random import draw_pair
from transformer_engine.pytorch.layer.dropout import bias_dropout_add

pytestmark = every_device

SHAPE = (4, 6, 20)
ROWS = 24


def make(device, dtype=F32, shape=SHAPE):
    """(input, bias, residual) that want gradients."""
    sizes = (shape, shape[-1:], shape)
    return [torch.randn(s).to(device, dtype).requires_grad_() for s in sizes]


def drawn(device, function):
    """(pair, result) of a function that draws one pair, which is drawn before in its place."""
    state = random_of(device).get_rng_state()
    pair = draw_pair(torch.empty(0, device=device))
    random_of(device).set_rng_state(state)
    return pair.tolist(), function()


def factors(pair, dropout, drop_path, shape=SHAPE):
    """What dropout and drop path multiply by, together."""
    rows = shape[:-1].numel() if isinstance(shape, torch.Size) else torch.Size(shape[:-1]).numel()
    matrix = (rows, shape[-1])
    kept = reference.drop_factors(pair, matrix, dropout)
    if drop_path > 0:
        kept = kept * reference.path_factors(pair, matrix, drop_path, shape[0])
    return kept.view(shape)


def definition(kept):
    def f(inp, bias=None, residual=None):
        out = inp if bias is None else inp + bias
        out = out * kept
        return out if residual is None else out + residual

    return f


GIVEN = {
    "all": (True, True),
    "no-bias": (False, True),
    "no-residual": (True, False),
    "input-only": (False, False),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize(
    ("dropout", "drop_path"), [(0.3, 0.0), (0.0, 0.5), (0.25, 0.4), (1.0, 0.0), (0.0, 0.0)]
)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
def test_values_and_gradients(device, dtype, dropout, drop_path, given):
    inp, bias, residual = make(device, dtype)
    tensors = {"inp": inp, "bias": bias, "residual": residual}
    for name, there in zip(("bias", "residual"), GIVEN[given], strict=True):
        if not there:
            del tensors[name]
    arguments = (inp, tensors.get("bias"), tensors.get("residual"), dropout, drop_path)
    pair, out = drawn(device, lambda: bias_dropout_add(*arguments))
    kept = factors(pair, dropout, drop_path)
    exact = {name: t.detach().cpu().double() for name, t in tensors.items()}
    f = definition(kept)
    assert out.dtype == dtype and out.shape == inp.shape
    assert_within(out, f(**exact), f(**{name: t.abs() for name, t in exact.items()}))

    grad = torch.randn(SHAPE).to(device, dtype)
    grads = torch.autograd.grad(out, tensors.values(), grad)
    found = dict(zip(tensors, grads, strict=True))
    bound = tol("round", dtype) + tol("sum", F32, ROWS)
    assert_grad64(found, f, tensors, grad, bound)
    if "residual" in found:
        assert_same_bits(found["residual"], grad)


def test_one_operator_and_no_mask(device, counters):
    """The forward is one operator, so is the backward; what is saved for it is the pair."""
    inp, bias, residual = make(device)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = bias_dropout_add(inp, bias, residual, 0.1)
    out.sum().backward()
    assert counters() == {f"op.{device}.dropout_add": 1, f"op.{device}.dropout_backward": 1}
    assert [(t.dtype, tuple(t.shape)) for t in saved] == [(torch.int64, (2,))]


def test_nothing_dropped_is_one_add(device, counters):
    inp, bias, residual = make(device)
    out = bias_dropout_add(inp, None, residual)
    assert_same_bits(out, inp + residual)
    assert_same_bits(bias_dropout_add(inp, None, residual, 0.5, 0.5, training=False), out)
    assert counters() == {}
    bias_dropout_add(inp, bias, residual).sum().backward()
    assert counters()[f"op.{device}.dropout_add"] == 1
    empty = torch.empty(0, device=device)
    assert_same_bits(bias_dropout_add(inp, empty, residual), out)


def test_eval_keeps_everything_and_draws_nothing(device):
    inp, bias, residual = make(device)
    state = random_of(device).get_rng_state()
    out = bias_dropout_add(inp, bias, residual, 0.5, 0.5, training=False)
    exact = [t.detach().cpu().double() for t in (inp, bias, residual)]
    assert_within(out, sum(exact), sum(t.abs() for t in exact))
    after = random_of(device).get_rng_state()
    assert torch.equal(state, after)


def test_one_seed_one_result_and_calls_differ(device):
    inp, bias, residual = make(device)
    seed = int(torch.randint(2**31, ()))

    def run():
        return bias_dropout_add(inp, bias, residual, 0.5)

    torch.manual_seed(seed)
    first, second = run(), run()
    torch.manual_seed(seed)
    assert_same_bits([run(), run()], [first, second])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_share_of_dropped_elements(device, probability):
    ones = torch.ones(64, 1024, device=device)
    dropped = int((bias_dropout_add(ones, None, None, probability) == 0).sum())
    deviation = (ones.numel() * probability * (1 - probability)) ** 0.5
    assert abs(dropped - ones.numel() * probability) <= 6 * deviation


def test_drop_path_decides_by_sample(device):
    ones = torch.ones(200, 3, 4, device=device)
    out = bias_dropout_add(ones, None, None, drop_path=0.5).cpu()
    assert (out == out[:, :1, :1]).all()
    assert set(out.unique().tolist()) == {0.0, 2.0}


def test_dtypes_are_promoted(device):
    """A branch in 16 bits on a residual stream in fp32, as under torch.autocast."""
    inp, bias, _ = make(device, BF16)
    residual = torch.randn(SHAPE, device=device, requires_grad=True)
    out = bias_dropout_add(inp, bias, residual)
    assert out.dtype == F32
    out.sum().backward()
    assert (inp.grad.dtype, bias.grad.dtype, residual.grad.dtype) == (BF16, BF16, F32)
    assert bias_dropout_add(inp, None, residual).dtype == F32


def test_layouts_and_empty(device):
    inp, bias, residual = make(device)
    turned = residual.detach().transpose(0, 1).contiguous().transpose(0, 1)
    expanded = torch.randn(1, 1, SHAPE[2], device=device).expand(SHAPE)
    for other in (turned, expanded):
        expected = bias_dropout_add(inp, bias, other.contiguous())
        assert_same_bits(bias_dropout_add(inp, bias, other), expected)
    nothing = torch.empty(0, 3, 8, device=device, requires_grad=True)
    bias = torch.zeros(8, device=device, requires_grad=True)
    out = bias_dropout_add(nothing, bias, nothing, 0.1, 0.1)
    out.sum().backward()
    assert out.shape == nothing.shape and bias.grad.tolist() == [0.0] * 8


def test_frozen_inputs(device):
    inp, bias, residual = make(device)
    bias_dropout_add(inp.detach(), bias, residual.detach(), 0.2).sum().backward()
    assert bias.grad is not None and inp.grad is None
    bias.grad = None
    bias_dropout_add(inp, bias.detach(), None, 0.2).sum().backward()
    assert inp.grad is not None and bias.grad is None


def test_second_derivative_is_an_error(device):
    inp, bias, residual = make(device)
    (grad,) = torch.autograd.grad(
        bias_dropout_add(inp, bias, residual, 0.2).square().sum(), inp, create_graph=True
    )
    with pytest.raises(NotImplementedError, match="add: a second derivative is not supported"):
        grad.sum().backward()


def test_compiled_equals_eager(device):
    inp, bias, residual = make(device)

    def f(inp, bias, residual):
        return bias_dropout_add(inp, bias, residual, 0.3, 0.2)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    seed = int(torch.randint(2**31, ()))
    results = []
    for function in (f, compiled):
        torch.manual_seed(seed)
        out = function(inp, bias, residual)
        results.append([out, *torch.autograd.grad(out.square().sum(), (inp, bias, residual))])
    assert_same_bits(*results)


def test_pair_is_on_the_device_and_never_negative(device):
    pairs = [draw_pair(torch.empty(0, device=device)) for _ in range(8)]
    assert all(p.device.type == device and p.dtype == torch.int64 for p in pairs)
    assert all((p >= 0).all() for p in pairs)
    assert len({tuple(p.tolist()) for p in pairs}) == 8


def test_operator_is_tagged_as_random():
    tags = torch.ops.transformer_engine.draw_pair.default.tags
    assert torch.Tag.nondeterministic_seeded in tags
