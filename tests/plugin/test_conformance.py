# SPDX-License-Identifier: Apache-2.0
"""`plugin.check`: this library's implementations pass it, and wrong ones do not."""

import functools

import pytest
import torch
from conformance_faults import and_then, changed, fails, implementation

from transformer_engine import plugin as plugins
from transformer_engine.plugin import conformance, core as plugin
from transformer_engine.plugin.builtin import OPERATORS
from transformer_engine.plugin.conformance.attention import settings
from transformer_engine.plugin.conformance.cases import name_of
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor import MXFP8Quantizer

PLAIN = [one for one in settings() if one.name == one.layout]
KIND = plugin.BackendImplKind


@pytest.mark.parametrize("impl_id", ["default.native", "reference.torch"])
@pytest.mark.parametrize("op", conformance.operators())
def test_ours_are_right(device, seed, op, impl_id):
    impl = implementation(op, impl_id)
    if impl is None:
        assert impl_id == "reference.torch"  # casts by quantizers have one
        pytest.skip("there is none")
    report = plugins.check(impl, device=device, seed=seed)
    assert report.passed, str(report)
    assert len(report.rows) >= 3
    refused = {row.case for row in report.rows if row.outcome == "refused"}
    if device == "cuda" and op.startswith("fused_attn") and impl_id == "default.native":
        # cuDNN's kernels have no fp32, no odd channels, no largest scores; but every layout.
        kinds = "float16", "bfloat16"
        assert not refused & {f"{kind} {one.name}" for kind in kinds for one in PLAIN}
    elif (op, impl_id) == ("fused_attn_fwd", "reference.torch"):
        assert all(case.endswith("dropout") for case in refused)
    else:
        assert not refused


# ---- faults --------------------------------------------------------------------------------------


def norm_with(eps=None, zero=None):
    own = implementation("rmsnorm_fwd").fn

    def run(x, w, given, out, quantizer, otype, margin, zero_centered):
        eps_used = given if eps is None else eps
        return own(
            x, w, eps_used, out, quantizer, otype, margin, zero_centered if zero is None else zero
        )

    return run


def in_place(op):
    own = implementation(op).fn

    def run(x, *args):
        made = own(x, *args)
        x.zero_()
        return made

    return run


def ignores(op, place):
    """One argument is always that of a call without it."""
    own = implementation(op).fn

    def run(*args):
        return own(
            *args[:place], False if isinstance(args[place], bool) else None, *args[place + 1 :]
        )

    return run


def forget(x, quantizer):
    """The amax is that of the last tensor, not the largest since somebody has cleared it."""
    if hasattr(quantizer, "amax"):
        quantizer.amax.copy_(torch.nan_to_num(x.float()).abs().max())


def truncated(x, quantizer):
    """A relu in bf16, cut off instead of rounded."""
    y = x.float().clamp(min=0) * (1 + 2.0**-7)
    return y.to(x.dtype)


def in_one_pass(x, w, b, eps, out, quantizer, otype, margin, zero_centered):
    """The variance as a difference, which cancels far from 0."""
    own = implementation("layernorm_fwd").fn
    given = x.float()
    mean = given.mean(-1)
    rsigma = (given.square().mean(-1) - mean.square() + eps).rsqrt()
    y, *_ = own(x, w, b, eps, out, quantizer, otype, margin, zero_centered)
    return y, mean.flatten(), rsigma.flatten()


def overflowing(x, scale):
    powers = (x.float() * scale).exp()
    return (powers / powers.sum(-1, keepdim=True)).to(x.dtype)


def by_columns(x, p):
    """One decision for each column."""
    kept = torch.rand(x.shape[-1], device=x.device).expand(x.shape) >= p
    return torch.where(kept, x.float() / max(1 - p, 1e-9), 0.0).to(x.dtype), kept


def neighbour_of(place, by):
    """Writes an element before or behind an argument, or between its own."""

    def write(*args):
        t = args[place]
        if t is not None and t.storage_offset() > 0:
            at = t.storage_offset() + (-1 if by < 0 else t.numel())
            t.as_strided((1,), (1,), at).zero_()

    return write


def gaps(x, *rest):
    if x.dim() == 2 and x.stride(-1) == 2:
        x.as_strided(x.shape, x.stride(), x.storage_offset() + 1).add_(1)


def codes_of(place):
    def write(*args):
        if hasattr(args[place], "get_data_tensors"):
            args[place].get_data_tensors()[0].zero_()

    return write


def cast_anew(tensor, quantizer, output=None, noop=None):
    return implementation("quantize").fn(tensor, quantizer)


def whatever_the_flag(tensor, quantizer, output=None, noop=None):
    return implementation("quantize").fn(tensor, quantizer, output)


FAULTS = {
    "gradients are missing": ("rmsnorm_bwd", lambda: changed("rmsnorm_bwd", lambda y, *_: y[:1])),
    "nothing is returned": ("layernorm_bwd", lambda: changed("layernorm_bwd", lambda y, *_: ())),
    "one result more": ("rmsnorm_bwd", lambda: changed("rmsnorm_bwd", lambda y, *_: (*y, None))),
    "three results": ("generic_gemm", lambda: changed("generic_gemm", lambda y, *_: y[:3])),
    "gelu of what": (
        "generic_gemm",
        lambda: changed("generic_gemm", lambda y, *_: (*y[:2], None, y[3])),
    ),
    "one pass": ("layernorm_fwd", lambda: in_one_pass),
    "it overflows": ("scaled_softmax_forward", lambda: overflowing),
    "a mask of columns": ("dropout_fwd", lambda: by_columns),
    "behind ln_out": ("rmsnorm_fwd", lambda: and_then("rmsnorm_fwd", neighbour_of(3, 1))),
    "before D": ("generic_gemm", lambda: and_then("generic_gemm", neighbour_of(4, -1))),
    "behind the input": ("gelu", lambda: and_then("gelu", neighbour_of(0, 1))),
    "behind the amax": ("compute_amax", lambda: and_then("compute_amax", neighbour_of(1, 1))),
    "behind grad_input": (
        "dropout_bwd",
        lambda: and_then("dropout_bwd", neighbour_of(3, 1)),
    ),
    "before the cache": (
        "copy_to_kv_cache",
        lambda: and_then("copy_to_kv_cache", neighbour_of(2, -1)),
    ),
    "behind the rows": (
        "fused_multi_row_padding",
        lambda: and_then("fused_multi_row_padding", neighbour_of(1, 1)),
    ),
    "behind a list": (
        "multi_tensor_scale",
        lambda: and_then("multi_tensor_scale", lambda *a: neighbour_of(0, 1)(a[2][1][0])),
    ),
    "between columns": ("silu", lambda: and_then("silu", gaps)),
    "codes of an operand": ("generic_gemm", lambda: and_then("generic_gemm", codes_of(0))),
    "codes are written": ("dequantize", lambda: and_then("dequantize", codes_of(0))),
    "it casts nothing": ("gelu", lambda: lambda x, q: implementation("gelu").fn(x, None)),
    "the product is not cast": ("generic_gemm", lambda: ignores("generic_gemm", 5)),
    "another scale": (
        "rmsnorm_fwd",
        lambda: (
            lambda x, w, eps, out, quantizer, *rest: implementation("rmsnorm_fwd").fn(
                x, w if quantizer is None else 1.5 * w, eps, out, quantizer, *rest
            )
        ),
    ),
    "the output is new": ("quantize", lambda: cast_anew),
    "whatever the flag": ("quantize", lambda: whatever_the_flag),
    "NaN has a derivative": (
        "dsilu",
        lambda: lambda grad, x, q: implementation("dsilu").fn(grad, torch.nan_to_num(x), q),
    ),
    "another eps": ("rmsnorm_fwd", lambda: norm_with(eps=1e-3)),
    "factor": ("rmsnorm_fwd", lambda: norm_with(zero=False)),
    "dtype": ("silu", lambda: changed("silu", lambda y, *_: y.double())),
    "shape": ("silu", lambda: changed("silu", lambda y, *_: y.flatten())),
    "a graph": ("silu", lambda: changed("silu", lambda y, *_: y.clone().requires_grad_())),
    "nothing": ("silu", lambda: changed("silu", lambda y, *_: None)),
    "NaN is lost": ("silu", lambda: changed("silu", lambda y, *_: torch.nan_to_num(y))),
    "rounded twice": ("relu", lambda: truncated),
    "erf": ("gelu", lambda: lambda x, q: torch.nn.functional.gelu(x)),
    "in place": ("silu", lambda: in_place("silu")),
    "swapped": (
        "layernorm_bwd",
        lambda: changed("layernorm_bwd", lambda y, *_: (y[0], y[2], y[1])),
    ),
    "order": ("dbias_dgelu", lambda: changed("dbias_dgelu", lambda y, *_: (y[1], y[0]))),
    "sums of the wrong gradient": (
        "dbias_dgelu",
        lambda: changed(
            "dbias_dgelu", lambda y, grad, *_: (grad.reshape(-1, grad.shape[-1]).sum(0), y[1])
        ),
    ),
    "mask": (
        "scaled_masked_softmax_forward",
        lambda: lambda x, mask, scale: (x * scale).softmax(-1),
    ),
    "masked rows are NaN": (
        "scaled_masked_softmax_forward",
        lambda: (
            lambda x, mask, scale: (
                (x.float() * scale).masked_fill(mask.bool(), -torch.inf).softmax(-1).to(x.dtype)
            )
        ),
    ),
    "no bias": ("generic_gemm", lambda: ignores("generic_gemm", 7)),
    "no accumulation": ("generic_gemm", lambda: ignores("generic_gemm", 14)),
    "transposed": (
        "generic_gemm",
        lambda: changed("generic_gemm", lambda y, *_: (y[0].T.contiguous(), *y[1:])),
    ),
    "another format": (
        "quantize",
        lambda: lambda x, *_: MXFP8Quantizer(DType.kFloat8E5M2)(x),
    ),
    "one code": (
        "quantize",
        lambda: changed("quantize", lambda y, *_: flipped(y)),
    ),
    "an amax that forgets": (
        "quantize",
        lambda: changed("quantize", lambda y, x, quantizer, *_: (forget(x, quantizer), y)[1]),
    ),
    "angles the other way": (
        "fused_rope_forward",
        lambda: lambda x, freqs, *rest: implementation("fused_rope_forward").fn(x, -freqs, *rest),
    ),
    "all is kept": ("dropout_fwd", lambda: lambda x, p: (x.clone(), torch.ones_like(x))),
    "not scaled": (
        "dropout_fwd",
        lambda: changed("dropout_fwd", lambda y, x, p: (y[0] * (1 - p), y[1])),
    ),
    "NaN counts": (
        "compute_amax",
        lambda: lambda x, amax: amax.copy_(x.float().abs().max().view(1)),
    ),
    "no flag": ("multi_tensor_scale", lambda: functools.partial(scaled_without_flag)),
    "raises": ("silu", lambda: lambda x, q: 1 // 0),
}


def flipped(made):
    """A tensor with one code changed."""
    data = made.get_data_tensors()[0]
    data.view(-1)[0] ^= 1
    return made


def scaled_without_flag(chunk, flag, lists, scale):
    for source, out in zip(*lists, strict=True):
        out.copy_(source.float() * scale)


@pytest.mark.parametrize("case", FAULTS)
def test_a_wrong_one_fails(device, case):
    op, make = FAULTS[case]
    fails(make(), op, device)


def one_is_lost(y, *args):
    """An ordinary number of very many is 0."""
    made = y[0].view(-1)
    if made.numel() > 60000:
        made[(made.abs() - made.float().square().mean().sqrt()).abs().argmin()] = 0
    return y


SMALL = {
    "erf": ("gelu", lambda: lambda x, q: torch.nn.functional.gelu(x) if q is None else 0),
    "one of 65536": ("rmsnorm_fwd", lambda: changed("rmsnorm_fwd", one_is_lost)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", SMALL)
def test_a_fault_that_is_small_among_roundings(device, case, dtype):
    """Of implementations that have a dtype of few bits alone."""
    op, make = SMALL[case]
    report = plugins.check(make(), op, device=device, dtypes=[dtype], match=name_of(dtype))
    failed = [row for row in report.rows if row.outcome == "failed" and "cast" not in row.case]
    assert failed and all(row.why for row in failed)


def test_arguments_lie_among_others(device):
    """Who reads outside of them reads NaN."""

    def reads(x, quantizer):
        own = implementation("silu").fn(x, quantizer)
        if quantizer is None and x.is_contiguous() and x.numel() and x.storage_offset():
            beyond = x.as_strided((1,), (1,), x.storage_offset() + x.numel())
            own.view(-1)[-1] += 0 * beyond[0]
        return own

    report = plugins.check(reads, "silu", device=device)
    assert {row.why for row in report.rows if row.outcome == "failed"} == {
        "the result: NaN elsewhere"
    }


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "op", ["quantize", "multi_tensor_adam_fp8", "multi_tensor_compute_scale_and_scale_inv"]
)
def test_cases_under_another_default_dtype(device, op, default):
    """They are the same."""
    torch.set_default_dtype(default)
    try:
        report = plugins.check(implementation(op), device=device, dtypes=[torch.float32])
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.passed, str(report)


# ---- what is refused -----------------------------------------------------------------------------


def test_calls_that_it_does_not_take():
    own = implementation("rmsnorm_fwd").fn
    impl = plugin.OpImpl(
        "rmsnorm_fwd", "vendor.some", KIND.VENDOR, own, vendor="some",
        supported_dtypes={"bfloat16"}, supports=lambda x, *_: x.dim() == 2,
    )  # fmt: skip
    report = plugins.check(impl)
    outcomes = {row.case: row.outcome for row in report.rows}
    assert report.passed
    assert outcomes["bfloat16 [5, 40]"] == "passed"
    assert outcomes["bfloat16 [3, 7, 40] zero-centered"] == "refused"
    assert outcomes["float32 [5, 40]"] == "refused"

    def refuses(*args):
        raise NotImplementedError("not this one")

    report = plugins.check(refuses, "silu")
    assert not report.passed  # nothing was shown
    assert {(row.outcome, row.why) for row in report.rows} == {("refused", "not this one")}


def test_who_refuses_has_written_nothing():
    """By `supports`, or by raising: somebody else takes the call."""

    def raises(x, w, eps, out, *rest):
        if out is not None:
            out.zero_()
            raise NotImplementedError("not into ln_out")
        return implementation("rmsnorm_fwd").fn(x, w, eps, out, *rest)

    report = plugins.check(raises, "rmsnorm_fwd", match="ln_out")
    assert {row.outcome for row in report.rows} == {"failed"}
    assert report.rows[0].why == "it wrote, and then refused: not into ln_out"

    def writes(x, *rest):
        x.zero_()
        return False

    own = implementation("silu").fn
    impl = plugin.OpImpl("silu", "vendor.some", KIND.VENDOR, own, vendor="some", supports=writes)
    report = plugins.check(impl, match="large")
    assert {row.why for row in report.rows} == {"it wrote, and then refused: supports"}


def test_a_predicate_that_raises():
    """It fails the cases, not the check."""
    own = implementation("silu").fn
    impl = plugin.OpImpl(
        "silu", "vendor.some", KIND.VENDOR, own, vendor="some", supports=lambda *args: 1 // 0
    )
    report = plugins.check(impl, match="large")
    assert {row.outcome for row in report.rows} == {"failed"}
    assert "ZeroDivisionError" in report.rows[0].why


def test_some_cases():
    report = plugins.check(implementation("silu"), dtypes=[torch.bfloat16], match="zeros")
    assert [row.case for row in report.rows] == ["bfloat16 zeros"]


def test_mistakes():
    with pytest.raises(ValueError, match="op_name: which operator"):
        plugins.check(print)
    with pytest.raises(TypeError, match="impl: None"):
        plugins.check(None, "gelu")
    with pytest.raises(ValueError, match="'gleu' is no operator"):
        plugins.check(print, "gleu")
    with pytest.raises(NotImplementedError, match="te_general_grouped_gemm .*not built yet"):
        plugins.check(print, "te_general_grouped_gemm")
    with pytest.raises(NotImplementedError, match="get_cudnn_version .*computes nothing"):
        plugins.check(print, "get_cudnn_version")
    with pytest.raises(ValueError, match="forward: dropout_bwd reads the mask of a dropout_fwd"):
        plugins.check(print, "dropout_bwd")


def test_which_operators_have_cases():
    """All but those of one table, which says why they have none."""
    checked, without = set(conformance.operators()), set(conformance.WITHOUT_CASES)
    assert not checked & without
    assert checked | without == set(OPERATORS)
    for op in without:
        with pytest.raises(NotImplementedError, match=conformance.WITHOUT_CASES[op]):
            plugins.check(print, op)


def test_masks_are_those_of_a_forward(device):
    """That of the same implementation, or the one that is given."""
    own = implementation("dropout_bwd")
    assert plugins.check(own, device=device).passed
    given = implementation("dropout_fwd", "reference.torch").fn
    report = plugins.check(own, device=device, forward=given)
    assert {row.outcome for row in report.rows} == {"failed"}
    assert "of the same implementation" in report.rows[0].why
    attention = implementation("fused_attn_bwd")
    names = {row.case for row in plugins.check(attention, match="dropout").rows}
    assert names == {"float32 dropout", "float16 dropout", "bfloat16 dropout"}
    assert not plugins.check(attention.fn, "fused_attn_bwd", match="dropout").rows
