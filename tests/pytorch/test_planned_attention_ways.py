# SPDX-License-Identifier: Apache-2.0
"""`DotProductAttention` as a plan under what looks on: checkpoints, hooks, autocast, transforms."""

import contextlib

import pytest
import torch
from pytorch.attention_operators import by_operators, unkept
from pytorch.helpers import assert_same_bits, captured, same_draws
from pytorch.planned_attention_cases import (
    BATCH,
    CASES,
    CHANNELS,
    HEADS,
    KEYS,
    LONG,
    PACKED,
    QUERIES,
    leaves_of,
    make,
    packed_arguments,
    plans_only,
    step,
)
from tols import BF16, F32

pytestmark = pytest.mark.usefixtures("repeatable")


def test_backward_twice(device):
    core = make()
    tensors = leaves_of(core, device)
    out = core(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    assert_same_bits(torch.autograd.grad(out.sum(), tensors, retain_graph=True), first)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grads[0].sum().backward()


def test_an_input_that_has_changed(device):
    core = make()
    query, key, value = leaves_of(core, device)
    shifted = key * 1.0
    out = core(query, shifted, value)
    with torch.no_grad():
        shifted.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_under_a_checkpoint(device, native_runs, reentrant, known):
    """Forward and recompute run plans, be these kept already or not."""
    core = make(attention_dropout=0.2)
    tensors = leaves_of(core, device)
    for tensor in tensors:
        tensor.retain_grad()
    with by_operators():
        expected = step(core, tensors, {})
    if known:
        step(core, tensors, {})
    with plans_only(native_runs), same_draws(tensors[0].device):
        out = torch.utils.checkpoint.checkpoint(core, *tensors, use_reentrant=reentrant)
        grad = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out)
        out.backward(grad)
    assert_same_bits([out, *(tensor.grad for tensor in tensors)], expected)


def test_under_hooks_of_saved_tensors(device, native_runs):
    core = make()
    tensors = leaves_of(core, device)
    with by_operators():
        expected = step(core, tensors, {})
    for _ in range(2):
        with plans_only(native_runs), torch.autograd.graph.save_on_cpu():
            assert_same_bits(step(core, tensors, {}), expected)


@pytest.mark.parametrize("form", ["sbhd", "thd"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_under_autocast(device, native_runs, dtype, form):
    """Heads in fp32 are cast, their gradients are in fp32; plain calls between change nothing."""
    core = make(**(PACKED if form == "thd" else {}))
    sizes, given = ((10, 14), packed_arguments(device)) if form == "thd" else (LONG, {})
    tensors = leaves_of(core, device, form, F32, sizes)
    kind = torch.device(device).type
    with by_operators(), torch.autocast(kind, dtype):
        expected = step(core, tensors, given)
    assert expected[0].dtype is dtype and expected[1].dtype is F32
    plain = step(core, tensors, given)
    for _ in range(2):
        with plans_only(native_runs), torch.autocast(kind, dtype):
            assert_same_bits(step(core, tensors, given), expected)
        assert_same_bits(step(core, tensors, given), plain)
    with torch.no_grad(), torch.autocast(kind, dtype), plans_only(native_runs):
        assert_same_bits(core(*tensors, **given), expected[0].detach())


def test_joined_under_autocast(device, native_runs):
    core = make(attn_mask_type="no_mask")
    joined = torch.randn(KEYS, BATCH, 3, HEADS, CHANNELS, device=device, requires_grad=True)

    def run():
        out = core(qkv_layer=joined)
        return [out, *torch.autograd.grad(out, [joined], torch.ones_like(out))]

    with torch.autocast(torch.device(device).type, BF16):
        with by_operators():
            expected = run()
        for _ in range(2):
            with plans_only(native_runs):
                assert_same_bits(run(), expected)


def test_in_transforms(device):
    core = make()
    tensors = leaves_of(core, device)
    expected = step(core, tensors, {})
    loss = torch.func.grad(lambda q: core(q, *tensors[1:]).sum())
    assert loss(tensors[0]).shape == tensors[0].shape
    assert_same_bits(step(core, tensors, {}), expected)


def test_a_counter_around_the_backward(device):
    """It sees the plan of the backward behind an operator."""
    from torch.utils.flop_counter import FlopCounterMode

    core = make(attn_mask_type="no_mask")
    tensors = leaves_of(core, device)
    counts = []
    for way in (contextlib.nullcontext, unkept):
        with way():
            out = core(*tensors)
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] == 2 * 5 * BATCH * HEADS * QUERIES * KEYS * CHANNELS


class Doubled(torch.nn.Module):
    """A parametrization."""

    def forward(self, tensor):
        return 2 * tensor


def test_a_parametrized_sink_is_computed_at_each_call(device):
    core = make(softmax_type="learnable").to(device)
    tensors = leaves_of(core, device, sizes=(KEYS, KEYS))
    parametrize = torch.nn.utils.parametrize
    parametrize.register_parametrization(core, "softmax_offset", Doubled())
    plain = make(softmax_type="learnable").to(device)
    for value in (0.5, 1.0, 2.0):
        for _ in range(2):
            with torch.no_grad():
                core.parametrizations.softmax_offset.original.fill_(value)
                plain.softmax_offset.fill_(2 * value)
            with parametrize.cached():
                found = [core(*tensors) for _ in range(2)]
            for out in found:
                assert_same_bits(out, plain(*tensors))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["causal", "dropout", "off by one", "alibi"])
def test_in_a_cuda_graph(case):
    """What is made for a call that is first met in a capture is not kept for later ones."""
    options, arguments = CASES[case]
    core = make(**options)
    tensors, given = leaves_of(core, "cuda", sizes=(KEYS, KEYS)), arguments("cuda")
    leaves = [tensor.detach() for tensor in tensors]
    warm = make(**options)
    with torch.no_grad():
        expected = warm(*leaves, **given)
        graph, out = captured(lambda: core(*leaves, **given))
        graph.replay()
        if case != "dropout":
            assert_same_bits(out, expected)
        del graph, out
        torch.cuda.empty_cache()
        junk = [torch.full((1 << 20,), torch.nan, device="cuda") for _ in range(8)]
        again = core(*leaves, **given)
        assert again.isfinite().all()
        if case != "dropout":
            assert_same_bits(again, expected)
        del junk
