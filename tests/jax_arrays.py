# SPDX-License-Identifier: Apache-2.0
"""Fresh arrays of JAX, and the same bits, or numbers, as tensors of torch."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

DTYPES = {
    torch.float32: jnp.float32,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
    torch.uint8: jnp.uint8,
    torch.bool: jnp.bool_,
    torch.int32: jnp.int32,
    torch.int64: jnp.uint32,  # pairs: JAX has no 64 bits unless it is asked for them
}

NAMES = {dtype: np.dtype(DTYPES[dtype]).name for dtype in list(DTYPES)[:5]}
"""Names of float dtypes of JAX, by those of torch."""
_TORCH = {name: dtype for dtype, name in NAMES.items()} | {"float8_e8m0fnu": torch.uint8}


def normal(rng, shape, dtype=torch.float32):
    """Normally distributed numbers; `dtype` is one of torch."""
    return jnp.asarray(rng.normal(size=shape).astype(np.float32)).astype(DTYPES[dtype])


def bits(values):
    """Bytes of a tensor or an array, flat."""
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.frombuffer(np.asarray(values).tobytes(), np.uint8)


def assert_same(array, tensor):
    """Check that an array of JAX has dtype, shape and bits of a tensor."""
    wide = tensor.dtype is torch.int64
    shape = (*tensor.shape[:-1], tensor.shape[-1] * 2) if wide else tuple(tensor.shape)
    assert array.dtype == DTYPES[tensor.dtype] and array.shape == shape
    different = np.flatnonzero(bits(array) != bits(tensor))
    assert different.size == 0, f"{different.size} bytes differ, first at {different[:4]}"


def to_jax(tensor):
    """Copy a tensor to an array with its bits, on the same kind of device."""
    dtype = np.dtype(DTYPES[tensor.dtype])
    tensor = tensor.detach()
    host = bits(tensor).copy().view(dtype)
    shape = tensor.shape
    if tensor.dtype is torch.int64:
        shape = (*shape[:-1], shape[-1] * 2)
    device = jax.devices(tensor.device.type)[0]
    if device == (jax.config.jax_default_device or jax.devices()[0]):
        return jnp.asarray(host.reshape(shape))  # which programs may move
    return jax.device_put(host.reshape(shape), device)


def like(tensor):
    """Shape and dtype of the array that is to have a tensor's bits."""
    return jax.ShapeDtypeStruct(tuple(tensor.shape), DTYPES[tensor.dtype])


def to_torch(array):
    """A tensor with the bits of an array of floats; E8M0 is uint8."""
    values = np.array(array)
    flat = torch.from_numpy(bits(values).copy()).view(_TORCH[values.dtype.name])
    return flat.reshape(values.shape)


def wide(array):
    """The same numbers as a float64 tensor of torch."""
    return torch.from_numpy(np.asarray(array).astype(np.float64))


def wide_leaf(array):
    """The same, of which a gradient is wanted."""
    return wide(array).requires_grad_()


def integers(array):
    """Integers as a tensor of torch."""
    return torch.from_numpy(np.array(array))


def shapes_of(tree):
    """Shapes of the leaves of a tree of dicts, by path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}
