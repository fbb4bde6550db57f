# SPDX-License-Identifier: Apache-2.0
"""Plans and operators of the C library as custom calls of XLA.

Each is a primitive of JAX, so a program that is traced for a CPU and one for a GPU are the same:
how much scratch a call takes is asked when it is lowered for a platform. csrc/xla says how a call
is handed over, docs/internals/xla.md why so. Neither primitive can be differentiated: `custom_vjp`
pairs the plans of a module.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import lead_of, result_shapes, sizes_of

_PLATFORMS = {"cpu": _core.DEVICE_CPU, "cuda": _core.DEVICE_CUDA}

_CODES = {
    jnp.dtype(getattr(jnp, name)): getattr(_core, f"DTYPE_{code}")
    for name, code in {
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "float8_e4m3fn": "E4M3",
        "float8_e5m2": "E5M2",
        "uint8": "U8",
        "int32": "I32",
        "int64": "I64",
    }.items()
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}
_READ_AS = {
    jnp.dtype(bool): _core.DTYPE_U8,
    jnp.dtype(jnp.float8_e8m0fnu): _core.DTYPE_U8,
    jnp.dtype(jnp.uint32): _core.DTYPE_I64,  # pairs
}
_SHORT = {_core.DTYPE_E4M3: "f8_e4m3fn", _core.DTYPE_E5M2: "f8_e5m2"}  # as JAX prints them


def code_of(dtype: Any) -> int:
    """``_core.DTYPE_*`` for a dtype of JAX."""
    return _CODES[jnp.dtype(dtype)]


def dtype_of(code: int) -> Any:
    """Dtype of JAX for ``_core.DTYPE_*``."""
    return _DTYPES[code]


# ---- registration --------------------------------------------------------------------------------


@functools.cache
def register() -> None:
    """Give the custom calls to JAX, once; starts its backend.

    RuntimeError where a call does not come through: JAX itself says nothing of a handler that XLA
    has refused until a program names it.
    """
    for target, platforms in _core.xla_handlers().items():
        for platform, handler in platforms.items():
            stages = {"instantiate": handler, "execute": handler}
            jax.ffi.register_ffi_target(target, stages, platform=platform)
    one = {"output": jax.ShapeDtypeStruct((1, 1), jnp.float32)}
    smoke = jax.jit(lambda: _bind_operator("fill", one, {"value": 1.0})["output"])
    filled = smoke.lower().compile()().tolist()  # compiled first: a program may be traced just now
    if filled != [[1.0]]:
        raise RuntimeError(f"a custom call on {jax.default_backend()} gave {filled}, not 1")


def _made(primitive: Primitive) -> Primitive:
    """Make a primitive run by itself, and in batches one by one."""
    primitive.multiple_results = True

    @functools.lru_cache
    def jitted(params: tuple) -> Any:
        return jax.jit(lambda *arrays: primitive.bind(*arrays, **dict(params)))

    def batch(arrays: Sequence, dims: Sequence, **params: Any) -> tuple[Sequence, list[int]]:
        mapped = [dim is not None for dim in dims]
        pairs = zip(arrays, dims, mapped, strict=True)
        arrays = [jnp.moveaxis(array, dim, 0) if of else array for array, dim, of in pairs]

        def one(batched: list) -> Sequence:
            each = iter(batched)
            pairs = zip(arrays, mapped, strict=True)
            return primitive.bind(*(next(each) if of else array for array, of in pairs), **params)

        results = jax.lax.map(one, [a for a, of in zip(arrays, mapped, strict=True) if of])
        return results, [0] * len(results)

    primitive.def_impl(lambda *arrays, **params: jitted(tuple(params.items()))(*arrays))
    batching.primitive_batchers[primitive] = batch
    return primitive


def _lower(ctx: Any, target: str, operands: Sequence, scratch: int, aliases: dict, **attributes):  # noqa: ANN202
    """Lower to a custom call with so many bytes of scratch as its last result, which is dropped."""
    size = scratch + _core.XLA_SCRATCH_ALIGN
    results = [*ctx.avals_out, jax.core.ShapedArray((size,), jnp.dtype(jnp.uint8))]
    rule = jax.ffi.ffi_lowering(target, operand_output_aliases=aliases)
    return rule(ctx.replace(avals_out=results), *operands, **attributes)[:-1]


# ---- plans ---------------------------------------------------------------------------------------


class PlanResults(NamedTuple):
    """What a plan gives."""

    outputs: list[jax.Array]  # in plan order
    states: list[jax.Array]  # the new ones of those that it writes, in plan order
    saved: jax.Array | None  # what its backward reads: uint8 [bytes], of a forward that saves


class _PlanParameter(NamedTuple):
    """A plan as a parameter of the primitive, short in print: with its dtypes of FP8."""

    plan: Plan

    def __repr__(self) -> str:
        described = self.plan.described
        found = {_SHORT[b.dtype] for b in described.buffers if b.dtype in _SHORT}
        return f"<{', '.join((described.direction, *sorted(found)))}>"


def _writes(plan: Plan) -> list[int]:
    """Numbers of the states that a plan writes, which are numbers of arguments."""
    buffers = enumerate(plan.described.buffers)
    return [i for i, buffer in buffers if buffer.role == "state" and buffer.written]


def _saves(plan: Plan, makes: bool) -> bool:
    """Return whether a plan makes a saved tensor, or is given one."""
    forward = plan.described.direction == "forward"
    return forward == makes and any(buffer.role == "saved" for buffer in plan.described.buffers)


def call_plan(
    plan: Plan,
    arrays: Sequence[jax.Array],
    saved: jax.Array | None = None,
    *,
    rows: int = -1,
    slots: Sequence[int] = (0,),
) -> PlanResults:
    """Run a plan.

    Parameters
    ----------
    plan
        Without external stages.
    arrays
        Inputs, parameters and states, in plan order, of any number of leading dims where a buffer
        has them. Of delayed scaling the states are the scales, float32 [n], and the amaxes,
        float32 [1, n], zero before the call, by slots. Pairs of a seed and an offset, int64 [2],
        may be given as uint32 [4], the low half of each first.
    saved
        What the forward has saved, for a plan that reads it.
    rows
        The number of tokens, for a plan of which no input has them.
    slots
        The first slot of each module that the plan is of, in the states of its direction.

    TypeError for another number of arrays. Whatever else is wrong with them is an error of XLA
    when the call runs (`jax.errors.JaxRuntimeError`), with the text of the C library.
    """
    register()
    reads = _saves(plan, makes=False)
    if len(arrays) != plan.given or reads != (saved is not None):
        wanted = f"{plan.given} arrays and {'the' if reads else 'no'} saved tensor"
        got = f"{len(arrays)} and {'one' if saved is not None else 'none'}"
        raise TypeError(f"plan: expected {wanted}, got {got}")
    given = (*arrays, saved) if reads else arrays
    slots = tuple(slots)
    made = plan_p.bind(*given, plan=_PlanParameter(plan), rows=rows, slots=slots)
    packed = made.pop() if _saves(plan, makes=True) else None
    count = len(made) - len(_writes(plan))
    return PlanResults(made[:count], made[count:], packed)


plan_p = _made(Primitive("te_plan"))


@plan_p.def_abstract_eval
def _plan_results(*given: Any, plan: _PlanParameter, rows: int, slots: Sequence[int]) -> list:
    del slots
    plan = plan.plan
    for at in (lead_of(plan, False), lead_of(plan, True)):
        wanted = len(plan.described.buffers[at].shape) if at >= 0 else 0
        if at >= 0 and (given[at].ndim < 1 or wanted > 2 and given[at].ndim != wanted):
            name = plan.described.buffers[at].name
            least = wanted if wanted > 2 else "at least 1"
            raise ValueError(f"plan: {name}: {given[at].ndim} dims, expected {least}")
    outputs, packed = result_shapes(plan, [array.shape for array in given], rows)
    made = [jax.core.ShapedArray(tuple(shape), dtype_of(code)) for code, shape in outputs]
    made += [given[at] for at in _writes(plan)]
    if _saves(plan, makes=True):
        made.append(jax.core.ShapedArray((packed,), jnp.dtype(jnp.uint8)))
    return made


def _lower_plan(
    ctx: Any, *operands: Any, device: int, plan: _PlanParameter, rows: int, slots: Sequence[int]
) -> Sequence:
    plan = plan.plan
    sizes = sizes_of(plan, [array.shape for array in ctx.avals_in], rows)
    scratch = _core.plan_scratch(plan.native, tuple(size or 0 for size in sizes[1:]), device)
    writes, outputs = _writes(plan), sum(b.role == "output" for b in plan.described.buffers)
    attributes = {
        "graph": plan.text,
        "id": np.int64(plan.native.id),
        "rows": np.int64(rows),
        "slots": np.array(slots, np.int32),
    }
    aliases = {at: outputs + i for i, at in enumerate(writes)}
    return _lower(ctx, "te_plan", operands, scratch, aliases, **attributes)


# ---- operators -----------------------------------------------------------------------------------


@functools.cache
def _fields(name: str) -> dict[str, "_Field"]:
    """Fields of an operator, by name."""
    listed = enumerate(_core.op_fields(name))
    return {field: _Field(at, *facts) for at, (field, *facts) in listed}


class _Field(NamedTuple):
    """What `_core.op_fields` says of a field."""

    place: int
    type: str
    access: str
    required: bool


def call_operator(
    name: str, results: dict[str, jax.ShapeDtypeStruct], /, **fields: Any
) -> dict[str, jax.Array]:
    """Run an operator of the operator table.

    Parameters
    ----------
    name
        One of ``_core.op_names()``.
    results
        Shape and dtype of each tensor that it is to write.
    fields
        Arrays that it reads or changes, and numbers, by field. A field that it changes, or one
        that it writes but is given (the sum that a GEMM adds to), comes back among the results;
        the given array keeps its values. None: absent. ``_core.op_fields`` lists the fields.

    Returns what it writes, in the order of the operator's fields. ValueError for an unknown
    operator, TypeError for an unknown field and for one that is missing. What else is wrong is an
    error when the call is lowered, by the kind that it has under torch (its workspace is asked for
    then), or one of XLA when it runs, with the text of the C library.
    """
    register()
    return _bind_operator(name, results, fields)


def _bind_operator(name: str, results: dict, fields: dict) -> dict:
    known = _fields(name)
    for field in (*results, *fields):
        if field not in known:
            raise TypeError(f"{name}: it has no field {field}")
    fields = {field: value for field, value in fields.items() if value is not None}
    for field, facts in known.items():
        if facts.required and field not in results and field not in fields:
            raise TypeError(f"{name}: {field}: missing required field")
        if field in results and (field in fields or facts.access != "write"):
            raise TypeError(f"{name}: {field}: it is read, or changed, so it is given, not made")
    numbers = {field: fields[field] for field in fields if known[field].type != "tensor"}
    given = [field for field in known if field in fields and field not in numbers]
    changed = [field for field in given if known[field].access != "read"]
    made = [field for field in known if field in results or field in changed]
    shapes = tuple((field, tuple(of.shape), jnp.dtype(of.dtype)) for field, of in results.items())
    arrays = operator_p.bind(
        *(jnp.asarray(fields[field]) for field in given),
        name=name,
        given=tuple(given),
        made=tuple(made),
        shapes=shapes,
        numbers=tuple(numbers.items()),
    )
    return dict(zip(made, arrays, strict=True))


operator_p = _made(Primitive("te_operator"))


@operator_p.def_abstract_eval
def _operator_results(*arrays: Any, given: tuple, made: tuple, shapes: tuple, **_: Any) -> list:
    known = dict(zip(given, arrays, strict=True))
    known |= {field: jax.core.ShapedArray(shape, dtype) for field, shape, dtype in shapes}
    return [known[field] for field in made]


def _described(array: Any) -> tuple[int, tuple[int, ...]]:
    """Dtype and shape of an array as the C library sees it."""
    shape = array.shape
    if array.dtype == jnp.uint32:
        shape = (*shape[:-1], shape[-1] // 2)
    if array.dtype not in _CODES and array.dtype not in _READ_AS:
        raise TypeError(f"{array.dtype} is no dtype of an operator")
    return (_CODES | _READ_AS)[array.dtype], shape


def _lower_operator(
    ctx: Any, *operands: Any, device: int, name: str, given: tuple, made: tuple, **params: Any
) -> Sequence:
    numbers = {field: float(value) for field, value in params["numbers"]}
    tensors = dict(zip(made, ctx.avals_out, strict=True))
    tensors |= dict(zip(given, ctx.avals_in, strict=True))
    described = {field: _described(array) for field, array in tensors.items()}
    attributes = {
        "operator": name,
        "given": np.int64(sum(1 << _fields(name)[field].place for field in given)),
        "made": np.int64(sum(1 << _fields(name)[field].place for field in made)),
        "numbers": {field: np.float64(value) for field, value in numbers.items()},
    }
    scratch = _core.op_workspace(name, described | numbers, device)
    aliases = {i: made.index(field) for i, field in enumerate(given) if field in made}
    return _lower(ctx, "te_operator", operands, scratch, aliases, **attributes)


for _platform, _device in _PLATFORMS.items():
    for _primitive, _rule in ((plan_p, _lower_plan), (operator_p, _lower_operator)):
        _of_device = functools.partial(_rule, device=_device)
        mlir.register_lowering(_primitive, _of_device, platform=_platform)
