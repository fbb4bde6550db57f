# SPDX-License-Identifier: Apache-2.0
"""Flax modules with attention: parameters, PyTorch's layer, decoding, dropout, masks, scans."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from flax.traverse_util import flatten_dict
from flax_arrays import init, normal, shapes_of, to_torch, wide, with_gradients
from thinning import chosen, pairs
from tols import BF16, E4M3, F32, tol

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
import transformer_engine.pytorch as te_torch
from transformer_engine.common import recipe
from transformer_engine.jax.attention import SequenceDescriptor
from transformer_engine.jax.flax.transformer import rotary_pos_emb

HIDDEN, INNER, HEADS, LENGTH, BATCH = 32, 64, 4, 16, 2
DECODER = te_flax.TransformerLayerType.DECODER
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "intermediate_dropout": 0.0}


def layer(**options):
    sizes = {"hidden_size": HIDDEN, "mlp_hidden_size": INNER, "num_attention_heads": HEADS}
    return te_flax.TransformerLayer(**{**sizes, **QUIET, **options})


@pytest.fixture
def keys(seed):
    """Keys of `init`."""
    return {"params": jax.random.key(seed), "dropout": jax.random.key(seed + 1)}


def drawn(rng, variables):
    """Variables whose parameters are all drawn, those that begin as zeros or ones too."""
    return {**variables, "params": jax.tree.map(
        lambda p: normal(rng, p.shape, BF16).astype(jnp.float32) / 4, nn.unbox(variables["params"])
    )}  # fmt: skip


def at_once(module, variables, *inputs, **options):
    return jax.jit(functools.partial(module.apply, **options))(variables, *inputs)


# ---- parameters ----------------------------------------------------------------------------------

NORM = {"scale": (HIDDEN,), "ln_bias": (HIDDEN,)}
QKV = {"qkv": NORM | {"kernel": (HIDDEN, 3, HIDDEN), "bias": (3, HIDDEN)}}
QUERY = {"query": NORM | {"kernel": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}}
OUT = {"out": {"kernel": (HIDDEN, HIDDEN), "bias": (HIDDEN,)}}
MLP = {
    "mlp": NORM | {"wi_kernel": (HIDDEN, 1, INNER), "wi_bias": (1, INNER),
                   "wo_kernel": (INNER, HIDDEN), "wo_bias": (HIDDEN,)},
}  # fmt: skip
RELPOS = {"relpos_bias": {"rel_embedding": (HEADS, 32)}}


def kv(width):
    return {"kv": {"kernel": (HIDDEN, 2, width), "bias": (2, width)}}


def alone(width):
    one = {"kernel": (HIDDEN, width), "bias": (width,)}
    return {"key": one, "value": one}


TREES = {
    "plain": ({}, {"attention": QKV | OUT} | MLP | RELPOS),
    "no-embedding": ({"enable_relative_embedding": False}, {"attention": QKV | OUT} | MLP),
    "gqa": ({"num_gqa_groups": 2}, {"attention": QUERY | kv(16) | OUT} | MLP | RELPOS),
    "apart": ({"fuse_qkv_params": False}, {"attention": QUERY | alone(32) | OUT} | MLP | RELPOS),
    "decoder": (
        {"layer_type": DECODER},
        {"self_attention": QKV | OUT, "encoder_decoder_attention": QUERY | kv(32) | OUT}
        | MLP | RELPOS,
    ),
    "output-norm": (
        {"output_layernorm": True, "enable_relative_embedding": False},
        {"attention": {"qkv": {n: QKV["qkv"][n] for n in ("kernel", "bias")}} | OUT,
         "output_layernorm": NORM} | MLP,
    ),
    "rmsnorm": (
        {"layernorm_type": "rmsnorm", "use_bias": False, "enable_relative_embedding": False},
        {"attention": {"qkv": {"scale": (HIDDEN,), "kernel": (HIDDEN, 3, HIDDEN)},
                       "out": {"kernel": (HIDDEN, HIDDEN)}},
         "mlp": {"scale": (HIDDEN,), "wi_kernel": (HIDDEN, 1, INNER),
                 "wo_kernel": (INNER, HIDDEN)}},
    ),
    "adapted": (
        {"low_rank_adaptation_scope": "all", "low_rank_adaptation_dim": 4,
         "enable_relative_embedding": False},
        {"attention": {
            "qkv": QKV["qkv"] | {"lora_a_kernel": (HIDDEN, 3, 4), "lora_b_kernel": (3, 4, HIDDEN)},
            "out": OUT["out"] | {"lora_a_kernel": (HIDDEN, 4), "lora_b_kernel": (4, HIDDEN)}},
         "mlp": MLP["mlp"] | {
             "wi_lora_a_kernel": (HIDDEN, 1, 4), "wi_lora_b_kernel": (1, 4, INNER),
             "wo_lora_a_kernel": (INNER, 4), "wo_lora_b_kernel": (4, HIDDEN)}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_parameters(keys, name):
    options, expected = TREES[name]
    module = layer(**{"use_bias": True, **options})
    x = jnp.zeros((BATCH, LENGTH, HIDDEN))
    mask = jnp.zeros((BATCH, 1, LENGTH, LENGTH), bool)
    encoded = (x, None, mask) if options.get("layer_type") is DECODER else ()
    variables = nn.unbox(jax.eval_shape(module.init, keys, x, *encoded))
    assert jax.tree.map(jnp.shape, variables) == {"params": expected}
    with te.autocast(enabled=True, recipe=recipe.DelayedScaling(amax_history_len=4)):
        states = shapes_of(jax.eval_shape(module.init, keys, x, *encoded)["fp8_metas"])
    places = flatten_dict(expected, sep="/")
    linears = {path.rpartition("/")[0] for path in places if path.endswith("kernel")}
    for path, shape in states.items():
        assert path.rpartition("/")[0] in linears
        assert shape == ((1,) if path.endswith("scale") else (4,))
    count = sum(2 if path == "mlp" else 1 for path in linears)
    assert len(states) == count * 3 * 2


def test_names_of_axes(keys):
    module = layer(use_bias=True, num_gqa_groups=2, softmax_type="learnable")
    tree = jax.eval_shape(module.init, keys, jnp.zeros((BATCH, LENGTH, HIDDEN)))["params"]
    names = jax.tree.map(
        lambda box: tuple(n and n.removeprefix("nvte_") for n in box.names), tree,
        is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned),
    )  # fmt: skip
    norm = {"scale": ("w_no_shard",), "ln_bias": ("w_no_shard",)}
    assert names == {
        "attention": {
            "query": norm | {"kernel": ("w_fsdp", "w_tp"), "bias": ("w_tp",)},
            "kv": {"kernel": ("w_fsdp", "w_joined", "w_tp"), "bias": ("w_joined", "w_tp")},
            "out": {"kernel": ("w_tp", "w_fsdp"), "bias": ("w_no_shard",)},
            "DotProductAttention_0": {"softmax_offset": (None, "head", None, None)},
        },
        "mlp": norm | {
            "wi_kernel": ("w_fsdp", "w_joined", "w_tp"), "wi_bias": ("w_joined", "w_tp"),
            "wo_kernel": ("w_tp", "w_fsdp"), "wo_bias": ("w_no_shard",),
        },
        "relpos_bias": {"rel_embedding": ("heads", "relpos_buckets")},
    }  # fmt: skip


def test_sizes_of_drawn_kernels(keys):
    """Queries are drawn 1 / sqrt(channels of a head) as large, unless they are not to be."""
    x = jnp.zeros((1, 1, 256))
    for scaled in (True, False):
        module = te_flax.MultiHeadAttention(16, 16, scaled_query_init=scaled)
        draw = jax.jit(lambda keys, own=module: own.init(keys, x, x))
        kernel = nn.unbox(draw(keys))["params"]["qkv"]["kernel"]
        deviations = np.asarray(kernel).std(axis=(0, 2)) * 16
        # Of n numbers it errs by 1 / sqrt(2 n), which is 1 / 6 of the bound of a share of n / 2.
        expected = [0.25 if scaled else 1.0, 1.0, 1.0]
        np.testing.assert_allclose(deviations, expected, rtol=tol("share", F32, 65536 // 2))


# ---- against PyTorch's layer ---------------------------------------------------------------------


def norm_of(p, prefix):
    return {f"{prefix}layer_norm_weight": p["scale"], f"{prefix}layer_norm_bias": p["ln_bias"]}


def attention_of(p, prefix, norm):
    """Parameters of an attention by their names in torch, as PyTorch has them."""
    made, first = {}, next(p[name] for name in ("qkv", "query") if name in p)
    if "qkv" in p:
        parts = {n: (first["kernel"][:, i], first["bias"][i]) for i, n in enumerate(
            ("query", "key", "value"))}  # fmt: skip
    elif "kv" in p:
        parts = {n: (p["kv"]["kernel"][:, i], p["kv"]["bias"][i]) for i, n in enumerate(
            ("key", "value"))}  # fmt: skip
        parts["query"] = (first["kernel"], first["bias"])
    else:
        parts = {n: (p[n]["kernel"], p[n]["bias"]) for n in ("query", "key", "value")}
    of_query = "layernorm_qkv." if norm == "self" else "layernorm_query." if norm else "qkv."
    if norm:
        made |= norm_of(first, f"{prefix}{of_query}")
    for name, (kernel, bias) in parts.items():
        place = of_query if norm != "cross" or name == "query" else "key_value."
        made |= {f"{prefix}{place}{name}_weight": kernel.T, f"{prefix}{place}{name}_bias": bias}
    out = p["out"]
    return made | {f"{prefix}proj.weight": out["kernel"].T, f"{prefix}proj.bias": out["bias"]}


def as_torch(params, output_norm=False):
    """Parameters (or gradients) of a layer by the names that PyTorch's layer has."""
    name = "attention" if "attention" in params else "self_attention"
    made = attention_of(params[name], "self_attention.", None if output_norm else "self")
    if "encoder_decoder_attention" in params:
        made |= attention_of(params["encoder_decoder_attention"], "inter_attention.", "cross")
    mlp = params["mlp"]
    made |= norm_of(mlp, "layernorm_mlp.")
    made |= {
        "layernorm_mlp.fc1_weight": mlp["wi_kernel"].reshape(HIDDEN, -1).T,
        "layernorm_mlp.fc1_bias": mlp["wi_bias"].reshape(-1),
        "layernorm_mlp.fc2_weight": mlp["wo_kernel"].T, "layernorm_mlp.fc2_bias": mlp["wo_bias"],
    }  # fmt: skip
    if output_norm:
        last = params["output_layernorm"]
        made |= {"layernorm.weight": last["scale"], "layernorm.bias": last["ln_bias"]}
    return made


CASES = {
    "plain": ({}, {}),
    "full": ({"self_attn_mask_type": "no_mask"}, {"self_attn_mask_type": "no_mask"}),
    "gqa": ({"num_gqa_groups": 2}, {"num_gqa_groups": 2}),
    "apart": ({"fuse_qkv_params": False}, {}),
    "gated": ({"mlp_activations": ("silu", "linear")}, {"activation": "swiglu"}),
    "post-norm-residual": ({"apply_residual_connection_post_layernorm": True},) * 2,
    "output-norm": ({"output_layernorm": True},) * 2,
    "zero-centered": ({"zero_centered_gamma": True},) * 2,
    "window": ({"window_size": (3, 0)}, {"window_size": (3, 0)}),
    "decoder": ({"layer_type": DECODER}, {"layer_type": "decoder"}),
}
FP8 = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
}


@chosen(
    [(name, "none", number % 2 == 1) for number, name in enumerate(CASES)]
    + [("plain", "delayed", True), ("gqa", "delayed", False), ("gated", "current", True),
       ("decoder", "delayed", False)],
    name=CASES, fp8=FP8, transposed=[False, True],
)  # fmt: skip
def test_pytorch(rng, keys, name, fp8, transposed):
    """Output and gradients are those of PyTorch's layer with the same parameters."""
    ours, theirs = CASES[name]
    module = layer(
        use_bias=True, scale_attn_logits=True, enable_relative_embedding=False,
        transpose_batch_sequence=transposed, **ours,
    )  # fmt: skip
    shape = (LENGTH, BATCH, HIDDEN) if transposed else (BATCH, LENGTH, HIDDEN)
    inputs = [normal(rng, shape) for _ in range(2 if name == "decoder" else 1)]
    grad, mask = normal(rng, shape), None
    if name == "decoder":
        mask = np.zeros((BATCH, 1, LENGTH, LENGTH), bool)
        mask[0, ..., 11:] = True
    call_recipe = FP8[fp8]
    with te.autocast(enabled=call_recipe is not None, recipe=call_recipe):
        given = () if mask is None else (None, jnp.asarray(mask))
        variables = drawn(rng, init(module, keys, *inputs, *given))

        def call(params, *inputs):
            return module.apply({**variables, "params": params}, *inputs, *given)

        y, (grads, *input_grads) = with_gradients(call, grad, variables["params"], *inputs)
    twin = te_torch.TransformerLayer(
        HIDDEN, INNER, HEADS, layernorm_epsilon=1e-6, hidden_dropout=0, attention_dropout=0,
        attn_input_format="sbhd" if transposed else "bshd", device="cpu", **theirs,
    )  # fmt: skip
    named = dict(twin.named_parameters())
    values = as_torch(variables["params"], name == "output-norm")
    assert named.keys() == values.keys()
    with torch.no_grad():
        for path, value in values.items():
            named[path].copy_(to_torch(value))
    torch_inputs = [to_torch(one).requires_grad_() for one in inputs]
    options = {}
    if mask is not None:
        hidden = torch.from_numpy(mask[..., :1, :])
        lengths = torch.zeros_like(hidden), hidden
        options = {"encoder_output": torch_inputs[1], "enc_dec_attn_mask": lengths,
                   "enc_dec_attn_mask_type": "padding"}  # fmt: skip
    with te_torch.autocast(enabled=call_recipe is not None, recipe=call_recipe):
        y_torch = twin(torch_inputs[0], **options)
    y_torch.backward(to_torch(grad))
    bound = 2 * tol("layer", F32, INNER)
    if call_recipe is not None:
        bound += tol("recast", E4M3, y.size)
    assert_nmse(wide(y), y_torch.detach(), bound, "output")
    for number, (got, own) in enumerate(zip(input_grads, torch_inputs, strict=True)):
        assert_nmse(wide(got), own.grad, bound, f"gradient of input {number}")
    for path, value in as_torch(grads, name == "output-norm").items():
        exact = named[path].grad
        if path.endswith("key_bias"):  # a constant of all scores of a query: 0 but for rounding
            scale = named[path.replace("key_bias", "value_bias")].grad.abs().max()
            assert (wide(value).abs().max() / scale) <= bound**0.5
            continue
        assert_nmse(wide(value), exact, bound, path)


# ---- decoding ------------------------------------------------------------------------------------


@pairs(
    layer_type=["ENCODER", "DECODER"],
    transposed=[False, True],
    position=["none", "rotary", "relative"],
    groups=[4, 2],
    window=[None, (5, 0)],
    chunks=[[1] * 8, [5, 1, 2]],
)
def test_decoding(rng, keys, layer_type, transposed, position, groups, window, chunks):
    """A sequence in pieces, with the keys and values of those before, is the whole at once."""
    kind = te_flax.TransformerLayerType[layer_type]
    refused = kind is DECODER and (position == "rotary" or window is not None)
    module = layer(
        layer_type=kind, transpose_batch_sequence=transposed, num_gqa_groups=groups,
        enable_relative_embedding=position == "relative",
        enable_rotary_pos_emb=position == "rotary", window_size=window,
    )  # fmt: skip
    dim = 0 if transposed else 1
    shape = (8, BATCH, HIDDEN) if transposed else (BATCH, 8, HIDDEN)
    x = normal(rng, shape)
    encoded, mask = (x * 2, jnp.zeros((BATCH, 1, 8, 8), bool)) if kind is DECODER else (None, None)
    first = jax.jit(functools.partial(module.init, decode=True, max_decode_length=8))
    if refused:
        with pytest.raises(NotImplementedError, match="position of a query"):
            first(keys, x, encoded, None, mask)
        return
    variables = first(keys, x, encoded, None, mask)
    own = variables["cache"]["self_attention" if kind is DECODER else "attention"]
    heads = (*shape[:2], groups, HIDDEN // HEADS)
    assert {name: value.shape for name, value in own.items()} == {
        "cached_key": heads, "cached_value": heads, "cache_index": ()}  # fmt: skip
    variables = {**drawn(rng, variables), "cache": variables["cache"]}
    whole = at_once(module, {"params": variables["params"]}, x, encoded, None, mask)

    @jax.jit
    def step(variables, piece):
        rows = None if mask is None else mask[:, :, : piece.shape[dim]]
        return module.apply(variables, piece, encoded, None, rows, decode=True,
                            max_decode_length=8, mutable=["cache"])  # fmt: skip

    made = []
    for piece in jnp.split(x, np.cumsum(chunks)[:-1], axis=dim):
        y, moved = step(variables, piece)
        variables = {**variables, **moved}
        made.append(y)
    assert_nmse(wide(jnp.concatenate(made, dim)), wide(whole), tol("layer", F32, INNER))


# ---- dropout -------------------------------------------------------------------------------------


def test_dropout_rates(rng, keys):
    """All branches dropped: the input is left; evaluation has none; keys decide."""
    x = normal(rng, (BATCH, LENGTH, HIDDEN))
    plain = layer()
    variables = drawn(rng, init(plain, keys, x))
    expected = at_once(plain, variables, x)
    rngs = {"dropout": keys["dropout"]}
    np.testing.assert_array_equal(at_once(layer(hidden_dropout=1.0), variables, x, rngs=rngs), x)
    np.testing.assert_array_equal(at_once(layer(drop_path=1.0), variables, x, rngs=rngs), x)
    for option in ("hidden_dropout", "attention_dropout", "intermediate_dropout", "drop_path"):
        module = layer(**{option: 0.5})
        first, same, other = (
            np.asarray(at_once(module, variables, x, rngs={"dropout": key}))
            for key in (keys["dropout"], keys["dropout"], keys["params"])
        )
        np.testing.assert_array_equal(first, same)
        assert (first != np.asarray(expected)).any(), option
        if option != "drop_path":  # of two samples both may fall the same way
            assert (first != other).any(), option
        evaluated = at_once(module, variables, x, deterministic=True)
        np.testing.assert_array_equal(evaluated, expected)


def test_drop_path_drops_samples(rng, keys):
    """Of a sample the whole branch, times two, or nothing of it."""
    x = normal(rng, (64, 1, HIDDEN))
    module = te_flax.TransformerLayer(
        HIDDEN, INNER, HEADS, **QUIET, drop_path=0.5, mlp_kernel_init=nn.initializers.zeros
    )
    variables = init(module, keys, x)
    branch = at_once(module, variables, x, deterministic=True) - x
    y = at_once(module, variables, x, rngs={"dropout": keys["dropout"]}) - x
    dropped = (np.asarray(y) == 0).all(axis=(1, 2))
    bound = tol("layer", F32, INNER)
    assert_nmse(wide(y), wide(jnp.where(dropped[:, None, None], 0, 2 * branch)), bound)
    assert 0 < dropped.sum() < 64


# ---- masks, positions ----------------------------------------------------------------------------


def test_padded_tokens(rng, keys):
    """Lengths and a mask say the same; what stands in padding does not reach real tokens."""
    module = layer(self_attn_mask_type="padding")
    x = normal(rng, (BATCH, LENGTH, HIDDEN))
    lengths = np.array([9, 14])
    real = np.arange(LENGTH) < lengths[:, None]
    mask = jnp.asarray(~(real[:, None, :, None] & real[:, None, None, :]))
    variables = drawn(rng, init(module, keys, x, None, mask))
    by_mask = at_once(module, variables, x, None, mask)
    descriptor = SequenceDescriptor.from_seqlens(jnp.asarray(lengths))
    by_lengths = at_once(module, variables, x, None, descriptor)
    np.testing.assert_array_equal(by_mask, by_lengths)
    noise = jnp.where(real[..., None], x, normal(rng, x.shape))
    other = at_once(module, variables, noise, None, descriptor)
    np.testing.assert_array_equal(np.asarray(other)[real], np.asarray(by_mask)[real])


@pytest.mark.parametrize("method", ["consecutive", "alternate"])
@pytest.mark.parametrize("transposed", [False, True])
def test_rotary_embedding(rng, method, transposed):
    x = normal(rng, (BATCH, 5, 3, 8))
    pairs_of_channels = wide(x).unflatten(-1, (4, 2) if method == "consecutive" else (2, 4))
    dim = -1 if method == "consecutive" else -2
    numbers = torch.view_as_complex(pairs_of_channels.movedim(dim, -1).contiguous())
    angles = (torch.arange(5) + 2)[:, None] / (2 * (100 / 2) ** (torch.arange(4) / 4)).double()
    turned = numbers * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.view_as_real(turned).movedim(-1, dim).flatten(-2)
    given = x.swapaxes(0, 1) if transposed else x
    got = rotary_pos_emb(given, (2, 100), transposed, method, start=2)
    got = got.swapaxes(0, 1) if transposed else got
    assert_nmse(wide(got), expected, tol("chain", F32))
    with pytest.raises(ValueError, match="'pairs'"):
        rotary_pos_emb(x, group_method="pairs")


@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_biases(keys, bidirectional):
    """Small distances have a bucket each, larger ones share them; all beyond 16 the last."""
    module = te_flax.RelativePositionBiases(8, 16, 3)
    variables = nn.unbox(module.init(keys, 20, 20))
    table = np.asarray(variables["params"]["rel_embedding"])
    biases = np.asarray(module.apply(variables, 20, 20, bidirectional))
    assert biases.shape == (1, 3, 20, 20)
    # Buckets by distance: of 4, two exact ones and two up to 16; of 8, four and four.
    wide_ones = [0, 1, *[2] * 4, *[3] * 14] if bidirectional else [
        0, 1, 2, 3, 4, 4, 5, 5, *[6] * 4, *[7] * 8]  # fmt: skip
    for query in range(20):
        for key in range(20):
            behind = key > query
            bucket = wide_ones[abs(key - query)] if bidirectional or not behind else 0
            bucket += 4 if bidirectional and behind else 0
            np.testing.assert_array_equal(biases[0, :, query, key], table[:, bucket])


def test_learnable_softmax(rng, keys):
    """The parameter has a gradient, and at 0 the softmax is that with one more."""
    x = normal(rng, (BATCH, LENGTH, HIDDEN))
    q = x.reshape(BATCH, LENGTH, HEADS, -1)
    module = te_flax.DotProductAttention(HIDDEN // HEADS, HEADS, softmax_type="learnable")
    variables = nn.unbox(module.init(keys, q, q, q))
    assert shapes_of(variables) == {"params/softmax_offset": (1, HEADS, 1, 1)}
    off_by_one = module.clone(softmax_type="off_by_one").apply({}, q, q, q)
    np.testing.assert_array_equal(module.apply(variables, q, q, q), off_by_one)
    grads = jax.grad(lambda v: module.apply(v, q, q, q).sum())(variables)
    assert np.asarray(grads["params"]["softmax_offset"]).all()


def test_attention_module(rng, keys):
    """Packed layouts, sequence first, the largest score; heads that are not those of the module."""
    q, k, v = (normal(rng, (BATCH, LENGTH, HEADS, 8)) for _ in range(3))
    module = te_flax.DotProductAttention(8, HEADS)
    expected, largest = module.clone(return_max_logit=True).apply({}, q, k, v)
    assert largest.shape == (HEADS,)
    packed = {"bs3hd": (jnp.stack([q, k, v], 2), None, None),
              "bshd_bs2hd": (q, jnp.stack([k, v], 2), None)}  # fmt: skip
    for layout, tensors in packed.items():
        np.testing.assert_array_equal(module.clone(qkv_layout=layout).apply({}, *tensors), expected)
    turned = [one.swapaxes(0, 1) for one in (q, k, v)]
    got = module.clone(transpose_batch_sequence=True).apply({}, *turned)
    np.testing.assert_array_equal(got.swapaxes(0, 1), expected)
    with pytest.raises(ValueError, match="key has 4 heads, the module 2"):
        module.clone(num_gqa_groups=2).apply({}, q, k, v)


# ---- transformations -----------------------------------------------------------------------------


@pytest.mark.parametrize("fp8", FP8)
def test_scan_over_layers(rng, keys, fp8):
    """Layers in a scan, each with parameters and a state of its own; remat changes nothing."""
    call_recipe, x = FP8[fp8], normal(rng, (BATCH, LENGTH, HIDDEN))

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return layer(enable_relative_embedding=False, name="layer")(x), None

    def scanned(body):
        return nn.scan(
            body, variable_axes={"params": 0, "fp8_metas": 0}, split_rngs={"params": True},
            length=2, metadata_params={nn.PARTITION_NAME: "layers"},
        )()  # fmt: skip

    def loss(module, variables):
        return jnp.sum(module.apply(variables, x, None)[0] ** 2)

    with te.autocast(enabled=call_recipe is not None, recipe=call_recipe):
        module = scanned(Body)
        boxed = init(module, keys, x, None)
        assert boxed["params"]["layer"]["mlp"]["wo_kernel"].names[0] == "layers"
        variables = drawn(rng, boxed)
        value, grads = jax.jit(jax.value_and_grad(functools.partial(loss, module)))(variables)

        def one_by_one(variables):
            y = x
            for number in range(2):
                own = jax.tree.map(lambda leaf, n=number: leaf[n], variables)
                y = layer(enable_relative_embedding=False).apply(
                    {name: tree["layer"] for name, tree in own.items()}, y
                )
            return jnp.sum(y**2)

        expected, expected_grads = jax.jit(jax.value_and_grad(one_by_one))(variables)
        again = scanned(nn.remat(Body))
        remat, remat_grads = jax.jit(jax.value_and_grad(functools.partial(loss, again)))(variables)
    bound = 2 * tol("layer", F32, INNER)
    for got in (value, remat):
        assert_nmse(wide(got), wide(expected), bound)
    for got in (grads, remat_grads):
        jax.tree.map(lambda a, b: assert_nmse(wide(a), wide(b), bound), got, expected_grads)
    if fp8 == "delayed":
        scales = grads["fp8_metas"]["layer"]["mlp"]["x_0_scale"]
        assert scales.shape == (2, 1) and np.unique(scales).size == 2


def test_rules_of_axes():
    with te.autocast(mesh_resource=te.MeshResource(tp_resource="model")):
        rules = te_flax.extend_logical_axis_rules((("embed", None), ("nvte_w_tp", "model")))
        assert rules[:2] == (("embed", None), ("nvte_w_tp", "model"))
        assert ("nvte_head", "model") in rules and ("nvte_batch", None) in rules
        with pytest.raises(ValueError, match="nvte_w_tp"):
            te_flax.extend_logical_axis_rules((("nvte_w_tp", "data"),))


def test_what_is_refused(keys):
    x = jnp.zeros((BATCH, LENGTH, HIDDEN))
    for message, module in (
        ("encoded is None", layer(layer_type=DECODER)),
        ("hidden_size=64", layer(hidden_size=64)),
        ("5 heads", layer(num_attention_heads=5)),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(module.init, keys, x)
