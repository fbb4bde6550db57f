# SPDX-License-Identifier: Apache-2.0
"""Train a small convolutional network on drawn figures, its dense layers in FP8.

Figures stand for those of MNIST, of which nothing is fetched: 28 x 28 pixels, ten classes, each a
pattern of bars that is shifted, made brighter or darker, and covered with noise. Convolutions are
those of Flax; dense layers are `DenseGeneral`.

    python examples/jax/mnist.py
    python examples/jax/mnist.py --recipe none
"""

from __future__ import annotations

import argparse
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

RECIPES = {"none": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}
CLASSES = 10
PATTERNS = np.random.default_rng(0).integers(0, 2, (CLASSES, 5, 5)).repeat(4, 1).repeat(4, 2)


class Net(nn.Module):
    """Logits [batch, 16] of figures [batch, 28, 28, 1]; those behind CLASSES are of no class."""

    @nn.compact
    def __call__(self, figures):
        x = nn.relu(nn.Conv(8, (3, 3))(figures))
        x = nn.max_pool(nn.relu(nn.Conv(16, (3, 3))(x)), (4, 4), (4, 4))
        x = x.reshape(len(x), -1)
        x = nn.relu(te_flax.DenseGeneral(features=64, name="hidden")(x))
        return te_flax.DenseGeneral(features=16, name="logits")(x)  # columns of FP8 come in 16s


def figures(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """(figures, labels), drawn anew."""
    labels = rng.integers(0, CLASSES, count)
    drawn = rng.normal(0, 0.3, (count, 28, 28, 1))
    for number, (down, right) in enumerate(rng.integers(0, 9, (count, 2))):
        own = PATTERNS[labels[number]] * rng.uniform(0.5, 1.0)
        drawn[number, down : down + 20, right : right + 20, 0] += own
    return drawn.astype(np.float32), labels.astype(np.int32)


def main(arguments: list[str] | None = None) -> int:
    """Train; print losses, and the share of new figures that are told right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"steps": 200, "batch": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    args = parser.parse_args(arguments)
    rng = np.random.default_rng(args.seed)
    model, optimizer, recipe = Net(), optax.adam(2e-3), RECIPES[args.recipe]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        state = nn.unbox(
            jax.jit(model.init)(jax.random.key(args.seed), figures(rng, args.batch)[0])
        )
        params = state.pop("params")
        moments = optimizer.init(params)

        @jax.jit
        def step(params, state, moments, images, labels):
            def loss_of(params, state):
                logits = model.apply({"params": params, **state}, images)
                return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

            loss, (grads, state) = jax.value_and_grad(loss_of, (0, 1))(params, state)
            updates, moments = optimizer.update(grads, moments)
            return loss, optax.apply_updates(params, updates), state, moments

        for number in range(1, args.steps + 1):
            loss, params, state, moments = step(params, state, moments, *figures(rng, args.batch))
            if number % max(1, args.steps // 8) == 0:
                print(f"step {number}: loss {loss:.4f}", flush=True)
        images, labels = figures(rng, 1024)
        told = jnp.argmax(jax.jit(model.apply)({"params": params, **state}, images), -1)
    print(f"told right: {100 * np.mean(np.asarray(told) == labels):.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
