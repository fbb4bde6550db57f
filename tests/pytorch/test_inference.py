# SPDX-License-Identifier: Apache-2.0
"""`InferenceParams`: sequences that come, grow and go, and attention to what they keep."""

from collections import OrderedDict

import pytest
import torch
from comparators import assert_bits, assert_nmse
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch import attention_model as model
from pytorch.helpers import captured
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention import inference
from transformer_engine.pytorch.attention.kv_cache import StepState

ROWS, LONGEST, HEADS, GROUPS, CHANNELS, PAGE = 3, 24, 4, 2, (16, 8), 4
FORMS = pytest.mark.parametrize("form", ["sbhd", "bshd", "thd"])
PAGED = pytest.mark.parametrize("paged", [False, True])


def make_params(device, dtype=F32, **options):
    given_ = {"head_dim_v": CHANNELS[1], "page_size": PAGE, "device": device, **options}
    if not given_.get("is_paged"):
        del given_["page_size"]
    return te.InferenceParams(ROWS, LONGEST, GROUPS, CHANNELS[0], dtype, **given_)


def make_core(form, mask="padding_causal", window=None, **options):
    return te.DotProductAttention(
        HEADS, CHANNELS, GROUPS, qkv_format=form, attn_mask_type=mask, window_size=window,
        layer_number=1, **options,
    ).eval()  # fmt: skip


def laid(tensors, form, device, fill=float("nan")):
    """Tensors [tokens, heads, channels] of each sequence in one; NaN pads a batch."""
    if form == "thd":
        return torch.cat(tensors).to(device)
    longest = max(1, *(len(t) for t in tensors))
    batch = torch.full((len(tensors), longest, *tensors[0].shape[1:]), fill, dtype=tensors[0].dtype)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return (batch.transpose(0, 1).contiguous() if form == "sbhd" else batch).to(device)


def taken(out, form, counts):
    """The rows of each sequence of a result."""
    if form == "thd":
        return out.split(counts)
    return [(out[:, b] if form == "sbhd" else out[b])[:n] for b, n in enumerate(counts)]


class Kept:
    """What each sequence has got so far, in the test's own memory."""

    def __init__(self):
        self.of = {}

    def add(self, id_, count, dtype):
        """Queries, keys and values of new tokens."""
        shapes = (HEADS, CHANNELS[0]), (GROUPS, CHANNELS[0]), (GROUPS, CHANNELS[1])
        new = [torch.randn(count, *shape).to(dtype) for shape in shapes]
        before = self.of.get(id_, [t[:0] for t in new[1:]])
        self.of[id_] = [torch.cat(pair) for pair in zip(before, new[1:], strict=True)]
        return new

    def attend(self, id_, query, window):
        """The definition: the last query attends to the last key."""
        key, value = self.of[id_]
        heads = [t.double().transpose(0, 1)[None] for t in (query, key, value)]
        sizes = 1, HEADS, len(query), len(key)
        may = model.may_attend(sizes, window=window, diagonal=len(key) - len(query))
        return model.attention(*heads, may)[0].transpose(0, 1).flatten(1)


def run_steps(device, form, paged, steps, *, mask="padding_causal", window=None, dtype=F32):
    """Steps of {id: new tokens}; each against the definition."""
    params, core, kept = (
        make_params(device, dtype, is_paged=paged),
        make_core(form, mask, window),
        Kept(),
    )
    left = ((-1, 0) if "causal" in mask else (-1, -1)) if window is None else window
    for step in steps:
        kept.of = {id_: of for id_, of in kept.of.items() if id_ in step}
        params.pre_step(OrderedDict(step))
        new = [kept.add(id_, n, dtype) for id_, n in step.items()]
        counts = list(step.values())
        tensors = [laid(part, form, device) for part in zip(*new, strict=True)]
        with torch.no_grad():
            out = core(*tensors, inference_params=params)
        assert params.sequences == {id_: len(kept.of[id_][0]) for id_ in step}
        for id_, (query, *_), mine in zip(step, new, taken(out, form, counts), strict=True):
            if len(query) > 0:
                exact = kept.attend(id_, query, left)
                assert_nmse(mine, exact, tol("attention", dtype, LONGEST))
    return params


STEPS = (
    {"a": 5, "b": 1, "c": 9},
    {"a": 1, "b": 1, "c": 1},
    {"c": 1, "a": 3},
    {"c": 1, "d": 7, "a": 1},
    {"d": 1, "e": 4},
    {"d": 12, "e": 1},
)


@PAGED
@FORMS
@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("padding_causal", None),
        ("padding", None),
        ("padding_causal", (4, 0)),
        ("padding", (3, 2)),
        ("causal", None),
        ("causal_bottom_right", (4, 0)),
        ("no_mask", None),
        ("no_mask", (3, 2)),
    ],
)
def test_sequences_that_come_and_go(device, form, paged, mask, window):
    dtype = BF16 if device == "cuda" else F32
    run_steps(device, form, paged, STEPS, mask=mask, window=window, dtype=dtype)


@st.composite
def programs(draw):
    """Steps of random sequences: new ones, running ones with any number of tokens, in any order."""
    lengths, steps, fresh = {}, [], 0
    for _ in range(draw(st.integers(1, 6))):
        ids = [id_ for id_ in lengths if draw(st.booleans())]
        for _ in range(draw(st.integers(0, ROWS - len(ids)))):
            fresh += 1
            ids.append(fresh)
        ids = draw(st.permutations(ids))
        step = {i: draw(st.integers(0, min(7, LONGEST - lengths.get(i, 0)))) for i in ids}
        lengths = {i: lengths.get(i, 0) + n for i, n in step.items()}
        if step:
            steps.append(step)
        else:
            lengths = {}
    return steps


@PAGED
@FORMS
@settings(max_examples=25)
@given(steps=programs())
def test_random_programs(form, paged, steps):
    """On the CPU: on a GPU each size has a kernel of its own, which takes time to make."""
    run_steps("cpu", form, paged, steps)


@PAGED
@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
def test_backends(device, backend, paged):
    run_steps(device, "bshd", paged, STEPS, dtype=BF16 if device == "cuda" else F32)


def test_alibi_goes_on(device):
    """Distances are those from the last key of a sequence."""
    params, kept, dtype = make_params(device, is_paged=False), Kept(), F32
    core = make_core("bshd")
    for step in STEPS[:2]:
        params.pre_step(OrderedDict(step))
        new = [kept.add(id_, n, dtype) for id_, n in step.items()]
        tensors = [laid(part, "bshd", device) for part in zip(*new, strict=True)]
        with torch.no_grad():
            out = core(*tensors, inference_params=params, core_attention_bias_type="alibi")
        for id_, (query, *_), mine in zip(
            step, new, taken(out, "bshd", [*step.values()]), strict=True
        ):
            key, value = kept.of[id_]
            heads = [t.double().transpose(0, 1)[None] for t in (query, key, value)]
            corner = len(key) - len(query)
            may = model.may_attend((1, HEADS, len(query), len(key)), None, (-1, 0), corner)
            slopes = torch.tensor([2.0 ** (-8 * k / HEADS) for k in range(1, HEADS + 1)]).double()
            bias = -slopes[:, None, None] * model.distance(len(query), len(key), corner)
            exact = model.attention(*heads, may, bias=bias)[0].transpose(0, 1).flatten(1)
            assert_nmse(mine, exact, tol("attention", dtype, LONGEST))


# ---- layers --------------------------------------------------------------------------------------


def make_layers(device, dtype, form="sbhd", **options):
    """Two Transformer layers, which attend to all before."""
    layers = [
        te.TransformerLayer(
            64, 96, HEADS, GROUPS, layer_number=number, self_attn_mask_type="causal",
            attn_input_format=form, params_dtype=dtype, device=device, **options,
        ).eval()
        for number in (1, 2)
    ]  # fmt: skip
    return torch.nn.ModuleList(layers)


def forward(layers, x, angles, **options):
    for layer in layers:
        x = layer(x, rotary_pos_emb=angles, **options)
    return x


def whole(layers, sequence, angles, form):
    """Results of a sequence [tokens, hidden], without a cache."""
    x = sequence[None] if form == "bshd" else sequence[:, None]
    out = forward(layers, x, angles)
    return out[0] if form == "bshd" else out[:, 0]


@PAGED
@FORMS
@pytest.mark.parametrize(
    "options",
    [{}, {"qk_norm_type": "RMSNorm"}, {"window_size": (6, 0)}, {"fuse_qkv_params": True}],
    ids=["plain", "qk_norm", "window", "fused"],
)
def test_layers_equal_the_cacheless_ones(device, form, paged, options):
    """Each token's result is that of the whole sequence at once, with rotary positions."""
    dtype = BF16 if device == "cuda" else F32
    layers = make_layers(device, dtype, form, **options)
    padded = make_layers(device, dtype, "bshd", **options) if form == "thd" else layers
    padded.load_state_dict(layers.state_dict())
    angles = te.RotaryPositionEmbedding(16)(LONGEST).to(device)
    kind = {"head_dim_v": 16, "is_paged": paged, "page_size": PAGE if paged else None}
    params = te.InferenceParams(ROWS, LONGEST, GROUPS, 16, dtype, device=device, **kind)
    kept, masks = {}, {"self_attn_mask_type": "padding_causal"}
    with torch.no_grad():
        for step in STEPS:
            params.pre_step(OrderedDict(step))
            new = [torch.randn(n, 64, dtype=dtype) for n in step.values()]
            kept = {
                id_: torch.cat([kept.get(id_, x[:0]), x]) for id_, x in zip(step, new, strict=True)
            }
            x = laid(new, form, device, 0.0)
            out = forward(layers, x, angles, inference_params=params, **masks)
            for id_, mine in zip(step, taken(out, form, [*step.values()]), strict=True):
                all_ = whole(
                    padded, kept[id_].to(device), angles, "bshd" if form == "thd" else form
                )
                assert_nmse(mine, all_[-len(mine) :].double(), 2 * tol("layer", dtype, 96))


def test_decoders_cache_their_own_keys_alone(device):
    layer = te.TransformerLayer(
        64, 96, HEADS, layer_type="decoder", layer_number=1, device=device, params_dtype=F32
    ).eval()
    source, x = torch.randn(5, 2, 64, device=device), torch.randn(6, 2, 64, device=device)
    params = te.InferenceParams(2, 8, HEADS, 16, F32, device=device)
    masks = {"self_attn_mask_type": "padding_causal", "inference_params": params}
    made = []
    with torch.no_grad():
        exact = layer(x, encoder_output=source, self_attn_mask_type="causal")
        for part in x.split([4, 1, 1]):
            params.pre_step(OrderedDict(a=len(part), b=len(part)))
            made.append(layer(part, encoder_output=source, **masks))
    assert_nmse(torch.cat(made), exact.double(), 2 * tol("layer", F32, 96))
    assert list(params.cache_manager.cache) == [1]
    crossed = layer.inter_attention
    with pytest.raises(ValueError, match="inference_params with attention_type='cross'"):
        crossed(x, encoder_output=source, inference_params=params)


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
    with pytest.raises(
        ValueError, match=r"1 tokens of each sequence, .*pre_step\(\) was told of 2"
    ):
        core(query, key.detach(), value, **call)
    with pytest.raises(ValueError, match=r"2 tokens in all, and pre_step\(\) was told of 3"):
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


# ---- captured steps ------------------------------------------------------------------------------


class Decoder:
    """Steps of one token of each sequence, whose input stays where it is."""

    def __init__(self, paged, dtype=BF16, form="sbhd"):
        self.form, self.layers = form, make_layers("cuda", dtype, form)
        self.angles = te.RotaryPositionEmbedding(16)(LONGEST).cuda()
        kind = {"is_paged": paged, "page_size": PAGE if paged else None}
        self.params = te.InferenceParams(ROWS, LONGEST, GROUPS, 16, dtype, **kind)
        lead = {"sbhd": (1, ROWS), "bshd": (ROWS, 1), "thd": (ROWS,)}[form]
        self.token = torch.zeros(*lead, 64, dtype=dtype, device="cuda")
        self.step_dict = OrderedDict((i, 1) for i in range(ROWS))

    def run(self, x):
        masks = {"self_attn_mask_type": "padding_causal", "inference_params": self.params}
        return forward(self.layers, x, self.angles, **masks)

    def prefill(self, prompts):
        self.params.reset()
        self.params.pre_step(OrderedDict(enumerate(map(len, prompts))))
        self.run(laid(prompts, self.form, "cuda", 0.0))

    def warm_up(self):
        """Let everything be compiled and allocated that the first step of a kind needs."""
        self.prefill([torch.zeros(1, 64, dtype=self.token.dtype)] * ROWS)
        self.params.reserve()
        self.decode()

    def decode(self):
        self.params.pre_step(self.step_dict)
        return self.run(self.token)


@pytest.mark.gpu
@PAGED
@FORMS
def test_cuda_a_captured_step_serves_all(paged, form):
    """From prompts of any lengths up to the last token that there is room for: the eager bits."""
    decoder = Decoder(paged, form=form)
    prompts = [torch.randn(n, 64, dtype=BF16) for n in (17, 13, 15)]
    steps = LONGEST - 17
    tokens = [torch.randn_like(decoder.token) for _ in range(steps)]
    with torch.no_grad():
        decoder.prefill(prompts)
        eager = []
        for token in tokens:
            decoder.token.copy_(token)
            eager.append(decoder.decode().clone())
        lengths = decoder.params.sequences
        decoder.prefill(prompts)
        decoder.params.reserve()
        graph, out = captured(decoder.decode)
        for token, exact in zip(tokens, eager, strict=True):
            decoder.token.copy_(token)
            graph.replay()
            assert_bits(out, exact)
        decoder.params.pre_step(OrderedDict((i, 0) for i in range(ROWS)))
        assert decoder.params.sequences == lengths  # read from the device


@pytest.mark.gpu
@PAGED
def test_cuda_a_replay_too_many_is_seen(paged):
    decoder = Decoder(paged)
    with torch.no_grad():
        decoder.warm_up()
        decoder.prefill([torch.randn(n, 64, dtype=BF16) for n in (LONGEST - 2, 3, 4)])
        decoder.params.reserve()
        graph, out = captured(decoder.decode)
        for _ in range(2):
            graph.replay()
            assert out.isfinite().all()
        graph.replay()
        assert out[:, 0].isnan().any() and out[:, 1:].isfinite().all()
    with pytest.raises(RuntimeError, match="replays of a captured step gave sequence 0 25 tokens"):
        decoder.params.pre_step(decoder.step_dict)


@pytest.mark.gpu
def test_cuda_what_a_captured_step_can_not_do():
    decoder = Decoder(True)
    with torch.no_grad():
        decoder.prefill([torch.randn(n, 64, dtype=BF16) for n in (3, 4, 5)])
        for step_dict, text in (
            (OrderedDict(a=1), "the sequences are those of the step before"),
            (decoder.step_dict, "call reserve"),
        ):
            with pytest.raises(RuntimeError, match=text), torch.cuda.graph(torch.cuda.CUDAGraph()):
                decoder.token.add_(1.0)  # torch warns of a graph of nothing
                decoder.params.pre_step(step_dict)
