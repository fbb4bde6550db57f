# SPDX-License-Identifier: Apache-2.0
"""`DotProductAttention` as a plan: the bits of its operator, found again only where a call fits."""

import contextlib
import copy
import pickle

import pytest
import torch
from pytorch.attention_operators import by_operators, unkept
from pytorch.helpers import assert_same_bits
from pytorch.layer_ways import dtype_of
from pytorch.planned_attention_cases import (
    BATCH,
    CASES,
    CHANNELS,
    HEADS,
    KEYS,
    LONG,
    PACKED,
    QUERIES,
    assert_same_step,
    leaves_of,
    make,
    packed_arguments,
    plans_only,
    step,
    sums,
)
from tols import BF16, F32
from torch._dynamo.backends.debugging import aot_eager

from transformer_engine.pytorch.module.call_key import KEPT

pytestmark = pytest.mark.usefixtures("repeatable")


# ---- the bits of the operator --------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("case", CASES)
def test_bits(device, native_runs, case, form):
    options, arguments = CASES[case]
    core = make(**{**options, "qkv_format": form}).to(device)
    given = arguments(device)
    square = case == "alibi" and device != "cpu"  # else it is a bias there, made for the lengths
    tensors = leaves_of(core, device, form, sizes=(KEYS, KEYS) if square else LONG)
    assert_same_step(core, tensors, given, native_runs)


@pytest.mark.parametrize("options", [{}, {"softmax_type": "learnable"}, {"num_gqa_groups": 1}])
def test_bits_of_packed_sequences(device, native_runs, options):
    core = make(**PACKED, **options).to(device)
    tensors = leaves_of(core, device, "thd", sizes=(10, 14))
    assert_same_step(core, tensors, packed_arguments(device), native_runs)


@pytest.mark.parametrize("options", [{}, PACKED], ids=["sbhd", "thd"])
def test_largest_scores(native_runs, options):
    """A second result of the plan, without a gradient. No kernel of cuDNN writes them."""
    core = make(**options, return_max_logit=True)
    given = packed_arguments("cpu") if options else {}
    tensors = leaves_of(core, "cpu", core.qkv_format, sizes=(10, 14) if options else LONG)

    def run():
        out, top = core(*tensors, **given)
        assert not top.requires_grad
        return [out, top, *torch.autograd.grad(out.square().sum(), tensors)]

    with by_operators():
        expected = run()
    for way in (
        contextlib.nullcontext,
        unkept,
        torch.autograd.graph.save_on_cpu,
    ):
        with plans_only(native_runs), way():
            assert_same_bits(run(), expected)
    with torch.no_grad(), plans_only(native_runs):
        assert_same_bits(list(core(*tensors, **given)), expected[:2])


@pytest.mark.parametrize("dtype", [F32, torch.float16, BF16])
def test_dtypes(device, native_runs, dtype):
    if device != "cpu" and dtype is F32:
        pytest.skip("cuDNN's kernels take fp16 and bf16")
    core = make()
    assert_same_step(core, leaves_of(core, device, dtype=dtype), {}, native_runs)


LAYOUTS = {
    "exchanged": lambda t: t.detach().transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda t: torch.cat([t.detach()] * 2, -2)[..., : t.shape[-2], :],
    "interleaved": lambda t: torch.stack([t.detach()] * 3, -2)[..., 1, :],
    "shared": lambda t: t.detach()[:, :1].expand(t.shape),
    "last stride": lambda t: torch.stack([t.detach()] * 2, -1)[..., 0],
    "negative": lambda t: torch._neg_view(t.detach()),
    "shifted": lambda t: torch.cat([t.detach().flatten()[:1], t.detach().flatten()])[1:].view_as(t),
}


@pytest.mark.parametrize("form", ["sbhd", "bshd"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_wherever_heads_lie(device, native_runs, layout, form):
    """On a GPU the last four are copied, for cuDNN's kernels do not read them."""
    core = make(qkv_format=form)
    tensors = [LAYOUTS[layout](t).requires_grad_() for t in leaves_of(core, device, form)]
    assert_same_step(core, tensors, {}, native_runs)


@pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dim", [-3, -2])
def test_joined(device, native_runs, form, count, dim):
    core = make(**(PACKED if form == "thd" else {"qkv_format": form}))
    query, key, _ = leaves_of(core, device, form, sizes=(KEYS, KEYS))
    joined = torch.stack([torch.randn_like(key) for _ in range(count)], dim).requires_grad_()
    given = packed_arguments(device) if form == "thd" else {}
    given.pop("cu_seqlens_kv", None)
    named = {"kv_layer" if count == 2 else "qkv_layer": joined, "qkv_interleave_dim": dim}
    leaves = [query, joined] if count == 2 else [joined]

    def run():
        out = core(query if count == 2 else None, **named, **given)
        return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    with by_operators():
        expected = run()
    with plans_only(native_runs):
        for _ in range(3):
            assert_same_bits(run(), expected)


def test_nothing_is_copied(device, native_runs):
    """Not of views of one projection: what a call keeps are its arguments, where they lie."""
    core = make(attn_mask_type="no_mask")
    mixed = torch.randn(QUERIES, BATCH, 3, HEADS, CHANNELS).to(device, dtype_of(device))
    tensors = [part.requires_grad_() for part in mixed.unbind(2)]
    expected = step(core, tensors, {})
    grad = torch.linspace(-1, 1, expected[0].numel()).view(expected[0].shape).to(expected[0])
    with torch.profiler.profile(acc_events=True) as profile:
        out = core(*tensors)
        found = [out, *torch.autograd.grad(out, tensors, grad)]
    assert_same_bits(found, expected)
    names = {event.key for event in profile.key_averages()}
    assert not names & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::flatten"}
    out = core(*tensors)
    saved = {tensor.data_ptr() for tensor in out.grad_fn.saved_tensors}
    assert {tensor.data_ptr() for tensor in tensors} < saved


@pytest.mark.parametrize("wanted", range(1, 8))
def test_gradients_of_some(device, wanted):
    core = make()
    tensors = leaves_of(core, device)
    for i, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> i & 1))
    with by_operators():
        expected = step(core, tensors, {})
    assert_same_bits(step(core, tensors, {}), expected)


@pytest.mark.parametrize(
    "sizes", [(0, 5, 1), (5, 0, 1), (4, 4, 0), (1, 1, 1), (1, 7, 2), (7, 1, 2)]
)
def test_few_tokens(device, sizes):
    core = make(attn_mask_type="no_mask")
    tensors = leaves_of(core, device, sizes=sizes[:2], batch=sizes[2])
    with by_operators():
        expected = step(core, tensors, {})
    assert_same_bits(step(core, tensors, {}), expected)


# ---- what a kept call depends on -----------------------------------------------------------------


def kept(core):
    """How many ways calls of an attention are kept, and how many plans' calls."""
    return len(core._kept._by_arguments), len(core._kept._calls)


def test_lengths_make_no_plans(device):
    core = make(attn_mask_type="no_mask")
    for length in range(2, 40):
        core(*leaves_of(core, device, sizes=(length, length + 1)))
    assert kept(core) == (1, 1)


def test_bounds_and_numbers_of_sequences_make_no_plans(device):
    """They are sizes that a run is given."""
    core = make(**PACKED)
    tensors = leaves_of(core, device, "thd", sizes=(10, 14))
    lengths = ((3, 0, 7), (5, 2, 7)), ((4, 6), (9, 5)), ((10,), (14,)), ((1, 2, 3, 4), (5, 4, 3, 2))
    for more, (queries, keys) in enumerate(lengths):
        given = {
            "cu_seqlens_q": sums(device, *queries), "cu_seqlens_kv": sums(device, *keys),
            "max_seqlen_q": max(queries) + more, "max_seqlen_kv": max(keys) + more,
        }  # fmt: skip
        with by_operators():
            expected = step(core, tensors, given)
        for way in (contextlib.nullcontext, unkept):
            with way():
                assert_same_bits(step(core, tensors, given), expected)
        assert kept(core) == (0, 1) and len(core._plans) == 1


def test_compiled_bounds_are_sizes(device):
    """A graph is for all of them, with the bits of eager mode."""
    core, graphs = make(**PACKED), []

    def backend(graph, inputs):
        graphs.append(more)
        return aot_eager(graph, inputs)

    compiled = torch.compile(core, fullgraph=True, dynamic=True, backend=backend)
    tensors = leaves_of(core, device, "thd", sizes=(10, 14))
    for more in range(2, 6):
        given = packed_arguments(device)
        given |= {"max_seqlen_q": QUERIES + more, "max_seqlen_kv": KEYS + more * more}
        expected = step(core, tensors, given)
        assert_same_bits(step(compiled, tensors, given), expected)
    assert set(graphs) == {2}  # none for a later bound


def test_default_arguments_are_no_part_of_the_key(device):
    """However they are given; an argument that differs is."""
    core = make()
    tensors = leaves_of(core, device)
    core(*tensors)
    core(*tensors, qkv_format=None, num_splits=1, core_attention_bias_type="no_bias")
    assert [key[-1] for key in core._kept._by_arguments] == [None]
    core(*tensors, attn_mask_type="no_mask")
    keys = [key[-1] for key in core._kept._by_arguments]
    assert len(keys) == 2 and keys[1] is not None and "no_mask" in keys[1]


SETTINGS = [
    ("attn_mask_type", "no_mask"),
    ("attn_mask_type", "causal_bottom_right"),
    ("window_size", (2, 0)),
    ("window_size", [1, 0]),
    ("bottom_right_diagonal", True),
    ("softmax_scale", 0.1),
    ("softcap", 0.5),
    ("attention_dropout", 0.4),
    ("training", False),
]


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_a_setting_counts_from_the_next_call_on(device, name, value):
    core = make(attention_dropout=0.2)
    tensors = leaves_of(core, device)
    before = step(core, tensors, {})
    setattr(core, name, value)
    with by_operators():
        expected = step(core, tensors, {})
    for _ in range(2):
        assert_same_bits(step(core, tensors, {}), expected)
    if name != "bottom_right_diagonal":  # the causal type has its own
        assert not torch.equal(expected[0], before[0])


def test_a_window_that_is_a_list_may_change(device):
    window = [3, 0]
    core = make(window_size=None)
    core.window_size = window
    tensors = leaves_of(core, device)
    first = step(core, tensors, {})
    window[0] = 1
    with by_operators():
        expected = step(core, tensors, {})
    assert_same_bits(step(core, tensors, {}), expected)
    assert not torch.equal(first[0], expected[0])


def test_switches_count_at_each_call(device, monkeypatch):
    core = make()
    tensors = leaves_of(core, device)
    core(*tensors)
    assert core._last_call.backend == "native"
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    for _ in range(2):
        core(*tensors)
        assert core._last_call.backend == "unfused"
    monkeypatch.delenv("NVTE_FUSED_ATTN")
    core(*tensors)
    assert core._last_call.backend == "native"


def test_a_sink_that_changes(device):
    """Its values, the parameter itself, whether it wants a gradient."""
    core = make(softmax_type="learnable").to(device)
    tensors = leaves_of(core, device)
    step(core, tensors, {})
    for change in (
        lambda: core.softmax_offset.data.add_(1.0),
        lambda: setattr(core, "softmax_offset", torch.nn.Parameter(core.softmax_offset + 1.0)),
        lambda: core.softmax_offset.requires_grad_(False),
        lambda: core.softmax_offset.requires_grad_(True),
        lambda: core.half(),
        lambda: core.float(),
    ):
        change()
        with by_operators():
            expected = step(core, tensors, {})
        for _ in range(2):
            assert_same_bits(step(core, tensors, {}), expected)


def test_settings_that_change_all_the_time_make_few_plans(device):
    core = make()
    tensors = leaves_of(core, device)
    for i in range(3 * KEPT):
        core.attention_dropout = 0.01 + i / 100
        with by_operators():
            expected = step(core, tensors, {})
        assert_same_bits(step(core, tensors, {}), expected)
        assert max(kept(core)) <= KEPT


def test_copies_have_no_calls(device):
    core = make(softmax_type="learnable").to(device)
    tensors = leaves_of(core, device)
    expected = step(core, tensors, {})
    for made in (copy.deepcopy(core), pickle.loads(pickle.dumps(core))):
        assert kept(made) == (0, 0)
        assert_same_bits(step(made, tensors, {}), expected)


def test_errors_after_a_call_that_is_kept(device):
    core = make()
    query, key, value = leaves_of(core, device)
    core(query, key, value)
    with pytest.raises(ValueError, match="one batch size and one length of keys and values"):
        core(query, key, value[:-1])
    with pytest.raises(ValueError, match="one batch size"):
        core(query[:, :-1], key, value)
    with pytest.raises(TypeError, match=r"query is .*, key torch\.float64"):
        core(query, key.double(), value)
    with pytest.raises(ValueError, match="expected sbhd with 4 heads of 16"):
        core(query[..., :8], key[..., :8], value)
    with pytest.raises(TypeError, match="expected three tensors"):
        core(query, key)
    with pytest.raises(ValueError, match="stands for separate tensors"):
        core(query, key, value, qkv_layer=torch.stack([query] * 3, -3))
    with pytest.raises(ValueError, match="num_splits"):
        core(query, key, value, num_splits=-2)
