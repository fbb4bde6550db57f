# SPDX-License-Identifier: Apache-2.0
"""`watch_finite` names the first module and tensor that is not finite; `find_nonfinite` what is."""

import pytest
import torch
from pytorch.helpers import assert_same_bits
from torch import nn
from torch.utils.checkpoint import checkpoint

import transformer_engine.pytorch as te


class Root(torch.autograd.Function):
    """A function whose backward makes what is planted in it."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad.reshape(-1)[3] = ctx.value
        return grad, None


class Planted(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return Root.apply(x, self.value)


class Block(nn.Module):
    """A residual block of this package or of torch, with code between its modules."""

    def __init__(self, linear, between=None):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.first = linear(16, 16)
        self.second = linear(16, 16)
        self.between = between or (lambda h: h.relu())

    def forward(self, x, *, mask=None):
        h = self.between(self.first(self.norm(x)))
        h = self.second(h)
        return {"out": x + h if mask is None else x + h + mask.clamp(min=0.0)}


class Model(nn.Module):
    def __init__(self, linear=nn.Linear, between=None):
        super().__init__()
        self.blocks = nn.ModuleList([Block(linear), Block(linear, between)])
        self.head = linear(16, 8)

    def forward(self, x, mask=None):
        for block in self.blocks:
            x = block(x, mask=mask)["out"]
        return self.head(x)


def ours(device):
    return lambda *sizes: te.Linear(*sizes, device=device)


@pytest.fixture(params=["torch", "te", "te-fp8"])
def kind(request):
    return request.param


@pytest.fixture
def make(kind, device):
    def make(between=None):
        linear = nn.Linear if kind == "torch" else ours(device)
        return Model(linear, between).to(device)

    return make


@pytest.fixture
def step(kind, device):
    def step(model, loss=torch.Tensor.sum, **arguments):
        x = torch.randn(4, 16, device=device, requires_grad=True)
        with te.autocast(enabled=kind == "te-fp8"):
            out = model(x, **arguments)
        loss(out).backward()

    return step


def found(model, step, **arguments):
    """What is found, which is the same whether it raises or not."""
    seed = torch.get_rng_state()
    with pytest.raises(te.NonFiniteError) as error, te.watch_finite(model):
        step(model, **arguments)
    finding = error.value.finding
    assert str(finding) == str(error.value)
    torch.set_rng_state(seed)
    model.zero_grad()
    with te.watch_finite(model, raises=False) as watch:
        step(model, **arguments)
    assert watch.finding == finding
    return finding


def plant(tensor, index, value):
    with torch.no_grad():
        tensor[index] = value


# ---- where it is found ----


def test_nothing_where_all_is_finite(make, step):
    model = make()
    with te.watch_finite(model) as watch:
        step(model)
    assert watch.finding is None and te.find_nonfinite(model) == []


@pytest.mark.parametrize("value, nan, inf", [(float("nan"), 1, 0), (-float("inf"), 0, 1)])
def test_weight(make, step, value, nan, inf):
    model = make()
    plant(model.blocks[1].first.weight, (5, 7), value)
    finding = found(model, step)
    assert finding[:3] == ("forward", "blocks.1.first", type(model.head).__name__)
    assert finding[3:9] == ("parameter weight", nan, inf, 256, (5, 7), True)
    (state,) = [f for f in te.find_nonfinite(model) if not f.tensor.startswith(("grad", "scale"))]
    assert state[1:4] + state[7:8] == finding[1:4] + ((5, 7),) and state.phase == "state"


def test_input_of_the_model(make, device):
    model = make()
    x = torch.randn(4, 16, device=device)
    x[2, 3] = float("nan")
    finding = found(model, lambda m: m(x))
    assert finding[:9] == ("forward", "", "Model", "input x", 1, 0, 64, (2, 3), False)
    assert finding.note == "the model was given it"


def test_masks_of_minus_infinity_are_none(make, step, device):
    mask = torch.zeros(4, 16, device=device)
    mask[:, 8:] = -float("inf")
    model = make()
    with te.watch_finite(model):
        step(model, mask=mask)
    mask[1, 2] = float("nan")
    assert found(model, step, mask=mask).tensor == "input mask"


def test_code_between_modules(make, step):
    finding = found(make(lambda h: (h - h) / (h - h)), step)
    assert finding[:4] == ("forward", "blocks.1.second", finding.kind, "input inp") or (
        finding[:4] == ("forward", "blocks.1.second", "Linear", "input input")
    )
    assert (finding.nan, finding.origin) == (64, False)
    assert "by the code of blocks.1 around this one" in finding.note


def test_overflow_in_fp16(device):
    model = nn.Sequential(nn.Linear(16, 16), te.Linear(16, 16, device=device)).to(device).half()
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.fill_(1.0)
        model[1].weight.fill_(6e4)
    x = torch.ones(4, 16, device=device, dtype=torch.float16)
    finding = found(model, lambda m: m(x))
    assert finding[:4] == ("forward", "1", "Linear", "output")
    assert finding.inf > 0 and finding.origin and "inputs and parameters were" in finding.note


def test_own_code_of_a_module_with_parts(make, step):
    class Divided(Model):
        def forward(self, x):
            return super().forward(x) / 0.0

    model = make()
    model.__class__ = Divided
    finding = found(model, step)
    assert finding[:4] == ("forward", "", "Divided", "output") and finding.origin
    assert "so was what the modules inside it made" in finding.note


def test_gradient_that_a_module_makes(make, step):
    model = make()
    model.blocks[1].between = Planted(float("inf"))
    model.blocks[1].register_module("between", model.blocks[1].between)
    finding = found(model, step)
    assert finding[:4] == ("backward", "blocks.1.between", "Planted", "gradient of input x")
    assert finding[4:9] == (0, 1, 64, (0, 3), True)


def test_gradient_made_between_modules(make, step):
    """The square root of a zero has an infinite gradient; times zero it is NaN."""
    finding = found(make(lambda h: (h * 0.0).sqrt()), step)
    assert finding[:4] == ("backward", "blocks.1.first", finding.kind, "gradient of output")
    assert finding.nan == 64 and not finding.origin and "code after this module" in finding.note


def test_gradient_of_the_loss(make, step):
    finding = found(make(), step, loss=lambda out: (out - out).norm() * float("nan"))
    assert finding[:4] == ("backward", "", "Model", "gradient of output")
    assert "made by the loss" in finding.note


def test_gradient_of_a_weight(device):
    """fp16 sums over many tokens overflow, although each gradient is finite."""
    model = nn.Sequential(nn.Linear(4, 4, device=device)).half()
    x = torch.full((64, 4), 1e3, device=device, dtype=torch.float16)
    finding = found(model, lambda m: (m(x) * 60.0).sum().backward())
    assert finding[:4] == ("backward", "0", "Linear", "gradient of parameter weight")
    assert finding.origin and finding.inf == 16
    (grad,) = te.find_nonfinite(model)
    assert (grad.module, grad.tensor) == ("0", "gradient of parameter weight")


def test_several_readers_are_named(device):
    class Fork(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.left, self.right = Planted(float("nan")), nn.Linear(8, 8)

        def forward(self, x):
            x = self.stem(x)
            return self.left(x) + self.right(x)

    model = Fork().to(device)
    finding = found(model, lambda m: m(torch.randn(2, 8, device=device)).sum().backward())
    assert (finding.module, finding.tensor) == ("left", "gradient of input x")
    assert "right read the same tensor" in finding.note


def test_buffers_and_scaling_state(device):
    model = te.Linear(16, 16, device=device)
    model.register_buffer("table", torch.full((3,), -float("inf"), device=device))
    x = torch.randn(16, 16, device=device)
    with te.autocast():
        model(x)
    assert te.find_nonfinite(model) == []
    x[0, 0] = float("inf")
    with te.autocast():
        model(x)
    (state,) = te.find_nonfinite(model)
    assert (state.module, state.tensor) == ("", "scale and amaxes of input")
    model.table[1] = float("inf")
    assert [f.tensor for f in te.find_nonfinite(model)][0] == "buffer table"


# ---- what it does not do ----


def test_same_numbers_and_nothing_left_behind(make, device, kind):
    """Bits of outputs and gradients; hooks; a changed tensor is another one in the graph."""
    model = make(lambda h: h.mul_(0.5))
    x = torch.randn(4, 16, device=device)
    results = []
    for watched in (False, True):
        te.reset()
        model.zero_grad()
        inp = x.clone().requires_grad_()
        with te.watch_finite(model, skip=() if watched else Model):
            with te.autocast(enabled=kind == "te-fp8"):
                out = model(inp)
            out.square().sum().backward()
        results.append([out.detach(), inp.grad, *(p.grad.clone() for p in model.parameters())])
    assert_same_bits(*results)
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert all(not p._backward_hooks for p in module.parameters())


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint(make, device, kind, reentrant):
    model = make()
    model.blocks[1].between = Planted(float("nan"))
    x = torch.randn(4, 16, device=device, requires_grad=True)

    def run(model):
        with te.autocast(enabled=kind == "te-fp8"):
            out = checkpoint(model, x, use_reentrant=reentrant)
        out.sum().backward()

    finding = found(model, run)
    assert (finding.phase, finding.module) == ("backward", "blocks.1.between")


def test_skip_and_wrong_arguments(make, step):
    model = make()
    plant(model.head.weight, (0, 0), float("nan"))
    with te.watch_finite(model, skip=["head", ""]) as watch:
        pass
    assert watch.finding is None
    with te.watch_finite(model.blocks, raises=False) as watch:
        step(model)
    assert "gradient" in watch.finding.tensor and watch.finding.module == "1"
    with pytest.raises(TypeError, match="watch_finite: model: int, expected"):
        te.watch_finite(3)
    with pytest.raises(ValueError, match="watch_finite: skip: the model has no module 'tail'"):
        te.watch_finite(model, skip="tail")
    with pytest.raises(RuntimeError, match="active already"), te.watch_finite(model) as watch:
        watch.__enter__()
