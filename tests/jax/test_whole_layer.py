# SPDX-License-Identifier: Apache-2.0
"""`TransformerLayer` as one plan: the bits of PyTorch's, its dropouts, and what is no plan."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from jax_arrays import DTYPES, assert_same, normal, wide
from thinning import chosen
from tols import BF16, E4M3, F16, F32, tol

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
import transformer_engine.pytorch as te_torch
from transformer_engine.common import recipe as recipes
from transformer_engine.jax.definitions import by_definition
from transformer_engine.jax.flax import whole_layer

HIDDEN, INNER, HEADS, LENGTH, BATCH = 32, 64, 4, 16, 2
RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(disable_stochastic_rounding=True),
}
QUIET = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "intermediate_dropout": 0.0}
OPTIONS = {
    "layernorm": ({}, {}),
    "rmsnorm": ({"layernorm_type": "rmsnorm"}, {"normalization": "RMSNorm"}),
    "centered": ({"zero_centered_gamma": True},) * 2,
    "gated": ({"mlp_activations": ("silu", "linear")}, {"activation": "swiglu"}),
    "full": ({"self_attn_mask_type": "no_mask"},) * 2,
    "window": ({"window_size": (3, 0)},) * 2,
    "no-bias": ({"use_bias": False}, {"bias": False}),
}


def layer(**options):
    common = {"use_bias": True, "scale_attn_logits": True, "enable_relative_embedding": False}
    sizes = {"hidden_size": HIDDEN, "mlp_hidden_size": INNER, "num_attention_heads": HEADS}
    return te_flax.TransformerLayer(**{**sizes, **common, **QUIET, **options})


def drawn(module, key, rng, x):
    """Variables, with parameters that are no zeros or ones."""
    init = jax.jit(functools.partial(module.init, deterministic=True))
    made = dict(nn.unbox(init(key, x)))
    params = jax.tree.map(lambda p: p + normal(rng, p.shape).astype(p.dtype) / 8, made["params"])
    return params, {name: tree for name, tree in made.items() if name != "params"}


def as_torch(params):
    """Parameters, or their gradients, by the names that they have in PyTorch's layer."""
    qkv, out, mlp = params["attention"]["qkv"], params["attention"]["out"], params["mlp"]
    attention, found = "self_attention.layernorm_qkv.", {}
    for prefix, norm in ((attention, qkv), ("layernorm_mlp.", mlp)):
        names = {"scale": "weight", "ln_bias": "bias"}
        found |= {f"{prefix}layer_norm_{names[n]}": norm[n] for n in names if n in norm}
    for i, name in enumerate(("query", "key", "value")):
        found[f"{attention}{name}_weight"] = qkv["kernel"][:, i].T
        found |= {f"{attention}{name}_bias": qkv["bias"][i]} if "bias" in qkv else {}
    kernels = {"self_attention.proj.": (out, ""), "layernorm_mlp.fc1_": (mlp, "wi_"),
               "layernorm_mlp.fc2_": (mlp, "wo_")}  # fmt: skip
    for prefix, (of, name) in kernels.items():
        found[f"{prefix}weight"] = of[f"{name}kernel"].reshape(of[f"{name}kernel"].shape[0], -1).T
        bias = of.get(f"{name}bias")
        found |= {} if bias is None else {f"{prefix}bias": bias.reshape(-1)}
    return found


def twin_of(params, dtype, transposed, **options):
    """PyTorch's layer with the same numbers."""
    twin = te_torch.TransformerLayer(
        HIDDEN, INNER, HEADS, layernorm_epsilon=1e-6, hidden_dropout=0, attention_dropout=0,
        attn_input_format="sbhd" if transposed else "bshd", params_dtype=dtype, device="cpu",
        **options,
    )  # fmt: skip
    named, values = dict(twin.named_parameters()), as_torch(params)
    assert named.keys() == values.keys()
    with torch.no_grad():
        for name, value in values.items():
            named[name].copy_(torch.from_numpy(np.array(value, np.float32)))
    return twin


def step_of(module):
    """(output, gradients of parameters, states and input), jitted."""

    @jax.jit
    def step(params, metas, x, grad):
        y, pull = jax.vjp(lambda p, m, x: module.apply({"params": p, **m}, x), params, metas, x)
        return y, *pull(grad)

    return step


@chosen(
    [("none", "window", F16, False), ("delayed", "layernorm", BF16, False),
     ("delayed", "gated", BF16, True), ("current", "rmsnorm", BF16, True),
     ("block", "no-bias", F16, False), ("mxfp8", "full", BF16, False),
     ("current", "centered", F16, False), ("nvfp4", "layernorm", BF16, True)],
    recipe=RECIPES, options=OPTIONS, dtype=[F16, BF16], transposed=[False, True],
)  # fmt: skip
def test_bits_are_those_of_the_module(rng, key, recipe, options, dtype, transposed):
    """Output, gradients and the scales that the next steps cast with."""
    ours, theirs = OPTIONS[options]
    module = layer(dtype=DTYPES[dtype], transpose_batch_sequence=transposed, **ours)
    shape = (LENGTH, BATCH, HIDDEN) if transposed else (BATCH, LENGTH, HIDDEN)
    used = RECIPES[recipe]
    with te.autocast(enabled=used is not None, recipe=used):
        params, metas = drawn(module, key, rng, normal(rng, shape, dtype))
        twin, step = twin_of(params, dtype, transposed, **theirs), step_of(module)
        for _ in range(2):
            x, grad = normal(rng, shape, dtype), normal(rng, shape, dtype)
            with te_torch.counting() as ran:
                y, grads, metas, of_x = jax.block_until_ready(step(params, metas, x, grad))
            assert ran.fp8_gemms == (12 if recipe in ("delayed", "current", "block") else 0)
            x = torch.from_numpy(np.array(x, np.float32)).to(dtype).requires_grad_()
            twin.zero_grad()
            with te_torch.autocast(enabled=used is not None, recipe=used):
                wanted = twin(x)
            wanted.backward(torch.from_numpy(np.array(grad, np.float32)).to(dtype))
            assert_same(y, wanted.detach())
            assert_same(of_x, x.grad)
            named = dict(twin.named_parameters())
            for path, value in as_torch(grads).items():
                assert_same(value, named[path].grad)


@pytest.mark.parametrize(("recipe", "dtype"), [("none", F32), ("delayed", BF16), ("delayed", F32)])
def test_is_the_layer_of_modules(rng, key, recipe, dtype, monkeypatch):
    """One call each way; the bits are those of the modules, the numbers those of definitions."""
    used, module = RECIPES[recipe], layer(dtype=DTYPES[dtype])
    shape = BATCH, LENGTH, HIDDEN
    x, grad = normal(rng, shape, BF16), normal(rng, shape, BF16)
    with te.autocast(enabled=used is not None, recipe=used):
        given = (*drawn(module, key, rng, x), x, grad)
        text = str(jax.make_jaxpr(step_of(module))(*given))
        assert text.count("te_plan[") == 2
        assert not any(name in text for name in ("te_layer[", "te_operator["))
        whole = step_of(module)(*given)
        defined = by_definition(step_of(module))(*given)
        monkeypatch.setattr(whole_layer, "runs", lambda *_: False)
        by_modules = step_of(module)(*given)
    bound = 2 * tol("layer", BF16, INNER) + (tol("recast", E4M3, x.size) if used else 0.0)
    assert jax.tree.structure(by_modules) == jax.tree.structure(whole)
    leaves = (jax.tree.leaves(of) for of in (whole, by_modules, defined))
    for got, exact, near in zip(*leaves, strict=True):
        assert got.dtype == exact.dtype == near.dtype
        np.testing.assert_array_equal(got, exact)
        assert_nmse(wide(got), wide(near), bound, "whole layer")


def test_dropout(rng, key):
    """Elements are dropped or kept, in the gradient as in the output; a key says which."""
    module, shape = layer(dtype=jnp.bfloat16, hidden_dropout=0.5), (BATCH, 64, HIDDEN)
    x = jnp.zeros(shape, jnp.bfloat16)
    params = jax.tree.map(jnp.zeros_like, drawn(module, key, rng, x)[0])
    params["mlp"]["wo_bias"] += 1.0

    @jax.jit
    def step(params, x, key):
        call = functools.partial(module.apply, rngs={"dropout": key})
        y, pull = jax.vjp(lambda p: call({"params": p}, x), params)
        return y, pull(jnp.ones_like(y))[0]["mlp"]["wo_bias"]

    y, of_bias = step(params, x, key)
    assert set(np.unique(np.asarray(y, np.float32))) == {0.0, 2.0}
    np.testing.assert_array_equal(np.float32(of_bias), np.asarray(y, np.float32).sum((0, 1)))
    assert abs(np.asarray(y, np.float32).mean() - 1.0) < tol("share", F32, y.size)
    assert np.array_equal(y, step(params, x, key)[0])
    assert not np.array_equal(y, step(params, x, jax.random.fold_in(key, 1))[0])


def test_scan_remat_and_frozen_parameters(rng, key):
    """Layers in a scan that are computed again are those one after the other."""
    shape, recipe = (BATCH, LENGTH, HIDDEN), RECIPES["delayed"]
    x = normal(rng, shape, BF16)

    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return layer(dtype=jnp.bfloat16)(x), None

    stack = nn.scan(nn.remat(Body), variable_axes={"params": 0, "fp8_metas": 0},
                    split_rngs={"params": True}, length=2,
                    metadata_params={nn.PARTITION_NAME: "layers"})()  # fmt: skip
    with te.autocast(enabled=True, recipe=recipe):
        made = nn.unbox(jax.jit(stack.init)(key, x, None))
        both = jax.jit(jax.value_and_grad(lambda v: (stack.apply(v, x, None)[0] ** 2).sum()))
        value, grads = both(made)
        assert "te_plan[" in str(jax.make_jaxpr(both)(made))
        alone, layers = layer(dtype=jnp.bfloat16), []
        for i in range(2):
            (own,) = jax.tree.map(lambda a, i=i: a[i], made)["params"].values()
            metas = jax.tree.map(lambda a, i=i: a[i], made)["fp8_metas"]["TransformerLayer_0"]
            layers.append({"params": own, "fp8_metas": metas})

        def chain(layers):
            y = x
            for each in layers:
                y = alone.apply(each, y)
            return (y**2).sum()

        wanted, own = jax.jit(jax.value_and_grad(chain))(layers)
        # Of scales alone: the casts of all gradients are still made for the states.
        of_state = jax.jit(jax.grad(lambda m: chain([layers[0] | {"fp8_metas": m}, layers[1]])))(
            layers[0]["fp8_metas"]
        )
    assert value == wanted
    for i in range(2):
        for collection in ("params", "fp8_metas"):
            got = jax.tree.map(lambda a, i=i: a[i], grads[collection]["TransformerLayer_0"])
            jax.tree.map(np.testing.assert_array_equal, got, own[i][collection])
    jax.tree.map(np.testing.assert_array_equal, of_state, own[0]["fp8_metas"])


def test_states(rng, key):
    """A batch has one amax; a forward alone changes nothing; a sum of states is an error."""
    module, shape = layer(dtype=jnp.bfloat16), (3, BATCH, LENGTH, HIDDEN)
    xs = normal(rng, shape, BF16) * jnp.asarray([1, 2, 4], jnp.bfloat16)[:, None, None, None]
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        params, metas = drawn(module, key, rng, xs[0])

        def loss(metas, xs):
            call = jax.vmap(lambda x: module.apply({"params": params, **metas}, x))
            return jnp.sum(call(xs).astype(jnp.float32) ** 2)

        of_state = jax.jit(jax.grad(loss))
        together = of_state(metas, xs)
        alone = [of_state(metas, x[None]) for x in xs]
        for got, *each in zip(*map(jax.tree.leaves, (together, *alone)), strict=True):
            wanted = np.min(each, 0) if got.shape == (1,) else np.max(each, 0)
            np.testing.assert_array_equal(got, wanted)
        summed = jax.tree.map(jnp.add, alone[0], alone[1])
        assert np.isnan(jax.jit(loss)(summed, xs))
        with pytest.raises(ValueError, match="sum of several"):
            module.apply({"params": params, **summed}, xs[0])
        assert np.isnan(of_state(summed, xs)["fp8_metas"]["mlp"]["x_0_scale"])


def test_what_runs_by_modules(rng, key):
    """Captured results are those of modules; what no plan holds, and wide inputs, are too."""
    x = normal(rng, (BATCH, LENGTH, HIDDEN), BF16)
    for options in ({"enable_rotary_pos_emb": True}, {"num_gqa_groups": 2}, {"drop_path": 0.5},
                    {"output_layernorm": True}, {"softmax_type": "off_by_one"},
                    {"low_rank_adaptation_scope": "mlp"}, {"enable_relative_embedding": True},
                    {"intermediate_dropout": 0.5}):  # fmt: skip
        module = layer(dtype=jnp.bfloat16, **options)
        params, _ = drawn(module, key, rng, x)
        call = functools.partial(module.apply, {"params": params}, rngs={"dropout": key})
        assert str(jax.make_jaxpr(call)(x)).count("te_layer[") > 1, options
    module = layer(dtype=jnp.bfloat16)
    params, _ = drawn(module, key, rng, x)
    _, found = module.apply({"params": params}, x, capture_intermediates=True)
    assert {"attention", "mlp"} <= found["intermediates"].keys()
