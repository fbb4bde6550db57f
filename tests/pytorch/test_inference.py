# SPDX-License-Identifier: Apache-2.0
"""`InferenceParams`: sequences that come, grow and go, and attention to what they keep."""

from collections import OrderedDict

import pytest
import torch
from comparators import assert_bits, assert_nmse
from device_kinds import every_device
from hypothesis import given, settings, strategies as st
from pytorch import attention_model as model
from pytorch.helpers import captured
from tols import BF16, F32, tol

import transformer_engine.pytorch as te

pytestmark = every_device

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
