# SPDX-License-Identifier: Apache-2.0
"""Tensor and context parallelism: their arguments, and what they leave on a module.

Programs written for many ranks pass their groups, modes and overlap settings on one rank too. There
nothing is split and nothing is sent, so all of it is accepted. More ranks are there for context
parallelism (`attention.over_ranks`), and not yet for tensor parallelism.
"""

from typing import Any

import torch
from torch.nn import Parameter

from transformer_engine.pytorch.constants import CPLoadBalancingStrategy

_MODES = (None, "column", "row")
_REDUCTIONS = (None, "multimem_all_reduce", "two_shot", "one_shot", "nccl")
_EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_GROUPS = getattr(torch.distributed, "ProcessGroup", ())  # of a torch built without: none


def _check_group(module: str, argument: str, group: Any) -> None:
    """Raise for what is no process group of one rank, or for a list that has such a thing.

    TypeError: it is no group; NotImplementedError: it has more than one rank, work would have to be
    spread over it. `module` and `argument` are names for the message; None is no parallelism.
    """
    for each in group if isinstance(group, list | tuple) else (group,):
        if each is None:
            continue
        if not isinstance(each, _GROUPS):
            raise TypeError(
                f"{module}: {argument}={group!r}: expected a torch.distributed.ProcessGroup, as "
                "torch.distributed.new_group returns it, or None"
            )
        size = each.size()
        if size > 1:
            raise NotImplementedError(
                f"{module}: {argument} of {size} ranks is not there yet: give a group of one rank "
                "or None, and spread the batch over the ranks instead (DDP, FSDP)"
            )


class TensorParallel:
    """Mixin, the first base of a module that takes the arguments of tensor parallelism."""

    tp_group: Any = None  # as given; copies and pickles have none
    tp_size = 1
    parallel_mode: str | None = None
    """"column": the outputs would be split over the ranks, "row": the inputs."""
    sequence_parallel = False  # one rank has the whole sequence
    ub_name: str | None = None  # as given

    _OF_THE_PROCESS: tuple[str, ...] = ("tp_group",)
    """Attributes that another process, or a copy, can not share."""

    def _set_parallel(
        self,
        tp_group: Any,
        tp_size: int,
        parallel_mode: str | None = None,
        ub_name: str | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        """Check and keep the arguments of the constructor.

        TypeError or ValueError for no group, no mode, no kind of reduction or no number of ranks,
        NotImplementedError for more than one rank.
        """
        kind = type(self).__name__
        _check_group(kind, "tp_group", tp_group)
        if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
            raise ValueError(f"{kind}: tp_size={tp_size!r}, expected a positive int")
        if tp_size > 1:
            raise NotImplementedError(
                f"{kind}: tp_size={tp_size} is not there yet: give 1, and spread the batch over "
                "the ranks instead (DDP, FSDP)"
            )
        if parallel_mode not in _MODES:
            raise ValueError(
                f"{kind}: parallel_mode={parallel_mode!r}, expected None, 'column' or 'row'"
            )
        if symmetric_ar_type not in _REDUCTIONS:
            names = ", ".join(map(repr, _REDUCTIONS))
            raise ValueError(
                f"{kind}: symmetric_ar_type={symmetric_ar_type!r}, expected one of {names}"
            )
        self.tp_group = tp_group
        self.parallel_mode = parallel_mode
        self.ub_name = ub_name

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take a group of one rank, or None, for this module and the modules inside.

        TypeError for no process group, NotImplementedError for one of more ranks.
        """
        _check_group(type(self).__name__, "tp_group", tp_group)
        for module in self.modules():
            if isinstance(module, TensorParallel):
                module.tp_group = tp_group

    def __getstate__(self) -> dict:
        """Copy and pickle without what belongs to this process."""
        state = dict(super().__getstate__())
        for name in self._OF_THE_PROCESS:
            state.pop(name, None)
        return state


class ContextParallel(TensorParallel):
    """The same for a module that takes the group of context parallelism too.

    Copies and pickles have neither group nor stream.
    """

    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type = "p2p"
    cp_size, cp_rank = 1, 0
    """Ranks that sequences are spread over, and which one this is."""
    _OF_THE_PROCESS = (
        "tp_group", "cp_group", "cp_stream", "cp_global_ranks", "cp_size", "cp_rank",
    )  # fmt: skip

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        load_balancing_strategy: Any = CPLoadBalancingStrategy.DUAL_CHUNK_SWAP,
    ) -> None:
        """Take a group that sequences are spread over, for this module and the modules inside.

        Parameters
        ----------
        cp_group : ProcessGroup or list of two, optional
            The ranks; for "a2a+p2p" the ranks that exchange heads, which are neighbours, and those
            that pass keys around. None: one rank.
        cp_global_ranks : list of int, optional
            Their numbers among all processes, which the groups have too.
        cp_stream : Stream, optional
            A second stream, on which every other step of "p2p" runs.
        cp_comm_type : {"p2p", "all_gather", "a2a", "a2a+p2p"}
            What the ranks send: keys and values around a ring, all keys and values to all ranks,
            or heads for tokens; the last is the third in the first group, and the first between.
        load_balancing_strategy : CPLoadBalancingStrategy
            Of n ranks, rank r has chunks r and 2 n - 1 - r of each sequence.

        Raises
        ------
        TypeError
            What is given is no process group.
        ValueError
            No such way or strategy; a list for another way than "a2a+p2p", or none for that;
            `cp_global_ranks` of another number of ranks.
        NotImplementedError
            Several ranks without load balancing.
        """
        kind = type(self).__name__
        if cp_comm_type not in _EXCHANGES:
            names = ", ".join(map(repr, _EXCHANGES))
            raise ValueError(f"{kind}: cp_comm_type={cp_comm_type!r}, expected one of {names}")
        size, rank = _place_in(kind, cp_group, cp_comm_type)
        if size > 1:
            strategy = CPLoadBalancingStrategy(load_balancing_strategy)
            if strategy is not CPLoadBalancingStrategy.DUAL_CHUNK_SWAP:
                raise NotImplementedError(
                    f"{kind}: load_balancing_strategy={strategy} of {size} ranks is not there yet: "
                    "give CPLoadBalancingStrategy.DUAL_CHUNK_SWAP"
                )
            if cp_global_ranks is not None and len(cp_global_ranks) != size:
                raise ValueError(
                    f"{kind}: cp_global_ranks={cp_global_ranks!r}, expected {size} ranks"
                )
        self.cp_group, self.cp_stream = cp_group, cp_stream
        self.cp_global_ranks, self.cp_comm_type = cp_global_ranks, cp_comm_type
        self.cp_size, self.cp_rank = size, rank
        for module in self.children():
            if isinstance(module, ContextParallel):
                module.set_context_parallel_group(
                    cp_group, cp_global_ranks, cp_stream, cp_comm_type, load_balancing_strategy
                )


def _place_in(kind: str, group: Any, exchange: str) -> tuple[int, int]:
    """Ranks of a group of context parallelism, or of two, and which one this is."""
    listed = isinstance(group, list | tuple)
    groups = [each for each in (group if listed else (group,)) if each is not None]
    for each in groups:
        if not isinstance(each, _GROUPS):
            raise TypeError(
                f"{kind}: cp_group={group!r}: expected a torch.distributed.ProcessGroup, as "
                "torch.distributed.new_group returns it, or None"
            )
    size, rank = 1, 0
    for each in groups:
        size, rank = size * each.size(), rank + size * each.rank()
    if size > 1 and listed != (exchange == "a2a+p2p"):
        raise ValueError(
            f"{kind}: cp_comm_type={exchange!r} with cp_group={group!r}: 'a2a+p2p' takes a list of "
            "two groups, the others take one"
        )
    if listed and size > 1 and len(groups) != 2:
        raise ValueError(f"{kind}: cp_group={group!r}: expected two groups for 'a2a+p2p'")
    return size, rank


def mark_linear(weights: list[Parameter], biases: list[Parameter], mode: str | None) -> None:
    """Say on the parameters of a linear layer how tensor parallelism would split them.

    Frameworks that reduce gradients, clip them or reshape checkpoints read these attributes, on one
    rank too: ``tensor_model_parallel``, ``partition_dim``, ``partition_stride`` and, of what each
    rank has whole, ``sequence_parallel``.
    """
    for weight in weights:
        _mark(weight, 1 if mode == "row" else 0)
    for bias in biases:
        if mode == "row":
            bias.sequence_parallel = False
        elif mode == "column":
            _mark(bias, 0)


def _mark(parameter: Parameter, dim: int) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1
