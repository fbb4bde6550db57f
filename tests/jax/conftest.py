# SPDX-License-Identifier: Apache-2.0
"""JAX for tests: the CPU, as four devices, and the GPU for tests of the fixture `device`; keys."""

import os

import torch

# Read when JAX makes its backends, at the first array; the first is that of programs.
os.environ["JAX_PLATFORMS"] = "cpu,cuda" if torch.cuda.is_available() else "cpu"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
# Most time goes to LLVM, whose optimizations change no bits of strict arithmetic.
_FLAGS = (
    "--xla_force_host_platform_device_count=4",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS))

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_default_matmul_precision", "highest")  # fp32 on GPUs too


@pytest.fixture(autouse=True)
def default_device(request):
    """What a test of the fixture `device` runs on; others run on the CPU."""
    kind = request.getfixturevalue("device") if "device" in request.fixturenames else "cpu"
    with jax.default_device(None if kind == "cpu" else jax.devices(kind)[0]):
        yield


@pytest.fixture
def key(seed):
    """Key of this test's random numbers."""
    return jax.random.key(seed)
