# SPDX-License-Identifier: Apache-2.0
"""`autocast`: the region in which modules run in FP8."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine import _core
from transformer_engine.common.contexts import active
from transformer_engine.common.recipe import DelayedScaling, Recipe
from transformer_engine.pytorch.execution import recompute
from transformer_engine.pytorch.execution.thread_state import RegionState, current_state
from transformer_engine.pytorch.scaling_state import arenas, reduction, scaling
from transformer_engine.pytorch.torchside.modes import (
    beside_graph,
    constant_in_graphs,
    exporting,
    graph_task,
)


def get_default_recipe() -> Recipe:
    """Recipe of an `autocast` that names none: a new `DelayedScaling()`."""
    return DelayedScaling()


_TRACED_DEFAULT: list[Recipe] = []
"""The default recipe of regions inside graphs: a graph can read a recipe, but not make one."""


@constant_in_graphs
def _ensure_traced_default() -> None:
    """Make it while a graph is traced, outside of the graph."""
    if not _TRACED_DEFAULT:
        _TRACED_DEFAULT.append(get_default_recipe())


def _updates(calibrating: bool) -> bool:
    """Return whether leaving a region updates scales: gradients or calibration, no recompute."""
    if torch.compiler.is_compiling():
        return (calibrating or torch.is_grad_enabled()) and not exporting()
    if graph_task() != -1:
        return False  # a forward inside a backward repeats an earlier one
    return calibrating or torch.is_grad_enabled() or recompute.in_reentrant_forward()


def _checked_flag(name: str, value: Any) -> bool:
    """A bool argument of `autocast`: what is true without being meant as a bool is a slip."""
    if value is None or isinstance(value, int) or hasattr(value, "item"):  # numpy's, and tensors
        return bool(value)
    if isinstance(value, Recipe) or (isinstance(value, type) and issubclass(value, Recipe)):
        fix = "give the recipe by name, autocast(recipe=...)"
    elif callable(value):
        fix = "a decorator is written with parentheses, @autocast()"
    else:
        fix = "give True or False"
    raise TypeError(f"autocast: {name}={value!r}: expected a bool; {fix}")


def _checked_recipe(recipe: Any) -> Recipe | None:
    """The `recipe` argument: an object of a class of recipes."""
    if recipe is None or (isinstance(recipe, Recipe) and type(recipe) is not Recipe):
        return recipe
    if recipe is Recipe or type(recipe) is Recipe:
        raise TypeError(
            "autocast: recipe: Recipe is the base of the recipes and says nothing of scales; give "
            "one of them, say DelayedScaling()"
        )
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(
            f"autocast: recipe: the class {recipe.__name__}, expected a recipe object; write "
            f"{recipe.__name__}()"
        )
    raise TypeError(
        f"autocast: recipe: {type(recipe).__name__} object, expected a recipe, say "
        f"DelayedScaling(), not {recipe!r}"
    )


def _under_either_name(new: str, value: Any, old: str, older: Any) -> Any:
    """The value of an argument that has two names."""
    if value is not None and older is not None:
        raise TypeError(f"autocast: {old} and {new} are the same argument; give one")
    return older if value is None else value


def _refuse_generators(function: Any) -> None:
    """A generator runs in the regions of those who iterate over it, not in that of its call."""
    if not callable(function):
        raise TypeError(f"autocast: {function!r} as a function to decorate: it is not callable")
    for kind in ("isgeneratorfunction", "isasyncgenfunction", "iscoroutinefunction"):
        if getattr(inspect, kind)(function):
            raise TypeError(
                f"autocast: {getattr(function, '__qualname__', function)!r} is suspended and "
                "resumed, so a region around its call would not hold while it runs; use a with "
                "block inside it"
            )


_FIELDS = ("enabled", "calibrating", "recipe", "group", "owes_update", "depth", "region")
"""Fields of its thread's state that a region sets. `region` is the innermost region. Where an outer
region is left before an inner one, `_core.Leaving` hands on the values that the outer one has
saved: the inner one restores them when it is left."""
_TRACED_FIELDS = _FIELDS[:-1]


def _set(state: RegionState, values: tuple) -> None:
    """Set these fields while a graph is traced."""
    for name, value in zip(_TRACED_FIELDS, values, strict=True):
        setattr(state, name, value)


class autocast:  # noqa: N801 - the name that users know
    """Run the modules of this package in FP8 inside a ``with`` block, or in a decorated function.

    The region belongs to the thread that enters it. Regions nest, each with its own recipe; leaving
    one restores what was. When the outermost enabled region is left with gradients on, the scaling
    factors of delayed scaling are updated from the amaxes of the forward passes; those of the
    backward are updated after the backward of the region's first module. A region that is left by
    an exception updates nothing. The forward alone belongs inside the region; run ``backward``
    outside.

    As a decorator, ``@te.autocast(recipe=recipe)``, it gives each call of the function a region of
    its own, also where calls nest or run in several threads.

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
        Processes over which amaxes are reduced at the updates; all of them where None. They run the
        same modules in the same order. An update starts the reduction, and whoever reads the scales
        waits for it: the next region, a backward, a state dict.
    fp8_recipe, fp8_group
        Older names of `recipe` and `amax_reduction_group`.

    Raises
    ------
    TypeError
        `recipe` is not a recipe object, or a recipe stands where a bool belongs; an argument is
        given under both of its names; what is decorated is a generator or a coroutine.
    RuntimeError
        An active region is entered again, or one is left that is not active; the ranks of
        `amax_reduction_group` do not agree on what they reduce.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
    ) -> None:
        self._enabled = _checked_flag("enabled", enabled)
        self._calibrating = _checked_flag("calibrating", calibrating)
        self._recipe = _checked_recipe(
            _under_either_name("recipe", recipe, "fp8_recipe", fp8_recipe)
        )
        self._group = _under_either_name(
            "amax_reduction_group", amax_reduction_group, "fp8_group", fp8_group
        )
        if isinstance(self._group, int | str | list | tuple):
            raise TypeError(
                f"autocast: amax_reduction_group={self._group!r}, expected a "
                "torch.distributed.ProcessGroup, as torch.distributed.new_group returns it, or None"
            )
        self._outer: tuple | None = None  # see `_core.Leaving`

    def __call__(self, function: Callable) -> Callable:
        """Decorate a function or method: each of its calls runs in a region of its own.

        Neither a generator nor a coroutine can be decorated.
        """
        _refuse_generators(function)
        settings = (self._enabled, self._calibrating, self._recipe, self._group)

        @functools.wraps(function)
        def in_region(*args: Any, **kwargs: Any) -> Any:
            with autocast(*settings):
                return function(*args, **kwargs)

        return in_region

    def __enter__(self) -> None:
        """Make this region the thread's innermost one."""
        if self._outer is not None:
            raise active(self)
        recipe, state = self._recipe, current_state()
        traced = torch.compiler.is_compiling()
        if self._enabled or self._calibrating:
            if recipe is None and traced:
                _ensure_traced_default()
                recipe = _TRACED_DEFAULT[0]
            elif recipe is None:
                recipe = get_default_recipe()
            if not traced:
                arenas.own_domain(state)  # now: calls note it before one makes state
                if reduction.STARTED:
                    scaling.settle(state.domain)
        if traced:
            beside_graph(self._enter_in_graph, state, recipe)
            return
        # From here on nothing is called, so nothing can raise: a region is entered or it is not.
        depth = state.depth
        values = (
            state.enabled,
            state.calibrating,
            state.recipe,
            state.group,
            state.owes_update,
            depth,
        )
        self._outer = ((state, _FIELDS, (*values, state.region), "region"),)
        state.region = self
        state.enabled = self._enabled
        state.calibrating = self._calibrating
        state.recipe = recipe
        state.group = self._group
        if depth == 0:
            state.owes_update = True
        state.depth = depth + 1

    def _enter_in_graph(self, state: RegionState, recipe: Recipe | None) -> None:
        outer = [getattr(state, name) for name in _TRACED_FIELDS]
        self._outer = ((state, _TRACED_FIELDS, tuple(outer)),)
        owes, depth = state.owes_update or state.depth == 0, state.depth + 1
        _set(state, (self._enabled, self._calibrating, recipe, self._group, owes, depth))

    def _leave_in_graph(self) -> None:
        for state, _, values in self._outer or ():
            _set(state, values)
        self._outer = None

    @_core.Leaving
    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Restore the outer region; update the forward scales where this was the outermost one."""
        if self._outer is not None:  # a graph is traced
            beside_graph(self._leave_in_graph)
        state = current_state()
        if (
            kind is None
            and state.depth == 0
            and (self._enabled or self._calibrating)
            and _updates(self._calibrating and not self._enabled)
        ):
            scaling.update("forward", state.domain)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    **renamed: Any,
) -> autocast:
    """`autocast` under its older name and argument names.

    `fp8_recipe` is its `recipe`, `fp8_group` its `amax_reduction_group`; these newer names are
    accepted as well.
    """
    unknown = set(renamed) - {"recipe", "amax_reduction_group"}
    if unknown:
        raise TypeError(f"fp8_autocast: unexpected arguments {sorted(unknown)}")
    return autocast(enabled, calibrating, fp8_recipe=fp8_recipe, fp8_group=fp8_group, **renamed)
