# SPDX-License-Identifier: Apache-2.0
"""A vendor whose operators are broken: each is this library's own, with one fault.

A plug-in module as programs name it (``TE_FL_PLUGIN_MODULES=devices.broken``, with the fault in
``BROKEN_FAULT``); tests make a `Vendor` and register that.
"""

import os
import threading

import torch

from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.adapters import NATIVE, OPERATORS

POISON = float("nan")
LIMIT = 60  # seconds for what another thread has to do


class Failure(RuntimeError):
    """What a kernel of this vendor says where it fails."""


def fail(found):
    raise Failure("broken: the kernel failed")


def taken_away(found):
    """Copies of results; where they were there is poison, for a place may have been given."""
    if type(found) is torch.Tensor:
        kept = found.clone()
        found.fill_(POISON if found.is_floating_point() else 0x77)
        return kept
    return type(found)(map(taken_away, found)) if isinstance(found, list | tuple) else found


def first(change):
    """Change the first tensor of what an operator returns: its main result."""

    def changed(found):
        if isinstance(found, torch.Tensor):
            return change(found)
        number = next(i for i, one in enumerate(found) if isinstance(one, torch.Tensor))
        return type(found)([*found[:number], change(found[number]), *found[number + 1 :]])

    return changed


FAULTS = {
    "fails": fail,
    "one row less": first(lambda y: y[:-1]),
    "one column more": first(lambda y: torch.cat([y, y[..., :1]], -1)),
    "one number": first(lambda y: y.flatten()[0].clone()),
    "empty": first(lambda y: y.new_empty(0)),
    "integers": first(lambda y: y.int()),
    "complex": first(lambda y: y.to(torch.complex64)),
    "on meta": first(lambda y: y.to("meta")),
    "sparse": first(lambda y: y.to_sparse()),
    "a list of numbers": first(lambda y: y.tolist()),
    "an array": first(lambda y: y.detach().double().numpy()),
    "None": lambda found: None,
    "None in it": first(lambda y: None),
    "NotImplemented": lambda found: NotImplemented,
    "a text": lambda found: "done",
    "nothing in it": lambda found: (),
    "too many": lambda found: (found,) * 9,
}
"""What becomes of a right result, by name; none of it can be taken for a result."""


class Vendor:
    """Implementations with one fault, to be registered.

    Parameters
    ----------
    fault : str or callable
        A name of `FAULTS`, or what makes a wrong result of a right one (`first` may help); "waits"
        for right results that come when `go` is set.
    ops : iterable of str
        Their operators, by default all that modules run and this library has.

    Attributes
    ----------
    calls : list of str
        The operators that were called.
    begun, go : threading.Event
        Of "waits": a call has begun, and may end.
    """

    def __init__(self, fault, ops=None):
        self._fault, self._ops, self.calls = fault, ops, []
        self.begun, self.go = threading.Event(), threading.Event()

    def register(self, registry):
        """Register them under the name of the vendor "broken"."""
        ops = sorted(OPERATORS) if self._ops is None else self._ops
        made = (self._implementation(registry, op) for op in ops)
        registry.register_many([one for one in made if one is not None])

    def _implementation(self, registry, op):
        own = registry.get_implementation(op, NATIVE)
        if own is None:
            return None

        def run(*args, **kwargs):
            self.calls.append(op)
            found = own.fn(*args, **kwargs)
            return self._wait(found) if self._fault == "waits" else self._broken(found)

        kind = plugin.BackendImplKind.VENDOR
        return plugin.OpImpl(op, "vendor.broken", kind, run, vendor="broken")

    def _broken(self, found):
        change = self._fault if callable(self._fault) else FAULTS[self._fault]
        return change(taken_away(found))

    def _wait(self, found):
        self.begun.set()
        assert self.go.wait(LIMIT), "nobody let the operator go on"
        return found


def register(registry):
    """Register all operators with the fault that the environment names."""
    Vendor(os.environ["BROKEN_FAULT"]).register(registry)
