# SPDX-License-Identifier: Apache-2.0
"""Implementations that are right but for one thing, which `plugin.check` has to find."""

from transformer_engine import plugin as plugins
from transformer_engine.plugin import core as plugin


def implementation(op, impl_id="default.native"):
    """One of this library's; None where it has none."""
    plugin.get_manager().ensure_initialized()
    return plugin.get_registry().get_implementation(op, impl_id)


def changed(op, change):
    """Right but for a change of its results, by `change(results, *args)`."""
    own = implementation(op).fn

    def run(*args, **kwargs):
        return change(own(*args, **kwargs), *args)

    return run


def called_with(op, **changes):
    """Right, but of other arguments: "a3" is the fourth one, changed by a function of all."""
    own = implementation(op).fn
    places = {int(name.removeprefix("a")): change for name, change in changes.items()}

    def run(*args, **kwargs):
        new = {i: change(*args) for i, change in places.items()}
        return own(*(new.get(i, arg) for i, arg in enumerate(args)), **kwargs)

    return run


def and_then(op, write):
    """Right, and then it writes where it must not, by `write(*args)`."""

    def run(found, *args):
        write(*args)
        return found

    return changed(op, run)


def fails(fn, op, device, **options):
    """Check it: some cases fail, and say why."""
    forwards = {"dropout_bwd": "dropout_fwd", "fused_attn_bwd": "fused_attn_fwd"}
    forward = implementation(forwards[op]).fn if op in forwards else None
    report = plugins.check(fn, op, device=device, forward=forward, **options)
    assert not report.passed
    failed = [row for row in report.rows if row.outcome == "failed"]
    assert failed and all(row.why for row in failed)
    assert f"{len(failed)} failed" in str(report)
    assert failed[0].case in str(report)
