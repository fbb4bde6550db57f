# SPDX-License-Identifier: Apache-2.0
"""Layers as plans: the bits of the PyTorch modules, and the numbers of the definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from jax_arrays import NAMES, assert_same, to_torch, wide
from thinning import pairs
from tols import tol

import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.jax import layer_plans, linear
from transformer_engine.jax.definitions import by_definition
from transformer_engine.jax.dense import dense
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import QuantizerFactory, noop_quantizer_set

RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "most_recent": recipes.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent"),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
IN, OUT, INNER, LEADING = 64, 96, 128, (2, 16)
ACTIVATIONS = {"gelu": ("gelu",), "swiglu": ("silu", "linear")}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def quantizers(recipe, count):
    """Sets for so many dense layers."""
    if recipe is None:
        return [noop_quantizer_set] * count
    made = QuantizerFactory.create_set(n_quantizer_sets=count, fp8_recipe=recipe)
    return [made] if count == 1 else list(made)


class Case:
    """A layer of both front ends, with the same numbers.

    `function(arrays, sets)` is that of JAX; `arrays` are named after the parameters of `module`,
    whose weights are the other way round.
    """

    def __init__(self, device, kind, dtype, activation="gelu"):
        name, common = NAMES[dtype], {"params_dtype": dtype, "device": device}
        if kind == "dense":
            self.module, self.layers = te.Linear(IN, OUT, **common), 1
        elif kind == "layernorm_dense":
            self.module, self.layers = te.LayerNormLinear(IN, OUT, **common), 1
        else:
            self.module, self.layers = (
                te.LayerNormMLP(IN, INNER, activation=activation, **common), 2
            )  # fmt: skip
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn_like(parameter))
        self.x = torch.randn(*LEADING, IN, dtype=dtype, device=device)
        self.kinds = ACTIVATIONS[activation]
        self.arrays = {"x": self.array(self.x)}
        for key, parameter in self.module.named_parameters():
            self.arrays[key] = self.array(self.turned(key, parameter))
        self.run = getattr(self, kind)
        assert self.arrays["x"].dtype == name

    @staticmethod
    def array(tensor):
        """The numbers of a tensor, whose dtype has a name in NAMES."""
        return jnp.asarray(tensor.detach().cpu().float().numpy()).astype(NAMES[tensor.dtype])

    @staticmethod
    def turned(key, tensor):
        """A parameter, or its gradient, as JAX has it."""
        return tensor.detach().t() if tensor.dim() == 2 else tensor.detach()

    def dense(self, a, sets):
        dims = ((2,), (0,))
        return dense(a["x"], a["weight"], a["bias"], dims, quantizer_set=sets[0])

    def layernorm_dense(self, a, sets):
        affine = a["layer_norm_weight"], a["layer_norm_bias"]
        return layernorm_dense(
            a["x"], a["weight"], *affine, a["bias"], epsilon=1e-5, quantizer_set=sets[0]
        )

    def layernorm_mlp(self, a, sets):
        affine, count = (a["layer_norm_weight"], a["layer_norm_bias"]), len(self.kinds)
        kernels = a["fc1_weight"].reshape(IN, count, INNER), a["fc2_weight"]
        biases = a["fc1_bias"].reshape(count, INNER), a["fc2_bias"]
        return layernorm_mlp(
            a["x"], *affine, kernels, biases, "layernorm", epsilon=1e-5,
            activation_type=self.kinds, quantizer_sets=sets,
        )  # fmt: skip

    def step(self, arrays, sets, grad):
        """(output, gradients of the arrays, next quantizer sets)."""
        out, back = jax.vjp(self.run, arrays, sets)
        return out, *back(grad)


def step_of_torch(case, recipe, grad):
    """Output and gradients of a step of the module."""
    x = case.x.clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = case.module(x)
    out.backward(grad)
    found = {key: case.turned(key, p.grad) for key, p in case.module.named_parameters()}
    case.module.zero_grad()
    return out.detach(), {"x": x.grad, **found}


KINDS = ["dense", "layernorm_dense", "layernorm_mlp"]


@pairs(kind=KINDS, recipe=list(RECIPES), dtype=DTYPES, activation=list(ACTIVATIONS))
def test_bits_are_those_of_the_module(device, kind, recipe, dtype, activation):
    """Of several steps, in which scales move."""
    case, quantized = Case(device, kind, dtype, activation), recipe != "none"
    recipe = RECIPES[recipe]
    sets, step = quantizers(recipe, case.layers), jax.jit(case.step)
    for _ in range(3):
        case.x = torch.randn_like(case.x) * 3.0
        case.arrays["x"] = case.array(case.x)
        grad = torch.randn_like(case.x[..., :1].expand(*LEADING, OUT if case.layers == 1 else IN))
        wanted, gradients = step_of_torch(case, recipe, grad)
        with te.counting() as ran:
            out, found, sets = jax.block_until_ready(step(case.arrays, sets, case.array(grad)))
        for array, tensor in [(out, wanted), *((found[key], t) for key, t in gradients.items())]:
            # Where a kernel lies the other way round, cuBLASLt may sum in another order; casts
            # write what GEMMs read as they read it.
            if quantized or device == "cpu":
                assert_same(array, tensor)
            else:
                assert_nmse(to_torch(array), tensor, 2 * tol("layer", dtype, INNER))
        emulated = ran.other_gemms if isinstance(recipe, recipes.MXFP8BlockScaling) else 0
        products = 3 * case.layers
        assert (ran.fp8_gemms, ran.other_gemms - emulated) == (
            (products - emulated, 0) if quantized else (0, products)
        )


@pairs(kind=KINDS, recipe=list(RECIPES), dtype=DTYPES)
def test_definitions_agree(device, kind, recipe, dtype):
    """The oracle in jax.numpy has the next scales to the bit, and results within roundings."""
    case = Case(device, kind, dtype)
    sets = quantizers(RECIPES[recipe], case.layers)
    grad = case.array(torch.randn(*LEADING, OUT if case.layers == 1 else IN, dtype=dtype))
    out, found, following = jax.jit(case.step)(case.arrays, sets, grad)
    wanted = jax.jit(by_definition(case.step))(case.arrays, sets, grad)
    # A value that another order of sums rounds to another code is one step of E5M2 away.
    bound = 2 * tol("layer", dtype, INNER) + (0.0 if recipe == "none" else 2.0**-8)
    assert_nmse(to_torch(out), wide(wanted[0]), bound)
    for key, array in found.items():
        assert_nmse(to_torch(array), wide(wanted[1][key]), bound)
    for made, other in zip(*map(jax.tree.leaves, (following, wanted[2])), strict=True):
        np.testing.assert_allclose(made, other, rtol=bound)


def test_the_jaxpr_tells_fp8():
    case = Case("cpu", "layernorm_dense", torch.bfloat16)
    sets = quantizers(RECIPES["delayed"], 1)
    grad = jnp.ones((*LEADING, OUT), jnp.bfloat16)
    text = str(jax.make_jaxpr(case.step)(case.arrays, sets, grad))
    assert "f8_e4m3fn" in text and "f8_e5m2" in text and text.count("te_layer") == 2


@pytest.mark.parametrize("recipe", ["none", "current"])
def test_dims_that_are_summed_over(recipe):
    """Several dims, and others than the last ones."""
    x, kernel = (jnp.asarray(np.random.randn(*s), jnp.bfloat16) for s in ((8, 4, 16), (5, 4, 8)))
    sets = quantizers(RECIPES[recipe], 1)[0]
    run = functools.partial(dense, contracting_dims=((0, 1), (2, 1)), quantizer_set=sets)
    flat_x, flat_kernel = (
        x.transpose(2, 0, 1).reshape(16, 32),
        kernel.transpose(2, 1, 0).reshape(32, 5),
    )
    grad = jnp.asarray(np.random.randn(16, 5), jnp.bfloat16)
    out, back = jax.vjp(run, x, kernel)
    flat, flat_back = jax.vjp(functools.partial(dense, quantizer_set=sets), flat_x, flat_kernel)
    (of_x, of_kernel), (flat_of_x, flat_of_kernel) = back(grad), flat_back(grad)
    assert jnp.array_equal(out, flat)
    assert jnp.array_equal(of_x.transpose(2, 0, 1).reshape(16, 32), flat_of_x)
    assert jnp.array_equal(of_kernel.transpose(2, 1, 0).reshape(32, 5), flat_of_kernel)


@pytest.mark.parametrize("kind", KINDS)
def test_transforms_change_no_bit(device, kind):
    """A rematerialized layer, and one in a scan."""
    case = Case(device, kind, torch.bfloat16)
    sets = quantizers(RECIPES["current"], case.layers)
    shape = (*LEADING, OUT if case.layers == 1 else IN)
    grad = case.array(torch.randn(shape, dtype=torch.bfloat16))
    wanted = jax.jit(case.step)(case.arrays, sets, grad)
    plain = case.run
    case.run = jax.checkpoint(plain)
    found = [jax.jit(case.step)(case.arrays, sets, grad)]

    def scanned(arrays, sets):
        step = lambda carry, x: (carry, plain(arrays | {"x": x}, sets))  # noqa: E731
        return jax.lax.scan(step, 0, arrays["x"][None])[1][0]

    case.run = scanned
    found.append(jax.jit(case.step)(case.arrays, sets, grad))
    for each in found:
        for a, b in zip(*map(jax.tree.leaves, (each, wanted)), strict=True):
            assert jnp.array_equal(a, b)


def test_a_vector():
    x, kernel = (jnp.asarray(np.random.randn(*s), jnp.float32) for s in ((16,), (16, 8)))
    out = dense(x, kernel, contracting_dims=((0,), (0,)))
    assert out.shape == (8,)
    wanted = wide(x) @ wide(kernel)
    assert_nmse(to_torch(out), wanted, tol("sum", torch.float32, 16))


def test_accumulation_is_that_of_the_recipe():
    """The flags of the node are those of the PyTorch modules."""
    precise = recipes.MMParams(use_split_accumulator=True)
    for recipe in (
        recipes.DelayedScaling(),
        recipes.Float8CurrentScaling(),
        recipes.Float8CurrentScaling(fp8_gemm_fprop=precise),
        recipes.Float8BlockScaling(),
    ):
        (plan, _) = linear.plan_of_set(quantizers(recipe, 1)[0])
        assert layer_plans._quantization(plan) == quantization_of(recipe)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation(device, kind):
    """Without a gradient the bits are the same, and nothing is saved."""
    case = Case(device, kind, torch.bfloat16)
    sets = quantizers(RECIPES["delayed"], case.layers)
    grad = case.array(torch.randn(*LEADING, OUT if case.layers == 1 else IN, dtype=torch.bfloat16))
    out, *_ = jax.block_until_ready(jax.jit(case.step)(case.arrays, sets, grad))
    with te.counting() as ran:
        alone = jax.block_until_ready(jax.jit(case.run)(case.arrays, sets))
    assert ran.fp8_gemms == case.layers and jnp.array_equal(alone, out)
    kept = jax.make_jaxpr(case.run)(case.arrays, sets)
    assert "f8_e5m2" not in str(kept)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_each_call_has_the_gradients_of_its_own_arguments(kind, wrap):
    """JAX traces a function once for all of its calls, whatever each is differentiated by."""
    case = Case("cpu", kind, torch.bfloat16)
    sets = quantizers(RECIPES["current"], case.layers)
    weight, bias = ("fc1_weight", "fc1_bias") if case.layers == 2 else ("weight", "bias")
    called = wrap(lambda arrays: case.run(arrays, sets))

    def loss(arrays, function, first, second):
        def by(names):
            stop = jax.lax.stop_gradient
            return function({n: a if n in names else stop(a) for n, a in arrays.items()})

        return jnp.sum(by(first).astype(jnp.float32)) + jnp.sum(jnp.sin(by(second)))

    ways = ["x"], [weight], [bias], list(case.arrays)
    for first, second in ((0, 1), (1, 0), (2, 3), (3, 2)):
        each = ways[first], ways[second]
        found, wanted = (
            jax.jit(jax.grad(lambda a, f=f, each=each: loss(a, f, *each)))(case.arrays)
            for f in (called, lambda arrays: case.run(arrays, sets))
        )
        for name in case.arrays:
            assert jnp.array_equal(found[name], wanted[name]), (each, name)
