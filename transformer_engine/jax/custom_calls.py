# SPDX-License-Identifier: Apache-2.0
"""Plans and operators of the C library as custom calls of XLA.

Each is a primitive of JAX, so a program that is traced for a CPU and one for a GPU are the same:
how much scratch a call takes is asked when it is lowered for a platform. csrc/xla says how a call
is handed over, docs/internals/xla.md why so. Neither primitive can be differentiated: `custom_vjp`
pairs the plans of a module.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import PartitionSpec

from transformer_engine import _core
from transformer_engine.common.plan_text import Plan
from transformer_engine.common.plans import lead_of, leading_dims, shape_of, sizes_of

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


def make_primitive(primitive: Primitive) -> Primitive:
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


def varying(array: Any) -> frozenset[str]:
    """Axes of `jax.shard_map` along which devices have different numbers, as far as is checked."""
    return jax.typeof(array).manual_axis_type.varying


def made_alike(arrays: Sequence) -> list:
    """The same arrays, each of which varies along the axes that any of them varies along."""
    axes = frozenset().union(*map(varying, arrays))
    missing = [tuple(sorted(axes - varying(array))) for array in arrays]
    pairs = zip(arrays, missing, strict=True)
    return [jax.lax.pcast(a, of, to="varying") if of else a for a, of in pairs]


def result_of(given: Sequence, shape: Sequence[int], dtype: Any) -> jax.core.ShapedArray:
    """A result of a call with these arguments, which are alike."""
    if not given:
        return jax.core.ShapedArray(tuple(shape), dtype)
    like = given[0]
    sharding = like.sharding.update(spec=PartitionSpec(*(None for _ in shape)))
    return like.update(
        shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding
    )


# ---- plans ---------------------------------------------------------------------------------------


class PlanResults(NamedTuple):
    """What a plan gives, each in plan order."""

    outputs: list[jax.Array]
    states: list[jax.Array]  # the new ones of those that it writes
    saved: list[jax.Array]  # what its backward reads, of a forward


RESULTS = ("output", "state", "saved")
"""Roles of the buffers of `PlanResults`."""

Outside = Callable[[_core.Stage, dict[int, jax.Array]], dict[int, jax.Array]]
"""Computes an external stage: of the arrays that are there, by numbers of buffers, those that it
writes."""


def summary(plan: Plan) -> str:
    """What is printed for a plan: its direction, and its dtypes of FP8."""
    described = plan.described
    found = {_SHORT[b.dtype] for b in described.buffers if b.dtype in _SHORT}
    return f"<{', '.join((described.direction, *sorted(found)))}>"


class _PlanParameter(NamedTuple):
    """A plan as a parameter of the primitive, short in print."""

    plan: Plan

    def __repr__(self) -> str:
        return summary(self.plan)


class _Part(NamedTuple):
    """Stages of a plan that run together."""

    first: int
    end: int
    given: tuple[int, ...]  # numbers of buffers, in plan order
    made: tuple[int, ...]


@functools.lru_cache(maxsize=512)
def _part(plan: Plan, first: int, end: int) -> _Part:
    ports = list(enumerate(_core.plan_ports(plan.native, first, end)))
    found = [tuple(n for n, port in ports if port & of) for of in _PORTS]
    return _Part(first, end, *found)


_PORTS = (_core.PORT_GIVEN, _core.PORT_MADE)


def whole_part(plan: Plan) -> _Part:
    """All stages of a plan."""
    return _part(plan, 0, len(plan.stages))


def _steps(plan: Plan) -> list[_Part | _core.Stage]:
    """What a run does in turn: stages of the library, and those of the caller."""
    found: list[_Part | _core.Stage] = []
    first = 0
    for number, stage in enumerate(plan.stages):
        if stage.external:
            found += [_part(plan, first, number)] * (first < number)
            found.append(stage)
            first = number + 1
    if found and first == len(plan.stages):
        return found
    return [*found, _part(plan, first, len(plan.stages))]


def call_plan(
    plan: Plan,
    arrays: Sequence[jax.Array],
    saved: Sequence[jax.Array] = (),
    *,
    rows: int = -1,
    slots: Sequence[int] = (0,),
    outside: Outside | None = None,
) -> PlanResults:
    """Run a plan.

    Parameters
    ----------
    plan
        What its stages between two external ones do is one custom call.
    arrays
        Inputs, parameters and states, in plan order, of any number of leading dims where a buffer
        has them; of one where a stage is external. Of delayed scaling the states are the scales,
        float32 [n], and the amaxes, float32 [1, n], zero before the call, by slots. Pairs of a seed
        and an offset, int64 [2], may be given as uint32 [4], the low half of each first.
    saved
        What the forward has saved, for a plan that reads it.
    rows
        The number of tokens, for a plan of which no input has them.
    slots
        The first slot of each module that the plan is of, in the states of its direction.
    outside
        What computes external stages.

    TypeError for another number of arrays. Whatever else is wrong with them is an error of XLA
    when the call runs (`jax.errors.JaxRuntimeError`), with the text of the C library.
    """
    register()
    whole = whole_part(plan)
    if (len(arrays), len(saved)) != (plan.given, len(whole.given) - plan.given):
        wanted = f"{plan.given} arrays and {len(whole.given) - plan.given} saved ones"
        raise TypeError(f"plan: expected {wanted}, got {len(arrays)} and {len(saved)}")
    held = dict(zip(whole.given, made_alike((*arrays, *saved)), strict=True))
    steps = [whole] if outside is None else _steps(plan)
    if len(steps) > 1:
        rows = sizes_of(plan, [array.shape for array in arrays], rows)[_core.SYMBOL_ROWS]
    how = {"plan": _PlanParameter(plan), "rows": rows, "slots": tuple(slots)}
    for step in steps:
        if isinstance(step, _Part):
            given = (held[number] for number in step.given)
            made = plan_p.bind(*given, stages=(step.first, step.end), **how)
            held |= dict(zip(step.made, made, strict=True))
        else:
            held |= outside(step, held)
    roles = [(held[n], plan.described.buffers[n].role) for n in whole.made]
    return PlanResults(*([a for a, of in roles if of == role] for role in RESULTS))


plan_p = make_primitive(Primitive("te_plan"))


@plan_p.def_abstract_eval
def _plan_results(*given: Any, plan: _PlanParameter, stages: tuple, rows: int, **_: Any) -> list:
    plan = plan.plan
    part, buffers = _part(plan, *stages), plan.described.buffers
    for at in (lead_of(plan, False), lead_of(plan, True)):
        wanted = len(buffers[at].shape) if at in part.given else 0
        array = given[part.given.index(at)] if wanted else None
        if wanted and (array.ndim < 1 or wanted > 2 and array.ndim != wanted):
            least = wanted if wanted > 2 else "at least 1"
            name = buffers[at].name
            raise ValueError(f"plan: {name}: {array.ndim} dims, expected {least}")
    shapes = [array.shape for array in given] if part == whole_part(plan) else ()
    leading, sizes = leading_dims(plan, shapes), sizes_of(plan, shapes, rows)
    known = dict(zip(part.given, given, strict=True))
    return [
        known[n]
        if n in known
        else result_of(given, shape_of(buffers[n], leading, sizes), dtype_of(buffers[n].dtype))
        for n in part.made
    ]


def _lower_plan(
    ctx: Any,
    *operands: Any,
    device: int,
    plan: _PlanParameter,
    stages: tuple[int, int],
    rows: int,
    slots: Sequence[int],
) -> Sequence:
    plan = plan.plan
    part = _part(plan, *stages)
    shapes = [array.shape for array in ctx.avals_in] if part == whole_part(plan) else ()
    sizes = sizes_of(plan, shapes, rows)
    scratch = _core.plan_scratch(plan.native, tuple(size or 0 for size in sizes[1:]), device)
    attributes = {
        "graph": plan.text,
        "id": np.int64(plan.native.id),
        "first": np.int64(part.first),
        "end": np.int64(part.end),
        "rows": np.int64(rows),
        "slots": np.array(slots, np.int32),
    }
    aliases = {i: part.made.index(n) for i, n in enumerate(part.given) if n in part.made}
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
        *made_alike([jnp.asarray(fields[field]) for field in given]),
        name=name,
        given=tuple(given),
        made=tuple(made),
        shapes=shapes,
        numbers=tuple(numbers.items()),
    )
    return dict(zip(made, arrays, strict=True))


operator_p = make_primitive(Primitive("te_operator"))


@operator_p.def_abstract_eval
def _operator_results(*arrays: Any, given: tuple, made: tuple, shapes: tuple, **_: Any) -> list:
    known = dict(zip(given, arrays, strict=True))
    known |= {field: result_of(arrays, shape, dtype) for field, shape, dtype in shapes}
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
