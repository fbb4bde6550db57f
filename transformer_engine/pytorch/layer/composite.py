# SPDX-License-Identifier: Apache-2.0
"""`CompositeLayer`: a layer made of modules that programs may wrap in modules of their own."""

from typing import Any

from torch import Tensor

from transformer_engine.common.plan_text import Plan
from transformer_engine.pytorch.attention.problem import AttentionOptions
from transformer_engine.pytorch.layer.traced_layer import call_in_graph, places_in_graph
from transformer_engine.pytorch.module.base import Fp8Module, NativeModule
from transformer_engine.pytorch.module.layer_call import LayerRunner, given_to
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.module.rmsnorm import RMSNorm
from transformer_engine.pytorch.torchside.modes import constant_in_graphs

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}
"""Norms of a layer by the names that its ``normalization`` takes."""


def _no_calls() -> dict[str, Any]:
    """Attributes of a layer that has kept no calls."""
    return {"_calls": None, "_kept_attending": {}, "_by_arguments": {}}


class CompositeLayer(NativeModule):
    """Base of the layers made of linear modules.

    An adapter, LoRA say, takes the place of a linear module, calls it and computes with what it
    returns, which therefore has to be a tensor: a module that was to return its bias for the layer
    to add adds it itself from then on.
    """

    _calls: LayerRunner | None = None
    name: str | None = None

    def _name_of(self, part: str) -> str | None:
        """Name of a module that it makes, by which recipes and messages tell it."""
        return None if self.name is None else f"{self.name}.{part}"

    def __getstate__(self) -> dict:
        """Copy and pickle without calls."""
        return {**super().__getstate__(), **_no_calls()}

    def _replicate_for_data_parallel(self) -> "CompositeLayer":
        """Copy for `torch.nn.DataParallel`, without calls: its parameters are others."""
        made = super()._replicate_for_data_parallel()
        made.__dict__.update(_no_calls())
        return made

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a linear module that is replaced by a foreign one adds its bias."""
        replaced = self.__dict__.get("_modules", {}).get(name)
        super().__setattr__(name, value)
        if isinstance(replaced, LinearBase) and not isinstance(value, LinearBase):
            replaced.add_bias()

    def plans_of(self, *args: Any, **kwargs: Any) -> list[tuple[str, Plan]]:
        """(title, plan) of what a call would run; see `explain`. Changes no state.

        Nothing where the layer would call its modules.
        """
        inp, options = given_to(self, args, kwargs)
        calls = self._calls_of(options)
        if calls is None:
            return []
        before = [(module, module._slots, module._loaded_state) for module in calls.modules]
        made = self._planned_calls(calls, inp, options)
        found = [(name, calls.plans(self, inp, own)) for name, calls, own in made]
        for module, slots, loaded in before:
            module._slots, module._loaded_state = slots, loaded
        return [
            (f"{name}{title}", plan)
            for name, plans in found
            if plans is not None
            for title, plan in (("forward", plans.forward), ("backward", plans.backward))
            if plan is not None
        ]

    def _calls_of(self, options: tuple) -> LayerRunner | None:
        """The calls that are kept of it, for what it is given."""
        del options
        return LayerRunner.of(self)

    # ---- in a graph (see `traced_layer`) ---------------------------------------------------------

    @constant_in_graphs
    def _places_in_graph(self, given: tuple) -> str:
        return places_in_graph(self, given)

    @constant_in_graphs
    def _call_in_graph(self, *arguments: Any) -> str:
        return call_in_graph(self, *arguments)

    def _options_in_graph(self, given: tuple) -> Any:
        """Options of a call, of which a graph has made constants; None: no plan holds them."""
        return tuple(AttentionOptions(*each) for each in given)

    # ---- what its calls depend on ----------------------------------------------------------------

    def _first_microbatch(self, options: tuple) -> bool | None:
        """``is_first_microbatch`` of a call."""
        return options[0].is_first_microbatch

    def _count_of_branches(self) -> int:
        """How many branches of it may run as calls of their own (see `layer_call`)."""
        return 1

    def _planned_calls(self, calls: LayerRunner, inp: Tensor, options: tuple) -> list[tuple]:
        """(prefix of titles, calls, their options) of each call that a call of the layer makes."""
        del inp
        return [("", calls, options)]

    def reset_fp8_meta_tensors(self) -> None:
        """Start again from scale 1 and an empty history in every linear layer."""
        for module in self.modules():
            if isinstance(module, Fp8Module):
                module.reset_fp8_meta_tensors()
