# SPDX-License-Identifier: Apache-2.0
"""Flax modules: their parameters, and what they compute against PyTorch's with the same."""

import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from flax_arrays import init, normal, to_torch, wide, wide_leaf, with_gradients
from thinning import pairs
from tols import BF16, E4M3, F32, tol

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
import transformer_engine.pytorch as te_torch
from transformer_engine.common import recipe
from transformer_engine.jax.flax.module import (
    Softmax,
    TransformerEngineBase,
    _apply_low_rank_adaptation,
    _normalize_axes,
)
from transformer_engine.jax.flax.transformer import LoRAScope, _canonicalize_lora_scope
from transformer_engine.jax.softmax import SoftmaxFusionType

HIDDEN, FEATURES, INNER = 32, 48, 64
LORA = {"enable_low_rank_adaptation": True, "low_rank_adaptation_dim": 4}
RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
}
DENSE = {"kernel": ((HIDDEN, 3, 4), ("in", "n", "out")), "bias": ((3, 4), ("n", "out"))}
NORM = {"scale": ((HIDDEN,), ("embed",)), "ln_bias": ((HIDDEN,), ("embed",))}
MLP = {
    "wi_kernel": ((HIDDEN, 2, INNER), ("embed", "act", "mlp")),
    "wo_kernel": ((INNER, HIDDEN), ("mlp", "embed")),
    "wi_bias": ((2, INNER), ("act", "mlp")),
    "wo_bias": ((HIDDEN,), ("embed",)),
}
MLP_LORA = {
    "wi_lora_a_kernel": ((HIDDEN, 2, 4), (None,) * 3),
    "wi_lora_b_kernel": ((2, 4, INNER), (None,) * 3),
    "wo_lora_a_kernel": ((INNER, 4), (None,) * 2),
    "wo_lora_b_kernel": ((4, HIDDEN), (None,) * 2),
}
AXES = {"kernel_axes": ("in", "n", "out"), "bias_axes": ("n", "out")}
MODULES = {
    "dense": (te_flax.DenseGeneral(features=(3, 4), **AXES), DENSE),
    "dense-lora": (
        te_flax.DenseGeneral(features=(3, 4), use_bias=False, **AXES, **LORA),
        {"kernel": DENSE["kernel"], "lora_a_kernel": ((HIDDEN, 3, 4), (None,) * 3),
         "lora_b_kernel": ((3, 4, 4), (None,) * 3)},
    ),
    "norm": (te_flax.LayerNorm(), NORM),
    "rmsnorm": (te_flax.LayerNorm(layernorm_type="rmsnorm"), {"scale": NORM["scale"]}),
    "norm-dense": (
        te_flax.LayerNormDenseGeneral(features=(3, 4), use_bias=True, **AXES), NORM | DENSE,
    ),
    "norm-dense-no-bias": (
        te_flax.LayerNormDenseGeneral(features=(3, 4), **AXES), NORM | {"kernel": DENSE["kernel"]},
    ),
    "dense-without-norm": (
        te_flax.LayerNormDenseGeneral(features=(3, 4), enable_layernorm=False, **AXES),
        {"kernel": DENSE["kernel"]},
    ),
    "mlp": (
        te_flax.LayerNormMLP(
            intermediate_dim=INNER, activations=("gelu", "linear"), use_bias=True
        ), NORM | MLP,
    ),
    "mlp-lora": (
        te_flax.LayerNormMLP(intermediate_dim=INNER, activations=("gelu", "linear"), **LORA),
        NORM | MLP_LORA | {name: MLP[name] for name in ("wi_kernel", "wo_kernel")},
    ),
}  # fmt: skip


@pytest.fixture
def keys(seed):
    """Keys of `init`."""
    return {"params": jax.random.key(seed), "dropout": jax.random.key(seed + 1)}


def drawn(rng, variables):
    """Variables whose parameters are all drawn, those that begin as zeros too."""
    params = jax.tree.map(lambda p: bf16_normal(rng, p.shape), nn.unbox(variables["params"]))
    return {**variables, "params": params}


def bf16_normal(rng, shape):
    """Numbers that bf16 has: PyTorch's FP8 products round biases to it."""
    return normal(rng, shape, BF16).astype(jnp.float32) / 4


@pytest.mark.parametrize("name", MODULES)
def test_parameters(rng, keys, name):
    """Names, shapes, dtypes and names of axes."""
    module, expected = MODULES[name]
    for dtype in (jnp.float32, jnp.bfloat16):
        x = normal(rng, (2, 4, HIDDEN))
        found = jax.eval_shape(module.clone(dtype=dtype).init, keys, x)
        assert found.keys() == {"params"}
        got = {name: (box.value.shape, box.names) for name, box in found["params"].items()}
        assert got == expected
        assert {box.value.dtype for box in found["params"].values()} == {jnp.dtype(dtype)}


@pytest.mark.parametrize("postfixes", [("dense", ("",)), ("mlp", ("_0", "_1"))], ids=str)
def test_state(rng, keys, postfixes):
    """Scales and histories of delayed scaling: names, shapes, what they are at first."""
    name, postfixes = postfixes
    with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
        found = MODULES[name][0].init(keys, normal(rng, (2, 16, HIDDEN)))[
            te.NVTE_FP8_COLLECTION_NAME
        ]
    names = {f"{o}{p}" for o in ("x", "kernel", "grad") for p in postfixes}
    assert found.keys() == {f"{n}_{of}" for n in names for of in ("scale", "amax_history")}
    for key, value in found.items():
        np.testing.assert_array_equal(
            value, np.ones(1) if key.endswith("_scale") else np.zeros(4), strict=False
        )
        assert value.dtype == jnp.float32
    with te.autocast(enabled=True, recipe=RECIPES["current"]):
        x = normal(rng, (2, 16, HIDDEN))
        assert jax.eval_shape(MODULES[name][0].init, keys, x).keys() == {"params"}


# ---- against PyTorch's modules -------------------------------------------------------------------


def copied(parameters, **values):
    """Put arrays into the parameters of a module of torch, by their names."""
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(to_torch(value))


def torch_twin(kind, params, gated):
    """A module of PyTorch with these parameters, and where each of them stands in it."""
    flat = {name: np.asarray(value) for name, value in params.items()}
    if kind == "dense":
        made = te_torch.Linear(HIDDEN, FEATURES, device="cpu")
        own = {"weight": flat["kernel"].T, "bias": flat["bias"]}
        return made, own, {"weight": ("kernel", lambda g: g.T), "bias": ("bias", lambda g: g)}
    norm = {"layer_norm_weight": flat["scale"], "layer_norm_bias": flat["ln_bias"]}
    places = {
        "layer_norm_weight": ("scale", lambda g: g),
        "layer_norm_bias": ("ln_bias", lambda g: g),
    }
    if kind == "norm-dense":
        made = te_torch.LayerNormLinear(HIDDEN, FEATURES, eps=1e-6, device="cpu")
        own = {"weight": flat["kernel"].T, "bias": flat["bias"]}
        places |= {"weight": ("kernel", lambda g: g.T), "bias": ("bias", lambda g: g)}
        return made, norm | own, places
    activation = "geglu" if gated else "gelu"
    made = te_torch.LayerNormMLP(HIDDEN, INNER, eps=1e-6, activation=activation, device="cpu")
    own = {
        "fc1_weight": flat["wi_kernel"].reshape(HIDDEN, -1).T, "fc1_bias": flat["wi_bias"].ravel(),
        "fc2_weight": flat["wo_kernel"].T, "fc2_bias": flat["wo_bias"],
    }  # fmt: skip
    places |= {
        "fc1_weight": ("wi_kernel", lambda g: g.T.reshape(flat["wi_kernel"].shape)),
        "fc1_bias": ("wi_bias", lambda g: g.reshape(flat["wi_bias"].shape)),
        "fc2_weight": ("wo_kernel", lambda g: g.T), "fc2_bias": ("wo_bias", lambda g: g),
    }  # fmt: skip
    return made, norm | own, places


def flax_module(kind, gated):
    if kind == "dense":
        return te_flax.DenseGeneral(features=FEATURES)
    if kind == "norm-dense":
        return te_flax.LayerNormDenseGeneral(features=FEATURES, use_bias=True)
    activations = ("gelu", "linear") if gated else ("gelu",)
    return te_flax.LayerNormMLP(intermediate_dim=INNER, activations=activations, use_bias=True)


def output(made):
    return made[0] if isinstance(made, tuple) else made


@pairs(
    kind=["dense", "norm-dense", "mlp"],
    recipe_name=list(RECIPES),
    gated=[False, True],
    pieces=[False, True],
)
def test_pytorch(rng, keys, kind, recipe_name, gated, pieces):
    """Output and gradients are those of PyTorch's module with the same parameters.

    `pieces`: the norm's output is returned, which calls one function after the other.
    """
    module = flax_module(kind, gated)
    if pieces and kind != "dense":
        module = module.clone(return_layernorm_output=True)
    x = normal(rng, (2, 16, HIDDEN))
    fp8 = RECIPES[recipe_name]
    with te.autocast(enabled=fp8 is not None, recipe=fp8):
        variables = drawn(rng, init(module, keys, x))

        def call(params, x):
            return output(module.apply({**variables, "params": params}, x))

        grad = normal(rng, jax.eval_shape(call, variables["params"], x).shape)
        y, (grads, grad_x) = with_gradients(call, grad, variables["params"], x)
    twin, values, places = torch_twin(kind, variables["params"], gated)
    copied(dict(twin.named_parameters()), **values)
    x_torch = to_torch(x).requires_grad_()
    with te_torch.autocast(enabled=fp8 is not None, recipe=fp8):
        y_torch = twin(x_torch)
    y_torch.backward(to_torch(grad))
    # Linear layers cast the same numbers: their products differ by sums alone. What a norm or an
    # activation makes differs in its last bit, and where that is cast, sometimes by a step.
    bound = 2 * (tol("chain", F32, 64) if kind != "dense" else tol("sum", F32, 64))
    if fp8 is not None and kind != "dense":
        bound += tol("recast", E4M3, x.size)
    assert_nmse(wide(y), y_torch.detach(), bound, "output")
    assert_nmse(wide(grad_x), x_torch.grad, bound, "gradient of the input")
    for name, parameter in twin.named_parameters():
        own, turned = places[name]
        assert_nmse(wide(grads[own]), turned(parameter.grad), bound, own)


# ---- definitions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(
    "norm, centered", [("layernorm", False), ("layernorm", True), ("rmsnorm", False)]
)
def test_norm(rng, keys, norm, centered, dtype):
    module = te_flax.LayerNorm(layernorm_type=norm, zero_centered_gamma=centered, epsilon=1e-3)
    x = normal(rng, (2, 4, HIDDEN), dtype)
    variables = init(module, keys, x)
    assert (np.asarray(nn.unbox(variables)["params"]["scale"]) == (0 if centered else 1)).all()
    params = drawn(rng, variables)["params"]
    grad = normal(rng, x.shape, dtype)
    y, (grads, grad_x) = with_gradients(
        lambda p, x: module.apply({"params": p}, x), grad, params, x
    )
    exact = {name: wide_leaf(value.astype(x.dtype)) for name, value in params.items()}
    x64 = wide_leaf(x)
    mean = x64.mean(-1, keepdim=True) if norm == "layernorm" else 0
    normed = (x64 - mean) * ((x64 - mean).square().mean(-1, keepdim=True) + 1e-3).rsqrt()
    expected = normed * (exact["scale"] + centered) + exact.get("ln_bias", 0)
    expected.backward(wide(grad))
    bound = tol("chain", dtype, HIDDEN)
    assert y.dtype == grad_x.dtype == x.dtype
    assert_nmse(wide(y), expected.detach(), bound)
    assert_nmse(wide(grad_x), x64.grad, bound)
    for name, value in exact.items():
        assert grads[name].dtype == jnp.float32
        assert_nmse(wide(grads[name]), value.grad, bound, name)


@pytest.mark.parametrize("axis", [-1, (1, 2), (-2, -1), (0, 2)], ids=str)
def test_axes_of_dense(rng, keys, axis):
    """Dims that are summed over, and several new ones; bias; low-rank adaptation."""
    module = te_flax.DenseGeneral((3, 4), axis=axis, low_rank_adaptation_alpha=2.0, **LORA)
    x = normal(rng, (2, 4, 8))
    variables = drawn(rng, init(module, keys, x))
    p = {name: wide(value) for name, value in variables["params"].items()}
    dims = _normalize_axes((axis,) if isinstance(axis, int) else axis, 3)
    count = len(dims)
    whole = (
        p["kernel"] + torch.einsum("...nr,nrz->...nz", p["lora_a_kernel"], p["lora_b_kernel"]) / 2
    )
    expected = torch.tensordot(wide(x), whole, (dims, tuple(range(count)))) + p["bias"]
    assert_nmse(wide(module.apply(variables, x)), expected, tol("chain", F32, 64))


def mlp_definition(p, x, functions, made=False):
    """Norm and MLP in float64, adaptations with alpha 2 and rank 4 included."""
    normed = torch.nn.functional.layer_norm(x, (HIDDEN,), p["scale"], p["ln_bias"], 1e-6)
    first, second = p["wi_kernel"], p["wo_kernel"]
    if "wi_lora_a_kernel" in p:
        first = first + torch.einsum(
            "hnr,nri->hni", p["wi_lora_a_kernel"], p["wi_lora_b_kernel"]) / 2  # fmt: skip
        second = second + p["wo_lora_a_kernel"] @ p["wo_lora_b_kernel"] / 2
    y = torch.einsum("...h,hni->...ni", normed, first) + p.get("wi_bias", 0)
    y = torch.stack([f(y[..., n, :]) for n, f in enumerate(functions)]).prod(0)
    return y @ second + p.get("wo_bias", 0), normed


FUNCTIONS = {
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "linear": lambda x: x,
}


@pairs(
    activations=[("gelu",), ("silu", "linear"), ("linear", "gelu"), ("tanh", "silu"), ("tanh",)],
    adapted=[False, True],
    bias=[False, True],
    dtype=[F32, BF16],
)
def test_mlp(rng, keys, activations, adapted, bias, dtype):
    """Each activation is that of its own part, in the order given; adaptations join both layers."""
    options = {**LORA, "low_rank_adaptation_alpha": 2.0} if adapted else {}
    module = te_flax.LayerNormMLP(
        intermediate_dim=INNER, activations=activations, use_bias=bias,
        return_layernorm_output=True, **options,
    )  # fmt: skip
    x = normal(rng, (2, 4, HIDDEN), dtype)
    variables = drawn(rng, init(module, keys, x))
    p = {name: wide(value.astype(x.dtype)) for name, value in variables["params"].items()}
    expected, expected_normed = mlp_definition(p, wide(x), [FUNCTIONS[n] for n in activations])
    y, normed = jax.jit(module.apply)(variables, x)
    assert y.dtype == normed.dtype == x.dtype
    bound = tol("chain", dtype, INNER)
    assert_nmse(wide(y), expected, bound)
    assert_nmse(wide(normed), expected_normed, bound)
    alone, nothing = jax.jit(module.clone(return_layernorm_output=False).apply)(variables, x)
    assert nothing is None
    assert_nmse(wide(alone), expected, bound)


def test_callable_activation(rng, keys):
    named, given = (
        te_flax.LayerNormMLP(intermediate_dim=INNER, activations=(f,)) for f in ("tanh", jnp.tanh)
    )
    x = normal(rng, (4, HIDDEN))
    variables = init(named, keys, x)
    np.testing.assert_array_equal(named.apply(variables, x)[0], given.apply(variables, x)[0])


def test_dropout_in_mlp(rng, keys):
    """Between the layers: of rate 1 only the last bias is left; without dropout it is the MLP."""
    module = te_flax.LayerNormMLP(
        intermediate_dim=INNER, use_bias=True, intermediate_dropout_rate=1.0,
        intermediate_dropout_rng_name="own",
    )  # fmt: skip
    x = normal(rng, (2, 4, HIDDEN))
    keys["own"] = keys.pop("dropout")
    variables = drawn(rng, init(module, keys, x))
    y, _ = module.apply(variables, x, rngs={"own": keys["own"]})
    np.testing.assert_array_equal(y, jnp.broadcast_to(variables["params"]["wo_bias"], y.shape))
    plain, _ = module.clone(intermediate_dropout_rate=0.0).apply(variables, x)
    evaluated, _ = module.apply(variables, x, deterministic=True)
    np.testing.assert_array_equal(evaluated, plain)
    half = module.clone(intermediate_dropout_rate=0.5)
    first, same, other = (
        half.apply(variables, x, rngs={"own": key})[0]
        for key in (keys["own"], keys["own"], keys["params"])
    )
    np.testing.assert_array_equal(first, same)
    assert (np.asarray(first) != np.asarray(other)).any()


def test_depth_scaling(rng, keys):
    module = te_flax.LayerNormDenseGeneral(features=FEATURES)
    x = normal(rng, (4, HIDDEN))
    variables = init(module, keys, x)
    y, _ = module.apply(variables, x)
    scaled, _ = module.clone(depth_scaling=4.0).apply(variables, x)
    np.testing.assert_array_equal(np.asarray(scaled) * 4, y)


@pytest.mark.parametrize("kind", list(SoftmaxFusionType))
def test_softmax(rng, kind):
    logits, bias = normal(rng, (2, 3, 8, 8)), normal(rng, (1, 3, 8, 8))
    mask = np.zeros((2, 1, 8, 8), bool)
    mask[..., 5:] = kind is SoftmaxFusionType.SCALED_MASKED
    hidden = mask | (np.triu(np.ones((8, 8), bool), 1) & (
        kind is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED))  # fmt: skip
    given = jnp.asarray(mask) if kind is SoftmaxFusionType.SCALED_MASKED else None
    for own in (None, bias):
        scores = wide(logits) * 0.5 + (0 if own is None else wide(own))
        expected = scores.masked_fill(torch.from_numpy(hidden), -torch.inf).softmax(-1)
        got = Softmax(0.5, kind).apply({}, logits, given, own)
        assert_nmse(wide(got), expected, tol("attention", F32, 8))


# ---- functions with quantizers -------------------------------------------------------------------


def test_dot_general_of_flax(rng, keys):
    """`nn.Dense` with our product: that of `DenseGeneral`, with its state in a collection."""
    fp8 = RECIPES["delayed"]
    made = te_flax.make_dot_general_cls(fp8)
    assert made.__name__ == "TEWrapper_dot_general" and issubclass(made, TransformerEngineBase)
    x = normal(rng, (2, 16, HIDDEN))
    module = nn.Dense(FEATURES, dot_general=made(), use_bias=False)
    variables = init(module, keys, x)
    (state,) = variables["_overwrite_with_gradient"].values()
    assert {"x_scale", "kernel_amax_history"} <= state.keys()
    grads = jax.grad(lambda v: module.apply(v, x).sum())(variables)
    (moved,) = grads["_overwrite_with_gradient"].values()
    assert float(moved["x_scale"][0]) == float(
        np.float32(448) / np.float32(np.abs(np.asarray(x)).max())
    )
    ours = te_flax.DenseGeneral(features=FEATURES, use_bias=False)
    with te.autocast(enabled=True, recipe=fp8):
        own = {**init(ours, keys, x), "params": variables["params"]}
        expected = ours.apply(own, x)
    np.testing.assert_array_equal(module.apply(variables, x), expected)
    assert "f8_e4m3" in str(jax.make_jaxpr(lambda v: module.apply(v, x))(variables))
    with pytest.raises(NotImplementedError, match="batch dims"):
        made().init(keys, x, x, (((2,), (2,)), ((0,), (0,))))


def test_function_with_state(rng, keys):
    def two_layers(quantizers, x):
        assert quantizers("_a").x is not None
        return x * 2

    made = te_flax.wrap_function_in_te_state_module(two_layers, RECIPES["delayed"])
    assert made.__name__ == "TEWrapper_two_layers"
    x = normal(rng, (4,))
    y, variables = made().init_with_output(keys, x)
    assert "x_a_scale" in variables["_overwrite_with_gradient"]
    np.testing.assert_array_equal(y, x * 2)
    named = te_flax.wrap_function_in_te_state_module(two_layers, RECIPES["delayed"], "own")
    assert named.__name__ == "TEWrapper_own"


# ---- helpers that programs import ----------------------------------------------------------------


@pytest.mark.parametrize("alpha", [None, 3.0])
@pytest.mark.parametrize("features, text", [
    ((6,), "...h,hr,rz->...z"), ((3, 6), "...h,hnr,nrz->...nz"),
    ((2, 3, 6), "...h,hmnr,mnrz->...mnz"),
])  # fmt: skip
def test_low_rank_adaptation(rng, alpha, features, text):
    x, a = normal(rng, (2, 4, 8)), normal(rng, (8, *features[:-1], 5))
    b = normal(rng, (*features[:-1], 5, features[-1]))
    expected = torch.einsum(text, wide(x), wide(a), wide(b)) * ((alpha or 5) / 5)
    got = _apply_low_rank_adaptation(x, (-1,), features, a, b, alpha)
    assert_nmse(wide(got), expected, tol("chain", F32, 8))


def test_scopes():
    scopes = {
        "none": (0, 0, 0), "all": (1, 1, 1), "qkv_proj": (1, 0, 0), "output_proj": (0, 1, 0),
        "mlp": (0, 0, 1), "exclude_qkv_proj": (0, 1, 1), "exclude_output_proj": (1, 0, 1),
        "exclude_mlp": (1, 1, 0), None: (0, 0, 0),
    }  # fmt: skip
    for name, parts in scopes.items():
        assert _canonicalize_lora_scope(name) == LoRAScope(*map(bool, parts))
    own = LoRAScope(mlp=True)
    assert _canonicalize_lora_scope(own) is own
    with pytest.raises(ValueError, match="every"):
        _canonicalize_lora_scope("every")


def test_what_is_not_there(rng, keys):
    with pytest.raises(NotImplementedError, match="axis=0"):
        te_flax.LayerNormMLP(axis=0).init(keys, normal(rng, (2, 4, 8)))
    for name in ("make_grouped_dense_cls", "_MoEBlock"):
        with pytest.raises(NotImplementedError, match=name):
            getattr(te_flax, name)(types.SimpleNamespace())
