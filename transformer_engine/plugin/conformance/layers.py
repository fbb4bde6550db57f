# SPDX-License-Identifier: Apache-2.0
"""Cases of norms, activations, softmax, dropout, products, rotary positions and of gradients."""

import itertools
import math
from collections.abc import Iterator
from itertools import combinations, permutations, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine.plugin.builtin import ACTIVATIONS, SOFTMAX
from transformer_engine.plugin.conformance.cases import Case, Draw, Exact, Result, Wanted, name_of
from transformer_engine.plugin.conformance.casts import quantizers, quantizers_of_values
from transformer_engine.plugin.conformance.definition import definition

# ---- norms ---------------------------------------------------------------------------------------


_NORM_SHAPES = ((5, 40), (1, 16), (3, 7, 40), (33, 129), (64, 1024), (0, 16), (16,), (2, 0, 16))


def _settings(draw: Draw) -> Iterator[tuple[str, tuple, torch.dtype, bool, float]]:
    for dtype in draw.dtypes:
        for shape in _NORM_SHAPES:
            zero_centered = sum(shape) % 2 == 0
            name = f"{name_of(dtype)} {list(shape)}{' zero-centered' * zero_centered}"
            yield name, shape, dtype, zero_centered, 1e-5
        yield f"{name_of(dtype)} large eps", (6, 48), dtype, False, 0.5


def _mixed(draw: Draw) -> Iterator[tuple[str, tuple[torch.dtype, torch.dtype, torch.dtype]]]:
    """Dtypes of input, factors and output that are not one, with a name.

    The output has that of the factors, as modules ask for it, or of the input.
    """
    for of_input, of_factors in itertools.permutations(draw.dtypes, 2):
        for of_output in (of_factors, of_input):
            name = f"{name_of(of_input)} by {name_of(of_factors)} to {name_of(of_output)}"
            yield name, (of_input, of_factors, of_output)


@Case.of("layernorm_fwd", "rmsnorm_fwd")
def _forward_of_norms(op: str, draw: Draw) -> Iterator[Case]:
    centred = op == "layernorm_fwd"

    def case(name: str, x: Tensor, vectors: tuple, otype: torch.dtype, **more: Any) -> Case:
        more = {"eps": 1e-5, "out": None, "quantizer": None, "zero_centered": False} | more
        eps, out, quantizer, zero_centered = more.values()
        wide, depth = x.double(), x.shape[-1]
        # A mean may cancel, and what is less it: their rounding goes by what is added up.
        centre = wide - wide.mean(-1, keepdim=True)
        terms = wide * (centre.square().mean(-1, keepdim=True) + eps).rsqrt() if centred else None
        y = Result("y", otype, depth, terms=terms, quantizer=quantizer)  # who asked may cast it
        mu = Result("mu", torch.float32, depth, terms=wide) if centred else None
        given = (x, *vectors) if centred else (x, vectors[0])
        args = (*given, eps, out, quantizer, otype, 0, zero_centered)
        left = () if out is None else ((out, y._replace(name="ln_out")),)
        return Case(name, args, (y, mu, Result("rsigma", torch.float32, depth)), left=left)

    def vectors(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        gamma, beta = (draw.normal((count,), dtype) for _ in range(2))
        return gamma, beta if centred else None

    for name, shape, dtype, zero_centered, eps in _settings(draw):
        x = draw.normal(shape, dtype)
        how = {"eps": eps, "zero_centered": zero_centered}
        yield case(name, x, vectors(shape[-1], dtype), dtype, **how)
    for name, (dtype, of_factors, otype) in _mixed(draw):
        both = vectors(40, of_factors)
        yield case(name, draw.normal((5, 40), dtype), both, otype)
    for dtype in draw.dtypes:
        x, both, what = draw.normal((4, 32), dtype), vectors(32, dtype), name_of(dtype)
        yield case(f"{what} to float32", x, both, torch.float32)
        out = draw.place(x.shape, dtype)
        yield case(f"{what} into ln_out", x, both, dtype, out=out)
        yield case(f"{what} strided", draw.strided(x), both, dtype)
        yield case(f"{what} zeros", torch.zeros_like(x), both, dtype)
        bad = x.clone()
        bad[1, 3] = math.nan
        yield case(f"{what} NaN in a row", bad, both, dtype)
        for kind, quantizer in quantizers_of_values(draw.device).items():
            given = vectors(64, dtype), torch.float32
            how = {"quantizer": quantizer, "zero_centered": True}
            yield case(f"{what} cast, {kind}", draw.normal((32, 64), dtype), *given, **how)
        if centred:
            yield case(f"{what} without bias", x, (both[0], None), dtype, zero_centered=True)
            far = (draw.normal((4, 64), torch.float32) + 1e3).to(dtype)
            yield case(f"{what} far from 0", far, vectors(64, dtype), dtype)


@Case.of("layernorm_bwd", "rmsnorm_bwd", "rmsnorm_bwd_add")
def _backward_of_norms(op: str, draw: Draw) -> Iterator[Case]:
    centred, adds = op == "layernorm_bwd", op == "rmsnorm_bwd_add"
    settings = [
        (name, shape, (dtype,) * 3, zero_centered, eps)
        for name, shape, dtype, zero_centered, eps in _settings(draw)
    ]
    settings += [(name, (5, 40), dtypes, False, 1e-5) for name, dtypes in _mixed(draw)]
    for name, shape, dtypes, zero_centered, eps in settings:
        dtype, of_factors, of_output = dtypes
        x, dy, other = (draw.normal(shape, each) for each in (dtype, of_output, dtype))
        gamma = draw.normal(shape[-1:], of_factors)
        given = (x.double(), gamma.double(), *((None,) if centred else ()), eps, None, None)
        forward = definition("layernorm_fwd" if centred else "rmsnorm_fwd")
        _, *statistics = forward(*given, torch.float64, 0, zero_centered)
        statistics = [each.float() for each in statistics if each is not None]
        args = (dy, x, *((other,) if adds else ()), *statistics, gamma, 0, zero_centered)
        # Statistics are rounded to fp32, gradients of factors are sums over rows.
        depth = max(shape[-1], x.numel() // shape[-1], 1)
        wanted = [Result("dx", dtype, depth), Result("dgamma", of_factors, depth)]
        wanted += [Result("dbeta", of_factors, depth)] * centred
        yield Case(name, args, tuple(wanted))


# ---- activations ---------------------------------------------------------------------------------


_ACTIVATION_SHAPES = ((5, 48), (1, 16), (3, 7, 32), (33, 130), (0, 16), (16,), (2, 0, 16))


def _inputs(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for shape in _ACTIVATION_SHAPES:
            yield f"{what} {list(shape)}", draw.normal(shape, dtype)
        x = draw.normal((4, 32), dtype, 4.0)
        yield f"{what} large", x
        yield f"{what} strided", draw.strided(x)
        yield f"{what} zeros", torch.zeros_like(x)
        if dtype != torch.float32:  # where 1 + tanh cancels in that
            yield f"{what} below -2", (-2 - draw.uniform((4, 32))).to(dtype)


def _broken(draw: Draw) -> Iterator[tuple[str, Tensor]]:
    for dtype in draw.dtypes:
        x = draw.normal((4, 32), dtype)
        x[1, 3] = math.nan
        yield f"{name_of(dtype)} NaN", x


def _numbers(op: str) -> tuple[tuple, ...]:
    """Further arguments of an operator, for the cases that have some."""
    return ((), (2.5, 0.9)) if op.startswith("clamped") else ((),)


@Case.of(*ACTIVATIONS)
def _forward_of_activations(op: str, draw: Draw) -> Iterator[Case]:
    given = [(name, x, numbers) for numbers in _numbers(op) for name, x in _inputs(draw)]
    given += [(name, x, ()) for name, x in _broken(draw)]
    for name, x, numbers in given:
        wanted = (Result("the result", x.dtype),)
        yield Case(f"{name} {numbers or ''}".rstrip(), (x, None, *numbers), wanted)
    for dtype in draw.dtypes:
        for kind, quantizer in quantizers_of_values(draw.device).items():
            wanted = (Result("the result", quantizer=quantizer),)
            x = draw.normal((32, 64), dtype)
            yield Case(f"{name_of(dtype)} cast, {kind}", (x, quantizer), wanted)


@Case.of(*itertools.chain(*ACTIVATIONS.values()))
def _backward_of_activations(op: str, draw: Draw) -> Iterator[Case]:
    # NaN, but where a step or a clamp is differentiated: its derivative there is anybody's.
    steps = op.endswith(("drelu", "dreglu", "clamped_dswiglu"))
    for numbers in _numbers(op):
        for name, x in (*_inputs(draw), *(() if steps else _broken(draw))):
            columns = x.shape[-1] // (2 if op.endswith("glu") else 1)
            grad = draw.normal((*x.shape[:-1], columns), x.dtype)
            wanted: tuple = (Result("the gradient", x.dtype),)
            if op.startswith("dbias_"):
                rows = max(x.numel() // x.shape[-1], 1)
                wanted = (Result("the gradient of the bias", x.dtype, rows), *wanted)
            yield Case(f"{name} {numbers or ''}".rstrip(), (grad, x, None, *numbers), wanted)


# ---- softmax -------------------------------------------------------------------------------------


_SCALE = 0.7


def _shapes(kind: str) -> tuple[tuple[int, ...], ...]:
    if "triang" in kind:
        return (6, 9, 9), (2, 64, 64), (1, 1, 1)
    return (2, 3, 9, 17), (1, 2, 64, 64), (2, 1, 1, 130)


def _mask(shape: tuple, draw: Draw) -> Tensor:
    """Make a mask of keys that are not attended, of a shape that goes with that of the scores."""
    mask = draw.uniform((shape[0], 1, *shape[-2:])) < 0.4
    mask[0, 0, shape[-2] // 2] = True  # a query that attends nothing
    return mask.to(torch.uint8)


@Case.of(*SOFTMAX.split()[::2])
def _forward_of_softmax(op: str, draw: Draw) -> Iterator[Case]:
    kind = op.removesuffix("_softmax_forward")
    for dtype in draw.dtypes:
        # Numbers whose exponentials are no numbers, and whose differences are exact.
        large = (draw.normal(_shapes(kind)[0], dtype, 2.0) + 300).round()
        given = [(str(list(s)), draw.normal(s, dtype, 3.0), _SCALE) for s in _shapes(kind)]
        for name, x, scale in (*given, ("large", large, 1.0)):
            mask = (_mask(x.shape, draw),) if kind == "scaled_masked" else ()
            wanted = (Result("the result", dtype, x.shape[-1]),)
            yield Case(f"{name_of(dtype)} {name}", (x, *mask, scale), wanted)


@Case.of(*SOFTMAX.split()[1::2])
def _backward_of_softmax(op: str, draw: Draw) -> Iterator[Case]:
    kind = op.removesuffix("_softmax_backward")
    for dtype in draw.dtypes:
        for shape in _shapes(kind):
            scores, grad = draw.normal(shape, torch.float64), draw.normal(shape, dtype)
            if kind == "scaled_masked":
                scores = scores.masked_fill(_mask(shape, draw) != 0, -torch.inf)
            elif kind != "scaled":
                future = torch.ones_like(scores, dtype=torch.bool).triu(1 + shape[-1] - shape[-2])
                scores = scores.masked_fill(future, -torch.inf)
            out = torch.nan_to_num(scores.softmax(-1)).to(dtype)
            terms = _SCALE * out.double() * grad.double()  # where there is one key they cancel
            wanted = (Result("the gradient", dtype, shape[-1], terms=terms),)
            yield Case(f"{name_of(dtype)} {list(shape)}", (grad, out, _SCALE), wanted)


# ---- dropout -------------------------------------------------------------------------------------


_P = 0.3


def share(kept: Tensor, p: float) -> Wanted:
    """Of n independent decisions, within six standard deviations."""
    found = kept.double().mean().view(1)
    exact = torch.full((1,), 1 - p, dtype=torch.float64)
    bound = (3 / math.sqrt(kept.numel()) / (1 - p)) ** 2
    return Wanted("the share that is kept", found, exact, torch.float64, bound)


def _pairs(kept: Tensor, p: float) -> Iterator[Wanted]:
    """Neighbours that are both kept, along each dim, within nine standard deviations.

    Those of independent pairs: pairs that share an element depend on each other a little.
    """
    for dim, size in enumerate(kept.shape):
        if kept.numel() // size * (size - 1) < 1024:
            continue
        both = kept.narrow(dim, 0, size - 1) & kept.narrow(dim, 1, size - 1)
        found = both.double().mean().view(1)
        exact = torch.full((1,), (1 - p) ** 2, dtype=torch.float64)
        bound = (4.5 / math.sqrt(both.numel()) / (1 - p) ** 2) ** 2
        yield Wanted(
            f"neighbours that are both kept, dim {dim}", found, exact, torch.float64, bound
        )


@Case.of("dropout_fwd")
def _forward_of_dropout(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        for shape in ((64, 96), (3, 5, 256), (16,)):
            x = draw.normal(shape, dtype)
            x[x == 0] = 1

            def wanted(found: tuple, x: Tensor = x) -> list:
                kept = found[0] != 0
                exact = x.double() * kept / (1 - _P)
                results = Result("the result", x.dtype).beside(found[0], exact)
                return [*results, share(kept, _P), *_pairs(kept, _P)]

            yield Case(f"{name_of(dtype)} {list(shape)}", (x, _P), wanted)

        nothing = draw.normal((2, 0, 16), dtype)
        yield _certain(f"{name_of(dtype)} nothing dropped", x, 0.0, x)
        yield _certain(f"{name_of(dtype)} all dropped", x, 1.0, torch.zeros_like(x))
        yield _certain(f"{name_of(dtype)} no elements", nothing, _P, nothing)


def _certain(name: str, x: Tensor, p: float, exact: Tensor) -> Case:
    """Where no random number matters."""
    wanted = (Result("the result", x.dtype), None)
    return Case(name, (x, p), wanted, exact=Exact((exact.double(), None)))


@Case.of("dropout_bwd")
def _backward_of_dropout(op: str, draw: Draw) -> Iterator[Case]:
    """By the mask of the forward, which its result for ones shows."""
    if draw.forward is None:
        raise ValueError(f"check: forward: {op} reads the mask of a dropout_fwd: which is it?")
    for dtype in draw.dtypes:
        for shape in ((64, 96), (3, 5, 256), (17,), (0, 16)):
            for p in (0.0, _P, 1.0):
                grad = draw.normal(shape, dtype)
                out, mask = draw.forward(torch.ones_like(grad), p)
                kept = (out != 0).double()
                exact = grad.double() * kept / (1 - p if p < 1 else 1)
                into = draw.place(shape, dtype) if p == _P else None
                left = [] if into is None else [(into, Result("grad_input", dtype))]
                values = Exact(exact, [exact] * len(left))
                name = f"{name_of(dtype)} {list(shape)} p={p}"
                wanted = (Result("the gradient", dtype),)
                yield Case(name, (grad, mask, p, into), wanted, left=left, exact=values)


# ---- products ------------------------------------------------------------------------------------


_PRODUCTS = (
    *((16, 32, 48), (1, 16, 64), (33, 65, 17), (128, 96, 256)),
    *((0, 4, 16), (4, 0, 16), (4, 6, 0)),
)


class _Options(NamedTuple):
    """Options of a product; see `generic_gemm`."""

    bias: Tensor | None = None
    gelu: bool = False
    grad: bool = False
    gelu_in: Tensor | None = None
    out: Tensor | None = None
    accumulate: bool = False
    factors: tuple[float, float | None] = (1.0, None)
    quantizer: Any = None


def _case(name: str, operands: tuple, dtype: torch.dtype, **options: Any) -> Case:
    """D = op(B) op(A) of ``operands`` (A, transA, B, transB), and what goes with it."""
    bias, gelu, grad, gelu_in, out, accumulate, factors, quantizer = _Options(**options)
    A, transA, *_ = operands
    depth = A.shape[-1] if transA else A.shape[:-1].numel()
    space = torch.empty(1 << 16, dtype=torch.uint8, device=A.device)
    args = (
        *(*operands, out, quantizer, dtype, bias, None, gelu, gelu_in, grad),
        *(space, space.numel(), accumulate, True, None, None, None, False, *factors),
    )
    made = Result("the result", None if quantizer else dtype, depth, quantizer=quantizer)
    sums = before = None
    left = [] if out is None else [(out, Result("D", dtype, depth))]
    if grad and bias is not None:
        sums = Result("the gradient of the bias", bias.dtype, depth)
    if gelu and not grad:
        lacks = gelu_in is not None
        before = Result("the value before gelu", dtype, depth, may_lack=lacks)
        left += [(gelu_in, Result("gelu_in", dtype, depth))] * lacks
    return Case(name, args, (made, sums, before, None), written=(space,), left=tuple(left))


@Case.of("generic_gemm")
def _gemm(draw: Draw) -> Iterator[Case]:
    for dtype in draw.dtypes:
        what = name_of(dtype)
        for m, n, k in _PRODUCTS:
            for transA, transB in product((True, False), repeat=2):
                A = draw.normal((n, k) if transA else (k, n), dtype)
                B = draw.normal((k, m) if transB else (m, k), dtype)
                layout = f"{'NT'[transA]}{'NT'[transB]}"
                yield _case(f"{what} {m}x{n}x{k} {layout}", (A, transA, B, transB), dtype)
        for name, options in _product_options(draw, dtype, 24, 40):
            A, B = draw.normal((40, 32), dtype), draw.normal((24, 32), dtype)
            yield _case(f"{what} {name}", (A, True, B, False), **{"dtype": dtype, **options})
        for kind, quantizer in quantizers_of_values(draw.device).items():
            A, B = draw.normal((32, 48), dtype), draw.normal((64, 48), dtype)
            operands = A, True, B, False
            yield _case(f"{what} cast, {kind}", operands, dtype, quantizer=quantizer)
        # Operands of more dims: of a forward, and of the gradient of an input and of a weight.
        x, weight = draw.normal((2, 3, 16), dtype), draw.normal((5, 6, 16), dtype)
        yield _case(f"{what} forward of [2, 3, 16]", (weight, True, x, False), dtype)
        dy, bias = draw.normal((2, 3, 8), dtype), draw.normal((8,), dtype)
        yield _case(
            f"{what} gradients of [2, 3, 16]", (x, False, dy, True), dtype, bias=bias, grad=True
        )
        weight, before = draw.normal((8, 16), dtype), draw.normal((2, 3, 16), dtype)
        through: dict[str, Any] = {"gelu": True, "grad": True, "gelu_in": before}
        name, operands = f"{what} through gelu to [2, 3, 16]", (weight, False, dy, False)
        yield _case(name, operands, dtype, bias=before[0, 0], **through)
        # A weight gradient: dy^T x, whose bias gradient are the sums of dy.
        x, dy = draw.normal((32, 40), dtype), draw.normal((32, 24), dtype)
        bias = draw.normal((24,), dtype)
        yield _case(f"{what} gradient of a bias", (x, False, dy, True), dtype, bias=bias, grad=True)
    yield from _mixed_products(draw)
    yield from _quantized_products(draw)


def _product_options(
    draw: Draw, dtype: torch.dtype, m: int, n: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the options of a product [m, n]."""
    f32, bias, before = torch.float32, draw.normal((n,), dtype), draw.normal((m, n), dtype)
    through = {"gelu": True, "grad": True, "gelu_in": draw.normal((m, n), dtype)}
    yield "bias", {"bias": bias}
    yield "into D", {"out": draw.place((m, n), dtype)}
    yield "to float32", {"dtype": f32}
    yield "into D of float32", {"out": draw.place((m, n), f32), "dtype": f32}
    yield "a factor", {"factors": (3.0, None)}
    yield "bias and gelu", {"bias": bias, "gelu": True}
    place = draw.place((m, n), dtype)
    yield "bias and gelu, whose argument is kept", {"bias": bias, "gelu": True, "gelu_in": place}
    yield "gradient through gelu", through
    yield "gradient through gelu and bias", {**through, "bias": bias}

    def added_to(kind: torch.dtype) -> dict[str, Any]:
        return {"out": draw.among_others(before.to(kind)), "accumulate": True, "dtype": kind}

    for kind in (f32, torch.float16, torch.bfloat16):
        yield f"accumulated in {name_of(kind)}", added_to(kind)
    yield "factors", {**added_to(dtype), "factors": (0.5, 2.0)}
    yield "factors and bias", {**added_to(dtype), "factors": (-0.5, 0.25), "bias": bias}


def _quantized_products(draw: Draw) -> Iterator[Case]:
    device, bf16 = draw.device, torch.bfloat16
    kinds = "current", "tiles", "square tiles", "mxfp8", "nvfp4"

    def operands(one: str, other: str, sign: bool = False) -> tuple:
        made = [draw.normal((rows, 64), bf16) for rows in (48, 32)]
        pairs = zip((one, other), made, strict=True)
        A, B = (quantizers(device)[kind](t.sign() if sign else t) for kind, t in pairs)
        return A, True, B, False

    for kind in kinds:
        name, bias = f"quantized, {kind}", draw.normal((48,), bf16)
        yield _case(name, operands(kind, kind), bf16)
        yield _case(f"{name}, bias and gelu", operands(kind, kind), bf16, bias=bias, gelu=True)
        # Sums of 1 and -1 are exact however they are added, so the bias shows how it was rounded.
        bias, signs = draw.normal((48,), torch.float32, 8.0), operands(kind, kind, True)
        yield _case(f"{name}, bias in float32", signs, torch.float32, bias=bias)
    for one, other in combinations(kinds, 2):
        for gelu in (False, True):
            name = f"{one} times {other}{', gelu' * gelu}"
            yield _case(name, operands(one, other), bf16, gelu=gelu)


def _mixed_products(draw: Draw) -> Iterator[Case]:
    """Operands of two dtypes."""
    for one, other in permutations(draw.dtypes, 2):
        A, B = draw.normal((24, 32), one), draw.normal((17, 32), other)
        for gelu in (False, True):
            name = f"{name_of(one)} and {name_of(other)}{', gelu' * gelu}"
            yield _case(name, (A, True, B, False), torch.float32, gelu=gelu)


# ---- rotary positions ----------------------------------------------------------------------------


_TOKENS, _BATCH, _HEADS, _DIM = 8, 2, 3, 16


def _angles(draw: Draw, count: int, interleaved: bool) -> Tensor:
    """fp32 [positions, 1, 1, count]: each frequency turns two channels."""
    rates = 10000.0 ** -(torch.arange(0, count, 2, dtype=torch.float64) / count)
    each = torch.arange(4 * _TOKENS, dtype=torch.float64)[:, None] * rates
    both = each.repeat_interleave(2, -1) if interleaved else torch.cat((each, each), -1)
    return both.float()[:, None, None].to(draw.device)


def _format(form: str) -> tuple[tuple[int, ...], int]:
    """Leading dims of tensors of a format, and its `NVTE_QKV_Format`."""
    from transformer_engine.plugin.core.ops import NVTE_QKV_Format

    leading = {"sbhd": (_TOKENS, _BATCH), "bshd": (_BATCH, _TOKENS), "thd": (12,)}[form]
    return leading, NVTE_QKV_Format[f"NVTE_{form.upper()}"]


def _starts(draw: Draw) -> Tensor:
    return torch.tensor([3, 11], dtype=torch.int32, device=draw.device)


@Case.of("fused_rope_forward", "fused_rope_backward")
def _rope(op: str, draw: Draw) -> Iterator[Case]:
    backward = op == "fused_rope_backward"
    ranks = (_DIM, (1, 0)), (12, (1, 0)), (12, (2, 1))
    options = product(draw.dtypes, ("sbhd", "bshd", "thd"), (False, True), ranks)
    for dtype, form, interleaved, (count, (size, rank)) in options:
        (leading, kind), cu = _format(form), None
        if form == "thd":
            cu = torch.tensor([0, 4, 4, 12], dtype=torch.int32, device=draw.device) * size
        x = draw.normal((*leading, _HEADS, _DIM), dtype)
        starts = () if backward else (None,)
        angles = _angles(draw, count, interleaved)
        how = f"{' interleaved' * interleaved} rank {rank} of {size}"
        name = f"{name_of(dtype)} {form} {count} of {_DIM}{how}"
        args = (x, angles, *starts, kind, interleaved, cu, size, rank)
        yield Case(name, args, (Result("the result", dtype),))
    # Sequences that begin at positions of their own (a gradient takes none), or have such angles.
    for dtype, form in product(draw.dtypes, ("sbhd", "bshd")):
        leading, kind = _format(form)
        own = draw.normal((_TOKENS, _BATCH, 1, 12), torch.float32)
        own[..., 6:] = own[..., :6]
        given = {"angles": (own, *(() if backward else (None,)))}
        if not backward:
            given["positions"] = _angles(draw, 12, False), _starts(draw)
        for what, angles_and_starts in given.items():
            x = draw.normal((*leading, _HEADS, _DIM), dtype)
            args = (x, *angles_and_starts, kind, False, None, 1, 0)
            name = f"{name_of(dtype)} {form} {what} of each sequence"
            yield Case(name, args, (Result("the result", dtype),))


_SIZES = ((32, 16, 24), (16, 16, 16), (48, 8, 8))
"""Channels of a group of queries, of its key and of its value, in a projection."""


@Case.of("fused_qkv_rope_forward", "fused_qkv_rope_backward")
def _projection(op: str, draw: Draw) -> Iterator[Case]:
    """Queries, keys and values of a projection, and its gradient."""
    backward = op == "fused_qkv_rope_backward"
    options = product(draw.dtypes, ("sbhd", "bshd"), (False, True), _SIZES, ((1, 0), (2, 1)))
    for dtype, form, interleaved, sizes, (size, rank) in options:
        leading, kind = _format(form)
        angles = [_angles(draw, n, interleaved) for n in (sizes[1], sizes[1] // 2)]
        rest = (list(sizes), kind, interleaved, size, rank)
        name = f"{name_of(dtype)} {form} {list(sizes)}{' interleaved' * interleaved}"
        ending = f" rank {rank} of {size}"
        if backward:
            heads = _HEADS * sizes[0] // sizes[1], _HEADS, _HEADS
            widths = sizes[1], sizes[1], sizes[2]
            pairs = zip(heads, widths, strict=True)
            grads = [draw.normal((*leading, *pair), dtype) for pair in pairs]
            wanted = (Result("the gradient", dtype),)
            yield Case(f"{name}{ending}", (*grads, *angles, *rest), wanted)
            continue
        x = draw.normal((*leading, _HEADS, sum(sizes)), dtype)
        wanted = tuple(Result(what, dtype) for what in ("queries", "keys", "values"))
        yield Case(f"{name}{ending}", (x, *angles, None, *rest), wanted)
        if size == 1:
            args = (x, *angles, _starts(draw), *rest)
            yield Case(f"{name} from positions{ending}", args, wanted)
