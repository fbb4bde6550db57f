# SPDX-License-Identifier: Apache-2.0
"""Compute what a training needs of 8 to 10,000 GPUs: bytes, memory, time. Write the docs' table.

What tensor parallelism sends, what of it lies beside a GEMM, and what layers save for the backward
is read from the plans that a rank would run; the rest are the formulas of docs/scaling_out.md.

    python tools/scaling_out.py            # writes the table of docs/scaling_out.md
    python tools/scaling_out.py --check
"""

import math
import sys
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from page_tables import keep, rows

from transformer_engine import _core
from transformer_engine.common.graphs import (
    CallSpec,
    Collective,
    Graph,
    LinearFlags,
    LinearSpec,
    call_graph,
)
from transformer_engine.common.operand_casts import quantization_of
from transformer_engine.common.plans import CallPlans, extent_value
from transformer_engine.common.recipe import DelayedScaling

PAGE, SCRIPT = "docs/scaling_out.md", "tools/scaling_out.py"
BYTES = {_core.DTYPE_F32: 4, _core.DTYPE_F16: 2, _core.DTYPE_BF16: 2}  # others: 1
WIDE = 2  # bytes of a value in bf16
_WEIGHT = _core.VALUE_PARAMETER | _core.VALUE_GRADIENT
STATE = 16  # bytes of a parameter: fp32 master, two moments, fp32 gradient


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder with gated MLPs."""

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int = 128_256

    @property
    def head(self) -> int:
        """Channels of a head."""
        return self.hidden // self.heads

    def linears(self) -> dict[str, tuple[int, int]]:
        """Features in and out of the linear layers of a layer."""
        h, qkv = self.hidden, (self.heads + 2 * self.kv_heads) * self.head
        return {"qkv": (h, qkv), "proj": (h, h), "fc1": (h, 2 * self.ffn), "fc2": (self.ffn, h)}

    @property
    def layer_weights(self) -> int:
        """Elements of the weights of a layer."""
        return sum(columns * outputs for columns, outputs in self.linears().values())

    @property
    def parameters(self) -> int:
        """Elements of all weights; embedding and head are two."""
        return self.layers * self.layer_weights + 2 * self.vocabulary * self.hidden


@dataclass(frozen=True)
class Layout:
    """How a step of `sequences` of `length` tokens is spread; microbatches have one sequence."""

    length: int
    sequences: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    fsdp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """GPUs."""
        return self.tp * self.cp * self.pp * self.fsdp * self.dp

    @property
    def microbatches(self) -> int:
        """Of a rank in a step."""
        return math.ceil(self.sequences / (self.fsdp * self.dp))

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch that a rank of `cp` has."""
        return self.length // self.cp


@dataclass(frozen=True)
class Device:
    """A GPU: peak of dense FP8 in FLOP/s, bytes/s to its node and to others, one way."""

    name: str = "H100 SXM"
    peak: float = 1979e12
    inside: float = 450e9
    outside: float = 50e9
    node: int = 8
    efficiency: float = 0.4  # share of the peak that a step without communication reaches
    link: float = 0.8  # share of a link that a collective reaches


class Sent(NamedTuple):
    """Bytes that a rank sends in a run of plans: beside a GEMM, and alone."""

    hidden: int
    alone: int


# ---- what plans say ------------------------------------------------------------------------------


def linear_graph(columns: int, outputs: int, ranks: int, by_rows: bool) -> Graph:
    """A linear layer in FP8 with the collectives of tensor and sequence parallelism.

    `columns` and `outputs` are those of all ranks; the layer is split by its outputs, or `by_rows`.
    """
    split = (columns // ranks, outputs) if by_rows else (columns, outputs // ranks)
    flags = LinearFlags(input=_core.VALUE_GRADIENT, weight=_WEIGHT)
    spec = LinearSpec(*split, *[_core.DTYPE_BF16] * 5, quantization_of(DelayedScaling()), flags)
    if ranks == 1:
        return call_graph(CallSpec((spec,)))
    if by_rows:
        behind = Collective(_core.COLLECTIVE_REDUCE_SCATTER, ranks, True, (0, 1))
        return call_graph(CallSpec((spec,), behind=behind))
    before = Collective(_core.COLLECTIVE_GATHER, ranks, True, (0, 1))
    return call_graph(CallSpec((spec,), before=before))


def bytes_of(plan, number: int, rows_of_rank: int) -> int:
    """Bytes of a buffer of a plan whose rank has so many rows."""
    buffer = plan.described.buffers[number]
    sizes = [0] * (_core.SYMBOL_ROWS + 1)
    sizes[_core.SYMBOL_ROWS] = rows_of_rank
    elements = math.prod(extent_value(extent, sizes) for extent in buffer.shape)
    return elements * BYTES.get(buffer.dtype, 1)


def sent_by(plans: CallPlans, ranks: int, rows_of_rank: int) -> Sent:
    """What a rank sends for the collectives of plans, by rings: (n - 1) / n of a whole tensor."""
    found = {True: 0, False: 0}
    for plan in (plans.forward, plans.backward):
        stages = plan.stages
        for number, stage in enumerate(stages):
            node = plan.graph.nodes[stage.node] if stage.node >= 0 else None
            if node is None or node.kind != _core.NODE_COLLECTIVE or 0 <= stage.half < number:
                continue
            sizes = [bytes_of(plan, buffer, rows_of_rank) for buffer in stage.buffers]
            whole = sum(max(pair) for pair in zip(sizes[::2], sizes[1::2], strict=True))
            between = stages[number + 1 : stage.half] if stage.half >= 0 else ()
            beside = any(other.name.startswith("gemm") for other in between)
            found[beside] += whole * (ranks - 1) // ranks
    return Sent(found[True], found[False])


@cache
def of_layer(model: Model, tp: int, tokens: int) -> tuple[Sent, int]:
    """What a layer of a microbatch sends over `tp`, and what its linear layers save, in bytes."""
    hidden = alone = saved = 0
    for name, (columns, outputs) in model.linears().items():
        plans = CallPlans(linear_graph(columns, outputs, tp, name in ("proj", "fc2")))
        sent = sent_by(plans, tp, tokens // tp)
        hidden, alone = hidden + sent.hidden, alone + sent.alone
        buffers = plans.forward.described.buffers
        saved += sum(
            bytes_of(plans.forward, number, tokens // tp)
            for number, buffer in enumerate(buffers)
            if buffer.role == "saved"
        )
    return Sent(hidden, alone), saved


# ---- formulas ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """What a rank needs for a step: bytes, seconds."""

    state: int
    activations: int
    sent: dict[str, float]  # by kind of parallelism
    compute: float
    exposed: dict[str, float]

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.state + self.activations

    @property
    def step(self) -> float:
        """Seconds."""
        return self.compute + sum(self.exposed.values())


def state_bytes(model: Model, layout: Layout) -> int:
    """Parameters in FP8, masters, moments and gradients of a rank; and two gathered layers."""
    own = model.parameters / (layout.tp * layout.pp * layout.fsdp) * (STATE + 1)
    gathered = 2 * model.layer_weights / layout.tp if layout.fsdp > 1 else 0
    return int(own + gathered)


def activation_bytes(model: Model, layout: Layout) -> int:
    """What the first stage of a pipeline holds: of as many microbatches as it has stages."""
    _, linears = of_layer(model, layout.tp, layout.tokens)
    attention = (2 * model.heads + 2 * model.kv_heads) * model.head * WIDE + 4 * model.heads
    gated = 2 * model.ffn * WIDE  # inputs of the activation
    norms = 2 * model.hidden * WIDE
    layer = linears + layout.tokens * (attention + gated + norms) // layout.tp
    held = min(layout.pp, layout.microbatches)
    return model.layers // layout.pp * layer * held


def flops(model: Model, layout: Layout) -> float:
    """Of a step of all ranks: three GEMMs a weight, and attention under a causal mask."""
    weights = model.parameters - model.vocabulary * model.hidden  # a look-up multiplies nothing
    attention = 6 * model.layers * model.hidden * layout.length
    return layout.sequences * layout.length * (6 * weights + attention)


def sent_bytes(model: Model, layout: Layout) -> dict[str, float]:
    """Bytes that a rank sends in a step, by kind of parallelism."""
    layers, microbatches = model.layers / layout.pp, layout.microbatches
    of_rank = model.parameters / (layout.tp * layout.pp)
    tp = sum(of_layer(model, layout.tp, layout.tokens)[0])
    kv = 2 * layout.tokens * model.kv_heads / layout.tp * model.head * WIDE
    shards, replicas = layout.fsdp, layout.dp
    return {
        "tp": layers * microbatches * tp,
        "cp": layers * microbatches * 3 * (layout.cp - 1) * kv,
        "pp": (2 * microbatches * layout.tokens / layout.tp * model.hidden * WIDE)
        * (layout.pp > 1),
        "fsdp": (shards - 1) / shards * of_rank * (2 * microbatches + 4),
        "dp": 2 * (replicas - 1) / replicas * of_rank / shards * 4,
    }


def needs(model: Model, layout: Layout, device: Device) -> Needs:
    """Compute all of it."""
    sent = sent_bytes(model, layout)
    compute = flops(model, layout) / layout.ranks / (device.peak * device.efficiency)
    inside = 1
    seconds = {}
    for name in ("tp", "cp", "fsdp", "dp", "pp"):  # the first of them lie in one node
        inside *= getattr(layout, name)
        rate = device.inside if inside <= device.node else device.outside
        seconds[name] = sent[name] / (rate * device.link)
    hidden, alone = of_layer(model, layout.tp, layout.tokens)[0]
    return Needs(
        state=state_bytes(model, layout),
        activations=activation_bytes(model, layout),
        sent=sent,
        compute=compute,
        exposed={
            "tp": seconds["tp"] * alone / max(1, hidden + alone),
            "cp": max(0.0, seconds["cp"] - _attention_share(model, layout) * compute),
            "fsdp": max(0.0, seconds["fsdp"] - compute),
            "dp": max(0.0, seconds["dp"] - compute * 2 / 3),
            "pp": seconds["pp"] / layout.microbatches
            + compute * (layout.pp - 1) / layout.microbatches,
        },
    )


def _attention_share(model: Model, layout: Layout) -> float:
    """Share of the FLOPs that attention has, beside which keys and values travel."""
    attention = 6 * model.layers * model.hidden * layout.length
    return attention * layout.sequences * layout.length / flops(model, layout)


# ---- the table -----------------------------------------------------------------------------------

MODELS = {
    "8B": Model("Llama-3 8B", 32, 4096, 14336, 32, 8),
    "70B": Model("Llama-3 70B", 80, 8192, 28672, 64, 8),
    "405B": Model("Llama-3 405B", 126, 16384, 53248, 128, 8),
}
CASES = [
    ("8B", Layout(8192, 32, fsdp=8)),
    ("8B", Layout(8192, 512, fsdp=8, dp=16)),
    ("8B", Layout(131_072, 32, cp=16, fsdp=8)),
    ("70B", Layout(8192, 256, tp=8, fsdp=16)),
    ("70B", Layout(8192, 1024, tp=8, pp=4, fsdp=8, dp=4)),
    ("405B", Layout(8192, 2048, tp=8, pp=14, fsdp=16)),
    ("405B", Layout(8192, 2048, tp=8, pp=9, fsdp=16, dp=8)),
]


def _described(layout: Layout) -> str:
    sizes = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "fsdp", "dp")}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def table(device: Device) -> str:
    """Return all cases as a table in Markdown."""
    body = []
    for name, layout in CASES:
        model = MODELS[name]
        found = needs(model, layout, device)
        body.append([
            f"{model.name}, {layout.sequences:,} x {layout.length:,}",
            f"{layout.ranks:,}", _described(layout),
            f"{found.state / 2**30:.1f}", f"{found.activations / 2**30:.1f}",
            *(f"{found.sent[kind] / 1e9:.1f}" for kind in ("tp", "cp", "pp", "fsdp", "dp")),
            f"{found.compute:.2f}",
            ", ".join(f"{k} {s:.2f}" for k, s in found.exposed.items() if s >= 0.005) or "none",
            f"{found.compute / found.step:.0%}",
        ])  # fmt: skip
    sent = [f"{kind}, GB" for kind in ("tp", "cp", "pp", "fsdp", "dp")]
    head = ["model, sequences x tokens", "GPUs", "layout", "state, GiB", "activations, GiB", *sent]
    return rows([*head, "compute, s", "exposed, s", "computing"], body)


if __name__ == "__main__":
    sys.exit(keep(PAGE, SCRIPT, table(Device())))
