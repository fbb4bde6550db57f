# SPDX-License-Identifier: Apache-2.0
"""Calibration: a forward in high precision that finds scales for FP8."""

from typing import Any

import torch

from transformer_engine import _core
from transformer_engine.pytorch.execution.thread_state import RegionState
from transformer_engine.pytorch.module.operands import CallTensors
from transformer_engine.pytorch.torchside.device import prepare_device
from transformer_engine.pytorch.torchside.modes import graph_task

_obeying_quantize = _core.obeying("quantize")


def record_amaxes(module: Any, state: RegionState, tensors: CallTensors) -> None:
    """Record the amaxes of what a forward of a module would have cast, in a calibrating region."""
    recipe = state.recipe
    if recipe is None or not recipe.delayed():
        return
    if graph_task() != -1:
        return  # the recompute of a forward that has recorded them
    inp = tensors.input
    prepare_device(inp.device)
    slots = module._slots_for(recipe, state.group, inp.device)
    with torch.no_grad():
        for part, operand in enumerate(module._calibration_inputs(tensors)):
            weight = torch.cat(tensors.parts[part].weights)
            for offset, tensor in enumerate((operand, weight)):
                slot = slots.forward_slot + 3 * part + offset
                _obeying_quantize(tensor.detach(), amax=slots.forward_history[0, slot : slot + 1])
