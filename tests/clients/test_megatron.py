# SPDX-License-Identifier: Apache-2.0
"""megatron-core, released and unpatched: names, and a GPT of its TE layer spec on one rank.

Each version runs in one process per device (megatron_cases.py, which says of every case what came
out of it); the tests here judge what it found. Most of a training step needs no GPU; what
megatron-core itself does with CUDA is marked `gpu`.
"""

import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tols import tol

import transformer_engine

VERSIONS = ("0.16.1", "0.19.2")
CASES = Path(__file__).with_name("megatron_cases.py")
LINEAR_LAYERS, GEMMS, STEPS = 8, 3, 10  # two layers of four; forward and two gradients
LONGEST = 240  # seconds for all cases of a version; they take about 30
BF16 = torch.bfloat16
FORMATS = {
    "param_delayed": "Float8Tensor",
    "param_current": "Float8Tensor",
    "param_blockwise": "Float8BlockwiseQTensor",
    "param_mxfp8": "MXFP8Tensor",
    "param_nvfp4": "NVFP4Tensor",
}
"""Weights of the cases that have them quantized (megatron_recipes.py)."""
TRAININGS = ("bf16", "bf16_llama", "fp8_delayed", "fp8_delayed_llama", "fp8_current")


@pytest.fixture(scope="session")
def results(request, tmp_path_factory):
    """Run all cases of a version on a device, once; give what they found by name."""
    found, seed = {}, request.config.getoption("seed")

    def run(version, device, folders):
        key = (version, device)
        if key not in found:
            output = tmp_path_factory.mktemp("megatron") / "results.json"
            path = os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])
            environment = {**os.environ, "PYTHONPATH": path, "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
            command = [sys.executable, str(CASES), device, str(output), str(seed)]
            with open(output.with_suffix(".txt"), "w") as said:
                try:
                    status = subprocess.run(
                        command,
                        env=environment,
                        cwd=output.parent,
                        stdout=said,
                        stderr=said,
                        timeout=LONGEST,
                    ).returncode
                except subprocess.TimeoutExpired:
                    status = f"none: stopped after {LONGEST} s"
            end = output.with_suffix(".txt").read_text()[-8000:]
            found[key] = json.loads(output.read_text()) if output.exists() else {}
            found[key]["end"] = f"exit status {status}\n{end}"
        return found[key]

    return run


def facts_of(version, device, fetched, results):
    """A function that gives the facts of a case; its traceback fails the test."""
    folders = [fetched(f"megatron-core-{version}")]
    if version == "0.19.2" and importlib.util.find_spec("triton") is None:
        folders.append(fetched("triton-3.7.0"))  # it imports triton, and does not say so
    found = results(version, device, folders)

    def facts(name):
        for label in ("start", name):
            if "error" in found.get(label, {}):
                pytest.fail(f"megatron-core {version}, {label}:\n{found[label]['error']}")
        if name not in found:
            pytest.fail(f"megatron-core {version}, {name} was not reached: {found['end']}")
        return found[name]["facts"]

    return facts


@pytest.fixture(params=VERSIONS)
def case(request, device, fetched, results):
    """Facts of the cases of a version on the device."""
    return facts_of(request.param, device, fetched, results)


@pytest.fixture(params=[pytest.param(version, marks=pytest.mark.gpu) for version in VERSIONS])
def gpu_case(request, fetched, results):
    """Facts of the cases that megatron-core itself runs on a GPU only."""
    return facts_of(request.param, "cuda", fetched, results)


# ---- names ---------------------------------------------------------------------------------------

NEED_A_GPU = {"megatron.core.dist_checkpointing.strategies.torch.HAVE_TE"}


def test_every_module_finds_the_package(case, device):
    facts = case("names")
    assert facts["version"] == transformer_engine.__version__
    assert facts["optimizer"]
    absent = {name for name, there in facts["found"].items() if not there}
    allowed = NEED_A_GPU if device == "cpu" else set()
    assert absent <= allowed, f"not found: {sorted(absent - allowed)}"
    assert facts["found"]["megatron.core.extensions.transformer_engine.HAVE_TE"]


def test_every_module_imports(case):
    facts = case("every_module")
    assert not facts["ours"], "\n".join(facts["ours"])
    assert facts["imported"] > 200


def test_what_is_not_built_says_so_when_it_is_used(case):
    messages = case("absent_features")
    silent = [name for name, message in messages.items() if "is not built yet" not in message]
    assert not silent, f"without a message: {silent}"


# ---- layers --------------------------------------------------------------------------------------


def test_attention(case):
    for kind, error in case("attention_through_te").items():
        assert error <= tol("attention", BF16, 64), kind


def test_norms_rotary_embeddings_and_the_split_of_qkv(case):
    facts = case("norms")
    for kind, home in (("LayerNorm", "layernorm"), ("RMSNorm", "rmsnorm")):
        module, dtype, parallel = facts[kind]
        assert module == f"transformer_engine.pytorch.module.{home}"
        assert (dtype, parallel) == ("torch.bfloat16", False)
    assert facts["rope"] <= 8 * tol("terms", torch.float32, 2)  # of values up to 4, twice
    assert facts["split"]


# ---- training ------------------------------------------------------------------------------------


def assert_trained(facts, fp8):
    """The loss fell, and every GEMM of a linear layer ran in the precision that was asked for."""
    losses = facts["losses"]
    assert len(losses) == STEPS
    assert all(map(math.isfinite, losses)), losses
    assert losses[-1] < losses[STEPS // 2] < losses[0], losses
    assert facts["linear_layers"] == LINEAR_LAYERS
    microbatches = facts.get("microbatches", 1)
    expected = LINEAR_LAYERS * GEMMS * STEPS * microbatches
    counted = (facts["fp8"], facts["other"])
    assert counted == ((expected, 0) if fp8 else (0, expected))


@pytest.mark.parametrize("name", [*TRAININGS, "fp8_e4m3_without_cache"])
def test_a_gpt_trains(case, name):
    assert_trained(case(name), fp8=name.startswith("fp8"))


@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current"])
def test_fp8_follows_bf16(case, recipe):
    for ours, exact in zip(case(recipe)["losses"], case("bf16")["losses"], strict=True):
        error = ((ours - exact) / exact) ** 2
        assert error <= tol("quantized_layer", torch.float8_e4m3fn)


def assert_same_gradients(facts, device):
    """The same bits on the CPU; on a GPU the attention's gradient is summed in any order."""
    for what, (error, name) in facts.items():
        assert error <= (0.0 if device == "cpu" else tol("layer", BF16, 64)), f"{what}: {name}"


def test_te_checkpoint_of_a_layer(case, device):
    facts = case("te_checkpoint")
    assert facts["order"] == ["plain", "recompute", "plain", "recompute"]
    assert_same_gradients(dict(zip(facts["order"][1:], facts["errors"], strict=True)), device)


def test_recompute_of_layers(case, device):
    assert_same_gradients(case("recompute_layers"), device)


def test_a_checkpoint_keeps_weights_and_scales(case, device):
    facts = case("distributed_checkpoint")
    assert facts["keys"], "a fresh model asks for other keys than a trained one saves"
    assert facts["extra"] >= LINEAR_LAYERS
    assert facts["used"], "training has found no scales: there was nothing to keep"
    assert not facts["weights"], f"weights differ: {facts['weights']}"
    assert not facts["scales"], f"scales differ: {facts['scales']}"
    first, second = facts["losses"]
    assert first == second


# ---- what megatron-core asks a version of this package for ---------------------------------------


RECIPES = [
    *("mxfp8", "blockwise", "blockwise_hybrid", "custom_current", "custom_mxfp8", "custom_nvfp4"),
    *(*FORMATS, "attention", "attention_current", "attention_mha", "first_layer_bf16", "symmetric"),
]


@pytest.mark.parametrize("name", RECIPES)
def test_configurations(case, name):
    """Each trains; its matrix products and weights are those that were asked for."""
    facts = case(f"recipe_{name}")
    losses, every = facts["losses"], LINEAR_LAYERS * GEMMS * STEPS
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0], losses
    emulated = next((kind for kind in facts["emulated"] if name.endswith(kind)), None)
    in_fp8 = {"symmetric": 0, "first_layer_bf16": every // 2}.get(name, every)
    assert (facts["fp8"], facts["other"]) == ((0, every) if emulated else (in_fp8, every - in_fp8))
    expected = {kind: every if kind == emulated else 0 for kind in facts["emulated"]}
    assert facts["emulated"] == expected
    wanted = [FORMATS[name]] * LINEAR_LAYERS if name in FORMATS else []
    assert facts["formats"] == wanted
    assert (facts["attention"] > 0) == name.startswith("attention")


@pytest.mark.parametrize("name", ["softmax_off_by_one", "softmax_learnable"])
def test_types_of_softmax(case, name):
    assert_trained(case(name), fp8=False)


def test_nvfp4(case):
    facts = case("nvfp4")
    losses = facts["losses"]
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0], losses
    assert facts["emulated"] == LINEAR_LAYERS * GEMMS * STEPS


def test_queries_and_keys_are_clipped(case):
    facts = case("largest_logits")
    assert all(len(heads) == facts["heads"] for heads in facts["logits"])
    assert all(math.isfinite(top) for heads in facts["logits"] for top in heads)
    assert facts["changed"] and all(facts["changed"])


# ---- what megatron-core runs on a GPU only -------------------------------------------------------


def test_recompute_by_megatron(gpu_case):
    assert_same_gradients(gpu_case("recompute_by_megatron"), "cuda")


def test_random_states(gpu_case):
    facts = gpu_case("random_states")
    assert set(facts) == {"CudaRNGStatesTracker", "TECudaRNGStatesTracker"}
    assert_same_gradients(facts, "cuda")


def test_rotary_positions(gpu_case):
    assert_trained(gpu_case("llama_with_rope"), fp8=True)


OPTIMIZERS = ["optimizer_bf16", "optimizer_fp8_param"]
OPTIMIZERS += ["distributed_optimizer_fp8"]
OPTIMIZERS += [f"distributed_fp8_param_{name}" for name in ("delayed", "current", "blockwise")]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_megatrons_optimizers(gpu_case, name):
    facts = gpu_case(name)
    assert facts["optimizer"] == "transformer_engine.pytorch.optimizers.fused_adam"
    assert all(map(math.isfinite, facts["norms"])), facts["norms"]
    assert_trained(facts, fp8="fp8" in name)


def test_gradients_are_added_to_main_grad(gpu_case):
    facts = gpu_case("main_gradients")
    assert facts["added"] == [True, True]
    assert max(facts["errors"]) <= tol("chain", BF16, 512), facts["errors"]
