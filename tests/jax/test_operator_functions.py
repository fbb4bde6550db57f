# SPDX-License-Identifier: Apache-2.0
"""Norms, activations and softmaxes by themselves: the bits of the operators under torch."""

import jax
import jax.numpy as jnp
import pytest
import torch
from jax_arrays import assert_same, to_jax
from thinning import pairs
from tols import BF16, E4M3, F16, F32

from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.jax import cpp_extensions as tex
from transformer_engine.jax.activation import activation
from transformer_engine.jax.layernorm import layernorm
from transformer_engine.jax.operator_calls import ACTIVATIONS, NORMS
from transformer_engine.jax.quantize import QuantizeLayout, QuantizerFactory, ScalingMode
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax

LEADING, COLUMNS = (2, 3), 48
ROWS, PADDED = 6, 16
DTYPES = [F32, F16, BF16]
DELAYED = recipes.DelayedScaling(amax_history_len=3)


def drawn(dtype, *shape):
    return torch.randn(*shape).to(dtype)


def both(function, grad, *arguments):
    """(Result, gradients), jitted; each runs as a custom call."""

    @jax.jit
    def run(grad, *arguments):
        result, pull = jax.vjp(function, *arguments)
        return result, pull(grad)

    assert str(jax.make_jaxpr(run)(grad, *arguments)).count("te_operator[") == 2
    return run(grad, *arguments)


@pairs(kind=list(NORMS), zero_centered=[False, True], dtype=DTYPES, affine=DTYPES)
def test_norms(kind, zero_centered, dtype, affine):
    x, grad = drawn(dtype, *LEADING, COLUMNS), drawn(dtype, *LEADING, COLUMNS)
    vectors = [drawn(affine, COLUMNS) for _ in range(2 if kind == "layernorm" else 1)]
    gamma, *beta = map(to_jax, vectors)

    def norm(x, gamma, *beta):
        return layernorm(x, gamma, *(beta or (None,)), kind, zero_centered, 1e-5)

    y, (of_x, *of_vectors) = both(norm, to_jax(grad), to_jax(x), gamma, *beta)
    matrix, of_matrix = x.reshape(ROWS, COLUMNS), grad.reshape(ROWS, COLUMNS)
    how = {"kind": NORMS[kind], "zero_centered": zero_centered, "gamma": vectors[0]}
    statistics = {"rsigma": torch.zeros(ROWS)}
    statistics |= {"mean": torch.zeros(ROWS)} if beta else {}
    wanted, wanted_x = torch.zeros_like(matrix), torch.zeros_like(matrix)
    own = {"beta": vectors[1]} if beta else {}
    _core.norm(matrix, wide=wanted, eps=1e-5, **how, **own, **statistics)
    sums = [torch.zeros_like(vector) for vector in vectors]
    own = {"beta_grad": sums[1]} if beta else {}
    _core.norm_backward(
        of_matrix, matrix, grad_input=wanted_x, gamma_grad=sums[0], **how, **own, **statistics
    )
    assert_same(y, wanted.reshape(x.shape))
    assert_same(of_x, wanted_x.reshape(x.shape))
    for got, exact in zip(of_vectors, sums, strict=True):
        assert_same(got, exact)
    given = [to_jax(x), gamma, *(beta or [None]), zero_centered, 1e-5, kind]
    made, *found = jax.jit(lambda *a: tex.normalization_fwd(*a, *given[3:]))(*given[:3])
    assert_same(made.data, wanted.reshape(x.shape))
    for got, name in zip(found, ("mean", "rsigma"), strict=True):
        assert (got is None) == (name not in statistics)
        if got is not None:
            assert_same(got, statistics[name].reshape(LEADING))


@pairs(kinds=list(ACTIVATIONS), dtype=DTYPES)
def test_activations(kinds, dtype):
    x, grad = drawn(dtype, *LEADING, len(kinds), COLUMNS), drawn(dtype, *LEADING, COLUMNS)
    y, (of_x,) = both(lambda x: activation(x, kinds), to_jax(grad), to_jax(x))
    matrix = x.reshape(ROWS, -1)
    how = {"kind": ACTIVATIONS[kinds], "limit": 7.0, "alpha": 1.702, "linear_offset": 1.0}
    wanted, of_matrix = torch.zeros(ROWS, COLUMNS, dtype=dtype), torch.zeros_like(matrix)
    sums = torch.zeros(matrix.shape[1], dtype=dtype)
    _core.activation(matrix, wide=wanted, **how)
    _core.activation_backward(
        grad.reshape(ROWS, COLUMNS), matrix, wide=of_matrix, bias_grad=sums, **how
    )
    assert_same(y, wanted.reshape(grad.shape))
    assert_same(of_x, of_matrix.reshape(x.shape))
    found, total = tex.quantize_dact_dbias(to_jax(grad), to_jax(x), kinds)
    assert_same(found.data, of_matrix.reshape(x.shape))
    assert_same(total, sums.reshape(x.shape[2:]))


@pairs(kind=list(SoftmaxFusionType), dtype=DTYPES, dims=[4, 3], keys=[24, 7])
def test_softmaxes(kind, dtype, dims, keys):
    shape = (2, 3, 9, keys)[4 - dims :]
    logits, grad, mask, fields = drawn(dtype, *shape), drawn(dtype, *shape), None, {}
    if kind is SoftmaxFusionType.SCALED_MASKED:
        mask = torch.rand(1, *shape[-2:]) < 0.4
        fields = {"mask": mask.reshape(1, 1, *shape[-2:])}
    if kind is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED:
        fields = {"window_left": -1, "window_right": 0}
    given = None if mask is None else to_jax(mask)
    y, (of_logits,) = both(
        lambda x: softmax(x, given, 0.3, kind), to_jax(grad), to_jax(logits)
    )  # fmt: skip
    four = (1, 1, 1, *shape)[-4:]
    wanted, of_x = torch.zeros(four, dtype=dtype), torch.zeros(four, dtype=dtype)
    _core.softmax(logits.reshape(four), wanted, scale=0.3, **fields)
    _core.softmax_backward(grad.reshape(four), wanted, of_x, scale=0.3)
    assert_same(y, wanted.reshape(shape))
    assert_same(of_logits, of_x.reshape(shape))
    assert tex.is_softmax_kernel_available(kind, *four, BF16)


def fused(scale, rows=ROWS, columns=COLUMNS):
    """Fields of an operator that casts to both forms."""
    return {
        "row": torch.zeros(rows, columns, dtype=E4M3), "row_scales": torch.zeros(2),
        "column": torch.zeros(columns, PADDED, dtype=E4M3), "column_scales": torch.zeros(2),
        "scale": torch.tensor([scale]), "amax": torch.zeros(1), "mode": _core.SCALING_TENSOR,
    }  # fmt: skip


@pairs(layout=list(QuantizeLayout), dtype=[F32, BF16], what=["norm", "activation", "gradient"])
def test_casts_within_operators(layout, dtype, what):
    """Both forms, and the next scale, are those of the operator that casts what it computes."""
    quantizer = QuantizerFactory.create(
        1, ScalingMode.DELAYED_TENSOR_SCALING, jnp.float8_e4m3fn, layout,
        amax_history=jnp.array([0.0, 448.0 / 3.0, 0.0]), scale=jnp.array([3.0]),
    )  # fmt: skip
    kinds, x = ("silu", "linear"), drawn(dtype, *LEADING, 2, COLUMNS)
    grad, vectors = drawn(dtype, *LEADING, COLUMNS), [drawn(dtype, COLUMNS) for _ in range(2)]
    matrix, axis = x.reshape(ROWS, -1), 2
    fields = fused(3.0)
    if what == "norm":
        gamma, beta = vectors
        x, rows = x[:, :, 0], matrix[:, :COLUMNS].contiguous()
        _core.norm(rows, kind=_core.NORM_LAYERNORM, gamma=gamma, beta=beta, eps=1e-6, **fields)
        given = to_jax(x), *map(to_jax, vectors)
        run = jax.jit(lambda q, *a: (tex.layernorm_fwd(*a, False, 1e-6, q)[0], q))
    elif what == "activation":
        _core.activation(matrix, kind=ACTIVATIONS[kinds], **fields)
        given = (to_jax(x),)
        run = jax.jit(lambda q, x: (tex.act_lu(x, kinds, q), q))
    else:
        fields = fused(3.0, columns=2 * COLUMNS)
        _core.activation_backward(grad.reshape(ROWS, -1), matrix, kind=ACTIVATIONS[kinds], **fields)
        given = to_jax(grad), to_jax(x)
        run = jax.jit(lambda q, *a: (tex.dact_lu(*a, kinds, q), q))
    assert str(run.trace(quantizer, *given).jaxpr).count("te_operator[") == 1
    made, following = run(quantizer, *given)
    forms = (made,) if layout is not QuantizeLayout.ROWWISE_COLWISE else (
        made.rowwise_tensor, made.colwise_tensor)  # fmt: skip
    shape = (*LEADING, 2, COLUMNS) if what == "gradient" else (*LEADING, COLUMNS)
    for form in forms:
        wanted = fields["row"].reshape(shape)
        if form.is_colwise:
            wanted = fields["column"][:, :ROWS].reshape(*shape[axis:], *LEADING)
        assert form.flatten_axis == axis and form.dq_dtype == given[0].dtype
        assert_same(form.data, wanted)
        assert_same(form.scale_inv, fields["row_scales"][:1])
        assert form.dequantize().shape == shape
    amax = max(fields["amax"].item(), 448.0 / 3.0)
    assert following.scale == jnp.float32(448.0) / jnp.float32(amax)


@pytest.mark.parametrize("of", ["norm", "activation"])
def test_functions_that_cast(of):
    """What a cast stands for, and the state that follows, of the operator's row-wise form."""
    quantizer = QuantizerFactory.create_set(fp8_recipe=DELAYED).x
    x = drawn(BF16, *LEADING, COLUMNS)
    fields = {name: field for name, field in fused(1.0).items() if "column" not in name}
    if of == "norm":
        gamma = torch.ones(COLUMNS, dtype=BF16)
        _core.norm(x.reshape(ROWS, -1), kind=_core.NORM_RMSNORM, gamma=gamma, eps=1e-6, **fields)

        def call(quantizer, x):
            return layernorm(x, to_jax(gamma), None, "rmsnorm", False, 1e-6, quantizer)

    else:
        _core.activation(x.reshape(ROWS, -1), kind=_core.ACTIVATION_RELU, **fields)

        def call(quantizer, x):
            return activation(x[:, :, None], ("relu",), quantizer)

    @jax.jit
    def step(quantizer, x):
        y, pull = jax.vjp(call, quantizer, x)
        return y, pull(y)[0]

    y, following = step(quantizer, to_jax(x))
    assert_same(y, fields["row"].to(BF16).reshape(x.shape))
    assert following.scale == jnp.float32(448.0) / jnp.float32(fields["amax"].item())


def test_what_is_by_definition():
    """The linear part first, gamma and beta of two dtypes, arrays without elements."""
    x = jnp.ones((2, 2, COLUMNS), jnp.bfloat16)
    calls = {
        "order": lambda: activation(x, ("linear", "silu")),
        "dtypes": lambda: layernorm(x, jnp.ones(COLUMNS), jnp.ones(COLUMNS, x.dtype), "layernorm"),
        "empty": lambda: softmax(x[:0]),
        "five dims": lambda: softmax(x[None, None]),
    }
    for name, call in calls.items():
        assert "te_operator[" not in str(jax.make_jaxpr(call)()), name
