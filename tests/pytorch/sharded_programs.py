# SPDX-License-Identifier: Apache-2.0
"""What the processes of tests/pytorch/test_sharded_weights.py run: one rank's part of it."""

import contextlib
import gc
import inspect
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pytorch.distributed_programs import local_of, to_cpu
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch.torchside.tensor_kinds import is_quantized

RECIPES = {
    "delayed": DelayedScaling(amax_history_len=4),
    "delayed measured": DelayedScaling(amax_history_len=4, measure_first=True),
    "current": Float8CurrentScaling(),
    "tiles": Float8BlockScaling(),
    "lines": Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": MXFP8BlockScaling(),
    "mxfp8 squares": MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True),
    "nvfp4 lines": NVFP4BlockScaling(
        disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
}
SIZE = 512


def model_of(device, sizes=(SIZE, SIZE)):
    """Two modules with three weights."""
    hidden, ffn = sizes
    mlp, linear = te.LayerNormMLP(hidden, ffn, device=device), te.Linear(hidden, ffn, device=device)
    return torch.nn.Sequential(mlp, linear)


def mesh_of(device, replicas=1):
    """All ranks, in so many groups that have the same parts."""
    size = dist.get_world_size()
    if replicas == 1:
        return dist.init_device_mesh(device, (size,))
    shape = (replicas, size // replicas)
    return dist.init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))


def sharded(device, recipe, mesh, weights=None, sizes=(SIZE, SIZE), **options):
    """Make a model on the meta device, shard it, and give it its values."""
    with te.quantized_model_init(recipe=recipe):
        model = model_of("meta", sizes)
    for module in model:
        fully_shard(module, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for module in model:
        module.reset_parameters()
    if weights is not None:
        state = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, dict(weights), options=state)
    return model


def replicated(device, recipe, weights, sizes=(SIZE, SIZE)):
    """The same model on each rank, under DDP."""
    with te.quantized_model_init(recipe=recipe):
        model = DistributedDataParallel(model_of(device, sizes))
    model.module.load_state_dict(weights)  # DDP has broadcast values, which were cast twice
    return model


class Gathers(contextlib.ExitStack):
    """Numbers of bytes that this rank sends to each all-gather."""

    def __enter__(self):
        self.sent = []
        for name in ("all_gather_into_tensor", "all_gather_single"):
            known = getattr(dist, name, None)
            if known is not None:
                self.enter_context(mock.patch.object(dist, name, self._counting(known)))
        return self

    def _counting(self, known):
        def gather(output, given, *more, **options):
            self.sent.append(given.numel() * given.itemsize)
            return known(output, given, *more, **options)

        return gather


def steps(model, recipe, batches, optimizer, device):
    """Losses of training steps on the batches of this rank."""
    losses = []
    for batch in batches:
        with te.autocast(recipe=recipe):
            out = model(batch[dist.get_rank()].to(device))
        loss = out.square().mean() * 8
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(to_cpu(loss))
    return losses


def _values(model):
    """Whole parameters in high precision."""
    found = {}
    for name, p in model.named_parameters():
        value = local_of(p).detach()
        value = value.dequantize() if is_quantized(value) else value
        if local_of(p) is not p:
            value = torch.distributed.tensor.DTensor.from_local(
                value, p.device_mesh, p.placements, shape=p.size(), stride=p.stride()
            ).full_tensor()
        found[name.removeprefix("module.")] = value.cpu()
    return found


def trained(device, name, weights, batches, how):
    """Train under DDP ("ddp"), or FSDP2: (replicas, reshard_after_forward).

    Returns losses, parameters, and bytes of weights in each gather of a step, as a part of those
    in bf16; None under DDP.
    """
    recipe = RECIPES[name]
    if how == "ddp":
        model, shares = replicated(device, recipe, weights), None
    else:
        replicas, reshard = how
        mesh = mesh_of(device, replicas)
        model = sharded(device, recipe, mesh, weights, reshard_after_forward=reshard)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    with Gathers() as gathers:
        losses = steps(model, recipe, batches, optimizer, device)
    if how != "ddp":
        assert all(is_quantized(local_of(p)) for p in model.parameters() if p.dim() == 2)
        others = sum(local_of(p).numel() * 4 for p in model.parameters() if p.dim() == 1)
        wide = sum(local_of(p).numel() * 2 for p in model.parameters() if p.dim() == 2)
        times = len(batches) * (2 if how[1] else 1)  # the forward's and the backward's
        shares = (sum(gathers.sent) / times - others) / wide
    return losses, _values(model), shares


def kept_codes(device, name, x):
    """Number of tensors of the codes of a whole weight after a forward and after a backward."""
    recipe = RECIPES[name]
    model = sharded(device, recipe, mesh_of(device))
    seen, kept = [], []
    model[1].register_forward_hook(
        lambda module, given, out: seen.append(module.weight), prepend=True
    )
    for _ in range(2):
        with te.autocast(recipe=recipe):
            out = model(x.to(device))
        bytes_of = SIZE * SIZE // (2 if "nv" in name else 1)
        kept.append(_codes(bytes_of, out.grad_fn))
        assert is_quantized(seen.pop())
        out.square().mean().backward()
        kept.append(_codes(bytes_of))
    return kept


def _codes(count, node=None):
    """Tensors of so many codes with memory: objects, and what a graph of autograd has saved."""
    gc.collect()
    found, nodes = [o for o in gc.get_objects() if type(o) is torch.Tensor], [node]
    while nodes:
        node = nodes.pop()
        if node is not None:
            found += [t for t in getattr(node, "saved_tensors", ()) if t is not None]
            nodes += [child for child, _ in node.next_functions]
    kinds = (torch.uint8, torch.float8_e4m3fn)
    found = (t for t in found if t.dtype in kinds and t.numel() == count)
    return sum(t.untyped_storage().nbytes() > 0 for t in found)


def hooks(device, name):
    """Call the hooks of a part as torch may: by both signatures, and later calls into `out`."""
    recipe, mesh = RECIPES[name], mesh_of(device)
    model = sharded(device, recipe, mesh)
    part = local_of(model[1].weight)
    short = part.fsdp_pre_all_gather(mesh)
    full = part.fsdp_pre_all_gather(mesh, (SIZE, SIZE), (SIZE, 1), model[1], None)
    pairs = zip(short[0], full[0], strict=True)
    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)
    size = mesh.size()
    outputs = tuple(t.new_empty(size * t.shape[0], *t.shape[1:]) for t in full[0])
    arrived = {t.untyped_storage().data_ptr() for t in outputs}
    for output, given in zip(outputs, full[0], strict=True):
        dist.all_gather_into_tensor(output, given.contiguous())
    whole, inner = part.fsdp_post_all_gather(outputs, full[1], torch.bfloat16)
    before = {id(t): (t.data_ptr(), t._version) for t in whole.get_data_tensors() if t is not None}
    values = whole.dequantize()
    alias = torch.nn.Parameter(whole)
    assert part.fsdp_post_all_gather(outputs, full[1], torch.bfloat16, out=alias) is None
    after = {id(t): (t.data_ptr(), t._version) for t in alias.get_data_tensors() if t is not None}
    exact = torch.equal(alias.dequantize(), values) and before == after
    buffers = {t.untyped_storage().data_ptr() for t in inner}
    mine = {t.untyped_storage().data_ptr() for t in part.get_data_tensors() if t is not None}
    owned = {p for p, _ in before.values()}
    places = {t.untyped_storage().data_ptr() for t in whole.get_data_tensors() if t is not None}
    assert owned and places <= arrived | buffers | mine and not arrived & buffers
    found = same, exact, whole.dtype, to_cpu(values), _values(model)["1.weight"]
    given = inspect.signature(part.fsdp_pre_all_gather).parameters
    assert len(given) == 5  # FSDP2 goes by that
    return *found, _sent_later(part, mesh)


def _sent_later(part, mesh):
    """Whether what is gathered is of the part as it is: rewritten, and over other memory."""
    fresh = torch.randn(part.shape, device=part.device)
    alike = []
    for change in (part.copy_, lambda values: setattr(part, "data", part._caster()(values))):
        with torch.no_grad():
            change(fresh)
        kept = part.fsdp_pre_all_gather(mesh, (SIZE, SIZE))[0]
        made = part.detach().fsdp_pre_all_gather(mesh, (SIZE, SIZE))[0]
        pairs = zip(kept, made, strict=True)
        alike += [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs]
        alike.append(kept[0].data_ptr() == made[0].data_ptr())
        fresh = fresh.flip(0)
    return alike


def written_by_pieces(device, name, values):
    """Write a rank's part of a weight at once and by pieces, of which each rank makes others.

    For values in high precision, all and some of them, and for codes: data of both ways. Numbers
    of all-reduces of the first and of the last.
    """
    model, rank = sharded(device, RECIPES[name], mesh_of(device)), dist.get_rank()
    part, mine = local_of(model[1].weight), values[rank].to(device)
    again = torch.randn(3, SIZE, device=device)
    found, counts = [], []
    with torch.no_grad():
        part.copy_(mine)
        kept = part.detach().clone()
        wanted = _data_of(part)
        for given, cut in ((mine, _pieces), (kept, _blocks)):
            part.copy_(again[:1].expand(part.shape))
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
                for piece, values_of_piece in zip(cut(part), cut(given), strict=True):
                    piece.copy_(values_of_piece)
            found.append((_data_of(part), wanted))
            counts.append(reduced.call_count)
        part[5:7].copy_(4 * again[1:])
        some = part.dequantize()
        whole = kept.dequantize()
        whole[5:7] = 4 * again[1:]
        part.copy_(whole)
        found.append((to_cpu(some), to_cpu(part.dequantize())))
    return found, counts


def _pieces(part):
    """Pieces of a matrix: of rows, a number of times that differs among ranks, and columns."""
    return [p for rows in part.chunk(dist.get_rank() + 2) for p in rows.split(200, 1)]


def _blocks(part):
    """Rows of a matrix in multiples of those that any format has in a block."""
    return part.split(128)


def _data_of(part):
    return [to_cpu(t) for t in part.get_data_tensors() if t is not None]


def uneven(device, name, weights, batches, rows):
    """Train modules some of whose rows ranks do not share evenly, under FSDP2 and DDP.

    Losses of both, whether weights are quantized, and the parameters of both.
    """
    recipe, sizes, found = RECIPES[name], (64, rows), []
    under_fsdp = sharded(device, recipe, mesh_of(device), weights, sizes)
    for model in (under_fsdp, replicated(device, recipe, weights, sizes)):
        optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
        kinds = [is_quantized(local_of(p)) for p in model.parameters() if p.dim() == 2]
        found.append((steps(model, recipe, batches, optimizer, device), kinds, _values(model)))
    (mine, kinds, values), (wanted, _, of_ddp) = found
    return mine, wanted, kinds, values, of_ddp


def reductions(device, name, batches):
    """Numbers of all-reduces of each step of the optimizer, and of torch's, which writes twice."""
    recipe, found = RECIPES[name], []
    model = sharded(device, recipe, mesh_of(device), sizes=(64, 62))
    ours = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    for optimizer in (ours, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)):
        for batch in batches:
            with te.autocast(recipe=recipe):
                out = model(batch[dist.get_rank()].to(device))
            out.square().mean().backward()
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
                optimizer.step()
            optimizer.zero_grad()
            found.append(reduced.call_count)
    return found


def preserved(device, batches):
    """Masters that begin with the first values in high precision, and torch's optimizers."""
    recipe = RECIPES["current"]
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        model = model_of("meta", (64, 64))
    fully_shard(model, mesh=mesh_of(device))
    for module in model:
        module.reset_parameters()
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    found = []
    for p in model.parameters():
        if p.dim() == 2:
            optimizer.initialize_state(p)
            first = p.get_high_precision_init_val().to(device).float()
            optimizer.set_scaled_state(p, "master_param", first)
            p.clear_high_precision_init_val()
            found.append((to_cpu(optimizer.get_unscaled_state(p, "master_param")), to_cpu(first)))
            assert p.get_high_precision_init_val() is None
    steps(model, recipe, batches, optimizer, device)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = steps(model, recipe, batches, plain, device)
    scales = [local_of(p)._scales for p in model.parameters() if p.dim() == 2]
    return found, losses, to_cpu(scales)


def resaved(device, name, weights, batches, folder, layouts):
    """Train over a mesh, save, load over another one, and go on: both ways' losses and values."""
    recipe = RECIPES[name]
    model = sharded(device, recipe, mesh_of(device, layouts[0]), weights)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
    steps(model, recipe, batches[:2], optimizer, device)
    with te.autocast(recipe=recipe):
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }
    dcp.save(state, checkpoint_id=folder)
    before = _values(model)
    wanted = steps(model, recipe, batches[2:], optimizer, device)
    te.reset()
    other = sharded(device, recipe, mesh_of(device, layouts[1]))
    optimizer = te.optimizers.FusedAdam(other.parameters(), lr=1e-2, master_weights=True)
    with te.autocast(recipe=recipe):
        state = {
            "model": get_model_state_dict(other),
            "optimizer": get_optimizer_state_dict(other, optimizer),
        }
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, optimizer, state["optimizer"])
    loaded = _values(other)
    return before, loaded, wanted, steps(other, recipe, batches[2:], optimizer, device)


def unshared_scales(device, recipe, apart):
    """Call a model whose ranks share weights and no amaxes: the message."""
    model = sharded(device, recipe, mesh_of(device), sizes=(64, 64))
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    group = groups[dist.get_rank()] if apart else None
    try:
        with te.autocast(recipe=recipe, amax_reduction_group=group):
            model(torch.randn(8, 64, device=device))
    except NotImplementedError as error:
        return str(error)
    return None


def in_buckets(device, batches):
    """Gradients of DDP, and those of a program whose buckets have the weights' ``main_grad``."""
    plain, fused = (
        torch.nn.Sequential(
            te.LayerNormMLP(64, 96, device=device, fuse_wgrad_accumulation=fuses),
            te.Linear(64, 64, device=device, fuse_wgrad_accumulation=fuses),
        )
        for fuses in (False, True)
    )
    wrapped = DistributedDataParallel(plain)  # which gives all ranks the values of the first
    fused.load_state_dict(plain.state_dict())
    bucket = torch.zeros(sum(p.numel() for p in fused.parameters()), device=device)
    parts = bucket.split([p.numel() for p in fused.parameters()])
    waited = set()

    def ready(parameter):
        if not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        waited.discard(parameter)
        if not waited:
            dist.all_reduce(bucket)

    for parameter, part in zip(fused.parameters(), parts, strict=True):
        parameter.main_grad = part.view(parameter.shape)
        parameter.register_post_accumulate_grad_hook(ready)
    for number, batch in enumerate(batches):
        x, is_last = batch[dist.get_rank()].to(device), number == len(batches) - 1
        waited = set(fused.parameters()) if is_last else {None}  # something that never comes
        for parameter in fused.parameters():
            parameter.grad_added_to_main_grad = False
        with contextlib.nullcontext() if is_last else wrapped.no_sync():
            wrapped(x).square().mean().backward()
        fused(x).square().mean().backward()
    bucket /= dist.get_world_size()
    pairs = zip(plain.parameters(), fused.parameters(), strict=True)
    return [(to_cpu(p.grad), to_cpu(q.main_grad)) for p, q in pairs]


def refused(device):
    """Train with main gradients under FSDP2: the message."""
    model = torch.nn.Sequential(te.Linear(32, 32, fuse_wgrad_accumulation=True, device=device))
    fully_shard(model, mesh=mesh_of(device))
    try:
        model(torch.randn(8, 32, device=device))
    except RuntimeError as error:
        return str(error)
    return None
