# SPDX-License-Identifier: Apache-2.0
"""Programs of `test_meeting`: no tensor of npu has come yet to a process in which they begin."""

import threading

import torch
from devices import npu

npu.register()

import transformer_engine.pytorch as te  # noqa: E402 - after the device
from transformer_engine import _core  # noqa: E402
from transformer_engine.common.selections import MET  # noqa: E402
from transformer_engine.plugin import definitions  # noqa: E402
from transformer_engine.pytorch.module.layer_call import LayerRunner  # noqa: E402

GEMMS = 3  # of a step


def step():
    """A step of a layer there, in FP8 and under autocast of the device."""
    layer = te.LayerNormLinear(32, 32, device="npu")
    x = torch.randn(4, 32, device="npu", requires_grad=True)
    with te.autocast(), torch.autocast("npu", torch.bfloat16):
        layer(x).sum().backward()
    assert x.grad.isfinite().all()


def after_other_types():
    """Plug-ins in C have added types of devices before, this one too."""
    assert not MET
    added = [_core.add_device_type(*each) for each in (("xpu", 14), ("npu", 12))]
    step()
    step()
    assert added == [2, 3] and MET == {"npu"}
    assert te.counters()["op.npu.gemm"] == 2 * GEMMS


def from_two_threads():
    """The second one comes while the first one is at it."""
    begun, go, make, failed = threading.Event(), threading.Event(), definitions.functions, []

    def slowly(*arguments):
        begun.set()
        assert go.wait(60)
        return make(*arguments)

    def run():
        try:
            step()
        except BaseException as error:
            failed.append(error)

    definitions.functions = slowly
    threads = [threading.Thread(target=run) for _ in range(2)]
    threads[0].start()
    assert begun.wait(60)
    threads[1].start()
    go.set()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert te.counters()["op.npu.gemm"] == 2 * GEMMS


def again_after_an_interrupt():
    """What was interrupted, before or after definitions were registered, the next call does."""

    def interrupted(*arguments):
        raise KeyboardInterrupt

    for module, name in ((definitions, "functions"), (_core, "device_is_met")):
        kept = getattr(module, name)
        setattr(module, name, interrupted)
        try:
            step()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError(name)
        setattr(module, name, kept)
    step()
    assert te.counters()["op.npu.gemm"] == GEMMS


def first_call_of_a_layer():
    """It is one call from the start, as the calls after it, and kept like these."""
    layer = te.TransformerLayer(32, 64, 4, device="npu", hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(4, 2, 32, device="npu", requires_grad=True)
    assert not MET
    for _ in range(2):
        layer(x).sum().backward()
        (kept,) = LayerRunner.of(layer).calls.values()
        assert kept is not None and MET == {"npu"}
        assert not any(getattr(module, "_kept_calls", None) for module in layer.modules())


def first_call_of_an_attention():
    """Its facts are told from the start."""
    heads = [torch.randn(4, 2, 2, 16, device="npu") for _ in range(3)]
    first = _core.facts_of_heads(*heads)
    assert MET == {"npu"} and first == _core.facts_of_heads(*heads) and first is not None
