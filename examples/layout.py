# SPDX-License-Identifier: Apache-2.0
"""How one training is spread over ranks: groups, parts of a batch, gradients, checkpoints.

Ranks form a mesh [dp, fsdp, cp, tp], the last varying fastest, so that those of one node share what
is exchanged most often:

tp
    splits each layer (and its tokens, between the layers: sequence parallelism),
cp
    splits each window,
fsdp
    splits the batch, and keeps a part of the parameters and of the optimizer's state on each rank,
dp
    splits the batch, over replicas of all this.

Whatever the layout, a step sees the same windows, and its gradient is that of their mean loss.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (
    get_batch_on_this_cp_rank,
)

DIMS = ("dp", "fsdp", "cp", "tp")
MESH = ("tp", "replicas", "shards")  # of parameters, the first dim being the first to split


def start_processes(device: torch.device) -> bool:
    """Join the group of the processes that torchrun has started; return whether it has.

    False too where the program has joined them before.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or dist.is_initialized():
        return False
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo: checkpoints plan on the CPU
    else:
        dist.init_process_group("gloo")
    return True


class Layout:
    """Where this process stands among those of a training; without arguments it is alone.

    Parameters
    ----------
    device : torch.device
        What trains.
    dp : int, optional
        Replicas; what the others leave of the ranks where None.
    fsdp, cp, tp : int
        Ranks that share parameters, windows, layers.
    seed : int
        Of the parts of weights that ranks of `tp` draw.

    Raises
    ------
    SystemExit
        The sizes do not multiply to the number of processes.
    """

    def __init__(
        self,
        device: torch.device | None = None,
        dp: int | None = None,
        fsdp: int = 1,
        cp: int = 1,
        tp: int = 1,
        seed: int = 0,
    ) -> None:
        self.spread = device is not None and dist.is_available() and dist.is_initialized()
        self.rank, world = (dist.get_rank(), dist.get_world_size()) if self.spread else (0, 1)
        self.leads = self.rank == 0  # prints, and writes what all ranks have
        self.dp = max(1, world // (fsdp * cp * tp)) if dp is None else dp
        self.fsdp, self.cp, self.tp = fsdp, cp, tp
        sizes = (self.dp, fsdp, cp, tp)
        if self.dp * fsdp * cp * tp != world:
            named = " x ".join(f"--{name} {size}" for name, size in zip(DIMS, sizes, strict=True))
            raise SystemExit(
                f"{named} are not {world} processes: start as many by torchrun --nproc-per-node N"
            )
        self.split_dims: dict[str, int] = {}
        """Dims along which `tp` splits parameters, by their names; the others are whole."""
        self.layer_options: dict[str, Any] = {}
        """Arguments of `te.TransformerLayer`."""
        self.data_rank = 0
        if not self.spread:
            return
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMS)
        self.tp_group, self.cp_group = mesh["tp"].get_group(), mesh["cp"].get_group()
        self.cp_stream = torch.cuda.Stream() if device.type == "cuda" and cp > 1 else None
        self.data_rank = mesh.get_local_rank("dp") * fsdp + mesh.get_local_rank("fsdp")
        # Ranks of cp have other tokens under the same parameters: as those of dp and fsdp do.
        shards = fsdp * cp if fsdp > 1 else 1
        ranks = torch.arange(world).view(-1, shards, tp).permute(2, 0, 1)
        self.mesh = DeviceMesh(device.type, ranks, mesh_dim_names=MESH)
        self.replicas, self.shards = ranks.shape[1:]
        if tp > 1:
            tracker = te.distributed.CudaRNGStatesTracker()
            tracker.add("model-parallel-rng", seed + 1 + mesh.get_local_rank("tp"))
            self.layer_options = {
                "tp_group": self.tp_group, "tp_size": tp, "set_parallel_mode": True,
                "sequence_parallel": True, "get_rng_state_tracker": lambda: tracker,
            }  # fmt: skip

    def __str__(self) -> str:
        sizes = {name: getattr(self, name) for name in DIMS}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "alone"

    # -- the model ------------------------------------------------------------------------------

    def place(self, layer: te.TransformerLayer, prefix: str) -> te.TransformerLayer:
        """Tell a layer its ranks, and leave this rank's part of it."""
        if self.cp > 1:
            ranks = dist.get_process_group_ranks(self.cp_group)
            layer.set_context_parallel_group(self.cp_group, ranks, self.cp_stream, "p2p")
        self._shard(layer)
        if self.tp > 1:
            for name, parameter in layer.named_parameters():
                if getattr(parameter, "tensor_model_parallel", False):
                    self.split_dims[f"{prefix}.{name}"] = parameter.partition_dim
        return layer

    def _shard(self, module: torch.nn.Module) -> None:
        if self.fsdp > 1:
            from torch.distributed.fsdp import fully_shard

            whole = self.replicas == 1
            mesh = self.mesh["shards"] if whole else self.mesh["replicas", "shards"]
            fully_shard(module, mesh=mesh)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Return what is called in place of a model whose layers were placed."""
        self._shard(model)
        if self.fsdp > 1 or not self.spread or self.replicas == 1:
            return model
        group = self.mesh["replicas"].get_group()
        return torch.nn.parallel.DistributedDataParallel(model, process_group=group)

    def count_parameters(self, model: torch.nn.Module) -> int:
        """How many values all ranks train together."""
        named = model.named_parameters()
        return sum(p.numel() * (self.tp if name in self.split_dims else 1) for name, p in named)

    # -- parts of a batch -----------------------------------------------------------------------

    def share(self, windows: Tensor) -> Tensor:
        """Return the part of the windows of a step, [n], that this rank computes."""
        ranks = self.dp * self.fsdp
        if len(windows) % ranks != 0:
            raise SystemExit(
                f"{len(windows)} windows are no {ranks} equal parts: give --batch and "
                "--valid-windows that dp x fsdp divides"
            )
        return windows.chunk(ranks)[self.data_rank]

    def tokens(self, *windows: Tensor) -> tuple[Tensor, ...]:
        """Return the bytes of windows, [length, n] each, that this rank has."""
        parts = 2 * self.cp * self.tp if self.cp > 1 else self.tp  # cp: two chunks a rank
        if len(windows[0]) % parts != 0:
            raise SystemExit(f"--seq: {len(windows[0])} bytes are no {parts} equal parts")
        if self.cp > 1:
            deal = partial(get_batch_on_this_cp_rank, None, cp_group=self.cp_group)
            windows = tuple(deal(each, None, None, qvk_format="sbhd")[0] for each in windows)
        if self.tp > 1:
            own = dist.get_rank(self.tp_group)
            windows = tuple(each.chunk(self.tp)[own] for each in windows)
        return windows

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.spread:
            dist.all_reduce(values)
        return values

    def mean(self, values: Tensor) -> Tensor:
        """Mean over all ranks, in place."""
        return self.total(values).div_(dist.get_world_size() if self.spread else 1)

    # -- gradients ------------------------------------------------------------------------------

    def clip_gradients(self, model: torch.nn.Module, limit: float) -> None:
        """Complete the gradients that a backward has left, then clip their norm.

        Data parallelism has averaged them. Ranks of `tp` have tokens of their own between the
        layers: each has a part of the gradient of what they hold whole.
        """
        whole, split = [], []
        for name, parameter in model.named_parameters():
            (split if name in self.split_dims else whole).append(parameter.grad)
        if self.tp > 1:
            for grad in map(_local, whole):
                dist.all_reduce(grad, group=self.tp_group)
        norm = _norm(whole)
        if split:
            square = _norm(split).square()
            dist.all_reduce(square, group=self.tp_group)
            norm = (norm.square() + square).sqrt()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), limit, norm)

    # -- checkpoints ----------------------------------------------------------------------------

    def save(
        self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, notes: str
    ) -> None:
        """Write a folder from which any other layout may go on; an older one stays until then."""
        import torch.distributed.checkpoint as dcp

        partly, before = (path.with_name(path.name + end) for end in (".partial", ".before"))
        _, _, content = self._state(model, optimizer)
        with _one_process_too():
            dcp.save({**content, "notes": notes}, checkpoint_id=partly)
        if self.leads:
            if path.exists():
                path.rename(before)
            partly.rename(path)
            shutil.rmtree(before, ignore_errors=True)
        if self.spread:
            dist.barrier()

    def notes(self, path: Path) -> str:
        """Read what a checkpoint notes beside its tensors."""
        return _load(path, {"notes": ""})["notes"]

    def load(self, path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Take this rank's part of a checkpoint of any layout."""
        from torch.distributed.checkpoint.state_dict import set_state_dict

        of_model, of_optimizer, content = self._state(model, optimizer)
        _load(path, content)
        set_state_dict(
            model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer
        )  # fmt: skip

    def _state(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[dict, dict, dict]:
        """State of a model and its optimizer; and both in one, as parts of whole tensors."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        of_model, of_optimizer = get_state_dict(model, optimizer)
        content = {
            "model": {name: self._part(name, value) for name, value in of_model.items()},
            "optimizer": {
                name: {key: self._part(name, value) for key, value in values.items()}
                for name, values in of_optimizer["state"].items()
            },
        }
        return of_model, of_optimizer, content

    def _part(self, name: str, value: Any) -> Any:
        """Say of which tensor a part is; `value` itself where torch knows."""
        if name not in self.split_dims or value.dim() == 0:
            return value
        from torch.distributed.tensor import DTensor, Replicate, Shard

        dim = self.split_dims[name]
        shape = torch.Size(n * self.tp if d == dim else n for d, n in enumerate(value.shape))
        return DTensor.from_local(
            _local(value), self.mesh, [Shard(dim), Replicate(), Shard(0)], run_check=False,
            shape=shape, stride=torch.empty(shape, device="meta").stride(),
        )  # fmt: skip

    def whole_model(self, model: torch.nn.Module) -> dict[str, Any]:
        """The state dict of a model, put together on every rank."""
        named = {name: self._part(name, value) for name, value in model.state_dict().items()}
        return {name: self._whole(name, value) for name, value in named.items()}

    def _whole(self, name: str, value: Any) -> Any:
        """Put a part together: over shards, then over tp; torch 2.11 can not do both at once."""
        from torch.distributed.tensor import Replicate, Shard

        if not hasattr(value, "full_tensor"):
            return value
        if name in self.split_dims:
            over_tp = [Shard(self.split_dims[name]), Replicate(), Replicate()]
            value = value.redistribute(placements=over_tp)
        return value.full_tensor()


def _load(path: Path, content: dict) -> dict:
    import torch.distributed.checkpoint as dcp

    with _one_process_too():
        dcp.load(content, checkpoint_id=path)
    return content


@contextmanager
def _one_process_too() -> Iterator[None]:
    """Keep torch from warning that there are no other processes."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def _local(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _norm(grads: list[Tensor]) -> Tensor:
    norm = torch.nn.utils.get_total_norm(grads)
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
