# SPDX-License-Identifier: Apache-2.0
"""Arrays of JAX for tests: fresh ones, and the same numbers as tensors of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax.traverse_util import flatten_dict
from tols import BF16, F16, F32

DTYPES = {F32: jnp.float32, F16: jnp.float16, BF16: jnp.bfloat16}


def normal(rng, shape, dtype=F32):
    """Normally distributed numbers; `dtype` is one of torch."""
    return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(DTYPES[dtype])


def wide(array):
    """The same numbers as a float64 tensor of torch."""
    return torch.from_numpy(np.asarray(array).astype(np.float64))


def wide_leaf(array):
    """The same, of which a gradient is wanted."""
    return wide(array).requires_grad_()


def to_torch(array):
    """The same numbers as a fp32 tensor of torch."""
    return torch.from_numpy(np.array(array, dtype=np.float32))


def integers(array):
    """Integers as a tensor of torch."""
    return torch.from_numpy(np.array(array))


def shapes_of(tree):
    """Shapes of the leaves of a tree of dicts, by path."""
    return {path: leaf.shape for path, leaf in flatten_dict(tree, sep="/").items()}


def init(module, keys, *inputs):
    """Variables of a module of Flax, drawn in one jitted function."""
    return jax.jit(module.init)(keys, *inputs)


def with_gradients(call, grad, *arguments):
    """(Result, gradients of all arguments) by that of the result, in one jitted function."""

    @jax.jit
    def both(grad, *arguments):
        result, vjp = jax.vjp(call, *arguments)
        return result, vjp(grad)

    return both(grad, *arguments)
