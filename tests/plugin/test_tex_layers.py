# SPDX-License-Identifier: Apache-2.0
"""Operators of layers, of each implementation: what cases of `plugin.check` can not say.

Where results go, casts of results, refusals, and pairs of a forward and its gradient.
"""

import pytest
import torch
from buffers import normal
from comparators import assert_bits
from tex_cases import (
    FORMATS,
    HIGH,
    Operators,
    assert_near,
    assert_same_data,
    each_implementation,
    quantizers,
)
from tols import BF16, E4M3, F32

import transformer_engine.pytorch.tensor as tensors
from transformer_engine.plugin.builtin import register_builtins
from transformer_engine.plugin.core import OpRegistry

high = pytest.mark.parametrize("dtype", HIGH)


# ---- activations -----------------------------------------------------------------------------


@each_implementation
@pytest.mark.parametrize("kind", FORMATS)
def test_cast_results(rng, device, tex, kind):
    """With a quantizer come the bits that it makes of the result without one."""
    make = quantizers(device)[kind]
    x, grad = normal(rng, (32, 64), BF16, device), normal(rng, (32, 64), BF16, device)
    gamma = normal(rng, (64,), BF16, device)
    assert_same_data(tex.silu(x, make), make(tex.silu(x, None)))
    assert_same_data(tex.dsilu(grad, x, make), make(tex.dsilu(grad, x, None)))
    sums, made = tex.dbias_dsilu(grad, x, make)
    expected = tex.dbias_dsilu(grad, x, None)
    assert_bits(sums, expected[0])
    assert_same_data(made, make(expected[1]))
    out, _, rsigma = tex.rmsnorm_fwd(x, gamma, 1e-5, None, make, BF16, 0, False)
    plain, _, again = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, BF16, 0, False)
    assert_same_data(out, make(plain))
    assert_bits(rsigma, again)
    into = make(torch.zeros_like(x))
    given, *_ = tex.layernorm_fwd(x, gamma, gamma, 1e-5, into, make, BF16, 0, False)
    plain, *_ = tex.layernorm_fwd(x, gamma, gamma, 1e-5, None, None, BF16, 0, False)
    assert given is into
    assert_same_data(into, make(plain))


@each_implementation
def test_refused_activations(tex):
    x = torch.ones(2, 4)
    for given in ((None, None), (3, None)):
        with pytest.raises(TypeError, match="silu: input: .*expected a tensor"):
            tex.silu(*given)
    with pytest.raises(TypeError, match="silu: quantizer: str"):
        tex.silu(x, "e4m3")


def test_refused_shapes(device):
    tex = Operators("default.native")
    with pytest.raises(ValueError, match="swiglu: input: 3 columns, expected two halves"):
        tex.swiglu(torch.ones(2, 3, device=device), None)
    with pytest.raises(ValueError, match="silu: input: shape"):
        tex.silu(torch.ones((), device=device), None)
    with pytest.raises(ValueError):
        tex.dsilu(torch.ones(2, 3, device=device), torch.ones(2, 4, device=device), None)


# ---- norms -----------------------------------------------------------------------------------


def casters(device):
    """Quantizers by name, each time new ones."""
    zero = torch.zeros(1, device=device)
    return {
        "delayed": tensors.Float8Quantizer(torch.full((1,), 3.0, device=device), zero, E4M3),
        "measured": tensors.Float8Quantizer(zero.clone(), zero, E4M3, measure_first=True),
        "current": tensors.Float8CurrentScalingQuantizer(E4M3),
        "tiles": tensors.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        "square tiles": tensors.Float8BlockQuantizer(
            E4M3, rowwise=True, columnwise=True, block_scaling_dim=2
        ),
        "rows": tensors.Float8RowQuantizer(E4M3),
        "mxfp8": tensors.MXFP8Quantizer(E4M3),
        "nvfp4": tensors.NVFP4Quantizer(),
        "stochastic": tensors.NVFP4Quantizer(stochastic_rounding=True),
        "of rows": tensors.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False),
        "not at all": tensors.IdentityQuantizer(),
    }


@pytest.mark.parametrize("given", [False, True], ids=["new", "in its place"])
@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("kind", casters("cpu"))
def test_norms_cast_fp32_values(rng, device, kind, usages, given):
    """In one pass or in two: the bits are those of the quantizer, and so is its amax."""
    if kind == "of rows" and usages[1]:
        pytest.skip("it has no column-wise form")
    tex = Operators("default.native")
    for shape in ((32, 64), (3, 32, 32), (16, 48), (64,), (0, 32), (7, 130)):
        x, gamma = normal(rng, shape, BF16, device), normal(rng, shape[-1:], F32, device)
        made = []
        for fused in (True, False):
            quantizer = casters(device)[kind]
            if kind != "not at all":
                quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
            place = None
            if given and fused and kind != "not at all":
                place = quantizer.make_empty(shape, dtype=F32, device=torch.device(device))
            torch.manual_seed(3)
            options = place, quantizer if fused else None, F32, 0, False
            y, _, rsigma = tex.layernorm_fwd(x, gamma, gamma, 1e-5, *options)
            assert place is None or y is place
            made.append((y if fused else quantizer(y), rsigma, getattr(quantizer, "amax", rsigma)))
        (found, *rest), (wanted, *others) = made
        assert_same_data(found, wanted)
        for one, other in zip(rest, others, strict=True):
            assert_bits(one, other)


@each_implementation
def test_norms_write_where_they_are_told(rng, device, tex):
    x, gamma = normal(rng, (4, 16), F32, device), torch.ones(16, device=device)
    into = torch.empty(4, 16, device=device, dtype=BF16)
    y, *_ = tex.rmsnorm_fwd(x, gamma, 1e-5, into, None, BF16, 0, False)
    plain, *_ = tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, BF16, 0, False)
    assert y is into
    assert_bits(into, plain)
    with pytest.raises(ValueError, match="rmsnorm_fwd: out: shape"):
        tex.rmsnorm_fwd(x, gamma, 1e-5, into[:2], None, BF16, 0, False)
    with pytest.raises(TypeError, match="rmsnorm_fwd: otype="):
        tex.rmsnorm_fwd(x, gamma, 1e-5, None, None, "bf16", 0, False)


@each_implementation
def test_what_is_given_may_require_gradients(rng, device, tex):
    """And may lie as it likes: results are those of plain tensors, without a graph."""
    x = normal(rng, (16, 24), F32, device).t()
    gamma = torch.nn.Parameter(normal(rng, (16,), F32, device))
    plain = x.contiguous()
    x.requires_grad_()
    calls = [
        lambda t, g: tex.silu(t, None),
        lambda t, g: tex.dsilu(t, t, None),
        lambda t, g: tex.layernorm_fwd(t, g, g, 1e-5, None, None, F32, 0, False)[0],
        lambda t, g: tex.rmsnorm_bwd(t, t, torch.ones(24, device=device), g)[1],
        lambda t, g: tex.scaled_softmax_forward(t[None, None], 0.5),
        lambda t, g: tex.dropout_fwd(t, 0.0)[0],
    ]
    for call in calls:
        found = call(x, gamma)
        assert not found.requires_grad and found.grad_fn is None
        assert_near(found, call(plain, gamma.detach()).double())
    before = x.detach().clone()
    tex.dropout_fwd(x, 0.5)
    assert_bits(x, before)


# ---- softmax ---------------------------------------------------------------------------------


def test_refused_softmax():
    tex = Operators("default.native")
    with pytest.raises(ValueError, match="scaled_softmax_forward: input: shape"):
        tex.scaled_softmax_forward(torch.ones(2, 3, 4), 1.0)
    with pytest.raises(ValueError, match="square"):
        tex.scaled_upper_triang_masked_softmax_forward(torch.ones(2, 3, 4), 1.0)
    with pytest.raises(TypeError, match="mask: torch.float32"):
        tex.scaled_masked_softmax_forward(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2), 1.0)


# ---- dropout ---------------------------------------------------------------------------------


@each_implementation
@high
def test_where_dropout_goes(rng, device, tex, dtype):
    x, p = normal(rng, (64, 96), dtype, device), 0.3
    _, mask = tex.dropout_fwd(x, p)
    into = torch.empty_like(x)
    assert tex.dropout_bwd(x, mask, p, into) is into
    torch.manual_seed(5)
    first, _ = tex.dropout_fwd(x, p)
    torch.manual_seed(5)
    again, _ = tex.dropout_fwd(x, p, out=into)
    assert again is into
    assert_bits(first, again)
    with pytest.raises(ValueError, match="dropout_fwd: dropout_probability=1.5"):
        tex.dropout_fwd(x, 1.5)
    with pytest.raises(ValueError, match="dropout_bwd: mask"):
        tex.dropout_bwd(x, torch.ones(3, device=device), p)


# ---- rotary positions ------------------------------------------------------------------------


@each_implementation
def test_refused_rope(tex):
    x, freqs = torch.ones(4, 1, 1, 8), torch.ones(4, 1, 1, 8)
    with pytest.raises(ValueError, match="fused_rope_forward: qkv_format=9"):
        tex.fused_rope_forward(x, freqs, None, 9, False, None, 1, 0)


@pytest.mark.parametrize("name", ["gelu", "qgelu", "srelu", "silu"])
def test_gradients_of_activations_at_large_values(name):
    """Powers of these are no fp32; the slope is that of the asymptote."""
    x = torch.tensor([[-1e30, 1e4, 1e30]])
    registry = OpRegistry()
    register_builtins(registry)
    grads = [
        registry.get_implementation(f"d{name}", impl).fn(torch.ones_like(x), x, None)
        for impl in ("reference.torch", "default.native")
    ]
    slope = [0.0, 2e4, 2e30] if name == "srelu" else [0.0, 1.0, 1.0]
    for grad in grads:
        assert torch.equal(grad, torch.tensor([slope]))  # zeros of either sign
