# SPDX-License-Identifier: Apache-2.0
"""Attention over the devices of a mesh axis: every schedule against one device.

By definition in float64, where results agree to the last roundings; by the operators in bf16, which
counters count. One body runs on devices of the CPU and, with the mark `multigpu`, on two GPUs.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from comparators import assert_nmse
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax_arrays import normal, to_torch, wide
from thinning import chosen
from tols import BF16, tol

import transformer_engine.jax as te
import transformer_engine.jax.flax as te_flax
from transformer_engine.jax.attention import (
    AttnBiasType,
    AttnMaskType,
    AttnSoftmaxType,
    CPStrategy,
    QKVLayout,
    ReorderStrategy,
    SequenceDescriptor,
    fused_attn,
    inverse_reorder_causal_load_balancing,
    limits_of_mask,
    reorder_causal_load_balancing,
)
from transformer_engine.jax.definitions import by_definition

BATCH, TOKENS, HEADS, CHANNELS, OF_VALUES, STRIPE, WINDOW = 2, 64, 4, 16, 8, 8, (9, 0)
GATHER, RING = CPStrategy.ALL_GATHER, CPStrategy.RING
RESOURCE = te.MeshResource(dp_resource="dp", tp_resource="tp", cp_resource="cp")
LENGTHS = np.int32([45, TOKENS])
ROWS = np.int32([[20, 19, 20], [TOKENS, -1, 0]])


class Form(NamedTuple):
    """Mask, layout and lengths."""

    mask: AttnMaskType
    layout: QKVLayout = QKVLayout.BSHD_BSHD_BSHD
    lengths: np.ndarray | None = None
    stripe: int | None = None

    def order(self):
        """Strategy, and tokens of a stripe, of the order in which devices have equal work."""
        striped = self.layout.is_thd()
        strategy = ReorderStrategy.Striped if striped else ReorderStrategy.DualChunkSwap
        return strategy, self.stripe


THD = QKVLayout.THD_THD_THD
FORMS = {
    "full": Form(AttnMaskType.NO_MASK),
    "causal": Form(AttnMaskType.CAUSAL_MASK),
    "causal lengths": Form(AttnMaskType.PADDING_CAUSAL_MASK, lengths=LENGTHS),
    "packed": Form(AttnMaskType.PADDING_MASK, THD, ROWS),
    "causal packed": Form(AttnMaskType.PADDING_CAUSAL_MASK, THD, ROWS),
    "causal stripes": Form(AttnMaskType.PADDING_CAUSAL_MASK, THD, ROWS, STRIPE),
}
DEFINED = {("causal lengths", RING), ("causal packed", GATHER), ("causal stripes", RING)}
"""What has no operators where tokens are dealt out: masks that are no diagonal."""
SCHEDULES = [
    (form, strategy, balanced)
    for form, strategy, balanced in itertools.product(FORMS, (GATHER, RING), (True, False))
    if balanced or form != "causal stripes"
]
DEALT = [("causal", GATHER, True), ("causal", RING, True), ("causal", RING, False)]
DEALT += [("causal packed", RING, True), *((form, way, True) for form, way in DEFINED)]
"""Of them those that differ by definition."""
APART = [("full", GATHER, False), ("full", RING, False), ("causal", GATHER, False)]
APART += [("causal packed", way, False) for way in (GATHER, RING)]
APART += [("causal lengths", GATHER, True), ("causal stripes", GATHER, True), *DEALT]
"""And by operators; the others are nightly."""
MESHES = [{"cp": 4}, {"dp": 2, "cp": 2}, {"cp": 2, "tp": 2}]


def mesh_of(shape, devices=None, kind=AxisType.Auto):
    """A mesh of devices, of the CPU by default."""
    count = int(np.prod(list(shape.values())))
    devices = (devices or jax.devices("cpu"))[:count]
    return jax.make_mesh(tuple(shape.values()), tuple(shape), (kind,) * len(shape), devices=devices)


def fresh(rng, dtype=torch.float32, groups=2):
    """Gradient of the output, queries, keys and values."""
    shapes = (HEADS, OF_VALUES), (HEADS, CHANNELS), (groups, CHANNELS), (groups, OF_VALUES)
    return [normal(rng, (BATCH, TOKENS, *shape), dtype) for shape in shapes]


def attend(form, sequences, sink, *qkv, **options):
    """`fused_attn`; a sink, if there is one, is a parameter."""
    softmax = AttnSoftmaxType.LEARNABLE_SOFTMAX
    given = {
        "seed": None, "attn_bias_type": AttnBiasType.NO_BIAS, "attn_mask_type": form.mask,
        "qkv_layout": form.layout, "scaling_factor": 0.25, "dropout_probability": 0.0,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX if sink is None else softmax,
        "is_training": True,
    }  # fmt: skip
    return fused_attn(qkv, None, sequences, softmax_offset=sink, **given | options)


def step(form, options, sequences, grad, *arrays):
    """Output and gradients."""
    call = functools.partial(attend, form, sequences, **options)
    out, back = jax.vjp(call, *arrays)
    return out, back(grad)


def described(form):
    """Lengths as arguments have them."""
    if form.lengths is None:
        return None
    return SequenceDescriptor.from_seqlens(jnp.asarray(form.lengths))


@functools.cache
def defined(form, options):
    """A step of this form by definition, which is compiled once."""
    return jax.jit(by_definition(functools.partial(step, FORMS[form], dict(options))))


def on_one_device(form, options, grad, sink, *qkv):
    """Output and gradients by definition in float64, as arrays of numpy."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        given = [jnp.asarray(np.asarray(one), jnp.float64) for one in (grad, *qkv)]
        sink = None if sink is None else jnp.asarray(np.asarray(sink))
        call, lengths = defined(form, tuple(options.items())), described(FORMS[form])
        return jax.tree.map(np.asarray, call(lengths, given[0], sink, *given[1:]))


def over_devices(mesh, form, options, grad, sink, *qkv):
    """The same over a mesh, of arrays that are dealt out and spread; in the order that was."""
    form, size = FORMS[form], mesh.shape["cp"]
    if options.get("context_parallel_causal_load_balanced"):
        strategy, stripe = form.order()
        deal, undo = (
            functools.partial(call, strategy=strategy, cp_size=size, seq_dim=1, stripe_size=stripe)
            for call in (
                reorder_causal_load_balancing, inverse_reorder_causal_load_balancing,
            )
        )  # fmt: skip
        options = options | {"stripe_size": stripe}
    else:
        deal = undo = lambda array: array
    sharding = NamedSharding(mesh, PartitionSpec(None, "cp"))
    spread = [jax.device_put(np.asarray(deal(one)), sharding) for one in (grad, *qkv)]
    others = jax.device_put((described(form), sink), NamedSharding(mesh, PartitionSpec()))
    call = functools.partial(step, form, {"context_parallel_axis": "cp"} | options)
    with te.autocast(mesh_resource=RESOURCE), jax.set_mesh(mesh):
        made = jax.jit(call)(others[0], spread[0], others[1], *spread[1:])
        out, (of_sink, *grads) = jax.block_until_ready(made)
        assert "cp" in out.sharding.spec and out.sharding.spec[1] == "cp"
        return jax.tree.map(undo, out), (of_sink, *map(undo, grads))


def among(rng, values):
    """One of them."""
    return values[rng.integers(len(values))]


@chosen([(one,) for one in DEALT], schedule=SCHEDULES)
def test_definitions(rng, schedule):
    """In float64 a schedule differs from one device by roundings alone."""
    form, strategy, balanced = schedule
    windowed, sunk = rng.integers(2, size=2)
    groups, shape = among(rng, [4, 2, 1]), among(rng, MESHES)
    causal = FORMS[form].mask.is_causal()
    options = {"window_size": (WINDOW if causal else (9, 5)) if windowed else None}
    grad, *qkv = fresh(rng, groups=groups)
    sink = normal(rng, (1, HEADS, 1, 1)) if sunk else None
    wanted = on_one_device(form, options, grad, sink, *qkv)
    options["context_parallel_strategy"] = strategy
    options["context_parallel_causal_load_balanced"] = balanced
    with jax.enable_x64(True):
        grad, *qkv = (np.asarray(one).astype(np.float64) for one in (grad, *qkv))
        found = over_devices(mesh_of(shape), form, options, grad, sink, *qkv)
        leaves = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
        for one, other in ((np.asarray(one), other) for one, other in leaves):
            assert one.dtype == other.dtype
            bound = tol("attention_steps", torch.float64)
            if one.dtype == np.float32:  # of the sink
                bound = tol("terms", torch.float32, BATCH * TOKENS)
            assert np.abs(one - other).max() <= bound * max(1.0, np.abs(other).max())


def calls_of(form, strategy, balanced, shape):
    """Calls of operators for attention, of all devices, in a forward and a backward."""
    if balanced and (form, strategy) in DEFINED:
        return 0
    size, pieces = shape["cp"], 1
    if strategy is RING:
        pieces = size
    elif balanced and FORMS[form].mask.is_causal():
        stripe = FORMS[form].stripe
        pieces = 2 if stripe is None else TOKENS // size // stripe
    return 2 * pieces * int(np.prod(list(shape.values())))


def check_operators(rng, counters, devices, form, strategy, balanced, shape, dtype, **options):
    """Results of the operators, and how many of them ran."""
    grad, *qkv = fresh(rng, dtype)
    wanted = on_one_device(form, options, grad, None, *qkv)
    options["context_parallel_strategy"] = strategy
    options["context_parallel_causal_load_balanced"] = balanced
    mesh = mesh_of(shape, devices)
    found = over_devices(mesh, form, options, grad, None, *qkv)
    ran = {name: n for name, n in counters().items() if name.startswith("attention")}
    assert sum(ran.values()) == calls_of(form, strategy, balanced, shape), ran
    leaves = zip(*map(jax.tree.leaves, (found, wanted)), strict=True)
    for number, (one, other) in enumerate(leaves):
        bound = tol("attention_steps", dtype, TOKENS)
        assert_nmse(to_torch(one), wide(other), bound, f"result {number}")


@chosen([(one,) for one in APART], schedule=SCHEDULES)
def test_operators(rng, counters, schedule):
    shape, dtype = among(rng, MESHES), among(rng, [BF16, torch.float16])
    softmax = among(rng, list(AttnSoftmaxType)[:2])
    given = (*schedule, shape, dtype)
    check_operators(rng, counters, None, *given, softmax_type=softmax)


@pytest.mark.parametrize(
    ("form", "balanced"),
    [("causal", True), ("causal packed", False), ("causal stripes", True)],
)
def test_operators_with_a_window(rng, counters, form, balanced):
    given = (form, GATHER, balanced, {"cp": 2}, BF16)
    check_operators(rng, counters, None, *given, window_size=WINDOW)


@pytest.mark.multigpu
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_operators_of_gpus(rng, counters, schedule):
    given = (*schedule, {"cp": 2}, among(rng, [BF16, torch.float16]))
    check_operators(rng, counters, jax.devices("gpu"), *given)


# ---- what a program may do -----------------------------------------------------------------------


CAUSAL = FORMS["causal"]


def outputs(mesh, call, *arrays, resource=RESOURCE):
    """What a call makes over a mesh, as arrays of numpy."""
    with te.autocast(mesh_resource=resource), jax.set_mesh(mesh):
        return jax.tree.map(np.asarray, jax.jit(call)(*map(np.asarray, arrays)))


def test_segments_that_stand_as_devices_have_them(rng):
    """Lengths, segments in the order of tokens and reordered ones with positions say the same."""
    form = FORMS["causal packed"]
    ids = np.int32([[1] * 20 + [2] * 19 + [3] * 20 + [0] * 5, [1] * TOKENS])
    places = np.int32([[*range(20), *range(19), *range(20), *range(5)], list(range(TOKENS))])
    mesh, order = mesh_of({"cp": 4}), functools.partial(
        reorder_causal_load_balancing, strategy=ReorderStrategy.Striped, cp_size=4, seq_dim=1
    )  # fmt: skip
    qkv = [order(one) for one in fresh(rng, BF16)[1:]]
    options = {"context_parallel_strategy": RING, "context_parallel_causal_load_balanced": True}
    given = SequenceDescriptor.from_segment_ids_and_pos
    first, *others = (
        outputs(mesh, lambda *qkv, of=of: attend(form, of, None, *qkv, **options,
                                                 max_segments_per_seq=3), *qkv)
        for of in (
            described(form), given(ids), given(ids, places),
            given(order(jnp.asarray(ids)), order(jnp.asarray(places)),
                  is_segment_ids_reordered=True),
        )
    )  # fmt: skip
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("strategy", [GATHER, RING])
def test_dropout(rng, seed, strategy):
    """Each device draws its own; the backward draws the same again."""
    mesh, (_, q, k, v) = mesh_of({"cp": 2, "tp": 2}), fresh(rng, BF16)
    q, v = jnp.zeros_like(q), jnp.ones_like(v)  # all weights are equal

    def call(number, v):
        options = {"seed": jax.random.key(number), "dropout_probability": 0.5}
        options["context_parallel_strategy"] = strategy
        return attend(FORMS["full"], None, None, q, k, v, **options)

    def both(number, v):
        out, back = jax.vjp(functools.partial(call, number), v)
        return out, back(jnp.ones_like(out))[0]

    (out, grad), (again, _), (other, _) = (
        outputs(mesh, functools.partial(both, number), v) for number in (seed, seed, seed + 1)
    )
    np.testing.assert_array_equal(out, again)
    # With values of 1 an output is the sum of the weights that are kept, whose gradient is they.
    sums = [one.astype(np.float64).sum() for one in (out, grad)]
    assert abs(sums[1] / sums[0] - 1) < TOKENS * 2.0**-8
    assert (out != other).any()
    for dim in (1, 2):  # queries, heads
        assert np.not_equal(*np.split(out, 2, axis=dim)).any()


@pytest.mark.parametrize(
    ("kind", "strategy"), [(AxisType.Auto, GATHER), (AxisType.Explicit, RING)], ids=str
)
def test_kinds_of_axes(rng, kind, strategy):
    """Arrays that are spread otherwise, or not, and a call without `jax.jit`."""
    options = {"context_parallel_strategy": strategy}
    grad, *qkv = fresh(rng, BF16)
    output, (_, *exact) = on_one_device("causal", {}, grad, None, *qkv)
    bound = tol("attention_steps", BF16, TOKENS)
    mesh = mesh_of({"dp": 2, "cp": 2}, kind=kind)

    def loss(*qkv):
        out = jax.checkpoint(functools.partial(attend, CAUSAL, None, None, **options))(*qkv)
        return jnp.sum(out.astype(jnp.float32) * np.asarray(grad).astype(np.float32))

    with te.autocast(mesh_resource=RESOURCE), jax.set_mesh(mesh):
        for spec in (PartitionSpec(), PartitionSpec("dp", "cp")):
            own = jax.device_put(list(map(np.asarray, qkv)), NamedSharding(mesh, spec))
            for one, other in zip(jax.jit(jax.grad(loss, (0, 1, 2)))(*own), exact, strict=True):
                assert_nmse(to_torch(one), wide(other), bound)
        found = attend(CAUSAL, None, None, *own, **options)  # without jax.jit
        assert_nmse(to_torch(found), wide(output), bound)


def test_within_shard_map(rng, counters):
    """Of rows that are whole a device may call it with its part."""
    grad, *qkv = fresh(rng, BF16)
    wanted = on_one_device("causal", {}, grad, None, *qkv)[0]
    options = {"context_parallel_axis": "cp", "context_parallel_strategy": RING}
    parts = PartitionSpec(None, "cp")
    call = jax.shard_map(
        functools.partial(attend, CAUSAL, None, None, **options),
        in_specs=(parts,) * 3, out_specs=parts, check_vma=False,
    )  # fmt: skip
    found = outputs(mesh_of({"cp": 2}), call, *qkv)
    assert_nmse(to_torch(found), wide(wanted), tol("attention_steps", BF16, TOKENS))
    assert sum(n for name, n in counters().items() if name.startswith("attention")) == 4


def test_largest_scores(rng):
    _, q, k, v = fresh(rng)
    of = functools.partial(attend, CAUSAL, None, None, return_max_logit=True)
    options = {"context_parallel_strategy": RING}
    found = outputs(mesh_of({"dp": 2, "cp": 2}), functools.partial(of, **options), q, k, v)
    np.testing.assert_array_equal(found[1], jax.jit(of)(q, k, v)[1])


def test_the_flax_module(rng, counters):
    """The axis that the names in force have for sequences is enough."""
    grad, q, k, v = fresh(rng, BF16, HEADS)
    module = te_flax.DotProductAttention(CHANNELS, HEADS, scale_factor=0.25)
    mesh = mesh_of({"cp": 2, "tp": 2})
    found = outputs(mesh, functools.partial(module.apply, {}), q, k, v)
    assert sum(n for name, n in counters().items() if name.startswith("attention")) == 4
    wanted = on_one_device("causal", {}, grad, None, q, k, v)[0]
    assert_nmse(to_torch(found), wide(wanted), tol("attention_steps", BF16, TOKENS))


def test_what_has_no_way_over_devices(rng):
    """It is refused where the caller has asked for one, and by definition where the mesh has."""
    q, k, v = fresh(rng, groups=HEADS)[1:]
    bias = jnp.asarray(normal(rng, (1, HEADS, TOKENS, TOKENS)))
    bottom = {"attn_mask_type": AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK}
    added = {"attn_bias_type": AttnBiasType.POST_SCALE_BIAS}
    hidden = {"attn_mask_type": AttnMaskType.PADDING_MASK}
    given = {
        "a bias": (bias, None, added),
        "bottom right": (None, None, bottom),
        "other numbers": (None, None, {}),
        "an array": (None, jnp.zeros((BATCH, 1, TOKENS, TOKENS), bool), hidden),
    }
    plain = {
        "seed": None, "attn_bias_type": AttnBiasType.NO_BIAS, "is_training": True,
        "attn_mask_type": AttnMaskType.CAUSAL_MASK, "qkv_layout": QKVLayout.BSHD_BSHD_BSHD,
        "softmax_type": AttnSoftmaxType.VANILLA_SOFTMAX, "scaling_factor": 0.25,
        "dropout_probability": 0.0,
    }  # fmt: skip
    mesh = mesh_of({"cp": 2})
    for message, (own, mask, options) in given.items():
        keys = slice(TOKENS // 2 if "numbers" in message else TOKENS)

        def call(own=own, mask=mask, keys=keys, options=options, **more):
            mask = None if mask is None else limits_of_mask(mask)
            return fused_attn((q, k[:, keys], v[:, keys]), own, mask, **plain | options, **more)

        with te.autocast(mesh_resource=RESOURCE), jax.set_mesh(mesh):
            with pytest.raises(NotImplementedError, match=message):
                call(context_parallel_axis="cp")
            found = np.asarray(jax.jit(call)())
        assert_nmse(to_torch(found), wide(call()), tol("attention", torch.float32, TOKENS))
    with te.autocast(mesh_resource=RESOURCE), jax.set_mesh(mesh):
        with pytest.raises(ValueError, match="do not divide by 4"):
            attend(CAUSAL, None, None, *(one[:, :-2] for one in (q, k, v)),
                   context_parallel_causal_load_balanced=True)  # fmt: skip
