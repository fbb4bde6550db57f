# SPDX-License-Identifier: Apache-2.0
"""`fused_attn` against its definition in float64, with gradients by torch's autograd."""

import functools
import itertools

import attention_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from flax_arrays import integers, normal, wide, wide_leaf, with_gradients
from thinning import pairs
from tols import BF16, F32, tol

from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVFormat,
    QKVLayout,
    ReorderStrategy,
    SequenceDescriptor,
    canonicalize_attn_mask_type,
    fused_attn,
    get_seqlens_and_offsets,
    inverse_reorder_causal_load_balancing,
    is_fused_attn_kernel_available,
    make_swa_mask,
    reorder_causal_load_balancing,
    run_length_fill,
)

SCALE = 0.3
PLAIN = {
    "seed": None, "attn_bias_type": AttnBiasType.NO_BIAS, "attn_mask_type": AttnMaskType.NO_MASK,
    "qkv_layout": QKVLayout.BSHD_BSHD_BSHD, "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX,
    "scaling_factor": SCALE, "dropout_probability": 0.0, "is_training": True,
}  # fmt: skip
BIASES = {AttnBiasType.PRE_SCALE_BIAS: (1, 4, 1, None), AttnBiasType.POST_SCALE_BIAS: (2, 1)}


def attend(qkv, bias=None, sequences=None, **options):
    return fused_attn(qkv, bias, sequences, **{**PLAIN, **options})


def random_qkv(rng, queries, keys, groups=4, dtype=F32, batch=2, channels=8):
    sizes = ((queries, 4), (keys, groups), (keys, groups))
    return tuple(normal(rng, (batch, *size, channels), dtype) for size in sizes)


def spans(lengths, offsets=None):
    """(First token, length) of the sequences of each row."""
    found = []
    for row, own in enumerate(lengths):
        starts = offsets[row] if offsets is not None else np.cumsum([0, *own])
        found.append([(int(s), int(n)) for s, n in zip(starts, own, strict=False)])
    return found


def may_attend(kind, window, queries, keys, spans_q, spans_k):
    """Bool [batch, 1, queries, keys] by the words of each mask, sequence by sequence."""
    may = torch.zeros(len(spans_q), 1, queries, keys, dtype=torch.bool)
    for row, (of_q, of_k) in enumerate(zip(spans_q, spans_k, strict=True)):
        for (start_q, length_q), (start_k, length_k) in zip(of_q, of_k, strict=True):
            diagonal = length_k - length_q if kind.is_bottom_right() else 0
            for i, j in itertools.product(range(length_q), range(length_k)):
                distance = j - i - diagonal
                seen = not (kind.is_causal() and distance > 0)
                seen &= window is None or window[0] < 0 or distance >= -window[0]
                seen &= window is None or window[1] < 0 or distance <= window[1]
                may[row, 0, start_q + i, start_k + j] = seen
    return may


def definition(q, k, v, may, bias=None, before=False, sink=None, factors=None):
    """softmax(q k^T) v in float64, of [batch, length, heads, channels]."""
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.mT
    if before and bias is not None:
        scores = (scores + bias) * SCALE
    else:
        scores = scores * SCALE + (0 if bias is None else bias)
    may = may.expand(scores.shape)
    if sink is not None:  # one key more, whose value is 0
        more = sink.expand(*scores.shape[:3], -1)[..., :1]
        scores, may = (
            torch.cat([scores, more], -1),
            torch.nn.functional.pad(may, (0, 1), value=True),
        )
    weights = attention_reference.softmax(scores, may)[..., : k.shape[2]]
    return ((weights if factors is None else weights * factors) @ v).transpose(1, 2)


def check(call, arrays, expect, dtype=F32, depth=32):
    """Output and gradients of call(*arrays) against those of expect(*float64 tensors).

    Arguments behind queries, keys and values are broadcast in the definition: their gradients are
    sums that cancel.
    """
    grad = normal(np.random.default_rng(0), (*arrays[0].shape[:3], arrays[2].shape[3]), dtype)
    output, grads = with_gradients(call, grad, *arrays)
    exact_inputs = [wide_leaf(one) for one in arrays]
    full = (arrays[0].shape[0], 4, arrays[0].shape[1], arrays[1].shape[1])
    spread = [one.expand(full).clone() for one in exact_inputs[3:]]
    for one in spread:
        one.retain_grad()
    exact = expect(*exact_inputs[:3], *spread)
    exact.backward(wide(grad))
    bound = tol("attention", dtype, depth)
    assert output.dtype == arrays[0].dtype
    assert_nmse(wide(output), exact.detach(), bound, "output")
    for number, (got, own) in enumerate(zip(grads, exact_inputs, strict=True)):
        assert got.dtype == arrays[number].dtype
        terms = None if number < 3 else spread[number - 3].grad.abs().sum_to_size(own.shape)
        assert_nmse(wide(got), own.grad, bound, f"gradient of argument {number}", terms)


@pairs(
    kind=list(AttnMaskType),
    window=[None, (2, -1), (3, 1), (-1, 0)],
    groups=[4, 2, 1],
    softmax=list(AttnSoftmaxType),
    bias_kind=list(AttnBiasType),
    dtype=[F32, BF16],
    lengths=[(7, 7), (5, 9), (9, 6)],
)
def test_definition(rng, kind, window, groups, softmax, bias_kind, dtype, lengths):
    q, k, v = random_qkv(rng, *lengths, groups, dtype)
    arrays, names, options = [q, k, v], ["q", "k", "v"], {}
    of_q, of_k = (np.full((2, 1), length) for length in lengths)
    if kind.is_padding():
        of_q, of_k = (rng.integers(1, length, (2, 1), np.int32) for length in lengths)
        pair = tuple(jnp.asarray(one[:, 0]) for one in (of_q, of_k))
        options["sequence_descriptor"] = SequenceDescriptor.from_seqlens(pair)
    if bias_kind in BIASES:
        shape = [size or lengths[1] for size in (*BIASES[bias_kind], *lengths)[:4]]
        arrays.append(normal(rng, shape, dtype))
        names.append("bias")
    if softmax is AttnSoftmaxType.LEARNABLE_SOFTMAX:
        arrays.append(normal(rng, (1, 4, 1, 1)))
        names.append("offset")
    may = may_attend(kind, window, *lengths, spans(of_q), spans(of_k))

    def call(*values):
        own = dict(zip(names, values, strict=True))
        return attend(
            values[:3], own.get("bias"), options.get("sequence_descriptor"), attn_mask_type=kind,
            attn_bias_type=bias_kind, softmax_type=softmax, window_size=window,
            softmax_offset=own.get("offset"),
        )  # fmt: skip

    def expect(*values):
        own = dict(zip(names, values, strict=True))
        sink = own.get("offset")
        if softmax is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX:
            sink = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
        before = bias_kind is AttnBiasType.PRE_SCALE_BIAS
        return definition(*values[:3], may, own.get("bias"), before, sink)

    check(call, arrays, expect, dtype)


PACKED = np.array([[3, 4, 2], [5, 1, -1]], np.int32)
OFFSETS = np.array([[0, 3, 9, -1], [1, 6, -1, -1]], np.int32)


@pairs(
    kind=[kind for kind in AttnMaskType if kind.is_padding()],
    gaps=[False, True],
    by=["lengths", "segments", "positions"],
)
def test_packed_sequences(rng, kind, gaps, by):
    """Several sequences in a row: lengths with offsets, and segments, say the same."""
    q, k, v = random_qkv(rng, 12, 12, 2)
    offsets = OFFSETS if gaps else None
    found = [[(start, max(n, 0)) for start, n in row] for row in spans(PACKED, offsets)]
    may = may_attend(kind, None, 12, 12, found, found)
    ids, places = np.zeros((2, 2, 12), np.int32)
    for row, own in enumerate(found):
        for number, (start, length) in enumerate(own):
            ids[row, start : start + length] = number + 1
            places[row, start : start + length] = np.arange(length)
    sequences = {
        "lengths": SequenceDescriptor.from_seqlens(jnp.asarray(PACKED)) if not gaps else
        SequenceDescriptor.from_seqlens_and_offsets(jnp.asarray(PACKED), jnp.asarray(OFFSETS)),
        "segments": SequenceDescriptor.from_segment_ids_and_pos(jnp.asarray(ids)),
        "positions": SequenceDescriptor.from_segment_ids_and_pos(
            *(((jnp.asarray(one),) * 2) for one in (ids, places))
        ),
    }[by]  # fmt: skip
    options = {"attn_mask_type": kind, "qkv_layout": QKVLayout.THD_THD_THD}
    # The descriptor is an argument of the jitted function: a pytree.
    jitted = jax.jit(lambda sequences, *qkv: attend(qkv, None, sequences, **options))
    check(functools.partial(jitted, sequences), [q, k, v], lambda *qkv: definition(*qkv, may))
    if by == "segments":
        lengths, starts = get_seqlens_and_offsets(jnp.asarray(ids), 3)
        np.testing.assert_array_equal(lengths, np.maximum(PACKED, 0))
        if gaps:
            np.testing.assert_array_equal(starts, OFFSETS)
        of_both = sequences.get_seqlens_and_offsets(kind, QKVLayout.THD_THD_THD, None, 3)
        np.testing.assert_array_equal(of_both[0][1], lengths)
        np.testing.assert_array_equal(of_both[1][0], starts)


@pytest.mark.parametrize("layout", list(QKVLayout))
def test_layouts(rng, layout):
    """Packed tensors are the separate ones."""
    q, k, v = random_qkv(rng, 6, 6)
    sequences = SequenceDescriptor.from_seqlens(jnp.array([4, 6]))
    options = {"attn_mask_type": AttnMaskType.PADDING_MASK}
    expected = attend((q, k, v), None, sequences, **options)
    qkv = (q, k, v)
    if layout.is_qkvpacked():
        qkv = (jnp.stack([q, k, v], 2),)
    elif layout.is_kvpacked():
        qkv = (q, jnp.stack([k, v], 2))
    assert layout.is_separate() == (len(qkv) == 3)
    assert layout.get_qkv_format() is (QKVFormat.THD if layout.is_thd() else QKVFormat.BSHD)
    got = attend(qkv, None, sequences, qkv_layout=layout, **options)
    np.testing.assert_array_equal(got, expected)


def test_masks_of_the_caller(rng):
    """A bare mask hides what is 1, with a warning; queries without keys give 0."""
    q, k, v = random_qkv(rng, 5, 6)
    mask = rng.random((2, 1, 5, 6)) < 0.4
    mask[0, 0, 2] = True
    for kind in (AttnMaskType.PADDING_MASK, AttnMaskType.PADDING_CAUSAL_MASK):
        with pytest.warns(DeprecationWarning, match="SequenceDescriptor"):
            output = attend((q, k, v), None, jnp.asarray(mask), attn_mask_type=kind)
        may = may_attend(kind, None, 5, 6, *[[[(0, n)]] * 2 for n in (5, 6)])
        exact = definition(*map(wide, (q, k, v)), may & ~integers(mask))
        assert_nmse(wide(output), exact, tol("attention", F32, 8))
        assert not np.asarray(output)[0, 2].any()


@pairs(rate=[0.25, 0.6], groups=[4, 2], softmax=list(AttnSoftmaxType)[:2])
def test_dropout(rng, seed, rate, groups, softmax):
    """What is dropped is drawn from the key, the same in the backward; the rest is scaled."""
    q, k, v = random_qkv(rng, 16, 16, groups)
    key = jax.random.key(seed)
    # With values that are unit vectors the output is the dropped probabilities themselves.
    unit = jnp.broadcast_to(jnp.eye(16)[None, :, None], (2, 16, groups, 16))
    options = {"seed": key, "dropout_probability": rate, "softmax_type": softmax}
    weights = attend((q, k, unit), **{**options, "dropout_probability": 0.0})
    dropped = np.asarray(attend((q, k, unit), **options))
    factors = np.where(dropped == 0, 0.0, 1 / (1 - rate))
    assert_nmse(wide(dropped), wide(weights) * torch.from_numpy(factors), tol("attention", F32, 16))
    assert abs((dropped == 0).mean() - rate) <= tol("share", F32, dropped.size)
    sink = None if softmax is AttnSoftmaxType.VANILLA_SOFTMAX else torch.zeros(1, 1, 1, 1).double()
    factors = torch.from_numpy(factors).transpose(1, 2)
    may = torch.ones(1, 1, 16, 16, dtype=torch.bool)
    check(lambda *qkv: attend(qkv, **options), [q, k, v],
          lambda *qkv: definition(*qkv, may, sink=sink, factors=factors))  # fmt: skip


def test_dropout_of_all_and_of_none(rng, seed):
    qkv = random_qkv(rng, 4, 4)
    every = {"seed": jax.random.key(seed), "dropout_probability": 1.0}
    grads = jax.grad(lambda qkv: attend(qkv, **every).sum())(qkv)
    assert not any(np.asarray(one).any() for one in (attend(qkv, **every), *grads))
    evaluated = attend(qkv, **{**every, "is_training": False})
    np.testing.assert_array_equal(evaluated, attend(qkv))


def test_keys_of_the_dropout(rng, seed):
    """A key, its raw words and a key for each device are one; another key drops others."""
    qkv, key = random_qkv(rng, 8, 8), jax.random.PRNGKey(seed)
    first, same, typed, other = (
        attend(qkv, seed=one, dropout_probability=0.5)
        for one in (key, jnp.stack([key, key + 1]), jax.random.wrap_key_data(key), key + 1)
    )
    np.testing.assert_array_equal(first, same)
    np.testing.assert_array_equal(first, typed)
    assert (np.asarray(first) != np.asarray(other)).any()
    with pytest.raises(ValueError, match="needs a seed"):
        attend(qkv, dropout_probability=0.5)


def test_memory_of_the_backward(rng):
    """Between forward and backward nothing of the size queries x keys is kept."""
    qkv = random_qkv(rng, 64, 64, batch=1)
    sequences = SequenceDescriptor.from_seqlens(jnp.array([50]))
    options = {"attn_mask_type": AttnMaskType.PADDING_CAUSAL_MASK}
    _, vjp = jax.vjp(lambda qkv: attend(qkv, None, sequences, **options), qkv)
    kept = [leaf.size for leaf in jax.tree_util.tree_leaves(vjp)]
    assert kept and max(kept) < 64 * 64


def test_transformations(rng):
    """`vmap` and `remat` change nothing."""
    qkv = [jnp.stack([one, one[::-1]]) for one in random_qkv(rng, 5, 5)]

    def loss(*qkv):
        return jnp.sum(attend(qkv, attn_mask_type=AttnMaskType.CAUSAL_MASK) ** 2)

    expected = [jax.grad(loss, argnums=(0, 1, 2))(*(one[i] for one in qkv)) for i in range(2)]
    for own in (loss, jax.checkpoint(loss)):
        got = jax.vmap(jax.grad(own, argnums=(0, 1, 2)))(*qkv)
        for one, both in zip(got, zip(*expected, strict=True), strict=True):
            assert_nmse(wide(one), wide(jnp.stack(both)), tol("attention", F32, 8))


def test_largest_score(rng):
    q, k, v = random_qkv(rng, 5, 7)
    _, largest = attend((q, k, v), return_max_logit=True)
    exact = torch.einsum("bqhd,bkhd->bhqk", wide(q), wide(k)).mul(SCALE).amax((0, 2, 3))
    assert_nmse(wide(largest), exact, tol("sum", F32, 8))
    grads = jax.grad(lambda qkv: attend(qkv, return_max_logit=True)[1].sum())((q, k, v))
    assert not any(np.asarray(one).any() for one in grads)


def test_names_of_masks():
    for kind in AttnMaskType:
        assert canonicalize_attn_mask_type(kind.value) is kind
    assert canonicalize_attn_mask_type("causal_padding") is AttnMaskType.PADDING_CAUSAL_MASK
    assert AttnSoftmaxType.from_str("off_by_one") is AttnSoftmaxType.OFF_BY_ONE_SOFTMAX
    for call in (canonicalize_attn_mask_type, AttnSoftmaxType.from_str):
        with pytest.raises(ValueError, match="off-by-one"):
            call("off-by-one")


def test_sliding_window_mask():
    places = jnp.arange(5)[None]
    mask = make_swa_mask(places, places, (1, 0), jnp.int32)
    np.testing.assert_array_equal(mask[0], np.eye(5, dtype=int) + np.eye(5, k=-1, dtype=int))
    assert make_swa_mask(places, places).dtype == jnp.float32
    assert make_swa_mask(places, places, (-1, -1)).all()


def test_run_lengths():
    ids = jnp.array([[1, 1, 2, 2, 2, 0, 3, 0, 0], [4, 0, 0, 1, 4, 4, 0, 2, 2]])
    lengths = [[2, 2, 3, 3, 3, 0, 1, 0, 0], [1, 0, 0, 1, 2, 2, 0, 2, 2]]
    np.testing.assert_array_equal(run_length_fill(ids), lengths)
    np.testing.assert_array_equal(run_length_fill(ids[0]), lengths[0])


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_balanced_order(rng, devices, dim):
    tensor = normal(rng, (12 * devices, 12 * devices, 3))
    for strategy, stripe in ((ReorderStrategy.DualChunkSwap, None), (ReorderStrategy.Striped, None),
                             (ReorderStrategy.Striped, 4)):  # fmt: skip
        call = (strategy, devices, dim, stripe)
        dealt = reorder_causal_load_balancing(tensor, *call)
        np.testing.assert_array_equal(inverse_reorder_causal_load_balancing(dealt, *call), tensor)
        rows = np.moveaxis(np.asarray(tensor), dim, 0)
        if strategy is ReorderStrategy.DualChunkSwap:
            chunks = np.split(rows, 2 * devices)
            rows = [one for i in range(devices) for one in (chunks[i], chunks[-1 - i])]
        else:
            stripes = np.split(rows, len(rows) // (stripe or 1))
            rows = [one for i in range(devices) for one in stripes[i::devices]]
        np.testing.assert_array_equal(np.moveaxis(np.asarray(dealt), dim, 0), np.concatenate(rows))
    with pytest.raises(ValueError, match="does not divide"):
        reorder_causal_load_balancing(tensor, ReorderStrategy.DualChunkSwap, 5 * devices, dim)


def test_what_is_refused(rng):
    qkv = random_qkv(rng, 4, 4)
    bias, padding = jnp.zeros((1, 4, 4, 4)), {"attn_mask_type": AttnMaskType.PADDING_MASK}
    refused = [
        ("neither seqlens", qkv, None, SequenceDescriptor(), padding),
        ("needs a SequenceDescriptor", qkv, None, None, padding),
        ("padding one", qkv, None, None, {"qkv_layout": QKVLayout.THD_THD_THD}),
        ("NO_BIAS with a bias", qkv, bias, None, {}),
        ("POST_SCALE_BIAS with no bias", qkv, None, None,
         {"attn_bias_type": AttnBiasType.POST_SCALE_BIAS}),
        ("does not broadcast", qkv, bias[:, :3], None,
         {"attn_bias_type": AttnBiasType.POST_SCALE_BIAS}),
        ("with no softmax_offset", qkv, None, None,
         {"softmax_type": AttnSoftmaxType.LEARNABLE_SOFTMAX}),
        ("with a softmax_offset", qkv, None, None, {"softmax_offset": jnp.zeros((1, 4, 1, 1))}),
        ("is of 1 tensors, got 3", qkv, None, None, {"qkv_layout": QKVLayout.BS3HD}),
        (r"length, 3, heads", (qkv[0],), None, None, {"qkv_layout": QKVLayout.BS3HD}),
        ("do not divide", (qkv[0], *(one[:, :, :3] for one in qkv[1:])), None, None, {}),
        ("do not fit", (qkv[0][:1], *qkv[1:]), None, None, {}),
        ("channels", (qkv[0][0], *qkv[1:]), None, None, {}),
    ]  # fmt: skip
    for message, tensors, own_bias, sequences, options in refused:
        with pytest.raises(ValueError, match=message):
            attend(tensors, own_bias, sequences, **options)
    with pytest.raises(ValueError, match="segment_pos"):
        ids = jnp.ones((1, 4), jnp.int32)
        SequenceDescriptor.from_segment_ids_and_pos(ids, is_segment_ids_reordered=True)
    with pytest.raises(NotImplementedError, match="score_mod"):
        attend(qkv, score_mod=lambda *scores: scores)


def test_sequences_over_devices(rng):
    """Of a mesh axis of one device, or of none, nothing is spread."""
    qkv = random_qkv(rng, 4, 4)
    expected = attend(qkv)
    options = {"context_parallel_strategy": CPStrategy.RING, "context_parallel_axis": "cp"}
    np.testing.assert_array_equal(attend(qkv, **options), expected)
    with jax.set_mesh(jax.make_mesh((1,), ("cp",))):
        np.testing.assert_array_equal(attend(qkv, **options), expected)


def test_questions():
    of_call = [True, jnp.float32, jnp.float32, QKVLayout.BSHD_BSHD_BSHD, AttnBiasType.NO_BIAS,
               AttnMaskType.CAUSAL_MASK, AttnSoftmaxType.VANILLA_SOFTMAX, 0.1, 4, 2, 5, 5, 8,
               8]  # fmt: skip
    assert is_fused_attn_kernel_available(*of_call, batch_size=2, return_max_logit=True)
    for place, value in ((2, jnp.bfloat16), (3, QKVLayout.T3HD), (9, 3)):
        assert not is_fused_attn_kernel_available(*of_call[:place], value, *of_call[place + 1 :])


def test_sequences_of_other_rows(rng):
    """One row stands for all; what fits no rows is refused."""
    q, k = normal(rng, (2, 12, 4, 16), BF16), normal(rng, (2, 16, 4, 16), BF16)

    def run(described, k=k):
        return fused_attn(
            (q, k, k), None, described, None, AttnBiasType.NO_BIAS, AttnMaskType.PADDING_MASK,
            QKVLayout.BSHD_BSHD_BSHD, AttnSoftmaxType.VANILLA_SOFTMAX, 0.25, 0.0, True,
        )  # fmt: skip

    make = SequenceDescriptor.from_segment_ids_and_pos
    ids = jnp.ones((1, 12), jnp.int32).at[0, 9:].set(0)
    one, each = run(make(ids), q), run(make(jnp.repeat(ids, 2, 0)), q)
    assert jnp.array_equal(one, each) and jnp.any(one[1] != 0)
    with pytest.raises(ValueError, match=r"segment_ids is \(2, 12\), expected \(2, 16\)"):
        run(make(jnp.ones((2, 12), jnp.int32)))
    with pytest.raises(ValueError, match=r"seqlens is \(3,\), expected \(2,\)"):
        run(SequenceDescriptor.from_seqlens(jnp.ones(3, jnp.int32)))
