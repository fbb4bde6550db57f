# SPDX-License-Identifier: Apache-2.0
"""Tensor and context parallelism: their arguments, and what modules of several ranks do together.

With tensor parallelism a rank has some rows of a weight ("column": some outputs) or some columns of
it ("row": some inputs). Its input is gathered, or its gradient summed; its output is a term of a
sum. These collectives are nodes of the graph of a call (`common.graphs.Collective`).
"""

import functools
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter

from transformer_engine import _core
from transformer_engine.common.graphs import Collective, LinearFlags
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.pytorch.constants import CPLoadBalancingStrategy
from transformer_engine.pytorch.module.overlap import Overlaps, overlaps_of

_MODES = (None, "column", "row")
_REDUCTIONS = (None, "multimem_all_reduce", "two_shot", "one_shot", "nccl")
_EXCHANGES = ("p2p", "all_gather", "a2a", "a2a+p2p")
_GROUPS = getattr(torch.distributed, "ProcessGroup", ())  # of a torch built without: none


_REDUCED = ("reduce_amax_input", "reduce_amax_grad_output")
"""Stages of what is gathered before a linear layer, and behind it in the backward."""
_TILE = 128
"""Rows of a rank are a multiple of it where forms of tiles are gathered."""


def _expect_group(module: str, argument: str, group: Any) -> None:
    """TypeError for what is no process group; `module` and `argument` are names for the message."""
    if group is not None and not isinstance(group, _GROUPS):
        raise TypeError(
            f"{module}: {argument}={group!r}: expected a torch.distributed.ProcessGroup, as "
            "torch.distributed.new_group returns it, or None"
        )


class Together(NamedTuple):
    """What the ranks of a call do together."""

    before: Collective | None = None  # before the first linear layer
    behind: Collective | None = None  # behind the last one

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return max([1, *[each.ranks for each in self if each is not None]])

    def reduced(self, part: int, parts: int, casts: Quantization) -> frozenset[int]:
        """Stages of a part that reduce amaxes, numbers of ``_core.LINEAR_STAGES``.

        Where forms are gathered of a tensor that ranks measure; `casts` are those of the part.
        """
        of_input = part == 0 and self.before is not None and self.before.forms
        of_grad = part == parts - 1 and self.behind is not None and self.behind.forms
        found = [name for name, on in zip(_REDUCED, (of_input, of_grad), strict=True) if on]
        measured = casts.input.recipe == _core.RECIPE_CURRENT
        return frozenset(map(_core.LINEAR_STAGES.index, found if measured else ()))


ALONE = Together()


class OfOneRank:
    """What a module that nothing splits says where `TensorParallel` says more."""

    sequence_parallel = False

    def _reads_together(self) -> bool:
        return False

    def _together(self, region: Any, measured: bool) -> Together:
        del region, measured
        return ALONE


def refuse_returned(kind: str, returns: LinearFlags, together: Together) -> None:
    """NotImplementedError for what is to be returned quantized, and a collective makes."""
    refused = returns.output > 0 and together.behind is not None
    if refused or (returns.input > 0 and together.before is not None):
        name, what = ("fp8_output", "a sum") if refused else ("fp8_grad", "the gradient of a sum")
        raise NotImplementedError(
            f"{kind}: {name}=True: {what} over {together.ranks} ranks is made in high precision: "
            "leave it out"
        )


class TensorParallel:
    """Mixin, the first base of a module that takes the arguments of tensor parallelism."""

    tp_group: Any = None  # as given; copies and pickles have none
    tp_size = 1
    parallel_mode: str | None = None
    """"column": the outputs are split over the ranks, "row": the inputs."""
    sequence_parallel = False
    """Ranks have rows of their own outside of the linear layers, a part of the sequence each."""
    ub_name: str | None = None  # as given
    overlaps: tuple[Overlaps, ...] = (Overlaps(), Overlaps())
    """Where GEMMs run in pieces, in high precision and in FP8."""

    _OF_THE_PROCESS: tuple[str, ...] = ("tp_group",)
    """Attributes that another process, or a copy, can not share."""

    def _set_parallel(
        self,
        tp_group: Any,
        tp_size: int,
        parallel_mode: str | None = None,
        *,
        sequence_parallel: bool = False,
        overlaps: tuple[bool, bool] = (False, False),
        ub_name: str | None = None,
        ub_names: tuple[str, str] | None = None,
        symmetric_ar_type: str | None = None,
    ) -> None:
        """Check and keep the arguments of the constructor.

        TypeError or ValueError for no group, no mode, no kind of reduction or no number of ranks,
        or another one than the group has; NotImplementedError for a kind of reduction that is not
        there.
        """
        kind = type(self).__name__
        _expect_group(kind, "tp_group", tp_group)
        if not isinstance(tp_size, int) or isinstance(tp_size, bool) or tp_size < 1:
            raise ValueError(f"{kind}: tp_size={tp_size!r}, expected a positive int")
        ranks = tp_size if tp_group is None else tp_group.size()
        if tp_size not in (1, ranks):
            raise ValueError(f"{kind}: tp_size={tp_size}, and a tp_group of {ranks} ranks")
        if parallel_mode not in _MODES:
            raise ValueError(
                f"{kind}: parallel_mode={parallel_mode!r}, expected None, 'column' or 'row'"
            )
        if symmetric_ar_type not in _REDUCTIONS:
            names = ", ".join(map(repr, _REDUCTIONS))
            raise ValueError(
                f"{kind}: symmetric_ar_type={symmetric_ar_type!r}, expected one of {names}"
            )
        if ranks > 1 and symmetric_ar_type not in (None, "nccl"):
            raise NotImplementedError(
                f"{kind}: symmetric_ar_type={symmetric_ar_type!r} over {ranks} ranks is not there "
                "yet: leave it out, or give 'nccl'"
            )
        self.tp_group, self.tp_size = tp_group, ranks
        self.parallel_mode = parallel_mode
        self.sequence_parallel = ranks > 1 and bool(sequence_parallel)
        self.ub_name = ub_name
        self.overlaps = overlaps_of(ub_names or (ub_name, ub_name), *overlaps)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Take the ranks that this module, and the modules inside, are split over; None: none yet.

        TypeError for no process group, ValueError for one of another size than the modules were
        made for.
        """
        _expect_group(type(self).__name__, "tp_group", tp_group)
        modules = [module for module in self.modules() if isinstance(module, TensorParallel)]
        for module in modules:
            if tp_group is not None and tp_group.size() != module.tp_size:
                raise ValueError(
                    f"{type(module).__name__}: tp_group has {tp_group.size()} ranks, the module "
                    f"was made for {module.tp_size}: make it with tp_size={tp_group.size()}"
                )
        for module in modules:
            module.tp_group = tp_group

    def _share(self, size: int, what: str) -> int:
        """The part of a size that a rank has; ValueError where the ranks do not divide it."""
        if size % self.tp_size:
            raise ValueError(
                f"{type(self).__name__}: {what}={size} is no multiple of tp_size={self.tp_size}"
            )
        return size // self.tp_size

    # ---- calls -----------------------------------------------------------------------------------

    @property
    def _is_split(self) -> tuple[bool, bool]:
        """Whether ranks read one input, with other outputs each; whether outputs are terms."""
        return self.parallel_mode == "column", self.parallel_mode == "row"

    def _reads_together(self) -> bool:
        """Return whether there is a collective before the first layer."""
        return self.tp_size > 1 and self._is_split[0]

    def _rows_join(self, inp: Any) -> bool:
        """Return whether the rows of a rank are whole tiles, so that forms of tiles are joined."""
        rows = torch.Size(inp.shape[:-1]).numel()
        return (rows if self._is_split[0] else rows // self.tp_size) % _TILE == 0

    def _together(self, region: Any, measured: bool) -> Together:
        """What ranks do together in a call; RuntimeError where there is no group yet.

        `region` is that of the call; `measured`: delayed scaling casts by what each rank measures.
        """
        takes, gives = self._is_split
        if self.tp_size == 1 or not (takes or gives):
            return ALONE
        if self.tp_group is None:
            raise RuntimeError(
                f"{type(self).__name__}: tp_size={self.tp_size}, and no tp_group: call "
                "set_tensor_parallel_group before the forward"
            )
        sequence, ranks = self.sequence_parallel, self.tp_size
        does = self.overlaps[region.recipe is not None] if sequence else Overlaps()
        forms = sequence and not measured and _join(region, self.tp_group)
        before = behind = None
        if takes:
            kind = _core.COLLECTIVE_GATHER if sequence else _core.COLLECTIVE_COPY
            wide = getattr(self, "return_layernorm_output_gathered", False)
            pieces = _core.COLLECTIVE_PIECES_FORWARD * does.gathered
            rank = self.tp_group.rank() if pieces else 0
            before = Collective(kind, ranks, forms and not wide, (0, 1), pieces, rank)
        if gives:
            kind = _core.COLLECTIVE_REDUCE_SCATTER if sequence else _core.COLLECTIVE_ALL_REDUCE
            halves = (1, _core.COLLECTIVE_EXCHANGE) if does.summed else (1,)
            pieces = _core.COLLECTIVE_PIECES_FORWARD * does.summed
            pieces += _core.COLLECTIVE_PIECES_BACKWARD * does.grad
            rank = self.tp_group.rank() if pieces else 0
            behind = Collective(kind, ranks, forms, halves, pieces, rank)
        return Together(before, behind)

    def __getstate__(self) -> dict:
        """Copy and pickle without what belongs to this process."""
        state = dict(super().__getstate__())
        for name in self._OF_THE_PROCESS:
            state.pop(name, None)
        return state


def _join(region: Any, group: Any) -> bool:
    """Return whether what ranks cast by the recipe in force can be put together.

    Those of a recipe with one scale for a tensor have it in common: measured ones are reduced
    first, those of delayed scaling at its updates.
    """
    recipe = region.recipe
    if recipe is None or recipe.custom():
        return False
    if recipe.delayed():
        return recipe.reduce_amax and has_all(region.state.group, group)
    if recipe.float8_current_scaling():
        return True
    return region.joins and (recipe.float8_block_scaling() or recipe.mxfp8())


@functools.lru_cache(maxsize=64)
def has_all(outer: Any, inner: Any) -> bool:
    """Return whether a group, None: all ranks, has all ranks of another one."""
    ranks_of = torch.distributed.get_process_group_ranks
    return outer is None or {*ranks_of(inner)} <= {*ranks_of(outer)}


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
        _expect_group(kind, "cp_group", each)
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


def mark_linear(
    weights: list[Parameter],
    biases: list[Parameter],
    mode: str | None,
    sequence: bool,
    delayed: bool,
) -> None:
    """Say on the parameters of a linear layer how tensor parallelism splits them.

    Frameworks that reduce gradients, clip them or reshape checkpoints read these attributes, on one
    rank too: ``tensor_model_parallel``, ``partition_dim``, ``partition_stride`` and, of what each
    rank has whole, ``sequence_parallel``: its gradient is of the rows of a rank, to be summed over
    the ranks by the program, where it is true (`sequence`). ``skip_backward_post_hook`` is on
    weights whose gradients come with `backward_dw` (`delayed`): what is to be done with them is
    registered by `register_wgrad_accumulation_and_reduce_hooks`; those of biases come before.
    """
    for weight in weights:
        _mark(weight, 1 if mode == "row" else 0)
        if delayed:
            weight.skip_backward_post_hook = True
    for bias in biases:
        if mode == "row":
            bias.sequence_parallel = sequence
        elif mode == "column":
            _mark(bias, 0)


def _mark(parameter: Parameter, dim: int) -> None:
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1
