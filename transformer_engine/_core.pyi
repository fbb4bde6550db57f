# SPDX-License-Identifier: Apache-2.0
"""The native module: plans, operators, backends and counters over framework tensors.

It imports no framework: `transformer_engine.pytorch` hands torch over with `bind_torch`. dtypes are
the `DTYPE_*` integers, tensors are `torch.Tensor` or `torch.nn.Parameter` objects exactly; an
instance of another class goes to the `classify` hook of `bind_torch` first. Tensors of all leading
dims are read as matrices [product of the leading dims, last dim]. What is read and has strides that
no matrix has (an expanded gradient) or a set negative bit is copied; what is written must have a unit
stride in the last dim, and is refused otherwise.

Exceptions: ValueError (a value, shape or size that can not be), TypeError (dtype or class),
NotImplementedError (legal, but no backend has it), MemoryError, RuntimeError (wrong moment: closed
context, external stages; or a failing device), and whatever a Python backend raised.
"""

from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import Any, Final, final

import torch
from torch import Tensor

from transformer_engine._core_names import *  # noqa: F403 - other constants, records, operators
from transformer_engine._core_names import Graph, PlanDescription

version: Final[str]

_Slots = int | tuple[int, ...]

OPERAND_ROLES: Final[int]
"""Operands of a linear node; number node * OPERAND_ROLES + 1 is its weight in quantized form."""

ATTENTION_INPUTS: Final[tuple[str, ...]]
"""Inputs of an attention node, in order."""
ATTENTION_NUMBERS: Final[tuple[str, ...]]
"""Its numbers, likewise."""
LINEAR_STAGES: Final[tuple[str, ...]]
"""Stages of a linear node; its lists of steps have their numbers here."""

AMAX_PARTIALS: Final[int]
"""Elements of a `partials` tensor."""

# ---- torch -----------------------------------------------------------------------------------

def bind_torch(torch_module: Any, classify: Callable[[Any], Tensor] | None = None, /) -> None:
    """Take from torch what the entry points need. Called once by `transformer_engine.pytorch`.

    `classify(tensor)` is asked about an instance of a subclass of `Tensor`: it returns a plain tensor
    to use instead, or raises a TypeError that names the class. Without it every subclass is refused.
    Calling again replaces the binding.
    """

def tensors_of_call(
    inp: torch.Tensor, places: tuple[tuple[dict, str] | None, ...], /
) -> tuple[tuple[int, int, int, int, bytes | None] | None, tuple[torch.Tensor | None, ...]]:
    """((dtype, device or -1, last size, flags, dtypes), (inp, parameter or None, ...)) of a call.

    `places` are those of the module's parameters, (dict, key), or None for one that it lacks. (None,
    ()) where inp or a parameter is no plain tensor with memory or one is missing: such a call is
    decided by itself. The flags say which of them require a gradient. The dtypes are None where all
    have that of inp, else two bytes for each.
    """

def facts_of_heads(*tensors: torch.Tensor) -> bytes | None:
    """Facts that decide an attention of up to three tensors of heads: two attentions whose facts, and
    other arguments, are equal are of one kind.

    Each has one or two leading dims, heads and channels, or one more dim where it holds several of
    queries, keys and values. The facts are dtypes, devices, heads and channels, which tensors require
    a gradient or are dense; of the leading dims whether they are equal and whether they are 0, 1 or
    more. None where one is no plain tensor with memory, or none of heads: such a call is decided by
    itself.
    """

def only_forward(modules: tuple[Any, ...], call: Any, prefix: str, /) -> bool:
    """Whether calls of modules run nothing but the forwards that their classes define.

    `call` is the ``__call__`` that their classes have to have, `prefix` how the names of the modules
    begin where these stand. See `torchside.modes.only_forwards`.
    """

def dtype_code(dtype: torch.dtype, /) -> int:
    """`DTYPE_*` of a torch dtype; TypeError for one that has no code."""

def torch_dtype(code: int, /) -> torch.dtype:
    """The torch dtype of a `DTYPE_*` code; ValueError for a bad code."""

def dtype_names() -> tuple[str, ...]:
    """Names by code: ("f32", "f16", "bf16", "e4m3", ...)."""

def op_names() -> tuple[str, ...]:
    """Names of the operators, in the order of the operator table."""

def op_fields(name: str, /) -> tuple[tuple[str, str, str, bool], ...]:
    """(name, type, access, required) of each argument of an operator, `context` left out.

    The type is "tensor", "float", "int" or "bool", the access "read", "write" or "update". ValueError
    for an unknown name.
    """

def activation_names() -> tuple[str, ...]:
    """Names of the activations, in the order of their numbers: ("gelu", "geglu", ...)."""

def has_cuda() -> bool:
    """True where the library was built with its CUDA backend (it says nothing about a device)."""

# ---- XLA -------------------------------------------------------------------------------------

XLA_SCRATCH_ALIGN: int  # bytes of scratch or workspace that a custom call takes besides

def xla_handlers() -> dict[str, dict[str, Any]]:
    """{target: {platform: capsule}} of the custom calls of csrc/xla, for `jax.ffi`."""

def op_workspace(
    name: str,
    fields: dict[str, float | tuple[int, tuple[int, ...]]],
    device_type: int,
    device_index: int = 0,
    /,
) -> int:
    """Bytes of workspace that an operator takes on this device, by descriptions of its arguments.

    A tensor is (DTYPE_*, shape) and taken to be dense, a number is a number; fields that are left out
    are absent, or have their initial values. ValueError for an unknown operator or field.
    """

# ---- plans -----------------------------------------------------------------------------------

@final
class Plan:
    """A plan of `make_plan`, which is freed when nobody in the process holds it any more."""

    id: Final[int]  # the same for the same graph in every process

# The records are the structs of transformer_engine_graphs.h and transformer_engine_plans.h, which say
# what each member means. Members that are not given have the values that they have in C. Functions
# take any object with these attributes, and dicts; an int is an Extent, too: that of so many.

def make_plan(direction: int, graph: Any, /) -> Plan:
    """A plan of a graph (see Graph). All who make it share what is native of it; DIRECTION_*.

    ValueError or TypeError for a graph that can not be, NotImplementedError for gradients that no plan
    has.
    """

def write_graph(direction: int, graph: Any, /) -> str:
    """A graph and a direction as a line of text (te_graph_write): equal ones have equal texts.

    Whether there is such a plan is not checked.
    """

def read_graph(text: str, /) -> tuple[int, Graph]:
    """Direction and graph of a text of `write_graph`; ValueError for any other text."""

def plan_count() -> int:
    """How many plans somebody in the process holds."""

def plan_describe(plan: Plan, /) -> PlanDescription:
    """Buffers and stages of a plan, in plan order."""

def plan_infer(plan: Plan, rows: int | tuple[int, ...], /) -> tuple[int, int, tuple[int, ...]]:
    """(saved bytes, scratch bytes of the plan's own, byte offset per buffer); pure arithmetic.

    rows: the value of SYMBOL_ROWS, or a tuple of its value and those of the symbols behind it.
    Offsets count within the packed saved or scratch buffer; -1 for buffers of other roles.
    """

def plan_ports(plan: Plan, first: int, end: int, /) -> bytes:
    """What a run of the stages from `first` to before `end` does with each buffer, a byte each.

    PORT_GIVEN: it reads or changes what was there before. PORT_MADE: who runs other stages, or the
    plan, reads what it leaves there. Views have neither.
    """

def plan_scratch(
    plan: Plan, rows: int | tuple[int, ...], device_type: int, device_index: int = 0, /
) -> int:
    """Bytes of scratch that a run on this device takes, operator workspaces included."""

def run(plan: Plan, slot_fwd: _Slots, slot_bwd: _Slots, /, *tensors: Any) -> tuple[Any, ...]:
    """Run a whole plan; the hot entry point of every module.

    `slot_fwd` and `slot_bwd` are the module's first slots; of several modules a tuple. `tensors` are,
    positionally:

    1. one tensor per buffer of role input, parameter or state, in plan order;
    2. for a plan that is not a forward one and has saved buffers: the packed saved tensor that the
       forward returned. Such a plan without saved buffers takes None there, or nothing;
    3. only for a plan that has no input with leading dims (a deferred weight gradient, say): the
       number of rows, an int.

    Returns the output tensors in plan order (a plan lists only those that it makes), followed by the
    packed saved tensor (uint8) of a forward plan. The last item is None for a forward plan that saves
    nothing and for every other plan, so `*outputs, saved = run(...)` is always right. An output with
    leading dims gets those of the first input that has them. Outputs come from `torch.empty`.

    RuntimeError for a plan with external stages: those run by `run_staged`.
    """

def run_consuming(
    plan: Plan, slot_fwd: _Slots, slot_bwd: _Slots, /, *tensors: Any
) -> tuple[Any, ...]:
    """`run` of a plan after which nobody reads the packed saved tensor.

    It may write over it: scratch of the plan lies in members that no stage reads any more.
    """

def run_staged(
    plan: Plan,
    slot_fwd: _Slots,
    slot_bwd: _Slots,
    functions: dict[str, Callable[[Any], Any]],
    observer: Callable[[int, Any, bool], Any] | None,
    make_buffers: Callable[[Callable[[int], Tensor], int, int], Any],
    /,
    *tensors: Any,
) -> tuple[Any, ...]:
    """`run` with Python functions at stages, called inside the run; arguments and result as there.

    functions: ``f(buffers)`` by stage name, one for each external stage; of a second half
    ``f(buffers, started)``, with what the first one has returned, also where the run fails in
    between. observer: ``f(stage number, buffers, done)``, called before and after every stage. What
    they raise ends the run. buffers: what ``make_buffers(lend, rows, slot)`` gave, once; `lend(number)`
    is the argument or the output of that buffer, or a tensor over its packed memory, which it keeps.
    `lend` is for functions while they run, slot the first one in the chunk of the plan's direction.
    """

def lie_in(tensor: Tensor, parts: tuple[Tensor, ...], rows: tuple[int, ...], /) -> bool:
    """Return whether the parts are consecutive rows of a tensor, as `split_storage` made them."""

def split_storage(tensor: Tensor, rows: tuple[int, ...], /) -> tuple[Tensor, ...]:
    """Consecutive rows of a tensor as tensors with storages of their own over its memory.

    `tensor` is a plain, contiguous tensor of any dtype with at least as many rows (dim 0). Each part
    keeps the tensor object alive, and its storage ends where the part does, so that savers write it
    once and whole. The storages can not be resized.
    """

# ---- contexts --------------------------------------------------------------------------------

@final
class Context:
    """Host objects of one device: vendor handles, loaded kernels, plan and algorithm caches.

    Entry points without a `context` use the module's own one per device, made at first use.
    """

    def __new__(cls, device_type: int, index: int = 0) -> Context: ...
    device: Final[tuple[int, int]]  # (device type, index)
    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Release what it holds; a second call does nothing. RuntimeError while a call is running."""

# ---- operators whose implementations are chosen from Python --------------------------------------

@final
class Implementation:
    """A function that an operator may call; `supports`: whether it takes a call, by its arguments."""

    def __new__(
        cls,
        op: str,
        impl_id: str,
        function: Callable[..., Any],
        supports: Callable[..., Any] | None = None,
    ) -> Implementation: ...
    op: Final[str]
    impl_id: Final[str]
    function: Final[Callable[..., Any]]
    @property
    def calls(self) -> int:
        """How often it was called."""

    @property
    def reason(self) -> str | None:
        """Why it did not take the last call that it did not take, where `supports` gave a text."""

@final
class Predicate:
    """True where a call is taken: `fits` of dtype and device of its first tensor, asked once for each
    pair (without `by_device` for each dtype), and where that holds `supports` of its arguments. Where
    it gives None the next tensor is asked about. A call without tensors fits. A text that `supports`
    gives is why a call is not taken, and the answer.
    """

    def __new__(
        cls,
        fits: Callable[[Any, Any], bool | None],
        supports: Callable[..., Any] | None = None,
        by_device: bool = True,
    ) -> Predicate: ...
    def __call__(self, *args: Any, **kwargs: Any) -> bool | str: ...

@final
class Operator:
    """Calls the first of its implementations in force that takes the call.

    What that raises gets a note with its name; no other one is called after it. Where none takes the
    call the dispatcher's `refuse` raises.
    """

    __name__: Final[str]
    __wrapped__: Final[Callable[..., Any]]
    """The function that has its signature and its docstring, by the dispatcher's `describe`."""
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

class Scope:
    """Puts a policy in force for a thread, inside ``with``; it may be entered again.

    RuntimeError where one is left that is not the innermost of the thread.
    """

    def __new__(cls, policy: Any) -> Scope: ...
    policy: Final[Any]
    selection: Final[Selection | None]
    """Table that runs of plans ask in a scope of a table; None for a scope of a policy."""
    @property
    def in_force(self) -> bool:
        """True where the thread obeys its table anyway; False for a scope of a policy."""

    def __enter__(self) -> Any: ...  # the policy
    def __exit__(self, *error: Any) -> None: ...

@final
class Leaving:
    """An ``__exit__`` that no interrupt can keep from restoring: a decorator of the method.

    ``_outer`` of the context manager is a tuple of records while it is active, and None else:
    (object, names, values) of attributes, and (function, arguments) of calls that restore something
    and can be repeated: one that an interrupt ends is made again. They are undone in order, and
    ``_outer`` becomes None, before the function is called, which torch.compile traces alone: there
    it restores them itself. RuntimeError where it is None.
    """

    __func__: Callable[..., Any]
    __self__: Any
    def __new__(cls, function: Callable[..., Any]) -> Leaving: ...
    def __get__(self, context: Any, owner: Any = None) -> Leaving: ...
    def __call__(self, *args: Any) -> Any: ...

@final
class Entering:
    """An ``__enter__`` that is undone where it fails: a decorator of the method.

    The function sets ``_outer`` (see `Leaving`) before it changes anything. Where an error or an
    interrupt ends it, the records are undone and ``_outer`` becomes None. Between its return and
    the ``with`` block no interrupt comes.
    """

    __func__: Callable[..., Any]
    __self__: Any
    def __new__(cls, function: Callable[..., Any]) -> Entering: ...
    def __get__(self, context: Any, owner: Any = None) -> Entering: ...
    def __call__(self, *args: Any) -> Any: ...

@final
class NativeSlot:
    """An operator of a plug-in that is a shared object: a call runs it, and nothing else.

    It takes the arguments of the function of `_core` that has the operator's name, and raises
    NotImplementedError for a call that it does not take. Other errors say whose they are.
    """

    op: Final[str]
    backend: Final[str]
    vendor: Final[str | None]
    kind: Final[str]  # kind of its source: "vendor", "default" or "reference"
    device: Final[int]
    priority: Final[int]
    @property
    def calls(self) -> int:
        """How often it ran without an error, in this process, whoever called it."""

    def supports(self, *args: Any, **kwargs: Any) -> bool: ...  # whether it takes this call
    def __call__(self, *args: Any, **kwargs: Any) -> None: ...

def load_plugin(path: str | PathLike[str] | bytes, /) -> tuple[NativeSlot, ...]:
    """The operators that a shared object registers; the same objects whenever it is loaded again.

    A path without a slash is looked for as the dynamic linker does. It stays loaded. ValueError
    where it can not be loaded or is no plug-in; else whatever its ``te_plugin_init`` failed with.
    """

@final
class Choice:
    """Calls the first of some implementations that takes a call, whatever is in force.

    Where none takes it ``refuse(name, implementations)`` raises; without it the answer is
    NotImplemented. With `keywords` those of a call go to the implementations for which it is True,
    and to no `supports`; None: to all.
    """

    def __new__(
        cls,
        name: str,
        implementations: tuple[Implementation, ...],
        refuse: Callable[[str, tuple[Implementation, ...]], Any] | None = None,
        keywords: tuple[bool, ...] | None = None,
    ) -> Choice: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

@final
class Selection:
    """Functions that runs of plans ask before the backends that are registered.

    Of each operator in their order: ``(operator, function, fields)``. A function is as those of
    `register_backend`; it gets the fields that are named, None: all. Or it is a `NativeSlot` of the
    operator, without fields. The `others` are functions by name, which `selected_function` gives.
    """

    def __new__(
        cls,
        slots: tuple[tuple[str, Callable[..., Any], tuple[str, ...] | None], ...],
        others: dict[str, Callable[..., Any]] = {},
    ) -> Selection: ...
    number: Final[int]  # a number that no other one of the process has

@final
class Dispatcher:
    """Operators, and the table by which they call: a tuple of `Implementation` for each place.

    Place 0 of the dispatcher that runs of plans obey (`obey`) has what these ask: a `Selection`, or
    None.

    ``resolve(policy)`` makes the table of a policy, None: of that outside of every `Scope`; it is
    asked where a policy or `publish` is new to a thread. ``refuse(name, asked)`` raises.
    ``describe(name)`` gives a function that has the signature of an operator.
    """

    def __new__(
        cls,
        resolve: Callable[[Any], tuple[tuple[Implementation, ...], ...]],
        refuse: Callable[[str, tuple[Implementation, ...]], Any],
        describe: Callable[[str], Callable[..., Any]] | None = None,
    ) -> Dispatcher: ...
    def publish(self, table: tuple[tuple[Implementation, ...], ...] | None, /) -> None:
        """Put a table in force outside of every scope; None: it is made at the next call."""

    def table(self) -> tuple[tuple[Implementation, ...], ...]:
        """The table that calls of this thread read."""

    def operator(self, index: int, name: str, /) -> Operator:
        """The operator at a place of the table."""

    def selection(self) -> Scope:
        """A scope of the table in force, for any thread, at any time."""

def obey(dispatcher: Dispatcher | None, /) -> None:
    """Have runs of plans ask what the tables of a dispatcher have at place 0; None: nobody."""

def find_selections(find: Callable[[], Any], /) -> None:
    """Call ``find()`` before the first run that obeys nobody, and after ``obey(None)``."""

def meet_devices(meet: Callable[[Tensor, int], Any], /) -> None:
    """Call ``meet(tensor, dlpack)`` for a tensor of a device type that was not met yet.

    `dlpack` is the type's DLDeviceType. It adds the type, and ends with `device_is_met`: until that
    it is called for each tensor of the type, on any thread.
    """

def device_is_met(device_type: int, torch_name: str, stream: Callable[[int], int], /) -> None:
    """Have `meet_devices` be called no more for a type that was added, torch's name of which it is.

    ``stream(index)`` gives the handle that operators in C get as their stream, 0 for NULL.
    ValueError for another number.
    """

def add_device_type(name: str, dlpack: int, /) -> int:
    """Number of a device type, which is added if it is not there.

    `dlpack` is its DLDeviceType. Backends that are registered for the number run its operators.
    ValueError for a name or a number that another type has; RuntimeError where no more types fit.
    """

def device_type_name(device_type: int, /) -> str:
    """Name of a device type, "invalid" of one that is not there."""

def count_gemm(device_type: int, a: int, b: int, /) -> None:
    """Count a GEMM by the ``DTYPE_*`` of its operands, where a function of Python ran it."""

def count_attention(device_type: int, dtype: int, backward: int, /) -> None:
    """Count an attention, or its gradient, by the ``DTYPE_*`` of its queries."""

def count_emulated(mode: int, /) -> None:
    """Count a GEMM of operands that were multiplied out from a ``SCALING_*``."""

def count_mixed() -> None:
    """Count a GEMM of operands that were multiplied out for having different modes."""

def before_cuda(check: Callable[[], Any], /) -> None:
    """Call ``check()`` before a context of a CUDA device is made: it may raise."""

def obeying(name: str, /) -> Callable[..., None]:
    """The function of an operator that asks first what runs of plans ask.

    Its arguments are those of the function of the module, which runs this library's own.
    """

def selected() -> Scope | None:
    """A scope of what runs of this thread obey; None: nobody."""

def unselected() -> Scope | None:
    """A scope in which runs ask nobody; None where they do not anyway."""

def selection_number() -> int:
    """Number of the `Selection` that runs of this thread ask first, or 0."""

def selected_function(name: str, /) -> Callable[..., Any] | None:
    """What the `Selection` that runs of this thread ask has among its others under a name."""

def label_scopes(labels: Any, /) -> None:
    """Have each thread show which `Scope` it is in: as a str, ``scope`` of a threading.local.

    Threads that are in one already show it when they enter or leave the next.
    """

def policy_in_force() -> Any:
    """The policy of the innermost `Scope` of this thread, or None."""

# ---- devices ------------------------------------------------------------------------------------

def cuda_configure(force_source: bool, cache_dir: Any = None, /) -> None:
    """Where the CUDA backend gets its device code, for the process and from the next context on.

    `force_source` compiles the embedded source with NVRTC even where an embedded binary would load;
    `cache_dir` (a path, or None: nothing is kept) keeps what was compiled. NotImplementedError where
    `has_cuda()` is false.
    """

def tune_gemm(
    device_type: int, device_index: int, enabled: bool, cache_file: Any = None, /
) -> None:
    """Time the candidates of each new GEMM problem on the module's own contexts of a device.

    `cache_file` (a path or None) keeps the winners across processes. The setting holds for contexts
    after `close_contexts` too; `enabled` False ends it. NotImplementedError on other devices than CUDA.
    """

def update(
    kind: int,
    flags: int,
    lists: tuple[list[Tensor] | None, ...],
    flag: Tensor | None,
    numbers: tuple[float, ...],
    step: int,
    device_numbers: tuple[Tensor | None, ...],
    casts: tuple[dict[str, Any], ...] | None = None,
    /,
) -> None:
    """One pass over lists of tensors: a step of Adam or gradient descent, products, scales of amaxes.

    `kind` and `flags` are UPDATE_*. The `lists` are gradients, values, means, means of squares,
    rounded values and remainders (bf16 over their 16 bits), None where there is none; tensors are
    dense, of float32, float16 or bfloat16, one dtype for a list; a gradient of other strides is
    copied. `flag` is int32 [1]. The `numbers`: lr, beta1, beta2, eps, weight decay, factor of
    gradients, momentum, dampening, largest number of a dtype. `device_numbers` (lr, factor of
    gradients: float32 [1]; step: int32 [1]) come in place of those where they are not None. `casts`
    are fields of `quantize` for each tensor: its new values are cast so, with one scale in the same
    pass. The formulas: transformer_engine_updates.h.
    """

def l2norm(
    tensors: Sequence[Tensor],
    factor: Tensor | None,
    flag: Tensor | None,
    per_tensor: bool,
    flags: int = 0,
    /,
) -> tuple[Tensor, Tensor] | None:
    """(norm of all elements, [1]; norms of the tensors, [tensors], or [0] if not asked), float32.

    The `tensors`, one at least, are of float32, float16 or bfloat16 each, on one device; one that is
    not dense is copied. `factor` (float32 [1]) multiplies elements before they are squared; `flag`
    (int32 [1]) is set to 1 where the norm is Inf or NaN. The same bits in every run and on every
    device. With `flags` L2NORM_CHECK the arguments are checked alone: None. ValueError, TypeError:
    a size, dtype, device or class that can not be.
    """

def close_contexts() -> None:
    """Close the module's own contexts; the next use makes new ones."""

# ---- operators ---------------------------------------------------------------------------------
#
# te_<name>_args in csrc/include/transformer_engine_ops.h has the meaning of every argument. Matrices
# have all leading dims flattened. An optional tensor that is None is not read, or not computed.
#
# ValueError names an argument with a wrong shape, stride, number or device, TypeError one with a wrong
# dtype or class; NotImplementedError where no backend of the device has the operator.

# ---- backends --------------------------------------------------------------------------------

def register_backend(
    name: str,
    device_type: int,
    priority: int,
    functions: Mapping[str, Callable[[dict[str, Any]], Any]],
    /,
) -> None:
    """Put Python functions into the operator table, by operator name.

    A function gets one dict with an entry per argument of the operator, by its name (`op_fields`):
    tensors, None where absent, and plain numbers. It writes into the tensors. They are views of memory
    that is valid during the call only: keep none.
    NotImplemented as the result hands the call to the backend with the next lower priority (built-in
    ones have 0); another result is ignored. An exception propagates to the caller of the operator.
    """

def unregister_backend(name: str, /) -> None:
    """Take a backend of `register_backend` out again. ValueError for an unknown name."""

# ---- counters --------------------------------------------------------------------------------

def counters() -> dict[str, int]:
    """Counts of what ran, without zeros: "gemm.cpu.e4m3.e4m3", "op.cuda.quantize", "fallback.<why>"."""

def reset_counters() -> None:
    """Set all counters to 0."""
