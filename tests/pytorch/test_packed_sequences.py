# SPDX-License-Identifier: Apache-2.0
"""Packed sequences (thd): against float64 of each sequence, and against a padded batch."""

import pytest
import torch
from backend.packed_sequences import Packing
from comparators import assert_bits, assert_grad64, assert_nmse
from device_kinds import every_device, our_kernels
from pytorch import attention_model as model
from pytorch.helpers import same_draws
from tols import BF16, F32, tol

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.pytorch.attention import DotProductAttention

pytestmark = every_device

HEADS, GROUPS, K, V = 4, 2, 16, 24
LENGTHS = ([11, 0, 1, 30], [17, 5, 1, 0])
MASKS = {
    "padding": {},
    "padding_causal": {"window": (-1, 0)},
    "padding_causal_bottom_right": {"window": (-1, 0), "corner": True},
}
GAPS = pytest.mark.parametrize("gaps", [False, True], ids=["dense", "gaps"])


def sides(rng, gaps=False, lengths=LENGTHS):
    return [Packing(rng, len(n), max(n), gaps=gaps, lengths=n) for n in lengths]


def tensors_of(queries, keys, dtype, device, shape=(HEADS, GROUPS, K, V)):
    """Leaves [tokens, heads, channels]; NaN where there is no sequence."""
    heads, groups, k, v = shape
    made = []
    for side, count, channels in ((queries, heads, k), (keys, groups, k), (keys, groups, v)):
        tensor = torch.randn(side.tokens, count, channels)
        tensor[~side.owned()] = float("nan")
        made.append(tensor.to(device, dtype).requires_grad_())
    return made


def where(queries, keys, device, *, bounds=True):
    """What a call is told of its sequences."""
    told = {}
    for name, side in (("q", queries), ("kv", keys)):
        sums = side.cumulative(device)
        told[f"cu_seqlens_{name}"] = sums
        if side.offsets != sums.tolist():
            told[f"cu_seqlens_{name}_padded"] = side.vector("offsets", device)
        if bounds:
            told[f"max_seqlen_{name}"] = side.longest
    return told


def by_sequences(queries, keys, attend):
    """A definition [tokens, heads * channels] from one of a single sequence [1, h, s, d]."""

    def run(q, k, v):
        rows = []
        for (b, of_queries), (_, of_keys) in zip(queries.rows(), keys.rows(), strict=True):
            parts = [t.transpose(0, 1)[None] for t in (q[of_queries], k[of_keys], v[of_keys])]
            if parts[1].numel() == 0:
                rows.append(q.new_zeros(queries.lengths[b], HEADS * v.shape[2]))
                continue
            rows.append(attend(b, *parts)[0].transpose(0, 1).flatten(1))
        packed = q.new_zeros(queries.tokens, HEADS * v.shape[2])
        return packed.masked_scatter(queries.owned()[:, None], torch.cat(rows))

    return run


def definition(queries, keys, window=(-1, -1), corner=False):
    def attend(b, q, k, v):
        n, m = queries.lengths[b], keys.lengths[b]
        may = model.may_attend((1, HEADS, n, m), window=window, diagonal=m - n if corner else 0)
        return model.attention(q, k, v, may)

    return by_sequences(queries, keys, attend)


def check(module, tensors, queries, keys, exact, **given):
    """Output and gradients; 0 for tokens of no sequence."""
    dtype, device = tensors[0].dtype, tensors[0].device
    out = module(*tensors, **where(queries, keys, device), **given)
    assert out.shape == (queries.tokens, HEADS * tensors[2].shape[2]) and out.is_contiguous()
    grad = torch.randn(out.shape).to(out)
    grads = dict(zip("qkv", torch.autograd.grad(out, tensors, grad), strict=True))
    clean = [t.detach().nan_to_num() for t in tensors]
    named = dict(zip("qkv", clean, strict=True))
    expected = exact(**{name: t.cpu().double() for name, t in named.items()})
    bound = tol("attention", dtype, max(keys.longest, queries.longest * HEADS))
    assert_nmse(out, expected, bound)
    assert_grad64(grads, exact, named, grad, bound)
    for tensor, side in ((out, queries), *zip(grads.values(), (queries, keys, keys), strict=True)):
        assert not tensor[~side.owned()].any()
    return out


@GAPS
@pytest.mark.parametrize("mask", ["no_mask", "causal", "causal_bottom_right"])
@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
def test_types_without_padding_are_those_with_it(device, backend, mask, gaps, rng):
    """Each sequence has its own diagonal; of the module and of the call."""
    queries, keys = sides(rng, gaps)
    padded = "padding" if mask == "no_mask" else f"padding_{mask}"
    tensors = tensors_of(queries, keys, BF16, device)
    exact = definition(queries, keys, **MASKS[padded])
    module = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type=mask)
    check(module, tensors, queries, keys, exact)
    ran = module._last_call.backend
    other = DotProductAttention(HEADS, (K, V), GROUPS, attn_mask_type="arbitrary")
    check(other, tensors, queries, keys, exact, qkv_format="thd", attn_mask_type=mask)
    assert ran == other._last_call.backend == backend


@GAPS
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
def test_values_and_gradients(device, backend, mask, dtype, gaps, rng):
    queries, keys = sides(rng, gaps)
    module = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type=mask)
    tensors = tensors_of(queries, keys, dtype, device)
    check(module, tensors, queries, keys, definition(queries, keys, **MASKS[mask]))
    plain = backend == "unfused" or (device == "cuda" and dtype == F32)
    assert module._last_call.backend == ("unfused" if plain else "native")


@GAPS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("backend", ["native", "unfused"], indirect=True)
def test_one_tensor_of_sums_with_two_bounds(device, backend, mask, gaps, rng):
    """Queries and keys are the same tokens, and their bounds differ all the same."""
    (both,) = sides(rng, gaps, LENGTHS[:1])
    module = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type=mask)
    told = where(both, both, device)
    told = {name: value for name, value in told.items() if not name.startswith("cu_seqlens_kv")}
    told["max_seqlen_kv"] += 9
    tensors = tensors_of(both, both, F32, device)
    out = module(*tensors, **told)
    same = check(module, tensors, both, both, definition(both, both, **MASKS[mask]))
    assert_nmse(out, same.double(), tol("attention", F32, both.longest))


@pytest.mark.parametrize("window", [(3, 0), (4, 9)])
@pytest.mark.parametrize("corner", [False, True])
def test_windows(device, window, corner, rng):
    queries, keys = sides(rng, True, ([20, 7, 0, 40], [20, 30, 3, 44]))
    module = DotProductAttention(
        HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type="padding", window_size=window,
        bottom_right_diagonal=corner,
    )  # fmt: skip
    tensors = tensors_of(queries, keys, BF16, device)
    check(module, tensors, queries, keys, definition(queries, keys, window, corner))


def test_biases(device, rng):
    queries, keys = sides(rng, True)
    module = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type="padding")
    slopes = torch.rand(HEADS)
    bias = torch.randn(1, HEADS, queries.longest, keys.longest)

    def with_slopes(b, q, k, v):
        n, m = queries.lengths[b], keys.lengths[b]
        added = -slopes.double()[:, None, None] * model.distance(n, m, m - n)
        return model.attention(q, k, v, model.may_attend((1, HEADS, n, m)), bias=added)

    def with_bias(b, q, k, v):
        n, m = queries.lengths[b], keys.lengths[b]
        may = model.may_attend((1, HEADS, n, m))
        return model.attention(q, k, v, may, bias=bias[..., :n, :m].double())

    tensors = tensors_of(queries, keys, F32, device)
    for attend, given in (
        (with_slopes, {"core_attention_bias_type": "alibi", "alibi_slopes": slopes.to(device)}),
        (
            with_bias,
            {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias.to(device)},
        ),
    ):
        check(module, tensors, queries, keys, by_sequences(queries, keys, attend), **given)
        native = device != "cuda" and "alibi_slopes" in given
        assert module._last_call.backend == ("native" if native else "unfused")


# ---- a padded batch ------------------------------------------------------------------------------


@GAPS
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("mask", MASKS)
def test_bits_of_a_padded_batch(mask, dropout, gaps, rng):
    """On the CPU, whose dropout is that of the padded scores."""
    queries, keys = sides(rng, gaps)
    options = {"attn_mask_type": mask, "attention_dropout": dropout}
    tensors = tensors_of(queries, keys, F32, "cpu")
    both = zip(tensors, (queries, keys, keys), strict=True)
    padded = [side.padded(tensor.detach()).requires_grad_() for tensor, side in both]
    grad = torch.randn(queries.tokens, HEADS * V)
    with same_draws("cpu"):
        out = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", **options)(
            *tensors, **where(queries, keys, "cpu")
        )
    lengths = {"cu_seqlens_q": queries.cumulative(), "cu_seqlens_kv": keys.cumulative()}
    right = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="bshd", **options)(
        *padded, **lengths
    )
    assert_bits(out, queries.packed(right))
    grads = torch.autograd.grad(out, tensors, grad)
    of_padded = torch.autograd.grad(right, padded, queries.padded(grad))
    for made, expected, side in zip(grads, of_padded, (queries, keys, keys), strict=True):
        assert_bits(made, side.packed(expected))


def test_dropout_is_that_of_the_recompute(device, rng):
    queries, keys = sides(rng)
    module = DotProductAttention(
        HEADS, (K, V), GROUPS, 0.5, qkv_format="thd", attn_mask_type="padding"
    )
    tensors = tensors_of(queries, keys, BF16, device)
    made = []
    for recompute in (False, True):
        given = where(queries, keys, device)
        with same_draws(device):
            out = module(*tensors, **given, checkpoint_core_attention=recompute)
        made.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    for each, expected in zip(*made, strict=True):
        assert_nmse(each, expected.double(), tol("round", BF16))
    assert_bits(made[0][0], made[1][0])


def test_slopes_over_one_token(device):
    """All that there is: no mask or bias over one key is made of it."""
    module = DotProductAttention(HEADS, K, qkv_format="thd", attn_mask_type="padding_causal")
    sums = torch.tensor([0, 1], dtype=torch.int32, device=device)
    tensors = [torch.randn(1, HEADS, K).to(device, BF16).requires_grad_() for _ in range(3)]
    out = module(*tensors, cu_seqlens_q=sums, max_seqlen_q=1, core_attention_bias_type="alibi")
    assert_nmse(out, tensors[2].detach().flatten(1).double(), tol("round", BF16))
    grad = torch.randn_like(out)
    _, _, of_value = torch.autograd.grad(out, tensors, grad)
    assert_nmse(of_value, grad.view(1, HEADS, K).double(), tol("round", BF16))


# ---- bounds --------------------------------------------------------------------------------------


def test_bounds_that_are_not_given(device, rng, monkeypatch):
    """They are read, as multiples of 64, of the queries alone where keys are theirs."""
    side = sides(rng, True, ([70, 0, 1, 30],))[0]
    module = DotProductAttention(HEADS, K, qkv_format="thd", attn_mask_type="padding_causal")
    tensors = tensors_of(side, side, BF16, device, (HEADS, HEADS, K, K))
    given = where(side, side, device, bounds=False)
    expected = module(*tensors, **where(side, side, device))
    seen = []
    limits_for = DotProductAttention.limits_for

    def spied(self, options, sizes, *arguments):
        seen.append(sizes)
        return limits_for(self, options, sizes, *arguments)

    monkeypatch.setattr(DotProductAttention, "limits_for", spied)
    assert_bits(module(*tensors, **given), expected)
    of_queries = {name: value for name, value in given.items() if "_q" in name}
    assert_bits(module(*tensors, **of_queries), expected)
    assert_bits(module(*tensors, **of_queries, max_seqlen_q=96), expected)
    assert [sizes[2:] for sizes in seen] == [(128, 128), (128, 128), (96, 96)]
    assert all(sizes[:2] == (4, HEADS) for sizes in seen)


def test_nothing_is_read_where_bounds_are_given(rng):
    """Tensors without memory have nothing to read; their shapes are those of the results."""
    side = sides(rng)[0]
    module = DotProductAttention(HEADS, K, qkv_format="thd", attn_mask_type="padding")
    tensors = [
        t.detach().to("meta") for t in tensors_of(side, side, BF16, "cpu", (HEADS, HEADS, K, V))
    ]
    module = DotProductAttention(HEADS, (K, V), qkv_format="thd", attn_mask_type="padding")
    out = module(*tensors, **{
        name: value.to("meta") if isinstance(value, torch.Tensor) else value
        for name, value in where(side, side, "cpu").items()
    })  # fmt: skip
    assert out.shape == (side.tokens, HEADS * V) and out.device.type == "meta"


@our_kernels
def test_compiled(device, rng):
    queries, keys = sides(rng, True)
    module = DotProductAttention(
        HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type="padding_causal"
    )
    tensors = tensors_of(queries, keys, BF16, device)
    given = where(queries, keys, device)
    made = []
    for function in (module, torch.compile(module, fullgraph=True)):
        out = function(*tensors, **given)
        made.append([out, *torch.autograd.grad(out.float().square().sum(), tensors)])
    assert_bits(made[1][0], made[0][0])
    for each, expected in zip(*made, strict=True):
        assert_nmse(each, expected.double(), tol("round", BF16))


@pytest.mark.parametrize("backend", ["unfused"], indirect=True)
@pytest.mark.parametrize("name", ["q", "kv"])
def test_a_sequence_beyond_its_bound_is_spoilt(device, rng, backend, name):
    """And no other one is; nothing outside of the tensors is read."""
    queries, keys = sides(rng, True, ([9, 4], [7, 12]))
    module = DotProductAttention(
        HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type="padding_causal"
    )
    tensors = tensors_of(queries, keys, F32, device)
    given = where(queries, keys, device)
    good = module(*tensors, **given).detach()
    (_, first), (_, second) = queries.rows()
    short = {**given, f"max_seqlen_{name}": 8}
    wrong, right = (first, second) if name == "q" else (second, first)
    out = module(*tensors, **short)
    assert out[wrong].isnan().any()
    assert_nmse(out[right], good[right].double(), tol("attention", F32, keys.longest))
    grads = torch.autograd.grad(out.sum(), tensors)
    assert grads[0][wrong].isnan().any() and grads[0][right].isfinite().all()
    beyond = given["cu_seqlens_kv"] + 1000
    beyond[0] = 0
    out = module(*tensors, **{**given, "cu_seqlens_kv_padded": beyond})
    assert out[first].isnan().any() and out[second].isnan().any()


# ---- errors --------------------------------------------------------------------------------------


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


WRONG = {
    "no offsets": ("needs cu_seqlens_q", {"cu_seqlens_q": None}),
    "dtype": ("cu_seqlens_q: torch.int64", {"cu_seqlens_q": torch.tensor([0, 9])}),
    "dims": (r"cu_seqlens_q: .* \(1, 2\)", {"cu_seqlens_q": ints(0, 9)[None]}),
    "other batch": (r"cu_seqlens_kv: .*= \[2\]", {"cu_seqlens_kv": ints(0, 3, 9)}),
    "gaps": (r"cu_seqlens_q_padded: .*= \[2\]", {"cu_seqlens_q_padded": ints(0, 3, 9)}),
    "mask": ("'arbitrary' with qkv_format='thd'", {"attn_mask_type": "arbitrary"}),
    "bound": ("query_offsets: 9 of sequence 0, expected 0 to 8", {"max_seqlen_q": 8}),
    "beyond": ("sequence 0 of 10 tokens from 0 on", {"cu_seqlens_q": ints(0, 10)}),
    "format": ("expected 'sbhd', 'bshd' or 'thd'", {"qkv_format": "tbhd"}),
    "four dims": ("expected bshd with 4 heads", {"qkv_format": "bshd"}),
}


@pytest.mark.parametrize("case", WRONG)
def test_errors(case):
    text, changes = WRONG[case]
    module = DotProductAttention(HEADS, K, qkv_format="thd", attn_mask_type="padding")
    tensor = torch.zeros(9, HEADS, K)
    with pytest.raises(ValueError, match=text):
        module(tensor, tensor, tensor, **{"cu_seqlens_q": ints(0, 9)} | changes)


def test_keys_of_another_number_need_their_own_offsets():
    module = DotProductAttention(HEADS, K, qkv_format="thd", attn_mask_type="padding")
    tensors = [torch.zeros(n, HEADS, K) for n in (9, 8, 8)]
    with pytest.raises(ValueError, match="cu_seqlens_kv: None, with 9 queries, 8 keys"):
        module(*tensors, cu_seqlens_q=ints(0, 9))


# ---- layers --------------------------------------------------------------------------------------


def layer_pair(kind, device, **options):
    """A layer of packed sequences and one of batches, with the same parameters."""
    made = []
    for form in ("thd", "bshd"):
        given = {"device": device, "params_dtype": F32, "attention_dropout": 0.0, **options}
        if kind is te.TransformerLayer:
            given |= {"attn_input_format": form, "hidden_dropout": 0.0}
            module = kind(64, 96, HEADS, self_attn_mask_type="padding_causal", **given)
        else:
            module = kind(64, HEADS, qkv_format=form, attn_mask_type="padding_causal", **given)
        made.append(module)
    made[1].load_state_dict(made[0].state_dict())
    return made


@GAPS
@pytest.mark.parametrize("rotary", [False, True])
@pytest.mark.parametrize("kind", [te.MultiheadAttention, te.TransformerLayer])
def test_layers(device, kind, rotary, gaps, rng):
    side = sides(rng, gaps)[0]
    layer, other = layer_pair(kind, device, fuse_qkv_params=True)
    x = torch.randn(side.tokens, 64).to(device).requires_grad_()
    padded = side.padded(x.detach()).requires_grad_()
    angles = {}
    if rotary:
        angles = {"rotary_pos_emb": te.attention.RotaryPositionEmbedding(16)(64).to(device)}
    name = "self_attn_mask_type" if kind is te.TransformerLayer else "attn_mask_type"
    given = {"cu_seqlens_q": side.cumulative(device), name: "padding_causal", **angles}
    out = layer(x, **where(side, side, device), **{name: "padding_causal"}, **angles)
    right = other(padded, **given)
    mine = side.owned()[:, None].to(device)
    bound = tol("layer", F32, 64 * 96)
    assert_nmse(out * mine, side.packed(right.detach()).double(), bound)
    grad = torch.randn(out.shape).to(out) * mine
    grads = torch.autograd.grad(out, [x, *layer.parameters()], grad)
    expected = torch.autograd.grad(right, [padded, *other.parameters()], side.padded(grad))
    expected = [side.packed(expected[0]), *expected[1:]]
    for made, wanted in zip(grads, expected, strict=True):
        if wanted.abs().max() > 0:
            assert_nmse(made, wanted.double(), bound)


def test_a_switch_of_the_environment_leaves_the_padded_way(device, rng, monkeypatch):
    """The conversion is what runs where the operator may not."""
    queries, keys = sides(rng, True)
    module = DotProductAttention(HEADS, (K, V), GROUPS, qkv_format="thd", attn_mask_type="padding")
    tensors = tensors_of(queries, keys, BF16, device)
    monkeypatch.setenv("NVTE_FUSED_ATTN", "0")
    _core.reset_counters()
    module(*tensors, **where(queries, keys, device))
    assert module._last_call.backend == "unfused"
    assert "packed sequences" in module._last_call.reasons["sdpa"].feature
    assert not any("attention" in name for name in _core.counters())
