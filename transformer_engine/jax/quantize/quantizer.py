# SPDX-License-Identifier: Apache-2.0
"""Quantizers: pytrees that say how a tensor is cast, and hold the state of delayed scaling."""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import get_opaque_trace_state

from transformer_engine.common import absent, recipe
from transformer_engine.jax.definitions import casts
from transformer_engine.jax.definitions.scaling_modes import Cast, ScalingMode
from transformer_engine.jax.quantize import state
from transformer_engine.jax.quantize.metadata import QuantizeMeta, QuantizeMetaSet
from transformer_engine.jax.quantize.recipes import QuantizeConfig, cast_of_mode
from transformer_engine.jax.quantize.tensor import (
    QuantizeLayout,
    ScaledTensor,
    ScaledTensor2x,
    quantized_form,
)

__getattr__, __dir__ = absent.attach(globals())


@dataclass
class Quantizer:
    """How a tensor is cast; a pytree without leaves, but for delayed scaling.

    Attributes
    ----------
    cast : Cast
        Mode, dtype and options.
    q_layout : QuantizeLayout
        Forms that `quantize` makes.
    checkpoint_name : str, optional
        Name of the results for the policies of `jax.checkpoint`.
    """

    cast: Cast
    q_layout: QuantizeLayout = QuantizeLayout.ROWWISE_COLWISE
    checkpoint_name: str | None = None

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_node_class(cls)

    @property
    def scaling_mode(self) -> ScalingMode:
        """Which elements share a scale."""
        return self.cast.mode

    @property
    def q_dtype(self) -> Any:
        """Dtype of the data."""
        return self.cast.dtype

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Split into leaves and the rest."""
        return (), (self.cast, self.q_layout, self.checkpoint_name)

    @classmethod
    def tree_unflatten(cls, rest: tuple, leaves: tuple) -> "Quantizer":
        """Undo `tree_flatten`."""
        del leaves
        return cls(*rest)

    def use(self) -> tuple[state.Use | None, int]:
        """State that a call of a layer needs, with the number of the call among those of it."""
        return None, 0

    def _scale(self, x: Array) -> Array | None:
        """Scale to cast `x` with, where it is not that of `x` itself."""
        del x
        return None

    def quantize(
        self,
        x: Array,
        is_rowwise: bool | None = None,
        is_colwise: bool | None = None,
        dq_dtype: Any = None,
        flatten_axis: int = -1,
    ) -> ScaledTensor:
        """Cast a tensor.

        Parameters
        ----------
        x : Array
            In a float dtype, at least two dims.
        is_rowwise, is_colwise : bool, optional
            Forms to make, by default those of `q_layout`.
        dq_dtype : dtype, optional
            Of what the result is dequantized to; by default that of `x`.
        flatten_axis : int
            First dim of the second group of dims: a row-wise form has its tiles along these.
        """
        rows = self.q_layout.has_rowwise if is_rowwise is None else is_rowwise
        columns = self.q_layout.has_colwise if is_colwise is None else is_colwise
        if not (rows or columns):
            raise ValueError("quantize: neither is_rowwise nor is_colwise")
        scale, dtype = self._scale(x), dq_dtype or x.dtype
        forms = [
            named(quantized_form(x, self.cast, scale, way, flatten_axis, dtype), self)
            for way, wanted in ((False, rows), (True, columns))
            if wanted
        ]
        return forms[0] if len(forms) == 1 else ScaledTensor2x(*forms)


def named(tree: Any, quantizer: "Quantizer") -> Any:
    """A result with the quantizer's name for the policies of `jax.checkpoint`."""
    if quantizer.checkpoint_name is None:
        return tree
    return jax.tree.map(lambda leaf: checkpoint_name(leaf, quantizer.checkpoint_name), tree)


@dataclass
class CurrentScaleQuantizer(Quantizer):
    """One scale for a tensor, of the tensor itself."""


@dataclass
class BlockScaleQuantizer(Quantizer):
    """Scales of tiles or rows, each of its own elements."""


@dataclass
class NVFP4Quantizer(Quantizer):
    """E2M1 with an E4M3 scale for 16 values, or squares of them, and an amax for the tensor.

    Dense layers cast by it within their plans; by itself it casts nothing (NotImplementedError).

    Attributes
    ----------
    stochastic_rounding_rng_state : Array, optional
        uint32 [.., 4], whose first four are a seed and an offset; for a cast that rounds
        stochastically.
    """

    stochastic_rounding_rng_state: Array | None = None

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Split into leaves and the rest."""
        rest = (self.cast, self.q_layout, self.checkpoint_name)
        return (self.stochastic_rounding_rng_state,), rest

    @classmethod
    def tree_unflatten(cls, rest: tuple, leaves: tuple) -> "NVFP4Quantizer":
        """Undo `tree_flatten`."""
        return cls(*rest, *leaves)

    def use(self) -> tuple[state.Drawn | None, int]:
        """Return the random pair of a call."""
        drawn = self.stochastic_rounding_rng_state
        if drawn is None or not self.cast.rounds_at_random:
            return None, 0
        return state.Drawn(drawn.reshape(-1)[:4].astype(jnp.uint32)), 0


@dataclass
class DelayedScaleQuantizer(Quantizer):
    """One scale for a tensor, of the amaxes of earlier steps.

    Attributes
    ----------
    margin : int
        Powers of two left free below the largest number; it is that of `cast`.
    amax_compute_algo : {"max", "most_recent"}
        Which amaxes of the history make the scale.
    scale : Array
        fp32 [1].
    amax_history : Array
        fp32 [length]: the newest amax comes last, and slot 0 is 0 between steps.
    """

    amax_compute_algo: str = "max"
    scale: Array = field(default_factory=lambda: jnp.ones(1, jnp.float32))
    amax_history: Array = field(default_factory=lambda: jnp.zeros(1024, jnp.float32))

    def __post_init__(self) -> None:
        self._reading: list[Any] | None = None

    @property
    def margin(self) -> int:
        """Powers of two left free below the largest number."""
        return self.cast.margin

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Split into leaves and the rest."""
        rest = (self.cast, self.q_layout, self.checkpoint_name, self.amax_compute_algo)
        return (self.scale, self.amax_history), rest

    @classmethod
    def tree_unflatten(cls, rest: tuple, leaves: tuple) -> "DelayedScaleQuantizer":
        """Undo `tree_flatten`."""
        return cls(*rest, *leaves)

    @property
    def _rule(self) -> state.Rule:
        return state.Rule(self.cast, self.amax_compute_algo)

    def use(self) -> tuple[state.Use, int]:
        """Return what a call needs of the state; calls in one trace share a reading (`state`).

        ValueError for more calls than a reading takes.
        """
        if not isinstance(self.scale, jax.core.Tracer):
            return state.look(self.scale, self.amax_history, self._rule), 0
        trace = get_opaque_trace_state()
        if self._reading is None or self._reading[0] != trace:
            made = state.read(self.scale, self.amax_history, self._rule)
            self._reading = [trace, made, 0]
        _, made, slot = self._reading
        if slot == state.USES:
            raise ValueError(f"one quantizer is used more than {state.USES} times in one function")
        self._reading[2] += 1
        return made, slot

    def usable_scale(self) -> Array:
        """The scale, fp32 [1], to cast with; ValueError or NaN where the state is a sum."""
        return state.usable_scale(self.scale, self.amax_history, self._rule)

    def _scale(self, x: Array) -> Array:
        del x
        return self.usable_scale()

    def quantize(self, x: Array, *args: Any, **kwargs: Any) -> ScaledTensor:
        """Cast a tensor with the scale, as `Quantizer.quantize`; then `update` with its amax."""
        made = super().quantize(x, *args, **kwargs)
        self.update(casts.amax(x))
        return made

    def update(self, new_amax: Array) -> None:
        """Replace scale and history by those after a step that saw an amax, fp32 [1]."""
        self.scale, self.amax_history = casts.next_state(
            new_amax, self._scale(new_amax), self.amax_history, *self._rule
        )


_CLASSES = {
    ScalingMode.DELAYED_TENSOR_SCALING: DelayedScaleQuantizer,
    ScalingMode.CURRENT_TENSOR_SCALING: CurrentScaleQuantizer,
    ScalingMode.NVFP4_1D_SCALING: NVFP4Quantizer,
    ScalingMode.NVFP4_2D_SCALING: NVFP4Quantizer,
}


@jax.tree_util.register_pytree_node_class
@dataclass
class QuantizerSet:
    """Quantizers of the operands of a layer; None: that operand stays in high precision.

    Attributes
    ----------
    x, kernel, dgrad : Quantizer or None
        Of the input, the weight and the gradient of the output.
    backward_override : {None, "high_precision", "dequantized"}
        Of the recipe: what the products of the backward multiply.
    fast : int
        Products with fast accumulation on CUDA, ``_core.LINEAR_FAST_*``.
    """

    x: Quantizer | None = None
    kernel: Quantizer | None = None
    dgrad: Quantizer | None = None
    backward_override: str | None = None
    fast: int = 0

    def tree_flatten(self) -> tuple[tuple, tuple]:
        """Split into leaves and the rest."""
        return (self.x, self.kernel, self.dgrad), (self.backward_override, self.fast)

    @classmethod
    def tree_unflatten(cls, rest: tuple, leaves: tuple) -> "QuantizerSet":
        """Undo `tree_flatten`."""
        return cls(*leaves, *rest)


noop_quantizer_set = QuantizerSet()
"""No quantization."""


class QuantizerFactory:
    """Makes quantizers."""

    @staticmethod
    def create(
        n_quantizers: int = 1,
        scaling_mode: ScalingMode | None = None,
        q_dtype: Any = None,
        q_layout: QuantizeLayout | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Make a quantizer, or a tuple of them; None for ScalingMode.NO_SCALING.

        Parameters
        ----------
        n_quantizers : int
            How many.
        scaling_mode : ScalingMode
            Which elements share a scale.
        q_dtype : dtype
            float8_e4m3fn or float8_e5m2; of NVFP4 float4_e2m1fn.
        q_layout : QuantizeLayout, optional
            Forms to make; both by default.
        n_groups : None
            Groups of a tensor: NotImplementedError for a number.
        checkpoint_name : str, optional
            Name of results for the policies of `jax.checkpoint`.
        **kwargs :
            Fields of the quantizer: `cast`, `scale`, `amax_history`, `amax_compute_algo`,
            `stochastic_rounding_rng_state`.
        """
        if n_groups:
            raise NotImplementedError(f"QuantizerFactory.create: n_groups={n_groups}: groups of a "
                                      "tensor are not built; quantize them one by one")  # fmt: skip
        mode = scaling_mode or ScalingMode.NO_SCALING
        layout = q_layout or QuantizeLayout.ROWWISE_COLWISE
        made = []
        for _ in range(n_quantizers):
            if mode is ScalingMode.NO_SCALING:
                made.append(None)
                continue
            own = dict(kwargs)
            cast = own.pop("cast", None) or cast_of_mode(mode, q_dtype, own.pop("margin", 0))
            made.append(_CLASSES.get(mode, BlockScaleQuantizer)(
                cast, layout, checkpoint_name, **own))  # fmt: skip
        return made[0] if n_quantizers == 1 else tuple(made)

    @staticmethod
    def create_set(
        n_quantizer_sets: int = 1,
        scaling_mode: ScalingMode | None = None,
        fwd_dtype: Any = None,
        bwd_dtype: Any = None,
        is_2x2x: bool | None = None,
        n_groups: int | None = None,
        checkpoint_name: str | None = None,
        fp8_recipe: recipe.Recipe | None = None,
        quantize_meta_set: QuantizeMetaSet | None = None,
    ) -> Any:
        """Make a quantizer set, or a tuple of them.

        Parameters
        ----------
        n_quantizer_sets : int
            How many.
        scaling_mode : ScalingMode, optional
            Of all operands, with `fwd_dtype` and `bwd_dtype`, in place of a recipe.
        fwd_dtype, bwd_dtype : dtype, optional
            Of input and weight, and of the gradient; E4M3 and E5M2 by default.
        is_2x2x : bool, optional
            Whether quantizers make both forms by default; they do.
        n_groups : None
            As of `create`.
        checkpoint_name : str, optional
            As of `create`.
        fp8_recipe : Recipe, optional
            By default that of the `autocast` in force; without one the set is empty.
        quantize_meta_set : QuantizeMetaSet, optional
            Scales and histories of delayed scaling, fresh ones by default; of NVFP4 random states.
        """
        from transformer_engine.jax.quantize.helper import get_global_quantize_recipe

        if fp8_recipe is not None and scaling_mode is not None:
            raise ValueError("create_set: pass fp8_recipe or scaling_mode, not both")
        if scaling_mode is None:
            config = QuantizeConfig(fp8_recipe or get_global_quantize_recipe())
        else:
            config = QuantizeConfig.of_mode(scaling_mode, fwd_dtype, bwd_dtype)
        layout = QuantizeLayout.ROWWISE if is_2x2x is False else QuantizeLayout.ROWWISE_COLWISE
        metas = quantize_meta_set or QuantizeMetaSet()
        made = []
        for _ in range(n_quantizer_sets):
            own = [
                QuantizerFactory._of(config, cast, meta, layout, n_groups, checkpoint_name)
                for cast, meta in zip(config.casts, metas, strict=True)
            ]
            made.append(QuantizerSet(*own, config.backward_override, config.fast))
        return made[0] if n_quantizer_sets == 1 else tuple(made)

    @staticmethod
    def _of(
        config: QuantizeConfig,
        cast: Cast | None,
        meta: QuantizeMeta | None,
        layout: QuantizeLayout,
        n_groups: int | None,
        name: str | None,
    ) -> Quantizer | None:
        """Make the quantizer of one operand."""
        if cast is None:
            return None
        fields: dict[str, Any] = {"cast": cast}
        if cast.mode is ScalingMode.DELAYED_TENSOR_SCALING:
            fields |= {"amax_compute_algo": config.amax_compute_algo}
            meta = meta or QuantizeMeta.fresh(config.amax_history_len)
            fields |= {"scale": meta.scale, "amax_history": meta.amax_history}
        if cast.mode.is_nvfp4_scaling and meta is not None:
            fields["stochastic_rounding_rng_state"] = meta.stochastic_rounding_rng_state
        return QuantizerFactory.create(1, cast.mode, cast.dtype, layout, n_groups, name, **fields)
