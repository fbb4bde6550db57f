# SPDX-License-Identifier: Apache-2.0
"""What programs ask of lengths, masks, windows and layouts, against what attention takes."""

import logging
from contextlib import nullcontext

import pytest
import torch
from comparators import assert_bits, assert_nmse
from tols import F32, tol

import transformer_engine.pytorch as te
from transformer_engine.common import recipe
from transformer_engine.plugin.core import ops
from transformer_engine.pytorch.attention import backends, masks, problem as formats
from transformer_engine.pytorch.attention.dot_product_attention import utils
from transformer_engine.pytorch.cpp_extensions import fused_attn

LONGEST = 11


def padding_of(lengths, longest=LONGEST, device="cpu"):
    """True behind the sequences, by the definition."""
    mask = torch.zeros(len(lengths), 1, 1, longest, dtype=torch.bool)
    for row, count in zip(mask, lengths, strict=True):
        row[..., count:] = True
    return mask.to(device)


@pytest.fixture
def lengths(rng):
    return rng.integers(0, LONGEST + 1, size=5).tolist()


# ---- lengths and masks ---------------------------------------------------------------------------


def test_lengths_of_masks_and_back(device, lengths):
    mask = padding_of(lengths, device=device)
    sums = utils.get_cu_seqlens(mask)
    assert sums.dtype == torch.int32 and sums.device.type == device
    assert sums.tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    given = len(lengths), sums, None, LONGEST, None, "self"
    assert torch.equal(utils.get_padding_mask(*given), mask)
    others = [min(n + 2, LONGEST) for n in lengths]
    of_keys = utils.get_cu_seqlens(padding_of(others, LONGEST + 3, device))
    pair = utils.get_padding_mask(len(lengths), sums, of_keys, LONGEST, LONGEST + 3, "cross")
    assert torch.equal(pair[0], mask)
    assert torch.equal(pair[1], padding_of(others, LONGEST + 3, device))


def test_padding_masks_of_the_longest_sequence(device):
    """What is not given is as long as that, or as for one mask."""
    sums = torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device)
    mask = padding_of([3, 0, 5], 5, device)
    assert torch.equal(utils.get_padding_mask(3, sums), mask)
    pair = utils.get_padding_mask(3, sums, sums * 2, attention_type="cross")
    assert torch.equal(pair[0], mask) and torch.equal(pair[1], padding_of([6, 0, 10], 10, device))
    with pytest.raises(TypeError, match="cu_seqlens_kv=None"):
        utils.get_padding_mask(3, sums, attention_type="cross")
    with pytest.raises(TypeError, match="cu_seqlens_q=None"):
        utils.get_padding_mask(3)
    for size in ("3", -1, 2.5):
        with pytest.raises(ValueError, match=f"batch_size={size!r}, expected a number"):
            utils.get_padding_mask(size, sums)
        with pytest.raises(ValueError, match=f"max_seqlen_q={size!r}, expected a number"):
            utils.get_padding_mask(3, sums, max_seqlen_q=size)


def test_full_lengths(device):
    sums = utils.get_full_cu_seqlens(3, 7, torch.device(device))
    assert sums.dtype == torch.int32 and sums.tolist() == [0, 7, 14, 21]
    assert torch.equal(sums, utils.get_cu_seqlens(padding_of([7, 7, 7], 7, device)))


def test_positions_of_tokens(device, lengths):
    mask = padding_of(lengths, device=device)
    sums, positions = utils.get_cu_seqlens_and_indices(mask)
    expected = [i for i, masked in enumerate(mask.flatten().tolist()) if not masked]
    whole = mask.numel()
    assert positions.shape == (whole, 1, 1) and torch.equal(sums, utils.get_cu_seqlens(mask))
    assert positions.flatten().tolist() == expected + [whole] * (whole - len(expected))
    assert torch.equal(utils.get_indices(LONGEST, sums), positions)


def test_masks_and_lengths_attend_alike(device, lengths):
    """The sums of a mask stand in its place."""
    module = te.DotProductAttention(2, 16, attn_mask_type="padding", qkv_format="bshd")
    tensors = [torch.randn(5, LONGEST, 2, 16, device=device) for _ in range(3)]
    mask = padding_of(lengths, device=device)
    by_mask = module(*tensors, attention_mask=mask)
    by_sums = module(*tensors, cu_seqlens_q=utils.get_cu_seqlens(mask))
    kept = ~mask[:, 0, 0]
    assert_nmse(by_mask[kept], by_sums[kept].double(), tol("attention", F32, LONGEST))


@pytest.mark.parametrize(
    "mask", [None, torch.zeros(2, 1, 1, 3), torch.zeros(2, 3, dtype=torch.bool)]
)
def test_masks_that_are_none(mask):
    for function in (utils.get_cu_seqlens, utils.get_cu_seqlens_and_indices):
        with pytest.raises(ValueError, match=r"mask: .*expected torch.bool \[batch, 1, 1"):
            function(mask)
    with pytest.raises(ValueError, match=r"mask: shape \(2, 3, 1, 3\)"):
        utils.get_cu_seqlens(torch.zeros(2, 3, 1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="attention_type='other'"):
        utils.get_padding_mask(1, None, None, 1, 1, "other")


@pytest.mark.parametrize("name", masks.MASK_TYPES)
def test_windows_are_those_of_attention(name):
    causal = "causal" in name
    assert utils.check_set_window_size(name) == ((-1, 0) if causal else (-1, -1))
    assert utils.check_set_window_size(name, (4, 0)) == (4, 0)
    with pytest.raises(ValueError, match="window_size=\\(2, -1\\)"):
        utils.check_set_window_size(name, (2, -1))


# ---- layouts -------------------------------------------------------------------------------------


def views_of(layout, form):
    """Queries, keys and values as a layout says, by slices of tensors that have it."""
    lead = {"sbhd": (5, 3), "bshd": (3, 5), "thd": (15,)}[form]
    parts = layout.split("_")

    def split(name):
        for count in (2, 3):
            if f"{count}hd" in name:
                return torch.randn(*lead, count, 4, 8).unbind(-3)
            if f"h{count}d" in name:
                return torch.randn(*lead, 4, count, 8).unbind(-2)
        return (torch.randn(*lead, 4, 8),)

    return [view for name in parts for view in split(name)]


OF_ONE_FORMAT = [
    name for name, (q, k) in formats.LAYOUTS.items() if q == k and not name.startswith("paged")
]


@pytest.mark.parametrize("layout", OF_ONE_FORMAT)
def test_layouts_are_found(layout):
    form = formats.LAYOUTS[layout][0]
    views = views_of(layout, form)
    name, *tensors, of_queries, of_keys = utils.get_qkv_layout(*views, form)
    assert (name, of_queries, of_keys) == (layout, form, form)
    assert all(a is b for a, b in zip(tensors, views, strict=True))
    assert utils.get_qkv_format(layout) == (form, form, form)


def test_layouts_of_what_is_no_one_tensor():
    """Parts in another order, of other sizes, of two tensors, or whose channels are apart."""
    packed = torch.randn(5, 3, 3, 4, 8)
    q, k, v = packed.unbind(2)
    apart = "sbhd_sbhd_sbhd"
    assert utils.get_qkv_layout(q, v, k)[0] == apart
    assert utils.get_qkv_layout(q[..., :2, :], k, v)[0] == apart
    assert utils.get_qkv_layout(q, k, v.clone())[0] == apart
    assert utils.get_qkv_layout(q, k.clone(), v)[0] == apart
    turned = q.transpose(-1, -2).contiguous().transpose(-1, -2)
    name, made, *_ = utils.get_qkv_layout(turned, k, v)
    assert name == apart and made.is_contiguous()
    assert_bits(made, q.contiguous())
    assert utils.maybe_contiguous(q) is q


def test_layouts_of_mixed_formats_and_of_caches():
    tensor = torch.randn(5, 3, 4, 8)
    for mixed in formats.MIXED:
        name, *_, of_queries, of_keys = utils.get_qkv_layout(tensor, tensor, tensor, mixed)
        assert (of_queries, of_keys) == formats.LAYOUTS[name]
        assert utils.get_qkv_format(name) == (mixed, of_queries, of_keys)
    cache = te.InferenceParams(3, 8, 4, 8, F32, is_paged=True, page_size=4, device="cpu")
    name = utils.get_qkv_layout(tensor, tensor, tensor, "thd_2bshd", cache)[0]
    assert name == "paged_kv_thd_bshd_bshd"
    assert utils.get_qkv_format(name, cache) == ("thd_2bshd", "thd", "bshd")
    with pytest.raises(ValueError, match="qkv_format='hd'"):
        utils.get_qkv_layout(tensor, tensor, tensor, "hd")


# ---- names and numbers of fused attention --------------------------------------------------------


def test_numbers_by_name():
    assert set(fused_attn.QKVFormat) == {*formats.FORMATS, *formats.MIXED}
    assert set(fused_attn.QKVLayout) == set(formats.LAYOUTS)
    assert set(fused_attn.AttnMaskType) == set(masks.MASK_TYPES) - {"arbitrary"}
    assert tuple(fused_attn.AttnBiasType) == backends.BIAS_TYPES
    assert tuple(fused_attn.SoftmaxType) == backends.SOFTMAX_TYPES
    kinds = {
        "QKVFormat": ops.NVTE_QKV_Format, "QKVLayout": ops.NVTE_QKV_Layout,
        "AttnMaskType": ops.NVTE_Mask_Type, "AttnBiasType": ops.NVTE_Bias_Type,
        "SoftmaxType": ops.NVTE_Softmax_Type,
    }  # fmt: skip
    for name, kind in kinds.items():
        assert list(getattr(fused_attn, name).values()) == list(kind)
    assert fused_attn.TORCH_DType is te.constants.TE_DType
    with pytest.raises(NotImplementedError, match="fused_attn_fwd"):
        fused_attn.fused_attn_fwd()


def test_the_backend_of_an_answer_is_one_of_them():
    asked = utils.AttentionParams(qkv_layout="bshd_bshd_bshd")
    kinds = fused_attn.FusedAttnBackend
    assert utils.get_attention_backend(asked)[3] is kinds["F16_arbitrary_seqlen"]
    asked = utils.AttentionParams(qkv_layout="bshd_bshd_bshd", fp8=True)
    assert utils.get_attention_backend(asked)[3] is kinds.FP8
    assert kinds.No_Backend == ops.NVTE_Fused_Attn_Backend.NVTE_No_Backend == -1
    for kind in kinds:
        for given in (kind, int(kind), ops.NVTE_Fused_Attn_Backend(int(kind))):
            assert kinds.cast(given) is kind
    with pytest.raises(ValueError, match="7 is not a valid FusedAttnBackend"):
        kinds.cast(7)
    with pytest.raises(TypeError, match="'str' object"):
        kinds.cast("FP8")


def test_slots_of_fp8_attention():
    """Six slots of the two states of a module, each another one, of the enumerations of all."""
    forward = {fused_attn.META_QKV, fused_attn.META_O, fused_attn.META_S}
    backward = {fused_attn.META_DQKV, fused_attn.META_DO, fused_attn.META_DP}
    assert {type(slot) for slot in forward} == {te.constants.FP8FwdTensorIdx}
    assert {type(slot) for slot in backward} == {te.constants.FP8BwdTensorIdx}
    assert [int(slot) for slot in sorted(forward)] == [2, 3, 8]
    assert [int(slot) for slot in sorted(backward)] == [0, 3, 5]


def test_the_log_says_what_was_chosen(caplog, monkeypatch):
    log = utils.AttentionLogging
    monkeypatch.setattr(log, "_is_logging_setup", False)
    handlers = list(log.fa_logger.handlers)
    for _ in range(2):
        log.setup_logging()
    assert len(log.fa_logger.handlers) == len(handlers) + 1
    with caplog.at_level(logging.DEBUG, log.fa_logger.name):
        asked = {"qkv_layout": "bshd_bshd_bshd", "window_size": (3, 3)}
        utils.get_attention_backend(utils.AttentionParams(**asked))
        utils.get_attention_backend(utils.AttentionParams(**asked, cp_size=2))
    log.fa_logger.handlers[:] = handlers
    said = [record.getMessage() for record in caplog.records]
    assert "not sdpa: window (3, 3): it takes no window" in said and "backend: native" in said
    assert any(text.startswith("no backend: ") and "cp_size=2" in text for text in said)


# ---- what runs, and by which recipe --------------------------------------------------------------


def test_a_logger_that_writes_nothing(capfd, caplog):
    for level in (logging.DEBUG, logging.CRITICAL, logging.CRITICAL + 1):
        utils.no_op_logger.log(level, "text")
    utils.no_op_logger.error("text")
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_backend_of_defaults():
    assert utils.get_attention_backend() == utils.get_attention_backend(utils.AttentionParams())


def test_recipes_of_capped_attention(monkeypatch):
    """What is asked has the module's cap: on CUDA no kernel of FP8 caps scores."""
    asked, of_table = [], backends.refusals

    def noted(call_kind):
        asked.append(call_kind.softcap)
        return of_table(call_kind)

    monkeypatch.setattr(backends, "refusals", noted)
    for cap in (0.0, 5.0):
        asked.clear()
        te.DotProductAttention(2, 64, softcap=cap).get_qkv_quantization_capabilities()
        assert set(asked) == {cap > 0.0}


def test_recipes_that_cast_queries_keys_and_values(device, monkeypatch):
    """By asking each: where it says so a call runs in FP8, else it is refused."""
    monkeypatch.delenv("NVTE_UnfusedDPA_Emulate_FP8", raising=False)
    tensors = [torch.randn(64, 2, 2, 64, device=device, dtype=torch.bfloat16) for _ in range(3)]
    on_cpu = device == "cpu"
    cases = ({}, True), ({"softmax_type": "learnable"}, False), ({"softcap": 5.0}, on_cpu)
    for options, some in cases:
        module = te.DotProductAttention(2, 64, attn_mask_type="no_mask", **options)
        found = module.get_qkv_quantization_capabilities()
        if on_cpu and torch.cuda.is_available():
            continue  # the answer is of CUDA there
        assert any(found.values()) == some
        for name, runs in found.items():
            counted = f"attention.{device}.e4m3"
            before = te.counters().get(counted, 0)
            with nullcontext() if runs else pytest.raises((AssertionError, ValueError)):
                made = getattr(recipe, name)()
                made.fp8_dpa = True  # some recipes refuse it, others the call
                with te.autocast(recipe=made):
                    module(*tensors)
            assert te.counters().get(counted, 0) == before + runs
