# SPDX-License-Identifier: Apache-2.0
"""What plug-ins cost a training step: loaded and not selected, and one in Python for every norm.

Layers of a GPT with RMSNorm, forward and backward. The plug-ins are functions in Python that call
this library's own kernels, so all that a step takes longer is what the system costs: the host's
time, which counts where that is longer than the device's, and on the device passes over tensors
that a module without plug-ins saves. One plug-in has all three operators of the norm and takes the
places of results (`out`). The other has `rmsnorm_fwd` and `rmsnorm_bwd` with the signatures alone:
its gradients are copied, or summed with that of the residual in a pass of their own, and the limit
is that of one more pass over each. Steps of all kinds take turns. Those that are timed are in the
middle of a loop, as a step of training is: the host is ahead of the device, if it can be.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import modes
import torch
from timing import Column, Figure, Machine, Report, alternate, parser, start, warm

import transformer_engine.pytorch as te
from transformer_engine import _core, plugin as plugins
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.plugin import core as plugin
from transformer_engine.plugin.adapters import NATIVE

PLAIN = ("rmsnorm_fwd", "rmsnorm_bwd")
PLACED = (*PLAIN, "rmsnorm_bwd_add")
COLUMNS = [
    Column("precision", "precision", "<10s"),
    Column("plugins", "plug-ins", "<22s"),
    Column("host_us", "host us", ">8.0f"),
    Column("step_us", "step us", ">10.1f"),
    Column("spread", "quartiles", "<19s"),
    Column("over_us", "over none us", ">12.1f"),
    Column("overrides", "overrides", ">9d"),
    Column("each_us", "us each", ">8.2f"),
    Column("limit_us", "limit us", ">8.2f"),
]


def register() -> Any:
    """Register the plug-in; return what runs of plans obey then."""
    manager = plugin.get_default_manager()
    manager.ensure_initialized()
    for op in PLACED:
        own = manager.registry.get_implementation(op, NATIVE).fn

        def plain(*args: Any, own: Callable = own) -> Any:
            return own(*args)

        def placed(*args: Any, out: Any = None, own: Callable = own) -> Any:
            return own(*args, out=out)

        for fn, ops in ((plain, PLAIN), (placed, PLACED)):
            if op in ops:
                vendor, kind = fn.__name__, plugin.BackendImplKind.VENDOR
                impl = plugin.OpImpl(op, f"vendor.{vendor}", kind, fn, vendor=vendor)
                manager.registry.register(impl)
    return manager.obeyed()


class Sizes(NamedTuple):
    """Of a GPT."""

    layers: int
    hidden: int
    heads: int
    length: int
    batch: int


MODELS = {
    "124 million parameters": Sizes(12, 768, 12, 1024, 16),
    "6 of the 24 layers of 1.3 billion": Sizes(6, 2048, 16, 2048, 8),
}
SMALL = {"as on a GPU": Sizes(1, 64, 2, 16, 2)}


def make_step(machine: Machine, sizes: Sizes, recipe: Any) -> Callable[[], None]:
    """A forward and backward of all layers."""
    layers, hidden, heads, length, batch = sizes
    stack = torch.nn.ModuleList(
        te.TransformerLayer(
            hidden, 4 * hidden, heads, normalization="RMSNorm", hidden_dropout=0.0,
            attention_dropout=0.0, fuse_qkv_params=True, params_dtype=torch.bfloat16,
            device=machine.device,
        )
        for _ in range(layers)
    )  # fmt: skip
    x = torch.randn(length, batch, hidden, dtype=torch.bfloat16, device=machine.device)
    grad = torch.randn_like(x)
    x.requires_grad_()

    def step() -> None:
        out = x
        with modes.region(recipe):
            for layer in stack:
                out = layer(out)
        out.backward(grad)
        for parameter in stack.parameters():
            parameter.grad = None

    return step


KINDS = {
    "none": (False, ()),
    "loaded, none selected": (True, ()),
    "a norm in Python": (True, ("placed",)),
    "by signatures alone": (True, ("plain",)),
}
"""Whether plug-ins are there, and whose implementations are preferred."""


@contextlib.contextmanager
def obeying(dispatcher: Any, kind: str) -> Iterator[None]:
    """A block in which modules obey as a kind says."""
    loaded, vendors = KINDS[kind]
    _core.obey(dispatcher if loaded else None)
    prefer = "vendor" if vendors else "flagos"
    policy = plugin.SelectionPolicy.from_dict(prefer=prefer, allow_vendors=set(vendors) or None)
    with plugin.policy_context(policy):
        yield


def host_time(step: Callable[[], None], machine: Machine) -> float:
    """Seconds until the host has given all of a step to the device, the best of five."""
    found = []
    for _ in range(5):
        if machine.cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        found.append(time.perf_counter() - start)
    return min(found)


def rows(machine: Machine, sizes: Sizes, dispatcher: Any, limit: float) -> Iterator[dict[str, Any]]:
    """A row for each precision and kind."""
    turns, calls = (3, 1) if machine.quick else (15, 8)
    for precision, recipe in (("bf16", None), ("delayed", DelayedScaling())):
        step = make_step(machine, sizes, recipe)

        def measure(kind: str, step: Callable = step) -> float:
            with obeying(dispatcher, kind):
                return machine.sustained_time(step, calls, ahead=3)

        asked, host = {}, {}
        for kind in KINDS:
            with obeying(dispatcher, kind):
                warm(step, 3)
                before = sum(plugins.counts().values())
                step()
                asked[kind] = sum(plugins.counts().values()) - before
                host[kind] = host_time(step, machine)
        times = alternate({kind: partial(measure, kind) for kind in KINDS}, turns)
        for kind in KINDS:
            own = Figure.of(times[kind])
            pairs = zip(times[kind], times["none"], strict=True)
            over = Figure.of([one - none for one, none in pairs])
            # The plug-in's own call of this library's implementation counts as none.
            yield {
                "precision": precision, "plugins": kind, "host_us": host[kind] * 1e6,
                "step_us": own.median * 1e6,
                "spread": f"{own.low * 1e6:.1f}-{own.high * 1e6:.1f}",
                "over_us": over.median * 1e6, "overrides": asked[kind],
                "each_us": over.median * 1e6 / max(asked[kind], 1),
                "limit_us": limit * 1e6 if kind == "by signatures alone" else 0.0,
            }  # fmt: skip


def main() -> None:
    """Measure and report."""
    report: Report = start("overrides", parser(__doc__).parse_args())
    _core.find_selections(lambda: None)  # "none" is to find none
    machine, dispatcher = report.machine, register()
    rate = machine.copy_rate()
    report.limit("copy TB/s", rate.median / 1e12, "device copy, read and write counted")
    for model, sizes in (SMALL if machine.quick or not machine.cuda else MODELS).items():
        values = sizes.length * sizes.batch * sizes.hidden
        limit = 2 * values * torch.bfloat16.itemsize / rate.median / 2  # of half the overrides
        size = "{} layers, hidden {}, {} heads, {} tokens, batch {}".format(*sizes)
        report.table(f"{model}: {size}", COLUMNS, rows(machine, sizes, dispatcher, limit))
    report.finish()


if __name__ == "__main__":
    main()
