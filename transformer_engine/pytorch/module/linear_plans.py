# SPDX-License-Identifier: Apache-2.0
"""Plans of modules with linear layers, by the kinds of their calls."""

from abc import abstractmethod
from typing import Any

from transformer_engine.common import graphs
from transformer_engine.common.graphs import CallSpec, LinearSpec, Norm
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.plans import CallPlans, call_plans
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.module import custom_quantizers
from transformer_engine.pytorch.module.base import Fp8Module
from transformer_engine.pytorch.module.call import LastCall
from transformer_engine.pytorch.module.call_key import KeptPlans, keep
from transformer_engine.pytorch.module.operands import codes_of
from transformer_engine.pytorch.module.parallel import OfOneRank
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.modes import constant_in_graphs


class LinearPlans(OfOneRank, Fp8Module):
    """What of a module with linear layers its plans depend on, and these."""

    LINEARS: tuple[str, ...] = ("",)
    """Prefix of the attribute names of each linear layer's weight and bias."""
    NORM: int | None = None
    """``_core.NORM_*`` of the norm before the first layer."""
    activation_spec: graphs.Activation | None = None
    """The activation between two layers."""
    checkpoint = False
    """The backward repeats the forward up to the last layer."""
    eps = 0.0
    _plans: KeptPlans

    @abstractmethod
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        """(in_features, out_features) of each part."""

    def _plans_for(
        self, key: tuple, quantization: tuple[Quantization, ...], traced: bool
    ) -> CallPlans:
        if traced:
            codes, epsilons = quantization[0].flat()
            name = self._ensure_plans(key, codes, tuple(map(plan_ops.as_constant, epsilons)))
            return getattr(self._plans, name)
        plans = self._plans.by_key.get(key)
        return self._make_plans(key, quantization) if plans is None else plans

    @constant_in_graphs
    def _ensure_plans(self, key: tuple, *quantization: Any) -> str:
        """Make plans while a graph is traced, outside of the graph; their name for the graph."""
        import torch.utils.flop_counter  # noqa: F401 - a graph may run where nothing of ours does

        plan_ops.offer_formulas()
        plans = self._plans.by_key.get(key)
        if plans is None:
            found = Quantization.of_flat(*quantization)
            plans = self._make_plans(key, (found,) * len(self.LINEARS))
        if key[1] is not None:
            self._keep_recipe(repr, key[1])
        reason = None if plans.quantized else "no FP8 was in force where it was compiled"
        self.__dict__["_last_call"] = LastCall(plans, reason)
        return self._plans.name_of(plans)

    def _make_plans(self, key: tuple, quantization: tuple[Quantization, ...]) -> CallPlans:
        """Plans for a kind of call; see `_prepare` for the key."""
        device, _, recompute, norm_flags, together, flags, *dtypes = key
        labels = ["inp", "output", "layer_norm_weight"]
        for prefix in self.LINEARS:
            labels += [f"{prefix}weight", f"{prefix}bias", f"{prefix}main_grad"]
        inp, out, norm_dtype, *rest = codes_of(type(self).__name__, labels, dtypes)
        parts = []
        for i, sizes in enumerate(self._sizes()):
            weight, bias, grad = rest[3 * i : 3 * i + 3]
            dtypes = (inp if i == 0 else out, weight, bias, out, grad)
            found = custom_quantizers.in_dtype(quantization[i], out)
            external = self._external[i] | custom_quantizers.stages_of(found)
            external |= together.reduced(i, len(self.LINEARS), found)
            how = (found, flags[i], external, self._halves[i])
            parts.append(LinearSpec(*sizes, *dtypes, *how))
        norm = None if self.NORM is None else Norm(self.NORM, norm_dtype, self.eps, *norm_flags)
        prepare_device(device)
        wide = getattr(self, "return_layernorm_output_gathered", False)
        of_call = tuple(parts), norm, self.activation_spec, recompute, self.LINEARS
        spec = CallSpec(*of_call, *together, returns_gathered=wide)
        return keep(self._plans, key, call_plans(spec))
