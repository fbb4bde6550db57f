# SPDX-License-Identifier: Apache-2.0
"""The plans of a kind of call: found by its key, or made."""

from typing import Any

from transformer_engine import _core
from transformer_engine.common.graphs import CallSpec, LinearSpec, Norm
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.plans import CallPlans, call_plans
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.module import custom
from transformer_engine.pytorch.module.call import Ran
from transformer_engine.pytorch.module.call_key import keep
from transformer_engine.pytorch.module.operands import check_dtypes
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.modes import constant_in_graphs


class Planned:
    """What `linear_base.LinearBase` has to make the plans of its calls."""

    def _plans_for(
        self, key: tuple, quantization: tuple[Quantization, ...], traced: bool
    ) -> CallPlans:
        if traced:
            codes, epsilons = quantization[0].flat()
            self._ensure_plans(key, codes, tuple(map(plan_ops.as_constant, epsilons)))
        plans = self._plans.get(key)
        return self._make_plans(key, quantization) if plans is None else plans

    @constant_in_graphs
    def _ensure_plans(self, key: tuple, *quantization: Any) -> None:
        """Make plans while a graph is traced, outside of the graph."""
        import torch.utils.flop_counter  # noqa: F401 - a graph may run where nothing of ours does

        plan_ops.offer_formulas()
        plans = self._plans.get(key)
        if plans is None:
            found = Quantization.of_flat(*quantization)
            plans = self._make_plans(key, (found,) * len(self.PARTS))
        if key[1] is not None:
            self._keep_recipe(key[1])
        reason = None if plans.quantized else "no FP8 was in force where it was compiled"
        self.__dict__["_ran"] = Ran(plans, reason)

    def _make_plans(self, key: tuple, quantization: tuple[Quantization, ...]) -> CallPlans:
        """Plans for a kind of call; see `_prepare` for the key."""
        count = len(self.PARTS)
        device, _, recompute = key[:3]
        flags, bias_grads = key[3 : 3 + count], key[3 + count : 3 + 2 * count]
        inp, out, norm_dtype, *rest = self._codes(key[3 + 2 * count :])
        parts = []
        for i, sizes in enumerate(self._sizes()):
            weight, bias, grad = rest[3 * i : 3 * i + 3]
            dtypes = (inp if i == 0 else out, weight, bias, out, grad)
            found = custom.in_dtype(quantization[i], out)
            external = self._external[i] | custom.stages_of(found)
            how = (found, flags[i], bias_grads[i], external, 1, self._halves[i])
            parts.append(LinearSpec(*sizes, *dtypes, *how))
        norm = None if self.NORM is None else Norm(self.NORM, norm_dtype, self.eps)
        prepare_device(device)
        spec = CallSpec(tuple(parts), norm, self.activation_spec, recompute, self.PARTS)
        return keep(self._plans, key, call_plans(spec))

    def _codes(self, dtypes: tuple) -> list[int]:
        """Codes of the dtypes of a key; TypeError for what no plan takes."""
        labels = ["inp", "output", "layer_norm_weight"]
        for prefix in self.PARTS:
            labels += [f"{prefix}weight", f"{prefix}bias", f"{prefix}main_grad"]
        check_dtypes(type(self).__name__, labels, dtypes)
        return [_core.dtype_code(dtype) for dtype in dtypes]
