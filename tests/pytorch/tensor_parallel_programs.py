# SPDX-License-Identifier: Apache-2.0
"""What each rank runs of the tests of tensor parallelism: its part of a module, over its group."""

import contextlib
import io
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from pytorch import helpers

import transformer_engine.pytorch as te
from transformer_engine import _core
from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch.execution import collectives as execution
from transformer_engine.pytorch.torchside import collectives as torchside

RECIPES = {
    "none": None,
    "delayed": recipes.DelayedScaling(amax_history_len=4),
    "unshared": recipes.DelayedScaling(amax_history_len=4, reduce_amax=False),
    "current": recipes.Float8CurrentScaling(),
    "block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
}
HIDDEN, FFN, HEADS, TILE = 128, 256, 8, 128
WARM_UPS = 3  # steps before a capture: communicators are made, and weights get gradients
_ROW = ("proj.", "fc2_")
"""Names of what is split by inputs."""


def make(kind, ranks=1, group=None, **options):
    """A module of a kind; of one rank or of several."""
    parallel = {"tp_size": ranks, "tp_group": group, "params_dtype": options.pop("dtype")}
    sequence = options.pop("sequence", False)
    parallel["sequence_parallel"] = sequence
    split = {"set_parallel_mode": True}
    if kind in ("column", "row"):
        return te.Linear(HIDDEN, FFN, parallel_mode=kind, **parallel, **options)
    if kind == "ln_column":
        return te.LayerNormLinear(HIDDEN, FFN, parallel_mode="column", **parallel, **options)
    if kind == "mlp":
        return te.LayerNormMLP(HIDDEN, FFN, **split, **parallel, **options)
    if kind == "attention":
        given = {"attention_dropout": 0.0, **split, **parallel, **options}
        return te.MultiheadAttention(HIDDEN, HEADS, **given)
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te.TransformerLayer(HIDDEN, FFN, HEADS, **rates, **split, **parallel, **options)


def part_of(kind, name, parameter, whole, ranks, rank):
    """A rank's part of a parameter of the whole module."""
    if parameter.shape == whole.shape:
        return whole
    row = kind == "row" or any(text in name for text in _ROW)
    dim = 1 if row else 0
    halves = 2 if "fc1_" in name and whole.shape[0] == 2 * FFN else 1
    parts = [half.chunk(ranks, dim)[rank] for half in whole.chunk(halves, dim)]
    return torch.cat(parts, dim)


def take_part(module, kind, state, ranks, rank):
    """Give a module of a rank its part of the values of the whole one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(part_of(kind, name, parameter, state[name], ranks, rank))


@contextlib.contextmanager
def _noted(sent):
    """Note the dtypes of what is gathered, and how many bytes a rank sends."""
    plain = torchside.start_gather

    def start_gather(part, *args):
        sent.append((part.dtype, part.nbytes))
        return plain(part, *args)

    with contextlib.ExitStack() as stack:
        for module in (torchside, execution):
            stack.enter_context(mock.patch.object(module, "start_gather", start_gather))
        yield


def run(module, recipe, x, grads, microbatches=False, shares=1.0):
    """Steps of a module: of the last one output, gradient of the input and of the parameters.

    `shares`: of the loss of what else it returns.
    """
    for step, grad in enumerate(grads):
        module.zero_grad()
        inp = x.detach().clone().requires_grad_()
        autocast = te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])
        with autocast:
            first = {"is_first_microbatch": step == 0} if microbatches else {}
            out = module(inp, **first)
        others = out[1:] if isinstance(out, tuple) else ()
        out = out[0] if isinstance(out, tuple) else out
        loss = (out * grad).sum()
        for other in others:
            loss = loss + shares * other.square().sum()
        loss.backward()
        if getattr(module, "delay_wgrad_compute", False):
            module.backward_dw()
    found = {name: p.grad for name, p in module.named_parameters()}
    return {"output": out.detach(), "grad_input": inp.grad, **found} | {
        f"other_{i}": other.detach() for i, other in enumerate(others)
    }


def of_rank(tensor, way, ranks, rank):
    """A rank's part of an input, or of a gradient of the output: "rows", "columns" or "all"."""
    if way == "all":
        return tensor
    return tensor.chunk(ranks, 0 if way == "rows" else -1)[rank].contiguous()


def step(device, kind, recipe, options, problem, how):
    """Steps of this rank's part; what it found, and what it sent in gathers."""
    options, state, x, grads, ways = {**options}, *problem
    ranks, rank = dist.get_world_size(), dist.get_rank()
    microbatches, later, compiled = how
    with torch.device(device):
        module = make(kind, ranks, None if later else dist.group.WORLD, **options)
    take_part(module, kind, state, ranks, rank)
    if later:
        module.set_tensor_parallel_group(dist.group.WORLD)
    x = of_rank(x, ways[0], ranks, rank).to(device)
    grads = [of_rank(grad, ways[1], ranks, rank).to(device) for grad in grads]
    sent = []
    called = torch.compile(module, backend="aot_eager") if compiled else module
    with _noted(sent):
        # What all ranks have counts once in the sums over them.
        gathered = getattr(module, "return_layernorm_output_gathered", False)
        returned = kind == "row" and module.return_bias
        whole = options.get("sequence") and (gathered or returned)
        found = run(called, recipe, x, grads, microbatches, 1.0 / ranks if whole else 1.0)
    if compiled:
        found = {name.removeprefix("_orig_mod."): value for name, value in found.items()}
    return {name: value.cpu() for name, value in found.items()}, sent


def ways_to_run(device, kind, recipe, options, problem):
    """Names of tensors that have other bits than those of a plain call, by way.

    Ways: evaluation, recomputation, a frozen norm and an input that needs no gradient.
    """
    state, x, grads, ways = problem
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = of_rank(x, ways[0], ranks, rank).to(device)
    grad = of_rank(grads[0], ways[1], ranks, rank).to(device)

    def found(way):
        with torch.device(device):
            module = make(kind, ranks, dist.group.WORLD, **options)
        take_part(module, kind, state, ranks, rank)
        inp = x.detach().clone().requires_grad_(way != "frozen")
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(way != "frozen" or "norm" not in name)
        call = module
        if way.startswith("checkpoint"):
            call = partial(te.checkpoint, module, use_reentrant=way == "checkpoint")
        with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
            with torch.set_grad_enabled(way != "evaluated"):
                out = call(inp)
        if way != "evaluated":
            out.backward(grad)
        tensors = {"output": out.detach(), "input": inp.grad}
        tensors |= {name: p.grad for name, p in module.named_parameters()}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    plain = found("plain")
    return {
        way: sorted(name for name, t in found(way).items() if not torch.equal(t, plain[name]))
        for way in ("evaluated", "checkpoint", "checkpoint, saved", "frozen")
    }


def marks(device, kind, options):
    """Attributes of parameters that frameworks read, and their shapes."""
    ranks = dist.get_world_size()
    with torch.device(device):
        module = make(kind, ranks, dist.group.WORLD, **options)
    names = "tensor_model_parallel", "partition_dim", "partition_stride", "sequence_parallel"
    return {
        name: (tuple(p.shape), [getattr(p, each, None) for each in names])
        for name, p in module.named_parameters()
    }


def joined_and_apart(device, kind, recipe, options, problem):
    """Steps of a layer as one plan, and by its modules: what was found, calls into C."""
    state, x, grads, ways = problem
    ranks, rank = dist.get_world_size(), dist.get_rank()
    x = of_rank(x, ways[0], ranks, rank).to(device)
    grads = [of_rank(grad, ways[1], ranks, rank).to(device) for grad in grads]
    results = []
    for apart in (False, True):
        with torch.device(device):
            module = make(kind, ranks, dist.group.WORLD, **options)
        take_part(module, kind, state, ranks, rank)
        if apart:  # a hook has to see each module
            for inner in module.modules():
                if isinstance(inner, te.Linear | te.LayerNormMLP):
                    inner.register_forward_hook(lambda *_: None)
        calls = []
        with contextlib.ExitStack() as stack:
            for name in ("run", "run_consuming", "run_staged"):
                plain = getattr(_core, name)
                noting = _noting(plain, calls)
                stack.enter_context(mock.patch.object(_core, name, noting))
            found = run(module, recipe, x, grads)
        found = {name: value.cpu() for name, value in found.items()}
        results.append({"found": found, "calls": len(calls)})
    return results


def _noting(plain, calls):
    def run_noted(*args, **kwargs):
        calls.append(plain)
        return plain(*args, **kwargs)

    return run_noted


_SHOWN = ("gemm_output", "gather", "exchange", "gemm_grad_input")


def stages(device, kind, recipe):
    """Names of stages of a linear layer with GEMMs in pieces, forward and backward; a text."""
    with torch.device(device):
        overlap = {"ub_overlap_ag": True, "ub_overlap_rs": True, "bias": False}
        options = {"dtype": torch.bfloat16, "sequence": True, **overlap}
        module = make(kind, dist.get_world_size(), dist.group.WORLD, **options)
        rows = 128 if kind == "column" else 128 * dist.get_world_size()
        x = torch.randn(rows, module.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        module(x).sum().backward()
    plans, found = module._last_call.plans, []
    for plan in (plans.forward, plans.backward):
        names = [
            stage.name.replace("y_", "").replace("gather_input", "gather") for stage in plan.stages
        ]
        found.append([name for name in names if name.startswith(_SHOWN)])
    text = io.StringIO()
    with te.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe]):
        te.explain(module, x, file=text)
    return *found, text.getvalue()


def chosen_overlaps(device):
    """What `initialize_ub` chooses, and its errors."""
    ranks, found = dist.get_world_size(), {}
    shape, modes = (16 * ranks, 32 * ranks), list(te.UserBufferQuantizationMode)

    def made(name="fc1"):
        return te.Linear(
            32, 32 * ranks, tp_group=dist.group.WORLD, parallel_mode="column", device=device,
            sequence_parallel=True, ub_overlap_ag=True, ub_name=name,
        ).overlaps  # fmt: skip

    def note(name, *args, **kwargs):
        try:
            te.initialize_ub(*args, **kwargs)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    found["before"] = made()
    found["initialized"] = [te.module.base.is_ub_initialized()]
    note("method", shape, ranks, ub_cfgs={"fc1_fprop": {"method": "none"}})
    note("cublasmp", shape, ranks, with_cublasmp=True)
    note("size", shape, ranks + 1)
    told = [
        {f"fc1_{gemm}": {"method": how} for gemm in ("fprop", "dgrad")}
        for how in ("ring_exchange", "bulk")
    ]
    te.initialize_ub(shape, ranks, quantization_modes=modes, ub_cfgs=told)
    try:
        note("twice", shape, ranks)
        found["initialized"].append(te.module.base.is_ub_initialized())
        found["told"] = made(), [does for each in made("qkv") for does in each]
    finally:
        te.destroy_ub()
    found["initialized"].append(te.module.base.is_ub_initialized())
    return found


class _InRegion(torch.nn.Module):
    """A layer in a region of its own."""

    def __init__(self, layer, recipe):
        super().__init__()
        self.layer, self.recipe = layer, RECIPES[recipe]

    def forward(self, x):
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            return self.layer(x)


def replayed(device, recipe, way, data):
    """Steps over data in eager mode, and by a graph: outputs and gradients of both.

    `way`: "step", a graph of all of it; "callables", those of torch.cuda.make_graphed_callables.
    """
    ranks, rank, results = dist.get_world_size(), dist.get_rank(), []
    mine = [of_rank(x, "rows", ranks, rank).to(device, torch.bfloat16) for x in data]
    for captures in (False, True):
        te.reset()
        torch.manual_seed(rank)
        options = {"dtype": torch.bfloat16, "sequence": True, "device": device, "bias": False}
        call = _InRegion(make("layer", ranks, dist.group.WORLD, **options), recipe)
        x = mine[0].clone().requires_grad_()
        tensors = [x, *call.parameters()]

        def step(call, x=x, tensors=tensors):
            for each in tensors:
                if each.grad is not None:
                    each.grad.zero_()
            out = call(x)
            out.float().square().sum().backward()
            return [out.detach(), *(t.grad for t in tensors)]

        run, made = partial(step, call), None
        if captures and way == "step":
            graph, made = helpers.captured(run, WARM_UPS)
            run = graph.replay
        else:
            with helpers.side_stream():
                for _ in range(WARM_UPS):
                    run()
        if captures and way == "callables":
            run = partial(step, torch.cuda.make_graphed_callables(call, (x,)))
        found = []
        for each in mine[1:]:
            with torch.no_grad():
                x.copy_(each)
            now = run()
            found.append([t.float().cpu() for t in (made if now is None else now)])
        results.append(found)
    return results


def forks(device):
    """Whether attention has drawn from its tracker, without and with sequence parallelism."""
    heads = torch.randn(16, 2, HEADS // dist.get_world_size(), 16, device=device).bfloat16()
    found = []
    for sequence in (False, True):
        tracker = te.distributed.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 7)
        with tracker.fork():
            first = torch.rand(4, device=device)
        tracker.reset()
        tracker.add("model-parallel-rng", 7)
        attention = te.DotProductAttention(
            HEADS, 16, attention_dropout=0.5, sequence_parallel=sequence, tp_group=dist.group.WORLD,
            get_rng_state_tracker=lambda tracker=tracker: tracker,
        )  # fmt: skip
        attention(heads, heads, heads)
        with tracker.fork():
            found.append(not torch.equal(first, torch.rand(4, device=device)))
    return found


def unshared(device):
    """Attributes of a weight of experts, whose program has divided the features itself.

    Rank 0 alone runs the layer: it would wait for the others in any collective.
    """
    layer = te.Linear(32, 48, tp_size=1, tp_group=None, parallel_mode=None, device=device)
    if dist.get_rank() == 0:
        layer(torch.randn(32, 32, device=device, requires_grad=True)).sum().backward()
        assert layer.weight.grad is not None
    return [layer.weight.tensor_model_parallel, layer.weight.partition_dim, layer.tp_size]


def refusals(device):
    """Errors by what has raised them."""
    ranks, found = dist.get_world_size(), {}

    def note(name, function):
        try:
            function()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"

    world, x = dist.group.WORLD, torch.ones(ranks * 16, HIDDEN, device=device)
    common = {"dtype": torch.float32}
    with torch.device(device):
        late = make("column", ranks, None, **common)
        note("no group", lambda: late(x))
        note("no size", lambda: te.Linear(8, ranks * 8 + 1, tp_group=world, parallel_mode="column"))
        sizes = {"b": ranks + 1, "a": ranks - 1}  # together a multiple
        split = {"parameters_split": sizes, "parallel_mode": "column", "tp_group": world}
        note("split", lambda: te.Linear(8, 2 * ranks, **split))
        note("another size", lambda: te.Linear(8, 8, tp_group=world, tp_size=ranks + 1))
        how = {"parallel_mode": "row", "tp_group": world, "symmetric_ar_type": "one_shot"}
        note("symmetric", lambda: te.Linear(8 * ranks, 8, **how))
        one = te.Linear(8, 8)
        note("made for one", lambda: one.set_tensor_parallel_group(world))
        note("no mode", lambda: te.MultiheadAttention(64, 8, tp_group=world))
        bshd = {"set_parallel_mode": True, "sequence_parallel": True, "qkv_format": "bshd"}
        note("batch first", lambda: te.MultiheadAttention(64, 8, tp_group=world, **bshd))
        heads = {"set_parallel_mode": True, "num_gqa_groups": 1}
        note("groups", lambda: te.MultiheadAttention(64, 8, tp_group=world, **heads))
        row = make("row", ranks, world, sequence=True, **common)
        note("rows", lambda: row(torch.ones(ranks * 16 + 1, HIDDEN // ranks)))
        quantized = make("row", ranks, world, **common)
        part = torch.ones(16, HIDDEN // ranks)
        with te.autocast(recipe=RECIPES["current"]):
            note("fp8_output", lambda: quantized(part, fp8_output=True))
            column = make("column", ranks, world, **common)
            note("fp8_grad", lambda: column(x.requires_grad_(), fp8_grad=True))
    return found
