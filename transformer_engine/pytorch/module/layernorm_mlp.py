# SPDX-License-Identifier: Apache-2.0
"""`LayerNormMLP`: norm, linear, activation, linear in one call."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.graphs import Activation
from transformer_engine.pytorch.module.normed import NormedModule
from transformer_engine.pytorch.module.operands import CallTensors, LinearTensors
from transformer_engine.pytorch.module.parallel import TensorParallel, mark_linear
from transformer_engine.pytorch.module.parameters import (
    bias_to_return,
    checked_dtype,
    device_of,
    functions,
    have_memory,
    make_bias,
    make_weight,
    positive_sizes,
)

__all__ = ["ACTIVATIONS", "LayerNormMLP"]

ACTIVATIONS = _core.activation_names()
"""Names of the activations; those that end in "glu" take two halves."""
_obeying_activation = _core.obeying("activation")
"""Runs the activation as the selected plug-ins do."""

_CLAMPED = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}
"""Parameters of clamped_swiglu and their defaults."""


class LayerNormMLP(TensorParallel, NormedModule):
    """LayerNorm or RMSNorm, a linear layer, an activation and a second linear layer.

    Inside `autocast` norm and activation cast to FP8 themselves, and so do their gradients.

    Parameters
    ----------
    hidden_size : int
        Size of an input and an output sample.
    ffn_hidden_size : int
        Size between activation and second layer.
    eps : float, default 1e-5
        Added to the variance.
    tp_group, tp_size, sequence_parallel, symmetric_ar_type, ub_overlap_ag, ub_overlap_rs, \
ub_overlap_rs_dgrad, ub_bulk_dgrad, ub_bulk_wgrad
        As of `Linear`.
    set_parallel_mode : bool, default False
        The first layer has the mode "column", the second "row". Without it, a rank's part of the
        MLP is a term of a sum that the program makes.
    return_bias : bool, default False
        Return the second layer's bias and leave adding it to the caller.
    get_rng_state_tracker : callable, optional
        As of `Linear`.
    init_method, output_layer_init_method : callable, optional
        Of the first and of the second weight; as of `Linear`.
    bias : bool, default True
        Both layers have biases.
    normalization : {"LayerNorm", "RMSNorm"}
        The norm.
    activation : str, default "gelu"
        gelu (tanh approximation), geglu, qgelu, qgeglu, relu, reglu, srelu, sreglu, silu, swiglu,
        glu or clamped_swiglu. A gated one doubles the outputs of the first layer: the first half is
        activated and multiplied by the second.
    activation_params : dict, optional
        limit (7.0), alpha (1.702) and glu_linear_offset (1.0) of clamped_swiglu.
    fuse_wgrad_accumulation, params_dtype, device, delay_wgrad_compute, name
        As of `Linear`.
    return_layernorm_output : bool, default False
        Return the norm's output too.
    return_layernorm_output_gathered : bool, default False
        As of `LayerNormLinear`.
    seq_length, micro_batch_size : int, optional
        Accepted for programs that pass them; nothing has to be warmed up.
    zero_centered_gamma : bool, default False
        The norm's factor is 1 + gamma, which begins at 0.
    checkpoint : bool, default False
        Keep nothing between the input and the output; the backward repeats norm, first layer and
        activation with the same scales. The gradients are the same, bit for bit.

    Attributes
    ----------
    layer_norm_weight, layer_norm_bias : Parameter
        [hidden_size]; RMSNorm has no bias.
    fc1_weight, fc1_bias : Parameter
        [ffn_hidden_size or twice that, hidden_size], and of the same rows; with tensor parallelism
        a rank's part of the gate, then its part of what is multiplied.
    fc2_weight, fc2_bias : Parameter
        [hidden_size, ffn_hidden_size], [hidden_size]; a rank's part of ffn_hidden_size.
    """

    SLOTS = (6, 4)
    LINEARS = ("fc1_", "fc2_")

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable | None = None,
        tp_group: Any = None,
        tp_size: int = 1,
        init_method: Callable | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: Callable | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
    ) -> None:
        super().__init__()
        self._set_parallel(
            tp_group, tp_size, sequence_parallel=sequence_parallel,
            overlaps=(ub_overlap_ag, ub_overlap_rs), ub_names=("fc1", "fc2"),
            symmetric_ar_type=symmetric_ar_type,
        )  # fmt: skip
        positive_sizes("LayerNormMLP", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        if checkpoint and delay_wgrad_compute:
            raise NotImplementedError(
                "LayerNormMLP: checkpoint=True with delay_wgrad_compute=True is not built: "
                "choose one"
            )
        gradients = (fuse_wgrad_accumulation, delay_wgrad_compute)
        self._begin(name, (bias, return_bias), gradients)
        returned = return_layernorm_output, return_layernorm_output_gathered
        self._set_norm(normalization, eps, zero_centered_gamma, returned)
        self.hidden_size = hidden_size
        self.ffn_hidden_size = ffn_hidden_size
        self._share(ffn_hidden_size, "ffn_hidden_size")
        self.set_parallel_mode = bool(set_parallel_mode)
        self.checkpoint = bool(checkpoint)
        self.activation = activation
        self.activation_spec = _activation(activation, activation_params)
        self._init_methods = (init_method, output_layer_init_method)
        methods = {"output_layer_init_method": output_layer_init_method}
        methods["get_rng_state_tracker"] = get_rng_state_tracker
        functions("LayerNormMLP", init_method=init_method, **methods)
        self._rng = (get_rng_state_tracker, None)
        device, dtype = device_of(device), checked_dtype("LayerNormMLP", params_dtype)
        self._make_norm(hidden_size, device, dtype)
        for prefix, sizes in zip(self.LINEARS, self._sizes(), strict=True):
            make_weight(self, prefix, sizes, device, dtype)
            make_bias(self, prefix, sizes[1], device, dtype)
        if have_memory(self):
            self.reset_parameters()
        for prefix, mode in zip(self.LINEARS, ("column", "row"), strict=True):
            biases = [getattr(self, f"{prefix}bias")] if self.use_bias and set_parallel_mode else []
            mark_linear(
                [getattr(self, f"{prefix}weight")], biases, mode, self.sequence_parallel,
                delay_wgrad_compute,
            )  # fmt: skip

    def extra_repr(self) -> str:
        """Sizes and what differs from the defaults."""
        parts = [f"hidden_size={self.hidden_size}", f"ffn_hidden_size={self.ffn_hidden_size}"]
        parts += [f"activation={self.activation}", f"bias={self.use_bias}"]
        if self.checkpoint:
            parts.append("checkpoint=True")
        return ", ".join(parts + self._flags_text())

    # ---- what a call consists of -----------------------------------------------------------------

    def _sizes(self) -> tuple[tuple[int, int], ...]:
        ffn = self.size_per_partition
        rows = 2 * ffn if _is_gated(self.activation) else ffn
        return ((self.hidden_size, rows), (ffn, self.hidden_size))

    @property
    def size_per_partition(self) -> int:
        """The part of `ffn_hidden_size` that a rank has."""
        return self.ffn_hidden_size // self.tp_size

    @property
    def _is_split(self) -> tuple[bool, bool]:
        return self.set_parallel_mode or self.sequence_parallel, self.set_parallel_mode

    def _linear_tensors(self) -> tuple[LinearTensors, ...]:
        first = (self.fc1_bias,) if self.use_bias else ()
        second = (self.fc2_bias,) if self.apply_bias else ()
        return LinearTensors((self.fc1_weight,), first), LinearTensors((self.fc2_weight,), second)

    def _parameter_names(self) -> tuple[str | None, ...]:
        biases = "fc1_bias" if self.use_bias else None, "fc2_bias" if self.apply_bias else None
        return (*self._norm_names(), "fc1_weight", biases[0], "fc2_weight", biases[1])

    def _returned_bias(self, dtype: torch.dtype) -> Tensor:
        return bias_to_return(self.fc2_bias, dtype)

    def _initialisers(self) -> Iterable[tuple[str, Callable | None]]:
        return zip(self.LINEARS, self._init_methods, strict=True)

    def _calibration_inputs(self, tensors: CallTensors) -> list[Tensor]:
        (normed,) = super()._calibration_inputs(tensors)
        (weight,), biases = tensors.parts[0]
        before = torch.nn.functional.linear(normed.to(weight.dtype), weight, *biases)
        kind, limit, alpha, offset = self.activation_spec
        out = before.new_empty(*before.shape[:-1], self.size_per_partition)
        _obeying_activation(
            before, kind=kind, wide=out, limit=limit, alpha=alpha, linear_offset=offset
        )
        return [normed, out]

    def forward(self, inp: Tensor, is_first_microbatch: bool | None = None) -> Any:
        """Apply the MLP to [..., hidden_size]; arguments, dtypes and errors as of `Linear.forward`.

        Returns
        -------
        Tensor or tuple of Tensor
            [..., hidden_size]; then the second bias, not added, with `return_bias`; then the norm's
            output [..., hidden_size] with `return_layernorm_output`.
        """
        out = self._call(inp, is_first_microbatch)
        return self._results(inp, out) if self.return_bias or self.return_layernorm_output else out

    _FORWARD = forward


def _is_gated(activation: str) -> bool:
    return activation.endswith("glu")


def _activation(name: str, params: Mapping[str, float] | None) -> Activation:
    """Read an activation and its parameters."""
    if name not in ACTIVATIONS:
        raise NotImplementedError(
            f"LayerNormMLP: activation={name!r}; there are {', '.join(ACTIVATIONS)}"
        )
    known = _CLAMPED if name == "clamped_swiglu" else {}
    if params is not None and not isinstance(params, Mapping):
        raise TypeError(f"LayerNormMLP: activation_params={params!r}, expected a dict of numbers")
    given = dict(params or {})
    unknown = set(given) - set(known)
    if unknown:
        raise ValueError(
            f"LayerNormMLP: activation_params={given!r}: {name} takes {', '.join(known) or 'none'}"
        )
    values = {**known, **given}
    return Activation(ACTIVATIONS.index(name), *map(float, values.values()))
