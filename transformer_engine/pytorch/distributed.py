# SPDX-License-Identifier: Apache-2.0
"""Recompute, random states by name and the collectives of tensor parallelism."""

import contextlib
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from transformer_engine.common import absent
from transformer_engine.common.contexts import Context
from transformer_engine.pytorch.execution.recompute import (
    activation_recompute_forward as activation_recompute_forward,
    checkpoint as checkpoint,
    get_activation_recompute_contexts as get_activation_recompute_contexts,
    in_fp8_activation_recompute_phase as in_fp8_activation_recompute_phase,
    is_fp8_activation_recompute_enabled as is_fp8_activation_recompute_enabled,
    use_reentrant_activation_recompute as use_reentrant_activation_recompute,
)
from transformer_engine.pytorch.module.base import Fp8Module
from transformer_engine.pytorch.tensor.gathering import (
    QuantizedGather as _NVFP4AllGatherAsyncHandle,  # noqa: F401 - a name that programs import
    gather_along_first_dim as gather_along_first_dim,
)
from transformer_engine.pytorch.torchside.collectives import (
    allreduce as allreduce,
    gather_split_1d_tensor as gather_split_1d_tensor,
    get_distributed_rank as get_distributed_rank,
    get_distributed_world_size as get_distributed_world_size,
    reduce_scatter_along_first_dim as reduce_scatter_along_first_dim,
    split_tensor_into_1d_equal_chunks as split_tensor_into_1d_equal_chunks,
)
from transformer_engine.pytorch.torchside.device import (
    accelerator,
    graph_safe_generator,
    module_of,
)

_FSDP = "transformer_engine.pytorch.layer.fsdp"  # torch's FSDP takes long to import
_LAZY = dict.fromkeys(("FullyShardedDataParallel", "prepare_te_modules_for_fsdp"), _FSDP)
__getattr__, __dir__ = absent.attach(globals(), lazy=_LAZY)

HAS_TORCH_SYMMETRIC = False
"""True where collectives in symmetric memory are used."""
symmetric_mem_cache: dict[Any, Any] = {}
"""Tensors in such memory: none."""


# ---- random states -----------------------------------------------------------------------------


State = Tensor | torch.Generator
"""A random state: its bytes, or a generator that has it and goes on in place."""


def graph_safe_rng_available() -> bool:
    """Return whether trackers keep generators, which CUDA graphs can use: on CUDA devices."""
    return graph_safe_generator() is not None


def is_graph_safe_rng_state(state: Any) -> bool:
    """Return whether a state is a generator."""
    return isinstance(state, torch.Generator)


def _bytes() -> Any:
    """What has the random state as bytes: the accelerator's module, or torch's CPU."""
    return module_of(accelerator()) or torch.random


def _state_now(like: State) -> State:
    """The state in force, as a state of the same kind."""
    if is_graph_safe_rng_state(like):
        return graph_safe_generator().graphsafe_get_state()
    return _bytes().get_rng_state()


def _put_state(state: State) -> None:
    if is_graph_safe_rng_state(state):
        graph_safe_generator().graphsafe_set_state(state)
    else:
        _bytes().set_rng_state(state)


def _new_state(seed: int) -> State:
    """A state that begins from a seed; that in force stays as it is."""
    generator = graph_safe_generator()
    if generator is not None:
        made = generator.clone_state()
        made.manual_seed(seed)
        return made
    before = _bytes().get_rng_state()
    module = module_of(accelerator())
    (torch.default_generator if module is None else module).manual_seed(seed)
    made = _bytes().get_rng_state()
    _bytes().set_rng_state(before)
    return made


def _checked_states(what: str, states: Any) -> dict[str, State]:
    """States by name; TypeError for anything else."""
    if not isinstance(states, dict):
        raise TypeError(
            f"{what}: states: {type(states).__name__} object, expected states by name, as "
            "get_states and get_all_rng_states give them"
        )
    return states


class CudaRNGStatesTracker:
    """Random states by name: inside `fork` a named one is in force, and goes on where it was.

    So ranks draw equal numbers for what they share and different ones for what they do not. The
    state is that of the current device of the machine's accelerator, or of the CPU where there is
    none; where there is one, the CPU's generator is left alone.

    On CUDA devices states are generators (`graph_safe_rng_available`), elsewhere bytes. `fork` in a
    CUDA graph needs the generators that `get_all_rng_states` gives to be registered before the
    capture, by ``torch.cuda.CUDAGraph.register_generator_state``; each replay then advances them as
    a run does.
    """

    def __init__(self) -> None:
        self.reset()
        _TRACKERS.add(self)

    def reset(self) -> None:
        """Forget all names."""
        self.states_: dict[str, State] = {}
        self.seeds_: set[int] = set()  # that were given

    def get_states(self) -> dict[str, State]:
        """Copies of the states by name: generators of their own, where states are generators."""
        return {
            name: state.clone_state() if is_graph_safe_rng_state(state) else state
            for name, state in self.states_.items()
        }

    def set_states(self, states: dict[str, State]) -> None:
        """Take over states that `get_states` gave: all names from now on.

        A generator that is there keeps its place, as captured graphs know it, and takes the values.
        """
        given = _checked_states("CudaRNGStatesTracker.set_states", states)
        self.states_ = {name: self._taken(name, state) for name, state in given.items()}

    def _taken(self, name: str, state: State) -> State:
        """A state as this tracker is to have it."""
        if not is_graph_safe_rng_state(state):
            return state
        own = self.states_.get(name)
        if own is state:
            return state
        if not is_graph_safe_rng_state(own):
            return state.clone_state()
        own.set_state(state.get_state())
        return own

    def add(self, name: str, seed: int) -> None:
        """Begin a state from a seed; the generator itself stays as it is.

        RuntimeError where the name or the seed is there already: equal seeds would draw equal
        numbers. TypeError for a seed that is no int.
        """
        if not hasattr(seed, "__index__"):
            raise TypeError(f"CudaRNGStatesTracker.add: seed={seed!r}, expected an int")
        if seed in self.seeds_:
            raise RuntimeError(f"CudaRNGStatesTracker.add: seed {seed} is there already")
        if name in self.states_:
            raise RuntimeError(f"CudaRNGStatesTracker.add: name {name!r} is there already")
        self.states_[name] = _new_state(seed)
        self.seeds_.add(seed)

    def fork(self, name: str = "model-parallel-rng") -> "_Fork":
        """Draw from a named state in a ``with`` block; KeyError where it was not added."""
        return _Fork(self, name)


class _Fork(Context, contextlib.ContextDecorator):
    """See `CudaRNGStatesTracker.fork`."""

    def __init__(self, tracker: CudaRNGStatesTracker, name: str) -> None:
        self._tracker, self._name = tracker, name
        self._before: State | None = None  # state of the generator, while it is in use
        self._draws = False  # from the state of the name
        self._after: State | None = None  # that, once the block has ended

    def _recreate_cm(self) -> "_Fork":
        """Give each call of a decorated function a context of its own."""
        return _Fork(self._tracker, self._name)

    def _enter(self) -> None:
        states, name = self._tracker.states_, self._name
        if name not in states:
            raise KeyError(
                f"CudaRNGStatesTracker.fork: no state {name!r}, there are {sorted(states)}; "
                "call add(name, seed) first"
            )
        self._after, self._draws, self._before = None, False, _state_now(states[name])
        self._undo_by(self._give_back)
        _put_state(states[name])
        self._draws = True

    def _give_back(self) -> None:
        if self._before is None:
            return
        if self._draws and self._after is None:
            self._after = _state_now(self._before)
        if self._after is not None and not is_graph_safe_rng_state(self._after):  # went on in place
            self._tracker.states_[self._name] = self._after
        _put_state(self._before)
        self._before = None


_TRACKERS: "weakref.WeakSet[CudaRNGStatesTracker]" = weakref.WeakSet()


def get_all_rng_states() -> dict[str, State]:
    """States by name of all trackers that are alive; generators are theirs, and go on in place.

    Trackers that share a name are taken for one: either's state is there.
    """
    return {name: state for each in list(_TRACKERS) for name, state in each.states_.items()}


def set_all_rng_states(states: dict[str, State]) -> None:
    """Give every tracker those states, as `get_all_rng_states` gave them, whose names it has."""
    _checked_states("set_all_rng_states", states)
    for each in list(_TRACKERS):
        each.set_states({name: states.get(name, own) for name, own in each.states_.items()})


# ---- what is not there ---------------------------------------------------------------------------


def is_ep_bootstrapped() -> bool:
    """Return whether the exchange of tokens between experts is set up: never."""
    return False


def is_symm_backed(t: Tensor) -> bool:
    """Return whether a tensor lies in memory that `symm_mem_alloc` gave: never."""
    del t
    return False


# ---- modules and parameters --------------------------------------------------------------------


def set_tensor_model_parallel_attributes(
    tensor: Tensor, is_parallel: bool, dim: int, stride: int
) -> None:
    """Say on a parameter how it is split over the ranks of tensor parallelism.

    RuntimeError where it has been said.
    """
    names = ("tensor_model_parallel", "partition_dim", "partition_stride")
    for name in names:
        if hasattr(tensor, name):
            raise RuntimeError(f"set_tensor_model_parallel_attributes: {name} is set already")
    for name, value in zip(names, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


def initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: Callable[[Tensor], Any],
    get_rng_state_tracker: Callable[[], Any],
    partition_dim: int = 0,
    stride: int = 1,
    set_tp_attributes: bool = True,
) -> None:
    """Initialise a rank's part of a weight from a random state of its own, in place.

    That of the tracker's ``fork()``; from the current one where `get_rng_state_tracker` is None.
    `partition_dim` and `stride` go to `set_tensor_model_parallel_attributes`, unless told not to.
    """
    if set_tp_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    forked = get_rng_state_tracker is not None
    with get_rng_state_tracker().fork() if forked else contextlib.nullcontext():
        init_method(weight)


def get_te_classes() -> list[type]:
    """The classes of modules of this library that have parameters or FP8 state of their own."""
    package = importlib.import_module("transformer_engine.pytorch")  # which imports this module
    names = (
        "LayerNorm RMSNorm Linear LayerNormLinear LayerNormMLP DotProductAttention "
        "MultiheadAttention TransformerLayer"
    )
    return [getattr(package, name) for name in names.split()]


def has_te_modules(network: torch.nn.Module) -> bool:
    """Return whether a network has modules of this library with FP8 GEMMs."""
    return any(isinstance(module, Fp8Module) for module in network.modules())
