# SPDX-License-Identifier: Apache-2.0
"""State of delayed scaling: its rule, and that its gradient is its next value or shows a sum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from thinning import pairs

from transformer_engine.common import recipe
from transformer_engine.jax import quantize as tq
from transformer_engine.jax.dense import dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import state

LENGTH = 4
E4M3, E5M2 = 448.0, 57344.0
DIMS = ((1,), (0,))


def rule_in_numpy(amax, scale, history, largest, margin, algorithm):
    """The update of one step, as the format of the state defines it."""
    history = history.copy()
    history[0] = amax
    chosen = history.max() if algorithm == "max" else history[0]
    if np.isfinite(chosen) and chosen > 0:
        with np.errstate(over="ignore"):
            made = np.float32(largest) / chosen / np.float32(2.0**margin)
        scale = np.float32([min(made, np.finfo(np.float32).max)])
    history = np.roll(history, -1)
    history[0] = 0.0
    return scale, history


def quantizers(length=LENGTH, **fields):
    """A quantizer set under delayed scaling."""
    made = recipe.DelayedScaling(amax_history_len=length, **fields)
    return tq.QuantizerFactory.create_set(fp8_recipe=made)


def states(quantizer_set):
    """(scale, history) of each operand."""
    made = (quantizer_set.x, quantizer_set.kernel, quantizer_set.dgrad)
    return [(np.asarray(q.scale), np.asarray(q.amax_history)) for q in made]


@jax.jit
def step(x, kernel, grad, quantizer_set):
    """Next state after a step whose output has the gradient `grad`."""

    def loss(quantizer_set):
        return jnp.sum(grad * dense(x, kernel, None, DIMS, quantizer_set=quantizer_set))

    return jax.grad(loss)(quantizer_set)


@pairs(algorithm=("max", "most_recent"), margin=(0, 2), length=(1, LENGTH))
def test_the_rule(device, algorithm, margin, length, rng):
    """Scales and histories of several steps, with amaxes of 0, tiny, Inf and NaN among them."""
    made = quantizers(length, amax_compute_algo=algorithm, margin=margin)
    wanted = states(made)
    sizes = [1.0, 3e-38, 0.0, np.inf, 8.0, np.nan, 0.25, 1e30]
    for size in sizes:
        values = [rng.standard_normal(shape).astype(np.float32) for shape in ((8, 16), (16, 4))]
        for array in values:
            array[0, 0] = size * abs(array).max() if np.isfinite(size) else size
        if size == 0.0:
            values = [0.0 * array for array in values]
        grad = rng.standard_normal((8, 4)).astype(np.float32)
        made = step(*values, grad, made)
        for i, (array, largest) in enumerate(zip((*values, grad), (E4M3, E4M3, E5M2), strict=True)):
            amax = np.float32(np.nanmax(np.abs(array)))
            wanted[i] = rule_in_numpy(amax, *wanted[i], largest, margin, algorithm)
        for found, expected in zip(states(made), wanted, strict=True):
            assert found[0] == expected[0]
            np.testing.assert_array_equal(found[1], expected[1])


def test_evaluation_changes_nothing(rng):
    made = quantizers()
    before = states(made)
    x, kernel = (jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(2))
    for _ in range(2):
        dense(x, kernel, None, DIMS, quantizer_set=made)
        assert made.x.use()[1] == 0
    for found, expected in zip(states(made), before, strict=True):
        assert found[0] == expected[0] and not found[1].any()


SHARING = {
    "twice": lambda f, xs: f(xs[0]) + f(xs[1]) + f(xs[2]),
    "jit": lambda f, xs: jax.jit(lambda a: f(a[0]) + f(a[1]) + f(a[2]))(xs),
    "vmap": lambda f, xs: jnp.sum(jax.vmap(f)(xs)),
    "remat": lambda f, xs: jax.checkpoint(lambda a: f(a[0]) + f(a[1]) + f(a[2]))(xs),
}


@pytest.mark.parametrize("how", SHARING)
def test_calls_that_share_a_state(how, rng):
    """The next state of several calls has the largest amax of all."""
    xs = jnp.asarray(rng.standard_normal((3, 8, 16)) * rng.permutation([1, 5, 9])[:, None, None],
                     jnp.float32)  # fmt: skip
    kernel = jnp.asarray(rng.standard_normal((16, 4)), jnp.float32)
    made = quantizers()

    def loss(quantizer_set, xs):
        def f(x):
            return jnp.sum(dense(x, kernel, None, DIMS, quantizer_set=quantizer_set))

        return SHARING[how](f, xs)

    found = states(jax.jit(jax.grad(loss))(made, xs))
    for (scale, history), array in zip(found, (xs, kernel), strict=False):
        amax = np.abs(np.asarray(array)).max()
        assert history[-1] == amax and scale == np.float32(E4M3) / amax


def test_sums_show(rng):
    """Gradients of two passes that a program adds: NaN at the next step, and an error at once."""
    x, kernel, grad = (jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(3))
    made = quantizers()
    summed = jax.tree.map(jnp.add, step(x, kernel, grad, made), step(2 * x, kernel, grad, made))
    for quantizer in states(step(x, kernel, grad, summed)):
        assert np.isnan(quantizer[0])
    with pytest.raises(ValueError, match="a scaling state is a sum of several"):
        summed.x.use()
    fine = step(2 * x, kernel, grad, step(x, kernel, grad, made))
    assert all(np.isfinite(scale) for scale, _ in states(step(x, kernel, grad, fine)))


def test_a_loop_around_a_call_shows():
    """One call of a reading that a loop repeats: its tap counts."""
    rule = state.Rule(quantizers().x.cast, "max")
    taps = state.tapped(jnp.ones(1), 0).tap * 2.0
    _, back = jax.vjp(lambda s, h: state.read(s, h, rule), jnp.ones(1), jnp.zeros(LENGTH))
    scale, _ = back(state.Use(jnp.zeros(1), taps))
    assert np.isnan(scale)


def test_a_module_that_no_gradient_reached(rng):
    """Its state becomes 0, which is read as a fresh one."""
    x, kernel, grad = (jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(3))
    empty = jax.tree.map(jnp.zeros_like, quantizers())
    both = (states(step(x, kernel, grad, made)) for made in (empty, quantizers()))
    for found, expected in zip(*both, strict=True):
        np.testing.assert_array_equal(found[0], expected[0])
        np.testing.assert_array_equal(found[1], expected[1])


def test_too_many_calls():
    def loss(quantizer_set):
        x = jnp.ones((1, 1))
        for _ in range(state.USES + 1):
            x = dense(x, jnp.ones((1, 1)), None, DIMS, quantizer_set=quantizer_set)
        return jnp.sum(x)

    with pytest.raises(ValueError, match=f"more than {state.USES} times"):
        jax.make_jaxpr(jax.grad(loss))(quantizers())


def test_states_of_layers_in_a_scan(rng):
    """Layers whose states are stacked: each step of the loop has one of its own."""
    count, width = 3, 8
    x = jnp.asarray(rng.standard_normal((4, width)), jnp.float32)
    kernels = jnp.asarray(rng.standard_normal((count, width, width)), jnp.float32)
    made = jax.tree.map(lambda leaf: jnp.stack([leaf] * count), quantizers())

    def loss(quantizer_sets):
        def body(x, layer):
            return dense(x, layer[0], None, DIMS, quantizer_set=layer[1]), None

        return jnp.sum(jax.lax.scan(body, x, (kernels, quantizer_sets))[0])

    found = jax.jit(jax.grad(loss))(made)
    amaxes = np.abs(np.asarray(kernels)).max((1, 2))
    np.testing.assert_array_equal(found.kernel.amax_history[:, -1], amaxes)


def test_states_of_an_mlp(rng):
    """Both layers' states, and the fp32 values of norm and activation behind them."""
    x = jnp.asarray(rng.standard_normal((4, 16)), jnp.float32)
    kernels = tuple(
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((16, 1, 8), (8, 16))
    )

    def loss(sets):
        y = layernorm_mlp(x, jnp.ones(16), None, kernels, (), "rmsnorm", quantizer_sets=sets)
        return jnp.sum(y)

    found = jax.jit(jax.grad(loss))((quantizers(), quantizers()))
    for each, kernel in zip(found, kernels, strict=True):
        assert each.kernel.amax_history[-1] == jnp.max(jnp.abs(kernel))
        assert each.x.amax_history[-1] > 0 and each.dgrad.amax_history[-1] > 0


def test_quantizers_update_themselves(rng):
    """`quantize` of a quantizer leaves its next state in it, as `update` does."""
    x = jnp.asarray(rng.standard_normal((8, 8)), jnp.float32)
    quantizer = quantizers().x
    quantizer.quantize(x)
    amax = float(jnp.max(jnp.abs(x)))
    assert quantizer.amax_history[-1] == amax and quantizer.scale == np.float32(E4M3) / amax
