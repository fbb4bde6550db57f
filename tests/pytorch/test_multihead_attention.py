# SPDX-License-Identifier: Apache-2.0
"""MultiheadAttention: parameters, layouts, options, outputs and gradients."""

import copy

import attention_reference as reference
import pytest
import torch
from comparators import assert_nmse
from device_kinds import every_device, our_kernels
from pytorch import attention_model
from pytorch.attention_model import Model, check, may_attend, norm, wide
from pytorch.helpers import RECIPES, assert_same_bits, counted
from tols import BF16, F16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

pytestmark = every_device

HIDDEN, HEADS, LENGTH, BATCH = 32, 4, 6, 2
DEPTH = 3 * HIDDEN
CAUSAL = (-1, 0)


def make(device, dtype=F32, **options):
    """A module without dropout, with other biases than 0."""
    given = {"attention_dropout": 0.0, "params_dtype": dtype, "device": device, **options}
    module = te.MultiheadAttention(HIDDEN, HEADS, **given)
    attention_model.randomise(module)
    return module


def states(device, dtype=F32, form="sbhd", length=LENGTH):
    shape = (length, BATCH) if form == "sbhd" else (BATCH, length)
    return torch.randn(*shape, HIDDEN).to(device, dtype).requires_grad_()


def mask(queries=LENGTH, keys=LENGTH, window=CAUSAL):
    return may_attend((BATCH, HEADS, queries, keys), window=window)


# ---- parameters ----------------------------------------------------------------------------------


def shapes(module):
    return {name: tuple(p.shape) for name, p in module.named_parameters()}


def test_parameters_of_self_attention():
    separate = te.MultiheadAttention(32, 4, num_gqa_groups=2, kv_channels=(8, 6), device="cpu")
    assert shapes(separate) == {
        "qkv.query_weight": (32, 32),
        "qkv.key_weight": (16, 32),
        "qkv.value_weight": (12, 32),
        "qkv.query_bias": (32,),
        "qkv.key_bias": (16,),
        "qkv.value_bias": (12,),
        "proj.weight": (32, 24),
        "proj.bias": (32,),
    }
    fused = te.MultiheadAttention(
        32, 4, num_gqa_groups=2, fuse_qkv_params=True, input_layernorm=True, device="cpu"
    )
    assert shapes(fused) == {
        "layernorm_qkv.layer_norm_weight": (32,),
        "layernorm_qkv.layer_norm_bias": (32,),
        "layernorm_qkv.weight": (64, 32),
        "layernorm_qkv.bias": (64,),
        "proj.weight": (32, 32),
        "proj.bias": (32,),
    }
    assert [n for n, _ in fused.named_children()] == ["layernorm_qkv", "core_attention", "proj"]


def test_parameters_of_cross_attention():
    options = {"attention_type": "cross", "bias": False, "device": "cpu"}
    assert shapes(te.MultiheadAttention(32, 4, fuse_qkv_params=True, **options)) == {
        "query_layer.weight": (32, 32),
        "key_value.weight": (64, 32),
        "proj.weight": (32, 32),
    }
    assert shapes(te.MultiheadAttention(32, 4, input_layernorm=True, **options)) == {
        "layernorm_query.layer_norm_weight": (32,),
        "layernorm_query.layer_norm_bias": (32,),
        "layernorm_query.query_weight": (32, 32),
        "key_value.key_weight": (32, 32),
        "key_value.value_weight": (32, 32),
        "proj.weight": (32, 32),
    }


def test_a_qk_norm_without_parameters_is_one_module():
    shared = te.MultiheadAttention(32, 4, qk_norm_type="L2Normalization", device="cpu")
    assert shared.q_norm is shared.k_norm
    own = te.MultiheadAttention(32, 4, qk_norm_type="RMSNorm", device="cpu")
    assert own.q_norm is not own.k_norm


def test_parameters_of_qk_norms():
    def norms(kind):
        module = te.MultiheadAttention(32, 4, qk_norm_type=kind, device="cpu")
        return {n: s for n, s in shapes(module).items() if "norm" in n}

    assert norms("L2Normalization") == {}
    assert norms("RMSNorm") == {"q_norm.weight": (8,), "k_norm.weight": (8,)}
    assert norms("LayerNorm") == {
        "q_norm.weight": (8,),
        "q_norm.bias": (8,),
        "k_norm.weight": (8,),
        "k_norm.bias": (8,),
    }


def test_initialisation():
    """N(0, 0.023) for weights by default, the given methods in their places, 0 for biases."""
    module = te.MultiheadAttention(512, 8, device="cpu")
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all()
        else:  # six standard deviations of each estimate
            count = parameter.numel()
            assert abs(parameter.std() / 0.023 - 1) <= 6 / (2 * count) ** 0.5
            assert abs(parameter.mean() / 0.023) <= 6 / count**0.5
    module = te.MultiheadAttention(
        32,
        4,
        init_method=lambda w: torch.nn.init.constant_(w, 2.0),
        output_layer_init_method=lambda w: torch.nn.init.constant_(w, 3.0),
        device="cpu",
    )
    assert (module.qkv.key_weight == 2).all() and (module.proj.weight == 3).all()


def test_interleaving_needs_one_weight():
    assert not te.MultiheadAttention(32, 4, device="cpu").qkv_weight_interleaved
    fused = te.MultiheadAttention(32, 4, fuse_qkv_params=True, device="cpu")
    assert fused.qkv_weight_interleaved


def test_assigning_the_weight_of_separate_parameters_names_them():
    module = te.MultiheadAttention(32, 4, input_layernorm=True, device="cpu")
    with pytest.raises(AttributeError, match="query_weight, key_weight, value_weight"):
        module.layernorm_qkv.weight = torch.nn.Parameter(torch.zeros(96, 32))


# ---- values --------------------------------------------------------------------------------------

LAYOUTS = {
    "separate": {},
    "interleaved": {"fuse_qkv_params": True},
    "in-turn": {"fuse_qkv_params": True, "qkv_weight_interleaved": False},
}


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=["f32", "bf16", "f16"])
def test_self_attention(device, dtype, layout, groups, form):
    module = make(
        device,
        dtype,
        num_gqa_groups=groups,
        qkv_format=form,
        input_layernorm=True,
        **LAYOUTS[layout],
    )
    model = Model(wide(module), groups=groups, form=form, interleaved=layout == "interleaved")
    check(
        module,
        model,
        module,
        lambda x: model.attention(x, mask())[0],
        [states(device, dtype, form)],
        tol("layer", dtype, DEPTH),
    )


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [4, 2])
def test_cross_attention(device, groups, layout, normed):
    module = make(
        device,
        num_gqa_groups=groups,
        attention_type="cross",
        attn_mask_type="no_mask",
        input_layernorm=normed,
        **LAYOUTS[layout],
    )
    model = Model(wide(module), groups=groups, interleaved=layout == "interleaved")
    may = mask(LENGTH, 9, (-1, -1))
    check(
        module,
        model,
        lambda x, source: module(x, encoder_output=source),
        lambda x, source: model.attention(x, may, source=source)[0],
        [states(device), states(device, length=9)],
        tol("layer", F32, DEPTH),
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [4, 2])
def test_values_of_other_width(device, groups, layout):
    module = make(device, kv_channels=(8, 12), num_gqa_groups=groups, **LAYOUTS[layout])
    options = {"groups": groups, "channels": (8, 12), "interleaved": layout == "interleaved"}
    model = Model(wide(module), **options)
    bound = tol("layer", F32, DEPTH)
    check(module, model, module, lambda x: model.attention(x, mask())[0], [states(device)], bound)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_of_the_input(device, kind, zero_centered):
    module = make(
        device, normalization=kind, zero_centered_gamma=zero_centered, input_layernorm=True,
        layernorm_epsilon=0.1, bias=False,
    )  # fmt: skip
    model = Model(wide(module), kind=kind, zero_centered=zero_centered, eps=0.1)
    bound = tol("layer", F32, DEPTH)
    check(module, model, module, lambda x: model.attention(x, mask())[0], [states(device)], bound)


def test_what_is_returned(device):
    module = make(device, input_layernorm=True, return_bias=True, return_layernorm_output=True)
    x = states(device)
    out, bias, normed = module(x)
    assert_same_bits(bias, module.proj.bias)
    model = Model(wide(module))
    exact, exact_normed = model.attention(x.detach().cpu().double(), mask())
    assert_nmse(out.double().cpu() + bias.double().cpu(), exact.detach(), tol("layer", F32, DEPTH))
    assert_nmse(normed, exact_normed.detach(), tol("layer", F32, DEPTH))
    assert len(make(device, return_bias=True)(x)) == 2
    out, normed = make(device, input_layernorm=True, return_layernorm_output=True)(x)
    assert out.shape == normed.shape == x.shape


# ---- positions and norms of queries and keys -----------------------------------------------------


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("given", ["one", "two"])
def test_rotary_positions(device, given, form, pairs):
    module = make(device, qkv_format=form, rotary_pos_interleaved=pairs, fuse_qkv_params=True)
    of_query = RotaryPositionEmbedding(8, interleaved=pairs).to(device)(LENGTH)
    of_key = (
        of_query
        if given == "one"
        else RotaryPositionEmbedding(8, 0.5, interleaved=pairs).to(device)(LENGTH, 3)
    )

    def rope(t, angles):
        angles = angles.cpu().double()
        angles = angles if form == "sbhd" else angles.transpose(0, 1)
        return reference.rope(t, angles, pairs)

    model = Model(
        wide(module),
        form=form,
        interleaved=True,
        position=lambda q, k: (rope(q, of_query), rope(k, of_key)),
    )
    emb = of_query if given == "one" else (of_query, of_key)
    check(
        module,
        model,
        lambda x: module(x, rotary_pos_emb=emb),
        lambda x: model.attention(x, mask())[0],
        [states(device, form=form)],
        tol("layer", F32, DEPTH),
    )


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("kind", ["L2Normalization", "RMSNorm", "LayerNorm"])
def test_norms_of_queries_and_keys(device, kind, first):
    module = make(device, qk_norm_type=kind, qk_norm_eps=1e-3, qk_norm_before_rope=first)
    angles = RotaryPositionEmbedding(8).to(device)(LENGTH)
    p = wide(module)

    def normed(t, name):
        return norm(t, p.get(f"{name}.weight"), p.get(f"{name}.bias"), kind, 1e-3)

    def position(q, k):
        turned = angles.cpu().double()
        if first:
            q, k = normed(q, "q_norm"), normed(k, "k_norm")
        q, k = reference.rope(q, turned), reference.rope(k, turned)
        return (q, k) if first else (normed(q, "q_norm"), normed(k, "k_norm"))

    model = Model(p, position=position)
    check(
        module,
        model,
        lambda x: module(x, rotary_pos_emb=angles),
        lambda x: model.attention(x, mask())[0],
        [states(device)],
        tol("layer", F32, DEPTH),
    )


# ---- what goes through to the attention ----------------------------------------------------------


def test_masks_windows_and_biases(device):
    module = make(device, fuse_qkv_params=True)
    x = states(device)
    bias = torch.randn(1, HEADS, LENGTH, LENGTH, device=device)
    padded = torch.arange(LENGTH, device=device) >= torch.tensor([6, 4], device=device)[:, None]
    padded = padded[:, None, None]
    options = {
        "attn_mask_type": "padding",
        "attention_mask": padded,
        "window_size": (2, 1),
        "core_attention_bias_type": "post_scale_bias",
        "core_attention_bias": bias,
    }
    sizes = (BATCH, HEADS, LENGTH, LENGTH)
    may = may_attend(sizes, padded.transpose(2, 3) | padded, (2, 1))
    model = Model(wide(module), interleaved=True, bias=bias.cpu().double())
    bound = tol("layer", F32, DEPTH)
    check(
        module,
        model,
        lambda x: module(x, **options),
        lambda x: model.attention(x, may)[0],
        [x],
        bound,
    )
    lengths = torch.tensor([0, 6, 10], device=device, dtype=torch.int32)
    del options["attention_mask"]
    by_mask = module(x, attention_mask=padded, **options)
    assert_same_bits(module(x, cu_seqlens_q=lengths, cu_seqlens_kv=lengths, **options), by_mask)


def test_checkpoint_core_attention(device):
    module = make(device, attention_dropout=0.3, fuse_qkv_params=True)
    x = states(device)
    seed = int(torch.randint(2**31, ()))
    results = []
    for recompute in (False, True):
        torch.manual_seed(seed)
        out = module(x, checkpoint_core_attention=recompute)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    assert_same_bits(*results)


def test_queries_keys_and_values_are_views(device):
    """The projection is not copied on its way to the attention."""
    for layout, options in LAYOUTS.items():
        module = make(device, num_gqa_groups=4, **options)
        seen = []
        module.core_attention.register_forward_pre_hook(
            lambda _, args, seen=seen: seen.append(args)
        )
        module(states(device))
        query, key, value = seen[0][:3]
        storages = {t.untyped_storage().data_ptr() for t in (query, key, value)}
        assert len(storages) == 1, layout


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("cross", [False, True])
def test_fp8(device, recipe, cross):
    options = {"attention_type": "cross", "attn_mask_type": "no_mask"} if cross else {}
    module = make(device, BF16, fuse_qkv_params=True, **options)
    x = states(device, BF16)
    source = {"encoder_output": states(device, BF16)} if cross else {}
    with counted() as gemms:
        with te.autocast(recipe=RECIPES[recipe]()):
            out = module(x, **source)
        out.sum().backward()
    assert (gemms.fp8, gemms.other) == (3 * (3 if cross else 2), 0)


@our_kernels
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_equals_eager(device, layout):
    module = make(
        device, num_gqa_groups=2, qk_norm_type="RMSNorm", input_layernorm=True, **LAYOUTS[layout]
    )
    angles = RotaryPositionEmbedding(8).to(device)(LENGTH)
    x = states(device)
    torch._dynamo.reset()
    results = []
    for function in (module, torch.compile(module, fullgraph=True, backend="aot_eager")):
        out = function(x, rotary_pos_emb=angles)
        results.append([out, *torch.autograd.grad(out.square().sum(), [x, *module.parameters()])])
    assert_same_bits(*results)


@our_kernels
@pytest.mark.filterwarnings("ignore")  # of torch, which goes on in eager mode after an error
@pytest.mark.parametrize("way", ["eager", "hooked", "compiled"])
def test_largest_scores_are_refused(device, way):
    """A setting of the attention that its layer has no place for, also after a call without it."""
    layer = te.TransformerLayer(HIDDEN, 2 * HIDDEN, HEADS, device=device).eval()
    core = layer.self_attention.core_attention
    if way == "hooked":  # calls its modules
        core.register_forward_hook(lambda *_: None)
    x = states(device)
    torch._dynamo.reset()
    for module in (layer.self_attention, layer):
        call = torch.compile(module, backend="aot_eager") if way == "compiled" else module
        expected = call(x)
        core.return_max_logit = True
        with pytest.raises(NotImplementedError, match="leave return_max_logit at False"):
            call(x)
        core.return_max_logit = False
        assert_same_bits(call(x), expected)


def test_copies_and_state_dict(device):
    module = make(device, qk_norm_type="LayerNorm", input_layernorm=True)
    x = states(device)
    expected = module(x)
    assert_same_bits(copy.deepcopy(module)(x), expected)
    other = make(device, qk_norm_type="LayerNorm", input_layernorm=True)
    assert not torch.equal(other(x), expected)
    other.load_state_dict(module.state_dict(), strict=True)
    assert_same_bits(other(x), expected)


# ---- errors --------------------------------------------------------------------------------------


def test_errors(device):
    for arguments, match in (
        ({"attention_type": "both"}, "attention_type='both'"),
        ({"normalization": "BatchNorm"}, "normalization='BatchNorm'"),
        ({"qk_norm_type": "BatchNorm"}, "qk_norm_type='BatchNorm'"),
        ({"num_gqa_groups": 3}, "must divide"),
        ({"return_layernorm_output": True}, "needs input_layernorm"),
        ({"fuse_wgrad_accumulation": True}, "fuse_wgrad_accumulation"),
    ):
        with pytest.raises(ValueError, match=match):
            te.MultiheadAttention(32, 4, device=device, **arguments)
    with pytest.raises(ValueError, match="hidden_size=30 is no multiple"):
        te.MultiheadAttention(30, 4, device=device)
    with pytest.raises(ValueError, match="num_attention_heads = 0"):
        te.MultiheadAttention(32, 0, device=device)
    x = states(device)
    with pytest.raises(ValueError, match="encoder_output with attention_type='self'"):
        make(device)(x, encoder_output=x)
    with pytest.raises(ValueError, match="needs encoder_output"):
        make(device, attention_type="cross")(x)
    with pytest.raises(TypeError, match="inference_params: dict, expected an InferenceParams"):
        make(device)(x, inference_params={})
