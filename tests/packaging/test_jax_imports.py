# SPDX-License-Identifier: Apache-2.0
"""Front ends import nothing of each other; without jax the import says what to do."""

import subprocess
import sys

import pytest
from markdown_pages import ROOT


def run(code):
    """The last line that a new process prints or fails with, and its status."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return done.returncode, said[-1] if said else ""


@pytest.mark.parametrize("mine, others", [("pytorch", {"jax", "flax"}), ("jax", {"torch"})])
def test_nothing_of_the_other_is_imported(mine, others):
    code = f"import sys, transformer_engine.{mine}; print(sorted({others} & sys.modules.keys()))"
    assert run(code) == (0, "[]")


def test_without_jax():
    missing = "import sys; sys.modules['jax'] = None; import transformer_engine"
    status, said = run(f"{missing}.jax")
    assert status == 1
    assert said.startswith("ImportError: transformer_engine.jax needs jax and flax: ")
    assert said.endswith("pip install transformer_engine[jax]")
    assert run(f"{missing} as te; print(hasattr(te, 'jax'))") == (0, "False")


def test_names():
    """Names that programs import are there; those that are not built say so when they are used."""
    code = """
import transformer_engine.jax as te
from transformer_engine.jax import activation, checkpoint_policies, cpp_extensions, dense
from transformer_engine.jax import layernorm, layernorm_dense, layernorm_mlp, quantize, sharding
from transformer_engine.jax import softmax, version_utils, permutation, router, moe, ep
assert version_utils.jax_version_meet_requirement("0.10.0") and te.quantize is quantize
for call in (dense.grouped_dense, permutation.token_dispatch, moe.moe, ep.ep_bootstrap,
             router.fused_topk_with_score_function, quantize.GroupedQuantizer,
             cpp_extensions.grouped_gemm):
    try:
        call()
    except NotImplementedError as error:
        assert call.__name__ in str(error), error
    else:
        raise AssertionError(call)
print(te.NVTE_FP8_COLLECTION_NAME)
"""
    assert run(code) == (0, "fp8_metas")


def test_custom_calls_are_switched_off():
    code = """
import os, jax, jax.numpy as jnp
from transformer_engine.jax.dense import dense
given = jnp.ones((2, 4)), jnp.ones((4, 8))
for text, runs in (("1", True), ("false", False)):
    os.environ["NVTE_JAX_CUSTOM_CALLS"] = text
    assert ("te_layer" in str(jax.make_jaxpr(lambda *a: dense(*a))(*given))) == runs, text
"""
    assert run(code) == (0, "")
