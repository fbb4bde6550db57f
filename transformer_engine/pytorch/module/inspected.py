# SPDX-License-Identifier: Apache-2.0
"""How a module shows itself and its plans, and lets others look at their stages or run them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from transformer_engine.common.plan_text import Plan
from transformer_engine.pytorch.execution.stages import (
    Halves,
    Observer,
    StageBuffers,
    external_steps,
    named,
)
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module.base import Region
from transformer_engine.pytorch.torchside.modes import without_memory

_SHOWN = (
    "zero_centered_gamma",
    "return_layernorm_output",
    "return_bias",
    "fuse_wgrad_accumulation",
    "delay_wgrad_compute",
    "save_original_input",
)


class Inspected:
    """What `linear_base.LinearBase` has for tools (`explain`, `observe`) and for frameworks."""

    def plans_of(
        self, inp: Tensor, is_first_microbatch: bool | None = None
    ) -> list[tuple[str, Plan]]:
        """(title, plan) of what a call would run; see `explain`. Changes no state."""
        state = current_state()
        recipe = self._resolved(state.recipe if state.enabled else None, False)
        slots, loaded = self._slots, self._loaded_state
        region = Region(state, recipe, None, [], False, blank=without_memory(inp))
        tensors, owners = self._promote(inp, recipe)
        call = self._prepare(tensors, region, is_first_microbatch, owners)
        self._slots, self._loaded_state = slots, loaded
        plans = call.plans
        titles = ("forward", plans.forward), ("backward", plans.backward), ("wgrad", plans.wgrad)
        return [(title, plan) for title, plan in titles if plan is not None]

    def observe_stages(self, observer: Observer | None) -> None:
        """Let a function look at the stages of this module's plans from the next call on.

        ``f(stage, buffers, done)`` (see `stages.Observer`) is called before and after each stage;
        None ends it.
        The backward of a call that was observed is observed too. Calls inside compiled graphs are
        not.
        """
        self._observer = observer
        self._bound = {}

    def override_stages(self, **stages: Callable[[StageBuffers], Any] | Halves) -> None:
        """Let Python functions run stages of this module's plans; none restores the built-in ones.

        ``f(buffers)`` by stage name (see `explain`, and `stages.StageBuffers`) fills the buffers
        that the stage writes. ``gemm_output`` is the forward GEMM, ``quantize_input`` the cast of
        the input, ``reduce_amax_input`` stands between measuring and casting (current scaling), and
        so on. `stages.Halves` runs a stage in two halves: other stages of the plan run between
        them. ValueError for a name that is no stage.
        """
        halves = {name: f for name, f in stages.items() if isinstance(f, Halves)}
        self._external = external_steps(stages, self.PARTS)
        self._halves = external_steps(halves, self.PARTS)
        self._stages = named(stages) or None
        self._plans = {}
        self._bound = {}
        self._weight_caches = (None,) * len(self.PARTS)  # other stages have made them

    def _flags_text(self) -> list[str]:
        """Settings that differ from their defaults, for ``repr``."""
        return [f"{name}=True" for name in _SHOWN if getattr(self, name, False)]

    def _label(self) -> str:
        """Class and name, for messages and profilers."""
        kind, name = type(self).__name__, self.name
        return kind if name is None else f"{kind}[{name}]"
