# SPDX-License-Identifier: Apache-2.0
"""`generic_gemm` of `transformer_engine_torch`: what cases of `plugin.check` can not say.

Products in all formats by the bounds of their casts, where results go, casts of them, refusals.
"""

import itertools

import pytest
import torch
from buffers import normal
from comparators import assert_bits, assert_nmse
from tex_cases import (
    FORMATS,
    Operators,
    assert_same_data,
    each_implementation,
    quantizers,
)
from tols import BF16, E4M3, E5M2, F16, F32, tol

import transformer_engine.pytorch.tensor as tensors
from transformer_engine.pytorch.constants import DType

LAYOUTS = list(itertools.product((True, False), repeat=2))
native = Operators("default.native")


def gemm(tex, A, transA, B, transB, D=None, **options):
    """Call with defaults for what is not said."""
    given = {
        "quantizer": None, "output_dtype": None, "bias": None, "bias_type": DType.kBFloat16,
        "gelu": False, "gelu_in": None, "grad": False, "workspace": torch.empty(0),
        "workspace_size": 0, "accumulate": False, "use_split_accumulator": True,
    }  # fmt: skip
    beyond = {n: options.pop(n) for n in list(options) if n not in given}
    given.update(options)
    return tex.generic_gemm(A, transA, B, transB, D, *given.values(), **beyond)


def product64(A, transA, B, transB):
    right, left = A.double().flatten(0, -2), B.double()
    right = right.t() if transA else right
    return (left.flatten(0, -2).t() if transB else left) @ right


def operands(rng, device, transA, transB, dtype, m=24, n=40, k=48):
    """A and B of a product [m, n], summed over k."""
    A = normal(rng, (n, k) if transA else (k, n), dtype, device)
    B = normal(rng, (k, m) if transB else (m, k), dtype, device)
    return A, B


@each_implementation
def test_where_results_go(rng, device, tex):
    A, B = operands(rng, device, True, False, BF16)
    plain, *rest = gemm(tex, A, True, B, False)
    assert rest == [None] * 3
    none = torch.empty(0, dtype=BF16, device=device)  # a bias that there is not
    assert_bits(gemm(tex, A, True, B, False, bias=none)[0], plain)
    into = torch.empty(24, 40, dtype=F32, device=device)
    assert gemm(tex, A, True, B, False, into, output_dtype=DType.kFloat32)[0] is into
    assert gemm(tex, A, True, B, False, into, output_dtype=F32, accumulate=True)[0] is into
    place = torch.empty_like(plain)
    out, bias_grad, pre, _ = gemm(tex, A, True, B, False, gelu=True)
    again, _, kept, _ = gemm(tex, A, True, B, False, gelu=True, gelu_in=place)
    assert kept is place and bias_grad is None
    assert_bits(place, pre)
    assert_bits(again, out)
    assert gemm(tex, A, True, B, False, gelu=True, gelu_in=place, grad=True)[2] is place


@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("gelu", [False, True])
@each_implementation
def test_gradient_of_a_bias_of_two_dims(rng, device, tex, gelu, dtype):
    """The bias only says that its gradient is wanted, and in which dtype."""
    A, B = operands(rng, device, False, True, dtype)
    given = {"grad": True}
    if gelu:
        given |= {"gelu": True, "gelu_in": normal(rng, (24, 40), dtype, device)}
    bias = torch.empty(40 if gelu else 24, dtype=dtype, device=device)
    for shaped in (bias, bias[None], bias[:, None]):
        out, sums, *_ = gemm(tex, A, False, B, True, bias=shaped, **given)
        assert sums.shape == bias.shape and sums.dtype == dtype
        exact = out.double().sum(0) if gelu else B.double().sum(0)
        rounded = 2 * tol("round", dtype)  # the sums, and with gelu what is summed
        assert_nmse(sums, exact, rounded + 16 * tol("sum", F32, 48))


@each_implementation
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("transA", "transB"), LAYOUTS)
def test_quantized_operands(rng, device, tex, kind, transA, transB):
    """Of what the operands hold: within the sums of a GEMM, in each layout and format."""
    if kind == "nvfp4" and (not transA or transB):
        kind_of = tensors.NVFP4Quantizer(with_2d_quantization=True)
    else:
        kind_of = quantizers(device)[kind]
    A, B = operands(rng, device, transA, transB, BF16, 128, 256, 128)
    if kind == "tiles":  # a GEMM takes tiles of a weight, rows of what it multiplies
        both = {"rowwise": True, "columnwise": True}
        made = [
            tensors.Float8BlockQuantizer(E4M3, **both, block_scaling_dim=n)(t)
            for n, t in ((2, A), (1, B))
        ]
    else:
        made = [kind_of(t) for t in (A, B)]
    values = [t.dequantize(dtype=F32) for t in made]
    exact = product64(values[0], transA, values[1], transB)
    if kind == "mxfp8" and (not transA or transB):  # the other form has groups of its own
        exact = product64(A, transA, B, transB)
        bound = 4 * tol("quantize", E4M3)
    elif kind == "tiles" and transB:
        exact = product64(A, transA, B, transB)
        bound = 4 * tol("quantize", E4M3)
    else:
        bound = tol("round", F32) + 16 * tol("sum", F32, 128) + 4 * tol("sum_split", E4M3, 128)
    out, *_ = gemm(tex, made[0], transA, made[1], transB, output_dtype=F32)
    assert out.dtype == F32
    assert_nmse(out, exact, bound, kind)


def test_what_quantized_operands_may_lack(rng, device):
    """One form, odd lengths, e5m2 with e4m3, storages, and another one in high precision."""
    A, B = operands(rng, device, True, False, BF16, 24, 40, 36)
    make = tensors.Float8CurrentScalingQuantizer(E4M3, rowwise=True, columnwise=False)
    other = tensors.Float8CurrentScalingQuantizer(E5M2, rowwise=True, columnwise=False)
    other.internal = True
    bound = 16 * tol("sum", F32, 36) + tol("round", F32) + 4 * tol("sum_split", E4M3, 36)
    for a, b in ((make(A), other(B)), (make(A), B), (A, other(B))):
        values = [t.dequantize(dtype=F32) if t is not A and t is not B else t for t in (a, b)]
        out, *_ = gemm(native, a, True, b, False, output_dtype=F32)
        assert_nmse(out, product64(values[0], True, values[1], False), bound)
    turned, _ = operands(rng, device, False, False, BF16, 24, 40, 36)
    a = make(turned)  # its transpose is made for the call
    out, *_ = gemm(native, a, False, make(B), False, output_dtype=F32)
    assert a.get_usages() == {"rowwise": True, "columnwise": False}
    exact = product64(a.dequantize(dtype=F32), False, make(B).dequantize(dtype=F32), False)
    assert_nmse(out, exact, bound)
    bias = normal(rng, (40,), BF16, device)
    out, *_ = gemm(native, make(A), True, make(B), False, bias=bias, output_dtype=BF16)
    exact = product64(make(A).dequantize(dtype=F32), True, make(B).dequantize(dtype=F32), False)
    assert_nmse(out, exact + bias.double(), bound + tol("round", BF16))


@pytest.mark.parametrize("first", FORMATS)
@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize(("transA", "transB"), LAYOUTS)
def test_any_formats_of_any_sizes(rng, device, first, second, transA, transB):
    """However they are padded: within the casts of the operands."""
    both = {"rowwise": True, "columnwise": True}
    for m, n, k in ((24, 40, 36), (8, 20, 50), (1, 3, 5)):
        A, B = operands(rng, device, transA, transB, BF16, m, n, k)
        of_weight = tensors.Float8BlockQuantizer(E4M3, **both, block_scaling_dim=2)
        made = [
            of_weight(A) if first == "tiles" else quantizers(device)[first](A),
            tensors.Float8BlockQuantizer(E4M3, **both, block_scaling_dim=1)(B)
            if second == "tiles"
            else quantizers(device)[second](B),
        ]
        step = sum(
            tol("half_step_nvfp4", E4M3) ** 2 if kind == "nvfp4" else tol("half_step", E4M3) ** 2
            for kind in (first, second)
        )
        out, *_ = gemm(native, made[0], transA, made[1], transB, output_dtype=F32)
        terms = product64(A.abs(), transA, B.abs(), transB)
        assert_nmse(out, product64(A, transA, B, transB), step, terms=terms)


@pytest.mark.parametrize(("transA", "transB"), LAYOUTS)
def test_transformed_operands(rng, device, transA, transB):
    """NVFP4 whose column-wise values are transformed: in a product both are, or none."""
    A, B = operands(rng, device, transA, transB, BF16, 64, 48, 32)
    make = tensors.NVFP4Quantizer(with_rht=True, with_post_rht_amax=True)
    out, *_ = gemm(native, make(A), transA, make(B), transB, output_dtype=F32)
    exact = product64(A, transA, B, transB)
    assert_nmse(out, exact, 2 * tol("half_step_nvfp4", E4M3) ** 2)
    if transA or not transB:  # all are read by rows, or are multiplied out
        exact = product64(
            make(A).dequantize(dtype=F32), transA, make(B).dequantize(dtype=F32), transB
        )
        assert_nmse(out, exact, tol("round", F32) + 16 * tol("sum", F32, 48))


@each_implementation
@pytest.mark.parametrize("kind", FORMATS)
def test_quantized_results(rng, device, tex, kind):
    A, B = operands(rng, device, True, False, BF16, 32, 64, 48)
    make = quantizers(device)[kind]
    plain, *_ = gemm(tex, A, True, B, False)
    out, *_ = gemm(tex, A, True, B, False, quantizer=make)
    assert_same_data(out, make(plain))
    into = make(torch.zeros_like(plain))
    out, *_ = gemm(tex, A, True, B, False, into, quantizer=make, output_dtype=BF16)
    assert out is into
    assert_same_data(into, make(plain))


@each_implementation
def test_refused_options(device, tex):
    A = B = torch.ones(4, 4, device=device)
    for name in ("comm_overlap", "extra_output", "bulk_overlap"):
        with pytest.raises(NotImplementedError, match=f"generic_gemm: {name}: not built yet"):
            gemm(tex, A, True, B, False, **{name: torch.ones(1)})


def test_refused_arguments(device):
    A = B = torch.ones(4, 4, device=device)
    with pytest.raises(ValueError, match=r"A \(4, 3\).*summed dims differ"):
        gemm(native, A[:, :3], True, B, False)
    with pytest.raises(ValueError, match="accumulate=True needs D"):
        gemm(native, A, True, B, False, accumulate=True)
    with pytest.raises(ValueError, match="beta=0.5 without accumulate"):
        gemm(native, A, True, B, False, beta=0.5)
    with pytest.raises(ValueError, match="needs gelu_in"):
        gemm(native, A, True, B, False, gelu=True, grad=True)
    with pytest.raises(ValueError, match="D: shape"):
        gemm(native, A, True, B, False, torch.ones(3, 4, device=device))
    with pytest.raises(TypeError, match="D: torch.float32, expected torch.float16"):
        gemm(native, A, True, B, False, torch.ones(4, 4, device=device), output_dtype=F16)
    with pytest.raises(TypeError, match="generic_gemm: output_dtype='half'"):
        gemm(native, A, True, B, False, output_dtype="half")
    with pytest.raises(ValueError, match="A: shape"):
        gemm(native, A[0], True, B, False)
