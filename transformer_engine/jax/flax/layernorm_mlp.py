# SPDX-License-Identifier: Apache-2.0
"""`LayerNormMLP`: norm, linear layer, activation and linear layer in one."""

from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import mul
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from transformer_engine.jax.activation import activation
from transformer_engine.jax.definitions.activations import ACTIVATIONS
from transformer_engine.jax.dense import dense
from transformer_engine.jax.flax.linear import Initializer, TransformerEngineBase, operand_dtype
from transformer_engine.jax.flax.parameters import (
    _canonicalize_tuple,
    _normalize_axes,
    adapted,
    default_kernel_init,
    norm_parameters,
    parameter,
    stacked_init,
)
from transformer_engine.jax.layernorm import canonicalize_norm_type, layernorm
from transformer_engine.jax.layernorm_mlp import layernorm_mlp
from transformer_engine.jax.sharding import with_sharding_constraint_by_logical_axes

__all__ = ["LayerNormMLP"]


def _known(kinds):
    """Whether `activation` has these functions, in either order."""
    return kinds in ACTIVATIONS or kinds[::-1] in ACTIVATIONS


def _product(x, activations):
    """Each function of its own part of [.., functions, columns], multiplied."""
    functions = [
        (lambda v: v) if f == "linear" else getattr(nn, f) if isinstance(f, str) else f
        for f in activations
    ]
    return reduce(mul, (f(x[..., n, :]) for n, f in enumerate(functions)))


class LayerNormMLP(TransformerEngineBase):
    """Norm, linear layer, activation and linear layer.

    Attributes
    ----------
    intermediate_dim : int, default 2048
        Columns between the two linear layers.
    activations : tuple of str or callable, default ("gelu",)
        Functions, each of its part of what the first linear layer makes, that are multiplied;
        "linear" is the part itself. Others than those of `transformer_engine.jax.activation` are
        names of `flax.linen`.
    activation_params : dict, optional
        Numbers of the clamped functions.
    intermediate_dropout_rate : float, default 0
        Probability that an element behind the activation is dropped.
    intermediate_dropout_rng_name : str, default "dropout"
        Stream of its random keys.
    intermediate_hidden_dropout_dims : tuple of int, default ()
        Dims along which all elements are dropped or none.
    use_bias : bool, default False
        Whether there are ``wi_bias`` and ``wo_bias``.
    kernel_axes_1, kernel_axes_2, bias_axes_1, bias_axes_2 : tuple of str
        Names of the axes of ``wi_kernel`` [hidden, functions, intermediate], ``wo_kernel``
        [intermediate, hidden] and their biases.
    axis : int, default -1
        The dim that the first layer sums over: the last one.
    dot_1_input_axes, dot_2_input_axes : tuple of str, optional
        Names of the axes of what the linear layers take.
    ffn1_ckpt_name, ffn2_ckpt_name : str
        Names of what they make, for policies of `jax.checkpoint`.
    enable_layernorm, layernorm_type, epsilon, zero_centered_gamma, scale_init, scale_axes, \
ln_bias_init, ln_bias_axes, kernel_init, bias_init, return_layernorm_output, dtype, \
transpose_batch_sequence, layernorm_input_axes, quantization_checkpoint_name
        As of `LayerNormDenseGeneral`.
    enable_low_rank_adaptation, low_rank_adaptation_dim, low_rank_adaptation_alpha
        As of `DenseGeneral`; ``wi_lora_a_kernel`` and so on, for both linear layers.
    """

    intermediate_dim: int = 2048
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str, ...] = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: tuple[str, ...] = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes_1: tuple[str, ...] = ("embed", "act", "mlp")
    kernel_axes_2: tuple[str, ...] = ("mlp", "embed")
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes_1: tuple[str, ...] = ("act", "mlp")
    bias_axes_2: tuple[str, ...] = ("embed",)
    return_layernorm_output: bool = False
    activations: Sequence[str | Callable] = ("gelu",)
    activation_params: dict | None = None
    intermediate_dropout_rng_name: str = "dropout"
    intermediate_dropout_rate: float = 0.0
    intermediate_hidden_dropout_dims: Sequence[int] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    layernorm_input_axes: tuple[str, ...] | None = None
    dot_1_input_axes: tuple[str, ...] | None = None
    dot_2_input_axes: tuple[str, ...] | None = None
    ffn1_ckpt_name: str = "ffn1"
    ffn2_ckpt_name: str = "ffn2"
    quantization_checkpoint_name: str | None = None

    def _parameters(self, hidden, dtype, quantizers):
        """Kernels and biases of both layers; None for biases that there are not."""
        count, inner = len(self.activations), self.intermediate_dim
        init = self.kernel_init or default_kernel_init()
        first = parameter(self, "wi_kernel", stacked_init([init] * count), self.kernel_axes_1,
                          (hidden, count, inner))  # fmt: skip
        second = parameter(self, "wo_kernel", init, self.kernel_axes_2, (inner, hidden))
        kernels = [
            operand_dtype(kernel, dtype, own)
            for kernel, own in zip((first, second), quantizers, strict=True)
        ]
        if not self.use_bias:
            return kernels, (None, None)
        return kernels, (
            parameter(self, "wi_bias", self.bias_init, self.bias_axes_1, (count, inner)),
            parameter(self, "wo_bias", self.bias_init, self.bias_axes_2, (hidden,)),
        )

    def _in_pieces(self, x, norm, kernels, biases, quantizers, deterministic):
        """One step after the other: (result, what the norm made)."""
        made = with_sharding_constraint_by_logical_axes(x, self.layernorm_input_axes)
        if norm is not None:
            made = layernorm(made, *norm, self.zero_centered_gamma, self.epsilon)
        init, hidden = self.kernel_init or default_kernel_init(), x.shape[-1]
        last = x.ndim - 1
        count, inner = kernels[0].shape[1:]
        y = dense(made, kernels[0], bias=biases[0], contracting_dims=((last,), (0,)),
                  transpose_batch_sequence=self.transpose_batch_sequence,
                  input_axes=self.dot_1_input_axes, kernel_axes=self.kernel_axes_1,
                  quantizer_set=quantizers[0])  # fmt: skip
        each = stacked_init([init] * count)
        y = adapted(self, y, made, (last,), (count, inner), each, "wi_")
        y = checkpoint_name(y, self.ffn1_ckpt_name)
        kinds = tuple(self.activations)
        if _known(kinds):
            y = activation(y, kinds, act_params=self.activation_params)
        else:
            y = _product(y, kinds).astype(x.dtype)
        y = nn.Dropout(self.intermediate_dropout_rate, self.intermediate_hidden_dropout_dims,
                       rng_collection=self.intermediate_dropout_rng_name)(
                       y, deterministic=deterministic)  # fmt: skip
        z = dense(y, kernels[1], bias=biases[1], contracting_dims=((last,), (0,)),
                  transpose_batch_sequence=self.transpose_batch_sequence,
                  input_axes=self.dot_2_input_axes, kernel_axes=self.kernel_axes_2,
                  quantizer_set=quantizers[1])  # fmt: skip
        z = adapted(self, z, y, (last,), (hidden,), init, "wo_")
        return checkpoint_name(z, self.ffn2_ckpt_name), made

    @nn.compact
    def __call__(self, x: Array, deterministic: bool = False) -> tuple[Array, Array | None]:
        """Return (result, what the norm made or None), both of the shape and dtype of `x`.

        Parameters
        ----------
        x : Array
            [.., hidden].
        deterministic : bool, default False
            Without dropout.

        Raises
        ------
        NotImplementedError
            `axis` is not the last dim.
        """
        if _normalize_axes(_canonicalize_tuple(self.axis), x.ndim) != (x.ndim - 1,):
            raise NotImplementedError(f"LayerNormMLP: axis={self.axis} is not the last dim")
        quantizers = [
            self.generate_quantizer_set(
                postfix=postfix, quantization_checkpoint_name=self.quantization_checkpoint_name
            )
            for postfix in ("_0", "_1")
        ]
        norm = None
        kind = canonicalize_norm_type(self.layernorm_type)
        if self.enable_layernorm:
            norm = (*norm_parameters(self, x.shape[-1], x.dtype, self.ln_bias_init,
                                     self.ln_bias_axes), kind)  # fmt: skip
        kernels, biases = self._parameters(x.shape[-1], x.dtype, quantizers)
        dropped = self.intermediate_dropout_rate > 0 and not deterministic
        pieces = norm is None or self.return_layernorm_output or self.enable_low_rank_adaptation
        if pieces or dropped or not _known(tuple(self.activations)):
            z, made = self._in_pieces(x, norm, kernels, biases, quantizers, deterministic)
            return z, made if self.return_layernorm_output else None
        return layernorm_mlp(
            x, norm[0], norm[1], kernels, biases, kind, self.zero_centered_gamma, self.epsilon,
            transpose_batch_sequence=self.transpose_batch_sequence,
            norm_input_axes=self.layernorm_input_axes, dot_1_input_axes=self.dot_1_input_axes,
            dot_2_input_axes=self.dot_2_input_axes, kernel_1_axes=self.kernel_axes_1,
            kernel_2_axes=self.kernel_axes_2, ffn1_ckpt_name=self.ffn1_ckpt_name,
            ffn2_ckpt_name=self.ffn2_ckpt_name, activation_type=tuple(self.activations),
            activation_params=self.activation_params, quantizer_sets=tuple(quantizers),
        ), None  # fmt: skip
