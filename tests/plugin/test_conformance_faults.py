# SPDX-License-Identifier: Apache-2.0
"""`plugin.check` finds what is wrong with operators of attention, copies, optimizers and scales."""

import importlib

import pytest
import torch
from conformance_faults import and_then, called_with, changed, fails, implementation
from tols import F16, F32

from transformer_engine.plugin.conformance.cases import CASES
from transformer_engine.plugin.core.ops import (
    FlashAttentionBase,
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_Softmax_Type,
)

MASK, BIAS, SOFTMAX = NVTE_Mask_Type, NVTE_Bias_Type, NVTE_Softmax_Type


# ---- attention: what is not the first argument is named by its place -----------------------------

CAUSAL = MASK.NVTE_CAUSAL_MASK, MASK.NVTE_PADDING_CAUSAL_MASK
BOTTOM = {
    MASK.NVTE_CAUSAL_BOTTOM_RIGHT_MASK: CAUSAL[0],
    MASK.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK: CAUSAL[1],
}


def next_key(mask, window):
    """Places of a mask and a window: causal queries see one key more."""
    return {
        f"a{mask}": lambda *a: {
            CAUSAL[0]: MASK.NVTE_NO_MASK,
            CAUSAL[1]: MASK.NVTE_PADDING_MASK,
        }.get(a[mask], a[mask]),
        f"a{window}": lambda *a: (a[window][0], 1) if a[mask] in CAUSAL else a[window],
    }


def corner(mask):
    return {f"a{mask}": lambda *a: BOTTOM.get(a[mask], a[mask])}


def wider(window):
    def change(*a):
        left, right = a[window]
        return (left + 1 if left >= 0 else left, right)

    return {f"a{window}": change}


def instead(place, one, other):
    """Another value instead of one."""
    return {f"a{place}": lambda *a: other if a[place] == one else a[place]}


def between_sequences(found, *args):
    """NaN in the output, in front of where a sequence begins."""
    if args[17] is not None:
        found[0][int(args[17][1]) - 1] = torch.nan
    return found


def behind_sequences(found, *args):
    """The output of queries that are not there, in [b, s, ...]."""
    if args[8] == MASK.NVTE_PADDING_MASK and args[13].dim() == 4:
        found[0].masked_fill_(found[0] == 0, 0.5)
    return found


def in_place(place):
    return lambda *args: args[place].zero_()


def only(place, value):
    return lambda found, *args: [*found[:place], value(found[place]), *found[place + 1 :]]


FORWARD, BACKWARD = "fused_attn_fwd", "fused_attn_bwd"
NO_BIAS, ALIBI = BIAS.NVTE_NO_BIAS, BIAS.NVTE_ALIBI
SINK = SOFTMAX.NVTE_OFF_BY_ONE_SOFTMAX, SOFTMAX.NVTE_VANILLA_SOFTMAX

ATTENTION = {
    "scale": called_with(FORWARD, a3=lambda *a: 1.02 * a[3]),
    "causal off by one": called_with(FORWARD, **next_key(8, 10)),
    "corner": called_with(FORWARD, **corner(8)),
    "window off by one": called_with(FORWARD, **wider(10)),
    "padding": called_with(
        FORWARD, **instead(8, MASK.NVTE_PADDING_MASK, MASK.NVTE_NO_MASK)
    ),
    "slopes": called_with(FORWARD, **instead(7, ALIBI, NO_BIAS)),
    "bias": called_with(FORWARD, a23=lambda *a: None if a[23] is None else 0 * a[23]),
    "one more": called_with(FORWARD, **instead(9, *SINK)),
    "sink": called_with(FORWARD, a24=lambda *a: None if a[24] is None else a[24] + 0.1),
    "heads of keys": called_with(FORWARD, a14=lambda *a: a[14].flip(-2)),
    "logarithms": changed(FORWARD, lambda f, *a: [f[0], f[1] / 0.7, *f[2:]] if a[2] else f),
    "statistics of another shape": changed(
        FORWARD, lambda f, *a: [f[0], f[1][..., 0], *f[2:]] if a[2] else f
    ),
    "aux in inference": called_with(FORWARD, a2=lambda *a: True),
    "largest scores": changed(FORWARD, lambda f, *a: [f[0], 2 * f[1]] if a[27] else f),
    "nothing is dropped": called_with(FORWARD, a4=lambda *a: 0.0),
    "queries are written": and_then(FORWARD, in_place(13)),
    "between sequences": changed(FORWARD, between_sequences),
    "behind sequences": changed(FORWARD, behind_sequences),
}  # fmt: skip

GRADIENTS = {
    "scale of queries": changed(BACKWARD, only(0, lambda t: 1.05 * t)),
    "keys and values": changed(BACKWARD, lambda f, *a: [f[0], f[2], f[1], *f[3:]]),
    "causal off by one": called_with(BACKWARD, **next_key(7, 9)),
    "corner": called_with(BACKWARD, **corner(7)),
    "window off by one": called_with(BACKWARD, **wider(9)),
    "slopes": called_with(BACKWARD, **instead(6, ALIBI, NO_BIAS)),
    "no bias": changed(BACKWARD, only(3, lambda t: None)),
    "half a bias": changed(BACKWARD, only(3, lambda t: None if t is None else t / 2)),
    "sign of the sink": changed(BACKWARD, only(4, lambda t: None if t is None else -t)),
    "statistics are not read": called_with(
        BACKWARD, a20=lambda *a: [torch.zeros_like(a[20][0]), *a[20][1:]]
    ),
    "nothing was dropped": called_with(BACKWARD, a3=lambda *a: 0.0),
    "heads of keys": called_with(BACKWARD, a14=lambda *a: a[14].flip(-2)),
    "the gradient is written": and_then(BACKWARD, in_place(17)),
    "an aux is written": and_then(BACKWARD, lambda *a: a[20][0].zero_()),
}


def class_with(change):
    """A class whose modules call ours by `change(forward, query, key, value, **rest)`."""
    own = implementation("get_flash_attention_class").fn()

    class Wrong(own):
        def forward(self, *tensors, **rest):
            return change(super().forward, *tensors, **rest)

    return lambda: Wrong


def with_another_scale(run, *tensors, **rest):
    return run(tensors[0] * 1.05, *tensors[1:], **rest)


def without_a_gradient(run, query, key, value, **rest):
    return run(query, key.detach() + 0 * key, value, **rest)


def that_writes(run, query, key, value, **rest):
    out = run(query, key, value, **rest)
    query.data.add_(1.0)
    return out


def not_by_mask(run, *tensors, attn_mask_type, **rest):
    kind = "no_mask" if attn_mask_type == "causal" else attn_mask_type
    return run(*tensors, attn_mask_type=kind, **rest)


CLASSES = {
    "scale": class_with(with_another_scale),
    "detached": class_with(without_a_gradient),
    "mask": class_with(not_by_mask),
    "by head": class_with(lambda run, q, *a, **k: run(q, *a, **k).unflatten(-1, (q.shape[-2], -1))),
    "in place": class_with(that_writes),
    "no class": lambda: FlashAttentionBase.forward,
}


# ---- copies --------------------------------------------------------------------------------------


def not_swapped(tensor, *, out):
    return tensor.clone() if out is None else out.copy_(tensor.reshape(out.shape))


def only_copied(given, out, rows, room):
    groups = zip(given.split(rows), out.split(room), rows, strict=True)
    for group, place, count in groups:
        place[:count] = group


def neighbour(*args):
    """The last token of a cache that no sequence has."""
    args[2][-1, -1] = 0


COPIES = {
    "swap_first_dims": {"as it was": not_swapped},
    "fa_prepare_fwd": {
        "order": changed("fa_prepare_fwd", lambda made, *a: made.flip(0)),
        "the neighbours": and_then(
            "fa_prepare_fwd",
            lambda t: t.as_strided(t.shape, t.stride(), t.storage_offset() + t.shape[-1]).zero_(),
        ),
    },
    "fa_prepare_bwd": {"order": lambda q, k, v: implementation("fa_prepare_bwd").fn(k, q, v)},
    "convert_thd_to_bshd": {
        "no zeros": changed("convert_thd_to_bshd", lambda y, *a: torch.where(y == 0, 1, y)),
        "off by one": called_with("convert_thd_to_bshd", a0=lambda *a: a[0].roll(1, 0)),
    },
    "convert_bshd_to_thd": {
        "off by one": changed("convert_bshd_to_thd", lambda y, *a: y.roll(1, 0)),
        "no zeros": changed("convert_bshd_to_thd", lambda y, *a: torch.where(y == 0, 1, y)),
    },
    "fused_multi_row_padding": {
        "no zeros": only_copied,
        "in place": and_then("fused_multi_row_padding", in_place(0)),
    },
    "fused_multi_row_unpadding": {
        "without offsets": lambda x, out, room, rows: out.copy_(x[: len(out)]),
        "in place": and_then("fused_multi_row_unpadding", in_place(0)),
    },
    "copy_to_kv_cache": {
        "off by one": called_with(
            "copy_to_kv_cache",
            a6=lambda *a: a[6] - torch.arange(len(a[6]), device=a[6].device, dtype=torch.int32),
        ),
        "values of keys": called_with("copy_to_kv_cache", a1=lambda *a: a[1].flip(-2)),
        "a neighbour": and_then("copy_to_kv_cache", neighbour),
        "sequences that stay": called_with(
            "copy_to_kv_cache",
            a4=lambda *a: torch.arange(2, device=a[4].device).view(2, 1) if a[12] else a[4],
        ),
        "a table": and_then("copy_to_kv_cache", in_place(4)),
    },
}


# ---- context parallelism -------------------------------------------------------------------------


def largest_of(lse, step, cu, packed):
    """A maximum instead of the logarithm of a sum."""
    before = lse.clone()
    implementation("thd_second_half_lse_correction").fn(lse, step, cu, packed)
    lse.copy_(torch.where(lse > before, lse - 0.01, lse))


PARALLEL = {
    "thd_get_partitioned_indices": {
        "another rank": called_with("thd_get_partitioned_indices", a3=lambda *a: (a[3] + 1) % a[2]),
        "dtype": changed("thd_get_partitioned_indices", lambda y, *a: y.long()),
    },
    "thd_read_half_tensor": {
        "the other half": called_with("thd_read_half_tensor", a2=lambda *a: 1 - a[2])
    },
    "thd_read_second_half_lse": {
        "off by one": called_with("thd_read_second_half_lse", a0=lambda *a: a[0].roll(1, -1)),
        "no zeros": changed(
            "thd_read_second_half_lse", lambda y, *a: torch.where(y == 0, -torch.inf, y)
        ),
    },
    "thd_second_half_lse_correction": {
        "a maximum": largest_of,
        "a first half": and_then("thd_second_half_lse_correction", lambda *a: a[0][0, 0].add_(1)),
        "a step": and_then("thd_second_half_lse_correction", in_place(1)),
    },
    "thd_out_correction": {
        "weights": called_with("thd_out_correction", a3=lambda *a: a[3] + 0.02),
        "all tokens": and_then(
            "thd_out_correction", lambda *a: a[0][0].add_(2 * a[0][0]) if a[5] else None
        ),
        "sums are written": and_then("thd_out_correction", in_place(2)),
    },
    "thd_grad_correction": {
        "words": called_with("thd_grad_correction", a3=lambda *a: a[4], a4=lambda *a: a[3]),
        "added": called_with(
            "thd_grad_correction", a3=lambda *a: "add" if a[3] == "copy" else a[3]
        ),
        "the other half": and_then(
            "thd_grad_correction", lambda *a: a[0].add_(1e-3) if "none" in a[3:] else None
        ),
    },
}


# ---- optimizers ----------------------------------------------------------------------------------

ADAM = "multi_tensor_adam"
CAPTURABLE = "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master"


def faults_of_adam(op):
    """What a step of any kind may get wrong."""
    return {
        "rate": called_with(op, a3=lambda *a: 1.02 * a[3]),
        "first beta": called_with(op, a4=lambda *a: a[4] + 0.01),
        "second beta": called_with(op, a5=lambda *a: a[5] + 0.01),
        "epsilon": called_with(op, a6=lambda *a: 1e-2),
        "another step": called_with(op, a7=lambda *a: a[7] + 1),
        "mode": called_with(op, a8=lambda *a: 1 - a[8]),
        "correction": called_with(op, a9=lambda *a: 1),
        "no decay": called_with(op, a10=lambda *a: 0.0),
        "the flag": called_with(op, a1=lambda *a: torch.zeros_like(a[1])),
        "gradients are written": and_then(op, lambda *a: [t.zero_() for t in a[2][0]]),
    }


def afterwards(op, which):
    """A list is put back to what it was."""
    own = implementation(op).fn

    def run(*args):
        kept = [t.clone() for t in args[2][which]]
        own(*args)
        for t, old in zip(args[2][which], kept, strict=True):
            t.copy_(old)

    return run


SGD, SCALES = "multi_tensor_sgd", "multi_tensor_compute_scale_and_scale_inv"
EXPONENTS = "multi_tensor_compute_scale_inv_e8m0"
OPTIMIZERS = {
    op: faults_of_adam(op) for op in (ADAM, *CAPTURABLE, f"{ADAM}_fp8", f"{ADAM}_param_remainder")
}
for op in CAPTURABLE:
    OPTIMIZERS[op]["factor"] = called_with(op, a11=lambda *a: torch.ones_like(a[11]))
    OPTIMIZERS[op]["the step counts"] = and_then(op, lambda *a: a[7].add_(1))
for name, which in {"codes": 1, "amaxes": 6, "inverses": 7, "fp32 parameters": 4}.items():
    OPTIMIZERS[f"{ADAM}_fp8"][f"{name} stay"] = afterwards(f"{ADAM}_fp8", which)
for name, which in {"low halves": 4, "high halves": 1, "means": 2}.items():
    op = f"{ADAM}_param_remainder"
    OPTIMIZERS[op][f"{name} stay"] = afterwards(op, which)
OPTIMIZERS[SGD] = {
    "decay": called_with(SGD, a3=lambda *a: 1.05 * a[3]),
    "momentum": called_with(SGD, a4=lambda *a: 1.02 * a[4]),
    "dampening": called_with(SGD, a5=lambda *a: 0.0),
    "rate": called_with(SGD, a6=lambda *a: 1.02 * a[6]),
    "nesterov": called_with(SGD, a7=lambda *a: not a[7]),
    "first": called_with(SGD, a8=lambda *a: False),
    "decay after": called_with(SGD, a9=lambda *a: not a[9]),
    "scale": called_with(SGD, a10=lambda *a: 1.0),
    "the flag": called_with(SGD, a1=lambda *a: torch.zeros_like(a[1])),
    "momenta that are not asked for": and_then(
        SGD, lambda *a: None if a[4] else [t.zero_() for t in a[2][2]]
    ),
}


# ---- scales --------------------------------------------------------------------------------------

UPDATE = "fused_amax_and_scale_update_after_reduction"
AMAX, CAST = "fp8_block_scaling_compute_partial_amax", "fp8_block_scaling_partial_cast"


def moved_when_idle(buffer, histories, scales, algo, dtype, margin):
    """The window makes scales of slots without a new amax, too."""
    newest = torch.cat([history[0] for history in histories]) if not len(buffer) else buffer
    idle = (newest == 0).split([len(scale) for scale in scales])
    implementation(UPDATE).fn(buffer, histories, scales, algo, dtype, margin)
    for scale, history, here in zip(scales, histories, idle, strict=True):
        found = history.nan_to_num(nan=0.0).amax(0)
        scale.copy_(torch.where(here & (found > 0), 1.0 / found, scale))


def not_saturated(part, out, scale, h, w, start, side, code):
    """Codes that wrap around."""
    implementation(CAST).fn(part, out, scale, h, w, start, side, code)
    out.copy_(torch.where((out & 0x7F) >= 0x7B, out ^ 0x80, out))


def next_code(part, out, *rest):
    """A store that is one element too wide."""
    implementation(CAST).fn(part, out, *rest)
    end = out.storage_offset() + out.numel()
    if end < out.untyped_storage().size():
        out.as_strided((1,), (1,), end).zero_()


def raised(part, amax, *rest):
    """What was there before counts, too."""
    before = amax.clone() + 1.5
    implementation(AMAX).fn(part, amax, *rest)
    amax.copy_(torch.maximum(amax, before))


SCALING = {
    UPDATE: {
        "most recent": called_with(
            UPDATE, a3=lambda *a: "max" if a[3] == "most_recent" else "most_recent"
        ),
        "margin": called_with(UPDATE, a5=lambda *a: 0),
        "idle slots": moved_when_idle,
        "no reduction": called_with(UPDATE, a0=lambda *a: a[0][:0]),
        "history": and_then(UPDATE, lambda *a: [t.copy_(t.roll(1, 0)) for t in a[1]]),
        "the buffer": and_then(UPDATE, in_place(0)),
    },
    EXPONENTS: {
        "exponents stay": afterwards(EXPONENTS, 1),
        "rounded down": and_then(EXPONENTS, lambda *a: a[2][1][0].sub_(1)),
        "NaN": and_then(EXPONENTS, lambda *a: a[2][1][1].clamp_(max=254)),
    },
    SCALES: {
        "powers": called_with(SCALES, a4=lambda *a: False),
        "epsilon": called_with(SCALES, a5=lambda *a: 0.0),
        "inverse": and_then(SCALES, lambda *a: [t.mul_(1.01) for t in a[2][2]]),
        "amaxes": and_then(SCALES, lambda *a: [t.zero_() for t in a[2][0]]),
    },
    AMAX: {
        "off by one": called_with(AMAX, a0=lambda *a: a[0].roll(1) if len(a[0]) > 1 else a[0]),
        "raised": raised,
        "in place": and_then(AMAX, in_place(0)),
    },
    CAST: {
        "tiles": called_with(CAST, a2=lambda *a: a[2].flip(0, 1)),
        "sign of the largest": not_saturated,
        "a neighbour": next_code,
    },
}


# ---- dropout and rotary positions ----------------------------------------------------------------

QKV, QKV_BACK = "fused_qkv_rope_forward", "fused_qkv_rope_backward"
LAYERS = {
    "dropout_bwd": {
        "not scaled": changed("dropout_bwd", lambda y, grad, mask, p, into: (1 - p) * y),
        "no mask": lambda grad, mask, p, into: grad / (1 - p if p < 1 else 1),
        "grad_input": called_with("dropout_bwd", a3=lambda *a: None),
        "the gradient is written": and_then("dropout_bwd", in_place(0)),
    },
    QKV: {
        "angles": called_with(QKV, a1=lambda *a: -a[1]),
        "pairs": called_with(QKV, a6=lambda *a: not a[6]),
        "from 0": called_with(QKV, a3=lambda *a: None),
        "values": changed(QKV, lambda y, *a: (*y[:2], -y[2])),
        "rank": called_with(QKV, a8=lambda *a: 0),
    },
    QKV_BACK: {
        "the other way": called_with(QKV_BACK, a3=lambda *a: -a[3]),
        "angles of keys": called_with(QKV_BACK, a4=lambda *a: 0 * a[4]),
        "rank": called_with(QKV_BACK, a9=lambda *a: 0),
        "in place": and_then(QKV_BACK, in_place(2)),
    },
}

FAULTS = {**COPIES, **PARALLEL, **OPTIMIZERS, **SCALING, **LAYERS}
OF_ATTENTION = {
    FORWARD: ATTENTION,
    BACKWARD: GRADIENTS,
    "get_flash_attention_class": CLASSES,
}


def each(faults):
    pairs = [(op, fault) for op, named in faults.items() for fault in named]
    return pytest.mark.parametrize(("op", "fault"), pairs)


@each(FAULTS)
def test_a_wrong_one_fails(device, op, fault):
    fails(FAULTS[op][fault], op, device, dtypes=(F32, F16))


@each(OF_ATTENTION)
def test_a_wrong_attention_fails(op, fault):
    """On the CPU, whose attention takes all of the cases."""
    fails(OF_ATTENTION[op][fault], op, "cpu", dtypes=(F32, F16))


def module_of(make):
    """Where a function that makes cases is, or one with its operator."""
    return getattr(make, "func", make).__module__


def test_every_operator_has_faults():
    others = {  # of lists, whose values are compared in test_tex_optimizers.py
        f"multi_tensor_{name}" for name in ("l2norm", "scale", "scale_tensor", "unscale_l2norm")
    }
    for group in ("attention", "layouts", "optimizers", "scaling"):
        importlib.import_module(f"transformer_engine.plugin.conformance.{group}")
        found = {op for op, make in CASES.items() if module_of(make).endswith(f".{group}")} - others
        assert found and found <= FAULTS.keys() | OF_ATTENTION.keys()
