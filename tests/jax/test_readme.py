# SPDX-License-Identifier: Apache-2.0
"""Programs as a README shows them: a module, a recipe, a loop of `value_and_grad`."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparators import assert_nmse
from flax_arrays import normal, wide
from tols import E4M3, E5M2, F32, tol

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common import recipe

HIDDEN = 64
STEPS = 4


@pytest.fixture
def steps(device, rng, key):
    """Run some steps of one layer; return their inputs, and what each gave."""

    def run(context, keeps_state):
        inputs = [normal(rng, (4, 16, HIDDEN)) for _ in range(STEPS)]
        made = []
        with context:
            model = te_flax.DenseGeneral(features=HIDDEN)
            state, params = flax.core.pop(model.init(key, inputs[0]), "params")

            def loss_fn(params, state, x):
                y = model.apply({"params": params, **state}, x)
                return jnp.sum(y**2) / 2, y

            step = jax.jit(jax.value_and_grad(loss_fn, argnums=(0, 1), has_aux=True))
            for x in inputs:
                (_, y), (grads, new_state) = step(params, state, x)
                made.append((y, grads, state))
                if keeps_state:
                    state = te.update_collections(new_state, state)
        return flax.linen.unbox(params), inputs, made

    return run


def near(params, x, y, grads):
    """Whether output and gradients are those of the layer, but for casts to FP8."""
    flat = wide(x).reshape(-1, HIDDEN)
    kernel, exact = wide(params["kernel"]), flat @ wide(params["kernel"])
    casts = tol("quantize", E4M3)
    assert_nmse(wide(y).reshape(-1, HIDDEN), exact, 2 * casts + tol("sum", F32, HIDDEN), "output")
    assert kernel.shape == grads["kernel"].shape
    bound = 4 * casts + tol("quantize", E5M2)  # the gradient is the output, of two casts
    assert_nmse(wide(grads["kernel"]), flat.T @ exact, bound, "gradient of the kernel")


def context(kind):
    own = recipe.DelayedScaling(margin=0, fp8_format=recipe.Format.HYBRID)
    if kind == "autocast":
        return te.autocast(enabled=True, recipe=own)
    return te.fp8_autocast(enabled=True, fp8_recipe=own)


@pytest.mark.filterwarnings("ignore:fp8_autocast is the older name:DeprecationWarning")
@pytest.mark.parametrize("kind", ["autocast", "fp8_autocast"])
def test_loop_that_drops_the_state(steps, kind):
    """As the older README has it: scales stay 1, casts are still casts."""
    params, inputs, made = steps(context(kind), keeps_state=False)
    for x, (y, grads, state) in zip(inputs, made, strict=True):
        near(flax.linen.unbox(params), x, y, flax.linen.unbox(grads))
        assert all((state["fp8_metas"][f"{n}_scale"] == 1).all() for n in ("x", "kernel", "grad"))


def test_loop_that_keeps_the_state(steps):
    """Scales are those of the amaxes so far."""
    params, inputs, made = steps(context("autocast"), keeps_state=True)
    largest = 0.0
    for number, (x, (y, grads, state)) in enumerate(zip(inputs, made, strict=True)):
        near(params, x, y, flax.linen.unbox(grads))
        metas = state["fp8_metas"]
        if number:
            assert metas["x_scale"][0] == np.float32(448) / np.float32(largest)
            kernel = np.abs(np.asarray(params["kernel"])).max()
            assert metas["kernel_scale"][0] == np.float32(448) / kernel
        largest = max(largest, float(jnp.abs(x).max()))


def test_high_precision(steps):
    params, inputs, made = steps(te.autocast(enabled=False), keeps_state=True)
    for x, (y, _, state) in zip(inputs, made, strict=True):
        assert not state
        exact = wide(x) @ wide(params["kernel"])
        assert_nmse(wide(y), exact, tol("sum", F32, HIDDEN))
