# SPDX-License-Identifier: Apache-2.0
"""Host cost of compiled layers: operators in the graphs, conditions, and time beside eager code.

Small layers, so that the device is never the limit. Of each recipe the same layers run in eager
mode and compiled by Inductor, in turns; times are those of one layer. (Without its pass that
writes in place, a graph clones each history for each operator.) The conditions are what torch looks
at before it takes a graph. On the CPU the work itself is in the figures, for there is no other
device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import modes
import torch
from timing import Column, Machine, alternate, parser, start, warm
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor.compile_fx import compile_fx, compile_fx_inner

import transformer_engine.pytorch as te

FEATURES, ROWS, LAYERS = 64, 16, 12
PARTS = modes.HostCall.PARTS
RECIPES = ("bf16", "delayed", "current", "block")
COLUMNS = [
    Column("recipe", "recipe", "<8s"),
    Column("way", "way", "<9s"),
    Column("operators", "operators", ">9.1f"),
    Column("conditions", "conditions", ">10d"),
    Column("check_us", "check us"),
    Column("forward_us", "forward us"),
    Column("backward_us", "backward us"),
    Column("step_ratio", "step/floor", ">10.2f"),
]


class Stack(torch.nn.Module):
    """Layers in a row."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__()
        options: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        options |= {"params_dtype": torch.bfloat16, "device": device, "fuse_qkv_params": True}
        sizes = FEATURES, 4 * FEATURES, 1
        made = [te.TransformerLayer(*sizes, **options) for _ in range(count)]
        self.layers = torch.nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of them."""
        for layer in self.layers:
            x = layer(x)
        return x


class Counter:
    """Inductor, which counts the plans in the last graphs that it compiles."""

    def __init__(self) -> None:
        self.runs = {"forward": 0, "backward": 0}

    def backend(self, graph: Any, inputs: Any) -> Callable:
        """Compile a graph."""
        return compile_fx(graph, inputs, inner_compile=self._compile)

    def _compile(self, graph: Any, inputs: Any, **options: Any) -> Any:
        texts = [f"{node.target} {node.args[:1]}" for node in graph.graph.nodes]
        way = "backward" if options.get("is_backward") else "forward"
        self.runs[way] = sum("transformer_engine.run" in text for text in texts)
        return compile_fx_inner(graph, inputs, **options)


class Call(modes.HostCall):
    """Layers that are called in one way, under a recipe."""

    def __init__(self, run: Callable, recipe: Any, machine: Machine, steps: int) -> None:
        super().__init__(run, (ROWS, 1, FEATURES), machine, steps)
        self.recipe = recipe

    def forward(self) -> None:
        """The forward, and the region around it."""
        with modes.region(self.recipe):
            super().forward()


def leaves(manager: Any) -> int:
    """How many conditions a manager of guards has, those of the managers below it included."""
    pairs = getattr(manager, "get_key_value_managers", dict)().values()
    below = [*manager.get_child_managers(), *(one for pair in pairs for one in pair if one)]
    return len(manager.get_leaf_guards()) + sum(map(leaves, below))


def conditions(call: Call, model: Stack) -> tuple[int, float]:
    """Conditions of the graph of a model, and the seconds that it takes to look at them."""
    entry, *_ = _debug_get_cache_entry_list(Stack.forward.__code__)
    manager, given = entry.guard_manager, {"self": model, "x": call.x}
    with modes.region(call.recipe):
        checks = [call.machine.host_time(lambda: manager.check(given))[0] for _ in range(50)]
    return leaves(manager.root), min(checks)


def rows(machine: Machine, name: str, count: int, sizes: tuple[int, int]) -> list[dict]:
    """Measure both ways under a recipe, in turns."""
    recipe, counter = modes.recipes()[name], Counter()
    torch._dynamo.reset()
    te.reset()  # a graph has the updates of all scales that there are
    model = Stack(count, machine.device)
    compiled = torch.compile(model, fullgraph=True, backend=counter.backend)
    calls = {
        way: Call(run, recipe, machine, sizes[0])
        for way, run in {"eager": model, "compiled": compiled}.items()
    }
    for call in calls.values():
        warm(call.step, 4 if machine.quick else 20)
    known, check = conditions(calls["compiled"], model)
    found = alternate({way: call.turn for way, call in calls.items()}, sizes[1])
    least = {w: {p: min(t[p] for t in turns) for p in PARTS} for w, turns in found.items()}
    floor = sum(least["eager"].values())
    made = []
    for way, parts in least.items():
        graph = way == "compiled"
        made.append(
            {
                "recipe": name,
                "way": way,
                "operators": sum(counter.runs.values()) / count if graph else 2.0,
                "conditions": known if graph else 0,
                "check_us": check * 1e6 / count if graph else 0.0,
                "step_ratio": sum(parts.values()) / floor,
            }
            | {f"{part}_us": seconds * 1e6 / count for part, seconds in parts.items()}
        )
    return made


def main() -> None:
    """Measure and report."""
    options = parser(__doc__)
    options.add_argument("--recipe", action="append", choices=RECIPES, help="measure this one")
    options.add_argument("--layers", type=int, default=LAYERS, help="how many there are")
    options = options.parse_args()
    report = start("host_compiled", options)
    count = 2 if options.quick else options.layers
    sizes = (2, 2) if options.quick else (5, 10)
    measured = [r for n in options.recipe or RECIPES for r in rows(report.machine, n, count, sizes)]
    least = measured[0]["forward_us"] + measured[0]["backward_us"]
    report.limit(
        "floor us",
        least,
        "a layer in eager mode under its recipe, forward and backward; here the first one",
    )
    title = f"host cost of each of {count} layers, {FEATURES} features, {ROWS} tokens, bf16"
    report.table(title, COLUMNS, measured)
    report.finish()


if __name__ == "__main__":
    main()
