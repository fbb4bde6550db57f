# SPDX-License-Identifier: Apache-2.0
"""`autocast`: the region in which modules run in FP8."""

from typing import Any

import torch

from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch import recompute, scaling
from transformer_engine.pytorch.state import current_state
from transformer_engine.pytorch.torch_ops import constant_in_graphs

__all__ = ["autocast", "fp8_autocast", "get_default_recipe"]


def get_default_recipe() -> Recipe:
    """Recipe of an `autocast` that names none: `DelayedScaling()`.

    Returns
    -------
    Recipe
        A new object.
    """
    return DelayedScaling()


_TRACED_DEFAULT: list[Recipe] = []
"""The default recipe of regions inside graphs: a graph can read a recipe, but not make one."""


@constant_in_graphs
def _ensure_traced_default() -> None:
    """Make it while a graph is traced, outside of the graph."""
    if not _TRACED_DEFAULT:
        _TRACED_DEFAULT.append(get_default_recipe())


def _updates(calibrating: bool) -> bool:
    """Whether leaving a region updates scales: gradients on or calibrating, and no recompute."""
    if torch.compiler.is_compiling():
        return calibrating or torch.is_grad_enabled()
    if torch._C._current_graph_task_id() != -1:
        return False  # a forward inside a backward repeats an earlier one
    return calibrating or torch.is_grad_enabled() or recompute.in_reentrant_forward()


class autocast:  # noqa: N801 - the name that users know
    """Run the modules of this package in FP8 inside a ``with`` block.

    The region belongs to the thread that enters it. Regions nest, each with its own recipe; leaving
    one restores what was. When the outermost enabled region is left with gradients on, the scaling
    factors of delayed scaling are updated from the amaxes of the forward passes; those of the
    backward are updated after the backward of the region's first module. A region that is left by
    an exception updates nothing. The forward alone belongs inside the region; run ``backward``
    outside.

    Parameters
    ----------
    enabled : bool, default True
        Run in FP8.
    calibrating : bool, default False
        With ``enabled=False``: compute in high precision, but collect amaxes and update the scales,
        so that a model can be switched to FP8 afterwards.
    recipe : Recipe, optional
        How to quantize; `get_default_recipe` where None. A compiled function may enter a region,
        but its recipe is made outside.
    amax_reduction_group : torch.distributed.ProcessGroup, optional
        Processes over which amaxes are reduced at the updates; all of them where None.

    Raises
    ------
    TypeError
        `recipe` is not a recipe object.
    RuntimeError
        An active region is entered again.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            raise TypeError(
                f"recipe: {type(recipe).__name__} object, expected a recipe, say DelayedScaling()"
            )
        self._enabled = bool(enabled)
        self._calibrating = bool(calibrating)
        self._recipe = recipe
        self._group = amax_reduction_group
        self._outer: tuple | None = None

    def __enter__(self) -> None:
        """Make this region the thread's innermost one."""
        if self._outer is not None:
            raise RuntimeError(
                "autocast: this region is active already; make another autocast object"
            )
        state = current_state()
        self._outer = (state.enabled, state.calibrating, state.recipe, state.group, state.first)
        recipe = self._recipe
        if recipe is None and (self._enabled or self._calibrating):
            if torch.compiler.is_compiling():
                _ensure_traced_default()
                recipe = _TRACED_DEFAULT[0]
            else:
                recipe = get_default_recipe()
        state.enabled = self._enabled
        state.calibrating = self._calibrating
        state.recipe = recipe
        state.group = self._group
        if state.depth == 0:
            state.first = True
        state.depth += 1

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Restore the outer region; update the forward scales where this was the outermost one."""
        state = current_state()
        outer = self._outer
        self._outer = None
        state.enabled, state.calibrating, state.recipe, state.group, state.first = outer
        state.depth -= 1
        if (
            kind is None
            and state.depth == 0
            and (self._enabled or self._calibrating)
            and _updates(self._calibrating and not self._enabled)
        ):
            scaling.update("forward")


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    **renamed: Any,
) -> autocast:
    """`autocast` under its older name and argument names.

    Parameters
    ----------
    enabled, calibrating : bool
        As of `autocast`.
    fp8_recipe : Recipe, optional
        `recipe` of `autocast`.
    fp8_group : torch.distributed.ProcessGroup, optional
        `amax_reduction_group` of `autocast`.
    **renamed
        ``recipe`` and ``amax_reduction_group``, the newer names of the two above.

    Returns
    -------
    autocast
        A region to enter.
    """
    recipe = renamed.pop("recipe", None)
    group = renamed.pop("amax_reduction_group", None)
    if renamed:
        raise TypeError(f"fp8_autocast: unexpected arguments {sorted(renamed)}")
    if recipe is not None and fp8_recipe is not None:
        raise TypeError("fp8_autocast: fp8_recipe and recipe are the same argument; give one")
    return autocast(
        enabled=enabled,
        calibrating=calibrating,
        recipe=recipe if fp8_recipe is None else fp8_recipe,
        amax_reduction_group=group if fp8_group is None else fp8_group,
    )
