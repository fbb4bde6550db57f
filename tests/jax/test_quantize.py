# SPDX-License-Identifier: Apache-2.0
"""Casts of JAX arrays have the bits of the C library's, and come back as they do there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from buffers import FP8, HIGH
from comparators import assert_bits
from jax_arrays import NAMES, to_jax, to_torch
from microscaled import cast as cast_groups, groups_of_kinds
from scaled_output import Scaled
from thinning import case_id, pairs, pairs_first
from tols import F32

import transformer_engine.jax as te
from transformer_engine import _core
from transformer_engine.common import recipe
from transformer_engine.jax import cpp_extensions as tex, quantize as tq
from transformer_engine.jax.definitions import casts
from transformer_engine.jax.quantize import Cast, ScalingMode

SHAPES = ((33, 47), (129, 257))
KINDS = ("random", "wide", "denormal", "zero", "inf", "nan", "outlier", "all_nan")
TILES = {
    "row": ScalingMode.ROW_SCALING,
    "block_1d": ScalingMode.BLOCK_1D_SCALING,
    "block_2d": ScalingMode.BLOCK_2D_SCALING,
}

MODES = tuple(tq.get_supported_scaling_modes())


def quantizer_of(cast, **more):
    return tq.QuantizerFactory.create(1, cast.mode, cast=cast, **more)


@jax.jit
def cast_and_back(quantizer, x):
    """Row-wise and column-wise forms of an array, and what the first stands for."""
    made = quantizer.quantize(x)
    return made.rowwise_tensor, made.colwise_tensor, made.dequantize()


def check_back(found, mode, keywords):
    """What a form stands for, with the bits of the C library, but that XLA may flush subnormals."""
    found = to_torch(found)
    wanted = torch.empty_like(found)
    _core.dequantize(wanted, mode=mode, **keywords)
    flushed = (found == 0) & (wanted.float().abs() < torch.finfo(F32).tiny)
    assert_bits(torch.where(flushed, wanted, found), wanted, any_nan=True)


@pairs(source=HIGH, dtype=FP8, shape=SHAPES, power_2=(False, True), given=(False, True))
def test_casts_of_tensors(source, dtype, shape, power_2, given, rng):
    """One scale: given as under delayed scaling, or of the tensor itself."""
    x = groups_of_kinds(rng, shape, source, [k for k in KINDS if not given or k != "wide"])
    row = torch.empty(shape, dtype=dtype)
    column, scales = torch.empty(shape[::-1], dtype=dtype), torch.empty(2)
    keywords = {"row": row, "column": column, "row_scales": scales, "column_scales": scales}
    mode, more = ScalingMode.CURRENT_TENSOR_SCALING, {}
    if given:
        scale = torch.tensor([float(rng.uniform(0.1, 100.0))], dtype=torch.float32)
        _core.quantize(x, mode=_core.SCALING_TENSOR, scale=scale, **keywords)
        mode, more = ScalingMode.DELAYED_TENSOR_SCALING, {"scale": to_jax(scale)}
    else:
        partials = torch.empty(_core.AMAX_PARTIALS)
        _core.amax(x, partials)
        _core.quantize(x, mode=_core.SCALING_TENSOR, partials=partials,
                       power_2_scale=int(power_2), **keywords)  # fmt: skip
    cast = Cast(mode, jnp.dtype(NAMES[dtype]), power_2=power_2)
    by_rows, by_columns, back = cast_and_back(quantizer_of(cast, **more), to_jax(x))
    for form, wanted in ((by_rows, row), (by_columns, column)):
        assert_bits(to_torch(form.data), wanted)
        assert_bits(to_torch(form.scale_inv), scales[:1])
    check_back(back, _core.SCALING_TENSOR, {"row": row, "row_scales": scales})


@pairs(mode=tuple(TILES), source=HIGH, dtype=FP8, shape=SHAPES, option=((0.0, True), (0.5, False)))
def test_casts_of_tiles(mode, source, dtype, shape, option, rng):
    epsilon, power_2 = option
    x = groups_of_kinds(rng, shape, source)
    made = Scaled(mode, shape, dtype, "cpu")
    _core.quantize(x, amax_epsilon=epsilon, power_2_scale=int(power_2), **made.arguments())
    cast = Cast(TILES[mode], jnp.dtype(NAMES[dtype]), power_2=power_2, epsilon=epsilon)
    *forms, back = cast_and_back(quantizer_of(cast), to_jax(x))
    for form, name in zip(forms, ("row", "column"), strict=True):
        data, scales = (poisoned.tensor for poisoned in made.forms[name])
        assert_bits(to_torch(form.data), data)
        wanted = {"row": scales[:1].t(), "block_1d": scales.t(), "block_2d": scales}[mode]
        down, across = form.scale_inv.shape
        assert_bits(to_torch(form.scale_inv), wanted[:down, :across].contiguous())
        if name == "row":
            code = getattr(_core, f"SCALING_{mode.upper()}")
            check_back(back, code, {"row": data, "row_scales": scales})


@pairs(source=HIGH, dtype=FP8, shape=SHAPES, square=(False, True), margin=(0, 2, -3))
def test_casts_to_mxfp8(source, dtype, shape, square, margin, rng):
    x = groups_of_kinds(rng, shape, source)
    wanted = cast_groups(x, _core.SCALING_MXFP8, dtype=dtype, square=square, margin=margin)
    mode = ScalingMode.MXFP8_1D_SCALING
    cast = Cast(mode, jnp.dtype(NAMES[dtype]), margin=margin, square=square)
    by_rows, by_columns, back = cast_and_back(quantizer_of(cast), to_jax(x))
    down, across = by_rows.scale_inv.shape
    assert_bits(to_torch(by_rows.data), wanted["row"])
    assert_bits(to_torch(by_rows.scale_inv), wanted["row_scales"][:down, :across].contiguous())
    assert_bits(to_torch(by_columns.data), wanted["column"].t().contiguous())
    across, down = by_columns.scale_inv.shape
    of_columns = wanted["column_scales"][:down, :across].t().contiguous()
    assert_bits(to_torch(by_columns.scale_inv), of_columns)
    keywords = {"row": wanted["row"], "row_scales": wanted["row_scales"]}
    check_back(back, _core.SCALING_MXFP8, keywords)


def test_nothing_is_cast():
    def run(x):
        made = [quantizer_of(Cast(m, jnp.dtype(jnp.float8_e5m2))).quantize(x) for m in MODES]
        return [(t.rowwise_tensor.dequantize(), t.colwise_tensor.dequantize()) for t in made]

    for shape in ((0, 5), (5, 0)):
        assert {a.shape for pair in jax.jit(run)(jnp.zeros(shape)) for a in pair} == {shape}


def test_groups_of_dims(rng):
    """The dims from `flatten_axis` on are one, and so are those before."""
    axis, modes = 1, (ScalingMode.BLOCK_2D_SCALING, ScalingMode.MXFP8_1D_SCALING)
    x = jnp.asarray(rng.standard_normal((3, 40, 130)), jnp.float32)
    flat = x.reshape(3, -1)

    @jax.jit
    def run(x, flat):
        casts = [Cast(mode, jnp.dtype(jnp.float8_e5m2)) for mode in modes]
        return [
            tuple(quantizer_of(cast).quantize(a, flatten_axis=of) for a, of in pairs)
            for cast in casts
            for pairs in [((x, axis), (flat, -1))]
        ], [quantizer_of(cast).quantize(x, flatten_axis=axis).dequantize() for cast in casts]

    pairs, back = run(x, flat)
    for (found, wanted), values in zip(pairs, back, strict=True):
        for form in ("rowwise_tensor", "colwise_tensor"):
            a, b = getattr(found, form), getattr(wanted, form)
            assert_bits(to_torch(a.data).reshape(b.data.shape), to_torch(b.data))
            assert_bits(to_torch(a.scale_inv), to_torch(b.scale_inv))
        assert values.shape == x.shape
        assert found.get_tensor(tq.TensorUsage.LHS_TRANS) is found.colwise_tensor
        assert found.get_tensor(tq.TensorUsage.RHS_TRANS) is found.rowwise_tensor


def test_forms_and_usages():
    for layout in tq.QuantizeLayout:
        mode = ScalingMode.BLOCK_1D_SCALING
        quantizer = tq.QuantizerFactory.create(1, mode, jnp.float8_e4m3fn, layout)
        made = jax.jit(quantizer.quantize)(jnp.ones((32, 64)))
        both = layout is tq.QuantizeLayout.ROWWISE_COLWISE
        assert isinstance(made, tq.ScaledTensor2x if both else tq.ScaledTensor1x)
    assert made.get_tensor(tq.TensorUsage.LHS) is made.rowwise_tensor
    with pytest.raises(ValueError, match="row-wise form, and this needs the column-wise one"):
        made.rowwise_tensor.get_tensor(tq.TensorUsage.RHS)


def test_tensors_are_pytrees():
    quantizer = tq.QuantizerFactory.create(1, ScalingMode.MXFP8_1D_SCALING, jnp.float8_e4m3fn)
    made = jax.jit(quantizer.quantize)(jnp.ones((64, 64), jnp.bfloat16))
    again = jax.tree.map(lambda leaf: leaf, made)
    assert jax.tree.structure(again) == jax.tree.structure(made)
    assert again.rowwise_tensor.dq_dtype == jnp.bfloat16
    wide = tq.NoScaleTensor(jnp.ones(3))
    assert len(jax.tree.leaves(wide)) == 1 and wide.get_tensor(tq.TensorUsage.LHS) is wide


def test_recipes_are_casts():
    """Each recipe's operands are cast as the recipe table says."""
    wanted = {
        recipe.DelayedScaling: (ScalingMode.DELAYED_TENSOR_SCALING,) * 3,
        recipe.Float8CurrentScaling: (ScalingMode.CURRENT_TENSOR_SCALING,) * 3,
        recipe.Float8RowScaling: (ScalingMode.ROW_SCALING,) * 3,
        recipe.MXFP8BlockScaling: (ScalingMode.MXFP8_1D_SCALING,) * 3,
        recipe.Float8BlockScaling: (
            ScalingMode.BLOCK_1D_SCALING,
            ScalingMode.BLOCK_2D_SCALING,
            ScalingMode.BLOCK_1D_SCALING,
        ),
        recipe.NVFP4BlockScaling: (
            ScalingMode.NVFP4_1D_SCALING,
            ScalingMode.NVFP4_2D_SCALING,
            ScalingMode.NVFP4_1D_SCALING,
        ),
    }
    supported = tq.get_supported_quantization_recipes()
    assert {type(each) for each in supported} == wanted.keys()
    for each in supported:
        config = tq.get_quantize_config_with_recipe(each)
        found = tuple(config.get_scaling_mode(source) for source in tq.TensorSource)
        assert found == wanted[type(each)] and config.is_fp8_enabled()
        forward = backward = jnp.float4_e2m1fn
        if not each.nvfp4():
            forward, backward = tq.helper._format2dtypes(each.fp8_format)
        assert [cast.dtype for cast in config.casts] == [forward, forward, backward]
        assert config.has_state == each.delayed()
    block = tq.get_quantize_config_with_recipe(recipe.Float8BlockScaling(use_f32_scales=True))
    assert not any(cast.power_2 for cast in block.casts)
    margin = tq.get_quantize_config_with_recipe(recipe.DelayedScaling(margin=3))
    assert all(cast.margin == 3 for cast in margin.casts)


@pytest.mark.parametrize("made, error, said", [
    (lambda: recipe.DelayedScaling(measure_first=True), NotImplementedError, "measure_first"),
    (lambda: recipe.DelayedScaling(amax_compute_algo=max), NotImplementedError, "amax_compute"),
    (lambda: recipe.DelayedScaling(reduce_amax=False), ValueError, "reduce_amax"),
    (lambda: recipe.Float8CurrentScaling(fp8_dpa=True), NotImplementedError, "fp8_dpa"),
], ids=["measure", "algorithm", "reduce", "attention"])  # fmt: skip
def test_recipes_that_are_refused(made, error, said):
    with pytest.raises(error, match=said), te.autocast(enabled=True, recipe=made()):
        pass
    assert tq.get_global_quantize_recipe() is None


def test_regions():
    assert tq.get_global_quantize_recipe() is None
    outer, inner = recipe.MXFP8BlockScaling(), recipe.Float8CurrentScaling()
    with te.autocast(enabled=True, recipe=outer):
        assert tq.get_global_quantize_recipe() is outer
        with te.autocast(enabled=False):
            assert tq.QuantizerFactory.create_set() == tq.noop_quantizer_set
        with pytest.warns(DeprecationWarning, match="older name"):
            region = te.fp8_autocast(enabled=True, fp8_recipe=inner)
            region.__enter__()
        assert tq.get_global_quantize_recipe() is inner
        region.__exit__(None, None, None)
        assert tq.get_global_quantize_recipe() is outer
    with te.autocast(enabled=True):
        assert tq.get_global_quantize_recipe().delayed()


def test_sets_of_quantizers():
    first, second = tq.QuantizerFactory.create_set(
        2, ScalingMode.DELAYED_TENSOR_SCALING, jnp.float8_e4m3fn, jnp.float8_e5m2
    )
    assert first.x.q_dtype == jnp.float8_e4m3fn and second.dgrad.q_dtype == jnp.float8_e5m2
    assert first.x.scale.shape == (1,) and first.x.amax_history.shape == (1024,)
    assert len(jax.tree.leaves((first, second))) == 12
    with te.autocast(enabled=True, recipe=recipe.Float8BlockScaling()):
        made = tq.QuantizerFactory.create_set()
    assert not jax.tree.leaves(made) and made.kernel.scaling_mode is ScalingMode.BLOCK_2D_SCALING
    for mode, kind in ((ScalingMode.CURRENT_TENSOR_SCALING, tq.CurrentScaleQuantizer),
                       (ScalingMode.MXFP8_1D_SCALING, tq.BlockScaleQuantizer),
                       (ScalingMode.DELAYED_TENSOR_SCALING, tq.DelayedScaleQuantizer)):  # fmt: skip
        assert all(
            type(q) is kind
            for q in tq.QuantizerFactory.create(2, mode, jnp.float8_e4m3fn, checkpoint_name="n")
        )
    assert tq.QuantizerFactory.create(2) == (None, None)
    with pytest.raises(NotImplementedError, match="n_groups=2"):
        tq.QuantizerFactory.create(1, mode, jnp.float8_e4m3fn, n_groups=2)
    with pytest.raises(ValueError, match="not both"):
        tq.QuantizerFactory.create_set(scaling_mode=mode, fp8_recipe=recipe.DelayedScaling())
    with pytest.raises(ValueError, match="makes float8_e4m3fn or float8_e5m2"):
        tq.QuantizerFactory.create(1, mode, jnp.float16)


@pytest.mark.parametrize(("ndim", "axis"), pairs_first((2, 3), (1, -1)), ids=case_id)
def test_sums_beside_casts(ndim, axis, rng):
    x = jnp.asarray(rng.standard_normal((8, 16, 24)[:ndim]), jnp.bfloat16)
    made, total = tex.quantize_dbias(x, None, flatten_axis=axis)
    assert isinstance(made, tq.NoScaleTensor) and made.data is x
    wanted = x.astype(jnp.float32).sum(tuple(range(axis % ndim))).astype(x.dtype)
    assert_bits(to_torch(total), to_torch(wanted))
    assert tex.quantize_dbias(x, None, is_dbias=False)[1] is None


@pairs(dtype=FP8, power_2=(False, True))
def test_scales_of_every_amax(dtype, power_2, rng):
    """From amax to scale as the C library makes it, subnormal and infinite ones too."""
    amaxes = rng.integers(0, 0x7F800001, 20000, dtype=np.int64).astype(np.int32).view(np.float32)
    amaxes[:4] = 0.0, np.inf, np.float32(1e-45), np.float32(2.0**-126)
    amaxes[4:2000] = rng.uniform(1.0, 512.0, 1996) * 2.0**-128  # whose scales have no inverse
    x = torch.from_numpy(amaxes)[:, None]
    row, scales = torch.empty(x.shape, dtype=dtype), torch.empty(2, len(x))
    _core.quantize(
        x, mode=_core.SCALING_ROW, row=row, row_scales=scales, power_2_scale=int(power_2)
    )
    cast = Cast(ScalingMode.ROW_SCALING, jnp.dtype(NAMES[dtype]), power_2=power_2)
    made = jax.jit(casts.quantize, static_argnums=1)(to_jax(x), cast)
    assert_bits(to_torch(made.data), row)
    assert_bits(to_torch(made.scale_inv), scales[:1].t().contiguous())
