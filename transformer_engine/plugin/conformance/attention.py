# SPDX-License-Identifier: Apache-2.0
"""Cases of fused attention and its gradients: layouts, masks, windows, biases, heads, sinks."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.conformance.attention_reference import Problem, Setting
from transformer_engine.plugin.conformance.cases import Case, Draw, Wanted, name_of, near
from transformer_engine.plugin.conformance.dropout import share

_P = 0.4  # of dropout

# Roundings to the dtype on the way: a kernel rounds the probabilities, the sums over blocks of keys
# and the output; in gradients the output, whose error is in every score's gradient, the
# probabilities, their gradients, those of scores, and the result, and the first two are passed on
# by differences that cancel.
STEPS_FORWARD, STEPS_BACKWARD = 4, 12

_LAYOUTS = (
    *("sb3hd sbh3d sbhd_sb2hd sbhd_sbh2d sbhd_sbhd_sbhd".split()),
    *("bs3hd bsh3d bshd_bs2hd bshd_bsh2d bshd_bshd_bshd".split()),
    *("t3hd th3d thd_t2hd thd_th2d thd_thd_thd sbhd_bshd_bshd bshd_sbhd_sbhd".split()),
)
_MASKS = (
    *("no_mask", "padding", "causal", "padding_causal"),
    *("causal_bottom_right", "padding_causal_bottom_right"),
)
_UNEVEN = ((6, 9, 3), (12, 7, 1))
_EMPTY = ((6, 0, 9, 5), (12, 7, 0, 3))  # no query, and no key


def settings() -> Iterator[Setting]:
    """All of them; names tell them apart."""
    for i, layout in enumerate(_LAYOUTS):
        joined = "3" in layout
        packed = layout.startswith("t")
        given: dict[str, Any] = {
            "layout": layout,
            "mask": "padding" * packed + "_" * (packed and i % 2) + "causal" * (i % 2)
            or ("no_mask"),
            "heads": (3, 3) if joined else (4, 2),
            "lengths": (9, 9) if joined else (9, 12),
        }
        if packed:
            given["each"] = ((6, 9), (6, 9)) if joined else ((6, 9), (12, 7))
        yield Setting(layout, **given)
    yield from _masked()
    yield from _added()
    for heads in ((4, 4), (6, 2), (5, 1), (1, 1)):
        yield Setting(f"{heads[0]} heads of {heads[1]}", heads=heads, mask="causal")
    for channels in ((8, 8), (64, 64), (128, 128), (32, 48), (192, 128), (12, 20), (7, 5)):
        yield Setting(f"{channels[0]} and {channels[1]} channels", channels=channels)
    for lengths in ((1, 40), (130, 70), (64, 256)):
        yield Setting(f"{lengths[0]} queries, {lengths[1]} keys", lengths=lengths, channels=(8, 8))
    yield Setting("misaligned views", layout="bs3hd", heads=(3, 3), channels=(5, 5), lengths=(7, 7))


def _masked() -> Iterator[Setting]:
    for mask in _MASKS:
        given = {"each": _UNEVEN} if "padding" in mask else {}
        yield Setting(f"bshd {mask}", mask=mask, **given)
        if "padding" in mask:
            packed = {"layout": "thd_thd_thd", "mask": mask}
            yield Setting(f"thd {mask} with gaps", gaps=True, each=_UNEVEN, **packed)
            yield Setting(f"thd {mask} of no tokens", each=_EMPTY, **packed)
            yield Setting(f"sbhd {mask} of no tokens", "sbhd_sbhd_sbhd", mask, each=_EMPTY)
    for window in ((3, 0), (2, 4), (-1, 2), (5, -1)):
        yield Setting(f"window {window}", window=window)
        yield Setting(f"thd window {window}", "thd_thd_thd", "padding", window, each=_UNEVEN)
    yield Setting("window (3, 0) from the corner", "sbhd_sbhd_sbhd", "causal_bottom_right", (3, 0))
    yield Setting("window (2, 0) of causal", mask="causal", window=(2, 0))
    corner = {"each": _UNEVEN, "window": (2, 1)}
    yield Setting("window (2, 1) of padding", "sbhd_sbhd_sbhd", "padding", **corner)
    # The first two queries attend nothing.
    yield Setting("queries without keys", mask="causal_bottom_right", lengths=(12, 10))


def _added() -> Iterator[Setting]:
    for dims in ("hqk", "bhqk", "qk", "bqk"):
        kind = {"bias": "post_scale_bias", "bias_dims": dims}
        yield Setting(f"bias {dims}", **kind)
    yield Setting("bias hqk causal", bias="post_scale_bias", mask="causal")
    yield Setting("bias bhqk padding", mask="padding", bias="post_scale_bias", bias_dims="bhqk",
                  batch=3, each=_UNEVEN)  # fmt: skip
    yield Setting("alibi", bias="alibi")
    yield Setting("alibi causal, 6 heads", bias="alibi", mask="causal", heads=(6, 3))
    yield Setting("alibi from the corner", bias="alibi", mask="causal_bottom_right")
    yield Setting("alibi thd", "thd_thd_thd", "padding_causal", bias="alibi", each=_UNEVEN)
    for softmax in ("off_by_one", "learnable"):
        for mask in ("no_mask", "causal"):
            yield Setting(f"{softmax} {mask}", softmax=softmax, mask=mask)
        packed = {"mask": "padding", "softmax": softmax, "each": _UNEVEN}
        yield Setting(f"{softmax} thd", "thd_thd_thd", **packed)


# Where a query's probabilities are 0 and 1 gradients of scores are 0, and a relative error of them
# says nothing: for the forward alone.
_CERTAIN = (
    Setting("large scores", whole=8, scale=1.0),
    Setting("one query, one key", lengths=(1, 1)),
    Setting("window (0, 0)", window=(0, 0)),
    Setting("thd window (0, 0)", "thd_thd_thd", "padding", (0, 0), each=_UNEVEN),
)


def _kinds(setting: Setting) -> tuple:
    """The setting as the operators take it."""
    from transformer_engine.plugin.core.ops import (
        NVTE_Bias_Type,
        NVTE_Mask_Type,
        NVTE_QKV_Layout,
        NVTE_Softmax_Type,
    )

    mask = setting.mask if setting.mask == "no_mask" else f"{setting.mask}_mask"
    return (
        NVTE_QKV_Layout[f"NVTE_{setting.layout.upper()}"],
        NVTE_Bias_Type[f"NVTE_{setting.bias.upper()}"],
        NVTE_Mask_Type[f"NVTE_{mask.upper()}"],
        NVTE_Softmax_Type[f"NVTE_{setting.softmax.upper()}_SOFTMAX"],
        setting.window,
    )


def forward_arguments(
    problem: Problem, training: bool = True, top: bool = False, p: float = 0.0
) -> tuple:
    """Of `fused_attn_fwd`."""
    setting = problem.setting
    return (
        *setting.lengths, training, problem.scale, p, True, *_kinds(setting), *problem.counted,
        *problem.tensors, problem.dtype, *problem.padded, None, None, None, None, problem.bias,
        problem.offset, None, 4, top,
    )  # fmt: skip


def backward_arguments(
    problem: Problem, out: Tensor, grad: Tensor, aux: list, p: float = 0.0
) -> tuple:
    """Of `fused_attn_bwd`."""
    setting = problem.setting
    return (
        *setting.lengths, problem.scale, p, True, *_kinds(setting), False, *problem.counted,
        *problem.tensors, out, grad, problem.dtype, problem.dtype, aux, *problem.padded,
        None, None, None,
    )  # fmt: skip


def _flat(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.flatten() for part in parts])


def depth_of(problem: Problem) -> int:
    """Terms of the longest sum."""
    return max(*problem.setting.lengths, *problem.setting.channels)


def _output(problem: Problem, found: Tensor, outs: list[Tensor]) -> list[Wanted]:
    """The output: 0 outside of sequences, where other numbers would get into products."""
    exact = problem.joined(outs, _shape(problem))
    return [near("the output", found, exact, problem.dtype, depth_of(problem), STEPS_FORWARD)]


def _shape(problem: Problem) -> tuple[int, ...]:
    """Of the output."""
    return (*problem.tensors[0].shape[:-1], problem.setting.channels[1])


def _statistics(problem: Problem, sums: list[Tensor]) -> Tensor:
    """Logarithms of sums as an implementation gives them: [b, heads, s, 1] or [tokens, heads, 1].

    -Inf where nothing is attended, or is no query.
    """
    shape = (*problem.tensors[0].shape[:-1], 1)
    whole = problem.joined([s[..., None] for s in sums], shape, -math.inf)
    order = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "thd": (0, 1, 2)}[problem.forms[0]]
    return whole.permute(order).contiguous().float()


def _forward_case(draw: Draw, setting: Setting, dtype: torch.dtype) -> Case:
    problem = Problem(draw, setting, dtype)
    outs, sums, _ = problem.exact()
    expected = _statistics(problem, sums).double()
    seen = expected.isfinite()  # of a query that attends nothing it means nothing
    given = [t for t in (problem.bias, problem.offset) if t is not None]

    def wanted(found: list) -> list:
        if len(found) != 3 + len(given):
            raise ValueError(f"{len(found)} results, expected {3 + len(given)}")
        if tuple(found[1].shape) != tuple(expected.shape):
            raise ValueError(f"statistics {tuple(found[1].shape)}, expected {expected.shape}")
        statistics = found[1][seen]
        pairs = zip(found[3:], given, strict=True)
        return [
            *_output(problem, found[0], outs),
            near("the statistics", statistics, expected[seen], torch.float32, depth_of(problem)),
            *(near("what was added", a, b.double(), b.dtype) for a, b in pairs),
        ]

    return Case(f"{name_of(dtype)} {setting.name}", forward_arguments(problem), wanted)


def _forward(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for setting in settings():
            yield _forward_case(draw, setting, dtype)
        for setting in _CERTAIN:
            yield _forward_case(draw, setting, dtype)
        for top in (False, True):
            yield _inference(draw, dtype, top)
        yield _dropped(draw, dtype)


def _inference(draw: Draw, dtype: torch.dtype, top: bool) -> Case:
    """Nothing for gradients; maybe the largest scores."""
    problem = Problem(draw, Setting("", mask="causal"), dtype)
    outs, _, largest = problem.exact()

    def wanted(found: list) -> list:
        if len(found) != 1 + top:
            raise ValueError(f"{len(found)} results, expected {1 + top}")
        results = _output(problem, found[0], outs)
        if top:
            args = largest, torch.float32, depth_of(problem)
            results.append(near("the largest scores", found[1], *args))
        return results

    name = f"{name_of(dtype)} inference{', largest scores' * top}"
    return Case(name, forward_arguments(problem, False, top), wanted)


_OF_DROPOUT = Setting("dropout", lengths=(24, 32), channels=(16, 32), heads=(4, 4), batch=3)


def _probabilities(draw: Draw, dtype: torch.dtype) -> tuple[Problem, list[Tensor]]:
    """An attention whose output are the probabilities, and these: its values are the identity."""
    problem = Problem(draw, _OF_DROPOUT, dtype)
    values = torch.eye(32, dtype=dtype, device=draw.device)[None, :, None]
    problem.tensors[2] = values.expand_as(problem.tensors[2]).contiguous()
    return problem, problem.exact()[0]


def _dropped(draw: Draw, dtype: torch.dtype) -> Case:
    problem, probabilities = _probabilities(draw, dtype)

    def wanted(found: list) -> list:
        kept = [rows != 0 for rows in problem.sequences(found[0])]
        outs = [p * k / (1 - _P) for p, k in zip(probabilities, kept, strict=True)]
        return [*_output(problem, found[0], outs), share(_flat(kept), _P)]

    return Case(f"{name_of(dtype)} dropout", forward_arguments(problem, p=_P), wanted)


# ---- gradients ---------------------------------------------------------------------------------


def _compared(problem: Problem, found: Any, exact: list[Tensor | None]) -> list[Wanted]:
    if len(found) != 5:
        raise ValueError(f"{len(found)} gradients, expected 5")
    names = "queries", "keys", "values", "the bias", "the offset"
    given = [*problem.tensors, problem.bias, problem.offset]
    results = []
    rows = zip(names, found, exact, given, strict=True)
    for place, (name, one, other, like) in enumerate(rows):
        if other is None:
            if one is not None:
                raise ValueError(f"a gradient of {name}, which there is not")
            continue
        # Those of a bias and an offset are sums over what they are the same for, of numbers that
        # are rounded to the dtype of the queries.
        depth = depth_of(problem) if place < 3 else _scores(problem)
        steps = STEPS_BACKWARD * torch.finfo(problem.dtype).eps / torch.finfo(like.dtype).eps
        results.append(near(f"the gradient of {name}", one, other, like.dtype, depth, steps))
    return results


def _scores(problem: Problem) -> int:
    """Scores of one head: at most so many are added up."""
    return math.prod(problem.setting.lengths) * len(problem.each[0])


def _backward_case(draw: Draw, setting: Setting, dtype: torch.dtype) -> Case:
    problem = Problem(draw, setting, dtype)
    outs, sums, _ = problem.exact()
    shape = _shape(problem)
    out = problem.joined(outs, shape).to(dtype)
    grad = draw.normal(shape, dtype)
    exact = problem.gradients(grad)
    rng = torch.zeros(2, dtype=torch.int64, device=draw.device)
    more = [t for t in (problem.bias, problem.offset) if t is not None]
    aux = [_statistics(problem, sums), rng, *more]
    args = backward_arguments(problem, out, grad, aux)
    name = f"{name_of(dtype)} {setting.name}"
    return Case(name, args, lambda found: _compared(problem, found, exact))


def _backward(op: str, draw: Draw) -> Iterator[Case]:
    del op
    for dtype in draw.dtypes:
        for setting in settings():
            yield _backward_case(draw, setting, dtype)
        yield from _dropped_backward(draw, dtype)


def _dropped_backward(draw: Draw, dtype: torch.dtype) -> Iterator[Case]:
    """With what the forward of the implementation drew, which its output with the identity shows.

    None without a forward, or of one that drops nothing.
    """
    if draw.forward is None:
        return
    problem, _ = _probabilities(draw, dtype)
    try:
        found, *aux = draw.forward(*forward_arguments(problem, p=_P))
    except NotImplementedError:
        return
    kept = [(rows != 0).double() / (1 - _P) for rows in problem.sequences(found)]
    problem.tensors[2] = draw.normal(tuple(problem.tensors[2].shape), dtype)
    outs, *_ = problem.attend([t.double() for t in problem.tensors], None, None, kept)
    grad = draw.normal(tuple(found.shape), dtype)
    exact = problem.gradients(grad, kept)
    out = problem.joined(outs, tuple(found.shape)).to(dtype)
    args = backward_arguments(problem, out, grad, aux, _P)
    name = f"{name_of(dtype)} dropout"
    yield Case(name, args, lambda found: _compared(problem, found, exact))


CASES = {"fused_attn_fwd": _forward, "fused_attn_bwd": _backward}
