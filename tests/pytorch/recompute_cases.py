# SPDX-License-Identifier: Apache-2.0
"""What the tests of recompute share: checkpoints of all kinds, a model, a training to compare."""

import torch
from pytorch.helpers import assert_same_bits, counted, states_of
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import (
    activation_recompute_forward,
    in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled,
)

WIDTH, ROWS, STEPS = 32, 16, 3


def plain(function, *args):
    return function(*args)


# name: function(function, *args); the plain call is what all are compared with.
CHECKPOINTS = {
    "torch-reentrant": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=True),
    "torch-saved": lambda f, *a: torch_checkpoint(f, *a, use_reentrant=False),
    "te-reentrant": lambda f, *a: te.checkpoint(f, *a, use_reentrant=True),
    "te-saved": lambda f, *a: te.checkpoint(f, *a, use_reentrant=False),
}


class Program(torch.autograd.Function):
    """The recompute of a program that does it by itself."""

    @staticmethod
    def forward(ctx, function, *args):
        ctx.function, ctx.args = function, args
        ctx.random = torch.get_rng_state()
        ctx.cuda_random = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        with torch.no_grad(), activation_recompute_forward(activation_recompute=True):
            assert is_fp8_activation_recompute_enabled()
            assert not in_fp8_activation_recompute_phase()
            return function(*args)

    @staticmethod
    def backward(ctx, grad):
        args = [a.detach().requires_grad_() if torch.is_tensor(a) else a for a in ctx.args]
        devices = [] if ctx.cuda_random is None else [torch.cuda.current_device()]
        with torch.random.fork_rng(devices):
            torch.set_rng_state(ctx.random)
            if ctx.cuda_random is not None:
                torch.cuda.set_rng_state(ctx.cuda_random)
            with torch.enable_grad(), activation_recompute_forward(True, recompute_phase=True):
                assert in_fp8_activation_recompute_phase()
                out = ctx.function(*args)
        assert not is_fp8_activation_recompute_enabled()
        torch.autograd.backward(out, grad)
        return None, *(a.grad if torch.is_tensor(a) else None for a in args)


PROGRAMS = CHECKPOINTS | {"program": Program.apply}


KINDS = {"linear": 6, "norm-linear": 6, "mlp": 6, "mlp-checkpoint": 7}
"""What a block is made of, and the GEMMs of its step; a recompute adds the 2 of its forward."""


class Block(torch.nn.Module):
    """Two layers, dropout between them: the random numbers must be those of the forward."""

    def __init__(self, device, dropout=0.0, kind="linear"):
        super().__init__()
        if kind.startswith("mlp"):
            again = kind == "mlp-checkpoint"
            self.a = te.LayerNormMLP(WIDTH, 2 * WIDTH, checkpoint=again, device=device)
            self.b = None
        else:
            first = te.Linear if kind == "linear" else te.LayerNormLinear
            self.a = first(WIDTH, 2 * WIDTH, device=device)
            self.b = te.Linear(2 * WIDTH, WIDTH, device=device)
        self.dropout = dropout

    def forward(self, x, is_first_microbatch=None):
        y = self.a(x, is_first_microbatch=is_first_microbatch)
        y = torch.nn.functional.gelu(y) if self.b is not None else y
        y = torch.nn.functional.dropout(y, self.dropout)
        return x + (y if self.b is None else self.b(y, is_first_microbatch=is_first_microbatch))


def model_on(device, blocks=3, **options):
    return torch.nn.ModuleList([Block(device, **options) for _ in range(blocks)])


def train(model, device, forward, steps=STEPS):
    """Run steps; return outputs, gradients, weights and state after each, and the GEMM counts.

    Parameters
    ----------
    forward : callable
        ``forward(x)`` runs regions and checkpoints; returns the output.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    trace, counts = [], []
    for _ in range(steps):
        x = (torch.randn(ROWS, WIDTH, device=device) * 4).requires_grad_()
        with counted() as gemms:
            out = forward(x)
            after_forward = states_of(model)
            out.backward(torch.randn_like(out))
        counts.append((gemms.fp8, gemms.other))
        trace.append([out, x.grad, [p.grad.clone() for p in model.parameters()]])
        trace.append([after_forward, states_of(model)])
        optimizer.step()
        optimizer.zero_grad()
        trace.append([p.detach().clone() for p in model.parameters()])
    return trace, counts


def compare(start, device, forward, extra, dropout=0.0, kind="linear"):
    """Train with and without recompute, where `forward(model, run, x)` uses `run` as a checkpoint.

    `extra` is how many FP8 GEMMs the recompute of one step adds.
    """
    results = []
    for run in (plain, forward[1]):
        start()
        model = model_on(device, dropout=dropout, kind=kind)
        results.append(train(model, device, lambda x, m=model, r=run: forward[0](m, r, x)))
    (expected, base), (found, counts) = results
    assert_same_bits(found, expected)
    assert base == [(3 * KINDS[kind], 0)] * STEPS
    assert counts == [(3 * KINDS[kind] + extra, 0)] * STEPS
