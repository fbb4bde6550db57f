# SPDX-License-Identifier: Apache-2.0
"""A Transformer layer as a jitted JAX step, beside the PyTorch module and beside plain JAX.

Forward and backward, with the gradients of the input and of all parameters; bf16 parameters, a
causal mask. `quick-start` has the layer of the quick-start page as a module of PyTorch and of
Flax, in turns on one device; the ratio is JAX over PyTorch. `plain` has the layer without dropout
in plain bf16 JAX, whose attention is cuDNN's or XLA's, beside ours; the ratio is the fastest of the
former over ours.

Times of a step are those of steps in a row, and of one by one (`single`); `busy` is the sum of its
kernels' times, by the profiler. The limit is that of the products alone: those of linear layers at
the rate of torch's products in this run, in FP8 where they run so; attention's at that of bf16.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

# Both packages allocate on one card.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import modes
import torch
from timing import Column, Figure, Machine, alternate, parser, ratio, start, warm

import transformer_engine.jax as te_jax
import transformer_engine.jax.flax as te_flax
import transformer_engine.pytorch as te

SIZES = {"hidden": 4096, "inner": 16384, "heads": 32, "length": 2048, "batch": 4}
SMALL = {"hidden": 64, "inner": 128, "heads": 2, "length": 32, "batch": 2}
CASES = [("bf16", 0.1), ("bf16", 0.0), ("delayed", 0.0), ("delayed", 0.1)]
MOST_OVER_PYTORCH, LEAST_OVER_BF16 = 1.03, 1.45  # ratios that are asked for
EPSILON = 1e-5
BF16 = jnp.bfloat16
COLUMNS = [
    Column("recipe", "recipe", "<8s"),
    Column("way", "way", "<16s"),
    Column("dropout", "dropout", ">7.1f"),
    Column("ms", "step ms", ">9.3f"),
    Column("low", "low", ">9.3f"),
    Column("high", "high", ">9.3f"),
    Column("single_ms", "single", ">9.3f"),
    Column("busy_ms", "busy", ">9.3f"),
    Column("fp8_gemms", "FP8 products", ">12d"),
    Column("ratio", "ratio", ">7.3f"),
    Column("asked", "asked", ">7.2f"),
    Column("limit_ms", "limit ms", ">9.3f"),
]


class Step(NamedTuple):
    """A step of a layer."""

    run: Callable[[], Any]
    wait: Callable[[], Any]  # until the device has nothing to do


# ---- layers --------------------------------------------------------------------------------------


def torch_step(sizes: dict[str, int], recipe: Any, dropout: float, device: torch.device) -> Step:
    """A step of the PyTorch module."""
    layer = te.TransformerLayer(
        sizes["hidden"], sizes["inner"], sizes["heads"], hidden_dropout=dropout,
        attention_dropout=dropout, fuse_qkv_params=True, params_dtype=torch.bfloat16, device=device,
    )  # fmt: skip
    shape = sizes["length"], sizes["batch"], sizes["hidden"]
    x, grad = (torch.rand(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        with modes.region(recipe):
            y = layer(x, attention_mask=None)
        y.backward(grad)

    return Step(run, torch.cuda.synchronize if device.type == "cuda" else lambda: None)


class JaxStep:
    """A jitted step that gives what the next one takes; `step` (state, ..) -> (state, results)."""

    def __init__(self, step: Callable, state: Any, *given: Any) -> None:
        self.step = jax.jit(step, donate_argnums=0).lower(state, *given).compile()
        self.state, self.given, self.results = state, given, None

    def run(self) -> None:
        """Begin a step."""
        self.results = None  # its memory is that of the next ones
        self.state, self.results = self.step(self.state, *self.given)

    def wait(self) -> None:
        """Wait for the last one."""
        jax.block_until_ready((self.state, self.results))

    def as_step(self) -> Step:
        """The step."""
        return Step(self.run, self.wait)


def inputs(sizes: dict[str, int]) -> tuple[jax.Array, jax.Array]:
    """The input and the gradient of the output, [batch, sequence, hidden]."""
    shape = sizes["batch"], sizes["length"], sizes["hidden"]
    keys = jax.random.split(jax.random.key(torch.randint(2**31, ()).item()))
    x, grad = (jax.random.uniform(key, shape, BF16) for key in keys)
    return x, grad


def flax_step(sizes: dict[str, int], recipe: Any, dropout: float) -> Step:
    """A step of the Flax module; its state are scales and histories, and a random key."""
    layer = te_flax.TransformerLayer(
        hidden_size=sizes["hidden"], mlp_hidden_size=sizes["inner"],
        num_attention_heads=sizes["heads"], layernorm_epsilon=EPSILON, hidden_dropout=dropout,
        attention_dropout=dropout, intermediate_dropout=0.0, use_bias=True, dtype=BF16,
        scale_attn_logits=True, self_attn_mask_type="causal", enable_relative_embedding=False,
    )  # fmt: skip
    x, grad = inputs(sizes)

    def step(state: tuple, params: Any, x: jax.Array, grad: jax.Array) -> tuple:
        metas, key = state
        key, drawn = jax.random.split(key)

        def run(params: Any, metas: Any, x: jax.Array) -> jax.Array:
            return layer.apply({"params": params, **metas}, x, rngs={"dropout": drawn})

        y, pull = jax.vjp(run, params, metas, x)
        of_params, metas, of_x = pull(grad)
        return (metas, key), (y, of_params, of_x)

    with te_jax.autocast(enabled=recipe is not None, recipe=recipe):
        key = jax.random.key(0)
        metas = dict(jax.jit(layer.init)({"params": key, "dropout": key}, x))
        params = metas.pop("params")
        return JaxStep(step, (metas, key), params, x, grad).as_step()


def plain_step(sizes: dict[str, int], attention: str | None) -> Step:
    """A step of the layer in plain JAX, bf16, without dropout."""
    hidden, inner, heads = sizes["hidden"], sizes["inner"], sizes["heads"]

    def norm(x: jax.Array, gamma: jax.Array, beta: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + EPSILON)
        return (wide * scale * gamma + beta).astype(x.dtype)

    def layer(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        normed = norm(x, params["gamma_1"], params["beta_1"])
        projected = normed @ params["qkv"] + params["qkv_bias"]
        qkv = [t.reshape(*x.shape[:2], heads, -1) for t in jnp.split(projected, 3, -1)]
        context = jax.nn.dot_product_attention(*qkv, is_causal=True, implementation=attention)
        x = x + context.reshape(x.shape) @ params["out"] + params["out_bias"]
        normed = norm(x, params["gamma_2"], params["beta_2"])
        within = jax.nn.gelu(normed @ params["fc1"] + params["fc1_bias"], approximate=True)
        return x + within @ params["fc2"] + params["fc2_bias"]

    shapes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden),
              "fc1": (hidden, inner), "fc2": (inner, hidden)}  # fmt: skip
    params = {}
    for name, (depth, columns) in shapes.items():
        kernel = jax.random.normal(jax.random.key(len(params)), (depth, columns)) * depth**-0.5
        params |= {name: kernel.astype(BF16), f"{name}_bias": jnp.zeros(columns, BF16)}
    for number in "12":
        params[f"gamma_{number}"] = jnp.ones(hidden, BF16)
        params[f"beta_{number}"] = jnp.zeros(hidden, BF16)

    def step(state: tuple, params: dict, x: jax.Array, grad: jax.Array) -> tuple:
        y, pull = jax.vjp(layer, params, x)
        return state, (y, *pull(grad))

    return JaxStep(step, (), params, *inputs(sizes)).as_step()


# ---- times ---------------------------------------------------------------------------------------


def seconds(step: Step, calls: int) -> float:
    """Of a step, of `calls` in a row."""
    step.wait()
    begin = time.perf_counter()
    for _ in range(calls):
        step.run()
    step.wait()
    return (time.perf_counter() - begin) / calls


def kernels(step: Step, calls: int) -> list[tuple[str, float, float]]:
    """Name, launches and microseconds of the kernels of a step, the longest first."""
    step.wait()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            step.run()
        step.wait()
        torch.cuda.synchronize()
    found: dict[str, list[float]] = {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            found.setdefault(event.name, []).append(event.device_time)
    listed = [(name, len(each) / calls, sum(each) / calls) for name, each in found.items()]
    return sorted(listed, key=lambda row: -row[2])


class Bench:
    """Makes the steps of a table, and measures them in turns.

    `shown` is the share of a step from which on kernels are printed; None: they are not.
    """

    def __init__(self, machine: Machine, sizes: dict[str, int], shown: float | None) -> None:
        self.machine, self.sizes, self.shown = machine, sizes, shown
        self.rates = {"bf16": machine.matmul_rate(torch.bfloat16)}
        self.rates["fp8"] = machine.matmul_rate(torch.float8_e4m3fn) or self.rates["bf16"]

    def limit(self, quantized: bool) -> float:
        """Milliseconds of the products of a step."""
        tokens, hidden = self.sizes["length"] * self.sizes["batch"], self.sizes["hidden"]
        linear = 6 * tokens * (4 * hidden**2 + 2 * hidden * self.sizes["inner"])
        attention = 6 * tokens * self.sizes["length"] * hidden  # half of the scores
        rates = {name: rate.median for name, rate in self.rates.items()}
        each = linear / rates["fp8" if quantized else "bf16"], attention / rates["bf16"]
        return sum(each) * 1e3

    def rows(
        self, steps: dict[str, Callable[[], Step]], base: str | None, **facts: Any
    ) -> list[dict[str, Any]]:
        """A row for each step that runs; ratios are those over `base`."""
        made, gemms = {}, {}
        for name, make in steps.items():
            try:
                made[name] = make()
                with te.counting() as ran:
                    made[name].run()
                    made[name].wait()
                gemms[name] = ran.fp8_gemms
                warm(made[name].run, 1 if self.machine.quick else 6)
            except Exception as error:
                made.pop(name, None)
                traceback.print_exc(limit=-3)
                print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        turns, calls = (2, 1) if self.machine.quick else (9, 10)
        found = alternate({n: lambda s=s: seconds(s, calls) for n, s in made.items()}, turns)
        singles = alternate({n: lambda s=s: seconds(s, 1) for n, s in made.items()}, 3 * turns)
        rows = []
        for name, step in made.items():
            figure = Figure.of(found[name]).scaled(1e3)
            row = {**facts, "way": name, "ms": figure["median"]}
            row |= {"low": figure["low"], "high": figure["high"], "fp8_gemms": gemms[name]}
            row["single_ms"] = Figure.of(singles[name]).median * 1e3
            row["busy_ms"] = self.busy(name, step)
            row["limit_ms"] = self.limit(gemms[name] > 0)
            if base in found:
                row["ratio"] = ratio(found[name], found[base]).median
            rows.append(row)
        return rows

    def busy(self, name: str, step: Step) -> float | None:
        """Milliseconds of the kernels of a step; None where there is no profiler for them."""
        if not self.machine.cuda:
            return None
        try:
            listed = kernels(step, 5)
        except Exception as error:
            print(f"{name}: profiler: {type(error).__name__}: {error}", flush=True)
            return None
        whole = sum(spent for _, _, spent in listed)
        for kernel, launches, spent in listed:
            if self.shown is not None and spent >= self.shown * whole:
                print(f"  {name}: {spent:8.1f} us {launches:5.1f} x {kernel[:100]}", flush=True)
        return whole * 1e-3


def quick_start(bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows of the quick-start layer."""
    for name, dropout in CASES[-1:] if bench.machine.quick else CASES:
        recipe = modes.recipes()[name]
        given = bench.sizes, recipe, dropout
        steps = {
            "PyTorch": lambda given=given: torch_step(*given, bench.machine.device),
            "JAX": lambda given=given: flax_step(*given),
        }
        for row in bench.rows(steps, "PyTorch", recipe=name, dropout=dropout):
            yield row | {"asked": MOST_OVER_PYTORCH if row["way"] == "JAX" else None}


def plain(bench: Bench) -> Iterator[dict[str, Any]]:
    """Rows of the layer without dropout in plain JAX, and of ours."""
    attention = ("cudnn", "xla") if bench.machine.cuda else ("xla",)
    steps: dict[str, Callable] = {f"plain, {a}": lambda a=a: plain_step(bench.sizes, a)
                                  for a in attention}  # fmt: skip
    names = ("delayed",) if bench.machine.quick else ("bf16", "delayed", "current")
    recipes = {f"ours, {name}": name for name in names}
    for way, name in recipes.items():
        steps[way] = lambda name=name: flax_step(bench.sizes, modes.recipes()[name], 0.0)
    rows = bench.rows(steps, None, dropout=0.0)
    fastest = min((row["ms"] for row in rows if row["way"] not in recipes), default=None)
    for row in rows:
        name = recipes.get(row["way"], "bf16")
        asked = LEAST_OVER_BF16 if name == "delayed" else None
        yield row | {"recipe": name, "ratio": fastest and fastest / row["ms"], "asked": asked}


PARTS = {"quick-start": quick_start, "plain": plain}


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--part", action="append", choices=PARTS, help="measure this one")
    options.add_argument("--kernels", type=float, metavar="SHARE",
                         help="print kernels that take this share of a step")  # fmt: skip
    options = options.parse_args()
    report = start("jax_layer", options)
    machine = report.machine
    small = machine.quick or not machine.cuda
    bench = Bench(machine, SMALL if small else SIZES, options.kernels)
    for name, rate in bench.rates.items():
        report.limit(f"{name} products TFLOP/s", rate.median / 1e12, f"products in {name}:")
    with jax.default_device(jax.devices(machine.device.type)[machine.device.index or 0]):
        for name in options.part or PARTS:
            shape = ", ".join(f"{what} {size}" for what, size in bench.sizes.items())
            report.table(f"{name}: {shape}", COLUMNS, PARTS[name](bench))
    report.finish()


if __name__ == "__main__":
    main()
