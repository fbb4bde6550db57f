# SPDX-License-Identifier: Apache-2.0
"""The table of backends: every row, what no backend runs, and what is said about it."""

import itertools
from collections import OrderedDict

import pytest
import torch
from pytorch.helpers import assert_same_bits
from tols import BF16, F16, F32

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common.config import AttentionSwitches
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
)
from transformer_engine.pytorch.attention import backends
from transformer_engine.pytorch.attention.backends import (
    BACKENDS,
    BIAS_TYPES,
    FEATURES,
    CallKind,
    Feature,
    choose_backend,
    refusals,
)
from transformer_engine.pytorch.attention.dot_product_attention.utils import (
    AttentionParams,
    get_attention_backend,
)
from transformer_engine.pytorch.attention.masks import (
    MASK_TYPES,
    effective_window,
    ends_bottom_right,
)

HEADS, CHANNELS = 4, 16


def call_kinds():
    """Kinds of call over the cross product of what the table speaks of."""
    switches = [AttentionSwitches(*on) for on in itertools.product((True, False), repeat=4)]
    machines = ("cpu", 0, 0), ("cuda", 90, 91900), ("cuda", 80, 91900), ("cuda", 90, 91800)
    of_calls = itertools.product(
        MASK_TYPES.values(), (None, (3, 0)), (True, False), BIAS_TYPES, (F32, F16, BF16)
    )
    for kind, window, square, bias, dtype in of_calls:
        for on, (device, *facts) in itertools.product(switches, machines):
            limits = kind, effective_window(window, kind), ends_bottom_right(None, kind), square
            channels = (64, 64) if square else (64, 60)
            of = CallKind(*limits, bias, not square, dtype, device, on, channels, *facts)
            yield of
            if kind.padding:
                yield of._replace(packed=True)
            if bias == "alibi" and window is None:
                yield of._replace(slopes_grad=True)
            if dtype is BF16:
                yield of._replace(fp8=True)
                yield of._replace(fp8=True, unsupported_fp8="MXFP8BlockScaling")
                yield of._replace(fp8=True, channels=(72, 64))
                yield of._replace(
                    fp8=True, padding_by_mask=kind.padding, one_query=not kind.padding
                )
                yield of._replace(fp8=True, softmax="learnable", max_logit=not square)
                yield of._replace(fp8=True, max_logit=True)
                yield of._replace(fp8=True, softcap=True)
                yield of._replace(fp8=True, packed=kind.padding, fp8_dropout=not kind.padding)
            if bias == "no_bias" and window is None:
                yield of._replace(softmax="off-by-one")
                yield of._replace(max_logit=True)
                yield of._replace(score_mod=True)
                yield of._replace(softcap=True)
            if bias == "pre_scale_bias":
                yield of._replace(softcap=True)
            by_class = of._replace(plugin="a.Class", bottom_right=not square)
            yield by_class
            yield by_class._replace(packed=kind.padding, gaps=kind.padding)


def test_one_table_answers_everything():
    """The choice is the first backend without a refusal; every row but the rare one counts."""
    named = set()
    for call_kind in call_kinds():
        found = refusals(call_kind)
        there = [name for name, backend in BACKENDS.items() if backend.is_there(call_kind)]
        runs = [name for name, refusal in found.items() if refusal is None]
        named |= {refusal.feature for refusal in found.values() if refusal is not None}
        if runs:
            choice = choose_backend(call_kind)
            assert choice.backend == runs[0]
            before = there[: there.index(runs[0])]
            assert choice.reasons == {name: found[name] for name in before}
        else:
            with pytest.raises(ValueError) as error:
                choose_backend(call_kind)
            assert all(f"{name}: {found[name]}" in str(error.value) for name in there)
    starts = [feature.name.partition("{")[0] for feature in FEATURES if feature.name[0] != "{"]
    assert all(any(name.startswith(start) for name in named) for start in starts)


def test_rows_speak_of_fields_and_backends():
    known = {*BACKENDS, "cpu", "cudnn"}
    assert all(set(feature.lacking) <= known and feature.lacking for feature in FEATURES)
    without = {name for name, backend in BACKENDS.items() if backend.run is None}
    # Not built, a class of somebody's, and what runs as a plan of its own.
    assert without == {"flash", "plugin", "native"}


# ---- what nobody runs ----------------------------------------------------------------------------


def refuse(monkeypatch, present):
    """Let no backend run a feature."""
    nobody = Feature("groups of heads", present, dict.fromkeys(BACKENDS, "not here"))
    monkeypatch.setattr(backends, "FEATURES", (nobody, *FEATURES))


def test_what_no_backend_runs_is_refused_at_construction(monkeypatch):
    refuse(monkeypatch, lambda s: s.grouped)
    te.DotProductAttention(HEADS, CHANNELS)
    with pytest.raises(ValueError, match="no backend is left .*groups of heads: not here"):
        te.DotProductAttention(HEADS, CHANNELS, 2)
    with pytest.raises(ValueError, match="groups of heads"):
        te.MultiheadAttention(64, HEADS, num_gqa_groups=2)


def test_what_a_call_brings_is_refused_at_the_call(monkeypatch, device):
    refuse(monkeypatch, lambda s: s.dtype is F16)
    module = te.DotProductAttention(HEADS, CHANNELS)
    tensors = [torch.randn(5, 2, HEADS, CHANNELS, dtype=F16, device=device) for _ in range(3)]
    with pytest.raises(ValueError, match="no backend is left .*groups of heads: not here"):
        module(*tensors)
    explained = te.explain_attention(module, *tensors)
    assert explained.backend is None and str(explained).startswith("nothing runs it")
    module(*(tensor.float() for tensor in tensors))


def test_switches_are_read_at_the_call_and_not_at_construction(monkeypatch, device):
    for name in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", "0")
    module = te.DotProductAttention(HEADS, CHANNELS)
    tensor = torch.randn(5, 2, HEADS, CHANNELS, dtype=BF16, device=device)
    with pytest.raises(ValueError, match="set NVTE_UNFUSED_ATTN=1"):
        module(tensor, tensor, tensor)
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "1")
    module(tensor, tensor, tensor)


SWITCHED = {
    "native": {},
    "sdpa": {"FUSED": "0"},
    "unfused": {"FUSED": "0", "FLASH": "0"},
    "": {"FUSED": "0", "FLASH": "0", "UNFUSED": "0"},
}
"""Values of NVTE_<name>_ATTN by the backend that is then left."""


def switch(monkeypatch, backend):
    for name in ("FLASH", "FUSED", "UNFUSED"):
        monkeypatch.setenv(f"NVTE_{name}_ATTN", SWITCHED[backend].get(name, "1"))


def switched_modules(device):
    """Attention by itself and in a layer, the shape of their inputs, and how many there are."""
    options = {"attention_dropout": 0.0, "params_dtype": BF16, "device": device}
    hidden = HEADS * CHANNELS
    return (
        (te.DotProductAttention(HEADS, CHANNELS), (8, 2, HEADS, CHANNELS), 3),
        (te.MultiheadAttention(hidden, HEADS, **options), (8, 2, hidden), 1),
    )


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # of torch, which goes on in eager mode after an error
@pytest.mark.parametrize("backend", SWITCHED)
def test_switches_act_in_graphs_as_in_eager_mode(monkeypatch, device, backend):
    switch(monkeypatch, backend)
    for module, shape, count in switched_modules(device):
        inputs = [torch.randn(shape, dtype=BF16, device=device) for _ in range(count)]
        results, counts = [], []
        for call in (module, torch.compile(module, backend="aot_eager")):
            if not backend:
                with pytest.raises(ValueError, match="no backend is left"):
                    call(*inputs)
                continue
            _core.reset_counters()
            results.append(call(*inputs))
            counts.append(_core.counters())
        assert counts[:1] == counts[1:]
        assert_same_bits(results[:1], results[1:])
        attends = any(name.startswith("attention.") for name in counts[0]) if backend else False
        assert attends == (backend == "native")


@pytest.mark.usefixtures("fresh_compiler")
def test_graphs_keep_the_switches_of_their_trace(monkeypatch, device):
    """As torch keeps what code of a program finds in ``os.environ``; a new trace reads again."""
    for module, shape, count in switched_modules(device):
        inputs = [torch.randn(shape, dtype=BF16, device=device) for _ in range(count)]
        compiled = torch.compile(module, backend="aot_eager")
        for backend in ("native", "unfused"):
            switch(monkeypatch, backend)
            torch._dynamo.reset()
            expected = module(*inputs)
            for later in (backend, "", "native"):
                switch(monkeypatch, later)
                assert_same_bits(compiled(*inputs), expected)


# ---- explain_attention ---------------------------------------------------------------------------


def explain(module, *given, **more):
    """Explain, and check that nothing ran."""
    _core.reset_counters()
    explained = te.explain_attention(module, *given, **more)
    assert not _core.counters()
    return explained


@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}, {"attn_mask_type": "arbitrary"}])
def test_explanation_is_what_then_runs(device, options, monkeypatch):
    module = te.DotProductAttention(HEADS, CHANNELS, 2)
    query = torch.randn(5, 2, HEADS, CHANNELS, dtype=BF16, device=device)
    key = torch.randn(5, 2, 2, CHANNELS, dtype=BF16, device=device)
    if "attn_mask_type" in options:
        mask = torch.zeros(2, 1, 5, 5, dtype=torch.bool, device=device)
        options = {**options, "attention_mask": mask}
    for fused in ("1", "0"):
        monkeypatch.setenv("NVTE_FUSED_ATTN", fused)
        explained = explain(module, query, key, key, **options)
        assert explained == explain(module, query, **options)
        shapes = {name: value for name, value in options.items() if name != "attention_mask"}
        shapes.update({"attention_mask": (2, 1, 5, 5)} if "attention_mask" in options else {})
        kind = {"dtype": BF16, "device": device}
        assert explained == explain(module, tuple(query.shape), **kind, **shapes)
        module(query, key, key, **options)
        assert explained.backend == module._last_call.backend
        reasons = module._last_call.reasons
        assert {name: explained.refused[name] for name in reasons} == reasons
        assert set(explained.refused) | {explained.backend, *explained.others} == set(BACKENDS)


@pytest.mark.parametrize(
    ("kind", "name", "shape"),
    [
        ("alibi", "alibi_slopes", (2, HEADS)),
        ("pre_scale_bias", "core_attention_bias", (1, 1, 5, 5)),
        ("post_scale_bias", "core_attention_bias", (2, HEADS, 5, 5)),
    ],
)
def test_explanation_of_what_is_added_to_scores(device, kind, name, shape):
    """As a tensor and as its shape, beside tensors and shapes of the queries."""
    module, query = te.DotProductAttention(HEADS, CHANNELS), (5, 2, HEADS, CHANNELS)
    tensor = torch.randn(query, dtype=BF16, device=device)
    added = torch.randn(shape, dtype=F32 if kind == "alibi" else BF16, device=device)
    given = {"core_attention_bias_type": kind, "dtype": BF16, "device": device}
    wanted = explain(module, tensor, tensor, tensor, **given, **{name: added})
    for first, each in itertools.product((tensor, query), (added, shape)):
        assert explain(module, first, **given, **{name: each}) == wanted
        assert explain(module, first, query, query, **given, **{name: each}) == wanted
    assert wanted.refused["sdpa"].feature == f"bias type {kind}"


def test_explanation_names_one_feature_for_each_backend():
    module = te.DotProductAttention(HEADS, CHANNELS, attn_mask_type="no_mask")
    shape = (5, 2, HEADS, CHANNELS)
    explained = explain(module, shape, dtype=F32, device="cpu", window_size=(2, 2))
    assert explained.backend == "native" and explained.others == ("unfused",)
    assert explained.refused["sdpa"][:2] == ("window (2, 2)", "it takes no window")
    assert explained.refused["flash"].feature == "flash-attn"
    text = str(explained)
    assert "runs     native: " in text and "could    unfused: " in text
    assert "refused  sdpa: window (2, 2): it takes no window" in text


def test_explanation_of_layers_and_packed_tensors():
    layer = te.TransformerLayer(64, 128, HEADS)
    shape = (5, 2, HEADS, CHANNELS)
    wanted = explain(layer.self_attention.core_attention, shape, device="cpu")
    assert explain(layer, shape, device="cpu") == wanted
    assert explain(layer.self_attention, shape, device="cpu") == wanted
    packed = torch.zeros(5, 2, 3, HEADS, CHANNELS, dtype=BF16)
    assert explain(layer, qkv_layer=packed) == wanted
    assert explain(layer, qkv_layer=(5, 2, 3, HEADS, CHANNELS), device="cpu") == wanted
    both = {"kv_layer": (5, 2, HEADS, 2, CHANNELS), "qkv_interleave_dim": -2}
    assert explain(layer, shape, device="cpu", **both) == wanted
    assert explain(layer, packed[:, :, 0], **both) == wanted
    assert explain(layer, shape, kv_layer=packed[:, :, :2]) == wanted


@pytest.mark.parametrize("bounds", [{}, {"max_seqlen_q": 4, "max_seqlen_kv": 7}])
@pytest.mark.parametrize("form", ["thd", "thd_2bshd", "thd_2sbhd"])
def test_explanation_of_packed_sequences(form, bounds):
    """All tensors as shapes, the sums of lengths too."""
    kinds = ["padding", "padding_causal_bottom_right"]
    module = te.DotProductAttention(HEADS, CHANNELS, qkv_format="thd", attn_mask_type=kinds[0])
    sums = torch.tensor([0, 4, 8], dtype=torch.int32)
    keys = {"thd": (8,), "thd_2bshd": (2, 7), "thd_2sbhd": (7, 2)}[form]
    shapes = (8, HEADS, CHANNELS), *[(*keys, HEADS, CHANNELS)] * 2
    tensors = [torch.zeros(shape, dtype=BF16) for shape in shapes]
    for kind, name in itertools.product(kinds, ("cu_seqlens_q", "cu_seqlens_q_padded")):
        told = {"qkv_format": form, "attn_mask_type": kind, "cu_seqlens_q": sums, name: sums}
        wanted = explain(module, *tensors, **told, **bounds)
        assert wanted.backend == "native" and "packed" in wanted.refused["sdpa"].feature
        asked = {**told, "cu_seqlens_q": (3,), name: (3,)}
        assert explain(module, *shapes, device="cpu", **asked, **bounds) == wanted


def test_mistakes_in_questions():
    module = te.DotProductAttention(HEADS, CHANNELS)
    with pytest.raises(TypeError, match="Linear, expected a DotProductAttention"):
        te.explain_attention(te.Linear(4, 4), (5, 2, HEADS, CHANNELS))
    with pytest.raises(TypeError, match="'mask' is no argument of DotProductAttention.forward"):
        te.explain_attention(module, (5, 2, HEADS, CHANNELS), mask=None)
    with pytest.raises(ValueError, match="expected sbhd with 4 heads of 16"):
        te.explain_attention(module, (5, 2, HEADS, CHANNELS + 1))


# ---- get_attention_backend -----------------------------------------------------------------------


def test_get_attention_backend_answers_from_the_table(monkeypatch):
    params = AttentionParams(qkv_layout="sbhd_sbhd_sbhd", head_dim_qk=CHANNELS, head_dim_v=CHANNELS)
    assert get_attention_backend(params) == (False, None, True, 1, False, [False, True, True])
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    assert get_attention_backend(params) == (False, None, True, None, False, [False, True, True])
    monkeypatch.setenv("NVTE_FLASH_ATTN", "0")
    assert get_attention_backend(params) == (False, None, False, None, True, [False, False, True])
    monkeypatch.setenv("NVTE_UNFUSED_ATTN", "0")
    assert get_attention_backend(params) == (False, None, False, None, False, [False] * 3)


@pytest.mark.parametrize(
    "changed",
    [
        {"core_attention_bias_type": "post_scale_bias", "core_attention_bias_shape": "11ss"},
        {"core_attention_bias_type": "alibi", "alibi_slopes_shape": (16,)},
        {"attn_mask_type": "padding_causal", "window_size": (5, 0)},
        {"attn_mask_type": "arbitrary", "num_gqa_groups": 4, "max_seqlen_kv": 77},
        {"deterministic": True, "attention_dropout": 0.1, "qkv_dtype": F16},
        {"softmax_type": "learnable", "return_max_logit": True},
    ],
)
def test_get_attention_backend_of_other_problems(changed):
    found = get_attention_backend(AttentionParams(qkv_layout="bshd_bshd_bshd", **changed))
    assert found[2:5] == (True, 1, False) and found[5][2]


@pytest.mark.parametrize(
    "changed",
    [
        {"context_parallel": True},
        {"cp_size": 2},
        {"cp_size_a2a": 2},
        {"has_score_mod_bprop": True},
        {"has_score_mod": True, "core_attention_bias_type": "pre_scale_bias"},
        {"qkv_dtype": torch.float64},
        {"qkv_dtype": torch.float8_e4m3fn},
        {"qkv_layout": "thd_thd_thd", "attn_mask_type": "arbitrary"},
    ],
)
def test_get_attention_backend_of_what_nothing_runs(changed):
    asked = AttentionParams(**{"qkv_layout": "bshd_bshd_bshd", **changed})
    assert get_attention_backend(asked) == NOTHING


@pytest.mark.parametrize(
    "field", ["attn_mask_type", "qkv_layout", "core_attention_bias_type", "softmax_type"]
)
def test_get_attention_backend_of_names_that_there_are_not(field):
    with pytest.raises(ValueError, match="'a_name'"):
        get_attention_backend(AttentionParams(**{field: "a_name"}))


CHOICES = {
    "attn_mask_type": tuple(MASK_TYPES),
    "qkv_layout": ("sbhd_sbhd_sbhd", "bshd_bshd_bshd", "thd_thd_thd"),
    "qkv_dtype": (F32, BF16),
    "window_size": (None, (-1, -1), (3, 0)),
    "core_attention_bias_type": BIAS_TYPES,
    "softmax_type": ("vanilla", "off-by-one", "learnable"),
    "return_max_logit": (False, True),
    "softcap": (0.0, 0.0, 30.0),
    "has_score_mod": (False, False, True),
    "has_score_mod_bprop": (False, False, True),
    "inference_params": (None, None, "whole", "paged"),
    "max_seqlen_kv": (8, 5),
    "attention_dropout": (0.0, 0.2),
    "fp8": (False, False, True),
    "checkpoint_core_attention": (False, True),
    "fp8_output": (False, True),
}


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""What is answered for."""


def cache_of(asked):
    """What a program has before its step: two sequences that get as many tokens."""
    paged = asked["inference_params"] == "paged"
    pages = {"is_paged": True, "page_size": 4} if paged else {}
    made = te.InferenceParams(2, 8, HEADS, CHANNELS, asked["qkv_dtype"], device=DEVICE, **pages)
    made.pre_step(OrderedDict(a=8, b=8))
    return made


def attend(asked):
    """Attend as `asked`; the backend that ran."""
    packed = asked["qkv_layout"] == "thd_thd_thd"
    module = te.DotProductAttention(
        HEADS, CHANNELS, qkv_format=asked["qkv_layout"][:4].rstrip("_"), layer_number=1,
        softmax_type=asked["softmax_type"], return_max_logit=asked["return_max_logit"],
        attention_dropout=asked["attention_dropout"], softcap=asked["softcap"],
    )  # fmt: skip
    cache = asked["inference_params"]
    lengths = 8, 8 if cache else asked["max_seqlen_kv"]
    shapes = [(n, 2) if asked["qkv_layout"] == "sbhd_sbhd_sbhd" else (2, n) for n in lengths]
    shapes = [(2 * n,) for n in lengths] if packed else shapes
    kind = {"dtype": asked["qkv_dtype"], "device": DEVICE}
    tensors = [torch.randn(*shapes[i > 0], HEADS, CHANNELS, **kind) for i in range(3)]
    sums = [torch.tensor([0, n, 2 * n], dtype=torch.int32, device=DEVICE) for n in lengths]
    mask = bias = None
    if asked["attn_mask_type"] == "arbitrary":
        mask = torch.zeros(2, 1, *lengths, dtype=torch.bool, device=DEVICE)
    if "scale_bias" in asked["core_attention_bias_type"]:
        bound = cache.max_seqlen_q if cache and packed else 8
        bias = torch.zeros(1, HEADS, bound, asked["max_seqlen_kv"], **kind)
    mods = {
        "score_mod": (lambda graph, scores, _: scores) if asked["has_score_mod"] else None,
        "score_mod_bprop": (lambda graph, g, _: g) if asked["has_score_mod_bprop"] else None,
    }
    copied = ("attn_mask_type", "window_size", "core_attention_bias_type")
    recipe = DelayedScaling(fp8_dpa=True)
    with torch.no_grad(), te.autocast(enabled=asked["fp8"], recipe=recipe):
        module(
            *tensors, mask, cu_seqlens_q=sums[0], cu_seqlens_kv=sums[1], max_seqlen_q=lengths[0],
            max_seqlen_kv=lengths[1], inference_params=cache, core_attention_bias=bias,
            checkpoint_core_attention=asked["checkpoint_core_attention"],
            fp8_output=asked["fp8_output"], **mods, **{name: asked[name] for name in copied},
        )  # fmt: skip
    return module._last_call.backend


@pytest.mark.parametrize("seed", range(20))
def test_get_attention_backend_agrees_with_what_runs(seed, rng):
    """Of any arguments: what is answered runs, and where nothing could, attention raises."""
    del seed
    for _ in range(8):
        asked = {name: options[rng.integers(len(options))] for name, options in CHOICES.items()}
        if rng.random() < 0.5:  # most of what is drawn at random goes with nothing
            asked |= {"has_score_mod": False, "has_score_mod_bprop": False, "fp8": False}
        cache = None
        if asked["inference_params"] is not None:
            asked["max_seqlen_kv"] = 8
            cache = cache_of(asked)
        asked["inference_params"] = cache
        sizes = {"batch_size": 2, "num_heads": HEADS, "num_gqa_groups": HEADS, "max_seqlen_q": 8}
        sizes |= {"head_dim_qk": CHANNELS, "head_dim_v": CHANNELS}
        sizes["core_attention_bias_requires_grad"] = False
        found = get_attention_backend(AttentionParams(**asked, **sizes))
        if not any(found[5]):
            with pytest.raises((ValueError, TypeError, NotImplementedError)):
                attend(asked)
        else:
            ran = attend(asked)
            assert found[2:5:2] == (ran in ("native", "sdpa"), ran == "unfused")


NOTHING = (False, None, False, None, False, [False] * 3)
FP8 = (False, None, True, 2, False, [False, True, False])
F16_ = (False, None, True, 1, False, [False, True, True])


@pytest.mark.parametrize(
    "recipe, changed, expected",
    [
        (None, {}, FP8),
        (DelayedScaling(fp8_dpa=True), {"attn_mask_type": "padding_causal"}, FP8),
        (Float8CurrentScaling(fp8_mha=True), {"window_size": (5, 9)}, FP8),
        (DelayedScaling(), {}, F16_),
        (DelayedScaling(fp8_dpa=True), {"softmax_type": "learnable"}, NOTHING),
        (DelayedScaling(fp8_dpa=True), {"core_attention_bias_type": "alibi"}, NOTHING),
        (MXFP8BlockScaling(fp8_dpa=True), {}, NOTHING),
    ],
)
def test_get_attention_backend_of_fp8(monkeypatch, recipe, changed, expected):
    """The recipe is that of the arguments, whatever region is in force."""
    meta = None if recipe is None else {"recipe": recipe}
    asked = {"qkv_layout": "bshd_bshd_bshd", **changed}
    for region in (None, DelayedScaling(fp8_dpa=True)):
        with te.autocast(enabled=region is not None, recipe=region):
            found = get_attention_backend(AttentionParams(fp8=True, fp8_meta=meta, **asked))
            assert found == expected
            assert get_attention_backend(AttentionParams(**asked)) == F16_
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "F16")
    assert get_attention_backend(AttentionParams(fp8=True, fp8_meta=meta, **asked)) == F16_
