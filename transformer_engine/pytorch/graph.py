# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: the state of modules around a capture."""

from collections.abc import Iterable
from typing import Any

import torch

from transformer_engine.common import absent
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.torchside.device import accelerator, module_of

__getattr__, __dir__ = absent.attach(globals())

_CAPTURING = [False]


def graph_pool_handle() -> Any:
    """A handle of memory that graphs share, of the accelerator's module of torch.

    NotImplementedError where that captures no graphs.
    """
    kind = accelerator()
    make = getattr(module_of(kind), "graph_pool_handle", None)
    if make is None:
        raise NotImplementedError(f"graph_pool_handle: {kind}: torch captures no graphs there")
    return make()


def set_capture_start() -> None:
    """Say that a capture begins."""
    _CAPTURING[0] = True


def set_capture_end() -> None:
    """Say that the capture is over."""
    _CAPTURING[0] = False


def is_graph_capturing() -> bool:
    """Return whether `set_capture_start` was called and `set_capture_end` was not."""
    return _CAPTURING[0]


def save_fp8_tensors(modules: Iterable[torch.nn.Module], recipe: Recipe | None) -> list | None:
    """Copy the scaling state of modules, so that warm-up and capture leave no trace in it.

    Their submodules are included. Returns a list for `restore_fp8_tensors`; None for recipes
    without state.
    """
    if recipe is None or not recipe.delayed():
        return None
    return [
        module._state_values() if hasattr(module, "_state_values") else None
        for root in modules
        for module in root.modules()
    ]


def restore_fp8_tensors(modules: Iterable[torch.nn.Module], fp8_tensors: Any) -> None:
    """Give modules the state that `save_fp8_tensors` copied.

    Values are written in place where a module has state, so that captured graphs see them. A module
    that had none starts again from scale 1. RuntimeError for state of another number of modules.
    """
    if fp8_tensors is None:
        return
    found = [module for root in modules for module in root.modules()]
    if len(found) != len(fp8_tensors):
        raise RuntimeError(
            f"restore_fp8_tensors: fp8_tensors has the state of {len(fp8_tensors)} modules, the "
            f"modules given have {len(found)} with their submodules: give the same modules as to "
            "save_fp8_tensors"
        )
    for module, values in zip(found, fp8_tensors, strict=True):
        if hasattr(module, "_put_state"):
            module._put_state(values)
