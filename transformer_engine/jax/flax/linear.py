# SPDX-License-Identifier: Apache-2.0
"""Linear layers, norms, and the two in one, as modules of Flax."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from transformer_engine.common import recipe as recipes
from transformer_engine.jax.attention_calls import pair_of
from transformer_engine.jax.dense import dense
from transformer_engine.jax.flax.parameters import (
    _canonicalize_tuple,
    _normalize_axes,
    adapted,
    default_kernel_init,
    norm_parameters,
    parameter,
)
from transformer_engine.jax.layernorm import canonicalize_norm_type, layernorm
from transformer_engine.jax.layernorm_dense import layernorm_dense
from transformer_engine.jax.quantize import (
    NVTE_FP8_COLLECTION_NAME,
    QuantizeConfig,
    QuantizeMeta,
    QuantizeMetaSet,
    QuantizerFactory,
    QuantizerSet,
    get_global_quantize_recipe,
    get_quantize_config_with_recipe,
)
from transformer_engine.jax.sharding import with_sharding_constraint_by_logical_axes
from transformer_engine.jax.softmax import SoftmaxFusionType, softmax

__all__ = [
    "DenseGeneral",
    "LayerNorm",
    "LayerNormDenseGeneral",
    "Softmax",
    "TransformerEngineBase",
    "make_dot_general_cls",
    "wrap_function_in_te_state_module",
]

Initializer = Callable[..., Array]
_STREAM = "sr_rng"  # of random keys, of stochastic rounding


class Softmax(nn.Module):
    """Softmax of scaled scores, fp32 inside.

    Attributes
    ----------
    scale_factor : float, default 1
        What scores are multiplied by.
    softmax_fusion_type : SoftmaxFusionType
        Whether there is a mask, and which.
    """

    scale_factor: float = 1.0
    softmax_fusion_type: SoftmaxFusionType = SoftmaxFusionType.SCALED

    @nn.compact
    def __call__(self, inputs: Array, mask: Array | None = None, bias: Array | None = None):
        """Return probabilities in the dtype of the scores.

        Parameters
        ----------
        inputs : Array
            Scores [batch, heads, queries, keys].
        mask : Array, optional
            [batch, 1, queries, keys]; 1 hides a key.
        bias : Array, optional
            Joins the scaled scores.
        """
        if bias is None:
            return softmax(inputs, mask, self.scale_factor, self.softmax_fusion_type)
        logits = (inputs * self.scale_factor + bias).astype(inputs.dtype)
        return softmax(logits, mask, 1.0, self.softmax_fusion_type)


def random_metas(module: nn.Module, config: QuantizeConfig) -> QuantizeMetaSet | None:
    """State of the rounding of gradients; None where it needs none, or there is no stream."""
    if not config.rounds_at_random or not module.has_rng(_STREAM):
        return None
    pair = pair_of(module.make_rng(_STREAM))
    return QuantizeMetaSet(grad=QuantizeMeta(stochastic_rounding_rng_state=pair))


class TransformerEngineBase(nn.Module):
    """Base of modules that cast operands: it makes their quantizers."""

    def generate_quantizer_set(
        self,
        postfix: str = "",
        variable_collection: str | None = None,
        quantization_checkpoint_name: str | None = None,
        fp8_recipe: recipes.Recipe | None = None,
        n_groups: int | None = None,
    ) -> QuantizerSet:
        """Make the quantizers of a linear layer; under delayed scaling of variables of the module.

        Variables are ``x``, ``kernel`` and ``grad``, each with `postfix` and ``_scale`` fp32 [1]
        or ``_amax_history`` fp32 [length]. They are only read: their "gradient" is their next
        value. Under NVFP4 gradients are rounded by numbers of the stream ``sr_rng``.

        Parameters
        ----------
        postfix : str, optional
            Distinguishes the linear layers of a module.
        variable_collection : str, optional
            Collection of the variables; "fp8_metas" by default.
        quantization_checkpoint_name : str, optional
            Name of the casts for policies of `jax.checkpoint`.
        fp8_recipe : Recipe, optional
            By default that of the `autocast` in force; without one nothing is cast.
        n_groups : int, optional
            Not there yet.
        """
        config = get_quantize_config_with_recipe(fp8_recipe or get_global_quantize_recipe())
        if config.has_state:
            collection = variable_collection or NVTE_FP8_COLLECTION_NAME
            length = config.amax_history_len
            metas = QuantizeMetaSet(
                *(self._meta(collection, f"{n}{postfix}", length) for n in ("x", "kernel", "grad"))
            )
        else:
            metas = random_metas(self, config)
        return QuantizerFactory.create_set(
            fp8_recipe=config.recipe,
            checkpoint_name=quantization_checkpoint_name,
            quantize_meta_set=metas,
            n_groups=n_groups,
        )

    def _meta(self, collection, name, length):
        """Scale and history of one operand."""
        fresh = QuantizeMeta.fresh(length)
        names = zip(("scale", "amax_history"), fresh, strict=False)
        return QuantizeMeta(
            *(self.variable(collection, f"{name}_{of}", lambda v=v: v).value for of, v in names)
        )


class LayerNorm(nn.Module):
    """Layer or RMS norm over the last dim.

    Attributes
    ----------
    epsilon : float, default 1e-6
        Added to the variance.
    layernorm_type : str, default "layernorm"
        "layernorm" or "rmsnorm".
    zero_centered_gamma : bool, default False
        The factor is 1 + scale.
    scale_init : initializer, optional
        By default ones, or zeros where they are centered at zero.
    scale_axes, bias_axes : tuple of str, default ("embed",)
        Names of the axes.
    bias_init : initializer, default zeros
        Of ``ln_bias``, which an RMS norm does not have.
    dtype : dtype, default float32
        Of the parameters.
    transpose_batch_sequence : bool, default False
        Inputs are [sequence, batch, hidden]; nothing is different.
    """

    epsilon: float = 1e-6
    layernorm_type: str = "layernorm"
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str, ...] = ("embed",)
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str, ...] = ("embed",)
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalize [.., hidden]; the result has the dtype of `x`."""
        gamma, beta = norm_parameters(self, x.shape[-1], x.dtype, self.bias_init, self.bias_axes)
        return layernorm(
            x, gamma, beta, canonicalize_norm_type(self.layernorm_type), self.zero_centered_gamma,
            self.epsilon,
        )  # fmt: skip


def operand_dtype(kernel: Array, dtype: Any, quantizers: QuantizerSet) -> Array:
    """A kernel in the dtype of the input, unless it is cast to FP8 as it is."""
    return kernel if quantizers.kernel is not None else kernel.astype(dtype)


def _dims_of(module: nn.Module, inputs: Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Features of a linear layer, and the dims of its input that it sums over."""
    axis = _normalize_axes(_canonicalize_tuple(module.axis), inputs.ndim)
    return _canonicalize_tuple(module.features), axis


def _operands_of(
    module: nn.Module, inputs: Array, features: tuple[int, ...], axis: tuple[int, ...]
) -> tuple[Array, Array | None, Initializer]:
    """Kernel and bias of a linear layer, and how kernels are drawn."""
    init = module.kernel_init or default_kernel_init()
    shape = (*(inputs.shape[dim] for dim in axis), *features)
    kernel = parameter(module, "kernel", init, module.kernel_axes, shape)
    if not module.use_bias:
        return kernel, None, init
    return kernel, parameter(module, "bias", module.bias_init, module.bias_axes, features), init


class DenseGeneral(TransformerEngineBase):
    """Linear layer over some dims of its input.

    Attributes
    ----------
    features : int or tuple of int
        Sizes of the new dims.
    kernel_init : initializer, optional
        By default variance scaling (1.0, fan_in, truncated normal).
    kernel_axes, bias_axes : tuple of str, default ()
        Names of the axes of ``kernel`` and ``bias``.
    use_bias : bool, default True
        Whether there is a ``bias`` [features].
    bias_init : initializer, default zeros
        Of ``bias``.
    axis : int or tuple of int, default -1
        Dims of the input that are summed over.
    dtype : dtype, default float32
        Of the parameters.
    input_axes : tuple of str, default ()
        Names of the axes of the input.
    transpose_batch_sequence : bool, default False
        Inputs are [sequence, batch, ..].
    quantization_checkpoint_name : str, optional
        Name of the casts for policies of `jax.checkpoint`.
    enable_low_rank_adaptation : bool, default False
        Whether x A B alpha / rank is added to the result. A, ``lora_a_kernel`` [in..,
        features[:-1].., rank], is drawn as the kernel is; B, ``lora_b_kernel`` [features[:-1]..,
        rank, features[-1]], begins as 0.
    low_rank_adaptation_dim : int, default 32
        The rank.
    low_rank_adaptation_alpha : float, optional
        None: the factor is 1.
    """

    features: Iterable[int] | int = 0
    kernel_init: Initializer | None = None
    kernel_axes: tuple[str, ...] = ()
    use_bias: bool = True
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str, ...] = ()
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    input_axes: tuple[str, ...] = ()
    transpose_batch_sequence: bool = False
    quantization_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, inputs: Array) -> Array:
        """Return [other dims of the input.., features..] in the dtype of the input."""
        features, axis = _dims_of(self, inputs)
        kernel, bias, init = _operands_of(self, inputs, features, axis)
        quantizers = self.generate_quantizer_set(
            quantization_checkpoint_name=self.quantization_checkpoint_name
        )
        y = dense(
            inputs,
            operand_dtype(kernel, inputs.dtype, quantizers),
            bias=bias,
            contracting_dims=(axis, tuple(range(len(axis)))),
            transpose_batch_sequence=self.transpose_batch_sequence,
            input_axes=self.input_axes,
            kernel_axes=self.kernel_axes,
            quantizer_set=quantizers,
        )
        return adapted(self, y, inputs, axis, features, init)


class LayerNormDenseGeneral(TransformerEngineBase):
    """Norm, and a linear layer over the last dims of what it makes.

    Attributes
    ----------
    features, kernel_init, kernel_axes, bias_init, bias_axes, axis, dtype, \
transpose_batch_sequence, quantization_checkpoint_name, enable_low_rank_adaptation, \
low_rank_adaptation_dim, low_rank_adaptation_alpha
        As of `DenseGeneral`.
    use_bias : bool, default False
        As of `DenseGeneral`.
    enable_layernorm : bool, default True
        Whether there is a norm.
    layernorm_type, epsilon, zero_centered_gamma, scale_init, scale_axes
        As of `LayerNorm`.
    ln_bias_init, ln_bias_axes
        Of ``ln_bias``.
    return_layernorm_output : bool, default False
        Whether what the norm makes is returned too.
    layernorm_input_axes, dot_input_axes : tuple of str, optional
        Names of the axes of the input, and of what the norm makes.
    depth_scaling : float, optional
        What the result is divided by.
    """

    features: Iterable[int] | int = 0
    enable_layernorm: bool = True
    layernorm_type: str = "layernorm"
    epsilon: float = 1e-6
    zero_centered_gamma: bool = False
    scale_init: Initializer | None = None
    scale_axes: tuple[str, ...] = ("embed",)
    ln_bias_init: Initializer = nn.initializers.zeros
    ln_bias_axes: tuple[str, ...] = ("embed",)
    kernel_init: Initializer | None = None
    kernel_axes: tuple[str, ...] = ()
    use_bias: bool = False
    bias_init: Initializer = nn.initializers.zeros
    bias_axes: tuple[str, ...] = ()
    return_layernorm_output: bool = False
    enable_low_rank_adaptation: bool = False
    low_rank_adaptation_dim: int = 32
    low_rank_adaptation_alpha: float | None = None
    axis: Iterable[int] | int = -1
    dtype: Any = jnp.float32
    transpose_batch_sequence: bool = False
    layernorm_input_axes: tuple[str, ...] | None = None
    dot_input_axes: tuple[str, ...] | None = None
    depth_scaling: float | None = None
    quantization_checkpoint_name: str | None = None

    @nn.compact
    def __call__(self, inputs: Array) -> tuple[Array, Array | None]:
        """Return (result, what the norm made or None), both in the dtype of the input."""
        features, axis = _dims_of(self, inputs)
        norm = canonicalize_norm_type(self.layernorm_type)
        if self.enable_layernorm:
            gamma, beta = norm_parameters(
                self, inputs.shape[-1], inputs.dtype, self.ln_bias_init, self.ln_bias_axes
            )
        kernel, bias, init = _operands_of(self, inputs, features, axis)
        quantizers = self.generate_quantizer_set(
            quantization_checkpoint_name=self.quantization_checkpoint_name
        )
        kernel = operand_dtype(kernel, inputs.dtype, quantizers)
        whole = axis != (inputs.ndim - 1,) or self.enable_low_rank_adaptation
        if self.enable_layernorm and not (whole or self.return_layernorm_output):
            y, made = layernorm_dense(
                inputs, kernel, gamma, beta, bias, norm_type=norm,
                zero_centered_gamma=self.zero_centered_gamma, epsilon=self.epsilon,
                transpose_batch_sequence=self.transpose_batch_sequence,
                layernorm_input_axes=self.layernorm_input_axes,
                dot_input_axes=self.dot_input_axes, kernel_axes=self.kernel_axes,
                quantizer_set=quantizers,
            ), None  # fmt: skip
        else:
            made = with_sharding_constraint_by_logical_axes(inputs, self.layernorm_input_axes)
            if self.enable_layernorm:
                made = layernorm(made, gamma, beta, norm, self.zero_centered_gamma, self.epsilon)
            y = dense(
                made, kernel, bias=bias, contracting_dims=(axis, tuple(range(len(axis)))),
                transpose_batch_sequence=self.transpose_batch_sequence,
                input_axes=self.dot_input_axes, kernel_axes=self.kernel_axes,
                quantizer_set=quantizers,
            )  # fmt: skip
            y = adapted(self, y, made, axis, features, init)
        if self.depth_scaling is not None:
            y = y / jnp.asarray(self.depth_scaling, y.dtype)
        return y, made if self.return_layernorm_output else None


def wrap_function_in_te_state_module(
    f: Callable, quantization_recipe: recipes.Recipe | None = None, name: str | None = None
) -> type[nn.Module]:
    """Make a module of a function that casts operands.

    Parameters
    ----------
    f : callable
        Called with a function that makes a quantizer set, and with the arguments of the module.
    quantization_recipe : Recipe, optional
        By default that of the `autocast` in force.
    name : str, optional
        Ends the name of the class; by default the name of `f`.

    Returns
    -------
    type
        A module, whose scales and histories are in the collection "_overwrite_with_gradient".
    """

    class TEWrapper(TransformerEngineBase):
        """The function, with its quantizers."""

        def generate_quantizer_set(self, postfix: str = "", n_groups: int | None = None):
            """Make the quantizers of one linear layer of the function."""
            return super().generate_quantizer_set(
                postfix=postfix, variable_collection="_overwrite_with_gradient",
                fp8_recipe=quantization_recipe, n_groups=n_groups,
            )  # fmt: skip

        @nn.compact
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            """Call the function."""
            return f(self.generate_quantizer_set, *args, **kwargs)

    TEWrapper.__name__ = TEWrapper.__qualname__ = f"TEWrapper_{name or f.__name__}"
    return TEWrapper


def make_dot_general_cls(quantization_recipe: recipes.Recipe | None) -> type[nn.Module]:
    """Make a module that stands for `jax.lax.dot_general` in modules of Flax.

    It is for ``nn.Dense(features, dot_general=cls())``: contractions without batch dims.

    Parameters
    ----------
    quantization_recipe : Recipe
        How operands are cast; None is that of the `autocast` in force.

    Raises
    ------
    NotImplementedError
        When called, for batch dims.
    """

    def dot_general(
        generate_quantizer_set: Callable,
        x: Array,
        kernel: Array,
        dims: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        precision: Any = None,
        preferred_element_type: Any = None,
    ) -> Array:
        contracting, batch = dims
        if any(batch):
            raise NotImplementedError(f"make_dot_general_cls: batch dims {batch}")
        y = dense(x, kernel, contracting_dims=contracting, quantizer_set=generate_quantizer_set())
        return y if preferred_element_type is None else y.astype(preferred_element_type)

    return wrap_function_in_te_state_module(dot_general, quantization_recipe, "dot_general")
