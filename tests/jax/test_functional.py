# SPDX-License-Identifier: Apache-2.0
"""Functions of layers against float64 definitions, and against our PyTorch modules."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import pytest
import torch
from comparators import assert_bits, assert_grad64, assert_nmse
from jax_arrays import to_jax, to_torch
from thinning import pairs
from tols import BF16, E4M3, E5M2, F16, F32, tol

import transformer_engine.jax as te
import transformer_engine.pytorch as te_pytorch
from transformer_engine.common import recipe
from transformer_engine.jax import cpp_extensions as tex, quantize as tq
from transformer_engine.jax.activation import activation
from transformer_engine.jax.cpp_extensions import CollectiveOp, CollectiveOpSet
from transformer_engine.jax.definitions import by_definition
from transformer_engine.jax.definitions.activations import ACTIVATIONS
from transformer_engine.jax.dense import dense
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax

LAST = ((-1,), (0,))
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling(),
    "row": recipe.Float8RowScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
}


def normal(rng, *shape, dtype=F32):
    """Standard normal numbers as a tensor."""
    return torch.from_numpy(rng.standard_normal(shape)).to(dtype)


def gradients(function, arrays, grad):
    """(output, gradients) of a function of arrays by name, compiled."""

    @jax.jit
    def run(arrays, grad):
        output, back = jax.vjp(lambda arrays: function(**arrays), arrays)
        return output, back(grad)[0]

    output, made = run({name: to_jax(t) for name, t in arrays.items()}, to_jax(grad))
    return to_torch(output), {name: to_torch(array) for name, array in made.items()}


def check64(function, definition, arrays, grad, bound):
    """Output and gradients against a definition in float64."""
    output, made = gradients(function, arrays, grad)
    exact = definition(**{name: tensor.double() for name, tensor in arrays.items()})
    assert output.dtype == next(iter(arrays.values())).dtype
    assert_nmse(output, exact, bound, "output")
    assert_grad64(made, definition, arrays, grad, bound)


# ---- high precision, against float64 -------------------------------------------------------------


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_dense(dtype, rng):
    arrays = {
        "x": normal(rng, 3, 5, 24, dtype=dtype),
        "kernel": normal(rng, 24, 2, 16, dtype=dtype),
        "bias": normal(rng, 2, 16, dtype=dtype),
    }
    check64(
        lambda x, kernel, bias: dense(x, kernel, bias, LAST),
        lambda x, kernel, bias: torch.einsum("bsk,kmn->bsmn", x, kernel) + bias,
        arrays, normal(rng, 3, 5, 2, 16, dtype=dtype), tol("round", dtype) + tol("sum", F32, 32),
    )  # fmt: skip


def test_dims_that_are_summed_over(rng):
    arrays = {"x": normal(rng, 6, 4, 5), "kernel": normal(rng, 7, 4, 6)}
    check64(
        lambda x, kernel: dense(x, kernel, None, ((0, 1), (2, 1))),
        lambda x, kernel: torch.einsum("kjs,njk->sn", x, kernel),
        arrays, normal(rng, 5, 7), tol("sum", F32, 24) + tol("round", F32),
    )  # fmt: skip


def norm64(x, gamma, beta=None, *, kind, zero_centered, epsilon=1e-6):
    """A norm of rows as it is defined."""
    if kind == "layernorm":
        x = x - x.mean(-1, keepdim=True)
    values = x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt()
    values = values * (gamma + 1 if zero_centered else gamma)
    return values if beta is None else values + beta


@pairs(kind=("layernorm", "rmsnorm"), zero_centered=(False, True), dtype=(F32, BF16))
def test_norms(kind, zero_centered, dtype, rng):
    arrays = {"x": normal(rng, 3, 5, 48, dtype=dtype), "gamma": normal(rng, 48, dtype=dtype)}
    if kind == "layernorm":
        arrays["beta"] = normal(rng, 48, dtype=dtype)
    check64(
        lambda x, gamma, beta=None: layernorm(x, gamma, beta, kind, zero_centered),
        lambda **given: norm64(**given, kind=kind, zero_centered=zero_centered),
        arrays, normal(rng, 3, 5, 48, dtype=dtype), tol("chain", dtype, 48),
    )  # fmt: skip


def activation64(x, kinds, limit=7.0, alpha=1.702, offset=1.0):
    """Activations of x [.., functions, columns] as they are defined."""
    f = torch.nn.functional
    functions = {
        "gelu": lambda a: f.gelu(a, approximate="tanh"),
        "silu": f.silu,
        "relu": f.relu,
        "quick_gelu": lambda a: a * torch.sigmoid(1.702 * a),
        "squared_relu": lambda a: f.relu(a).square(),
        "sigmoid": torch.sigmoid,
        "linear": lambda a: a,
        "clamped_silu": lambda a: a.clamp(max=limit) * torch.sigmoid(alpha * a.clamp(max=limit)),
        "clamped_linear": lambda a: a.clamp(-limit, limit) + offset,
    }
    values = [functions[kind](x[..., i, :]) for i, kind in enumerate(kinds)]
    return torch.stack(values).prod(0) if len(values) > 1 else values[0]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_activations(dtype, rng):
    """All of them in one compiled function; those of two functions in either order."""
    kinds = sorted(ACTIVATIONS)
    arrays = {str(kind): 3.0 * normal(rng, 7, len(kind), 16, dtype=dtype) for kind in kinds}

    def run(**given):
        return jnp.stack([activation(given[str(kind)], kind) for kind in kinds])

    def definition(**given):
        return torch.stack([activation64(given[str(kind)], kind) for kind in kinds])

    grad = normal(rng, len(kinds), 7, 16, dtype=dtype)
    check64(run, definition, arrays, grad, tol("chain", dtype, 1))
    x = to_jax(normal(rng, 3, 2, 8))
    swapped = to_torch(activation(x[:, ::-1], ("linear", "silu")))
    exact = to_torch(activation(x, ("silu", "linear"))).double()
    assert_nmse(swapped, exact, tol("chain", F32, 1))


def test_numbers_of_activations(rng):
    numbers = {"limit": 0.5, "alpha": 2.0, "glu_linear_offset": 0.25}
    kinds = ("clamped_silu", "clamped_linear")
    check64(
        lambda x: activation(x, kinds, act_params=numbers),
        lambda x: activation64(x, kinds, 0.5, 2.0, 0.25),
        {"x": normal(rng, 9, 2, 16)}, normal(rng, 9, 16), tol("chain", F32, 1),
    )  # fmt: skip


@pytest.mark.parametrize("kind", SoftmaxFusionType, ids=lambda kind: kind.value)
def test_softmaxes(kind, rng):
    masks = {
        SoftmaxFusionType.SCALED: torch.zeros(6, 6),
        SoftmaxFusionType.SCALED_MASKED: torch.from_numpy(rng.random((2, 1, 6, 6)) < 0.4),
        SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED: torch.ones(6, 6).triu(1),
    }
    hidden = masks[kind].bool().clone()
    if kind is SoftmaxFusionType.SCALED_MASKED:
        hidden[..., 0, :] = True  # a query without keys
    mask = jnp.asarray(hidden.numpy()) if kind is SoftmaxFusionType.SCALED_MASKED else None

    def definition(logits):
        scores = (0.5 * logits).masked_fill(hidden, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) if hidden.any() else scores.softmax(-1)

    arrays = {"logits": normal(rng, 2, 3, 6, 6)}
    output, made = gradients(lambda logits: softmax(logits, mask, 0.5, kind), arrays,
                             grad := normal(rng, 2, 3, 6, 6))  # fmt: skip
    bound = tol("softmax_grad", F32) + tol("sum", F32, 6)
    assert_nmse(output, definition(arrays["logits"].double()), bound)
    p = definition(arrays["logits"].double())
    exact = 0.5 * p * (grad - (grad * p).sum(-1, keepdim=True))
    assert_nmse(made["logits"], exact, bound)


@pairs(kind=("layernorm", "rmsnorm"), kinds=(("gelu",), ("silu", "linear")), bias=(False, True))
def test_mlp(kind, kinds, bias, rng):
    arrays = {
        "x": normal(rng, 2, 5, 24),
        "gamma": normal(rng, 24),
        "first": normal(rng, 24, len(kinds), 16) / 5,
        "second": normal(rng, 16, 24) / 4,
    }
    if kind == "layernorm":
        arrays["beta"] = normal(rng, 24)
    if bias:
        arrays |= {"bias_1": normal(rng, len(kinds), 16), "bias_2": normal(rng, 24)}

    def run(x, gamma, first, second, beta=None, bias_1=None, bias_2=None):
        return layernorm_mlp(x, gamma, beta, (first, second), (bias_1, bias_2), kind,
                             activation_type=kinds)  # fmt: skip

    def definition(x, gamma, first, second, beta=None, bias_1=0.0, bias_2=0.0):
        values = norm64(x, gamma, beta, kind=kind, zero_centered=False)
        h = torch.einsum("bsk,kfn->bsfn", values, first) + bias_1
        return activation64(h, kinds) @ second + bias_2

    check64(run, definition, arrays, normal(rng, 2, 5, 24), tol("chain", F32, 24))


# ---- in FP8, against our PyTorch modules ---------------------------------------------------------


def in_pytorch(module, name, x, grad):
    """(output, gradients) of a module under a recipe, at its first step."""
    x = x.clone().requires_grad_()
    with te_pytorch.autocast(enabled=True, recipe=RECIPES[name]):
        output = module(x)
    output.backward(grad)
    grads = {n: p.grad for n, p in module.named_parameters()}
    return output.detach(), {"x": x.grad, **grads}


def assert_same(found, wanted, what, roundings):
    """Equal up to fp32 sums in another order, after which casts differ rarely."""
    bound = tol("sum", F32, 512) + roundings
    assert_nmse(found.double(), wanted.double(), bound, what)


@pytest.mark.parametrize("name", RECIPES)
def test_dense_as_in_pytorch(name, rng):
    """The same casts: outputs and gradients differ by the order of fp32 sums alone."""
    module = te_pytorch.Linear(128, 64, params_dtype=F32, device="cpu")
    x, grad = normal(rng, 32, 128), normal(rng, 32, 64)
    output, wanted = in_pytorch(module, name, x, grad)
    quantizers = tq.QuantizerFactory.create_set(fp8_recipe=RECIPES[name])
    arrays = {"x": x, "kernel": module.weight.detach().t(), "bias": module.bias.detach()}
    found, made = gradients(
        lambda x, kernel, bias: dense(x, kernel, bias, LAST, quantizer_set=quantizers),
        arrays, grad,
    )  # fmt: skip
    assert_same(found, output, "output", 0.0)
    assert_same(made["x"], wanted["x"], "x", 0.0)
    assert_same(made["kernel"].t(), wanted["weight"], "kernel", 0.0)
    assert_same(made["bias"], wanted["bias"], "bias", 0.0)


@pytest.mark.parametrize(("name", "kind"), [("delayed", "LayerNorm"), ("block", "RMSNorm")])
def test_mlp_as_in_pytorch(name, kind, rng):
    """Norm and activation are fp32 functions that differ in the last bits, casts hardly do."""
    module = te_pytorch.LayerNormMLP(128, 256, normalization=kind, activation="swiglu",
                                     params_dtype=F32, device="cpu")  # fmt: skip
    x, grad = normal(rng, 32, 128), normal(rng, 32, 128)
    output, wanted = in_pytorch(module, name, x, grad)
    sets = [tq.QuantizerFactory.create_set(fp8_recipe=RECIPES[name]) for _ in range(2)]
    params = {n: p.detach() for n, p in module.named_parameters()}
    first = params["fc1_weight"].t().reshape(128, 2, 256).contiguous()
    arrays = {
        "x": x, "gamma": params["layer_norm_weight"], "first": first,
        "second": params["fc2_weight"].t().contiguous(), "bias_2": params["fc2_bias"],
        "bias_1": params["fc1_bias"].reshape(2, 256),
    }  # fmt: skip
    if kind == "LayerNorm":
        arrays["beta"] = params["layer_norm_bias"]

    def run(x, gamma, first, second, bias_1, bias_2, beta=None):
        return layernorm_mlp(x, gamma, beta, (first, second), (bias_1, bias_2), kind.lower(),
                             epsilon=module.eps, activation_type=("silu", "linear"),
                             quantizer_sets=sets)  # fmt: skip

    found, made = gradients(run, arrays, grad)
    recast = tol("recast", E4M3) / 256 + tol("recast", E5M2) / 256
    assert_same(found, output, "output", recast)
    assert_same(made["x"], wanted["x"], "x", recast)
    assert_same(made["gamma"], wanted["layer_norm_weight"], "gamma", recast)
    of_first = made["first"].reshape(128, 512).t()
    assert_same(of_first, wanted["fc1_weight"], "first", recast)
    assert_same(made["second"].t(), wanted["fc2_weight"], "second", recast)


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_backwards_in_high_precision(override, rng):
    made = recipe.Float8CurrentScaling(backward_override=override)
    quantizers = tq.QuantizerFactory.create_set(fp8_recipe=made)
    x, kernel, grad = normal(rng, 8, 16), normal(rng, 16, 8), normal(rng, 8, 8)
    arrays = {"x": x, "kernel": kernel}
    output, found = gradients(
        lambda x, kernel: dense(x, kernel, None, LAST, quantizer_set=quantizers), arrays, grad
    )
    back = {
        n: to_torch(jax.jit(lambda a, q=q: q.quantize(a).dequantize())(to_jax(t)))
        for (n, t), q in zip(arrays.items(), (quantizers.x, quantizers.kernel), strict=True)
    }
    kept = arrays if override == "high_precision" else back
    bound = tol("sum", F32, 16) + tol("round", F32)
    assert_nmse(output, back["x"].double() @ back["kernel"].double(), bound)
    assert_nmse(found["x"], grad.double() @ kept["kernel"].double().t(), bound)
    assert_nmse(found["kernel"], kept["x"].double().t() @ grad.double(), bound)


# ---- what JAX makes of them ----------------------------------------------------------------------


def test_operands_are_fp8():
    """The products of a layer multiply FP8, in the forward and in the backward."""
    for name in ("delayed", "current"):
        quantizers = tq.QuantizerFactory.create_set(fp8_recipe=RECIPES[name])

        def loss(x, kernel, quantizers=quantizers):
            return jnp.sum(dense(x, kernel, None, LAST, quantizer_set=quantizers))

        step = by_definition(jax.grad(loss, (0, 1)))
        jaxpr = jax.make_jaxpr(step)(jnp.ones((4, 8)), jnp.ones((8, 4)))
        products = [line for line in str(jaxpr).splitlines() if "dot_general" in line]
        text = str(jaxpr)
        assert "f8_e4m3fn" in text and "f8_e5m2" in text
        assert len(products) == 3


def test_batches_are_rows(rng):
    """`vmap` of a layer is the layer of the whole batch."""
    quantizers = tq.QuantizerFactory.create_set(fp8_recipe=RECIPES["delayed"])
    x, kernel = to_jax(normal(rng, 3, 5, 16)), to_jax(normal(rng, 16, 8))

    def loss(kernel, quantizers, batched):
        run = lambda x: dense(x, kernel, None, LAST, quantizer_set=quantizers)  # noqa: E731
        return jnp.sum(jnp.square(jax.vmap(run)(x) if batched else run(x)))

    both = [
        jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(kernel, quantizers, batched)
        for batched in (True, False)
    ]
    (a, (of_kernel, state)), (b, (expected, wanted)) = both
    bound = tol("sum", F32, 64) + tol("recast", E5M2)
    assert_nmse(to_torch(a), to_torch(b).double(), bound)
    assert_nmse(to_torch(of_kernel), to_torch(expected).double(), bound)
    for found, other in zip(jax.tree.leaves(state.x), jax.tree.leaves(wanted.x), strict=True):
        assert_bits(to_torch(found), to_torch(other))


def test_checkpoints_and_their_names(rng):
    """Recomputed layers have the same gradients; policies find products and casts by name."""
    from transformer_engine.jax import checkpoint_policies as policies

    quantizers = tq.QuantizerFactory.create_set(
        fp8_recipe=RECIPES["current"], checkpoint_name="casts"
    )
    x, kernel = to_jax(normal(rng, 4, 16)), to_jax(normal(rng, 16, 16))

    unnamed = tq.QuantizerFactory.create_set(fp8_recipe=RECIPES["current"])

    def layer(x, kernel, quantizers=quantizers):
        return jnp.sin(dense(x, kernel, None, LAST, quantizer_set=quantizers))

    def ran(policy):
        """Products by definition, and plans."""
        counts = []
        for way, what in ((by_definition, "dot_general"), (lambda f: f, "te_layer")):
            jax.clear_caches()  # of what was traced the other way
            run = jax.checkpoint(partial(layer, quantizers=unnamed), policy=policy)
            step = way(jax.grad(lambda *a, run=run: jnp.sum(run(*a)), (0, 1)))
            counts.append(str(jax.make_jaxpr(step)(x, kernel)).count(what))
        return tuple(counts)

    assert ran(jax.checkpoint_policies.nothing_saveable) == (4, 3)
    assert ran(policies.te_gemms_saveable) == (3, 2)
    assert ran(policies.dots_and_te_gemms_with_no_batch_dims) == (3, 2)
    assert ran(policies.checkpoint_dots_and_te_gemms) == (3, 2)
    named = jax.checkpoint_policies.save_only_these_names("casts")
    run = jax.checkpoint(layer, policy=named)
    for way in (by_definition(run), run):
        jax.clear_caches()
        saved = jax.make_jaxpr(lambda *a, way=way: jax.vjp(way, *a)[1])(x, kernel)
        assert any(aval.dtype == jnp.float8_e4m3fn for aval in saved.out_avals)
    plain = jax.jit(jax.grad(lambda *a: jnp.sum(layer(*a)), (0, 1)))(x, kernel)
    again = jax.jit(jax.grad(lambda *a: jnp.sum(jax.checkpoint(layer)(*a)), (0, 1)))(x, kernel)
    for found, expected in zip(again, plain, strict=True):
        assert_nmse(to_torch(found), to_torch(expected).double(), tol("sum", F32, 16))


def test_a_mesh_changes_no_result(rng):
    """Data and tensor parallel on four devices, with constraints by the names of dims."""
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices, found {jax.device_count()}")
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x, kernel = to_jax(normal(rng, 4, 8, 32)), to_jax(normal(rng, 32, 16))
    gamma = to_jax(normal(rng, 32))
    quantizers = tq.QuantizerFactory.create_set(fp8_recipe=RECIPES["delayed"])

    def loss(x, kernel, gamma, quantizers, axes):
        y = layernorm_dense(
            x, kernel, gamma, None, None, "rmsnorm", quantizer_set=quantizers,
            dot_input_axes=("nvte_batch", "nvte_seqlen", "nvte_hidden") if axes else None,
            kernel_axes=("nvte_w_fsdp", "nvte_w_tp") if axes else None,
        )  # fmt: skip
        return jnp.sum(jnp.sin(y))

    step = jax.value_and_grad(loss, (0, 1, 2, 3))
    alone = jax.jit(step, static_argnums=4)(x, kernel, gamma, quantizers, False)
    resource = te.MeshResource(dp_resource="dp", tp_resource="tp")
    with te.autocast(mesh_resource=resource), jax.set_mesh(mesh):
        spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("dp")))
        together = jax.jit(step, static_argnums=4)(spread, kernel, gamma, quantizers, True)
    bound = tol("sum", F32, 64) + tol("recast", E5M2) / 32
    for found, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        assert_nmse(to_torch(found), to_torch(expected).double(), bound)


# ---- single operations, and errors ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["CURRENT_TENSOR_SCALING", "BLOCK_1D_SCALING"])
def test_products_of_tensors(mode, rng):
    """`tex.gemm` of quantized tensors, either dims of either summed over."""
    made = tq.QuantizerFactory.create(1, tq.ScalingMode[mode], jnp.float8_e4m3fn)
    bound = tol("sum", F32, 32) + tol("round", F32)
    for a, b in itertools.product((0, 1), (0, 1)):
        dims = ((0 if a else 1,), (0 if b else 1,))
        lhs = normal(rng, 32, 48) if a else normal(rng, 48, 32)
        rhs = normal(rng, 32, 16) if b else normal(rng, 16, 32)

        @jax.jit
        def run(lhs, rhs, dims=dims):
            given = made.quantize(lhs), made.quantize(rhs)
            return (
                tex.gemm(*given, contracting_dims=dims),
                tex.gemm(lhs, rhs, None, dims, made, made),
                *(t.get_tensor(u).dequantize() for t, u in zip(given, usages(dims), strict=True)),
            )

        product, cast_here, *wide = map(to_torch, run(to_jax(lhs), to_jax(rhs)))
        exact = torch.tensordot(*(t.double() for t in wide), dims)
        assert_nmse(product, exact, bound)
        assert_bits(product, cast_here)


def usages(dims):
    """Usages of the operands of a product."""
    return [tq.TensorUsage.RHS if of == (0,) else tq.TensorUsage.LHS for of in dims]


def test_single_operations(rng):
    """Norms and activations of `tex` are those of the functions, and casts come from fp32."""
    x, gamma, beta = (to_jax(normal(rng, *shape)) for shape in ((6, 32), (32,), (32,)))
    dz = to_jax(normal(rng, 6, 32))

    @jax.jit
    def norms(x, gamma, beta, dz):
        y, back = jax.vjp(lambda *a: layernorm(*a, "layernorm"), x, gamma, beta)
        out, mean, rsigma = tex.layernorm_fwd(x, gamma, beta, False, 1e-6, None)
        made = tex.layernorm_bwd(dz, x, mean, rsigma, gamma, False, 1e-6)
        z, back_rms = jax.vjp(lambda *a: layernorm(*a, None, "rmsnorm", True), x, gamma)
        rms, rsigma = tex.rmsnorm_fwd(x, gamma, True, 1e-6)
        made += tex.rmsnorm_bwd(dz, x, rsigma, gamma, True, 1e-6)
        return (out.data, rms.data, *made), (y, z, *back(dz), *back_rms(dz))

    for found, expected in zip(*norms(x, gamma, beta, dz), strict=True):
        assert_bits(to_torch(found), to_torch(expected))
    x = to_jax(normal(rng, 6, 2, 32))
    kinds = ("silu", "linear")
    made = tq.QuantizerFactory.create(1, tq.ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn)

    @jax.jit
    def activations(x, dz):
        found, total = tex.quantize_dact_dbias(dz, x, kinds, True, made)
        y, back = jax.vjp(lambda x: activation(x, kinds), x)
        of_x = tex.dact_lu(dz, x, kinds).data
        alike = (tex.act_lu(x, kinds).data, y), (of_x, back(dz)[0])
        near = tex._jax_act_lu(x, kinds).data, y
        return alike, near, found.dequantize(), total, of_x

    alike, near, found, total, wide = activations(x, dz)
    assert_nmse(to_torch(near[0]), to_torch(near[1]).double(), tol("chain", F32, 1))
    for one, other in alike:
        assert_bits(to_torch(one), to_torch(other))
    assert total.shape == (2, 32)
    assert_nmse(to_torch(found), to_torch(wide).double(), tol("quantize", E4M3))
    assert_nmse(to_torch(total), to_torch(wide).double().sum(0), tol("sum", F32, 6))
    assert tex.dequantize(tex.quantize(x)) is x


def test_results_that_are_cast(rng):
    """`layernorm` and `activation` with a quantizer give what the cast stands for."""
    made = tq.QuantizerFactory.create(1, tq.ScalingMode.CURRENT_TENSOR_SCALING, jnp.float8_e4m3fn)
    x, gamma = to_jax(normal(rng, 6, 32)), to_jax(normal(rng, 32))

    @jax.jit
    def run(x, gamma, h):
        return (
            tex.rmsnorm_fwd(x, gamma, False, 1e-6, made)[0].dequantize(),
            layernorm(x, gamma, None, "rmsnorm", quantizer=made),
            tex.act_lu(h, ("gelu",), made).dequantize(),
            activation(h, ("gelu",), made),
        )

    found = run(x, gamma, to_jax(normal(rng, 6, 1, 32)))
    for one, other in (found[:2], found[2:]):
        assert_bits(to_torch(one), to_torch(other))


ONES = jnp.ones((4, 4))
REFUSED = {
    "dims": (lambda: dense(ONES, jnp.ones((3, 4)), None, LAST), ValueError, "sums over"),
    "collective": (
        lambda: dense(ONES, ONES, None, LAST,
                      collective_op_set=CollectiveOpSet.create(CollectiveOp.ALL_GATHER)),
        NotImplementedError, "ALL_GATHER",
    ),
    "norm": (lambda: layernorm(ONES, ONES[0], None, "batchnorm"), ValueError, "batchnorm"),
    "beta": (lambda: layernorm(ONES, ONES[0], ONES[0], "rmsnorm"), ValueError, "no beta"),
    "activation": (lambda: activation(ONES, ("tanh",)), ValueError, "tanh"),
    "functions": (lambda: activation(ONES, ("silu", "linear")), ValueError, "needs"),
    "mask": (lambda: softmax(ONES, ONES), ValueError, "SCALED"),
    "names": (
        lambda: te.sharding.with_sharding_constraint_by_logical_axes(ONES, ("a",)), ValueError,
        "2 dims",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what):
    call, error, said = REFUSED[what]
    with pytest.raises(error, match=said):
        call()


def test_arrays_of_other_shapes_are_refused(rng):
    """A reshape would make numbers of them."""
    x, kernel = normal(rng, 8, 64), normal(rng, 64, 4, 2)
    gamma, kernels = normal(rng, 64), (normal(rng, 64, 2, 32), normal(rng, 32, 64))
    for shape in ((2, 4), (8,), (2,)):
        with pytest.raises(ValueError, match=r"dense: bias is .*, expected \(4, 2\)"):
            dense(to_jax(x), to_jax(kernel), jnp.zeros(shape), ((1,), (0,)))
    with pytest.raises(ValueError, match=r"layernorm_dense: gamma is \(8, 8\), expected \(64,\)"):
        layernorm_dense(to_jax(x), to_jax(kernel), jnp.ones((8, 8)), None, None, "rmsnorm")
    for biases, text in (
        ((jnp.zeros((32, 2)), None), r"bias_1 is \(32, 2\), expected \(2, 32\)"),
        ((jnp.zeros((2, 32)),), "2 kernels and 1 biases"),
    ):
        with pytest.raises(ValueError, match=text):
            layernorm_mlp(to_jax(x), to_jax(gamma), None, tuple(map(to_jax, kernels)), biases,
                          "rmsnorm", activation_type=("silu", "linear"))  # fmt: skip
    with pytest.raises(TypeError, match="x is int32, expected a float dtype"):
        dense(jnp.ones((8, 64), jnp.int32), to_jax(kernel), None, ((1,), (0,)))
