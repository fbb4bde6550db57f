# SPDX-License-Identifier: Apache-2.0
"""update: what a call may not be. What it computes is tested with the optimizers."""

import pytest
import torch

from transformer_engine import _core

NUMBERS = (0.1, 0.9, 0.99, 1e-8, 0.0, 1.0, 0.0, 0.0, 0.0)
NONE = (None, None, None)


def call(lists, kind=_core.UPDATE_ADAM, flags=0, numbers=NUMBERS, step=1, flag=None):
    _core.update(kind, flags, tuple(lists), flag, numbers, step, NONE)


def test_refusals(device):
    one = [torch.ones(3, device=device)]
    adam = [one, one, one, one, None, None]
    for error, text, given in (
        (ValueError, "square: is missing: adam needs it", {"lists": [*adam[:3], None, None, None]}),
        (ValueError, "sgd has no such list", {"lists": adam, "kind": _core.UPDATE_SGD}),
        (ValueError, "2 tensors, expected as many", {"lists": [one, one * 2, *adam[2:]]}),
        (ValueError, "3 of its gradient|expected the 3", {
            "lists": [one, [torch.ones(2, device=device)], *adam[2:]]}),
        (TypeError, "dtype i64, expected f32, f16", {"lists": [one, [one[0].long()], *adam[2:]]}),
        (TypeError, "remainder: dtype f32", {"lists": [*adam[:5], one]}),
        (ValueError, "pass a contiguous tensor", {
            "lists": [one, [torch.ones(3, 2, device=device)[:, 0]], *adam[2:]]}),
        (ValueError, "step = 0, expected", {"lists": adam, "step": 0}),
        (ValueError, "beta1 = 1.5", {"lists": adam, "numbers": (0.1, 1.5, *NUMBERS[2:])}),
        (ValueError, r"flags = 0x1[08]0", {"lists": adam, "flags": 256}),
        (ValueError, "kind: 4 is out of range", {"lists": adam, "kind": 4}),
        (TypeError, "flag: dtype f32, expected i32", {"lists": adam, "flag": one[0]}),
    ):  # fmt: skip
        for checks in (0, _core.UPDATE_CHECK):
            with pytest.raises(error, match=text):
                call(**{**given, "flags": given.get("flags", 0) | checks})
    call(adam, flags=_core.UPDATE_CHECK)
    assert one[0].tolist() == [1.0] * 3


def test_no_tensors():
    call([[], [], [], [], None, None])
