# SPDX-License-Identifier: Apache-2.0
"""`explain`: which stages a module call consists of."""

import sys
from typing import Any, TextIO

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import extent_value
from transformer_engine.pytorch.attention.problem import AttentionOptions, packed_sizes
from transformer_engine.pytorch.execution.thread_state import current_state
from transformer_engine.pytorch.layer.composite import CompositeLayer
from transformer_engine.pytorch.module.linear_base import LinearBase
from transformer_engine.pytorch.torchside.device import (
    is_mxfp8_available,
    is_nvfp4_available,
    without_kernels,
)
from transformer_engine.pytorch.torchside.tensor_kinds import expect_tensor


def _plan_text(title: str, plan: Plan, sizes: tuple[int, ...]) -> list[str]:
    """Lines about a plan; `sizes` are the values of ``_core.SYMBOL_ROWS`` and those behind it."""
    saved, scratch, _ = _core.plan_infer(plan.native, sizes)
    of = (0, *sizes)
    names = _core.dtype_names()
    lines = [f"{title}: plan {plan.native.id}"]
    stages = (f"{s.name} [{'external' if s.external else s.op}]" for s in plan.stages)
    lines.append("  stages:  " + " -> ".join(stages))
    for buffer in plan.described.buffers:
        shape = " x ".join(
            "any" if extent.add == _core.ANY_LENGTH else str(extent_value(extent, of))
            for extent in buffer.shape
        )
        lines.append(f"  {buffer.role:9s} {buffer.name}: {names[buffer.dtype]} [{shape}]")
    lines.append(f"  saved for backward: {saved} bytes; scratch: {scratch} bytes and workspaces")
    return lines


def _sizes(inp: Tensor | None) -> tuple[int, ...]:
    """Rows and the two leading dims, which only plans of three dims name."""
    if inp is None:
        return ()
    dims = tuple(inp.shape[:-1]) if inp.dim() == 3 else (0, 0)
    return inp.shape[:-1].numel(), *dims


def _packed_sizes(given: dict, inp: Tensor) -> tuple[int, ...]:
    """How many packed sequences a call has, and the bounds of their queries and keys."""
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
    source = given.get("encoder_output")
    keys = inp if source is None else source
    options = AttentionOptions(**{name: given.get(name) for name in names})
    return packed_sizes(options, inp.shape[0], keys.shape[0])


def _in_one_piece(module: torch.nn.Module, recipe: Any) -> list[str]:
    """A line where GEMMs may run in pieces beside collectives, and a recipe keeps them from it."""
    parts = [m for m in module.modules() if getattr(m, "sequence_parallel", False)]
    if not (recipe.mxfp8() or recipe.nvfp4()) or not any(any(p.overlaps[1]) for p in parts):
        return []
    return [
        f"GEMMs run in one piece under {type(recipe).__name__}, whatever ub_overlap_ag and "
        "ub_overlap_rs say: each piece would multiply the whole weight out"
    ]


def explain(module: torch.nn.Module, *args: Any, file: TextIO | None = None, **kwargs: Any) -> None:
    """Print the plans that calls of a module's layers run, without running them.

    The arguments are what the forward of the module would be given; the `autocast` region and the
    grad mode are those in force. Prints to `file`, to standard output where that is None. TypeError
    for a module that is none of this package's.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(
            f"explain: module: {type(module).__name__}, expected a module of this package"
        )
    inner = ", ".join(name for name, m in module.named_modules() if isinstance(m, LinearBase))
    if not isinstance(module, LinearBase | CompositeLayer):
        hint = f"; explain its parts: {inner}" if inner else ""
        raise TypeError(f"explain: {type(module).__name__} runs no plans of its own{hint}")
    inp = args[0] if args else kwargs.get("inp", kwargs.get("hidden_states"))
    expect_tensor("explain: input", inp)
    state = current_state()
    recipe = state.recipe if state.enabled else None
    where = "CPU reference backend" if inp.device.type == "cpu" else f"device {inp.device}"
    lines = [f"{module} on {where}, recipe: {recipe}"]
    if recipe is not None and (recipe.mxfp8() or recipe.nvfp4()):
        asked = is_mxfp8_available if recipe.mxfp8() else is_nvfp4_available
        lines.append(f"GEMMs are emulated: {asked(return_reason=True)[1]}")
    if recipe is not None:
        lines += _in_one_piece(module, recipe)
    lines += filter(None, (without_kernels(inp.device),))
    plans = module.plans_of(*args, **kwargs)
    sizes = _sizes(inp) + _sizes(kwargs.get("encoder_output"))
    if any(plan.described.symbols >> _core.SYMBOL_SEQUENCES for _, plan in plans):
        sizes = (*sizes, 0, 0, 0)[:6] + _packed_sizes(kwargs, inp)
    for title, plan in plans:
        lines += _plan_text(title, plan, sizes)
    if not plans:
        lines.append(f"it calls its modules; explain them: {inner}")
    print("\n".join(lines), file=file or sys.stdout)
