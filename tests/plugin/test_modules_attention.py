# SPDX-License-Identifier: Apache-2.0
"""Modules run what the registry selects: attention, by operators and by a class."""

import contextlib

import pytest
import torch
from comparators import assert_bits
from plugged import native, register
from plugged_attention import (
    BACKWARD,
    BATCH,
    CASES,
    DIM,
    FORWARD,
    GROUPS,
    HEADS,
    HIDDEN,
    LENGTH,
    ON_THE_CPU_ALONE,
    Attention,
    assert_near,
    changed,
    grads_of,
    layer,
    normal,
    ran,
    reference,
    vendor,
)
from tols import F32, tol
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.builtin.flash_attention import FlashAttention

pytestmark = pytest.mark.usefixtures("manager")

# ---- attention -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_attention_by_the_reference(device, dtype, name):
    """All that the operators can be told, with the gradients of all."""
    if name in ON_THE_CPU_ALONE and torch.device(device).type != "cpu":
        pytest.skip("cuDNN's kernels do not make it")
    attention = Attention(name, device, dtype)
    for _ in range(3):  # the later ones run as plans
        wanted = attention.step()
        assert not ran()
        assert_near(attention.step(reference()), wanted, dtype)
        assert ran() == {FORWARD, BACKWARD}
        plugin.reset_default_manager()
        plugin.get_default_manager().ensure_initialized()


@pytest.mark.parametrize("name", ["causal", "packed"])
def test_wrong_values_show(device, dtype, name):
    attention = Attention(name, device, dtype)
    changed(FORWARD)
    for _ in range(3):
        assert_bits(attention.step(vendor())[0], 2 * attention.step()[0])


def test_a_backward_is_its_forwards(device, dtype):
    """Without the policy's context, and on the thread of the backward."""
    attention = Attention("causal", device, dtype)
    wanted = attention.step()
    changed(BACKWARD)
    for _ in range(3):
        got = attention.step(vendor())
        assert_bits(got[0], wanted[0])
        assert_bits(got[1], 2 * wanted[1])
        assert_bits(attention.step()[1], wanted[1])


def test_each_argument(device, dtype):
    """The operators get dense tensors in the layout that they are told of."""
    seen = []
    changed(FORWARD, seen=seen)
    qkv = normal(LENGTH, BATCH, HEADS, 3, DIM, device=device, dtype=dtype)
    module = te.DotProductAttention(HEADS, DIM, attn_mask_type="causal")
    with vendor():
        module(qkv_layer=qkv, qkv_interleave_dim=-2)
    ((_, given),) = seen
    assert given[6].name == "NVTE_SBHD_SBHD_SBHD"
    assert given[8].name == "NVTE_CAUSAL_MASK"
    assert given[10] == (-1, 0)
    assert given[11].tolist() == [0, LENGTH, 2 * LENGTH]
    for i in range(3):
        assert given[13 + i].is_contiguous()
        assert_bits(given[13 + i], qkv[:, :, :, i])


UNEXPRESSED = {
    "dropout": ({"attention_dropout": 0.5}, {}),
    "softcap": ({"softcap": 0.5}, {}),
    "arbitrary": ({"attn_mask_type": "arbitrary"}, {"attention_mask": True}),
    "corner of a window": (
        {"attn_mask_type": "no_mask", "window_size": (3, 2), "bottom_right_diagonal": True},
        {"queries": 7},
    ),
}


@pytest.mark.parametrize("name", UNEXPRESSED)
def test_what_the_operators_can_not_be_told(device, dtype, name):
    """It goes on to this library's own, and raises under a strict policy."""
    options, call = UNEXPRESSED[name]
    module = te.DotProductAttention(HEADS, DIM, **options).to(device)
    shape = (BATCH, HEADS, DIM)
    query = normal(call.get("queries", LENGTH), *shape, device=device, dtype=dtype)
    key = normal(LENGTH, *shape, device=device, dtype=dtype)
    given = {}
    if "attention_mask" in call:
        mask = torch.zeros(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=device)
        given["attention_mask"] = mask
    changed(FORWARD)
    torch.manual_seed(0)
    wanted = module(query, key, key, **given)
    torch.manual_seed(0)
    with vendor():
        assert_bits(module(query, key, key, **given), wanted)
    assert not ran()
    with vendor(), plugin.with_strict_mode(), pytest.raises(NotImplementedError, match="strict"):
        module(query, key, key, **given)


def test_wrong_results_are_told(device, dtype):
    attention = Attention("causal", device, dtype)
    register(FORWARD, lambda *given: [given[13]])
    with pytest.raises(ValueError, match="expected the output, the statistics, the random state"):
        attention.step(vendor())


def test_dtypes_of_an_implementation_are_those_of_queries(device, dtype):
    """And not of the places of sequences, which come first."""
    attention = Attention("causal", device, dtype)
    taken = str(dtype).rpartition(".")[2]
    register(FORWARD, lambda *given: native(FORWARD)(*given), supported_dtypes={taken})
    attention.step(vendor())
    assert ran() == {FORWARD}


# ---- in every way --------------------------------------------------------------------------------


def in_graph(module, *given, **named):
    return torch.compile(module, backend="aot_eager")(*given, **named)


def under_checkpoint(module, *given, **named):
    return te.checkpoint(module, *given, **named)


def under_torch_checkpoint(module, *given, **named):
    return torch_checkpoint(module, *given, use_reentrant=False, **named)


def core_recomputed(module, *given, **named):
    return module(*given, checkpoint_core_attention=True, **named)


WAYS = {
    f.__name__: f for f in (in_graph, under_checkpoint, under_torch_checkpoint, core_recomputed)
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["causal", "packed"])
def test_in_every_way(device, dtype, name, way):
    torch.compiler.reset()
    attention = Attention(name, device, dtype)
    wanted = attention.step()
    changed(FORWARD)
    changed(BACKWARD)
    natively = attention.step(wrap=WAYS[way])
    got = attention.step(vendor(), WAYS[way])
    assert_near(natively, wanted, dtype)
    assert_bits(got[0], 2 * natively[0])
    calls = plugins.counts()
    assert calls[f"{BACKWARD}/vendor.test"] == 1
    assert calls[f"{FORWARD}/vendor.test"] == (1 if way == "in_graph" else 2)
    assert_bits(attention.step(wrap=WAYS[way])[0], natively[0])


# ---- layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_layer_with_rotary_positions(device, dtype, interleaved):
    module = layer(device, dtype, num_gqa_groups=GROUPS, rotary_pos_interleaved=interleaved)
    angles = te.attention.RotaryPositionEmbedding(DIM, interleaved=interleaved)(LENGTH).to(device)
    x = normal(LENGTH, BATCH, HIDDEN, device=device, dtype=dtype)
    for _ in range(3):
        wanted = grads_of(module, x, contextlib.nullcontext(), rotary_pos_emb=angles)
        got = grads_of(module, x, reference(), rotary_pos_emb=angles)
        for one, other in zip(got, wanted, strict=True):
            error = (one.double() - other.double()).square().mean()
            # Of the order of 1, but for the gradient of a key's bias: 0 save for rounding.
            size = other.double().square().mean().clamp(min=2.0**-12)
            assert error / size <= tol("chain", dtype, 2 * HIDDEN)
    assert {FORWARD, BACKWARD} < ran()
    assert ran() & {"fused_rope_forward", "fused_qkv_rope_forward"}
    assert ran() & {"fused_rope_backward", "fused_qkv_rope_backward"}


@pytest.mark.parametrize("recipe", [recipes.DelayedScaling, recipes.Float8CurrentScaling])
def test_scales_of_a_layer(device, recipe):
    """The update of delayed scaling at the end of a region, and no other recipe's."""
    module = te.Linear(HIDDEN, HIDDEN, device=device)
    op = "fused_amax_and_scale_update_after_reduction"

    def steps():
        made = te.Linear(HIDDEN, HIDDEN, device=device)
        made.load_state_dict(module.state_dict())
        torch.manual_seed(1)
        for _ in range(3):
            with te.autocast(recipe=recipe()):
                out = made(torch.randn(16, HIDDEN, device=device))
        return out

    wanted = steps()
    register(op, lambda *given: native(op)(*given))
    with vendor():
        assert_bits(steps(), wanted)
    assert (op in ran()) == (recipe is recipes.DelayedScaling)


# ---- classes -------------------------------------------------------------------------------------


class Doubled(FlashAttention):
    """Twice what this library attends."""

    calls = 0

    def forward(self, *given, **named):
        """Attend."""
        type(self).calls += 1
        return 2 * super().forward(*given, **named)


def register_class(kind=Doubled):
    register("get_flash_attention_class", lambda: kind)


@pytest.mark.parametrize(
    "name", ["causal", "bshd", "corner", "padding", "padding of nothing", "packed", "alibi"]
)
def test_a_class_of_attention(device, dtype, name):
    attention = Attention(name, device, dtype)
    wanted = attention.step()
    register_class()
    before = Doubled.calls
    for _ in range(3):
        got = attention.step(vendor())
        assert_bits(got[0], 2 * wanted[0])
        assert_near(got[1:], [2 * each for each in wanted[1:]], dtype)
        assert_bits(attention.step()[0], wanted[0])  # chosen at each call
    assert Doubled.calls == before + 3
    assert not attention.module.state_dict()


@pytest.mark.parametrize("name", ["bias", "learnable", "gaps"])
def test_what_a_class_is_not_told(device, dtype, name):
    attention = Attention(name, device, dtype)
    wanted = attention.step()
    register_class()
    before = Doubled.calls
    assert_bits(attention.step(vendor())[0], wanted[0])
    assert Doubled.calls == before


@pytest.mark.gpu
def test_a_class_is_given_aligned_tensors():
    """Classes call other libraries' kernels, which read 16 bytes at once."""
    begins = []

    class Noting(FlashAttention):
        def forward(self, *given, **named):
            begins.extend(
                t.data_ptr() % 16 + sum(n % 8 for n in t.stride()[:-1]) for t in given[:3]
            )
            out = super().forward(*given, **named)
            out.register_hook(lambda grad: begins.append(grad.data_ptr() % 16))
            return out

    register_class(Noting)
    module = te.DotProductAttention(HEADS, DIM, qkv_format="bshd")
    wide = torch.randn(3, 2, LENGTH, HEADS, DIM + 3, device="cuda", dtype=torch.bfloat16)
    qkv = [t[..., 1 : 1 + DIM].requires_grad_() for t in wide]
    with vendor():
        out = module(*qkv)
    flat = torch.randn(1 + out.numel(), device="cuda", dtype=out.dtype)[1:]
    torch.autograd.grad(out, qkv, flat.view(out.shape))
    assert begins == [0, 0, 0, 0]


def test_a_class_in_a_layer(device, dtype):
    module = layer(device, dtype)
    x = normal(LENGTH, BATCH, HIDDEN, device=device, dtype=dtype)
    wanted = [module(x) for _ in range(3)]
    register_class()
    before = Doubled.calls
    with vendor():
        got = module(x)
    assert Doubled.calls == before + 1
    assert not torch.equal(got, wanted[-1])
    assert_bits(module(x), wanted[-1])


@pytest.mark.parametrize("way", WAYS)
def test_a_class_in_every_way(device, dtype, way):
    torch.compiler.reset()
    attention = Attention("causal", device, dtype)
    wanted = attention.step()
    register_class()
    got = attention.step(vendor(), WAYS[way])
    assert_near(got, [2 * each for each in wanted], dtype)
    assert_near(attention.step(wrap=WAYS[way]), wanted, dtype)


def test_a_class_is_explained(device, dtype):
    module = te.DotProductAttention(HEADS, DIM)
    shape = (LENGTH, BATCH, HEADS, DIM)
    found = te.explain_attention(module, shape, dtype=dtype, device=device)
    assert found.backend == "native"
    assert "this library's own" in str(found.refused["plugin"])
    register_class()
    with vendor():
        found = te.explain_attention(module, shape, dtype=dtype, device=device)
        assert found.backend == "plugin"
        found = te.explain_attention(
            module, shape, dtype=dtype, device=device, attn_mask_type="arbitrary",
            attention_mask=(1, 1, LENGTH, LENGTH),
        )  # fmt: skip
        assert found.backend != "plugin"
        assert "padding" in str(found.refused["plugin"])


# ---- no recursion --------------------------------------------------------------------------------


def test_an_implementation_may_be_made_of_modules(device):
    """What it runs asks nobody."""
    freqs = te.attention.RotaryPositionEmbedding(DIM)(LENGTH).to(device)
    t = normal(LENGTH, BATCH, HEADS, DIM, device=device, dtype=F32)
    wanted = te.attention.apply_rotary_pos_emb(t, freqs)
    register(
        "fused_rope_forward",
        lambda inp, angles, *_: 3 * te.attention.apply_rotary_pos_emb(inp, angles),
    )
    with vendor():
        assert_bits(te.attention.apply_rotary_pos_emb(t, freqs), 3 * wanted)
