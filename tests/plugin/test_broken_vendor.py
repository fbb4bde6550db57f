# SPDX-License-Identifier: Apache-2.0
"""Modules under a vendor whose operators are broken: errors, and never wrong numbers."""

import copy
import threading

import processes
import pytest
import torch
from clean_state import clean as clean
from devices import broken
from plugged import MODULES, RECIPES, data, made, same, step
from thinning import one_each

import transformer_engine.pytorch as te
from transformer_engine.plugin import core as plugin

pytestmark = pytest.mark.usefixtures("manager")
UNREAD = {"compute_amax", "fused_amax_and_scale_update_after_reduction"}
"""Operators whose results nobody reads: they write to what they are given."""
CLASS = "get_flash_attention_class"
"""Whose result is asked for attentions that are no plan, which None and no class do not run."""
RAN = {}


def vendor(fault, *ops):
    found = broken.Vendor(fault, ops or None)
    found.register(plugin.get_registry())
    return found


def preferred(strict=False):
    return plugin.policy_context(plugin.SelectionPolicy(prefer="vendor", strict=strict))


def operators(name, recipe):
    """Operators that a module runs, once each in a process."""
    if (name, recipe) not in RAN:
        found = vendor("waits")
        found.go.set()
        step(made(name, "cpu"), data("cpu"), RECIPES[recipe], preferred())
        plugin.reset_default_manager()
        te.reset()
        RAN[name, recipe] = sorted(set(found.calls))
    return RAN[name, recipe]


def told(error):
    """Text of an error with its notes."""
    return "\n".join([str(error), *getattr(error, "__notes__", [])])


@pytest.mark.parametrize("strict", [False, True])
@one_each(fault=broken.FAULTS, name=MODULES, recipe=["plain", "delayed", "current", "block"])
def test_every_operator_of_a_module(name, recipe, fault, strict):
    """Each raises or gives what it does without a vendor; then the module gives right numbers."""
    module, x = made(name, "cpu"), data("cpu")
    wanted = step(copy.deepcopy(module), x, RECIPES[recipe])
    for op in operators(name, recipe):
        te.reset()
        tried = copy.deepcopy(module)
        found = vendor(fault, op)
        try:
            got = step(tried, x, RECIPES[recipe], preferred(strict))
        except Exception as error:
            assert fault != "fails" or type(error) is broken.Failure, told(error)
            assert op in told(error) or op == CLASS, told(error)
        else:
            quantized = recipe != "plain"  # into places, which nobody can take away
            assert quantized or op in UNREAD or op == CLASS, f"{op} raised nothing"
            same(got, wanted)
        assert set(found.calls) == {op}
        plugin.reset_default_manager()
        tried.zero_grad()
        again = step(tried, x, RECIPES[recipe])
        if recipe == "delayed":  # the step that failed may have measured something
            assert all(one.isfinite().all() for one in again)
        else:
            same(again, wanted)


FORWARD, BACKWARD = "rmsnorm_fwd", "rmsnorm_bwd"
COMPILED = {"fails": broken.Failure, "one row less": ValueError, "integers": TypeError,
            "on meta": ValueError, "None": TypeError}  # fmt: skip


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
@pytest.mark.parametrize("fault", COMPILED)
def test_in_a_compiled_module(fault, op):
    """Errors of graphs are those of eager calls; without the vendor another graph is right."""
    torch._dynamo.reset()
    module, x = made("LayerNormLinear", "cpu"), data("cpu")
    wanted = step(module, x)
    compiled = torch.compile(module, backend="aot_eager")
    vendor(fault, op)
    with pytest.raises(COMPILED[fault]) as caught:
        step(compiled, x, None, preferred())
    assert op in told(caught.value)
    module.zero_grad()
    same(step(compiled, x), wanted)
    torch._dynamo.reset()


def test_in_a_checkpoint():
    """A forward that fails when it is repeated raises in the backward."""
    module, x = made("LayerNormLinear", "cpu"), data("cpu").requires_grad_()
    found = vendor(lambda result: result if len(found.calls) == 1 else broken.fail(result), FORWARD)
    with preferred():
        y = te.checkpoint(module, x)
    assert found.calls == [FORWARD]
    with pytest.raises(broken.Failure):
        y.sum().backward()
    assert found.calls == [FORWARD] * 2


@pytest.mark.parametrize("op", [FORWARD, BACKWARD])
def test_an_operator_that_takes_long(op):
    """Its module waits for it and has right numbers; modules of other threads do not."""
    module, x = made("LayerNormLinear", "cpu"), data("cpu")
    other = copy.deepcopy(module)
    wanted = step(copy.deepcopy(module), x)
    found, results = vendor("waits", op), {}
    slow = threading.Thread(target=lambda: results.update(slow=step(module, x, None, preferred())))
    slow.start()
    assert found.begun.wait(broken.LIMIT)
    # Backward passes of the CPU run in the thread that asks for them.
    quick = threading.Thread(target=lambda: results.update(quick=step(other, x)))
    quick.start()
    quick.join(broken.LIMIT)
    assert "quick" in results and "slow" not in results
    found.go.set()
    slow.join(broken.LIMIT)
    same(results["slow"], wanted)
    same(results["quick"], wanted)
    assert found.calls == [op]


@pytest.mark.parametrize("fault", ["fails", "None in it"])
def test_a_program_that_names_the_vendor(fault):
    """Its operators raise, and `plugin.check` would have said so."""
    program = """
    import torch
    import transformer_engine.pytorch as te
    from transformer_engine import plugin

    try:
        te.LayerNormMLP(32, 64, device="cpu")(torch.ones(4, 32))
    except Exception as error:
        print(type(error).__name__, *error.__notes__)
    broken = plugin.get_registry().get_implementation("layernorm_fwd", "vendor.broken")
    assert not plugin.check(broken, device="cpu").passed
    """
    done = processes.run(
        program, TE_FL_PLUGIN_MODULES="devices.broken", TE_FL_PREFER="vendor", BROKEN_FAULT=fault
    )
    assert "layernorm_fwd" in done.stdout and "vendor.broken" in done.stdout
    assert done.stdout.startswith("Failure" if fault == "fails" else "TypeError")
