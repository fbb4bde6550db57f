# SPDX-License-Identifier: Apache-2.0
"""Cases of fused attention and its gradients: layouts, masks, windows, biases, heads, sinks.

And of the attention class: its modules, forward and backward.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from transformer_engine.plugin.attention_kinds import kinds_of
from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, Wanted, name_of
from transformer_engine.plugin.conformance.definition import compared, definition, widened
from transformer_engine.plugin.conformance.layers import share


@dataclass(frozen=True)
class Setting:
    """Settings of an attention: all but the values of its tensors."""

    name: str
    layout: str = "bshd_bshd_bshd"
    mask: str = "no_mask"
    window: tuple[int, int] = (-1, -1)  # keys to the left and to the right; -1: all
    bias: str = "no_bias"
    bias_dims: str = "hqk"  # dims of the bias that are not 1, of "bhqk"
    softmax: str = "vanilla"
    batch: int = 2
    lengths: tuple[int, int] = (9, 12)  # the longest sequences of queries, of keys
    each: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # all of them, where they differ
    heads: tuple[int, int] = (4, 2)
    channels: tuple[int, int] = (16, 16)
    gaps: bool = False  # between packed sequences
    scale: float | None = None  # None: a bit more than 1 / sqrt(channels)
    whole: int = 0  # queries and keys are integers up to this one: their products are exact

    @property
    def kinds(self) -> tuple:
        """As the operators take them: layout, bias, mask, softmax, window."""
        mask = self.mask.removesuffix("_mask")
        return *kinds_of(self.layout, self.bias, mask, self.softmax), self.window


class Problem:
    """Tensors of an attention: queries, keys and values are `tensors`, in the layout."""

    def __init__(self, draw: Draw, setting: Setting, dtype: torch.dtype) -> None:
        self.setting, self.dtype = setting, dtype
        each = setting.each or tuple((n,) * setting.batch for n in setting.lengths)
        self.batch, heads = len(each[0]), setting.heads[0]
        sums = [torch.tensor([0, *lengths]).cumsum(0) for lengths in each]
        starts = [s + torch.arange(self.batch + 1) * 2 * setting.gaps for s in sums]
        self._rows = [int(s[-1]) for s in starts]
        self.counted = [s.to(draw.device, torch.int32) for s in sums]
        self.padded = [s.to(draw.device, torch.int32) if setting.gaps else None for s in starts]
        self.scale = setting.scale or 1.3 / math.sqrt(setting.channels[0])
        self.tensors = self._tensors(draw)
        self.bias = self.offset = None
        if setting.bias == "post_scale_bias":
            full = zip("bhqk", (self.batch, heads, *setting.lengths), strict=True)
            shape = [n if name in setting.bias_dims else 1 for name, n in full]
            self.bias = draw.normal(shape, dtype)
        if setting.softmax == "learnable":
            self.offset = draw.normal((1, heads, 1, 1), torch.float32)

    def _tensors(self, draw: Draw) -> list[Tensor]:
        """Three tensors, views of one where a number in the layout says so."""
        setting, made = self.setting, []
        for part in setting.layout.split("_"):
            keys = int(bool(made))
            sizes = {
                "b": self.batch,
                "s": setting.lengths[keys],
                "t": self._rows[keys],
                "h": setting.heads[keys],
                "d": setting.channels[int(len(made) == 2)],
            }
            shape = [int(c) if c.isdigit() else sizes[c] for c in part]
            whole = draw.normal(shape, self.dtype)
            if setting.whole:
                whole = (draw.uniform(shape) * (2 * setting.whole + 1)).floor() - setting.whole
                whole = whole.to(self.dtype)
            count = [i for i, c in enumerate(part) if c.isdigit()]
            made += whole.unbind(count[0]) if count else [whole]
        return made

    @property
    def added(self) -> list[Tensor]:
        """Bias and offset, where there are such."""
        return [t for t in (self.bias, self.offset) if t is not None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the output."""
        return (*self.tensors[0].shape[:-1], self.setting.channels[1])

    @property
    def depth(self) -> int:
        """Terms of the longest sum."""
        return max(*self.setting.lengths, *self.setting.channels)


def forward_arguments(
    problem: Problem, training: bool = True, top: bool = False, p: float = 0.0
) -> tuple:
    """Of `fused_attn_fwd`."""
    setting = problem.setting
    return (
        *setting.lengths, training, problem.scale, p, True, *setting.kinds, *problem.counted,
        *problem.tensors, problem.dtype, *problem.padded, None, None, None, None, problem.bias,
        problem.offset, None, 4, top,
    )  # fmt: skip


def backward_arguments(
    problem: Problem, out: Tensor, grad: Tensor, aux: list[Any], p: float = 0.0
) -> tuple:
    """Of `fused_attn_bwd`."""
    setting = problem.setting
    return (
        *setting.lengths, problem.scale, p, True, *setting.kinds, False, *problem.counted,
        *problem.tensors, out, grad, problem.dtype, problem.dtype, aux, *problem.padded,
        None, None, None,
    )  # fmt: skip


# ---- settings ------------------------------------------------------------------------------------


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


def output_of(problem: Problem) -> Result:
    """The output: 0 outside of sequences, where other numbers would get into products."""
    return Result("the output", problem.dtype, problem.depth, STEPS_FORWARD)


def exact_forward(problem: Problem) -> list[Tensor]:
    """Results of the definition, in float64."""
    return definition("fused_attn_fwd")(*widened(forward_arguments(problem)))


@Case.of("fused_attn_fwd")
def _forward(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for setting in (*settings(), *_CERTAIN):
            problem = Problem(draw, setting, dtype)
            sums = Result("the statistics", torch.float32, problem.depth, finite=True)
            added = [Result("what was added", each.dtype) for each in problem.added]
            wanted = (output_of(problem), sums, None, *added)
            yield Case(f"{name_of(dtype)} {setting.name}", forward_arguments(problem), wanted)
        for top in (False, True):  # nothing for gradients; maybe the largest scores
            problem = Problem(draw, Setting("", mask="causal"), dtype)
            largest = Result("the largest scores", torch.float32, problem.depth)
            wanted = (output_of(problem), *([largest] * top))
            name = f"{name_of(dtype)} inference{', largest scores' * top}"
            yield Case(name, forward_arguments(problem, False, top), wanted)
        yield _dropped(draw, dtype)


_OF_DROPOUT = Setting("dropout", lengths=(24, 32), channels=(16, 32), heads=(4, 4), batch=3)


def _with_probabilities(draw: Draw, dtype: torch.dtype) -> Problem:
    """An attention whose output are the probabilities: its values are the identity."""
    problem = Problem(draw, _OF_DROPOUT, dtype)
    values = torch.eye(32, dtype=dtype, device=draw.device)[None, :, None]
    problem.tensors[2] = values.expand_as(problem.tensors[2]).contiguous()
    return problem


def _dropped(draw: Draw, dtype: torch.dtype) -> Case:
    problem = _with_probabilities(draw, dtype)
    probabilities = exact_forward(problem)[0]

    def wanted(found: list) -> list:
        kept = found[0] != 0
        exact, steps = probabilities * kept / (1 - _P), STEPS_FORWARD
        output = Result("the output", dtype, problem.depth, steps)
        return [*output.beside(found[0], exact), share(kept, _P)]

    return Case(f"{name_of(dtype)} dropout", forward_arguments(problem, p=_P), wanted)


# ---- gradients ---------------------------------------------------------------------------------


def gradients_of(problem: Problem) -> tuple[Result, ...]:
    """Of queries, keys, values, bias and offset.

    Those of the last two are sums over what they are the same for, of numbers that are rounded to
    the dtype of the queries: at most over all scores of a head.
    """
    given = [*problem.tensors, problem.bias, problem.offset]
    names = "queries", "keys", "values", "the bias", "the offset"
    scores = math.prod(problem.setting.lengths) * problem.batch
    depths = *[problem.depth] * 3, scores, scores
    eps, made = torch.finfo(problem.dtype).eps, []
    for name, depth, like in zip(names, depths, given, strict=True):
        dtype = problem.dtype if like is None else like.dtype
        steps = STEPS_BACKWARD * eps / torch.finfo(dtype).eps
        made.append(Result(f"the gradient of {name}", dtype, depth, steps))
    return tuple(made)


@Case.of("fused_attn_bwd")
def _backward(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for setting in settings():
            problem = Problem(draw, setting, dtype)
            out, sums, rng, *_ = exact_forward(problem)
            grad = draw.normal(problem.shape, dtype)
            aux = [sums.float(), rng, *problem.added]
            args = backward_arguments(problem, out.to(dtype), grad, aux)
            yield Case(f"{name_of(dtype)} {setting.name}", args, gradients_of(problem))
        yield from _dropped_backward(draw, dtype)


def _dropped_backward(draw: Draw, dtype: torch.dtype) -> Iterator[Case]:
    """With what the forward of the implementation drew, which its output with the identity shows.

    None without a forward, or of one that drops nothing.
    """
    if draw.forward is None:
        return
    problem = _with_probabilities(draw, dtype)
    try:
        found, *aux = draw.forward(*forward_arguments(problem, p=_P))
    except NotImplementedError:
        return
    kept = (found != 0).double().transpose(1, 2) / (1 - _P)  # [b, heads, queries, keys]
    problem.tensors[2] = draw.normal(tuple(problem.tensors[2].shape), dtype)
    grad = draw.normal(problem.shape, dtype)
    with torch.enable_grad():
        wide = [t.double().requires_grad_() for t in problem.tensors]
        q, k, v = (t.transpose(1, 2) for t in wide)
        probabilities = (problem.scale * q @ k.transpose(2, 3)).softmax(-1)
        out = ((probabilities * kept) @ v).transpose(1, 2)
        exact = Exact([*torch.autograd.grad(out, wide, grad.double()), None, None])
    args = backward_arguments(problem, out.detach().to(dtype), grad, aux, _P)
    yield Case(f"{name_of(dtype)} dropout", args, gradients_of(problem), exact=exact)


# ---- the class ---------------------------------------------------------------------------------


_OF_CLASS = (
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
        for setting in _OF_CLASS:
            problem = Problem(draw, setting, dtype)
            wanted = partial(_run, problem=problem, draw=draw)
            yield Case(f"{name_of(dtype)} {setting.name}", (), wanted)
