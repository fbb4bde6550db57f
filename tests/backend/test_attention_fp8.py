# SPDX-License-Identifier: Apache-2.0
"""attention and its gradient in FP8: values, casts, scales and amaxes, lengths, dropout, errors."""

import pytest
import torch
from attention_fp8_reference import (
    INPUTS,
    MAX,
    Call,
    Definition,
    Quantized,
    assert_gradients,
    device_floats,
    flips,
    may_of,
    operands_of,
    problem_of,
    quantized,
    rounded,
)
from attention_reference import drop_factors, new_pair, pair_on
from buffers import normal
from comparators import assert_bits, assert_nmse, assert_repeats
from refusals import check_refused
from tols import BF16, E4M3, E5M2, F32, tol

GRADS = [E4M3, E5M2]
# batch, queries, keys, heads, kv_heads, d_k, d_v: around blocks of 96 and 192, groups, odd lengths.
SHAPES = {
    "groups": (2, 70, 210, 4, 2, 32, 48),
    "blocks": (1, 300, 333, 2, 2, 64, 64),
    "few": (2, 5, 7, 2, 1, 16, 16),
    "128 channels": (2, 130, 257, 4, 2, 128, 128),
}
WINDOWS = {
    "full": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 9, "diagonal": 3},
}
LIMITS = WINDOWS | {"softcap": {"softcap": 0.8}}  # the last one is refused on CUDA


def problem(rng, name, window):
    """(operands, definition, options of a call) of a shape and a window."""
    return problem_of(rng, SHAPES[name], LIMITS[window])


@pytest.mark.parametrize("window", LIMITS)
@pytest.mark.parametrize("name", SHAPES)
def test_every_cast_is_where_it_belongs(rng, name, window):
    """On the CPU, against float64 with each cast written out: what differs lies at a boundary."""
    operands, definition, options = problem(rng, name, window)
    call = Call("cpu", operands, **options)
    output = call.forward()
    exact, scale = definition.output(), float(output.scales[1])
    bound = flips(exact, E4M3)
    assert_nmse(output.wide, rounded(exact, E4M3, scale), bound, "output")
    assert scale == float(operands[2].scales[1])  # no output exceeds the values
    assert_nmse(call.output_amax, exact.abs().max().reshape(1), tol("amax", F32))
    assert_nmse(call.weights_amax, definition.dropped.max().reshape(1), tol("amax", F32))
    some = definition.statistics.isfinite()
    assert_nmse(call.statistics[some], definition.statistics[some], tol("terms", F32, 512) ** 2)
    assert (call.statistics[~some] == -torch.inf).all()


@pytest.mark.parametrize("grads", GRADS)
@pytest.mark.parametrize("window", LIMITS)
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_cast_where_they_should(rng, name, window, grads):
    assert_gradients(rng, problem(rng, name, window), grads)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("name", SHAPES)
def test_values(device, rng, name, window):
    """Against the definition without casts: one rounding of the weights, one of the output."""
    operands, definition, options = problem(rng, name, window)
    call = Call(device, operands, **options)
    output = call.forward()
    assert_nmse(output.to("cpu").wide, definition.plain(), 2 * tol("quantize", E4M3), "output")
    some = definition.statistics.isfinite()
    found = call.statistics.cpu()
    assert_nmse(found[some], definition.statistics[some], tol("quantize", E4M3))
    exact = definition.plain().abs().max().reshape(1)
    assert_nmse(call.output_amax, exact, 2 * tol("quantize", E4M3))


def sequence_first(tensor):
    """[batch, tokens, ..] that lies as [tokens, batch, ..]."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("lay_out", [torch.clone, sequence_first], ids=["bshd", "sbhd"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 24), (192, 257)])
@pytest.mark.parametrize("grads", GRADS)
@pytest.mark.parametrize("window", WINDOWS)
def test_gradients(device, rng, window, grads, queries, keys, lay_out):
    """In 128 channels, which cuDNN's kernel has: against the definition without its casts."""
    shape, scale = (2, queries, keys, 4, 2, 128, 128), 128**-0.5
    operands = operands_of(rng, shape)
    definition = Definition(operands, scale, may_of(shape, WINDOWS[window]))
    operands = [Quantized(lay_out(x.data), x.scales) for x in operands]
    call = Call(device, operands, scale=scale, **WINDOWS[window])
    output = call.forward().to("cpu")
    grad = quantized(lay_out(normal(rng, output.data.shape, F32)) * 0.01, grads)
    plain, of_scores = definition.plain_gradients(grad, output)
    scores_scale = MAX[grads] / float(of_scores.abs().max())
    grads_scale = MAX[grads] / max(float(x.abs().max()) for x in plain)
    made = call.backward(grad, scores_scale, grads_scale)
    for what, x, expected in zip(INPUTS, made, plain, strict=True):
        assert_nmse(x.to("cpu").wide, expected, 3 * tol("quantize", grads), what)
    assert_nmse(call.scores_amax, of_scores.abs().max().reshape(1), 2 * tol("quantize", E4M3))


def test_one_key_gives_its_value(rng):
    """Weights of 1: the scale of the values, and their bits."""
    operands = operands_of(rng, (2, 5, 1, 2, 2, 16, 32))
    output = Call("cpu", operands, scale=0.25).forward()
    assert_bits(output.data, operands[2].data.expand(2, 5, 2, 32).contiguous())
    assert_bits(output.scales, operands[2].scales)


def test_a_scale_is_given_and_amaxes_are_raised(device, rng):
    """Amaxes of earlier calls stay where they are larger."""
    operands, definition, options = problem(rng, "128 channels", "full")
    call = Call(device, operands, **options)
    call.output_amax, call.weights_amax = device_floats(device, 1e6, 1e-6)
    (scale,) = device_floats(device, 3.5)
    output = call.forward(scale).to("cpu")
    assert_bits(output.scales, torch.tensor([1.0, 3.5 * 3.5]).div(3.5))
    assert_nmse(output.wide, definition.plain(), 2 * tol("quantize", E4M3))
    assert call.output_amax.item() == 1e6 and call.weights_amax.item() > 1e-6


def test_lengths(device, rng):
    """Keys behind the end do not count; queries behind it are 0."""
    shape = (3, 40, 72, 2, 2, 64, 64)
    operands, lengths = operands_of(rng, shape), ([40, 0, 17], [72, 5, 33])
    of_queries, of_keys = (torch.tensor(n, dtype=torch.int32, device=device) for n in lengths)
    call = Call(device, operands, scale=0.125, query_lengths=of_queries, key_lengths=of_keys)
    output = call.forward().to("cpu").wide
    for i, (queries, keys) in enumerate(zip(*lengths, strict=True)):
        assert (output[i, queries:] == 0).all()
        if queries == 0:
            continue
        own = [
            quantized(x.wide[i : i + 1, :n].float(), scale=x.scales[1])
            for x, n in zip(operands, (queries, keys, keys), strict=True)
        ]
        may = torch.ones(1, 2, queries, keys, dtype=torch.bool)
        exact = Definition(own, 0.125, may).plain()
        assert_nmse(output[i : i + 1, :queries], exact, 2 * tol("quantize", E4M3))


def test_packed_sequences_are_a_padded_batch(rng):
    """The same bits."""
    lengths, longest, heads, channels = [5, 0, 200, 31], 200, 2, 32
    padded = operands_of(rng, (4, longest, longest, heads, heads, channels, channels))
    packed = [
        type(x)(torch.cat([x.data[i, :n] for i, n in enumerate(lengths)])[None], x.scales)
        for x in padded
    ]
    ends = torch.tensor(lengths, dtype=torch.int32)
    starts = torch.cat([torch.zeros(1), ends.cumsum(0)]).to(torch.int32)
    whole = Call("cpu", padded, scale=0.2, window_right=0, query_lengths=ends, key_lengths=ends)
    call = Call(
        "cpu", packed, scale=0.2, window_right=0, query_offsets=starts, key_offsets=starts,
        max_queries=longest, max_keys=longest,
    )  # fmt: skip
    call.statistics = torch.empty(1, sum(lengths), heads)
    expected, output = whole.forward(), call.forward()
    rows = [expected.data[i, :n] for i, n in enumerate(lengths)]
    assert_bits(output.data, torch.cat(rows)[None])


@pytest.mark.gpu
def test_refused_on_a_gpu(rng):
    """What cuDNN's kernels end a process with, or compute otherwise."""
    operands = operands_of(rng, (1, 40, 40, 2, 2, 128, 128))
    starts = torch.tensor([0, 15, 40], dtype=torch.int32, device="cuda")
    packed = {
        "query_offsets": starts, "key_offsets": starts, "max_queries": 25, "max_keys": 25,
    }  # fmt: skip
    drops = {"dropout": 0.1, "rng": pair_on("cuda", new_pair(rng))}
    for options, text in (
        (packed, "packed sequences in FP8"),
        (drops, "dropout in FP8"),
        ({"softcap": 0.8}, "a softcap in FP8"),
    ):
        call = Call("cuda", operands, scale=0.2, **options)
        if "query_offsets" in options:
            call.statistics = torch.empty(1, 40, 2, device="cuda")
        with pytest.raises(NotImplementedError, match=text):
            call.forward()


@pytest.mark.gpu
@pytest.mark.parametrize("queries", [24, 63, 130])
def test_gradients_of_partial_blocks_are_refused_on_a_gpu(rng, queries):
    """What cuDNN makes of the last queries is wrong."""
    operands = operands_of(rng, (2, queries, 128, 2, 2, 128, 128))
    call = Call("cuda", operands, scale=0.1)
    output = call.forward()
    grad = quantized(normal(rng, output.data.shape, F32), E5M2)
    with pytest.raises(NotImplementedError, match=f"{queries} queries in FP8.*no multiple of 64"):
        call.backward(grad, 1.0, 1.0)


def test_dropout(rng):
    """Weights grow by what is kept; their scale and that of the output have room for it."""
    shape, p = (2, 40, 72, 2, 2, 32, 32), 0.3
    operands, pair = operands_of(rng, shape), new_pair(rng)
    factors = drop_factors(pair, (2, 2, 40, 72), p)
    definition = Definition(operands, 0.2, may_of(shape, {}), factors, p)
    call = Call("cpu", operands, scale=0.2, dropout=p, rng=pair_on("cpu", pair))
    output = call.forward()
    scale = float(output.scales[1])
    kept = torch.ones(()) - torch.tensor(p)
    assert_bits(output.scales[1], operands[2].scales[1] * kept)
    expected = rounded(definition.output(), E4M3, scale)
    assert_nmse(output.wide, expected, flips(expected, E4M3))


def test_no_keys_give_zeros(device, rng):
    operands = operands_of(rng, (2, 3, 1, 2, 2, 32, 32))[:1]
    nothing = quantized(torch.zeros(2, 0, 2, 32), scale=2.0)
    call = Call(device, [*operands, nothing, nothing], scale=1.0)
    output = call.forward()
    assert (output.data.float() == 0).all() and (call.statistics == -torch.inf).all()
    assert output.scales.tolist() == [0.5, 2.0]


def test_bits_do_not_depend_on_threads(rng):
    operands, _, options = problem(rng, "blocks", "causal")
    grad = quantized(normal(rng, (1, 300, 2, 64), F32), E5M2)

    def run():
        call = Call("cpu", operands, **options)
        output = call.forward()
        made = call.backward(grad, 100.0, 50.0)
        amaxes = call.output_amax, call.weights_amax, call.scores_amax, call.grads_amax
        return [output.data, *(x.data for x in made), *amaxes]

    assert_repeats(run)


def test_counted_by_dtype(device, rng, counters):
    call = Call(device, operands_of(rng, (1, 64, 40, 2, 2, 128, 128)), scale=0.1)
    output = call.forward()
    grad = quantized(normal(rng, output.data.shape, F32), E5M2)
    call.backward(grad, 1.0, 1.0)
    found = {name: n for name, n in counters().items() if name.startswith("attention")}
    assert found == {f"attention.{device}.e4m3": 1, f"attention_backward.{device}.e4m3": 1}


# ---- errors --------------------------------------------------------------------------------------

HEADS = torch.zeros(1, 3, 2, 16)
NARROW, ONES = HEADS.to(E4M3), torch.ones(2)
GOOD = {
    "query": NARROW, "key": NARROW, "value": NARROW, "output": NARROW.clone(),
    "query_scales": ONES, "key_scales": ONES, "value_scales": ONES, "output_scales": ONES.clone(),
}  # fmt: skip
ALL = (*INPUTS, "output")
WRONG = {
    "e5m2": (TypeError, "query: dtype e5m2, expected", dict.fromkeys(ALL, HEADS.to(E5M2))),
    "mixed": (TypeError, "key: dtype bf16, expected e4m3", {"key": HEADS.to(BF16)}),
    "wide output": (TypeError, "output: dtype bf16, expected e4m3", {"output": HEADS.to(BF16)}),
    "no scales": (ValueError, "key_scales: is missing", {"key_scales": None}),
    "no scales of the output": (ValueError, "output_scales: is missing", {"output_scales": None}),
    "short scales": (
        ValueError,
        "value_scales: .* expected a vector of 2",
        {"value_scales": torch.ones(1)},
    ),
    "mask": (
        ValueError,
        "mask: it does not go with FP8",
        {"mask": torch.zeros(1, 1, 3, 3) > 0},
    ),
    "bias": (ValueError, "bias: it does not go with FP8", {"bias": torch.zeros(1, 1, 3, 3)}),
    "sink": (ValueError, "sink: it does not go with FP8", {"sink": torch.zeros(2)}),
    "slopes": (ValueError, "slopes: it does not go with FP8", {"slopes": torch.zeros(2)}),
    "top": (ValueError, "top: it does not go with FP8", {"top": torch.zeros(2)}),
}
PLAIN = {"query": HEADS, "key": HEADS, "value": HEADS, "output": HEADS.clone()}
WIDE = {
    "scales": (ValueError, "query_scales: there is no FP8", {"query_scales": ONES}),
    "a scale": (ValueError, "output_scale: there is no FP8", {"output_scale": torch.ones(1)}),
    "an amax": (ValueError, "weights_amax: there is no FP8", {"weights_amax": torch.ones(1)}),
    "output scales": (ValueError, "output_scales: there is no FP8", {"output_scales": ONES}),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_refused(device, case):
    check_refused("attention", device, case, GOOD)


@pytest.mark.parametrize("case", WIDE.values(), ids=WIDE)
def test_refused_in_high_precision(device, case):
    check_refused("attention", device, case, PLAIN)


GOOD_BACKWARD = {
    "grad_output": NARROW, **GOOD, "statistics": torch.zeros(1, 2, 3),
    "grad_output_scales": ONES, "grads_scales": ONES.clone(),
    "grad_scores_scale": torch.ones(1), "grads_scale": torch.ones(1),
}  # fmt: skip
PAIR = torch.zeros(2, dtype=torch.int64)
WRONG_BACKWARD = {
    "wide gradient": (
        TypeError,
        "grad_output: dtype bf16, expected e4m3 or e5m2",
        {"grad_output": HEADS.to(BF16)},
    ),
    "other dtype": (TypeError, "grad_key: dtype e5m2, expected e4m3", {"grad_key": HEADS.to(E5M2)}),
    "no scale": (ValueError, "grads_scale: is missing", {"grads_scale": None}),
    "no scale of the scores": (
        ValueError,
        "grad_scores_scale: is missing",
        {"grad_scores_scale": None},
    ),
    "no scales": (ValueError, "grad_output_scales: is missing", {"grad_output_scales": None}),
    "nowhere for scales": (ValueError, "grads_scales: is missing", {"grads_scales": None}),
    "dropout": (
        ValueError,
        "dropout: 0.5, expected 0",
        {"dropout": 0.5, "rng": PAIR},
    ),
}


@pytest.mark.parametrize("case", WRONG_BACKWARD.values(), ids=WRONG_BACKWARD)
def test_gradient_refused(device, case):
    check_refused("attention_backward", device, case, GOOD_BACKWARD)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "options", "match"),
    [
        (16, {}, "16 and 16 channels in FP8, which has 128"),
        (128, {"deterministic": 1}, "repeatable gradients in FP8"),
    ],
)
def test_what_no_kernel_has(size, options, match):
    operands = [quantized(torch.ones(1, 8, 2, size), scale=1.0)] * 3
    call = Call("cuda", operands, **options)
    call.forward() if not options else None
    with pytest.raises(NotImplementedError, match=match):
        call.backward(quantized(torch.ones(1, 8, 2, size), E5M2, 1.0), 1.0, 1.0)


@pytest.mark.gpu
def test_one_query_on_a_gpu():
    one, two = (quantized(torch.ones(1, n, 2, 16), scale=1.0) for n in (1, 2))
    with pytest.raises(NotImplementedError, match="one query in FP8"):
        Call("cuda", [one, two, two]).forward()
