# SPDX-License-Identifier: Apache-2.0
"""attention and its gradient: arguments that are refused, counters, and plug-ins."""

import re

import pytest
import torch
from buffers import Poisoned, name_of
from refusals import check_refused
from tols import BF16, F32

from transformer_engine import _core

Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 6, 2, 8)
SHORT = torch.tensor([1, 2, 3], dtype=torch.int32)
WRONG = {
    "three dims": (ValueError, r"query: ndim = 3, expected 4", {"query": Q[0]}),
    "integer query": (TypeError, r"query: dtype i32, expected", {"query": Q.int()}),
    "other key dtype": (TypeError, r"key: dtype bf16, expected f32", {"key": K.bfloat16()}),
    "other value dtype": (TypeError, r"value: dtype f16, expected f32", {"value": K.half()}),
    "other output dtype": (TypeError, r"output: dtype f16, expected f32", {"output": Q.half()}),
    "heads": (ValueError, r"key: 3 heads, .* divides the 4", {"key": torch.zeros(2, 6, 3, 8)}),
    "no heads": (ValueError, r"key: 0 heads, .*", {"key": torch.zeros(2, 6, 0, 8)}),
    "channels": (ValueError, r"key: dim 3: size 7, expected 8", {"key": K[..., :7].clone()}),
    "batch": (ValueError, r"key: dim 0: size 1, expected 2", {"key": K[:1]}),
    "values": (ValueError, r"value: dim 1: size 5, expected 6", {"value": K[:, :5].clone()}),
    "output": (ValueError, r"output: dim 3: size 7, expected 8", {"output": Q[..., :7].clone()}),
    "statistics": (
        ValueError,
        r"statistics: dim 1: size 5, expected 4",
        {"statistics": torch.zeros(2, 5, 4)},
    ),
    "strided statistics": (
        ValueError,
        r"statistics: dim 1: stride 7, expected 5",
        {"statistics": torch.zeros(2, 4, 7)[..., :5]},
    ),
    "double statistics": (
        TypeError,
        r"statistics: dtype f16, expected f32",
        {"statistics": torch.zeros(2, 4, 5).half()},
    ),
    "float mask": (TypeError, r"mask: dtype f32, expected u8", {"mask": torch.zeros(1, 1, 5, 6)}),
    "short mask": (
        ValueError,
        r"mask: dim 2: size 2, expected 1 or 5",
        {"mask": torch.zeros(1, 1, 2, 6).bool()},
    ),
    "wide bias": (ValueError, r"bias: dim 1: size 6", {"bias": torch.zeros(2, 6, 5, 6)}),
    "long lengths": (ValueError, r"query_lengths: .* vector of 2", {"query_lengths": SHORT}),
    "float lengths": (TypeError, r"key_lengths: dtype f32", {"key_lengths": torch.ones(2)}),
    "length too large": (
        ValueError,
        r"key_lengths: 7 of sequence 1, expected 0 to 6",
        {"key_lengths": torch.tensor([0, 7], dtype=torch.int32)},
    ),
    "negative length": (
        ValueError,
        r"query_lengths: -1 of sequence 0, expected 0 to 5",
        {"query_lengths": torch.tensor([-1, 5], dtype=torch.int32)},
    ),
    "short sink": (ValueError, r"sink: .* vector of 4", {"sink": torch.zeros(2)}),
    "double sink": (TypeError, r"sink: dtype f16, expected f32", {"sink": torch.zeros(4).half()}),
    "short slopes": (ValueError, r"slopes: .*expected \[4\] or", {"slopes": torch.zeros(3)}),
    "slopes of others": (ValueError, r"slopes: .*first size 3", {"slopes": torch.zeros(3, 4)}),
    "three dims of slopes": (ValueError, r"slopes: ndim 3", {"slopes": torch.zeros(1, 2, 4)}),
    "long top": (ValueError, r"top: .* vector of 4", {"top": torch.zeros(5)}),
    "no numbers": (ValueError, r"rng: .*NULL", {"dropout": 0.5}),
    "probability": (ValueError, r"dropout: 1.5", {"dropout": 1.5}),
    "softcap": (ValueError, r"softcap: -1, expected a finite number from 0", {"softcap": -1.0}),
    "softcap of NaN": (ValueError, r"softcap: -?nan, expected", {"softcap": float("nan")}),
    "endless softcap": (ValueError, r"softcap: inf, expected", {"softcap": float("inf")}),
    "window too far": (ValueError, r"window_right: \d+, expected", {"window_right": 2**61}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_argument(case):
    output = Poisoned(Q.shape, F32, "cpu")
    good = {"query": Q, "key": K, "value": K, "output": output.tensor}
    check_refused("attention", "cpu", WRONG[case], good, output)


B = torch.zeros(1, 4, 5, 6)
NAMES = ("grad_output", "query", "key", "value", "output")
WRONG_GRADIENTS = {
    "grad of the output": (ValueError, r"grad_output: dim 1: size 4", {"grad_output": Q[:, :4]}),
    "no statistics": (
        ValueError,
        r"statistics: dim 2: size 4",
        {"statistics": torch.zeros(2, 4, 4)},
    ),
    "dtype": (TypeError, r"grad_query: dtype f16, expected f32", {"grad_query": Q.half()}),
    "shape": (ValueError, r"grad_key: dim 1: size 5, expected 6", {"grad_key": K[:, :5].clone()}),
    "no bias": (ValueError, r"grad_bias: there is no bias", {"grad_bias": B.clone()}),
    "other bias": (
        ValueError,
        r"grad_bias: dim 0: size 2, expected 1",
        {"bias": B, "grad_bias": torch.zeros(2, 4, 5, 6)},
    ),
    "no sink": (ValueError, r"grad_sink: there is no sink", {"grad_sink": torch.zeros(4)}),
    "other sink": (
        ValueError,
        r"grad_sink: .* vector of 4",
        {"sink": torch.zeros(4), "grad_sink": torch.zeros(5)},
    ),
    "integer bias": (TypeError, r"grad_bias: dtype i32", {"bias": B, "grad_bias": B.int()}),
    "lengths": (
        ValueError,
        r"key_lengths: 9 of sequence 0",
        {"key_lengths": torch.tensor([9, 0], dtype=torch.int32)},
    ),
}


@pytest.mark.parametrize("case", WRONG_GRADIENTS)
def test_wrong_argument_of_the_gradient(case):
    made = Poisoned(K.shape, F32, "cpu")
    good = dict(zip(NAMES, (Q, Q, K, K, Q), strict=True))
    good |= {"statistics": torch.zeros(2, 4, 5), "grad_value": made.tensor}
    check_refused("attention_backward", "cpu", WRONG_GRADIENTS[case], good, made)


def test_results_may_not_overlap_themselves():
    memory = torch.zeros(2, 5, 1, 8).expand(2, 5, 4, 8)
    with pytest.raises(ValueError, match=re.escape("attention: output: dim 2: stride 0")):
        _core.attention(Q, K, K, memory)


def test_counted_once(device, counters):
    q, k = Q.to(device), K.to(device)
    if device != "cpu":
        with pytest.raises(NotImplementedError, match="attention: fp32"):
            _core.attention(q, k, k, torch.empty_like(q))
        assert counters() == {}
        q, k = q.to(BF16), k.to(BF16)
    _core.attention(q, k, k, torch.empty_like(q))
    assert counters() == {f"op.{device}.attention": 1, f"attention.{device}.{name_of(q.dtype)}": 1}


@pytest.mark.gpu
def test_cuda_takes_a_plug_in(rng):
    """A backend that is registered for a device runs it there."""
    seen = []
    _core.register_backend("spy", _core.DEVICE_CUDA, 1, {"attention": seen.append})
    try:
        q = Q.cuda()
        _core.attention(q, K.cuda(), K.cuda(), torch.empty_like(q), scale=0.5)
    finally:
        _core.unregister_backend("spy")
    assert len(seen) == 1 and seen[0]["scale"] == 0.5 and seen[0]["query"].is_cuda
