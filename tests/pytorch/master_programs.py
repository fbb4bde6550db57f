# SPDX-License-Identifier: Apache-2.0
"""Sharded masters of the tests: what is sharded, how, and what each rank does with its slices."""

import copy
import math
import random
import threading

import torch
import torch.distributed as dist
from pytorch.module_cases import region
from pytorch.own_quantizers import Columns, Doubled
from pytorch.quantized_cases import E4M3, E5M2, FORMATS, WEIGHT_RECIPES, current, made

import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor import utils
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizedTensor

SQUARES = {
    "tiles": lambda **o: te.Float8BlockQuantizer(E4M3, **o),
    "tiles f32": lambda **o: te.Float8BlockQuantizer(
        E5M2, force_pow_2_scales=False, amax_epsilon=0.25, **o
    ),
    "mx squares": lambda **o: te.MXFP8Quantizer(E4M3, with_2d_quantization=True, margin=1, **o),
    "nv squares": lambda **o: te.NVFP4Quantizer(with_2d_quantization=True, **o),
    "nv squares 256": lambda **o: te.NVFP4Quantizer(
        with_2d_quantization=True, nvfp4_e4m3_max=256, **o
    ),
    "current": lambda **o: current(E5M2, force_pow_2_scales=True, **o),
}
"""Quantizers whose column-wise form is the row-wise one, turned."""
QUANTIZERS = {
    **FORMATS,
    **SQUARES,
    "nv squares 4over6": lambda **o: te.NVFP4Quantizer(
        with_2d_quantization=True, nvfp4_use_4over6=True, **o
    ),
    "identity": lambda **o: te.IdentityQuantizer(**o),
    "identity bf16": lambda **o: te.IdentityQuantizer(dtype=torch.bfloat16, **o),
    "hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.MXFP8Quantizer(E4M3),
        columnwise_quantizer=current(E5M2),
        columnwise_source="rowwise_dequantized",
    ),
    "hybrid original": lambda: te.HybridQuantizer(
        rowwise_quantizer=current(), columnwise_quantizer=te.NVFP4Quantizer(with_rht=True)
    ),
    "hybrid rows": lambda: te.HybridQuantizer(
        rowwise_quantizer=te.IdentityQuantizer(), columnwise_quantizer=te.Float8RowQuantizer(E4M3)
    ),
}
"""Quantizers of parameters."""
OWN = {
    "own current": lambda **o: Doubled(E4M3, "cpu", **o),
    "own tiles": lambda **o: Columns(E4M3, **o),
    "own hybrid": lambda: te.HybridQuantizer(
        rowwise_quantizer=Doubled(E4M3), columnwise_quantizer=te.MXFP8Quantizer(E4M3)
    ),
}
"""Of programs, whose tensors are of this library."""


class Case:
    """A parameter, its masters and its slices, as random as a seed makes them.

    Parameters
    ----------
    name : str
        Of `QUANTIZERS` or `OWN`.
    seed, ranks : int
        All ranks make the same case of the same seed.
    """

    def __init__(self, name, seed, ranks, device):
        rng, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
        columns = rng.choice([1, rng.randint(1, 40), rng.randint(1, 300), 16 * rng.randint(1, 18)])
        lines = [rng.choice([rng.randint(1, 9), rng.randint(1, 300)])]
        if rng.random() < 0.2:
            lines = [rng.randint(1, 5), rng.randint(1, 40)]
        self.shape = torch.Size((*lines, columns))
        self.dtype = rng.choice([torch.float32, torch.bfloat16, torch.float16])
        options = {}
        whole = "hybrid" in name or name.startswith("identity")
        if not whole and rng.random() < 0.3:
            options["columnwise"] = False
        self.quantizer = {**QUANTIZERS, **OWN}[name](**options)
        values = torch.randn(self.shape, generator=numbers)
        values *= torch.rand(columns, generator=numbers)
        values[..., rng.randrange(columns)] *= 2.0 ** rng.randint(-30, 14)
        flat = values.view(-1)
        flat[rng.randrange(flat.numel()) :][: rng.randint(0, 600)] = 0.0
        flat[rng.randrange(flat.numel())] = rng.choice([0.0, -0.0, math.nan, -math.nan, math.inf])
        self.masters = flat.to(device)
        self.is_fp4 = name.startswith("nv")
        self.bounds = self._bounds(rng, ranks)
        self.shards = rng.random() < 0.5  # write to shards, and not to the parameter
        self.pairs = self.shards and name.startswith("mx") and self.quantizer.columnwise_usage
        self.buffer = rng.random() < 0.5  # row-wise data lie in a buffer of the program
        self.drop = rng.random() < 0.5
        before = torch.randn(self.shape, generator=numbers).to(self.dtype).to(device)
        self.weight = torch.nn.Parameter(self.quantizer(before))

    def _bounds(self, rng, ranks):
        """Of the ranks; None for those that have no slice."""
        size, columns = self.shape.numel(), self.shape[-1]
        inner = [rng.choice([0, size, rng.randint(0, size)]) for _ in range(ranks - 1)]
        inner = [rng.choice([at, at // columns * columns]) for at in inner]
        if self.is_fp4:
            inner = [at - at % columns % 2 for at in inner]
        points = [0, *sorted(inner), size]
        pairs = list(zip(points, points[1:], strict=False))
        return [None if a == b and rng.random() < 0.5 else (a, b) for a, b in pairs]

    def expected(self):
        """What one process makes of all masters."""
        return self.quantizer(self.masters.view(self.shape).to(self.dtype))

    def mine(self, rank):
        """A rank's parameter, slice, start and shard."""
        weight = copy.deepcopy(self.weight)
        if self.buffer:
            data = row_data(weight)
            utils.replace_raw_data(weight, torch.empty(data.shape, dtype=data.dtype).to(data))
        bounds = self.bounds[rank]
        if bounds is None:
            return weight, None, None, None
        first, last = self.place(bounds[0]), self.place(bounds[1])
        data = row_data(weight)
        shard = data.new_zeros(last - first) if self.shards else None
        if self.pairs:  # as megatron-fsdp gives them, whose parameters have no memory meanwhile
            shard = [shard, torch.zeros_like(shard)]
            weight._rowwise_data.untyped_storage().resize_(0)
            weight._columnwise_data.untyped_storage().resize_(0)
        return weight, self.masters[slice(*bounds)].clone(), bounds[0], shard

    def place(self, element):
        """Where an element lies among the row-wise data."""
        if not self.is_fp4:
            return element
        row, column = divmod(element, self.shape[-1])
        return row * (-(-self.shape[-1] // 16) * 8) + column // 2

    def slice_of_data(self, rank, weight, shard):
        """Row-wise data of the slice, on the CPU, and where they lie; None where there is none."""
        if self.bounds[rank] is None:
            return None
        first, last = (self.place(element) for element in self.bounds[rank])
        if self.pairs:
            return first, last, *(each.cpu() for each in shard)
        found = row_data(weight).reshape(-1)[first:last] if shard is None else shard
        return first, last, found.cpu()

    def gather(self, weight, slices):
        """Write the data of all ranks, as a program's all-gather does."""
        forms = [row_data(weight)]
        if self.pairs:
            forms.append(weight._columnwise_data)
        for at, form in enumerate(forms):
            if form.untyped_storage().size() == 0:
                ends = (n * by for n, by in zip(form.shape, form.stride(), strict=True))
                form.untyped_storage().resize_((form.storage_offset() + max(ends)) * form.itemsize)
            whole = torch.zeros(form.numel(), dtype=form.dtype, device=form.device)
            for first, last, *data in filter(None, slices):
                whole[first:last] = data[at].to(whole.device)
            form.copy_(whole.view(form.shape))


def row_data(weight):
    """The row-wise data."""
    weight = getattr(weight, "_rowwise_storage", weight)
    names = ("_data", "_rowwise_data", "_hp_data")
    return next(getattr(weight, name) for name in names if hasattr(weight, name))


def update(cases, rank, group, gather):
    """Masters of all cases to parameters, as a sharded optimizer does it; return these.

    `gather` gives all ranks' values of a list.
    """
    mine = [case.mine(rank) for case in cases]
    weights, masters, starts, shards = map(list, zip(*mine, strict=True))
    drop = cases[0].drop
    utils.quantize_master_weights(weights, masters, starts, group, shards, not drop)
    for at, (case, weight, shard) in enumerate(zip(cases, weights, shards, strict=True)):
        slices = gather([case.slice_of_data(rank, weight, shard)])
        case.gather(weight, [found[0] for found in slices])
        if at % 2 == 0 and not drop:
            utils.post_all_gather_processing(weight)
    if not drop:
        utils.post_all_gather_processing(weights[1::2])
    for weight in weights:
        if isinstance(weight, HybridQuantizedTensor):
            utils.post_all_gather_processing(weight)
    return weights


class Threads:
    """Ranks as threads, whose collectives are functions of Python."""

    def __init__(self, size):
        self.size, self.collectives = size, 0
        self._barrier = threading.Barrier(size)
        self._given = [None] * size

    def _exchanged(self, rank, value):
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def reduce(self, integers, rank):
        """Take the place of `utils._reduce`; the group of a rank is its number."""
        found = self._exchanged(rank, integers.clone())
        assert len({(t.dtype, t.shape) for t in found}) == 1
        integers.copy_(torch.stack(found).amax(0))
        self.collectives += rank == 0

    def run(self, function):
        """``function(rank, rank as a group, gather)`` in every thread; the results by rank."""
        results, faults = [None] * self.size, []

        def work(rank):
            try:
                results[rank] = function(rank, rank, lambda value: self._exchanged(rank, value))
            except BaseException as fault:  # the others wait for this rank
                faults.append(fault)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if faults:
            raise faults[0]
        return results


# ---- processes -----------------------------------------------------------------------------------


def _gather(value):
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def masters(device, names, seed):
    """Parameters of several formats in one call; pairs of `tensors_of`."""
    cases = [Case(name, seed + at, dist.get_world_size(), device) for at, name in enumerate(names)]
    found = update(cases, dist.get_rank(), None, _gather)
    return [tensors_of(w, case.expected()) for case, w in zip(cases, found, strict=True)]


def stochastic(device, seed):
    """A parameter that is rounded by random numbers, which all ranks draw alike."""
    case = Case("nv", seed, dist.get_world_size(), device)
    case.quantizer.stochastic_rounding = True
    case.weight._quantizer.stochastic_rounding = True
    torch.manual_seed(seed)
    (weight,) = update([case], dist.get_rank(), None, _gather)
    torch.manual_seed(seed)
    return tensors_of(weight, case.expected())


def tensors_of(weight, expected):
    """The tensors of both, by their places; forms that were dropped are made."""
    if expected.get_usages()["columnwise"] and not isinstance(weight, HybridQuantizedTensor):
        weight.update_usage(columnwise_usage=True)
    pairs = zip(weight.get_data_tensors(), expected.get_data_tensors(), strict=True)
    kept = [(a, b) for a, b in pairs if b is not None]
    assert all(a is not None for a, _ in kept)
    return [_one_nan(a.detach().cpu()) for a, _ in kept], [_one_nan(b.cpu()) for _, b in kept]


def _one_nan(tensor):
    """High-precision values with one kind of NaN: sign and payload torch rounds as it happens."""
    plain = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return tensor.masked_fill(tensor.isnan(), torch.nan) if plain else tensor


def training(device, name, sharded, seed, steps=3):
    """Losses of a module with quantized weights, whose masters are whole or sharded.

    A rank has a slice of all masters, one after the other, as ZeRO has it.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    recipe = {"delayed": "delayed", "current": "current"}.get(name) or WEIGHT_RECIPES[name]()
    torch.manual_seed(seed)
    module = made(lambda: te.LayerNormMLP(48, 80, device=device), recipe)
    weights = [w for w in module.parameters() if isinstance(w, te.QuantizedTensor)]
    whole = torch.cat([w.dequantize().detach().view(-1) for w in weights])
    cut = 2 * torch.arange(size + 1) * (whole.numel() // size // 2)
    cut[-1] = whole.numel()
    losses = []
    for _ in range(steps):
        x = torch.randn(32, 48, device=device)
        with region(recipe):
            loss = module(x).square().sum()
        loss.backward()
        losses.append(loss.detach().cpu())
        grads = torch.cat([w.grad.view(-1) for w in weights])
        module.zero_grad()
        whole -= 0.01 * grads / grads.norm()  # only this rank's part is read of those sharded
        at, mine = 0, []
        for weight in weights:
            start = max(int(cut[rank]) - at, 0)
            end = min(int(cut[rank + 1]) - at, weight.numel())
            values = whole[at : at + weight.numel()]
            mine.append((values[start:end], start) if start < end else (None, None))
            if not sharded:
                with torch.no_grad():
                    weight.copy_(values.view(weight.shape))
            at += weight.numel()
        if sharded:
            parts, starts = zip(*mine, strict=True)
            utils.quantize_master_weights(weights, parts, starts, None)
            for weight, part, start in zip(weights, parts, starts, strict=True):
                _gather_rows(weight, part, start)
            utils.post_all_gather_processing(weights)
    return losses


def _gather_rows(weight, part, start):
    """All-gather the row-wise data of a parameter; NVFP4's have no padding here."""
    data = row_data(weight)
    scale = weight.numel() // data.numel()
    found = None
    if part is not None:
        first, last = start // scale, (start + part.numel()) // scale
        found = first, last, data.reshape(-1)[first:last].cpu()
    whole = data.reshape(-1).clone()
    for first, last, bytes_ in filter(None, _gather(found)):
        whole[first:last] = bytes_.to(whole.device)
    data.copy_(whole.view(data.shape))
