# SPDX-License-Identifier: Apache-2.0
"""Modules run what the registry selects: attention, softmax, rotary positions, caches."""

import contextlib
import threading

import pytest
import torch
from comparators import assert_bits, assert_nmse
from tols import BF16, F32, tol
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.plugin as plugins
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin import slots
from transformer_engine.plugin.builtin.flash_attention import FlashAttention
from transformer_engine.pytorch.attention.rope import apply_fused_qkv_rotary_pos_emb

LENGTH, BATCH, HEADS, GROUPS, DIM = 12, 2, 4, 2, 16
HIDDEN = HEADS * DIM
KIND = plugin.BackendImplKind
FORWARD, BACKWARD = "fused_attn_fwd", "fused_attn_bwd"


@pytest.fixture(autouse=True)
def manager():
    """A manager of the process that this test alone changes."""
    plugin.reset_default_manager()
    made = plugin.get_default_manager()
    made.ensure_initialized()
    yield made
    plugin.reset_default_manager()
    plugin.reset_global_policy()


@pytest.fixture
def dtype(device):
    """What this library's attention runs on a device."""
    return F32 if torch.device(device).type == "cpu" else BF16


def register(op, fn, **options):
    impl = plugin.OpImpl(op, "vendor.test", KIND.VENDOR, fn, vendor="test", **options)
    plugin.get_registry().register(impl)


def native(op):
    """Implementation of this library."""
    return plugin.get_registry().get_implementation(op, slots.NATIVE).fn


def changed(op, factor=2.0, seen=None):
    """Register an implementation whose first result is another one."""

    def run(*given, **named):
        made = native(op)(*given, **named)
        if seen is not None:
            seen.append((threading.get_ident(), given))
        if isinstance(made, list | tuple):
            return [made[0] * factor, *made[1:]]
        return made * factor

    register(op, run)


def vendor():
    return plugin.with_preference("vendor")


def reference():
    return plugin.with_preference("reference")


def ran():
    """Operators of which others than this library's implementations ran."""
    return {key.partition("/")[0] for key in plugins.counts() if not key.endswith(slots.NATIVE)}


def sums(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def normal(*shape, device, dtype):
    return torch.randn(*shape, device=device).to(dtype)


PACKED = {"qkv_format": "thd", "attn_mask_type": "padding_causal"}
# Options of the module, of the call (functions of the device), queries where there are fewer.
CASES = {
    "no_mask": ({"attn_mask_type": "no_mask"}, {}),
    "causal": ({}, {}),
    "bshd": ({"qkv_format": "bshd"}, {}),
    "corner": ({"attn_mask_type": "causal_bottom_right"}, {"queries": 7}),
    "window": ({"window_size": (3, 0)}, {}),
    "both sides": ({"attn_mask_type": "no_mask", "window_size": (3, 2)}, {}),
    "padding": (
        {"attn_mask_type": "padding"},
        {"cu_seqlens_q": (0, 5, 17), "cu_seqlens_kv": (0, 12, 20)},
    ),
    "padding causal": (
        {"attn_mask_type": "padding_causal_bottom_right"},
        {"cu_seqlens_q": (0, 5, 12), "cu_seqlens_kv": (0, 12, 20)},
    ),
    "packed": (PACKED, {"cu_seqlens_q": (0, 5, 24), "max_seqlen_q": 19}),
    "gaps": (
        PACKED,
        {
            "cu_seqlens_q": (0, 5, 15),
            "cu_seqlens_q_padded": (0, 8, 24),
            "max_seqlen_q": 10,
        },
    ),
    "alibi": ({}, {"core_attention_bias_type": "alibi"}),
    "bias": ({}, {"core_attention_bias_type": "post_scale_bias", "bias": (1, HEADS, 12, 12)}),
    "bias of a key": (
        {"attn_mask_type": "no_mask"},
        {"core_attention_bias_type": "post_scale_bias", "bias": (BATCH, 1, 1, 12)},
    ),
    "off by one": ({"softmax_type": "off-by-one"}, {}),
    "learnable": ({"softmax_type": "learnable"}, {}),
    "largest": ({"return_max_logit": True}, {}),
}
ON_THE_CPU_ALONE = ("largest", "bias of a key")


class Attention:
    """A module, the tensors of a call, and a step of it."""

    def __init__(self, name, device, dtype):
        torch.manual_seed(3)
        options, call = CASES[name]
        call = dict(call)
        self.module = te.DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **options)
        self.module.to(device)
        form, queries = options.get("qkv_format", "sbhd"), call.pop("queries", LENGTH)
        lead = {
            "sbhd": lambda n: (n, BATCH),
            "bshd": lambda n: (BATCH, n),
            "thd": lambda n: (n * BATCH,),
        }[form]
        shapes = [(*lead(queries), HEADS, DIM), *[(*lead(LENGTH), GROUPS, DIM)] * 2]
        self.tensors = [normal(*shape, device=device, dtype=dtype) for shape in shapes]
        self.bias = None
        if "bias" in call:
            self.bias = normal(*call.pop("bias"), device=device, dtype=dtype)
        self.call = {
            name: sums(device, *value) if isinstance(value, tuple) else value
            for name, value in call.items()
        }

    def step(self, policy=None, wrap=None):
        """Results and gradients; the backward is outside of the policy."""
        tensors = [t.detach().clone().requires_grad_() for t in self.tensors]
        call, learned = dict(self.call), [*tensors, *self.module.parameters()]
        if self.bias is not None:
            call["core_attention_bias"] = bias = self.bias.detach().clone().requires_grad_()
            learned.append(bias)
        with policy or contextlib.nullcontext():
            out = (wrap or (lambda f, *given, **named: f(*given, **named)))(
                self.module, *tensors, **call
            )
        out, *top = out if isinstance(out, tuple) else (out,)
        weights = torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)
        (out.float() * weights.sin()).sum().backward()
        grads = [each.grad for each in learned]
        self.module.zero_grad()
        return [out.detach(), *top, *grads]


def assert_near(got, wanted, dtype):
    """Of two ways to attend."""
    for one, other in zip(got, wanted, strict=True):
        assert_nmse(one, other, 4 * tol("attention", dtype, LENGTH))


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


def layer(device, dtype, **options):
    torch.manual_seed(5)
    given = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, **options}
    return te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, device=device, **given)


def grads_of(module, x, policy, **call):
    x = x.detach().clone().requires_grad_()
    with policy:
        out = module(x, **call)
    learned = [x, *module.parameters()]
    return [out.detach(), *torch.autograd.grad((out.float() * out.float()).sum(), learned)]


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


# ---- rotary positions ----------------------------------------------------------------------------


def rotated(t, freqs, policy=None, **options):
    t = t.detach().clone().requires_grad_()
    with policy or contextlib.nullcontext():
        out = te.attention.apply_rotary_pos_emb(t, freqs, **options)
    return [out.detach(), *torch.autograd.grad((out * out).sum(), t)]


ROPE = {
    "sbhd": {},
    "bshd": {"tensor_format": "bshd"},
    "pairs": {"interleaved": True},
    "packed": {"tensor_format": "thd", "cu_seqlens": (0, 5, 20)},
    "ranks": {"cp_size": 2, "cp_rank": 1},
}


@pytest.mark.parametrize("name", ROPE)
def test_rotary_positions(device, name):
    options = dict(ROPE[name])
    if "cu_seqlens" in options:
        options["cu_seqlens"] = sums(device, *options["cu_seqlens"])
    freqs = te.attention.RotaryPositionEmbedding(DIM, 0.5)(2 * LENGTH).to(device)
    lead = (24,) if name == "packed" else (BATCH, LENGTH)[:: 1 if name == "bshd" else -1]
    t = normal(*lead, HEADS, DIM, device=device, dtype=F32)
    wanted, got = rotated(t, freqs, **options), rotated(t, freqs, reference(), **options)
    for one, other in zip(got, wanted, strict=True):
        assert_nmse(one, other, tol("chain", F32, 4))
    assert ran() == {"fused_rope_forward", "fused_rope_backward"}
    changed("fused_rope_forward")
    assert_bits(rotated(t, freqs, vendor(), **options)[0], 2 * wanted[0])


def test_rotary_positions_in_a_graph(device):
    torch.compiler.reset()
    freqs = te.attention.RotaryPositionEmbedding(DIM)(LENGTH).to(device)
    t = normal(LENGTH, BATCH, HEADS, DIM, device=device, dtype=F32)
    changed("fused_rope_forward")
    run = torch.compile(te.attention.apply_rotary_pos_emb, backend="aot_eager", fullgraph=True)
    wanted = run(t, freqs)
    with vendor():
        assert_bits(run(t, freqs), 2 * wanted)
    assert_bits(run(t, freqs), wanted)


def test_starts_of_sequences_go_forward_alone(device):
    """Their backward has no argument for them: this library's own runs it."""
    freqs = te.attention.RotaryPositionEmbedding(DIM)(2 * LENGTH).to(device)
    t = normal(LENGTH, BATCH, HEADS, DIM, device=device, dtype=F32)
    options = {"start_positions": sums(device, 3, 7)}
    wanted, got = rotated(t, freqs, **options), rotated(t, freqs, reference(), **options)
    for one, other in zip(got, wanted, strict=True):
        assert_nmse(one, other, tol("chain", F32, 4))
    assert ran() == {"fused_rope_forward"}
    with pytest.raises(NotImplementedError, match="strict"):
        rotated(t, freqs, plugin.policy_context(strict_reference()), **options)


def strict_reference():
    return plugin.SelectionPolicy.from_dict(prefer="reference", strict=True)


def test_parts_of_a_projection(device):
    freqs = te.attention.RotaryPositionEmbedding(DIM)(LENGTH).to(device)
    sizes = [2 * DIM, DIM, DIM]
    qkv = normal(LENGTH, BATCH, GROUPS, sum(sizes), device=device, dtype=F32)

    def run(policy=None):
        given = qkv.detach().clone().requires_grad_()
        with policy or contextlib.nullcontext():
            made = apply_fused_qkv_rotary_pos_emb(given, freqs, freqs, sizes)
        return [*made, *torch.autograd.grad(sum((t * t).sum() for t in made), given)]

    wanted = run()
    for one, other in zip(run(reference()), wanted, strict=True):
        assert_nmse(one, other, tol("chain", F32, 4))
    assert ran() == {"fused_qkv_rope_forward", "fused_qkv_rope_backward"}
    changed("fused_rope_forward")  # it turns queries and keys; values are copied
    got = run(vendor())
    assert_bits(got[0], 2 * wanted[0])
    assert_bits(got[1], 2 * wanted[1])
    assert_bits(got[2], wanted[2])


# ---- softmax -------------------------------------------------------------------------------------


@pytest.fixture
def unfused(monkeypatch):
    """Attention in three steps, which makes a softmax of its own."""
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")


SOFTMAX = {
    "no_mask": "scaled_softmax_forward",
    "causal": "scaled_upper_triang_masked_softmax_forward",
    "corner": "scaled_aligned_causal_masked_softmax_forward",
    "padding": "scaled_masked_softmax_forward",
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(device, unfused, name):
    attention = Attention(name, device, F32)
    wanted = attention.step()
    assert_near(attention.step(reference()), wanted, F32)
    assert ran() == {SOFTMAX[name], "scaled_softmax_backward"}
    changed(SOFTMAX[name])
    assert_nmse(attention.step(vendor())[0], 2 * wanted[0], tol("chain", F32, 4))


def test_softmax_with_a_bias(device, unfused):
    attention = Attention("bias", device, F32)
    wanted = attention.step()
    changed("scaled_upper_triang_masked_softmax_forward")
    assert_bits(attention.step(vendor())[0], wanted[0])
    with plugin.with_strict_mode(), pytest.raises(NotImplementedError, match="strict"):
        attention.step(vendor())


# ---- caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize("paged", [False, True])
def test_caches(device, dtype, form, paged):
    module = te.DotProductAttention(
        HEADS, DIM, qkv_format=form, attn_mask_type="padding_causal", layer_number=1
    )

    @torch.no_grad()
    def generate():
        options = {"is_paged": True, "page_size": 8, "total_num_pages": 8} if paged else {}
        params = te.InferenceParams(
            BATCH, 32, num_heads_kv=HEADS, head_dim_k=DIM, dtype=dtype, device=device, **options
        )
        torch.manual_seed(2)
        made = []
        for counts in ((5, 3), (1, 1), (4, 4)):
            params.pre_step(dict(enumerate(counts)))
            longest = max(counts)
            lead = {"bshd": (BATCH, longest), "sbhd": (longest, BATCH), "thd": (sum(counts),)}
            shape = (*lead[form], HEADS, DIM)
            given = [normal(*shape, device=device, dtype=dtype) for _ in range(3)]
            made.append(module(*given, inference_params=params, max_seqlen_q=longest))
        return made

    wanted = generate()
    with reference():
        got = generate()
    for one, other in zip(got, wanted, strict=True):
        assert_near([one], [other], dtype)
    assert {"copy_to_kv_cache", FORWARD} <= ran()
    register("copy_to_kv_cache", lambda *given: [cache.zero_() for cache in given[2:4]] and None)
    with vendor():
        assert not generate()[-1].any()


# ---- casts outside of plans ----------------------------------------------------------------------


def test_casts_of_quantizers(device):
    """The same bits by whomever; wrong ones show."""
    x = normal(32, 48, device=device, dtype=BF16)
    for scale in (True, False):
        if scale:
            quantizer = te.Float8Quantizer(
                torch.ones(1, device=device), torch.zeros(1, device=device), te.DType.kFloat8E4M3
            )
        else:
            quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, device)
        wanted = quantizer(x)
        with reference():
            got = quantizer(x)
        assert_bits(got.dequantize(), wanted.dequantize())
    assert "compute_amax" in ran()
    register("dequantize", lambda inp, otype: 2 * native("dequantize")(inp, otype))
    wanted = got.dequantize()
    with vendor():
        assert_bits(got.dequantize(), 2 * wanted)


def test_transposes(device):
    def turned():
        quantizer = te.Float8Quantizer(
            torch.ones(1, device=device), torch.zeros(1, device=device), te.DType.kFloat8E4M3
        )
        quantizer.set_usage(rowwise=True, columnwise=False)
        torch.manual_seed(0)
        made = quantizer(torch.randn(20, 48, device=device))
        made.update_usage(rowwise_usage=True, columnwise_usage=True)
        return made._transpose

    wanted = turned()
    with reference():
        assert_bits(turned(), wanted)
    assert "fp8_transpose" in ran()


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


@pytest.mark.parametrize("name", ["causal", "bshd", "corner", "padding", "packed", "alibi"])
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
