# SPDX-License-Identifier: Apache-2.0
"""Layers over a mesh: the results of one device, by custom calls and the collectives they need."""

import functools
import re
from collections import Counter

import jax
import numpy as np
import pytest
from comparators import assert_nmse
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_arrays import bits, normal, to_torch
from thinning import one_each
from tols import BF16, F32, tol

import transformer_engine.jax as te
import transformer_engine.pytorch as te_torch
from transformer_engine.common import recipe as recipes
from transformer_engine.jax.dense import dense
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.quantize import QuantizerFactory, noop_quantizer_set

BATCH, LENGTH, IN, OUT, INNER = 4, 32, 64, 128, 128
RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
}
AXES = ("data", "model")
RESOURCE = te.MeshResource(dp_resource="data", tp_resource="model")
FSDP = te.MeshResource(fsdp_resource="data")


def quantizers(recipe, count):
    if recipe is None:
        return (noop_quantizer_set,) * count
    made = QuantizerFactory.create_set(n_quantizer_sets=count, fp8_recipe=recipe)
    return (made,) if count == 1 else tuple(made)


# ---- layers --------------------------------------------------------------------------------------


def run_dense(a, sets):
    dims = ((2,), (0,))
    return dense(a["x"], a["kernel"], a["bias"], dims, quantizer_set=sets[0])


def run_layernorm_dense(a, sets):
    affine = a["gamma"], a["beta"]
    return layernorm_dense(a["x"], a["kernel"], *affine, a["bias"], quantizer_set=sets[0])


def run_layernorm_mlp(a, sets):
    kernels, biases = (a["kernel_1"], a["kernel_2"]), (a["bias_1"], a["bias_2"])
    return layernorm_mlp(
        a["x"], a["gamma"], a["beta"], kernels, biases, "layernorm",
        activation_type=("silu", "linear"), quantizer_sets=sets,
    )  # fmt: skip


_ONE = {"x": (BATCH, LENGTH, IN), "kernel": (IN, OUT), "bias": (OUT,)}
_NORM = {"gamma": (IN,), "beta": (IN,)}
_TWO = {"x": (BATCH, LENGTH, IN), **_NORM, "kernel_1": (IN, 2, INNER), "kernel_2": (INNER, IN)}
LAYERS = {
    "dense": (run_dense, _ONE),
    "layernorm_dense": (run_layernorm_dense, {**_ONE, **_NORM}),
    "layernorm_mlp": (run_layernorm_mlp, {**_TWO, "bias_1": (2, INNER), "bias_2": (IN,)}),
}

COLUMN = {
    "kernel": P(None, "model"), "bias": P("model"), "kernel_1": P(None, None, "model"),
    "bias_1": P(None, "model"), "kernel_2": P("model"),
}  # fmt: skip
ROW = {"x": P(None, None, "model"), "kernel": P("model")}
SPREAD = {
    "kernel": P("data"), "bias": P("data"), "kernel_1": P("data"), "bias_1": P(None, "data"),
    "kernel_2": P(None, "data"), "bias_2": P("data"), "gamma": P("data"), "beta": P("data"),
}  # fmt: skip


def output_of(layer, rows):
    """The partition of a layer's result that is tensor parallel by its columns."""
    return P(*rows) if layer == "layernorm_mlp" else P(rows[0], None, "model")


CUTS = {
    # name: (data parallel, the rest is tensor parallel; names of axes; partition of arrays)
    "data": (4, RESOURCE, lambda _: {"x": P("data"), "y": P("data")}),
    "column": (1, RESOURCE, lambda of: {**COLUMN, "y": output_of(of, (None,))}),
    "row": (1, RESOURCE, lambda _: {**ROW, "y": P()}),
    "both": (2, RESOURCE, lambda of: {"x": P("data"), **COLUMN, "y": output_of(of, ("data",))}),
    "sequence": (
        2, RESOURCE, lambda of: {"x": P(*AXES), **COLUMN, "y": output_of(of, AXES)},
    ),
    "sequence_row": (
        2, RESOURCE, lambda _: {"x": P("data", None, "model"), "kernel": P("model"), "y": P(*AXES)},
    ),
    "fsdp": (4, FSDP, lambda _: {"x": P("data"), **SPREAD, "y": P("data")}),
}  # fmt: skip


# ---- a step on one device and on a mesh ----------------------------------------------------------


def reduced(text):
    """How many arrays of a compiled program go through each collective."""
    found = Counter()
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    for name, operands in re.findall(rf" ({names})(?:-start)?\(([^)]*)\)", text):
        found[name] += operands.count("%")
    return dict(found)


def mesh_of(devices, data):
    grid = np.array(devices).reshape(data, -1)
    return jax.sharding.Mesh(grid, AXES, axis_types=(AxisType.Auto,) * 2)


class Spread:
    """A step of a layer, compiled for one device and for a mesh."""

    def __init__(self, rng, layer, recipe, dtype, cut, devices):
        self.run, shapes = LAYERS[layer]
        data, resource, specs = CUTS[cut]
        self.mesh, self.specs = mesh_of(devices, min(data, len(devices))), specs(layer)
        self.resource, self.alone = resource, jax.sharding.SingleDeviceSharding(devices[0])
        arrays = {name: normal(rng, shape, dtype) for name, shape in shapes.items()}
        count = 2 if layer == "layernorm_mlp" else 1
        sets = quantizers(RECIPES[recipe], count)
        y = jax.eval_shape(self.run, arrays, sets)
        self.given = arrays, sets, normal(rng, y.shape, dtype)

    def step(self, arrays, sets, grad):
        y, back = jax.vjp(self.run, arrays, sets)
        return (y, *back(grad))

    def on_one(self):
        given = jax.device_put(self.given, self.alone)
        return jax.jit(self.step)(*given)

    def sharding(self, name):
        return NamedSharding(self.mesh, self.specs.get(name, P()))

    def on_mesh(self):
        """Results, the compiled text, and counters."""
        arrays, sets, grad = self.given
        arrays = {name: jax.device_put(a, self.sharding(name)) for name, a in arrays.items()}
        sets = jax.device_put(sets, NamedSharding(self.mesh, P()))
        given = arrays, sets, jax.device_put(grad, self.sharding("y"))
        of_arrays = {name: self.sharding(name) for name in arrays}
        results = self.sharding("y"), of_arrays, None
        with jax.set_mesh(self.mesh), te.autocast(mesh_resource=self.resource):
            compiled = jax.jit(self.step, out_shardings=results).lower(*given).compile()
            with te_torch.counting() as ran:
                made = jax.block_until_ready(compiled(*given))
        return made, compiled.as_text(), ran


def assert_close(found, wanted, parts, dtype):
    """Sums of so many parts, each rounded to the dtype; all other numbers are the same bits."""
    bound = tol("round", dtype) * 2 * parts + tol("sum", F32, 4 * parts)
    assert_nmse(to_torch(found), to_torch(wanted).double(), bound)


def check(rng, layer, recipe, dtype, cut, devices):
    """Results are those of one device, products are in FP8; returns what was reduced."""
    spread = Spread(rng, layer, recipe, dtype, cut, devices)
    wanted, (found, text, ran) = spread.on_one(), spread.on_mesh()
    for a, b in zip(jax.tree.leaves(found[2]), jax.tree.leaves(wanted[2]), strict=True):
        assert np.array_equal(bits(a), bits(b)), "scaling state"
    jax.tree.map(
        functools.partial(assert_close, parts=len(devices), dtype=dtype), found[:2], wanted[:2]
    )
    products = 3 * len(devices) * (2 if layer == "layernorm_mlp" else 1)
    expected = (0, products) if recipe == "none" else (products, 0)
    assert (ran.fp8_gemms, ran.other_gemms) == expected
    assert 'custom_call_target="te_plan"' in text
    return reduced(text)


CPUS = 4


@pytest.fixture(scope="module")
def cpus():
    devices = jax.devices("cpu")
    if len(devices) < CPUS:
        pytest.skip(f"needs {CPUS} devices, found {len(devices)}")
    return devices[:CPUS]


@pytest.fixture(scope="module")
def gpus():
    return jax.devices("cuda")[:2]


CASES = [
    ("dense", "none", F32, "data"),
    ("dense", "delayed", BF16, "data"),
    ("dense", "delayed", F32, "column"),
    ("dense", "current", BF16, "row"),
    ("dense", "delayed", BF16, "both"),
    ("dense", "current", F32, "sequence_row"),
    ("dense", "current", BF16, "fsdp"),
    ("layernorm_dense", "current", F32, "both"),
    ("layernorm_dense", "delayed", BF16, "sequence"),
    ("layernorm_mlp", "delayed", BF16, "both"),
    ("layernorm_mlp", "current", BF16, "data"),
    ("layernorm_mlp", "none", F32, "sequence"),
    ("layernorm_mlp", "delayed", F32, "fsdp"),
    ("layernorm_mlp", "delayed", F32, "column"),
]


@pytest.mark.parametrize(("layer", "recipe", "dtype", "cut"), CASES)
def test_four_devices(rng, cpus, layer, recipe, dtype, cut):
    print(check(rng, layer, recipe, dtype, cut, cpus))
