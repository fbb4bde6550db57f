# SPDX-License-Identifier: Apache-2.0
"""Train an encoder on sentences of different lengths, in FP8 or in high precision.

A sentence is a row of random tokens with padding behind it. Its label says whether the first token
comes again: a model learns that only by attention, and only where padding is masked. The mask is a
`SequenceDescriptor` of the lengths.

    python examples/jax/encoder.py
    python examples/jax/encoder.py --recipe none
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
from transformer_engine.jax.attention import SequenceDescriptor

RECIPES = {"none": None, "delayed": DelayedScaling(), "current": Float8CurrentScaling()}
TOKENS, LONGEST = 16, 16


class Encoder(nn.Module):
    """Logits [batch, 2] of sentences [batch, LONGEST] with these lengths [batch]."""

    layers: int
    hidden: int

    @nn.compact
    def __call__(self, sentences, lengths, deterministic=False):
        x = nn.Embed(TOKENS, self.hidden, name="tokens")(sentences)
        for number in range(self.layers):
            x = te_flax.TransformerLayer(
                hidden_size=self.hidden, mlp_hidden_size=4 * self.hidden, num_attention_heads=4,
                self_attn_mask_type="padding", scale_attn_logits=True, use_bias=True,
                hidden_dropout=0.05, attention_dropout=0.05, intermediate_dropout=0.05,
                name=f"layer_{number}",
            )(x, attention_mask=SequenceDescriptor.from_seqlens(lengths),
              deterministic=deterministic)  # fmt: skip
        return nn.Dense(2, name="head")(x[:, 0])


def sentences(rng: np.random.Generator, count: int) -> dict[str, np.ndarray]:
    """Random sentences; in half of them the first token comes again."""
    lengths = rng.integers(4, LONGEST + 1, count, np.int32)
    tokens = rng.integers(0, TOKENS - 1, (count, LONGEST), np.int32)
    first, labels = tokens[:, :1], rng.integers(0, 2, count, np.int32)
    tokens[:, 1:] += tokens[:, 1:] >= first  # none of them is the first one
    places = rng.integers(1, lengths)
    tokens[labels == 1, places[labels == 1]] = first[labels == 1, 0]
    padding = np.arange(LONGEST) >= lengths[:, None]
    tokens[padding] = np.broadcast_to(first, tokens.shape)[padding]  # to be seen by no one
    return {"sentences": tokens, "lengths": lengths, "labels": labels}


def main(arguments: list[str] | None = None) -> int:
    """Train; print losses, and the share of new sentences that are told right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {"steps": 400, "batch": 64, "layers": 2, "hidden": 64, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--recipe", choices=RECIPES, default="delayed")
    args = parser.parse_args(arguments)
    rng, key = np.random.default_rng(args.seed), jax.random.key(args.seed)
    model, optimizer = Encoder(args.layers, args.hidden), optax.adam(2e-3)

    def logits_of(variables, batch, **options):
        return model.apply(variables, batch["sentences"], batch["lengths"], **options)

    recipe = RECIPES[args.recipe]
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        first = sentences(rng, args.batch)
        state = nn.unbox(jax.jit(model.init)(
            {"params": key, "dropout": key}, first["sentences"], first["lengths"]))  # fmt: skip
        params = state.pop("params")
        moments = optimizer.init(params)

        @jax.jit
        def step(params, state, moments, batch, key):
            def loss_of(params, state):
                logits = logits_of({"params": params, **state}, batch, rngs={"dropout": key})
                return optax.softmax_cross_entropy_with_integer_labels(
                    logits, batch["labels"]).mean()  # fmt: skip

            loss, (grads, state) = jax.value_and_grad(loss_of, (0, 1))(params, state)
            updates, moments = optimizer.update(grads, moments)
            return loss, optax.apply_updates(params, updates), state, moments

        for number in range(1, args.steps + 1):
            own = jax.random.fold_in(key, number)
            batch = sentences(rng, args.batch)
            loss, params, state, moments = step(params, state, moments, batch, own)
            if number % max(1, args.steps // 8) == 0:
                print(f"step {number}: loss {loss:.4f}", flush=True)
        new = sentences(rng, 1024)
        tell = jax.jit(lambda variables: logits_of(variables, new, deterministic=True))
        told = jnp.argmax(tell({"params": params, **state}), -1)
    print(f"told right: {100 * np.mean(np.asarray(told) == new['labels']):.1f}%")
    return 0


if __name__ == "__main__":
    sys.exit(main())
