# SPDX-License-Identifier: Apache-2.0
"""`custom_recipes`: functions for CustomRecipe, mixes, and reference quantizers."""

import microscaled
import pytest
import torch
from comparators import assert_nmse
from pytorch.helpers import assert_same_bits, counted, state_of, sum_bound
from pytorch.module_cases import batch, make, step
from pytorch.test_custom_recipe import assert_close, flat
from reference import as_f32
from tols import BF16, E4M3, E5M2, F32, tol
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizerRole,
)
from transformer_engine.pytorch.custom_recipes import (
    gemm,
    quantizer_factories,
    quantizer_factory_zoo,
    reference_current_scaling,
    reference_nvfp4,
    reference_utils,
)
from transformer_engine.pytorch.tensor import NVFP4Quantizer

FACTORIES = {
    "delayed": (quantizer_factories.delayed_scaling_factory, DelayedScaling),
    "current": (quantizer_factories.current_scaling_factory, Float8CurrentScaling),
    "block": (quantizer_factories.float8_block_scaling_factory, Float8BlockScaling),
    "mxfp8": (quantizer_factories.mxfp8_factory, MXFP8BlockScaling),
    "nvfp4": (quantizer_factories.nvfp4_factory, NVFP4BlockScaling),
    "high precision": (quantizer_factories.high_precision_factory, None),
}


@pytest.mark.parametrize("kind", ["linear", "swiglu"])
@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_has_the_bits_of_its_recipe(device, kind, name, start):
    factory, recipe = FACTORIES[name]
    results = []
    for given in (recipe and recipe(), CustomRecipe(factory)):
        start()
        module, x = make(kind, device), batch(device)
        with counted() as gemms:
            steps = [step(module, x * (1 + i), given) for i in range(2)]
        results.append((steps, vars(gemms), state_of(module)))
    (wanted, gemms, state), (found, own_gemms, own_state) = results
    assert gemms == own_gemms
    assert_same_bits(found, wanted)
    if state is not None:
        assert_same_bits(own_state, state)


@pytest.mark.parametrize("name", quantizer_factories.__all__[:-1])
@pytest.mark.parametrize("role", [None, QuantizerRole(), QuantizerRole("linear", "", "boundary")])
def test_a_boundary_gets_a_quantizer(name, role):
    made = getattr(quantizer_factories, name)(role)
    like = getattr(quantizer_factories, name)(QuantizerRole("linear", "input"))
    assert type(made) is type(like) and repr(made) == repr(like)


ZOO = {
    name: getattr(quantizer_factory_zoo, name)
    for name in quantizer_factory_zoo.__all__
    if name != "nvfp4_linear_fp8_dpa_factory"
}


@pytest.mark.parametrize("kind", ["linear", "swiglu"])
@pytest.mark.parametrize("name", ZOO)
def test_a_mix_is_close(device, kind, name):
    module, x = make(kind, device), batch(device)
    grad = torch.randn_like(module(x))
    exact = step(module, x, None, grad)
    with counted():
        found = step(module, x, CustomRecipe(ZOO[name]), grad)
    four_bits = "nvfp4" in name
    bound = tol("casts_in_a_row", E5M2 if four_bits else E4M3)
    for one, other in zip(flat(found), flat(exact), strict=True):
        assert (one - other).float().norm() <= bound * other.float().norm()
    if name.startswith("high_precision_fwd"):
        assert_nmse(found[0], exact[0].cpu().double(), 4 * sum_bound(device, BF16, 64, fast=True))
    if "high_precision_bwd" in name and kind == "linear":
        grads = flat(found)[1:], flat(exact)[1:]
        for one, other in zip(*grads, strict=True):
            assert_nmse(one, other.cpu().double(), 4 * sum_bound(device, BF16, 64, fast=True))


@pytest.mark.parametrize("tensor", ["qkv", "s", "do", "dp"])
def test_nvfp4_layers_with_fp8_attention(tensor):
    factory = quantizer_factory_zoo.nvfp4_linear_fp8_dpa_factory
    assert type(factory(QuantizerRole("dpa", tensor))) is te.Float8CurrentScalingQuantizer
    assert type(factory(QuantizerRole("linear", "input"))) is te.NVFP4Quantizer


def test_an_attention_runs_under_the_mix(device):
    layer = te.DotProductAttention(2, 16)
    q, k, v = (torch.randn(16, 2, 2, 16, device=device, dtype=BF16) for _ in range(3))
    recipe = CustomRecipe(quantizer_factory_zoo.nvfp4_linear_fp8_dpa_factory, fp8_dpa=True)
    with te.autocast(recipe=recipe):
        found = layer(q, k, v)
    with te.autocast(recipe=Float8CurrentScaling(fp8_dpa=True)):
        wanted = layer(q, k, v)
    assert_same_bits(found, wanted)


# ---- references: current scaling -----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("options", [{}, {"pow_2_scales": True}, {"eps": 4.0}])
@pytest.mark.parametrize("case", ["plain", "zeros", "inf", "nan", "tiny"])
def test_current_scaling_has_the_bits_of_ours(dtype, options, case):
    x = torch.randn(48, 32, dtype=BF16)
    if case in ("inf", "nan"):
        x[3, 5] = float(case)
    x = {"zeros": x * 0, "tiny": x * 2.0**-120}.get(case, x)
    ours = te.Float8CurrentScalingQuantizer(
        dtype,
        force_pow_2_scales=options.get("pow_2_scales", False),
        amax_epsilon=options.get("eps", 0.0),
    ).quantize(x)
    made = reference_current_scaling.CurrentScalingQuantizerRef(dtype, **options).quantize(x)
    assert_same_bits(made.scale, ours._scale_inv)
    found, wanted = made.dequantize(), ours.dequantize()
    assert_same_bits(found.isnan(), wanted.isnan())
    assert_same_bits(found.nan_to_num(), wanted.nan_to_num())
    assert_same_bits(made.data_t, made.data.t().contiguous())
    assert made.shape == x.shape and made.dtype == BF16 and made.custom


@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_the_reference_trains_as_the_recipe(device, kind, start):
    results = []
    for recipe in (
        Float8CurrentScaling(),
        CustomRecipe(reference_current_scaling.current_scaling_ref_factory),
    ):
        start()
        module, x = make(kind, device), batch(device)
        results.append(step(module, x, recipe))
    bound = 4 * sum_bound(device, BF16, 64, fast=True)
    first = [flat(result)[0] for result in results]
    if kind == "linear":  # in a row of layers a rounding apart may be a code apart
        assert_nmse(first[1], first[0].cpu().double(), bound)
    assert_close(results[1], results[0], "current")


QGEMM = {
    "TN": ("fprop", (24, 32), (16, 32), lambda a, b: b @ a.t()),
    "NN": ("dgrad", (24, 32), (16, 24), lambda a, b: b @ a),
    "NT": ("wgrad", (16, 32), (16, 24), lambda a, b: b.t() @ a),
}


def quantizers():
    return {
        "current": reference_current_scaling.CurrentScalingQuantizerRef(E4M3),
        "nvfp4": reference_nvfp4.NVFP4QuantizerRef(reference_utils.Fp4Formats.E2M1),
    }


@pytest.mark.parametrize("layout", QGEMM)
@pytest.mark.parametrize("name", quantizers())
def test_custom_gemm_multiplies_what_the_forms_stand_for(name, layout):
    kind, a_shape, b_shape, exact = QGEMM[layout]
    a, b = (quantizers()[name].quantize(torch.randn(shape)) for shape in (a_shape, b_shape))
    read_a, read_b = a.detach(), b.detach()
    if layout != "TN":
        read_a.update_usage(rowwise_usage=False)
    if layout == "NT":
        read_b.update_usage(rowwise_usage=False)
    wanted = exact(read_a.dequantize().double(), read_b.dequantize().double())
    bias = None if layout == "NT" else torch.randn(wanted.shape[1])
    base = torch.randn(wanted.shape)
    out = base.clone()
    made, sums, *rest = gemm.custom_gemm(
        a, b, None, torch.float32, layout=layout, bias=bias, out=out, accumulate=True
    )
    wanted = wanted + base.double() + (0 if bias is None else bias.double())
    assert made is out and sums is None and rest == [None, None]
    assert_nmse(made, wanted, sum_bound("cpu", F32, 64))
    assert gemm.GEMMType(kind).value == kind


def test_custom_gemm_gives_the_gradient_of_the_bias():
    a, b = (quantizers()["current"].quantize(torch.randn(16, n)) for n in (32, 24))
    _, sums, *_ = gemm.custom_gemm(
        a, b, None, torch.float32, layout="NT", bias=torch.zeros(24), grad=True
    )
    assert_nmse(sums, b.dequantize().double().sum(0), sum_bound("cpu", F32, 16))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"gelu": True}, NotImplementedError, "gelu"),
        ({"quantization_params": object()}, NotImplementedError, "quantization_params"),
        ({"layout": "TT"}, ValueError, "layout='TT'"),
        ({"A": torch.ones(2, 2)}, TypeError, "A: Tensor"),
        ({"accumulate": True}, ValueError, "needs out"),
    ],
)
def test_custom_gemm_refuses(options, error, words):
    made = quantizers()["current"].quantize(torch.randn(16, 16))
    with pytest.raises(error, match=words):
        gemm.custom_gemm(**{"A": made, "B": made, "workspace": None, **options})
    made.update_usage(columnwise_usage=False)
    with pytest.raises(RuntimeError, match="A: its columnwise form"):
        gemm.custom_gemm(made, made, None, layout="NN")
    with pytest.raises(RuntimeError, match="a dropped form is not made again"):
        made.update_usage(columnwise_usage=True)


# ---- references: NVFP4 ---------------------------------------------------------------------------

NVFP4 = {
    "plain": ({}, {}),
    "square": ({"quant_tile_shape": (16, 16)}, {"square": True}),
    "rht": ({"with_rht": True}, {"rht": True}),
    "rows": ({"row_scaled_nvfp4": True}, {"row_scaled": True}),
}


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_is_the_definition(device, name):
    options, definition = NVFP4[name]
    x = torch.randn(40, 72, dtype=BF16)
    quantizer = reference_nvfp4.NVFP4QuantizerRef(reference_utils.Fp4Formats.E2M1, **options)
    made = quantizer.quantize(x.to(device))
    row, row_scales, row_amax, column, column_scales, column_amax = microscaled.nvfp4(
        as_f32(x), **definition
    )
    assert made.data.device.type == torch.device(device).type
    assert_same_bits(made.data.cpu(), row)
    assert_same_bits(made.data_t.cpu(), column)
    for found, wanted in ((made.scale, row_scales), (made.scale_t, column_scales)):
        rows, groups = found.shape
        assert_same_bits(found.cpu().view(torch.uint8), wanted[:rows, :groups].contiguous())
    assert_same_bits(made.global_amax_row.cpu(), row_amax)
    assert_same_bits(made.global_amax_col.cpu(), column_amax)
    wanted = microscaled.nvfp4_values(row, row_scales, row_amax)[:, : x.shape[1]]
    assert_same_bits(made.dequantize(dtype=F32).cpu(), wanted.contiguous())
    swapped = quantizer.transpose_qresult(made)
    assert swapped.shape == (72, 40)
    assert_same_bits(swapped.data, made.data_t)
    assert_same_bits(swapped.global_amax_row, made.global_amax_col)


OPTIONS = {
    **{name: options for name, (options, _) in NVFP4.items()},
    "unsigned": {"with_rht": True, "with_random_sign_mask": False},
    "four over six": {"nvfp4_use_4over6": True},
    "four over six, squared": {"nvfp4_use_4over6": True, "nvfp4_4over6_err_mode": "MSE"},
    "four over six, squares": {"nvfp4_use_4over6": True, "quant_tile_shape": (16, 16)},
    "to 256": {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("forms", [(True, True), (True, False), (False, True)])
def test_nvfp4_has_the_bits_of_the_kernels_on_its_own_device(device, name, forms):
    """It reads nothing back to the host, and runs no kernel of this library."""
    options = dict(OPTIONS[name])
    square = {"with_2d_quantization": options.pop("quant_tile_shape", None) is not None}
    x = (torch.randn(40, 72, dtype=BF16) * 3).to(device)
    x[3, :16] = 0.0
    wanted = NVFP4Quantizer(rowwise=forms[0], columnwise=forms[1], **square, **options)(x)
    quantizer = reference_nvfp4.NVFP4QuantizerRef(
        reference_utils.Fp4Formats.E2M1, *forms, **OPTIONS[name]
    )
    before = _core.counters()
    with NoCopies(device):
        made = quantizer.quantize(x)
    assert _core.counters() == before
    for form, end, place in (("row", "", "row"), ("column", "_t", "col")):
        data = getattr(made, f"data{end}")
        if not forms[form == "column"]:
            assert data is None
            continue
        scale, of_kernel = getattr(made, f"scale{end}"), f"_{form}wise_scale_inv"
        rows, groups = scale.shape
        assert data.device == scale.device == x.device
        assert_same_bits(data, getattr(wanted, f"_{form}wise_data"))
        scales = getattr(wanted, of_kernel)[:rows, :groups].contiguous()
        assert_same_bits(scale.view(torch.uint8), scales)
        amax = getattr(wanted, f"_amax_{form}wise")
        assert_same_bits(getattr(made, f"global_amax_{place}"), amax)
    if forms[0]:
        assert_same_bits(made.dequantize(dtype=F32), wanted.dequantize(dtype=F32))


class NoCopies(TorchDispatchMode):
    """No operator of torch gives a tensor of another device."""

    def __init__(self, device):
        super().__init__()
        self._device = torch.device(device).type

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            assert made.device.type == self._device or made.dim() == 0, func
        return made


@pytest.mark.parametrize("kind", ["linear", "swiglu"])
def test_the_nvfp4_reference_trains(device, kind):
    module, x = make(kind, device), batch(device)
    exact = step(module, x, None)
    found = step(module, x, CustomRecipe(reference_nvfp4.nvfp4_ref_rht_2d_factory))
    assert_close(found, exact, "micro")
    assert _core.counters().get("emulated.mixed", 0) > 0


def test_codes_of_four_bits():
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    x = torch.cat((grid, -grid, torch.tensor([7.0, -9.0, 0.25, 0.75, 1.75, 2.5, 3.5, 5.0])))
    packed = reference_nvfp4.cast_to_fp4x2(x)
    wanted = microscaled.e2m1(as_f32(x))
    assert_same_bits(packed, torch.from_numpy(wanted[0::2] | wanted[1::2] << 4))
    found = reference_nvfp4.cast_from_fp4x2(packed, torch.float32)
    assert_same_bits(found[:16], x[:16])


def test_scales():
    x = torch.rand(64) * 2.0 ** torch.randint(-20, 20, (64,)).float()
    found = reference_nvfp4.cast_to_e8(x)
    assert_same_bits(found, torch.from_numpy(microscaled.e8m0(as_f32(x), 1.0)))
    product = (x * 3.0).clamp(max=448.0)
    assert_same_bits(reference_nvfp4.cast_to_e4m3(x, torch.tensor(3.0)), product.to(E4M3))


def test_the_signs_are_those_of_the_transform():
    assert reference_nvfp4.get_wgrad_sign_vector().tolist() == microscaled.SIGNS.tolist()


def test_products_in_high_precision():
    a, b, bias = torch.randn(24, 16), torch.randn(24, 8), torch.randn(8)
    out = torch.randn(16, 8)
    wanted = out.double() + 0.5 * (a.t().double() @ b.double()) + bias.double()
    found = reference_nvfp4.high_precision_gemm_ref(
        a, b, F32, True, is_a_transposed=True, out=out, bias=bias, scale_alpha=0.5
    )
    assert found is out
    assert_nmse(found, wanted, sum_bound("cpu", F32, 24))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"eps": 1.0}, NotImplementedError),
        ({"pow_2_scales": True}, NotImplementedError),
        ({"nvfp4_4over6_err_use_fast_math": True}, NotImplementedError),
        ({"quant_tile_shape": (1, 32)}, ValueError),
    ],
)
def test_the_reference_refuses(options, error):
    with pytest.raises(error, match=next(iter(options))):
        reference_nvfp4.NVFP4QuantizerRef(reference_utils.Fp4Formats.E2M1, **options)


@pytest.mark.parametrize("name", quantizers())
def test_a_reference_tensor_is_written_again(name):
    quantizer = quantizers()[name]
    x, y = torch.randn(2, 3, 32), torch.randn(2, 3, 32)
    made = quantizer.make_empty(x.shape, dtype=BF16)
    assert made.shape == x.shape and made.dtype == BF16 and not made.dequantize().any()
    quantizer.update_quantized(x, made)
    assert_same_bits(made.dequantize(), quantizer.quantize(x).dequantize().to(BF16))
    quantizer.update_quantized(y, made, noop_flag=torch.ones(1))
    assert_same_bits(made.dequantize(), quantizer.quantize(x).dequantize().to(BF16))
    assert reference_utils.roundup_div(33, 16) == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        quantizer.quantize(x, typo=1)
