# SPDX-License-Identifier: Apache-2.0
"""NVFP4: dense layers in plans, with the bits of the PyTorch modules; random rounding; refusals."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_arrays import DTYPES, assert_same, normal
from thinning import pairs
from tols import BF16, F32

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
import transformer_engine.pytorch as te_torch
from transformer_engine.common.recipe import NVFP4BlockScaling
from transformer_engine.jax.definitions import by_definition
from transformer_engine.jax.dense import dense
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import (
    NVFP4Quantizer,
    QuantizeMeta,
    QuantizeMetaSet,
    QuantizerFactory,
    ScalingMode,
    get_supported_quantization_recipes,
)
from transformer_engine.pytorch.execution import random

IN, OUT, INNER, LEADING = 64, 96, 128, (2, 16)
RECIPES = {
    "default": NVFP4BlockScaling(),
    "nearest": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "plain": NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "four over six": NVFP4BlockScaling(disable_rht=True, nvfp4_4over6="all"),
    "rows": NVFP4BlockScaling(row_scaled_activation=True),
    "wide backward": NVFP4BlockScaling(backward_override="high_precision"),
}
PAIRS = torch.tensor([[2**40 + 3, 5], [7, 2**33]])
MODULES = {
    "dense": lambda **how: te_torch.Linear(IN, OUT, **how),
    "layernorm_dense": lambda **how: te_torch.LayerNormLinear(IN, OUT, **how),
    "layernorm_mlp": lambda **how: te_torch.LayerNormMLP(IN, INNER, **how),
}


def sets_of(recipe, count):
    """Quantizers of so many layers, with the pairs of PAIRS."""
    words = jnp.asarray(PAIRS.numpy().view(np.uint32))
    metas = [QuantizeMeta(stochastic_rounding_rng_state=pair) for pair in words[:count]]
    return [
        QuantizerFactory.create_set(fp8_recipe=recipe, quantize_meta_set=QuantizeMetaSet(grad=meta))
        for meta in metas
    ]


def function_of(kind):
    """The function of JAX over (x, parameters by the names of the module, quantizer sets)."""

    def run(x, p, sets):
        if kind == "dense":
            return dense(x, p["weight"], p["bias"], ((2,), (0,)), quantizer_set=sets[0])
        affine = p["layer_norm_weight"], p["layer_norm_bias"]
        if kind == "layernorm_dense":
            options = {"epsilon": 1e-5, "quantizer_set": sets[0]}
            return layernorm_dense(x, p["weight"], *affine, p["bias"], **options)
        kernels = p["fc1_weight"].reshape(IN, 1, INNER), p["fc2_weight"]
        biases = p["fc1_bias"].reshape(1, INNER), p["fc2_bias"]
        options = {"epsilon": 1e-5, "quantizer_sets": sets}
        return layernorm_mlp(x, *affine, kernels, biases, "layernorm", **options)

    return run


def turned(tensor):
    """A parameter, or its gradient, as JAX has it."""
    return tensor.detach().t() if tensor.dim() == 2 else tensor.detach()


@pairs(recipe=list(RECIPES), kind=list(MODULES), dtype=[F32, BF16])
def test_bits_are_those_of_the_module(recipe, kind, dtype, monkeypatch):
    """Casts, transforms, random rounding and products that are multiplied out."""
    recipe = RECIPES[recipe]
    module = MODULES[kind](params_dtype=dtype, device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter))
    x, out = torch.randn(*LEADING, IN, dtype=dtype), IN if "mlp" in kind else OUT
    grad = torch.randn(*LEADING, out, dtype=dtype)
    drawn = iter(PAIRS)
    monkeypatch.setattr(random, "_draw", lambda _: next(drawn))
    leaf = x.clone().requires_grad_()
    with te_torch.autocast(enabled=True, recipe=recipe), te_torch.counting() as ran:
        wanted = module(leaf)
        wanted.backward(grad)
    name = DTYPES[dtype]

    def array(tensor):
        return jnp.asarray(tensor.float().numpy()).astype(name)

    @jax.jit
    def step(x, parameters, sets, grad):
        y, pull = jax.vjp(lambda x, p: function_of(kind)(x, p, sets), x, parameters)
        return y, *pull(grad)

    parameters = {key: array(turned(p)) for key, p in module.named_parameters()}
    count = 2 if "mlp" in kind else 1
    with te_torch.counting() as found:
        y, of_x, gradients = jax.block_until_ready(
            step(array(x), parameters, sets_of(recipe, count), array(grad))
        )
    assert found.emulated_gemms == ran.emulated_gemms > 0
    assert_same(y, wanted.detach())
    assert_same(of_x, leaf.grad)
    for key, parameter in module.named_parameters():
        assert_same(gradients[key], turned(parameter.grad))


def test_streams_of_flax(rng, key):
    """Gradients differ by the key of the stream, and are right on average; outputs do not."""
    module = te_flax.DenseGeneral(features=32, use_bias=False)
    # What x is cast to stands for x.
    x, grad = jnp.sign(normal(rng, (64, 32))), normal(rng, (64, 32))
    with te.autocast(enabled=True, recipe=NVFP4BlockScaling(disable_rht=True)):
        params = nn.unbox(jax.jit(module.init)(key, x))

        @jax.jit
        def step(key):
            y, pull = jax.vjp(lambda p: module.apply(p, x, rngs={"sr_rng": key}), params)
            return y, pull(grad)[0]["params"]["kernel"]

        keys = jax.random.split(key, 64)
        outputs, gradients = zip(*map(step, keys), strict=True)
        assert all(np.array_equal(outputs[0], other) for other in outputs)
        assert np.array_equal(gradients[0], step(keys[0])[1])
        assert not np.array_equal(gradients[0], gradients[1])
        jax.jit(module.apply)(params, x)  # no gradient, no random number
        with pytest.raises(ValueError, match="sr_rng"):
            jax.grad(lambda p: module.apply(p, x).sum())(params)
    exact = np.einsum("ni,no->io", np.float64(x), np.float64(grad))
    mean = np.mean([np.float64(each) for each in gradients], 0)
    errors = [np.square(np.float64(each) - exact).mean() for each in (mean, gradients[0])]
    # Of independent errors: of each a 64th, whose own spread over 1,024 numbers is 1 / 22.
    assert 0.0 < errors[0] < 2.0 * errors[1] / 64


def test_what_there_is():
    assert any(isinstance(each, NVFP4BlockScaling) for each in get_supported_quantization_recipes())
    for mode in (ScalingMode.NVFP4_1D_SCALING, ScalingMode.NVFP4_2D_SCALING):
        made = QuantizerFactory.create(1, mode, jnp.float4_e2m1fn)
        assert isinstance(made, NVFP4Quantizer) and made.scaling_mode is mode
        assert jax.tree.structure(made).num_leaves == 0
        with pytest.raises(NotImplementedError, match="within custom calls"):
            made.quantize(jnp.ones((16, 16)))
        with pytest.raises(ValueError, match="float4_e2m1fn"):
            QuantizerFactory.create(1, mode, jnp.float8_e4m3fn)
    (own,) = sets_of(RECIPES["default"], 1)
    x, kernel = jnp.ones((16, 32)), jnp.ones((32, 16))
    with pytest.raises(NotImplementedError, match="within custom calls"):
        by_definition(dense)(x, kernel, quantizer_set=own)
    with pytest.raises(Exception, match="f16|fp16|float16"):
        dense(x.astype(jnp.float16), kernel, quantizer_set=own)
