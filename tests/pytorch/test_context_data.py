# SPDX-License-Identifier: Apache-2.0
"""Data of context parallelism: tokens of a rank, padding, orders, against loops over chunks."""

import pytest
import torch
from pytorch.helpers import assert_same_bits
from pytorch.ranks import FOUR_TOO
from pytorch.sharing_programs import batch_of_rank

import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.pytorch.attention.dot_product_attention import context_parallel as cp

BALANCED, PLAIN = te.CPLoadBalancingStrategy


def sums_of(lengths, device="cpu", dtype=torch.int32):
    return torch.tensor([0, *lengths], device=device).cumsum(0).to(dtype)


def lengths_for(size, most=5):
    """Random lengths of packed sequences that 2 * size divides, none of them among them."""
    return [2 * size * int(n) for n in torch.randint(0, most, (4,))] + [2 * size]


def tokens_of(lengths, size, rank, strategy=BALANCED):
    """Tokens of a rank, chunk by chunk."""
    if strategy is PLAIN:
        part = sum(lengths) // size
        return list(range(rank * part, (rank + 1) * part))
    found, start = [], 0
    for length in lengths:
        chunk = length // (2 * size)
        for index in (rank, 2 * size - 1 - rank):
            found += range(start + index * chunk, start + (index + 1) * chunk)
        start += length
    return found


@pytest.mark.parametrize("strategy", [BALANCED, PLAIN])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_partitioned_indices(device, size, strategy):
    lengths = lengths_for(size)
    limits = sums_of(lengths, device)
    for rank in range(size):
        found = cp.get_thd_partitioned_indices(
            limits, sum(lengths), size, rank, load_balancing_strategy=strategy
        )
        assert found.dtype == torch.int32 and found.device == limits.device
        assert found.tolist() == tokens_of(lengths, size, rank, strategy)
        if strategy is BALANCED:
            assert_same_bits(
                found, cp.get_thd_partitioned_indices(limits, sum(lengths), size, rank)
            )
            native = tex.thd_get_partitioned_indices(limits, sum(lengths), size, rank)
            assert_same_bits(found, native)
    elsewhere = {"device": "cpu", "load_balancing_strategy": strategy}
    assert cp.get_thd_partitioned_indices(limits, sum(lengths), size, 0, **elsewhere).is_cpu


def test_indices_of_the_design():
    """Four ranks, sequences of 8, 8, 8 and 16 tokens."""
    found = cp.get_thd_partitioned_indices(torch.tensor([0, 8, 16, 24, 40]), 40, 4, 0)
    assert found.tolist() == [0, 7, 8, 15, 16, 23, 24, 25, 38, 39]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (([8, 6], 14, 2, 0), "a sequence of 6 tokens, expected a multiple of 4"),
        (([8, 4], 14, 2, 0), "total_tokens=14, but the sequences of cu_seqlens have 12"),
        (([8], 8, 2, 2), "rank 2 of 2"),
        (([8], 8, 0, 0), "rank 0 of 0"),
        (([8], 8, 2, 0, None, "other"), "other"),
        (([9], 9, 2, 0, None, PLAIN), "9 tokens are no 2 equal parts"),
    ],
)
def test_indices_refused(arguments, text):
    lengths, *others = arguments
    with pytest.raises(ValueError, match=text):
        cp.get_thd_partitioned_indices(sums_of(lengths), *others)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("divisor", [1, 4, 16])
def test_padding(device, divisor, dtype):
    lengths = [int(n) for n in torch.randint(0, 30, (5,))] + [7]
    ids = torch.randint(1, 999, (sum(lengths),), device=device)
    labels = torch.randint(1, 999, (1, sum(lengths)), device=device)
    limits = sums_of(lengths, device, dtype)
    found = cp.pad_thd_sequences_for_cp(ids, labels, limits, divisor, 5, -7)
    missing = [-length % divisor for length in lengths]
    wanted = []
    for tensor, fill in ((ids, 5), (labels[0], -7)):
        parts = zip(tensor.split(lengths), missing, strict=True)
        wanted.append(torch.cat([torch.nn.functional.pad(t, (0, n), value=fill) for t, n in parts]))
    padded = [length + more for length, more in zip(lengths, missing, strict=True)]
    assert_same_bits(list(found), [*wanted, sums_of(padded, device, dtype)])
    places = cp.generate_positional_ids_for_cp(limits, divisor, torch.int32)
    assert places.dtype == torch.int32
    assert places.tolist() == [place for length in padded for place in range(length)]
    assert cp.generate_positional_ids_for_cp(limits, divisor).dtype == torch.int64


def test_padding_by_default_and_refused():
    ids, limits = torch.ones(3, dtype=torch.long), sums_of([3])
    found = cp.pad_thd_sequences_for_cp(ids, ids, limits, 4)
    assert [t.tolist() for t in found] == [[1, 1, 1, 0], [1, 1, 1, -100], [0, 4]]
    with pytest.raises(ValueError, match=r"labels: shape \(2, 3\), expected \[3\]"):
        cp.pad_thd_sequences_for_cp(ids, ids.expand(2, 3), limits, 4)
    with pytest.raises(ValueError, match="divisibility_factor=0"):
        cp.generate_positional_ids_for_cp(limits, 0)
    with pytest.raises(TypeError, match="cu_seqlens: list"):
        cp.pad_thd_sequences_for_cp(ids, ids, [0, 3], 4)
    with pytest.raises(TypeError, match="input_ids: list"):
        cp.pad_thd_sequences_for_cp([1, 1, 1], ids, limits, 4)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_real_lengths_on_a_rank(device, size):
    """Each rank's share of the tokens that are no padding."""
    real = [int(n) for n in torch.randint(0, 40, (6,))]
    padded = [-(-length // (2 * size)) * 2 * size for length in real]
    on_rank = sums_of([length // size for length in padded], device)
    for rank in range(size):
        for halves in ((True, False), (False, True), (True, True), (False, False)):
            counts = []
            for length, whole in zip(real, padded, strict=True):
                chunk = whole // (2 * size)
                tokens = tokens_of([whole], size, rank)
                kept = tokens[: chunk * halves[0]] + tokens[len(tokens) - chunk * halves[1] :]
                counts.append(sum(token < length for token in kept))
            found = cp.get_cu_seqlens_on_cp_rank(
                sums_of(real, device), on_rank, size, rank, *halves
            )
            assert_same_bits(found, sums_of(counts, device))
    with pytest.raises(ValueError, match=f"rank {size} of {size}"):
        cp.get_cu_seqlens_on_cp_rank(sums_of(real), on_rank, size, size, True, True)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_chunks_in_two_orders(device, size):
    after = cp.get_seq_chunk_ids_for_reordering_after_attn(size, device)
    before = cp.get_seq_chunk_ids_for_reordering_before_attn(size, device)
    wanted = [token for rank in range(size) for token in tokens_of([2 * size], size, rank)]
    assert after.tolist() == wanted
    assert after[before.long()].tolist() == list(range(2 * size))
    assert before.dtype == after.dtype == torch.int32


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_packed_tokens_in_two_orders(device, size, dim):
    """There and back, and gradients."""
    lengths = lengths_for(size)
    limits = sums_of(lengths, device)
    shape = (sum(lengths), 3) if dim == 0 else (2, sum(lengths), 3)
    x = torch.randn(shape, device=device, requires_grad=True)
    order = [token for rank in range(size) for token in tokens_of(lengths, size, rank)]
    found = cp.thd_sequence_order_to_cp_rank_order(x, limits, size, seq_dim=dim)
    assert_same_bits(found, x.detach().index_select(dim, torch.tensor(order, device=device)))
    back = cp.thd_cp_rank_order_to_sequence_order(found, limits, size, seq_dim=dim)
    assert_same_bits(back, x.detach())
    grad = torch.randn_like(x)
    back.backward(grad)
    assert_same_bits(x.grad, grad)
    with pytest.raises(ValueError, match="total_tokens="):
        cp.thd_sequence_order_to_cp_rank_order(x.narrow(dim, 0, 2 * size - 1), limits, size, dim)


def test_dims():
    assert cp.get_bsh_dims("bshd") == (0, 1, 2)
    assert cp.get_bsh_dims("sbhd") == (1, 0, 2)
    assert cp.get_bsh_dims("bhsd") == (0, 2, 1)
    with pytest.raises(ValueError, match="thd"):
        cp.get_bsh_dims("thd")


# ---- parts of a batch ----------------------------------------------------------------------------


def _batch(form, lengths):
    """Ids, labels and positions of a batch in a format, and the dim of its tokens."""
    tokens = sum(lengths)
    shapes = {"thd": [(tokens,), (1, tokens), (tokens, 2)], "sbhd": [(tokens, 3), (tokens, 3, 2)]}
    shapes["bshd"] = [(3, tokens), (3, tokens, 2)]
    shapes = (shapes[form] * 2)[:3]
    dims = [shape.index(tokens) for shape in shapes]
    return [torch.randint(0, 999, shape) for shape in shapes], dims


@pytest.mark.parametrize("ranks", FOUR_TOO, indirect=True)
@pytest.mark.parametrize("form", ["thd", "sbhd", "bshd"])
@pytest.mark.parametrize("strategy", [BALANCED, PLAIN])
def test_batch_of_a_rank(ranks, form, strategy):
    """And ranks put together have all of it."""
    lengths = lengths_for(ranks.size) if form == "thd" else [24]
    batch, dims = _batch(form, lengths)
    limits = sums_of(lengths) if form == "thd" else None
    found = ranks.run(batch_of_rank, limits, batch, form, strategy.value)
    for rank, (parts, without) in enumerate(found):
        order = torch.tensor(tokens_of(lengths, ranks.size, rank, strategy))
        for part, whole, dim in zip(parts, batch, dims, strict=True):
            assert_same_bits(part, whole.index_select(dim, order))
        assert without == [None, None, None]


@pytest.fixture
def one_of_two(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: 1)


@pytest.mark.parametrize(
    ("form", "shape", "text"),
    [
        ("bhsd", (2, 8), "qvk_format='bhsd'"),
        ("sbhd", (6, 2), "input_ids_padded: shape .6, 2.: dim 0 is no 4 equal chunks"),
        ("bshd", (8,), "input_ids_padded: shape .8,.: dim 1 is no 4 equal chunks"),
        ("thd", (7,), r"input_ids_padded: shape .7,., expected \[8\] or \[1, 8\]"),
    ],
)
def test_batches_refused(one_of_two, form, shape, text):
    with pytest.raises(ValueError, match=text):
        cp.get_batch_on_this_cp_rank(sums_of([8]), torch.ones(shape), None, None, qvk_format=form)


def test_batches_need_tensors_and_ranks(one_of_two, monkeypatch):
    with pytest.raises(TypeError, match="cu_seqlens_padded: NoneType"):
        cp.get_batch_on_this_cp_rank(None, torch.ones(8), None, None)
    with pytest.raises(TypeError, match="labels_padded: list"):
        cp.get_batch_on_this_cp_rank(sums_of([8]), None, [1], None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group=None: -1)
    with pytest.raises(ValueError, match="rank -1 of 2"):
        cp.get_batch_on_this_cp_rank(sums_of([8]), torch.ones(8), None, None)
