# SPDX-License-Identifier: Apache-2.0
"""Plans over values of heads: read wherever they lie, with their two leading dims or packed."""

import pytest
import torch

from transformer_engine import _core
from transformer_engine.common.attention_graphs import AttentionSpec, core_graph
from transformer_engine.common.graphs import RESULT, ROWS, Graph, input_flags
from transformer_engine.common.plans import leading_dims, result_shapes, sizes_of

HEADS, GROUPS, CHANNELS, BATCH, QUERIES, KEYS = 4, 2, 8, 3, 5, 7


@pytest.fixture
def core():
    return _core  # graphs make their plans with it


def spec_of(core, sequence_first=True, **options):
    slices = tuple((n, CHANNELS, 0, CHANNELS) for n in (HEADS, GROUPS, GROUPS))
    attention = AttentionSpec(slices, sequence_first, 0.5, 0.0, (-1, -1), False, **options)
    return attention, core.DTYPE_F32, True


def tensors_of(sequence_first=True):
    made = []
    for length, heads in ((QUERIES, HEADS), (KEYS, GROUPS), (KEYS, GROUPS)):
        lead = (length, BATCH) if sequence_first else (BATCH, length)
        made.append(torch.randn(*lead, heads, CHANNELS))
    return made


def by_operators(core, tensors, grad, sequence_first):
    """Output and gradients of the operators of attention."""
    order = (lambda t: t.transpose(0, 1)) if sequence_first else (lambda t: t)
    query, key, value = map(order, tensors)
    output = torch.empty_like(tensors[0].contiguous())
    sums = torch.empty(BATCH, HEADS, QUERIES)
    core.attention(query, key, value, order(output), statistics=sums, scale=0.5)
    grads = [torch.empty(t.shape) for t in tensors]
    made = dict(zip(("grad_query", "grad_key", "grad_value"), map(order, grads), strict=True))
    given = order(grad.view(output.shape)), query, key, value, order(output), sums
    core.attention_backward(*given, scale=0.5, **made)
    return output.flatten(2), grads


LAYOUTS = {
    "dense": lambda t: t,
    "exchanged": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda t: torch.cat([t, t], -2)[..., : t.shape[-2], :],
    "by heads": lambda t: t.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "expanded": lambda t: t[:1].expand(t.shape),
    "last stride": lambda t: torch.stack([t, t], -1)[..., 0],
}


@pytest.mark.parametrize("sequence_first", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_wherever_they_lie(core, layout, sequence_first):
    graph = core_graph(*spec_of(core, sequence_first))
    forward, backward = (graph.make(way).native for way in range(2))
    tensors = [LAYOUTS[layout](tensor) for tensor in tensors_of(sequence_first)]
    output, saved = core.run(forward, 0, 0, *tensors)
    grad = torch.randn(output.shape)
    expected, wanted = by_operators(core, tensors, grad, sequence_first)
    assert torch.equal(output, expected) and output.shape == expected.shape
    *grads, _ = core.run(backward, 0, 0, grad, *tensors, output, saved)
    for found, right in zip(grads, wanted, strict=True):
        assert found.is_contiguous() and torch.equal(found, right)


def test_parts_of_what_is_not_dense(core):
    """A plan that reads parts of a matrix copies what is no dense one, its gradient too."""
    graph = core_graph(*spec_of(core))
    forward, backward = (graph.make(way).native for way in range(2))
    tensors = tensors_of()
    output, saved = core.run(forward, 0, 0, *tensors)
    ones = torch.ones(output.shape)
    expected = core.run(backward, 0, 0, ones, *tensors, output, saved)
    for grad in (
        torch.ones(()).expand(output.shape),
        torch.cat([ones, ones], -1)[..., : ones.shape[-1]],
    ):
        found = core.run(backward, 0, 0, grad, *tensors, output, saved)
        assert all(torch.equal(a, b) for a, b in zip(found[:3], expected[:3], strict=True))


def test_shapes_without_a_device(core):
    """What a run allocates is what shapes alone say, of as many dims."""
    graph = core_graph(*spec_of(core))
    forward, backward = graph.make(0), graph.make(1)
    tensors = tensors_of()
    given = [tensor.shape for tensor in tensors]
    assert leading_dims(forward, given) == [(QUERIES, BATCH), (KEYS, BATCH)]
    rows = [QUERIES * BATCH, QUERIES, BATCH, KEYS * BATCH, KEYS, BATCH]
    assert sizes_of(forward, given) == [0, *rows]
    *outputs, saved = core.run(forward.native, 0, 0, *tensors)
    made, packed = result_shapes(forward, given)
    assert [tuple(shape) for _, shape in made] == [tuple(t.shape) for t in outputs]
    assert packed == saved.numel()
    arguments = [outputs[0], *tensors, outputs[0]]
    *grads, _ = core.run(backward.native, 0, 0, *arguments, saved)
    made, _ = result_shapes(backward, [t.shape for t in arguments])
    assert [tuple(shape) for _, shape in made] == [tuple(t.shape) for t in grads]


def packed_tensors(max_queries=4, max_keys=6):
    """Two sequences: of 4 and 1 queries, of 6 and 1 keys."""
    made = [torch.randn(n, heads, CHANNELS) for n, heads in ((5, HEADS), (7, GROUPS), (7, GROUPS))]
    made += [torch.tensor(sums, dtype=torch.int32) for sums in ([0, 4, 5], [0, 6, 7])]
    return [*made, torch.empty(max_queries, max_keys, 0, dtype=torch.int32)]


def test_packed_sequences_of_any_bounds(core):
    """A plan takes them, and how many sequences there are, from shapes of its inputs."""
    graph = core_graph(*spec_of(core, packed=True, max_scores=True))
    forward, backward = graph.make(0), graph.make(1)
    first, wider = packed_tensors(), packed_tensors(40, 70)[-1:]
    given = [*first[:-1], *wider]
    assert sizes_of(forward, [t.shape for t in given])[core.SYMBOL_SEQUENCES :] == [2, 40, 70]
    runs = [core.run(forward.native, 0, 0, *tensors) for tensors in (first, given)]
    for found, right in zip(*runs, strict=True):
        assert torch.equal(found, right)
    output, top, saved = runs[0]
    queries, keys = first[0], first[1].repeat_interleave(HEADS // GROUPS, 1)
    scores = [0.5 * torch.einsum("qhc,khc->hqk", queries[a], keys[b]).flatten(1)
              for a, b in ((slice(4), slice(6)), (slice(4, 5), slice(6, 7)))]  # fmt: skip
    torch.testing.assert_close(top, torch.cat(scores, 1).amax(1))
    grad = torch.randn(output.shape)
    # In order of values: the output is among the last of them.
    backs = [
        core.run(backward.native, 0, 0, grad, *tensors, output, saved) for tensors in (first, given)
    ]
    for found, right in zip(*backs, strict=True):
        assert found is right is None or torch.equal(found, right)


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (5, lambda t: t[0], "run: bounds: it has 2 dims, expected 3"),
        (5, lambda t: t.long(), "run: bounds: dtype i64, expected i32"),
        (5, lambda t: torch.zeros(4, 6, 1, dtype=torch.int32), "bounds: the last dim has size 1"),
        (4, lambda t: t[:-1], "run: key_offsets: .* has size 2, expected 3"),
    ],
)
def test_a_packed_run_names_what_is_wrong(core, at, change, text):
    plan = core_graph(*spec_of(core, packed=True)).make(0).native
    tensors = packed_tensors()
    tensors[at] = change(tensors[at])
    with pytest.raises((TypeError, ValueError), match=text):
        core.run(plan, 0, 0, *tensors)


@pytest.mark.parametrize(
    ("at", "change", "text"),
    [
        (0, lambda t: t[0], "run: query: it has 3 dims, expected 4"),
        (0, lambda t: t[None], "run: query: it has 5 dims, expected 1 to 4"),
        (1, lambda t: t[0], "run: key: it has 3 dims, expected 4"),
        (0, lambda t: t[..., :4], "run: query: the last dim has size 4, expected 8"),
        (0, lambda t: t[..., :2, :], "run: query: dim 2 has size 2, expected 4"),
        (2, lambda t: t[:-1], "run: value: the first dim has size 6, expected 7"),
        (2, lambda t: t[:, :-1], "run: value: dim 1 has size 2, expected 3"),
        (1, lambda t: t.double(), "run: key: dtype .*float64 is not supported"),
    ],
)
def test_a_run_names_what_is_wrong(core, at, change, text):
    plan = core_graph(*spec_of(core)).make(0).native
    tensors = tensors_of()
    tensors[at] = change(tensors[at])
    with pytest.raises((TypeError, ValueError), match=text):
        core.run(plan, 0, 0, *tensors)


def dim(symbol, multiply=1):
    """A multiple of the value of a symbol."""
    return {"symbol": symbol, "multiply": multiply}


def heads_graph(core, *, shape=None, slice_=None, flags=0, kind=None):
    """A graph of attention of one value of heads to another two, with something changed."""
    lead = tuple(dim(s) for s in (core.SYMBOL_DIM_0, core.SYMBOL_DIM_1))
    graph, shape = Graph(), shape or (*lead, HEADS, CHANNELS)
    given = [graph.tensor(name, core.DTYPE_F32, shape, input_flags(1)) for name in "qkv"]
    out = graph.value("out", core.DTYPE_F32, (ROWS, HEADS * CHANNELS), RESULT)
    slice_ = slice_ or (HEADS, CHANNELS, 0, CHANNELS)
    if kind is not None:
        graph.node(kind, (given[0],), out, slices=(slice_,))
    else:
        numbers = (0.5, 0.0, -1.0, -1.0)
        options = {"numbers": numbers, "slices": (slice_,) * 3, "flags": flags}
        graph.node(core.NODE_ATTENTION, tuple(given), out, **options)
    return graph


def test_graphs_of_heads_that_can_not_be(core):
    dim_0, dim_1, rows = map(dim, (core.SYMBOL_DIM_0, core.SYMBOL_DIM_1, core.SYMBOL_ROWS))
    assert heads_graph(core).make(0)
    no_rows = "q: TE_VALUE_LEADING, but its first dims are no number of tokens"
    for changes, text in (
        (dict(slice_=(HEADS, CHANNELS, CHANNELS, CHANNELS)), "no matrix of rows"),
        (dict(slice_=(2, CHANNELS, 0, CHANNELS)), "no matrix of rows"),
        (dict(slice_=(HEADS, CHANNELS, 0, 2 * CHANNELS)), "no matrix of rows"),
        (dict(kind=core.NODE_ROPE), "no matrix of rows"),
        (dict(kind=core.NODE_HEAD_NORM), "no matrix of rows"),
        (dict(flags=core.NODE_PACKED), "values -1, -1 as offsets of sequences that are packed"),
        (dict(shape=(rows, HEADS, CHANNELS)), "q has 3 dims, of sequences that are not packed"),
        (dict(shape=(dim_0, dim_0, HEADS, CHANNELS)), no_rows),
        (dict(shape=(dim_1, dim_0, HEADS, CHANNELS)), no_rows),
        (dict(shape=(rows, dim_1, HEADS, CHANNELS)), no_rows),
        (dict(shape=(dim_0, 3, HEADS, CHANNELS)), no_rows),
        (dict(shape=(dim(core.SYMBOL_ROWS, 2), HEADS, CHANNELS)), no_rows),
    ):
        with pytest.raises(ValueError, match=text):
            heads_graph(core, **changes).make(0)


def test_facts_of_heads(core):
    """What tells kinds of calls apart, and what does not."""
    tensors = tensors_of()
    facts = core.facts_of_heads(*tensors)
    longer = [
        torch.randn(n + 3, BATCH, *t.shape[2:]) for n, t in zip((5, 7, 7), tensors, strict=True)
    ]
    assert core.facts_of_heads(*longer) == facts
    query, key, value = tensors
    dense = torch.cat([query, query], -2)[..., :HEADS, :]
    others = [
        (query, key, value[:-1]),
        (query[:1], key, value),
        (query[:0], key, value),
        (query[:, :1], key[:, :1], value[:, :1]),
        (torch.randn_like(query).requires_grad_(), key, value),
        (query, key.clone().requires_grad_(), value),
        (query.half(), key, value),
        (query[..., :2, :], key, value),
        (query[..., :4], key, value),
        (dense, key, value),
        (torch.randn(KEYS, *query.shape[1:]), key, value),
        (query[:, 0], key[:, 0], value[:, 0]),
        (query, torch.stack([query] * 2, -3)),
        (query, torch.stack([query] * 2, -2)),
        (torch.stack([query] * 3, -2),),
    ]
    found = [facts, *(core.facts_of_heads(*given) for given in others)]
    assert len(set(found)) == len(found) and None not in found


class Own(torch.Tensor):
    """A class of a program's own."""


@pytest.mark.parametrize(
    "other",
    [
        None, 3, torch.randn(4, 5), torch.randn(2, 2, 2, 2, 2, 2),
        torch.randn(2, 2, 2, device="meta"), torch.randn(2, 3, 4).as_subclass(Own),
        torch.randn(2, 3, 4).to_sparse(),
    ],
    ids=range(7),
)  # fmt: skip
def test_no_facts(core, other):
    good = torch.randn(2, 3, 4)
    assert core.facts_of_heads(good) is not None
    assert core.facts_of_heads(other) is None
    assert core.facts_of_heads(good, good, other) is None
