# SPDX-License-Identifier: Apache-2.0
"""Train a byte-level GPT in JAX, in FP8 and in high precision, and compare the two.

A stack of `TransformerLayer` of `transformer_engine.jax.flax` between an embedding and a head, on
the bytes of examples/train_gpt.py: the Python standard library, or a file. Data, order and initial
weights are the same in both runs; only `enabled=` of `te.autocast` differs.

    python examples/jax/train_gpt.py
    python examples/jax/train_gpt.py --text book.txt --steps 1000
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the text of the example beside this

from textdata import load  # noqa: E402

RECIPES = {"delayed": DelayedScaling, "current": Float8CurrentScaling}
LARGEST_DIFFERENCE = 0.01  # of the two losses, relative


class Layer(nn.Module):
    """One layer, in the form of the body of a scan."""

    hidden: int
    heads: int

    @nn.compact
    def __call__(self, x, _):
        return te_flax.TransformerLayer(
            hidden_size=self.hidden, mlp_hidden_size=4 * self.hidden,
            num_attention_heads=self.heads, hidden_dropout=0.0, attention_dropout=0.0,
            intermediate_dropout=0.0, use_bias=True, scale_attn_logits=True,
            enable_relative_embedding=False, enable_rotary_pos_emb=True,
        )(x), None  # fmt: skip


class GPT(nn.Module):
    """Logits of the next byte, [batch, sequence, 256], from bytes [batch, sequence]."""

    layers: int
    hidden: int
    heads: int

    @nn.compact
    def __call__(self, window):
        draw = nn.initializers.normal(0.02)
        x = nn.Embed(256, self.hidden, embedding_init=draw, name="embedding")(window)
        # One layer is compiled; parameters and scales have a first dim, that of the layers.
        stack = nn.scan(Layer, variable_axes={"params": 0, "fp8_metas": 0},
                        split_rngs={"params": True}, length=self.layers,
                        metadata_params={nn.PARTITION_NAME: "layers"})  # fmt: skip
        x, _ = stack(self.hidden, self.heads, name="layers")(x, None)
        x = te_flax.LayerNorm(name="norm")(x)
        return te_flax.DenseGeneral(features=256, kernel_init=draw, name="head")(x)


def windows(data: np.ndarray, length: int, batch: int, seed: int) -> Iterator[np.ndarray]:
    """Yield random windows [batch, length + 1], in the same order for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(data) - length, batch)
        yield data[starts[:, None] + np.arange(length + 1)].astype(np.int32)


def mean_loss(model: GPT, variables: dict, window: jax.Array) -> jax.Array:
    """Cross entropy of each next byte, in nats."""
    logits = model.apply(variables, window[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, window[:, 1:])
    return losses.mean()


def train(args: argparse.Namespace, data: dict[str, np.ndarray], precision: str) -> float:
    """Train one model; return the mean loss of validation windows."""
    model = GPT(args.layers, args.hidden, args.heads)
    recipe = RECIPES[args.recipe]() if precision == "fp8" else None
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, args.lr, args.steps // 10, args.steps)
    )
    train_windows = windows(data["train"], args.seq, args.batch, args.seed)
    # Recipes are read while functions are traced, so that all is traced within.
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        first = next(train_windows)[:, :-1]
        state = nn.unbox(jax.jit(model.init)(jax.random.key(args.seed), first))
        params = state.pop("params")

        @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
        def step(params, state, moments, window):
            def loss_of(params, state):
                return mean_loss(model, {"params": params, **state}, window)

            loss, (grads, new_state) = jax.value_and_grad(loss_of, (0, 1))(params, state)
            updates, moments = optimizer.update(grads, moments, params)
            # The "gradient" of scales and histories is their next value.
            return loss, optax.apply_updates(params, updates), new_state, moments

        moments, began = optimizer.init(params), time.perf_counter()
        for number in range(1, args.steps + 1):
            loss, params, state, moments = step(params, state, moments, next(train_windows))
            if number % max(1, args.steps // 10) == 0:
                passed = time.perf_counter() - began
                print(f"{precision}: step {number}, loss {loss:.4f}, {passed:.0f} s", flush=True)
        evaluate = jax.jit(lambda v, window: mean_loss(model, v, window))
        held_out = windows(data["valid"], args.seq, args.batch, args.seed)
        variables = {"params": params, **state}
        return float(np.mean([evaluate(variables, next(held_out)) for _ in range(args.valid)]))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cpu = jax.default_backend() == "cpu"
    sizes = {"layers": (4, 10), "hidden": (128, 1024), "heads": (4, 16), "seq": (64, 1024),
             "batch": (8, 16), "steps": (300, 500), "valid": (32, 32)}  # fmt: skip
    for name, (small, large) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=small if on_cpu else large)
    parser.add_argument("--lr", type=float, default=1e-3 if on_cpu else 6e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--recipe", choices=sorted(RECIPES), default="delayed")
    parser.add_argument("--text", type=Path, help="text to train on")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Train both models; fail where FP8 is not within a hundredth of high precision."""
    args = parse(arguments)
    text = load(args.text, args.seq)
    data = {"train": text.train.numpy(), "valid": text.valid.numpy()}
    print(f"{text.name}: {len(data['train']):,} training bytes, {jax.devices()[0].platform}")
    losses = {precision: train(args, data, precision) for precision in ("fp8", "high precision")}
    difference = losses["fp8"] / losses["high precision"] - 1
    for precision, loss in losses.items():
        print(f"{precision:15} validation loss {loss:.4f}")
    print(f"FP8 is {100 * difference:+.2f}% off")
    return int(abs(difference) > LARGEST_DIFFERENCE)


if __name__ == "__main__":
    sys.exit(main())
