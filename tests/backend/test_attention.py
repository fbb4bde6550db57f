# SPDX-License-Identifier: Apache-2.0
"""attention and its gradient: values, layouts, groups, masks, lengths, special numbers, dropout."""

import itertools
import threading

import pytest
import torch
from attention_reference import kept, new_pair
from backend.attention_problem import SHAPE, Problem
from buffers import HIGH, LAYOUTS, name_of, normal
from comparators import assert_bits, assert_nmse, assert_repeats
from tols import BF16, F16, F32, tol

from transformer_engine import _core

NAN, INF = float("nan"), float("inf")
INPUTS = ("query", "key", "value")
# Around the rows of a tile and the blocks of queries (48, 96, 192) and of keys (192).
LENGTHS = [(1, 1), (1, 193), (5, 7), (13, 192), (47, 96), (97, 191), (193, 65), (200, 400)]


def random_mask(rng, shape):
    return torch.from_numpy(rng.integers(0, 3, shape) == 0)


def some_dims(shape, which):
    """The shape with 1 for every dim that is not in `which`."""
    return tuple(size if dim in which else 1 for dim, size in enumerate(shape))


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_lengths_of_blocks(dtype, lengths, causal, rng):
    problem = Problem(rng, (2, *lengths, 2, 2, 16, 16), dtype, window_right=0 if causal else -1)
    # With one key for all, the exact gradients of the scores are 0, and so are the naive ones.
    problem.check(naive=dtype if dtype != F32 and lengths[0] > 1 else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_layouts(dtype, layout, rng):
    bias = normal(rng, (1, 4, 70, 210), dtype)
    Problem(rng, dtype=dtype, bias=bias, window_right=130).check(layout)


@pytest.mark.parametrize("widths", [(1, 1), (8, 33), (33, 8), (80, 64), (200, 130), (0, 4), (4, 0)])
def test_widths_of_heads(widths, rng):
    Problem(rng, (1, 30, 40, 2, 1, *widths), window_right=20).check()


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (6, 3), (1, 1)])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_grouped_heads(dtype, heads, rng):
    Problem(rng, (2, 100, 100, *heads, 16, 16), dtype, window_right=0).check()


@pytest.mark.parametrize("scale", [0.125, -0.3, 0.0, 1.0])
def test_scale(scale, rng):
    Problem(rng, (2, 30, 40, 2, 2, 16, 8), F32, scale=scale).check()


def test_large_scores_do_not_overflow(rng):
    """Only differences of scores matter; keys far below the largest one get 0."""
    problem = Problem(rng, (1, 20, 400, 2, 2, 8, 8))
    spread = torch.from_numpy(rng.integers(0, 2, (1, 2, 20, 400))) * 2.0**15
    for shift in (-(2.0**16), 2.0**16):
        problem.bias = spread + shift
        problem.tensors["query"] = problem.tensors["query"].round()  # scores are exact
        problem.tensors["key"] = problem.tensors["key"].round()
        problem.options["scale"] = 1.0
        exact = problem.reference(torch.float64)[0]
        assert_nmse(problem.run()["output"], exact, tol("attention", F32, 400))


@pytest.mark.parametrize("kind", ["sbhd", "packed", "expanded"])
def test_any_strides(kind, rng):
    """Sequence first, views into packed tensors, one key for all: the same bits as copies."""
    problem = Problem(rng, (2, 50, 50, 3, 3, 16, 16), BF16, window_right=0)
    inputs, grad = list(problem.tensors.values()), problem.grad
    if kind == "sbhd":
        inputs = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs]
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
        outputs = [torch.empty_like(t) for t in inputs]
    elif kind == "packed":
        inputs = list(torch.stack(inputs, 3).unbind(3))
        outputs = list(torch.empty(2, 50, 3, 3, 16, dtype=BF16).unbind(3))
    else:
        inputs[1] = inputs[1][:, :1].expand(inputs[1].shape)
        inputs[2] = inputs[2][:1].expand(inputs[2].shape)
        outputs = [torch.empty(t.shape, dtype=BF16) for t in inputs]
    output = torch.empty(50, 2, 3, 16, dtype=BF16).transpose(0, 1)
    statistics = torch.empty(2, 3, 50)
    options = problem.arguments()
    _core.attention(*inputs, output, statistics=statistics, **options)
    wanted = dict(zip(("grad_query", "grad_key", "grad_value"), outputs, strict=True))
    _core.attention_backward(grad, *inputs, output, statistics, **wanted, **options)
    problem.tensors = dict(zip(INPUTS, (t.contiguous() for t in inputs), strict=True))
    expected = problem.run()
    assert_bits(output, expected["output"])
    for name, tensor in wanted.items():
        assert_bits(tensor, expected[name])


# ---- sinks, slopes, largest scores ---------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_sink(dtype, lengths, causal, rng):
    sink, window = normal(rng, (2,), F32), 0 if causal else -1
    problem = Problem(rng, (2, *lengths, 2, 2, 16, 16), dtype, sink=sink, window_right=window)
    problem.check(naive=dtype if dtype != F32 and lengths[0] > 1 else None)


def test_a_sink_of_zero_is_a_key_without_a_value(rng):
    """Softmax "off by one": the same as one more key of score 0 whose value is 0."""
    problem = Problem(rng, (2, 70, 210, 4, 2, 16, 16), sink=torch.zeros(4))
    more = Problem(rng, (2, 70, 211, 4, 2, 16, 16))
    more.grad = problem.grad
    for name, tensor in problem.tensors.items():
        more.tensors[name] = tensor
    for name in ("key", "value"):
        tensor = problem.tensors[name]
        more.tensors[name] = torch.cat([tensor, torch.zeros_like(tensor[:, :1])], 1)
    made, expected = problem.check(), more.run()
    for name in ("output", "grad_query"):
        assert_nmse(made[name], expected[name].double(), tol("attention", F32, 211), name)


@pytest.mark.parametrize("sink", [-INF, -300.0, 300.0])
def test_extreme_sinks(sink, rng):
    """One of -Inf is none, to the last bit; a large one takes all."""
    problem = Problem(rng, sink=torch.full((4,), sink), window_right=100)
    if sink > 0:
        made = problem.run()
        assert (made["output"].abs() < torch.finfo(F32).tiny).all()
        assert (made["statistics"] == sink).all()
        return
    made = problem.check()
    problem.sink = None
    for name, tensor in problem.run().items():
        assert_bits(made[name], tensor)
    assert (made["grad_sink"] == 0).all()


def small_slopes(rng, shape):
    """Slopes that leave scores about as large as they are."""
    return normal(rng, shape, F32) / 128


@pytest.mark.parametrize("kind", ["heads", "sequences", "one sequence"])
@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_slopes(dtype, bottom_right, kind, rng):
    shape = {"heads": (4,), "sequences": (2, 4), "one sequence": (1, 4)}[kind]
    slopes, lengths = small_slopes(rng, shape), {"query": [70, 31], "key": [150, 210]}
    options = {"slopes": slopes, "bottom_right": bottom_right, "diagonal": -3}
    Problem(rng, dtype=dtype, lengths=lengths, **options).check()
    Problem(rng, dtype=dtype, window_left=40, **options).check()


def test_slopes_may_lie_apart(rng):
    slopes = small_slopes(rng, (2, 7))
    problem = Problem(rng, slopes=slopes[:, :4].contiguous())
    expected = problem.run()
    problem.slopes = slopes[:, :4]
    for name, tensor in problem.run().items():
        assert_bits(tensor, expected[name])


@pytest.mark.parametrize("seed", range(24))
def test_any_softmax(seed, rng):
    """Random combinations of everything."""

    def pick(*values):
        return values[int(rng.integers(len(values)))]

    batch, queries, keys = pick(1, 2, 3), pick(1, 7, 50, 101), pick(1, 33, 100, 230)
    groups, d_k, d_v = pick(1, 2), pick(8, 20), pick(8, 12)
    options = {
        "sink": pick(None, torch.zeros(4), normal(rng, (4,), F32)),
        "slopes": pick(None, small_slopes(rng, (4,)), small_slopes(rng, (batch, 4))),
        "window_left": pick(-1, -1, 0, 20),
        "window_right": pick(-1, 0, 0, 10),
        "diagonal": pick(0, 0, -10, 30),
        "bottom_right": pick(False, True),
        "softcap": pick(0.0, 0.0, 0.4, 20.0),
    }
    if pick(False, True):
        options["mask"] = random_mask(rng, (pick(1, batch), pick(1, 4), queries, keys))
    if pick(False, True):
        options["bias"] = normal(rng, (pick(1, batch), pick(1, 4), pick(1, queries), keys), F32)
    if pick(False, True):
        ends = [[pick(0, 1, n, n // 2) for _ in range(batch)] for n in (queries, keys)]
        options["lengths"] = dict(zip(("query", "key"), ends, strict=True))
    if pick(False, False, True):
        options |= {"pair": new_pair(rng), "dropout": 0.3}
    Problem(rng, (batch, queries, keys, 4, groups, d_k, d_v), pick(*HIGH), **options).check()


def test_largest_score_of_nothing(rng):
    mask = torch.zeros(1, 4, 1, 1, dtype=torch.bool)
    mask[:, 2] = True
    made = Problem(rng, mask=mask, sink=torch.ones(4)).check()
    assert made["top"][2] == -INF and made["top"][[0, 1, 3]].isfinite().all()


@pytest.mark.parametrize("special", [NAN, INF])
def test_largest_score_is_special(special, rng):
    problem = Problem(rng, bias=torch.zeros(2, 4, 70, 210))
    clean = problem.run()
    problem.bias[1, 2, 33, 100] = special
    made = problem.run()
    assert torch.equal(made["top"][2].isnan(), torch.tensor(special).isnan())
    assert made["top"][2].isnan() or made["top"][2] == special
    assert_bits(made["top"][[0, 1, 3]], clean["top"][[0, 1, 3]])


@pytest.mark.parametrize("at", range(5))
def test_empty(at, rng):
    """No sequences, queries, keys, heads; channels are in test_widths_of_heads."""
    shape = [2, 3, 4, 2, 2, 8, 8]
    shape[at if at < 3 else 3] = 0
    if at == 4:
        shape[4] = 0  # nor heads of keys
    made = Problem(rng, tuple(shape)).run()
    for name, tensor in made.items():
        expected = -INF if name in ("statistics", "top") else 0.0
        assert (tensor == expected).all(), name


def test_only_what_is_wanted_is_written(rng):
    """Each gradient has the same bits whichever others are wanted."""
    problem = Problem(rng, bias=normal(rng, (2, 1, 70, 210), F32), dtype=BF16)
    made = problem.run()
    inputs, arguments = list(problem.tensors.values()), problem.arguments()
    output = torch.empty_like(made["output"])
    _core.attention(*inputs, output, **arguments)
    assert_bits(output, made["output"])
    call = (problem.grad, *inputs, output, made["statistics"])
    names = [name for name in made if name.startswith("grad_")]
    for count in range(len(names)):
        for some in itertools.combinations(names, count):
            grads = {name: torch.empty_like(made[name]) for name in some}
            _core.attention_backward(*call, **grads, **arguments)
            for name, tensor in grads.items():
                assert_bits(tensor, made[name])


# ---- masks, windows, biases, lengths -------------------------------------------------------------

DIMS = [(), (3,), (0, 3), (2,), (2, 3), (0,), (1, 3), (0, 1), (1, 2, 3), (0, 1, 2, 3)]


@pytest.mark.parametrize("which", DIMS, ids=str)
def test_mask(which, rng):
    shape = (SHAPE[0], SHAPE[3], SHAPE[1], SHAPE[2])
    Problem(rng, mask=random_mask(rng, some_dims(shape, which))).check()


@pytest.mark.parametrize("which", DIMS, ids=str)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=name_of)
def test_bias(dtype, which, rng):
    """Its gradient is summed over the dims that it stands for."""
    shape = (SHAPE[0], SHAPE[3], SHAPE[1], SHAPE[2])
    bias = normal(rng, some_dims(shape, which), dtype)
    problem = Problem(rng, dtype=dtype, bias=bias, window_left=30, window_right=140)
    problem.check()


@pytest.mark.parametrize("bias_dtype", HIGH, ids=name_of)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_bias_dtypes(dtype, bias_dtype, rng):
    made = Problem(rng, dtype=dtype, bias=normal(rng, (1, 4, 1, 210), bias_dtype)).check()
    assert made["grad_bias"].dtype == bias_dtype


WINDOWS = [(-1, 0, 0), (-1, 0, 140), (-1, 0, -20), (20, -1, 0), (3, 5, 30), (0, 0, 0), (1, 1, -3)]
WINDOWS += [(0, 0, 500), (2**60, 2**60, -(2**60)), (-1, 2**60, 2**60), (-7, -7, 3)]


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("queries", [1, 70, 250])
def test_window(queries, window, rng):
    shape = (2, queries, 210, 2, 1, 16, 16)
    names = ("window_left", "window_right", "diagonal")
    options = dict(zip(names, window, strict=True))
    Problem(rng, shape, F32, **options).check()
    Problem(rng, shape, F16, mask=random_mask(rng, (2, 1, 1, 210)), **options).check()


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_lengths(dtype, causal, bottom_right, rng):
    """Tokens after a sequence's length are not read: they may hold anything."""
    lengths = {"query": [70, 0, 13, 50], "key": [210, 100, 0, 195]}
    problem = Problem(
        rng,
        (4, 70, 210, 4, 2, 16, 24),
        dtype,
        lengths=lengths,
        window_right=0 if causal else -1,
        bottom_right=bottom_right,
    )
    expected = problem.check()
    for name in ("query", "key", "value"):
        for b, length in enumerate(lengths["query" if name == "query" else "key"]):
            problem.tensors[name][b, length:] = NAN
    for b, length in enumerate(lengths["query"]):
        problem.grad[b, length:] = INF
    made = problem.run()
    for name, tensor in made.items():
        assert_bits(tensor, expected[name])
    for b, length in enumerate(lengths["query"]):
        assert (made["output"][b, length:] == 0).all()
        assert (made["grad_query"][b, length:] == 0).all()
        assert (made["statistics"][b, :, length:] == -INF).all()
    for b, length in enumerate(lengths["key"]):
        assert (made["grad_key"][b, length:] == 0).all()
        assert (made["grad_value"][b, length:] == 0).all()


@pytest.mark.parametrize("name", ["query", "key"])
def test_lengths_of_one_side(name, rng):
    limit = SHAPE[1] if name == "query" else SHAPE[2]
    Problem(rng, lengths={name: [limit, limit // 3]}, window_left=40, bottom_right=True).check()


@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_query_without_keys_is_zero(dtype, rng):
    mask = random_mask(rng, (2, 4, 70, 210))
    mask[:, 1] = True
    made = Problem(rng, dtype=dtype, mask=mask).check()
    assert (made["output"][:, :, 1] == 0).all() and (made["grad_query"][:, :, 1] == 0).all()
    made = Problem(rng, dtype=dtype, mask=torch.ones(1, 1, 1, 1).bool()).run()
    for name, tensor in made.items():
        assert (tensor == (-INF if name in ("statistics", "top") else 0)).all()


# ---- softcap -------------------------------------------------------------------------------------


@pytest.mark.parametrize("cap", [0.01, 0.5, 30.0, 1e30])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_softcap(dtype, lengths, cap, rng):
    """Scores far below the cap are as they were, far above it all alike."""
    bias = normal(rng, (1, 2, *lengths), F32)
    Problem(rng, (2, *lengths, 2, 1, 16, 16), dtype, softcap=cap, scale=1.0, bias=bias).check()


def test_capped_scores_are_finite(rng):
    """What would be Inf is the cap, and has no gradient."""
    problem = Problem(rng, (1, 20, 40, 2, 2, 8, 8), softcap=3.0)
    problem.tensors["query"][0, 3] = 3e38
    made = problem.run()
    assert all(tensor.isfinite().all() for tensor in made.values())
    assert not made["grad_query"][0, 3].any()


# ---- special numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("special", [NAN, -NAN, INF])
@pytest.mark.parametrize("key", [0, 100, 209])
def test_nan_and_inf_spoil_their_query(key, special, rng):
    """A score that is NaN or Inf makes all of its query's output NaN, and nothing else's."""
    problem = Problem(rng, bias=torch.zeros(2, 4, 70, 210))
    clean = problem.run()
    problem.bias[1, 2, 33, key] = special
    made = problem.run()
    assert made["output"][1, 33, 2].isnan().all() and made["statistics"][1, 2, 33].isnan()
    assert made["grad_query"][1, 33, 2].isnan().all()
    for name in ("output", "grad_query"):
        others = torch.ones(made[name].shape[:3], dtype=torch.bool)
        others[1, 33, 2] = False
        assert_bits(made[name][others], clean[name][others])
    for name in ("grad_key", "grad_value"):  # of the head that the query goes with
        assert made[name][1, :, 1].isnan().all()
        assert_bits(made[name][:, :, 0], clean[name][:, :, 0])
        assert_bits(made[name][0], clean[name][0])


@pytest.mark.parametrize("special", [NAN, INF, -INF])
@pytest.mark.parametrize("name", INPUTS)
def test_what_is_forbidden_adds_nothing(name, special, rng):
    """A token that meets no other may hold anything; all else is as it was."""
    mask = random_mask(rng, (2, 4, 70, 210))
    at = 41
    if name == "query":
        mask[:, :, at] = True
    else:
        mask[..., at] = True
    problem = Problem(rng, mask=mask, window_right=150)
    exact = problem.reference(torch.float64)
    problem.tensors[name][:, at] = special
    if name == "query":
        problem.grad[:, at] = special
    made = problem.run()
    names = ("output", *(f"grad_{n}" for n in INPUTS))
    for made_name, expected in zip(names, exact, strict=True):
        assert_nmse(made[made_name], expected, tol("attention", F32, 280), made_name)


@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_values_spoil_those_who_attend_them(special, rng):
    """Causal: the queries from the spoilt key on, and only their channel."""
    problem = Problem(rng, (1, 200, 200, 1, 1, 8, 8), window_right=0)
    exact = problem.reference(torch.float64)[0]
    problem.tensors["value"][0, 77, 0, 3] = special
    output = problem.run()["output"]
    spoilt = torch.zeros(output.shape, dtype=torch.bool)
    spoilt[:, 77:, :, 3] = True
    assert not output[spoilt].isfinite().any()
    assert_nmse(output[~spoilt], exact[~spoilt], tol("attention", F32, 200))


def test_score_of_minus_inf_forbids(rng):
    """A bias of -Inf is a mask, up to queries to which nothing is left."""
    mask = random_mask(rng, (2, 4, 70, 210))
    mask[0, 1] = True
    by_mask = Problem(rng, mask=mask)
    by_bias = Problem(rng, bias=torch.zeros(mask.shape).masked_fill(mask, -INF))
    by_bias.tensors, by_bias.grad = by_mask.tensors, by_mask.grad
    expected, made = by_mask.run(), by_bias.run()
    for name, tensor in expected.items():
        assert_bits(made[name], tensor)


# ---- dropout -------------------------------------------------------------------------------------


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("dtype", HIGH, ids=name_of)
def test_dropout(dtype, probability, rng):
    options = {"pair": new_pair(rng), "dropout": probability, "window_right": 100}
    problem = Problem(rng, dtype=dtype, bias=normal(rng, (1, 4, 1, 210), dtype), **options)
    problem.check()


@pytest.mark.parametrize("keys", [1, 30, 193, 301])
def test_dropped_are_those_of_the_stream(keys, rng):
    """The values are a unit matrix: the outputs are the weights."""
    problem = Problem(rng, (2, 50, keys, 2, 2, 4, keys), pair=new_pair(rng), dropout=0.4)
    problem.tensors["value"] = torch.eye(keys)[None, :, None].expand(2, keys, 2, keys).contiguous()
    weights = problem.run()["output"].transpose(1, 2)
    assert torch.equal(weights != 0, kept(problem.pair, problem.scores_shape, 0.4))


def test_dropout_of_zero_needs_no_numbers(rng):
    problem = Problem(rng)
    expected = problem.run()
    problem.pair = new_pair(rng)
    for name, tensor in problem.run().items():
        assert_bits(tensor, expected[name])


# ---- repeats, threads, workspace -----------------------------------------------------------------


def test_twice_the_same(rng):
    problem = Problem(
        rng,
        (3, 200, 300, 4, 2, 32, 24),
        BF16,
        bias=normal(rng, (1, 1, 200, 300), BF16),
        pair=new_pair(rng),
        dropout=0.2,
        window_right=0,
        bottom_right=True,
    )
    assert_repeats(lambda: list(problem.run().values()))


def test_sequences_and_heads_do_not_see_each_other(rng):
    """Alone, each has the bits that it has among others, however the work is divided."""
    problem = Problem(rng, (3, 200, 250, 4, 2, 16, 16), window_right=60)
    whole = problem.run()
    for b, group in itertools.product(range(3), range(2)):
        heads = slice(2 * group, 2 * group + 2)
        alone = Problem(rng, (1, 200, 250, 2, 1, 16, 16), window_right=60)
        for name in INPUTS:
            of_name = heads if name == "query" else slice(group, group + 1)
            alone.tensors[name] = problem.tensors[name][b : b + 1, :, of_name].contiguous()
        alone.grad = problem.grad[b : b + 1, :, heads].contiguous()
        found = alone.run()
        del found["top"]  # of all sequences
        for name, tensor in found.items():
            some = slice(group, group + 1) if name in ("grad_key", "grad_value") else heads
            part = (
                whole[name][b : b + 1, some]
                if name == "statistics"
                else (whole[name][b : b + 1, :, some])
            )
            assert_bits(tensor, part.contiguous())


def test_several_at_once(rng):
    """Calls from several threads do not disturb each other."""
    problems = [Problem(rng, dtype=BF16, window_right=i) for i in range(4)]
    expected, made = [p.run() for p in problems], [None] * 4

    def work(i):
        for _ in range(5):
            made[i] = problems[i].run()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, want in zip(made, expected, strict=True):
        for name, tensor in want.items():
            assert_bits(got[name], tensor)
