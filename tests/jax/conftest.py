# SPDX-License-Identifier: Apache-2.0
"""JAX for tests: the CPU, as four devices, unless a GPU is there; keys of each test's seed."""

import os

import torch

# Read when JAX makes its backends, at the first array.
if not torch.cuda.is_available():
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
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


@pytest.fixture
def key(seed):
    """Key of this test's random numbers."""
    return jax.random.key(seed)
