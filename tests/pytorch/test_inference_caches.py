# SPDX-License-Identifier: Apache-2.0
"""`InferenceParams`: what it keeps of sequences, where their pages are, and what it refuses."""

import itertools
import random
from collections import OrderedDict

import pytest
import torch
from comparators import assert_bits, assert_nmse
from device_kinds import every_device
from pytorch.test_inference import (
    CHANNELS,
    FORMS,
    GROUPS,
    HEADS,
    LONGEST,
    PAGE,
    PAGED,
    ROWS,
    STEPS,
    Kept,
    laid,
    make_core,
    make_params,
    taken,
)
from tols import F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import inference
from transformer_engine.pytorch.attention.kv_cache import StepState, append_tokens

pytestmark = every_device

# ---- bookkeeping ---------------------------------------------------------------------------------


def test_lengths_of_a_step(device):
    params = make_params(device)
    params.pre_step(OrderedDict(a=3, b=5))
    params.pre_step(OrderedDict(b=1, c=4))
    assert params.sequences == {"b": 6, "c": 4} and params.sequences_pre_step == {"b": 5, "c": 0}
    assert params.batch_size == 2 and params.get_seqlens_pre_step().tolist() == [5, 0]
    assert params.cu_seqlens_q.tolist() == [0, 1, 5, 5]  # the tail repeats
    assert params.cu_seqlens_kv.tolist() == [0, 6, 10, 10]
    params.reset()
    assert not params.sequences and params.cu_seqlens_kv.tolist() == [0, 0, 0, 0]


def test_a_step_on_the_device_is_one_of_the_host(device):
    """What a captured `pre_step` does, run here."""
    of_device, of_host = (StepState(4, 16, torch.device(device)) for _ in range(2))
    of_device.write([0, 0, 3], [5, 2, 1])
    for starts, count in (([5, 2, 4], 1), ([6, 3, 5], 3), ([9, 6, 8], 1)):
        of_device.advance(count)
        of_host.write(starts, [count] * 3)
        assert_bits(of_device.memory, of_host.memory)
    of_device.advance(8)
    assert of_device.now.totals.tolist() == [16, 15, 16]  # lengths stop at the end


def test_pages_are_given_in_the_order_in_which_they_became_free(device):
    params = make_params(device, is_paged=True, total_num_pages=7)
    table = params.cache_manager.page_table
    assert table.shape == (ROWS, LONGEST // PAGE) and table.dtype == torch.int32
    params.pre_step(OrderedDict(a=5, b=4))
    assert table[:2].tolist() == [[0, 1, -1, -1, -1, -1], [2, -1, -1, -1, -1, -1]]
    params.pre_step(OrderedDict(a=1, b=1))  # only b begins a page
    assert table[:2, :2].tolist() == [[0, 1], [2, 3]]
    params.pre_step(OrderedDict(b=1, c=13))  # a's pages are the last to come again
    assert table[:2, :4].tolist() == [[2, 3, -1, -1], [4, 5, 6, 0]]
    with pytest.raises(RuntimeError, match="1 pages are needed and 0 of 7 are free|2 pages"):
        params.pre_step(OrderedDict(b=1, c=8))
    assert params.sequences == {"b": 6, "c": 13}  # nothing has changed
    params.pre_step(OrderedDict(b=1, c=7))
    assert table[1, :5].tolist() == [4, 5, 6, 0, 1]


def test_reserved_pages_stay(device):
    params = make_params(device, is_paged=True)
    params.pre_step(OrderedDict(a=1))
    params.reserve()
    assert (params.cache_manager.page_table[0] >= 0).all()
    before = params.cache_manager.page_table[0].tolist()
    params.pre_step(OrderedDict(a=1, b=9))
    assert params.cache_manager.page_table[0].tolist() == before


def test_a_row_that_comes_again_is_empty(device):
    """What a sequence left behind is NaN, which no mask would keep out of every backend."""
    params = make_params(device)
    shapes = [(1, 4, GROUPS, n) for n in CHANNELS]
    bad = [torch.full(shape, float("nan"), device=device) for shape in shapes]
    good = [torch.zeros(shape, device=device) for shape in shapes]
    params.pre_step(OrderedDict(a=4))
    params.step(1, *bad, "bshd")
    params.pre_step(OrderedDict(b=1))
    key, value, *_ = params.step(1, *(t[:, :1] for t in good), "bshd")
    assert not key.isnan().any() and not value.isnan().any()
    params.reset()
    params.pre_step(OrderedDict(c=1))
    assert not params.step(1, *(t[:, :1] for t in good), "bshd")[0].any()


@PAGED
@FORMS
def test_step_gives_the_cache_as_documented(device, form, paged):
    params = make_params(device, is_paged=paged)
    params.pre_step(OrderedDict(a=3, b=2))
    new = [[torch.randn(n, GROUPS, c) for n in (3, 2)] for c in CHANNELS]
    given_ = [laid(part, form, device) for part in new]
    key, value, of_new, of_all, longest, both = params.step(7, *given_, form)
    lead = (ROWS * LONGEST // PAGE, PAGE) if paged else (2, LONGEST)
    assert key.shape == (*lead, GROUPS, CHANNELS[0]) and value.shape == (*lead, GROUPS, CHANNELS[1])
    assert of_new.tolist() == [0, 3, 5] and of_all.tolist() == [0, 3, 5] and longest == LONGEST
    assert both == ("bshd" if form == "bshd" else f"{form}_2bshd")
    if paged:
        key, value = params.convert_paged_to_nonpaged(7)
        assert key.shape == (2, LONGEST, GROUPS, CHANNELS[0])
    for rows, tensors in zip((key, value), new, strict=True):
        for row, tensor in zip(rows, tensors, strict=True):
            assert_bits(row[: len(tensor)], tensor)
            assert not row[len(tensor) :].any()


def test_a_manager_of_the_program(device):
    """Here rows from the end on."""

    class Reversed(inference.KVCacheManager):
        def __init__(self, max_batch_size, max_seqlen, num_heads, head_dim_k, head_dim_v, dtype):
            super().__init__()
            self.shape = max_batch_size, max_seqlen, num_heads
            self.channels, self.dtype = (head_dim_k, head_dim_v), dtype

        def allocate_memory(self, layer_number):
            kind = {"dtype": self.dtype, "device": device}
            self.cache[layer_number] = [torch.zeros(*self.shape, n, **kind) for n in self.channels]

        def pre_step(self, step_dict):
            self.sequences = OrderedDict(
                (id_, self.sequences.get(id_, 0) + n) for id_, n in step_dict.items()
            )
            return self.sequences

        def step(self, layer_number, new_k, new_v, cu_new_seqlens, cu_cached_seqlens, qkv_format):
            ends, counts = cu_cached_seqlens.diff().tolist(), cu_new_seqlens.diff().tolist()
            for cache, new in zip(self.cache[layer_number], (new_k, new_v), strict=True):
                for row, (end, count) in enumerate(zip(ends, counts, strict=True)):
                    cache[row, end - count : end] = new[row, :count]
            return *self.cache[layer_number], None

    own = make_params(device, custom_cache_manager=Reversed)
    usual, core, kept = make_params(device), make_core("bshd"), Kept()
    for step in STEPS[:2]:
        new = [kept.add(id_, n, F32) for id_, n in step.items()]
        tensors = [laid(part, "bshd", device) for part in zip(*new, strict=True)]
        found = []
        for params in (own, usual):
            params.pre_step(OrderedDict(step))
            with torch.no_grad():
                found.append(core(*tensors, inference_params=params))
        for mine, theirs in zip(*(taken(t, "bshd", [*step.values()]) for t in found), strict=True):
            assert_bits(mine, theirs)


def test_managers_by_themselves(device):
    """Without an owner's lengths they read the sums."""
    made = inference.NonPagedKVCacheManager(2, 8, GROUPS, 16, F32, device=device)
    paged = inference.PagedKVCacheManager(4, 4, GROUPS, 16, F32, 2, 8, device=device)
    new = torch.randn(2, 3, GROUPS, 16, device=device)
    sums = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
    for manager in (made, paged):
        manager.pre_step(OrderedDict(a=3, b=2))
        manager.allocate_memory(1)
        key, _, table = manager.step(1, new, new, sums, sums, "bshd")
        rows = key if table is None else key[table[:, 0].long()]
        assert_bits(rows[0, :3], new[0])
        assert_bits(rows[1, :2], new[1, :2])


# ---- pages that a program gives and takes --------------------------------------------------------


def test_pages_of_a_program_are_those_of_the_next_step(device):
    """Given ahead, they are found by steps, which give what is missing."""
    params = make_params(device, is_paged=True, total_num_pages=9)
    manager, core, kept = params.cache_manager, make_core("bshd"), Kept()
    manager.allocate_sequence("a", PAGE + 1)
    page = manager.allocate_page("b")
    assert isinstance(page, inference.Page) and page.page_id == 2 and page.allocated
    assert manager.get_page_list("a") == [0, 1] and manager.get_page_list("b") == [2]
    assert torch.equal(manager.get_page_table("ab"), manager.page_table[:2])
    assert manager.get_sequence_count() == 0  # tokens come by steps
    for step in ({"b": 3, "a": 2 * PAGE + 1}, {"b": 2, "a": 1}):
        params.pre_step(OrderedDict(step))
        new = [kept.add(id_, n, F32) for id_, n in step.items()]
        tensors = [laid(part, "bshd", device) for part in zip(*new, strict=True)]
        with torch.no_grad():
            out = core(*tensors, inference_params=params)
        rows = taken(out, "bshd", list(step.values()))
        for id_, (query, *_), row in zip(step, new, rows, strict=True):
            assert_nmse(row, kept.attend(id_, query, (-1, 0)), tol("attention", F32, LONGEST))
    assert manager.get_page_list("b") == [2, 4] and manager.get_page_list("a") == [0, 1, 3]
    params.pre_step(OrderedDict(c=1))
    assert not page.allocated and manager.get_page_list("c") == [5]
    with pytest.raises(KeyError):
        manager.get_page_list("a")


def test_a_sequence_that_is_taken_out_begins_anew(device):
    params = make_params(device, is_paged=True, total_num_pages=6)
    manager = params.cache_manager
    params.pre_step(OrderedDict(a=PAGE + 1, b=1))
    manager.deallocate_sequence("a")
    assert manager.get_sequence_lengths() == [1] and manager.get_page_table("b").tolist()[0][0] == 2
    assert manager.page_table[0, 0] == 2  # b is the first row
    params.pre_step(OrderedDict(b=1, a=3))
    assert params.sequences == {"b": 2, "a": 3} and params.lengths.starts.tolist() == [1, 0]
    assert manager.get_page_list("a") == [3]
    with pytest.raises(KeyError):
        manager.deallocate_sequence("c")
    params.reset()
    assert manager.has_free_page() and [manager.allocate_page("z").page_id for _ in range(6)] == [
        4, 5, 0, 1, 2, 3,
    ]  # fmt: skip
    assert not manager.has_free_page()


@pytest.mark.parametrize("length", [-1, None, "1", 1.5])
def test_lengths_that_are_none(device, length):
    manager = make_params(device, is_paged=True).cache_manager
    free = len(manager._free)
    with pytest.raises(ValueError, match=f"context_len = {length!r}, expected a number of tokens"):
        manager.allocate_sequence("a", length)
    assert len(manager._free) == free and "a" not in manager._pages


def test_pages_that_there_are_not(device):
    params = make_params(device, is_paged=True, total_num_pages=LONGEST // PAGE + 1)
    manager = params.cache_manager
    manager.allocate_sequence("a", LONGEST)
    with pytest.raises(ValueError, match="'a' has pages already"):
        manager.allocate_sequence("a", 1)
    with pytest.raises(ValueError, match="'a' has 6 pages and gets 1: max_seqlen allows 6"):
        manager.allocate_page("a")
    with pytest.raises(RuntimeError, match="2 pages are needed and 1 of 7 are free"):
        manager.allocate_sequence("b", PAGE + 1)
    assert manager.get_page_count("a") == 6 and manager.has_free_page()
    manager.allocate_page("b")
    with pytest.raises(RuntimeError, match="1 pages are needed and 0 of 7 are free"):
        manager.allocate_page("c")
    manager.deallocate_sequence("a")
    for id_ in "cd"[: ROWS - 1]:
        manager.allocate_page(id_)
    with pytest.raises(ValueError, match="3 sequences have pages, as many as max_batch_size"):
        manager.allocate_page("e")
    page = inference.Page(7)
    page.allocate_page()
    with pytest.raises(
        RuntimeError, match=r"Page\(7, allocated=True\) belongs to a sequence already"
    ):
        page.allocate_page()
    page.deallocate_page()
    assert repr(page) == "Page(7, allocated=False)"


def check_table(manager, order):
    """Rows of the sequences in their order, which share no page, and behind them none."""
    width = manager.max_pages_per_seq
    rows = [manager.get_page_list(id_) for id_ in order]
    rows += [[]] * (len(manager.page_table) - len(rows))
    assert manager.page_table.tolist() == [[*row, *[-1] * (width - len(row))] for row in rows]
    taken_ = [page for row in rows for page in row]
    assert len({*taken_}) == len(taken_)
    assert manager.has_free_page() == (len(taken_) < manager.total_num_pages)


def kept_by(manager, key, order):
    """What sequences keep, by the pages of the table."""
    pages = [key[row[row >= 0].long()].flatten(0, 1) for row in manager.page_table]
    lengths = manager.sequences.values()
    return {id_: page[:n] for id_, page, n in zip(order, pages, lengths, strict=False)}


def test_tables_of_sequences_that_come_and_go(device, seed):
    """In random order, beside a dict: no row of one that has left is a page of anybody."""
    params = make_params(device, is_paged=True, total_num_pages=11)
    manager, told, ahead = params.cache_manager, {}, []
    rng, fresh = random.Random(seed), itertools.count()
    for _ in range(150):
        event = rng.choice(["step"] * 6 + ["out", "reset", "ahead"])
        if event == "reset":
            params.reset()
            told, ahead = {}, []
        elif event == "out" and told:
            gone = rng.choice([*told])
            del told[gone]
            manager.deallocate_sequence(gone)
        elif event == "ahead":
            if len(told) + len(ahead) < ROWS and manager.has_free_page():
                ahead.append(next(fresh))
                manager.allocate_page(ahead[-1])
        elif event == "step":
            ids = [id_ for id_ in told if rng.random() < 0.7]
            ids += [next(fresh) for _ in range(rng.randint(0, ROWS - len(ids)))]
            rng.shuffle(ids)
            step = {id_: rng.choice([0, 1, 1, 3, 7]) for id_ in ids}
            step = {id_: min(n, LONGEST - len(told.get(id_, ()))) for id_, n in step.items()}
            after = {id_: len(told.get(id_, ())) + n for id_, n in step.items()}
            if not step or sum(-(-n // PAGE) for n in after.values()) > 11:
                continue
            params.pre_step(OrderedDict(step))
            new = [torch.randn(n, GROUPS, CHANNELS[0]) for n in step.values()]
            pair = [laid([t[..., :c] for t in new], "bshd", device) for c in CHANNELS]
            key = params.step(1, *pair, "bshd")[0]
            before = {id_: told.get(id_, torch.zeros(0, GROUPS, CHANNELS[0])) for id_ in step}
            told = {i: torch.cat((before[i], t)) for i, t in zip(step, new, strict=True)}
            ahead = []
            for id_, found in kept_by(manager, key, step).items():
                assert_bits(found, told[id_])
        check_table(manager, [*told, *ahead])


@pytest.mark.parametrize("leaves", ["step", "out", "reset"])
def test_a_row_without_a_sequence_writes_nowhere(device, leaves):
    """As where a captured step of more sequences is replayed, or a layer is called too early."""
    params = make_params(device, is_paged=True)
    manager = params.cache_manager
    params.pre_step(OrderedDict(a=2, b=3, c=1))
    new = [torch.randn(3, 3, GROUPS, n, device=device) for n in CHANNELS]
    params.step(1, *new, "bshd")
    if leaves == "step":
        params.pre_step(OrderedDict(c=1))
    elif leaves == "out":
        manager.deallocate_sequence("a")
        manager.deallocate_sequence("b")
    else:
        params.reset()
        manager.allocate_page("c")
    before = [cache.clone() for cache in manager.cache[1]]
    counts = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    starts = torch.zeros_like(counts)
    given_ = *new, *manager.cache[1], starts, counts, None, manager.page_table
    if device == "cpu":
        with pytest.raises(ValueError, match="page_table: page -1 of token 0 of sequence 1"):
            append_tokens(*given_)
    else:
        append_tokens(*given_)
    for mine, theirs in zip(manager.cache[1], before, strict=True):
        assert_bits(mine, theirs)


def test_what_a_manager_has_no_rows_or_pages_for(device):
    """Steps of a program that has no `InferenceParams` around it; nothing has changed then."""
    manager = inference.PagedKVCacheManager(8, PAGE, GROUPS, 16, F32, 2, 2 * PAGE, device=device)
    manager.pre_step(OrderedDict(a=1))
    with pytest.raises(ValueError, match="3 sequences, max_batch_size=2"):
        manager.pre_step(OrderedDict(a=1, b=1, c=1))
    with pytest.raises(ValueError, match="'b' would have 9 tokens, max_seqlen=8"):
        manager.pre_step(OrderedDict(a=1, b=2 * PAGE + 1))
    assert manager.sequences == {"a": 1}
    check_table(manager, "a")
    with pytest.raises(ValueError, match="max_seqlen=6 is no multiple of page_size=4"):
        inference.PagedKVCacheManager(8, PAGE, GROUPS, 16, F32, 2, PAGE + 2, device=device)


# ---- mistakes ------------------------------------------------------------------------------------

WRONG = {
    "num_heads_kv": ({"num_heads_kv": None}, "num_heads_kv is needed"),
    "dtype": ({"dtype": torch.int32}, "dtype=torch.int32"),
    "page_size": ({"is_paged": True}, "is_paged=True needs page_size"),
    "pages": ({"is_paged": True, "page_size": 5}, "24 is no multiple of page_size=5"),
    "thd": ({"qkv_format": "thd"}, "needs max_ctx_len"),
    "format": ({"qkv_format": "bhsd"}, "qkv_format='bhsd'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_construction(case):
    changed, text = WRONG[case]
    right = {"num_heads_kv": GROUPS, "head_dim_k": 16, "dtype": F32, "device": "cpu"}
    with pytest.raises(ValueError, match=f"InferenceParams: .*{text}"):
        te.InferenceParams(ROWS, LONGEST, **{**right, **changed})


def test_wrong_steps(device):
    params = make_params(device)
    with pytest.raises(ValueError, match="4 sequences, max_batch_size=3"):
        params.pre_step(OrderedDict((i, 1) for i in range(4)))
    with pytest.raises(ValueError, match="'a' gets -1 tokens"):
        params.pre_step(OrderedDict(a=-1))
    params.pre_step(OrderedDict(a=20))
    with pytest.raises(ValueError, match="'a' has 20 tokens and gets 5, max_sequence_length=24"):
        params.pre_step(OrderedDict(a=5))
    assert params.sequences == {"a": 20}


def test_questions_of_pages(device, capsys):
    params = make_params(device, is_paged=True, total_num_pages=5)
    manager = params.cache_manager
    assert manager.get_sequence_count() == 0 and manager.has_free_page()
    params.pre_step(OrderedDict(a=2 * PAGE + 1, b=1))
    assert manager.get_sequence_lengths() == [2 * PAGE + 1, 1]
    assert [manager.get_page_count(id_) for id_ in "ab"] == [3, 1]
    of_a, of_b = map(manager.get_page_list, "ab")
    assert len({*of_a, *of_b}) == 4 and manager.has_free_page()
    assert torch.equal(manager.get_page_table("ab"), manager.page_table[:2])
    assert torch.equal(manager.get_page_table("b"), manager.page_table[1:2])
    assert manager.get_page_table([]).shape == (0, LONGEST // PAGE)
    params.pre_step(OrderedDict(b=PAGE, a=1))
    assert not manager.has_free_page() and manager.get_page_list("a") == of_a
    manager.print_cache()
    told = capsys.readouterr().out.splitlines()
    pages = manager.get_page_list("b")
    assert told[:2] == [
        "PagedKVCacheManager: 0 of 5 pages are free",
        f"  sequence 'b': {PAGE + 1} tokens in pages {pages}",
    ]
    for ask in (manager.get_page_count, manager.get_page_list):
        with pytest.raises(KeyError, match="c"):
            ask("c")


def test_wrong_calls(device):
    params, core = make_params(device), make_core("bshd")
    query = torch.randn(2, 1, HEADS, 16, device=device)
    key, value = (torch.randn(2, 1, GROUPS, n, device=device) for n in CHANNELS)
    call = {"inference_params": params}
    params.pre_step(OrderedDict(a=1, b=1))
    with pytest.raises(ValueError, match="attn_mask_type='arbitrary' with inference_params"):
        core(query, key, value, attn_mask_type="arbitrary", **call)
    with pytest.raises(ValueError, match="1 batch entries, .* 2 sequences .*call pre_step"):
        core(query[:1], key[:1], value[:1], **call)
    with pytest.raises(ValueError, match="no gradients pass a cache"):
        core(query, key.requires_grad_(), value, **call)
    with pytest.raises(ValueError, match="made for torch.float32"):
        core(query.bfloat16(), key.detach().bfloat16(), value.bfloat16(), **call)
    params.pre_step(OrderedDict(a=1, b=2))
    with pytest.raises(ValueError, match=r"1 tokens of each sequence, .*pre_step\(\) announced 2"):
        core(query, key.detach(), value, **call)
    with pytest.raises(ValueError, match=r"2 tokens in all, but pre_step\(\) announced 3"):
        core(query[:, 0], key[:, 0].detach(), value[:, 0], qkv_format="thd", **call)
    core.layer_number = None
    with pytest.raises(ValueError, match="needs a layer_number"):
        core(query, key.detach(), value, **call)


def test_what_is_said_about_a_cached_call():
    core, params = make_core("bshd"), make_params("cpu")
    params.pre_step(OrderedDict(a=1, b=1))
    shape = (2, 1, HEADS, 16)
    explained = te.explain_attention(core, shape, device="cpu", inference_params=params)
    assert explained.backend == "native"
    assert explained.refused["sdpa"].feature == "mask type padding"
