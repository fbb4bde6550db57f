# SPDX-License-Identifier: Apache-2.0
"""What the processes of tests/pytorch/test_distributed.py run: one rank's part of it."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pytorch.helpers import RECIPES, states_of
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized, local_of

HIDDEN, BATCH = 32, 4


def _transformer(fused):
    def make(device):
        return te.TransformerLayer(
            HIDDEN, 64, 4, fuse_qkv_params=fused, hidden_dropout=0.0, attention_dropout=0.0,
            device=device,
        )  # fmt: skip

    return make


def _split(kind):
    return lambda device: kind(HIDDEN, HIDDEN, parameters_split=("a", "b"), device=device)


BLOCKS = {
    "torch": lambda device: torch.nn.Linear(HIDDEN, HIDDEN, device=device),
    "Linear": lambda device: te.Linear(HIDDEN, HIDDEN, device=device),
    "Linear-split": _split(te.Linear),
    "LayerNormLinear-split": _split(te.LayerNormLinear),
    "LayerNormMLP": lambda device: te.LayerNormMLP(HIDDEN, 64, device=device),
    "TransformerLayer": _transformer(fused=False),
    "TransformerLayer-fused": _transformer(fused=True),
    "wide-torch": lambda device: torch.nn.Linear(4096, 4096, device=device),
    "wide": lambda device: te.Linear(4096, 4096, parameters_split=("a", "b"), device=device),
}


def make_model(kind, device):
    """Make two blocks of a kind."""
    return torch.nn.Sequential(*(BLOCKS[kind](device) for _ in range(2)))


def region(use, group=None):
    """Return the region of a recipe by name; of none for None."""
    recipe = RECIPES[use]() if use else None
    return te.autocast(enabled=use is not None, recipe=recipe, amax_reduction_group=group)


def part(batch):
    """Return this rank's share of a batch [sequence, batch, hidden], on its device."""
    size = batch.shape[1] // dist.get_world_size()
    return batch[:, dist.get_rank() * size :][:, :size].clone()


def to_cpu(value):
    """Copy tensors, whole ones, to the CPU."""
    if isinstance(value, dict):
        return {key: to_cpu(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_cpu(v) for v in value]
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        return value.detach().cpu().clone()
    return value


def run_steps(model, use, batches, every=1, flags=False, rate=0.0, wrap=None, group=None):
    """Train; a batch is (input, gradient of the output), `every` of them make a step.

    Returns the outputs, the gradients of each step, the parameters and the scaling states.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    outputs, gradients = [], []
    for number, (x, grad) in enumerate(batches):
        if number % every == 0:
            optimizer.zero_grad()
        options = {"is_first_microbatch": number % every == 0} if flags else {}
        with region(use, group):
            if wrap is None and not flags:
                out = model(x)
            else:  # blocks one by one; a reentrant checkpoint asks for an input with a gradient
                out = x if wrap is None else x.requires_grad_()
                for block in model:
                    out = (block if wrap is None else wrap(block))(out, **options)
        out.backward(grad)
        outputs.append(out)
        if (number + 1) % every == 0:
            gradients.append({n: to_cpu(p.grad) for n, p in model.named_parameters()})
            optimizer.step()
    return {
        "outputs": to_cpu(outputs),
        "gradients": gradients,
        "parameters": {n: to_cpu(p) for n, p in model.named_parameters()},
        "states": to_cpu(states_of(model)),
    }


def _batches(batches, device, share=True):
    share = part if share else (lambda t: t)
    return [tuple(share(t).to(device) for t in batch) for batch in batches]


def _restored(kind, device, weights):
    model = make_model(kind, device)
    if weights is not None:
        model.load_state_dict(weights)
    return model


# ---- programs ------------------------------------------------------------------------------------


def ddp(device, kind, use, weights, batches, every=1, flags=False, rate=0.0):
    """`DistributedDataParallel` over all ranks; the names are those of the module."""
    model = _restored(kind, device, weights)
    steps = (_batches(batches, device), every, flags, rate)
    result = run_steps(DistributedDataParallel(model), use, *steps)
    for key in ("parameters", "gradients"):
        dicts = result[key] if key == "gradients" else [result[key]]
        dicts = [{n.removeprefix("module."): t for n, t in d.items()} for d in dicts]
        result[key] = dicts if key == "gradients" else dicts[0]
    return result


def shard(model, device, alone=False, **options):
    """`fully_shard` each block and the whole, over all ranks or over each alone."""
    if alone:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        mesh = DeviceMesh.from_group(groups[dist.get_rank()], device)
    else:
        mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return mesh


def _checkpointed(how):
    if how == "ours":
        return lambda block: lambda x, **options: te.checkpoint(block, x, **options)
    if how == "torch":
        return lambda block: lambda x, **o: torch_checkpoint(block, x, use_reentrant=False, **o)
    return None


def fsdp2(device, kind, use, weights, batches, reshard, half, recompute, every, flags, rate):
    """FSDP2 over all ranks."""
    model = _restored(kind, device, weights)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if half else None)
    shard(model, device, reshard_after_forward=reshard, mp_policy=policy)
    inputs = _batches(batches, device)
    if half:
        inputs = [tuple(t.bfloat16() for t in batch) for batch in inputs]
    return run_steps(model, use, inputs, every, flags, rate, wrap=_checkpointed(recompute))


# ---- norms with a policy of their own ------------------------------------------------------------


class Normalized(torch.nn.Module):
    """A norm and an attention with norms of its own, beside what passes them by."""

    def __init__(self, kind, device):
        super().__init__()
        self.norm = {"LayerNorm": te.LayerNorm, "RMSNorm": te.RMSNorm}[kind](HIDDEN, device=device)
        self.attention = te.MultiheadAttention(
            HIDDEN, 4, qk_norm_type=kind, attention_dropout=0.0, device=device
        )

    def forward(self, x):
        return x + self.attention(self.norm(x).to(x.dtype))

    def norms(self):
        """Every norm that is a module."""
        return self.norm, self.attention.q_norm, self.attention.k_norm


NORM_POLICIES = {
    "fp32 in bf16": (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16),
        MixedPrecisionPolicy(param_dtype=torch.float32, cast_forward_inputs=False),
    ),
    "bf16 in fp32": (
        MixedPrecisionPolicy(param_dtype=torch.float32),
        MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
    ),
}
"""Of the model, and of its norms alone."""


def normalized(kind, device, weights):
    """Two blocks, with these weights."""
    model = torch.nn.Sequential(*(Normalized(kind, device) for _ in range(2)))
    if weights is not None:
        model.load_state_dict(weights)
    return model


def fsdp2_of_norms(device, kind, policies, use, weights, batches):
    """Norms sharded by themselves: results, and (input, weight, output) dtypes of norms."""
    of_model, of_norms = NORM_POLICIES[policies]
    model, seen = normalized(kind, device, weights), set()
    mesh = dist.init_device_mesh(device, (dist.get_world_size(),))
    for block in model:
        for norm in block.norms():
            fully_shard(norm, mesh=mesh, mp_policy=of_norms)
            norm.register_forward_hook(  # before FSDP2 takes the whole weight away
                lambda norm, given, out: seen.add((given[0].dtype, norm.weight.dtype, out.dtype)),
                prepend=True,
            )
    fully_shard(model, mesh=mesh, mp_policy=of_model)
    inputs = [tuple(t.to(of_model.param_dtype) for t in b) for b in _batches(batches, device)]
    return run_steps(model, use, inputs), seen


def fsdp2_from_meta(device, kind, how):
    """Parameters made after `fully_shard`: (all on the device, mean square of each weight)."""
    model = make_model(kind, "meta")
    shard(model, device)
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    if how == "to_empty":
        model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    x = torch.randn(8, BATCH, HIDDEN, device=device)
    model(x).sum().backward()
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.device.type == device and parameter.grad is not None
        found[name] = to_cpu(parameter)
    return found


def _current(role):
    """Quantizers of a custom recipe."""
    del role
    return te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cpu"))


QUANTIZED = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "tiles": Float8BlockScaling(),
    "rows": Float8RowScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "custom": CustomRecipe(qfactory=_current),
}
ORDERS = {  # of a model that is made on the meta device, or on a real one: what is done to it
    "example": ("meta", "shard", "reset"),
    "loaded": ("meta", "shard", "reset", "load"),
    "twice": ("meta", "shard", "reset", "reset"),
    "real": ("real", "shard", "reset"),
    "late": ("meta", "reset", "shard"),
    "late, again": ("meta", "reset", "shard", "reset", "load"),
    "loaded early": ("meta", "reset", "load whole", "shard"),
}


def quantized_model(device):
    """Two modules with three weights."""
    mlp, linear = te.LayerNormMLP(64, 128, device=device), te.Linear(64, 64, device=device)
    return torch.nn.Sequential(mlp, linear)


def _act(action, model, device, weights):
    """One of the steps of `ORDERS`."""
    if action == "shard":
        shard(model, device)
    elif action == "reset":
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    elif action == "load whole":
        model.load_state_dict({key: value.to(device) for key, value in weights.items()})
    else:
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, dict(weights), options=options)


def quantized_shards(device, name, order, weights, batches):
    """Train quantized weights under FSDP2; each step of `order` in its turn.

    Returns of each weight the class and the values of this rank's part before training, the output
    of the first forward of each step, these values after it, and the scale of parts that have one
    before training.
    """
    recipe = QUANTIZED[name]
    start, *actions = ORDERS[order]
    with te.quantized_model_init(recipe=recipe):
        model = quantized_model("meta" if start == "meta" else device)
    for action in actions:
        _act(action, model, device, weights)

    def parts():
        found = {key: local_of(p) for key, p in model.named_parameters() if p.dim() == 2}
        return {key: to_cpu(p.dequantize() if is_quantized(p) else p) for key, p in found.items()}

    kinds = {key: type(local_of(p)).__name__ for key, p in model.named_parameters() if p.dim() == 2}
    of_parts = {key: getattr(local_of(p), "_scales", None) for key, p in model.named_parameters()}
    scales = {key: to_cpu(scale) for key, scale in of_parts.items() if scale is not None}
    before, outputs = parts(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for x in batches:
        with te.autocast(recipe=recipe):
            out = model(x.to(device))
        outputs.append(to_cpu(out))
        out.backward(torch.ones_like(out))  # large: the steps are to change what is quantized
        optimizer.step()
        optimizer.zero_grad()
    return kinds, before, outputs, parts(), scales


OPTIMIZERS = {
    "adam": lambda params: te.optimizers.FusedAdam(params, lr=0.05, master_weights=True),
    "adam without masters": lambda params: te.optimizers.FusedAdam(params, lr=0.05),
    "sgd": lambda params: te.optimizers.FusedSGD(params, lr=0.05, momentum=0.5),
}


def optimized_shards(device, name, kind, batches):
    """Train quantized weights under FSDP2 by an optimizer of this package.

    Beside it steps the same optimizer over plain copies of this rank's parts, which are quantized
    after each step. Returns both, by name of the weight.
    """
    recipe = QUANTIZED[name]
    with te.quantized_model_init(recipe=recipe):
        model = quantized_model("meta")
    _act("shard", model, device, None)
    _act("reset", model, device, None)
    sharded = dict(model.named_parameters())
    copies = {key: local_of(p).detach().clone() for key, p in sharded.items()}
    plain = {key: _wide(local).requires_grad_() for key, local in copies.items()}
    ours, theirs = OPTIMIZERS[kind](sharded.values()), OPTIMIZERS[kind](plain.values())
    for x in batches:
        with te.autocast(recipe=recipe):
            out = model(x.to(device))
        out.backward(torch.ones_like(out))
        for key, p in sharded.items():
            plain[key].grad = local_of(p.grad).clone()
        ours.step()
        theirs.step()
        ours.zero_grad()
        with torch.no_grad():
            for key, copy in copies.items():
                copy.copy_(plain[key])
                if kind != "adam":  # the parameter is all that is kept
                    plain[key].copy_(_wide(copy))
    found = {key: to_cpu(_wide(local_of(p).detach())) for key, p in sharded.items()}
    return found, {key: to_cpu(_wide(copy)) for key, copy in copies.items()}


def quantized_ddp(device, name, batches):
    """Train quantized weights under DDP, which ranks make differently: their values, and how many.

    The values are those before training and after it.
    """
    recipe = QUANTIZED[name]
    torch.manual_seed(dist.get_rank())
    with te.quantized_model_init(recipe=recipe):
        model = quantized_model(device)
    wrapped = DistributedDataParallel(model)

    def values():
        return {key: to_cpu(_wide(p.detach())) for key, p in model.named_parameters()}

    before = values()
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=0.05, master_weights=True)
    for x in batches:
        with te.autocast(recipe=recipe):
            out = wrapped((x * (1 + dist.get_rank())).to(device))
        out.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return before, values(), sum(map(is_quantized, model.parameters()))


def _wide(tensor):
    return (tensor.dequantize() if is_quantized(tensor) else tensor).float().clone()


def uneven_shards(device):
    """Quantize a weight whose rows the ranks can not share evenly: the message of the error."""
    with te.quantized_model_init(recipe=Float8BlockScaling()):
        model = torch.nn.Sequential(te.Linear(64, 63, device="meta"))
    shard(model, device)
    try:
        model[0].reset_parameters()
    except NotImplementedError as error:
        return str(error)
    return None


def in_place(device, kind):
    """Change a weight between forward and backward, unsharded: the message of the error."""
    model = make_model(kind, device)
    shard(model, device, alone=True, reshard_after_forward=False)
    out = model(torch.randn(8, BATCH, HIDDEN, device=device))
    with torch.no_grad():
        # The first block saves no weight: its input has no gradient.
        next(p for p in model[1].parameters() if p.dim() == 2).mul_(2)
    try:
        out.sum().backward()
    except RuntimeError as error:
        return str(error)
    return None


def memory_after_forward(device, kind, use):
    """Bytes that a forward of FSDP2 leaves, beside those of the weights."""
    model = make_model(kind, device)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    x = torch.randn(1, BATCH, model[0].in_features, device=device)
    shard(model, device)
    for _ in range(2):
        with region(use):
            model(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with region(use):
        out = model(x)
    torch.cuda.synchronize()
    after = torch.cuda.memory_allocated()
    out.sum().backward()
    return after - before, weights


def save(device, kind, use, wrapper, weights, batches, folder):
    """Train under a wrapper, and save with torch.distributed.checkpoint."""
    model = _restored(kind, device, weights)
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        shard(model, device)
    run_steps(model, use, _batches(batches, device), rate=1e-3)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    return _content(model)


def _content(model):
    parameters = [p for _, p in sorted(model.named_parameters())]
    return {"states": to_cpu(states_of(model)), "parameters": to_cpu(parameters)}


def load(device, kind, use, wrapper, folder, how):
    """Load into a fresh model: in place ("place"), or whole from rank 0 ("rank 0") or from all.

    Strictly, but for DDP without scales: torch asks for them under a wrapper.
    """
    strict = use is not None or wrapper != "ddp"
    model = make_model(kind, device)
    wrapped = DistributedDataParallel(model) if wrapper == "ddp" else model
    if wrapper == "fsdp2":
        shard(model, device)
    with region(use):
        if how == "place":
            state = get_model_state_dict(wrapped)
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(wrapped, state, options=StateDictOptions(strict=strict))
        else:
            source = make_model(kind, device)
            state = source.state_dict()
            dcp.load(state, checkpoint_id=folder)
            from_first = how == "rank 0"
            state = state if dist.get_rank() == 0 or not from_first else {}
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=from_first, strict=strict
            )
            set_model_state_dict(wrapped, state, options=options)
    return _content(model)
