# SPDX-License-Identifier: Apache-2.0
"""Modules on a device of a third party, which has no kernels of ours: recipes and surroundings."""

import pytest
import torch
from devices.beside_cpu import (
    BATCH,
    MODULES,
    RECIPES,
    TOKENS,
    WIDTH,
    assert_as_on_the_cpu,
    eager,
    region,
)
from thinning import chosen, pairs_first
from tols import BF16
from torch.utils.flop_counter import FlopCounterMode

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.recipe import NVFP4BlockScaling

pytestmark = pytest.mark.npu

EMULATED = {"delayed": "tensor", "current": "tensor", "block": "block_1d", "row": "row",
            "mxfp8": "mxfp8", "nvfp4": "nvfp4", "custom": "tensor"}  # fmt: skip
"""Under which name GEMMs of a recipe are counted that are multiplied out."""


def inputs(steps=3, dtype=BF16):
    return [torch.randn(TOKENS, BATCH, WIDTH).to(dtype) * (1 + n) for n in range(steps)]


def made(module, dtype=BF16, **options):
    return MODULES[module](params_dtype=dtype, device="cpu", **options)


# ---- ways to run a module: way(recipe)(model, x, number of the step) gives an output ------------


def compiled(recipe):
    graph = None

    def run(model, x, step):
        nonlocal graph
        del step
        graph = torch.compile(model, backend="aot_eager") if graph is None else graph
        with region(recipe):
            return graph(x)

    return run


def checkpointed(checkpoint, **options):
    def way(recipe):
        def run(model, x, step):
            del step
            with region(recipe):
                return checkpoint(model, x, **options)

        return run

    return way


def in_microbatches(recipe):
    def run(model, x, step):
        with region(recipe):
            if isinstance(model, te.LayerNorm | te.RMSNorm):
                return model(x)
            return model(x, is_first_microbatch=step % 2 == 0)

    return run


torch_checkpoint = torch.utils.checkpoint.checkpoint
WAYS = {
    "eager": eager,
    "compile": compiled,
    "te.checkpoint": checkpointed(te.checkpoint),
    "checkpoint": checkpointed(torch_checkpoint, use_reentrant=False),
    "reentrant": checkpointed(torch_checkpoint, use_reentrant=True),
    "microbatches": in_microbatches,
}


@pytest.mark.parametrize(
    ("module", "recipe", "way"),
    [
        *pairs_first(MODULES, RECIPES, [way for way in WAYS if way != "compile"]),
        *(("TransformerLayer", recipe, "compile") for recipe in ("delayed", "nvfp4")),
    ],
)
def test_steps(npu, module, recipe, way, fresh_compiler):
    """In every way the bits are those of eager steps on the CPU, by the same definitions."""
    plain = in_microbatches if way == "microbatches" else eager
    model = made(module)
    assert_as_on_the_cpu(model, inputs(), WAYS[way](recipe), npu, plain(recipe))
    counted = _core.counters()
    gemms = {name for name in counted if name.startswith("gemm.")}
    assert gemms <= {"gemm.npu.f32.f32", "gemm.npu.bf16.bf16"}
    emulated = {name for name in counted if name.startswith("emulated.")}
    has_gemms = recipe != "none" and "Norm" != module[-4:]
    assert emulated == ({f"emulated.{EMULATED[recipe]}"} if has_gemms else set())


# ---- places --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["none", "delayed", "row"])
def test_the_second_device(recipe):
    model = made("TransformerLayer")
    assert_as_on_the_cpu(model, inputs(2), eager(recipe), torch.device("npu", 1))


@pytest.mark.parametrize("module", MODULES)
def test_devices_are_not_mixed(module):
    model = made(module).to("npu:0")
    for other in ("npu:1", "cpu"):
        x = inputs(1)[0].to(other)
        said = f"npu:0.*{other}|{other}.*npu:0"
        with pytest.raises((RuntimeError, ValueError, TypeError), match=said):
            model(x)
    model(inputs(1)[0].to("npu:0"))


def test_modules_are_made_on_the_current_device():
    assert te.Linear(4, 4).weight.device == torch.device("npu", 0)
    with torch.npu.device(1):
        assert te.Linear(4, 4).weight.device == torch.device("npu", 1)
    with torch.device("npu:1"):
        assert te.Linear(4, 4).weight.device == torch.device("npu", 1)


# ---- dropout -------------------------------------------------------------------------------------


@chosen(
    [("none", "checkpoint"), ("delayed", "eager"), ("delayed", "te.checkpoint")],
    recipe=["none", "delayed"], way=["eager", "te.checkpoint", "checkpoint"],
)  # fmt: skip
def test_dropout(npu, recipe, way):
    """The decisions are those of a pair of random numbers, which one seed gives every device."""
    options = {"hidden_dropout": 0.3, "attention_dropout": 0.2, "drop_path_rate": 0.5}
    model = te.TransformerLayer(WIDTH, 64, 4, params_dtype=BF16, device="cpu", **options)
    assert_as_on_the_cpu(model, inputs(2), WAYS[way](recipe), npu, eager(recipe))


def test_stochastic_rounding(npu):
    """Gradients under NVFP4 are rounded by pairs of random numbers."""

    def run(model, x, step):
        del step
        with te.autocast(recipe=NVFP4BlockScaling()):
            return model(x)

    assert_as_on_the_cpu(made("LayerNormMLP"), inputs(2), run, npu)


# ---- what watches operators ----------------------------------------------------------------------


def test_modes_see_operators_whole(npu):
    """A definition is one operator: counters of FLOPs, say, do not see of what it is made."""
    counted = []
    for device in ("cpu", npu):
        model = made("TransformerLayer").to(device)
        with FlopCounterMode(display=False) as mode:
            model(inputs(1)[0].to(device)).sum().backward()
        counted.append(mode.get_flop_counts()["Global"])
    assert counted[0] == counted[1]


@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_function_transforms(npu, recipe):
    model = made("LayerNormLinear")

    def run(model, x, step):
        del step
        with region(recipe):
            out, pull = torch.func.vjp(model, x)
            assert pull(out)[0].isfinite().all()
            return model(x)

    assert_as_on_the_cpu(model, inputs(2), run, npu)
