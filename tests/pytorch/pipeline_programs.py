# SPDX-License-Identifier: Apache-2.0
"""What the processes of tests/pytorch/test_pipelines.py run: stages of a pipeline."""

import os
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
from pytorch.distributed_programs import to_cpu
from pytorch.helpers import states_of
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

WIDTH, ROWS = 32, 16
STAGES = {
    "equal": [["Linear", "Linear"]] * 2,
    "unequal": [["Linear", "Linear"], ["Linear", "LayerNormMLP"]],
    "longer": [["Linear"], ["Linear", "Linear"]],
}
MAKERS = {
    "Linear": lambda device: te.Linear(WIDTH, WIDTH, device=device),
    "LayerNormMLP": lambda device: te.LayerNormMLP(WIDTH, 2 * WIDTH, device=device),
}


class Stage(torch.nn.Module):
    """Layers in a region of their own, which note the amaxes that they meet."""

    def __init__(self, kinds, device, recipe, group):
        super().__init__()
        self.layers = torch.nn.Sequential(*(MAKERS[kind](device) for kind in kinds))
        self.recipe, self.group = recipe, group
        self.inputs = [[] for _ in kinds]  # of each layer, one of each microbatch
        self.grads = [[] for _ in kinds]

    def forward(self, x):
        with te.autocast(recipe=self.recipe, amax_reduction_group=self.group):
            for number, layer in enumerate(self.layers):
                self.inputs[number].append(x.detach().abs().max().item())
                x = layer(x)
                if x.requires_grad:
                    x.register_hook(lambda grad, n=number: self._note(n, grad))
        return x

    def _note(self, number, grad):
        self.grads[number].append(grad.abs().max().item())


def _group(which):
    """The group that amaxes are reduced over: of all ranks, or of this one alone."""
    if which == "default":
        return None
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return alone[dist.get_rank()]


def _pipeline(stage, device, count):
    """A GPipe schedule of `count` microbatches, with sends and receives over a group of its own."""
    rank, size = dist.get_rank(), dist.get_world_size()
    like = torch.empty(ROWS, WIDTH, device=device, requires_grad=True)
    made = PipelineStage(
        stage, rank, size, torch.device(device, rank) if device == "cuda" else torch.device(device),
        input_args=(like,), output_args=(like,), group=dist.new_group(),
    )  # fmt: skip
    return ScheduleGPipe(made, count, loss_fn=lambda out, target: (out - target).square().mean())


def _step(schedule, x, target):
    if dist.get_rank() == 0:
        schedule.step(x)
    else:
        schedule.step(target=target, losses=[])


def gpipe(device, which, group, count, data, rates):
    """Train. Returns the amaxes of inputs and gradients of each layer, its state, the weights."""
    torch.manual_seed(dist.get_rank())
    recipe = DelayedScaling(amax_history_len=8)
    stage = Stage(STAGES[which][dist.get_rank()], device, recipe, _group(group))
    schedule = _pipeline(stage, device, count)
    optimizer = torch.optim.SGD(stage.parameters(), lr=rates)
    for x, target in data:
        _step(schedule, x.to(device), target.to(device))
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    states = to_cpu(states_of(stage))
    return stage.inputs, stage.grads, states


def refused_gpipe(device, which, count, data):
    """Train stages of other layers over the default group: the error of this rank."""
    try:
        gpipe(device, which, "default", count, data, 0.0)
    except Exception:  # of the pipeline, around ours
        return traceback.format_exc()
    return None


def _region(layer, recipe, group, device):
    with te.autocast(recipe=recipe, amax_reduction_group=group):
        return layer(torch.randn(ROWS, WIDTH, device=device, requires_grad=True))


def one_region_more(device):
    """Rank 0 has one region more before its backward: the error of this rank."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    recipe = DelayedScaling(amax_history_len=4)
    layer = te.Linear(WIDTH, WIDTH, device=device)
    try:
        out = _region(layer, recipe, group, device)
        if dist.get_rank() == 0:
            out = _region(layer, recipe, group, device)
        out.sum().backward()
        layer.get_extra_state()
        _region(layer, recipe, group, device).sum().backward()  # a GPU's digests have arrived
    except RuntimeError as error:
        return str(error)
    return None


def left_alone(device, checks):
    """Rank 0 has a region that nobody else has: the error of this rank.

    `checks`: ranks compare what they reduce before each reduction.
    """
    # Communicators of GPUs are made within that time too.
    group = dist.new_group(timeout=timedelta(seconds=2 if device == "cpu" else 10))
    recipe = DelayedScaling(amax_history_len=4)
    layer = te.Linear(WIDTH, WIDTH, device=device)
    os.environ["TE_CHECK_RANKS"] = str(int(checks))
    try:
        _region(layer, recipe, group, device)
        if dist.get_rank() == 0:
            _region(layer, recipe, group, device)
            layer.get_extra_state()
    except RuntimeError as error:
        return str(error)
    finally:
        del os.environ["TE_CHECK_RANKS"]
    return None


def later_layer(device):
    """A layer that one rank alone begins to use in the second step: the error of this rank."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    recipe = DelayedScaling(amax_history_len=4)
    layers = [te.Linear(WIDTH, WIDTH, device=device) for _ in range(2)]
    try:
        _region(layers[0], recipe, group, device)
        layers[0].get_extra_state()
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            x = torch.randn(ROWS, WIDTH, device=device)
            for layer in layers[: 1 + dist.get_rank()]:
                x = layer(x)
        layers[0].get_extra_state()
        _region(layers[0], recipe, group, device)  # a GPU's digests have arrived
    except RuntimeError as error:
        return str(error)
    return None


def read_early(device, how, data):
    """Read scales right behind the region that makes them: what is read, by rank.

    `data` are the inputs of each rank.
    """
    recipe = DelayedScaling(amax_history_len=4)
    layer = te.Linear(WIDTH, WIDTH, device=device)
    x = data[dist.get_rank()].to(device)
    with te.autocast(recipe=recipe):
        layer(x)
    if how == "state dict":
        return state_from(layer)
    if how == "fp8_meta":
        return to_cpu(layer.fp8_meta["scaling_fwd"].scale[0])
    if how == "copy":
        import copy

        return state_from(copy.deepcopy(layer))
    if how == "now":
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)
        return to_cpu(layer._slots.forward_scale[layer._slots.forward_slot])
    with te.autocast(recipe=recipe):  # how == "entry"
        return to_cpu(layer._slots.forward_scale[layer._slots.forward_slot])


def state_from(layer):
    """The scale of the input that a state dict has."""
    twin = te.Linear(WIDTH, WIDTH)
    twin.load_state_dict({k: v.cpu() for k, v in layer.state_dict().items()})
    return to_cpu(twin.fp8_meta["scaling_fwd"].scale[0])


def quantized_write(device, weights):
    """Write to a quantized weight behind the region: it is cast with the scale of all ranks."""
    recipe = DelayedScaling(amax_history_len=4)
    with te.quantized_model_init(recipe=recipe):
        layer = te.Linear(WIDTH, WIDTH, device=device, bias=False)
    with torch.no_grad():
        layer.weight.copy_(weights[dist.get_rank()].to(device))
    _region(layer, recipe, None, device)
    _region(layer, recipe, None, device)
    with torch.no_grad():  # its amax is recorded, and the scale is the one of the regions
        layer.weight.copy_(torch.ones(WIDTH, WIDTH, device=device))
    return to_cpu(layer.weight._scale_inv), to_cpu(layer.fp8_meta["scaling_fwd"].scale[1])


def capture_behind(device, data):
    """Capture a region while the reduction of the one before it is on its way, and replay it.

    `data` are two inputs of each rank. Returns the states of the layer, and of a twin that runs
    both in eager mode.
    """
    recipe = DelayedScaling(amax_history_len=4)
    inputs = [x.to(device) for x in data[dist.get_rank()]]
    states = []
    for captures in (True, False):
        torch.manual_seed(0)
        layer = te.Linear(WIDTH, WIDTH, device=device)
        static = torch.zeros_like(inputs[1])

        def run(x, layer=layer):
            with te.autocast(recipe=recipe):
                layer(x)

        run(inputs[0])
        run(inputs[0])  # the communicator of the first one is there
        if captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(static)
            static.copy_(inputs[1])
            graph.replay()
        else:
            run(inputs[1])
        states.append(states_of(torch.nn.Sequential(layer)))
    return to_cpu(states)


# ---- weight gradients that are put off -----------------------------------------------------------


class Delayed:
    """A stage whose layers leave their weight gradients to `backward_dw`, and its microbatches."""

    def __init__(self, number, device, group):
        torch.manual_seed(number)
        options = {"delay_wgrad_compute": True, "device": device}
        self.layers = torch.nn.Sequential(
            te.LayerNormMLP(WIDTH, 2 * WIDTH, **options), te.Linear(WIDTH, WIDTH, **options)
        )
        self.recipe, self.group = DelayedScaling(amax_history_len=4), group
        self.waiting, self.reduced = [], [0, 0]
        for n, layer in enumerate(self.layers):
            layer.register_wgrad_accumulation_and_reduce_hooks(lambda n=n: self._reduce(n))

    def _reduce(self, n):
        self.reduced[n] += 1

    def forward(self, x):
        x = x.detach().requires_grad_()
        with te.autocast(recipe=self.recipe, amax_reduction_group=self.group):
            out = self.layers(x)
        self.waiting.append((x, out))
        return out.detach()

    def backward(self, grad):
        x, out = self.waiting.pop(0)
        out.backward(grad)
        return x.grad

    def weight_gradients(self):
        for layer in self.layers:
            layer.backward_dw()

    def found(self):
        return [to_cpu(p.grad) for p in self.layers.parameters()], self.reduced


def loss_of(out, target):
    """A microbatch's loss, and the gradient of its output."""
    out = out.requires_grad_()
    loss = (out - target).square().mean()
    loss.backward()
    return to_cpu(loss.detach()), out.grad


def swap(given, like):
    """Send a tensor to the other stage while its own arrives; None: one of the two alone."""
    other = 1 - dist.get_rank()
    got = None if like is None else torch.empty_like(like)
    pairs = ((dist.isend, given), (dist.irecv, got))
    operations = [dist.P2POp(run, t, other) for run, t in pairs if t is not None]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return got


def one_f_one_b(device, data):
    """Two stages under 1F1B, weight gradients at the end: (losses of the last, what was found).

    `data` are the input and the target of each microbatch.
    """
    rank, losses = dist.get_rank(), []
    alone = [dist.new_group([each]) for each in range(2)]
    stage = Delayed(rank, device, alone[rank])
    like = torch.empty(ROWS, WIDTH, device=device)
    if rank == 0:
        swap(stage.forward(data[0][0].to(device)), None)
        for x, _ in data[1:]:  # two microbatches are in flight
            stage.backward(swap(stage.forward(x.to(device)), like))
        stage.backward(swap(None, like))
    else:
        x = swap(None, like)
        for number, (_, target) in enumerate(data):
            loss, grad = loss_of(stage.forward(x), target.to(device))
            losses.append(loss)
            x = swap(stage.backward(grad), like if number < len(data) - 1 else None)
    for _ in data:
        stage.weight_gradients()
    return losses, stage.found()


def one_process(device, data):
    """The same on this rank alone, microbatch by microbatch."""
    alone = [dist.new_group([each]) for each in range(2)][dist.get_rank()]
    stages, losses = [Delayed(number, device, alone) for number in range(2)], []
    for x, target in data:
        out = stages[1].forward(stages[0].forward(x.to(device)))
        loss, grad = loss_of(out, target.to(device))
        losses.append(loss)
        stages[0].backward(stages[1].backward(grad))
        for stage in stages:
            stage.weight_gradients()
    return losses, [stage.found() for stage in stages]
