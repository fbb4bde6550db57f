# SPDX-License-Identifier: Apache-2.0
"""Operators as custom calls of XLA: the bits of their calls under torch, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_arrays import assert_same, bits, like, to_jax

from transformer_engine import _core
from transformer_engine.jax.custom_calls import call_operator

E4M3, F32, BF16 = torch.float8_e4m3fn, torch.float32, torch.bfloat16
BATCH, SEQ, HEADS, CHANNELS = 2, 16, 2, 32


def empty(*shape, dtype=F32):
    return torch.zeros(*shape, dtype=dtype)


def scaled(*shape):
    """A matrix, its cast to FP8 and the scales of that."""
    x, row, scales = torch.randn(*shape), empty(*shape, dtype=E4M3), empty(2)
    _core.quantize(x, row=row, row_scales=scales, scale=torch.ones(1), mode=_core.SCALING_TENSOR)
    return x, row, scales


def heads(dtype=F32):
    return torch.randn(BATCH, SEQ, HEADS, CHANNELS).to(dtype)


def quantize():
    made = {"row": empty(6, 48, dtype=E4M3), "row_scales": empty(2)}
    made |= {"column": empty(48, 16, dtype=E4M3), "column_scales": empty(2), "bias_grad": empty(48)}
    given = {"input": torch.randn(2, 3, 48), "scale": torch.tensor([3.0])}
    return made, given | {"amax": torch.tensor([0.5]), "mode": _core.SCALING_TENSOR}


def dequantize():
    _, row, scales = scaled(6, 48)
    made = {"output": empty(6, 48, dtype=BF16)}
    return made, {"row": row, "row_scales": scales, "mode": _core.SCALING_TENSOR}


def gemm_high():
    given = {"a": torch.randn(6, 48).to(BF16), "b": torch.randn(32, 48).to(BF16)}
    given |= {"bias": torch.randn(32).to(BF16), "b_transposed": 1}
    return {"d": empty(6, 32, dtype=BF16)}, given


def gemm_fp8():
    (_, a, a_scales), (_, b, b_scales) = scaled(16, 48), scaled(32, 48)
    given = {"a_row": a, "a_row_scales": a_scales, "b_row": b, "b_row_scales": b_scales}
    mode = _core.SCALING_TENSOR
    return {"d": empty(16, 32)}, given | {"a_mode": mode, "b_mode": mode, "b_transposed": 1}


def gemm_added():
    """`d` is given, too: the product is added to it."""
    made, given = gemm_high()
    given |= {"d": torch.randn(6, 32), "a": torch.randn(6, 48), "b": torch.randn(32, 48)}
    return {}, given | {"bias": None, "accumulate": True}


def norm():
    given = {"input": torch.randn(2, 3, 48).to(BF16), "kind": _core.NORM_LAYERNORM}
    given |= {name: torch.randn(48).to(BF16) for name in ("gamma", "beta")}
    given |= {"mean": empty(6), "rsigma": empty(6), "eps": 1e-3, "zero_centered": True}
    given["input"] = given["input"].reshape(6, 48)
    return {"wide": empty(6, 48, dtype=BF16)}, given


def norm_backward():
    given = {"grad_output": torch.randn(6, 48), "input": torch.randn(6, 48)}
    given |= {"kind": _core.NORM_RMSNORM, "rsigma": torch.rand(6), "gamma": torch.randn(48)}
    return {"grad_input": empty(6, 48), "gamma_grad": empty(48)}, given


def activation():
    given = {"input": torch.randn(6, 96), "kind": _core.ACTIVATION_SWIGLU}
    return {"wide": empty(6, 48)}, given


def activation_backward():
    given = {"grad_output": torch.randn(6, 48), "input": torch.randn(6, 96)}
    made = {"wide": empty(6, 96), "bias_grad": empty(96)}
    return made, given | {"kind": _core.ACTIVATION_GEGLU}


def softmax():
    mask = torch.rand(BATCH, 1, SEQ, SEQ) < 0.3
    given = {"input": torch.randn(BATCH, HEADS, SEQ, SEQ), "mask": mask, "scale": 0.5}
    return {"output": empty(BATCH, HEADS, SEQ, SEQ)}, given


def softmax_backward():
    probabilities = torch.randn(BATCH, HEADS, SEQ, SEQ).softmax(-1)
    given = {"grad_output": torch.randn_like(probabilities), "probabilities": probabilities}
    return {"grad_input": torch.zeros_like(probabilities)}, given | {"scale": 0.5}


def attention():
    given = {"query": heads(BF16), "key": heads(BF16), "value": heads(BF16), "scale": 0.2}
    given |= {"window_left": -1, "window_right": 0, "dropout": 0.25}
    given["rng"] = torch.tensor([2**33 + 1, 8])
    return {"output": torch.zeros_like(heads(BF16)), "statistics": empty(BATCH, HEADS, SEQ)}, given


def attention_backward():
    forward, given = attention()
    _core.attention(**given, **forward)
    made = {f"grad_{of}": torch.zeros_like(given[of]) for of in ("query", "key", "value")}
    return made, given | forward | {"grad_output": heads(BF16), "deterministic": 1}


def rope():
    given = {"input": heads(), "freqs": torch.randn(SEQ, CHANNELS), "key": heads()}
    given |= {"key_freqs": given["freqs"], "interleaved": 1}
    return {"output": empty(*heads().shape), "key_output": empty(*heads().shape)}, given


def dropout_add():
    """Sums of numbers so small that XLA's own threads would flush them to zero."""
    given = {"input": torch.randn(6, 48) * 1e-40, "residual": torch.randn(6, 48) * 1e-41}
    return {"output": empty(6, 48)}, given | {"rng": torch.tensor([5, 6]), "dropout": 0.5}


def scaling_update():
    given = {"scale": torch.rand(7) + 1, "history": torch.rand(4, 7), "fp8_max": 448.0}
    return {}, given | {"algo": _core.AMAX_MAX}


CASES = {
    "quantize": quantize,
    "dequantize": dequantize,
    "gemm": gemm_high,
    "gemm fp8": gemm_fp8,
    "gemm added": gemm_added,
    "norm": norm,
    "norm_backward": norm_backward,
    "activation": activation,
    "activation_backward": activation_backward,
    "softmax": softmax,
    "softmax_backward": softmax_backward,
    "attention": attention,
    "attention_backward": attention_backward,
    "rope": rope,
    "dropout_add": dropout_add,
    "scaling_update": scaling_update,
}


@pytest.mark.parametrize("case", CASES)
def test_bits_of_a_call_under_torch(device, case):
    name, (made, given) = case.split()[0], CASES[case]()
    tensors = {f: v.to(device) for f, v in given.items() if isinstance(v, torch.Tensor)}
    numbers = {f: v for f, v in given.items() if not isinstance(v, torch.Tensor)}
    made = {field: tensor.to(device) for field, tensor in made.items()}
    arrays = {field: to_jax(tensor) for field, tensor in tensors.items()}
    before = {field: bits(array).copy() for field, array in arrays.items()}
    results = {field: like(tensor) for field, tensor in made.items()}
    found = jax.jit(lambda arrays: call_operator(name, results, **arrays, **numbers))(arrays)
    getattr(_core, name)(**tensors, **made, **numbers)
    changed = {f for f, _, access, _ in _core.op_fields(name) if access != "read"} & tensors.keys()
    assert found.keys() == made.keys() | changed and found
    for field, array in found.items():
        assert_same(array, (made | tensors)[field])
        assert field not in changed or bits(array).tobytes() != before[field].tobytes()
    assert all(np.array_equal(bits(array), before[field]) for field, array in arrays.items())


def test_eager_and_batched():
    x = jnp.linspace(-3.0, 3.0, 4 * 6 * 8).reshape(4, 6, 8)

    def capped(x):
        made = {"wide": jax.ShapeDtypeStruct(x.shape, x.dtype)}
        return call_operator("softcap", made, input=x, cap=2.0)["wide"]

    single = jnp.stack([capped(each) for each in x])
    assert np.array_equal(bits(single), bits(jax.vmap(capped)(x)))


# ---- errors --------------------------------------------------------------------------------------

ONE = {"output": jax.ShapeDtypeStruct((1, 1), jnp.float32)}


@pytest.mark.parametrize(
    ("name", "results", "fields", "error", "text"),
    [
        ("fills", ONE, {"value": 1.0}, ValueError, "fills"),
        ("fill", ONE, {"values": 1.0}, TypeError, "fill: it has no field values"),
        ("fill", ONE, {"value": 1.0, "output": jnp.ones((1, 1))}, TypeError, "fill: output: it is"),
        ("quantize", {"amax": ONE["output"]}, {"input": jnp.ones((2, 2))}, TypeError, "amax: it"),
        ("cast", ONE, {"input": jnp.ones((1, 1), jnp.int16)}, TypeError, "int16 is no dtype"),
        ("fill", {}, {"value": 1.0}, TypeError, "fill: output: missing required field"),
    ],
)
def test_wrong_calls(name, results, fields, error, text):
    with pytest.raises(error, match=text):
        call_operator(name, results, **fields)


def test_what_the_library_refuses():
    """Where no workspace has to be asked for, the call itself says it."""
    made = {"output": jax.ShapeDtypeStruct((4, 3), jnp.uint8)}
    call = jax.jit(lambda x: call_operator("transpose", made, input=x)["output"])
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="transpose"):
        jax.block_until_ready(call(jnp.zeros((4, 3), jnp.uint8)))
