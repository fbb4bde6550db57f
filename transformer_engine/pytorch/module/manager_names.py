# SPDX-License-Identifier: Apache-2.0
"""Names of `FP8GlobalStateManager` for programs that do by hand what regions and modules do."""

import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.execution import plan_ops
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.module.fp8_meta import BUFFER_INFO, Fp8Meta, live_values, unique_key
from transformer_engine.pytorch.scaling_state.arenas import identity_of
from transformer_engine.pytorch.scaling_state.autocast import autocast, get_default_recipe
from transformer_engine.pytorch.torchside.modes import real_tensors

_DIRECTIONS = {True: "forward", False: "backward"}


class _Queue:
    """Forward scales and histories of one module: those copied, and the newest while one is in."""

    def __init__(self) -> None:
        self.copied: deque[tuple[Tensor, Tensor]] = deque()
        self.newest: tuple[Tensor, Tensor] | None = None


_QUEUES: "weakref.WeakKeyDictionary[Any, _Queue]" = weakref.WeakKeyDictionary()


def _entered() -> list:
    """Regions of `autocast_enter` that the thread is in, the innermost last."""
    entered = current_state().entered
    while entered and entered[-1][0]._outer is None:  # an error or an interrupt ended the call
        entered.pop()
    return entered


def _forward_state(what: str, fp8_meta: Any) -> tuple[_Queue, tuple[Tensor, Tensor] | None]:
    """Queue of the module of an ``fp8_meta``, and its (scale, history) or None."""
    if not isinstance(fp8_meta, Fp8Meta):
        raise TypeError(
            f"FP8GlobalStateManager.{what}: fp8_meta: {type(fp8_meta).__name__} object, expected "
            "the fp8_meta of a module"
        )
    module = fp8_meta._module
    values = live_values(module)
    return _QUEUES.setdefault(module, _Queue()), None if values is None else values["forward"]


def _write(state: tuple[Tensor, Tensor], values: tuple[Tensor, Tensor]) -> None:
    with real_tensors():
        for to, value in zip(state, values, strict=True):
            to.copy_(value)
    plan_ops.scaling_updates(made=True)


class ManagerNames:
    """Regions that are entered and left by calls, keys of scaling state, recompute by hand."""

    # ---- regions ---------------------------------------------------------------------------------

    @classmethod
    def autocast_enter(
        cls,
        enabled: bool = False,
        calibrating: bool = False,
        fp8_recipe: Recipe | None = None,
        fp8_group: Any = None,
        _graph: bool = False,
    ) -> None:
        """Enter a region of this thread, as `autocast` of the same arguments does.

        `_graph` says that a CUDA graph is captured, which `autocast_exit` is told, too.
        """
        del _graph
        region = autocast(enabled, calibrating, fp8_recipe, fp8_group)
        _entered().append((region, bool(enabled)))  # before: no interrupt loses an active one
        region.__enter__()

    @classmethod
    def autocast_exit(cls, enabled: bool, _graph: bool) -> None:
        """Leave the region that `autocast_enter` has entered last.

        What was in force before is again, and scales are updated as `autocast` does; with `_graph`
        none are. RuntimeError where none was entered, or with another `enabled`.
        """
        entered = _entered()
        what = f"FP8GlobalStateManager.autocast_exit(enabled={enabled!r})"
        if not entered:
            raise RuntimeError(f"{what}: no region is active; call autocast_enter first")
        region, was = entered[-1]
        if was != bool(enabled):
            raise RuntimeError(f"{what}: the innermost region was entered with enabled={was}")
        region.__exit__(GeneratorExit if _graph else None, None, None)  # an error updates nothing
        entered.pop()

    # ---- keys ------------------------------------------------------------------------------------

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        """Key of a direction's scaling state in the ``fp8_meta`` of a module."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def get_fwd_bwd_key(cls, forward: bool = True) -> str:
        """Name of a direction: "forward" or "backward"."""
        return _DIRECTIONS[bool(forward)]

    @classmethod
    def get_buffer_info(cls) -> str:
        """Key in the ``fp8_meta`` of a module of where its scaling state lies.

        Under it stands of each direction the key that `get_key_in_buffer` gives and the first slot
        in that memory, once there is state.
        """
        return BUFFER_INFO

    @classmethod
    def get_unique_autocast_key(cls, recipe: Recipe | None = None, group: Any = None) -> str:
        """Text of what slots have to have in common: a recipe (None: the default) and a group."""
        recipe = get_default_recipe() if recipe is None else recipe
        return unique_key(identity_of(recipe), group)

    @classmethod
    def get_key_in_buffer(cls, forward: bool, fp8_recipe: Recipe | None, fp8_group: Any) -> str:
        """Text of a direction, a recipe and a group: slots of one text are updated together."""
        unique = cls.get_unique_autocast_key(fp8_recipe, fp8_group)
        return f"{cls.get_fwd_bwd_key(forward)}_{unique}"

    @classmethod
    def split_key_in_buffer(cls, key: str) -> tuple[bool, str]:
        """Of what `get_key_in_buffer` gives: (forward, `get_unique_autocast_key`).

        ValueError for another text.
        """
        direction, _, unique = str(key).partition("_")
        if direction not in _DIRECTIONS.values() or ":" not in unique:
            raise ValueError(
                f"FP8GlobalStateManager.split_key_in_buffer: key={key!r}, expected what "
                "get_key_in_buffer gives"
            )
        return direction == "forward", unique

    @classmethod
    def reduce_tensor_across_group_op_max(cls, tensor: Tensor, group: Any) -> None:
        """Maximum over the processes of a group (None: all), in place; nothing for one process."""
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX, group=group)

    # ---- recompute -------------------------------------------------------------------------------

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: Any) -> None:
        """Keep the forward scales and amax histories of a module for a forward that is repeated.

        Nothing without delayed scaling. Checkpoints do it by themselves (`checkpoint`,
        `activation_recompute_forward`): for programs that repeat a forward in another way.
        """
        queue, state = _forward_state("copy_forward_fp8_meta_tensors_for_recompute", fp8_meta)
        if state is not None:
            queue.copied.append((state[0].clone(), state[1].clone()))

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: Any) -> None:
        """Put the oldest of these copies in force, until `restore_fp8_meta_tensors`.

        RuntimeError where there is none, or another one is in force, or its history has another
        length by now.
        """
        what = "get_old_fp8_meta_tensors_for_recompute"
        queue, state = _forward_state(what, fp8_meta)
        if state is None:
            return
        if queue.newest is not None:
            raise RuntimeError(
                f"FP8GlobalStateManager.{what}: a copy is in force: call restore_fp8_meta_tensors "
                "first"
            )
        if not queue.copied:
            raise RuntimeError(
                f"FP8GlobalStateManager.{what}: no copy is left: call "
                "copy_forward_fp8_meta_tensors_for_recompute in each forward"
            )
        old = queue.copied.popleft()
        if old[1].shape != state[1].shape:
            raise RuntimeError(
                f"FP8GlobalStateManager.{what}: the copy has a history of {len(old[1])} steps, the "
                f"module one of {len(state[1])}: amax_history_len has changed since; it is dropped"
            )
        queue.newest = state[0].clone(), state[1].clone()
        _write(state, old)

    @classmethod
    def restore_fp8_meta_tensors(cls, fp8_meta: Any) -> None:
        """Put the newest scales and histories in force again; RuntimeError where they are."""
        what = "restore_fp8_meta_tensors"
        queue, state = _forward_state(what, fp8_meta)
        if state is None:
            return
        if queue.newest is None:
            raise RuntimeError(
                f"FP8GlobalStateManager.{what}: no copy is in force: call "
                "get_old_fp8_meta_tensors_for_recompute first"
            )
        newest, queue.newest = queue.newest, None
        _write(state, newest)
