# SPDX-License-Identifier: Apache-2.0
"""Cases of the attention class: its modules, forward and backward."""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from transformer_engine.plugin.conformance.attention import (
    Problem,
    Setting,
    backward_arguments,
    exact_forward,
    gradients_of,
    output_of,
)
from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, Wanted, name_of
from transformer_engine.plugin.conformance.definition import compared, definition, widened

_UNEVEN = ((6, 9, 3), (12, 7, 1))
_SETTINGS = (
    *(Setting(f"{form} {mask}", "_".join([form] * 3), mask)
      for form in ("sbhd", "bshd") for mask in ("no_mask", "causal", "causal_bottom_right")),
    *(Setting(f"{layout} causal", layout, "causal", heads=(3, 3), lengths=(9, 9))
      for layout in ("sb3hd", "sbh3d", "bs3hd", "bsh3d")),
    *(Setting(f"{form} {mask}", "_".join([form] * 3), mask, each=_UNEVEN)
      for form in ("bshd", "thd") for mask in ("padding", "padding_causal")),
    Setting("bshd padding_causal_bottom_right", mask="padding_causal_bottom_right", each=_UNEVEN),
    # With other lengths, the diagonal of a window without a mask is that of the module.
    Setting("window (2, 3)", window=(2, 3), lengths=(11, 11)),
    Setting("alibi", bias="alibi", mask="causal", lengths=(11, 11)),
    Setting("window (3, 0) of causal", mask="causal", window=(3, 0)),
    Setting("one head of keys", heads=(4, 1), mask="causal"),
    Setting("64 and 32 channels", channels=(64, 32)),
    Setting("130 queries, 70 keys", lengths=(130, 70)),
)  # fmt: skip


def _run(found: Any, problem: Problem, draw: Draw) -> list[Wanted]:
    """Make a module, call it, and ask for gradients."""
    from transformer_engine.plugin.core.ops import FlashAttentionBase
    from transformer_engine.pytorch.attention.masks import default_alibi_slopes

    if not (isinstance(found, type) and issubclass(found, FlashAttentionBase)):
        raise TypeError(f"{found!r}, expected a subclass of FlashAttentionBase")
    setting, dtype = problem.setting, problem.dtype
    module = found(problem.scale, attention_type="cross", layer_number=1)
    inputs = [t.detach().requires_grad_() for t in problem.tensors]
    kept = [t.detach().clone() for t in inputs]
    given: dict[str, Any] = {}
    if "padding" in setting.mask:
        counted, longest = problem.counted, setting.lengths
        given = dict(zip(("cu_seqlens_q", "cu_seqlens_kv"), counted, strict=True))
        given |= dict(zip(("max_seqlen_q", "max_seqlen_kv"), longest, strict=True))
    if setting.bias == "alibi":
        slopes = default_alibi_slopes(setting.heads[0], draw.device)
        given["alibi_slopes"] = slopes
    window = None if setting.window == (-1, -1) else setting.window
    with torch.enable_grad():
        out = module(
            *inputs, qkv_layout=setting.layout, attn_mask_type=setting.mask, window_size=window,
            **given,
        )  # fmt: skip
        grad = draw.normal(tuple(out.shape), dtype)
        made = torch.autograd.grad(out, inputs, grad)
    exact_out, *aux = exact_forward(problem)
    args = backward_arguments(problem, exact_out, grad.view(problem.shape), aux)
    exact = definition("fused_attn_bwd")(*widened(args))
    joined = Exact([exact_out.flatten(-2), *exact[:3]])
    wanted = (output_of(problem), *gradients_of(problem)[:3])
    results = list(compared(Case("", (), wanted), (out.detach(), *made), joined))
    for name, now, then in zip(("queries", "keys", "values"), inputs, kept, strict=True):
        results += Result(f"{name} themselves", depth=0).beside(now.detach(), then)
    return results


@Case.of("get_flash_attention_class")
def _class(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for setting in _SETTINGS:
            problem = Problem(draw, setting, dtype)
            wanted = functools.partial(_run, problem=problem, draw=draw)
            yield Case(f"{name_of(dtype)} {setting.name}", (), wanted)
