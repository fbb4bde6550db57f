# SPDX-License-Identifier: Apache-2.0
"""Layers over a mesh: the results of one device, by custom calls and the collectives they need."""

import functools
import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparators import assert_nmse
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jax_arrays import bits, normal, to_torch
from tols import BF16, E5M2, F32, tol

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
import transformer_engine.pytorch as te_torch
from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.jax.activation import activation
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    QKVLayout,
    SequenceDescriptor,
    fused_attn,
)
from transformer_engine.jax.custom_calls import call_operator
from transformer_engine.jax.dense import dense
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.operator_cuts import Cut, Result, over_devices, rows
from transformer_engine.jax.quantize import QuantizerFactory, noop_quantizer_set
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax

BATCH, LENGTH, IN, OUT, INNER = 4, 32, 64, 128, 128
RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "current": recipes.Float8CurrentScaling(),
}
AXES = ("data", "model")
RESOURCE = te.MeshResource(dp_resource="data", tp_resource="model")
SEQUENCE = te.MeshResource(dp_resource="data", tpsp_resource="model")
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
    # name: (devices of data parallelism of 4, names of axes, partition of a layer's arrays)
    "data": (4, RESOURCE, lambda _: {"x": P("data"), "y": P("data")}),
    "column": (1, RESOURCE, lambda of: {**COLUMN, "y": output_of(of, (None,))}),
    "row": (1, RESOURCE, lambda _: {**ROW, "y": P()}),
    "both": (2, RESOURCE, lambda of: {"x": P("data"), **COLUMN, "y": output_of(of, ("data",))}),
    "sequence": (2, SEQUENCE, lambda of: {"x": P(*AXES), **COLUMN, "y": output_of(of, AXES)}),
    "sequence_row": (
        2,
        SEQUENCE,
        lambda _: {"x": P("data", None, "model"), "kernel": P("model"), "y": P(*AXES)},
    ),
    "fsdp": (4, FSDP, lambda _: {"x": P("data"), **SPREAD, "y": P("data")}),
}


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


def assert_close(found, wanted, parts, dtype, more=0.0):
    """Sums of so many parts, each rounded to the dtype; all other numbers are the same bits."""
    bound = tol("round", dtype) * 2 * parts + tol("sum", F32, 4 * parts) + more
    assert_nmse(to_torch(found), to_torch(wanted).double(), bound)


def check(rng, layer, recipe, dtype, cut, devices):
    """Results are those of one device, products are in FP8; returns what was reduced."""
    spread = Spread(rng, layer, recipe, dtype, cut, devices)
    wanted, (found, text, ran) = spread.on_one(), spread.on_mesh()
    close = functools.partial(assert_close, parts=len(devices), dtype=dtype)
    same_products = devices[0].platform == "cpu"  # of other sizes: a GPU may add in another order
    if layer == "layernorm_mlp" and not same_products:  # then some of what follows is cast anew
        close = functools.partial(close, more=tol("recast", E5M2) / 32)
        jax.tree.map(close, found[2], wanted[2])
    else:
        for a, b in zip(jax.tree.leaves(found[2]), jax.tree.leaves(wanted[2]), strict=True):
            assert np.array_equal(bits(a), bits(b)), "scaling state"
    jax.tree.map(close, found[:2], wanted[:2])
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


# Arrays that go through collectives. Of all layers: gradients of parameters, where rows are cut;
# that of the input of a column parallel layer, the result of a row parallel one; a row of amaxes
# forward and one backward of delayed scaling, of current scaling each operand that is cut.
CASES = {
    ("dense", "none", F32, "data"): {"all-reduce": 2},
    ("dense", "delayed", BF16, "data"): {"all-reduce": 4},
    ("dense", "delayed", F32, "column"): {"all-reduce": 3},
    ("dense", "current", BF16, "row"): {"all-reduce": 3},
    ("dense", "delayed", BF16, "both"): {"all-reduce": 5},
    ("dense", "current", F32, "sequence_row"): {
        "all-reduce": 5, "all-gather": 1, "reduce-scatter": 1,
    },
    ("dense", "current", BF16, "fsdp"): {"all-gather": 2, "all-reduce": 2, "reduce-scatter": 2},
    ("layernorm_dense", "current", F32, "both"): {"all-reduce": 8},
    ("layernorm_dense", "delayed", BF16, "sequence"): {
        "all-gather": 2, "reduce-scatter": 1, "all-reduce": 6,
    },
    ("layernorm_mlp", "delayed", BF16, "both"): {"all-reduce": 10},
    ("layernorm_mlp", "current", BF16, "data"): {"all-reduce": 10},
    ("layernorm_mlp", "none", F32, "sequence"): {
        "all-gather": 3, "reduce-scatter": 2, "all-reduce": 6,
    },
    ("layernorm_mlp", "delayed", F32, "fsdp"): {
        "all-gather": 6, "reduce-scatter": 6, "all-reduce": 2,
    },
    ("layernorm_mlp", "delayed", F32, "column"): {"all-reduce": 4},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[1]}-{case[3]}")
def test_four_devices(rng, cpus, case):
    layer, recipe, dtype, cut = case
    assert check(rng, layer, recipe, dtype, cut, cpus) == CASES[case]


@pytest.mark.multigpu
@pytest.mark.parametrize("layer", list(LAYERS))
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize("cut", ["data", "column", "fsdp"])
def test_two_gpus(rng, gpus, layer, recipe, cut):
    check(rng, layer, recipe, BF16, cut, gpus)


# ---- operators by rows ---------------------------------------------------------------------------


def gradients_of_norm(grad, x, gamma, *statistics):
    """Of x, and of gamma and beta, and the largest gradient of x, by one operator."""
    rows, columns = np.prod(x.shape[:-1]), x.shape[-1]
    like = {"grad_input": (rows, columns), "gamma_grad": (columns,), "beta_grad": (columns,)}
    results = {name: jax.ShapeDtypeStruct(shape, x.dtype) for name, shape in like.items()}
    mean, rsigma = (array.reshape(rows) for array in statistics)
    made = call_operator(
        "norm_backward", results, grad_output=grad.reshape(rows, columns),
        input=x.reshape(rows, columns), kind=_core.NORM_LAYERNORM, gamma=gamma,
        mean=mean, rsigma=rsigma,
    )  # fmt: skip
    of_x = made["grad_input"].reshape(x.shape)
    return of_x, made["gamma_grad"], made["beta_grad"], jnp.abs(of_x).max()


@pytest.mark.parametrize("spec", [P(AXES), P(*AXES), P("data", None, "model"), P()], ids=str)
def test_operators_in_parts(rng, cpus, spec):
    """Rows are cut as they lie; features are gathered, and sums over rows are joined."""
    shape, mesh = (4, 32, 64), mesh_of(cpus, 2)
    dims = shape, shape, shape[-1:], shape[:-1], shape[:-1]
    arrays = [normal(rng, each, F32) for each in dims]
    of_rows, sums = rows(2), Result((), "sum")
    cut = Cut((of_rows, of_rows, (), of_rows, of_rows),
              (Result(of_rows), sums, sums, Result((), "max")))  # fmt: skip
    run = jax.jit(lambda *given: over_devices(gradients_of_norm, cut, *given))
    wanted = run(*jax.device_put(arrays, cpus[0]))
    with jax.set_mesh(mesh):
        spread = NamedSharding(mesh, spec)
        given = jax.device_put(arrays, [spread] * 2 + [NamedSharding(mesh, P())] * 3)
        compiled = run.lower(*given).compile()
        found = compiled(*given)
    assert np.array_equal(bits(found[0]), bits(wanted[0]))
    assert float(found[3]) == float(wanted[3])
    for a, b in zip(found[1:3], wanted[1:3], strict=True):
        assert_close(a, b, 4, F32)
    text, cut = compiled.as_text(), spec != P()
    assert reduced(text).get("all-reduce", 0) == 3 * cut and "te_operator" in text
    assert ("all-gather" in text) == (len(spec) == 3)


def on_one_and_on_mesh(run, given, specs, devices):
    """Results of a function on one device and on a mesh, and the compiled text of the latter."""
    run, mesh = jax.jit(run), mesh_of(devices, 2)
    wanted = run(*jax.device_put(given, jax.sharding.SingleDeviceSharding(devices[0])))
    with jax.set_mesh(mesh):
        spread = [NamedSharding(mesh, spec) for spec in specs]
        compiled = jax.jit(run).lower(*map(jax.device_put, given, spread)).compile()
        found = compiled(*map(jax.device_put, given, spread))
    return found, wanted, compiled.as_text()


def operators(name, rng):
    """A function and its gradients, by operators of their own, and arrays [4, 32, ..]."""
    x, grad = (normal(rng, (4, 32, 64), BF16) for _ in range(2))
    if name == "norm":
        affine = [normal(rng, (64,), BF16) for _ in range(2)]
        return (lambda x, *of: layernorm(x, *of, norm_type="layernorm")), [x, *affine], grad
    if name == "activation":
        x = normal(rng, (4, 32, 2, 64), BF16)
        return (lambda x: activation(x, ("silu", "linear"))), [x], grad
    hidden = jnp.asarray(rng.random((4, 1, 32, 32)) < 0.25, jnp.uint8)
    logits, grad = (normal(rng, (4, 8, 32, 32), BF16) for _ in range(2))
    kind = SoftmaxFusionType.SCALED_MASKED
    return (lambda x: softmax(x, hidden, 0.5, kind)), [logits], grad


@pytest.mark.parametrize("name", ["norm", "activation", "softmax"])
def test_operators_over_a_mesh(rng, cpus, name):
    """Rows are computed where they are; gradients of gamma and beta are sums."""
    run, given, grad = operators(name, rng)

    def step(grad, *given):
        y, back = jax.vjp(run, *given)
        return y, back(grad)

    specs = [P(*AXES), P(*AXES), *[P()] * (len(given) - 1)]
    found, wanted, text = on_one_and_on_mesh(step, [grad, *given], specs, cpus)
    assert "te_operator" in text
    assert reduced(text) == ({"all-reduce": 2} if name == "norm" else {})
    for a, b in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        if a.ndim > 1:
            assert np.array_equal(bits(a), bits(b))
        else:
            assert_close(a, b, 4, BF16)


@pytest.mark.parametrize(("groups", "bias"), [(8, None), (4, (1, 8, 32, 32)), (2, (4, 1, 32, 32))])
def test_attention_over_a_mesh(rng, cpus, groups, bias):
    """Batches and heads are computed where they are, those of keys too."""
    heads, less = (4, 32, 8, 16), (4, 32, groups, 16)
    given = [normal(rng, shape, BF16) for shape in (heads, heads, less, less, *[bias] * bool(bias))]
    lengths = jnp.asarray(rng.integers(1, 33, 4), jnp.int32)
    described = SequenceDescriptor.from_seqlens(lengths)
    how = AttnBiasType.POST_SCALE_BIAS if bias else AttnBiasType.NO_BIAS

    def step(grad, q, k, v, bias=None, dropout=0.0):
        def run(q, k, v, bias):
            return fused_attn(
                (q, k, v), bias, described, jax.random.key(0), how,
                AttnMaskType.PADDING_CAUSAL_MASK, QKVLayout.BSHD_BSHD_BSHD,
                AttnSoftmaxType.VANILLA_SOFTMAX, 0.25, dropout, True,
            )  # fmt: skip

        y, back = jax.vjp(run, q, k, v, bias)
        return y, back(grad)

    of_heads = P("data", None, "model")
    specs = [of_heads] * 4 + [P()] * bool(bias)
    found, wanted, text = on_one_and_on_mesh(step, given, specs, cpus)
    assert text.count('custom_call_target="te_operator"') == 2
    assert reduced(text) == ({"all-reduce": 1} if bias else {})
    for a, b in zip(jax.tree.leaves(found)[:4], jax.tree.leaves(wanted)[:4], strict=True):
        assert np.array_equal(bits(a), bits(b))
    if bias:
        assert_close(found[1][3], wanted[1][3], 4, BF16)
    with jax.set_mesh(mesh_of(cpus, 2)):  # each direction would draw for parts of its own
        jaxpr = jax.make_jaxpr(functools.partial(step, dropout=0.5))(*given)
    assert "te_operator" not in str(jaxpr)


# ---- rules ---------------------------------------------------------------------------------------


def test_what_products_can_not_multiply_is_gathered(rng, cpus):
    """Parts of 8 rows, where FP8 takes 16: each device runs the whole layer."""
    mesh = mesh_of(cpus, 4)
    arrays = {name: normal(rng, shape, F32) for name, shape in _ONE.items()}
    arrays["x"] = arrays["x"][:, :8]
    run = jax.jit(lambda a: run_dense(a, quantizers(RECIPES["current"], 1)))
    alone = jax.sharding.SingleDeviceSharding(cpus[0])
    wanted = run(jax.device_put(arrays, alone))
    with jax.set_mesh(mesh), te.autocast(mesh_resource=RESOURCE):
        sharding = NamedSharding(mesh, P())
        arrays = jax.device_put(
            arrays, {**dict.fromkeys(arrays, sharding), "x": sharding.update(spec=P("data"))}
        )
        found = run(arrays)
        text = run.lower(arrays).compile().as_text()
    assert np.array_equal(bits(found), bits(wanted))
    assert set(reduced(text)) == {"all-gather"}


@pytest.mark.parametrize("recipe", ["block", "mxfp8"])
def test_scales_of_parts_of_a_tensor_run_by_definition(cpus, recipe):
    made = {"block": recipes.Float8BlockScaling, "mxfp8": recipes.MXFP8BlockScaling}[recipe]()
    arrays = {name: jnp.ones(shape) for name, shape in _ONE.items()}
    run = lambda a: run_dense(a, quantizers(made, 1))  # noqa: E731
    assert "te_layer" in str(jax.make_jaxpr(run)(arrays))
    with jax.set_mesh(mesh_of(cpus, 4)):
        assert "custom_partitioning" not in str(jax.make_jaxpr(run)(arrays))


def test_batches_over_a_mesh(rng, cpus):
    """Each of a batch is a call of its own, over all devices."""
    arrays = {name: normal(rng, shape, F32) for name, shape in _ONE.items()}
    run = jax.jit(jax.vmap(lambda a, x: run_dense({**a, "x": x}, [noop_quantizer_set]), (None, 0)))
    given = jax.device_put((arrays, arrays["x"][None] * 2), cpus[0])
    wanted = run(*given)
    mesh = mesh_of(cpus, 4)
    with jax.set_mesh(mesh):
        found = run(*jax.device_put(given, NamedSharding(mesh, P())))
    assert np.array_equal(bits(found), bits(wanted))


def test_without_a_mesh_in_force_nothing_is_cut(rng, cpus):
    """XLA then runs the whole layer on each device."""
    mesh = mesh_of(cpus, 4)
    arrays = {name: normal(rng, shape, F32) for name, shape in _ONE.items()}
    run = jax.jit(lambda a: run_dense(a, [noop_quantizer_set]))
    wanted = run(jax.device_put(arrays, jax.sharding.SingleDeviceSharding(cpus[0])))
    found = run(jax.device_put(arrays, NamedSharding(mesh, P())))
    assert np.array_equal(bits(found), bits(wanted))


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_shard_map(rng, cpus, recipe, checked):
    """Each device has a call; where axes are checked, gradients of what is shared are sums."""
    mesh, sets = mesh_of(cpus, 4), quantizers(RECIPES[recipe], 1)
    arrays = {name: normal(rng, shape, F32) for name, shape in _ONE.items()}

    def step(arrays, sets, add):
        y, back = jax.vjp(run_dense, arrays, sets)
        of_arrays, sets = back(y)
        return y, of_arrays | {name: add(of_arrays[name]) for name in ("kernel", "bias")}, sets

    specs = {**dict.fromkeys(arrays, P()), "x": P("data")}
    add = (lambda a: a) if checked else (lambda a: jax.lax.psum(a, "data"))
    spread = jax.shard_map(
        functools.partial(step, add=add), mesh=mesh, in_specs=(specs, P()),
        out_specs=(P("data"), specs, P()), check_vma=checked,
    )  # fmt: skip
    found = jax.jit(spread)(arrays, sets)
    assert "te_layer" in str(jax.make_jaxpr(spread)(arrays, sets))
    alone = jax.jit(functools.partial(step, add=lambda a: a))
    wanted = alone(*jax.device_put((arrays, sets), cpus[0]))
    count = 2 + checked  # where they are not, each device has a state of its own
    for a, b in zip(*(jax.tree.leaves(each[:count]) for each in (found, wanted)), strict=True):
        assert_close(a, b, 4, F32)


# ---- Flax ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "sequence"), [("none", False), ("delayed", True), ("current", False)]
)
def test_a_transformer_layer(rng, seed, cpus, recipe, sequence):
    """Data and tensor parallel: parameters are spread by the names of their axes."""
    layer = te_flax.TransformerLayer(
        hidden_size=64, mlp_hidden_size=128, num_attention_heads=4, hidden_dropout=0.0,
        attention_dropout=0.0, intermediate_dropout=0.0, enable_relative_embedding=False,
        enable_sequence_parallel=sequence, mlp_activations=("silu", "linear"),
    )  # fmt: skip
    x, grad = (normal(rng, (4, 32, 64), F32) for _ in range(2))
    fp8 = {"enabled": recipe != "none", "recipe": RECIPES[recipe]}
    mesh = mesh_of(cpus, 2)
    keys = {"params": jax.random.key(seed), "dropout": jax.random.key(seed + 1)}

    def step(variables, x, grad):
        y, back = jax.vjp(layer.apply, variables, x)
        return (y, *back(grad))

    with te.autocast(**fp8):
        boxed = jax.jit(layer.init)(keys, x)
        variables = nn.unbox(boxed)
        wanted = jax.jit(step)(*jax.device_put((variables, x, grad), cpus[0]))
    resource = SEQUENCE if sequence else RESOURCE
    with jax.set_mesh(mesh), te.autocast(**fp8, mesh_resource=resource):
        rules = te_flax.extend_logical_axis_rules(())
        spread = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
        rows = NamedSharding(mesh, P("data"))
        given = jax.device_put((variables, x, grad), (spread, rows, rows))
        with nn.logical_axis_rules(rules):
            compiled = jax.jit(step).lower(*given).compile()
        with te_torch.counting() as ran:
            found = jax.block_until_ready(compiled(*given))
    products = 4 * 3 * 4  # query, key and value in one, output, two of the MLP; on four devices
    assert ran.fp8_gemms == (0 if recipe == "none" else products)
    assert compiled.as_text().count("te_plan") > 0
    bound = tol("layer", F32, 128)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert_nmse(to_torch(a), to_torch(b).double(), bound)
