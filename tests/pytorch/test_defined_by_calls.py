# SPDX-License-Identifier: Apache-2.0
"""Operators that the first call of their kind defines: an interrupt leaves none half defined."""

import gc

import processes
import pytest
import torch

from transformer_engine.pytorch.execution import plan_ops

LIBRARY = torch.library.Library
METHODS = ["define", "impl", "_register_fake"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("at", range(5))
def test_is_defined_again(at, after, monkeypatch):
    count = 200 + 2 * at + after  # of no plan
    calls = []

    def interrupting(method):
        def run(*args, **kwargs):
            calls.append(method)
            now = len(calls) == at + 1
            if now and not after:
                raise KeyboardInterrupt
            result = method(*args, **kwargs)
            if now:
                raise KeyboardInterrupt
            return result

        return run

    for name in METHODS:
        monkeypatch.setattr(LIBRARY, name, interrupting(getattr(LIBRARY, name)))
    with pytest.raises(KeyboardInterrupt):
        plan_ops._define_with_state(count)
    gc.collect()
    name = plan_ops._define_with_state(count)
    gc.collect()
    operator = getattr(torch.ops.transformer_engine, name).default
    assert len(operator._schema.returns) == count
    for key in ("CompositeExplicitAutograd", "Autograd", "FuncTorchBatched"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key), key


def test_process_ends_quietly():
    program = (
        "from transformer_engine.pytorch.execution import plan_ops as t; t._define_with_state(7)"
    )
    assert processes.run(program).stderr == ""
