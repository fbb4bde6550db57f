# SPDX-License-Identifier: Apache-2.0
"""Quantized tensors as inputs and parameters of modules.

What the GEMMs of the recipe read goes into the plans as it is (`VALUE_QUANTIZED`); all else is read
in high precision first.
"""

import warnings
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.graphs import WEIGHT_CACHED, LinearFlags
from transformer_engine.common.operand_casts import Quantization, is_backward_wide, quantization_of
from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.execution.thread_state import RegionState
from transformer_engine.pytorch.module import custom_quantizers
from transformer_engine.pytorch.module.operands import LinearTensors
from transformer_engine.pytorch.module.parallel import has_all
from transformer_engine.pytorch.scaling_state.scaling import Slots
from transformer_engine.pytorch.torchside.modes import in_transform, unseen
from transformer_engine.pytorch.torchside.tensor_kinds import ALIGNMENT, is_quantized, local_of

_SLOTS_OF_PART = 3
"""Forward slots of a linear layer; the second one is its weight's."""


class QuantizedInit(NamedTuple):
    """How the modules that are made now keep their weights."""

    recipe: Recipe
    preserve: bool  # keep the first values in high precision, on the CPU
    gradients: bool = True  # may pass through them: they were enabled where the module was made


# ---- calls ---------------------------------------------------------------------------------------


def usable_parts(
    kind: str,
    parts: tuple[LinearTensors, ...],
    recipe: Recipe | None,
    quantization: Sequence[Quantization],
) -> tuple[LinearTensors, ...]:
    """The tensors of a call, with weights in high precision that can not be read as they are.

    `quantization` is that of each part, where a recipe is in force. RuntimeError for a weight that
    was quantized for another recipe.
    """
    if not any(is_quantized(weight) for part in parts for weight in part.weights):
        return parts
    usable = []
    for i, (weights, biases) in enumerate(parts):
        if any(map(is_quantized, weights)):
            how = None if recipe is None else (recipe, quantization[i], i)
            weights = _usable_weights(kind, weights, how)
        if len(weights) < len(biases):  # the weight was put together
            biases = (torch.cat(biases),)
        usable.append(LinearTensors(weights, biases))
    return tuple(usable)


def _usable_weights(
    kind: str, weights: tuple[Tensor, ...], how: tuple[Recipe, Quantization, int] | None
) -> tuple[Tensor, ...]:
    """`usable_parts` of one part; `how` is the recipe in force, its quantization and number."""
    if how is None:
        if not torch.compiler.is_compiling():
            warnings.warn(
                f"{kind}: its weight is quantized, and no FP8 autocast is in force: the weight is "
                "read in high precision at each call",
                stacklevel=2,
            )
    else:
        from transformer_engine.pytorch.tensor.recipes import fits
        from transformer_engine.pytorch.tensor.two_forms import joins

        recipe, quantization, part = how
        in_python = quantization.weight.recipe == _core.RECIPE_EXTERNAL  # is its quantizer
        for weight in filter(is_quantized, weights):
            if not (
                custom_quantizers.is_made_by(
                    weight, custom_quantizers.weight_quantizer(recipe, part)
                )
                if in_python
                else fits(weight, quantization)
            ):
                raise RuntimeError(
                    f"{kind}: its weight is a {type(weight).__name__} of "
                    f"{weight._quantizer!r}, which {custom_quantizers.name_of(recipe)} does not "
                    "read: run it under the recipe of its quantized_model_init"
                )
        if not in_python and is_quantized(weights[0]):
            if len(weights) == 1:
                return weights
            if joins(weights):
                return (torch.cat(weights),)
    # Parts of a weight have scales of their own, and a GEMM reads one of the tensor, or of a tile.
    # What a quantizer of the program makes is read by its stage (`custom_quantizers.functions_of`).
    return tuple(w.dequantize() if is_quantized(w) else w for w in weights)


def usable_input(inp: Any, quantization: Sequence[Quantization], has_norm: bool) -> Any:
    """An input in high precision, where it is quantized and can not be read as it is."""
    if not is_quantized(inp):
        return inp
    if quantization and not has_norm:
        from transformer_engine.pytorch.tensor.recipes import reads

        if reads(inp, quantization[0], "input"):
            return inp
    return inp.dequantize()


def given_forms(
    tensors: Any,
    recipe: Recipe,
    flags: Sequence[LinearFlags],
    caches: Sequence,
    behind: Sequence[bool],
) -> tuple[list[LinearFlags], Sequence]:
    """Flags of each part and what it reads, with the forms of what arrives quantized.

    `tensors` are the `operands.CallTensors`; `flags` and `caches` are as for plain ones;
    `behind` says of each part whether the gradient of its input is wanted. The forms of the input,
    where it arrives quantized, stand behind those of the parts. RuntimeError where a weight lacks a
    form that the backward reads.
    """
    weights = [part.weights[0] for part in tensors.parts]
    arrives = is_quantized(tensors.input)
    if not arrives and not any(map(is_quantized, weights)):
        return list(flags), caches
    from transformer_engine.pytorch.tensor.recipes import forms_of

    flags, caches = list(flags), list(caches)
    narrow = not is_backward_wide(recipe)
    for i, weight in enumerate(weights):
        if is_quantized(weight):
            columns = narrow and behind[i]
            with unseen():  # it writes to what it makes, which a selective checkpoint refuses
                caches[i], bits = forms_of(weight, "weight", columns)
            if columns and caches[i][1] is None and not bits & _core.VALUE_ROW_WISE:
                raise RuntimeError(
                    f"{type(weight).__name__}: it has no column-wise data. The gradient of the "
                    "input reads them, and they can not be made from the row-wise data. Make the "
                    "weight where gradients are enabled, or run without gradients"
                )
            cached = WEIGHT_CACHED | _core.VALUE_KEEP_QUANTIZED
            flags[i] = flags[i].of_weight(flags[i].weight & ~cached | bits)
    if arrives:
        with unseen():
            forms, bits = forms_of(tensors.input, "input", narrow and torch.is_grad_enabled())
        flags[0] = flags[0].joined(LinearFlags(input=bits))
        caches = [*caches[: len(weights)], forms]
    return flags, caches


def add_returned(
    kind: str, flags: list[LinearFlags], returns: LinearFlags, recipe: Recipe, slots: Slots | None
) -> None:
    """Add what a call returns quantized to the flags of its parts.

    `returns` are as of `LinearCallBase._call`. NotImplementedError where a call can not return
    them.
    """
    what = f"{kind}: {'fp8_output' if returns.output else 'fp8_grad'}=True"
    if in_transform():
        raise NotImplementedError(f"{what} in a transform of torch.func: leave it out there")
    if custom_quantizers.is_custom(recipe):
        raise NotImplementedError(
            f"{what} under {custom_quantizers.name_of(recipe)}, which has no quantizers of what "
            "modules return: leave it out, or use another recipe, say DelayedScaling"
        )
    measures = slots is not None and slots.initial == 0.0
    node = _core.LINEAR_MEASURE_RETURNED if measures else 0
    flags[-1] = flags[-1].joined(LinearFlags(node, output=returns.output))
    if flags[0].input & _core.VALUE_GRADIENT and recipe.backward_override is None:
        flags[0] = flags[0].joined(LinearFlags(node, input=returns.input))


def returned(call: Any, made: Sequence, places: Sequence[int], gradient: bool) -> Any:
    """The quantized tensor that a call returns: its output, or the gradient of its input.

    `places` say where its forms stand among what a plan has made, as of ``CallPlans.returned``.
    """
    from transformer_engine.pytorch.tensor.recipes import cast_of, format_of

    part = call.plans.parts[0 if gradient else -1]
    code, features = part.output, part.out_features
    if gradient:
        code, features = part.input, part.in_features
    # As the next layer would keep its input, or the one before the gradient of its output.
    cast = cast_of(part.quantization, "gradient" if gradient else "input")
    row = format_of(cast)
    forms = tuple([None if place < 0 else made[place] for place in places])
    quantizer = call.quantizers.get(gradient)
    if quantizer is None:
        quantizer = row.make(cast, forms[0].device, measures_first(call.recipe))
        quantizer = call.quantizers[gradient] = _over_state(call, quantizer, gradient)
    shape = (*forms[0].shape[:-1], features)
    fields = {**row.fields(quantizer, forms, shape), "_quantizer": quantizer.copy()}
    return row.tensor._made(fields, _core.torch_dtype(code), shape)


def _over_state(call: Any, made: Any, gradient: bool) -> Any:
    """The quantizer of what a call returns, from that of its cast.

    Under delayed scaling that of an output casts as the call does, with its slot. Those of a
    gradient are sums, where a leaf's accumulates: they are measured, for the slot knows single
    gradients.
    """
    slots = call.slots
    if slots is None or not hasattr(made, "amax"):
        return made
    if gradient:
        from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

        return Float8CurrentScalingQuantizer(
            made.dtype, slots.forward_scale.device, columnwise=False
        )
    scales, history, slot = slots.forward_scale, slots.forward_history, slots.forward_slot
    slot += _SLOTS_OF_PART * len(call.plans.parts) - 1
    made.scale, made.amax = scales[slot : slot + 1], history[0, slot : slot + 1]
    made._bound = slots
    return made


def measures_first(recipe: Any) -> bool:
    """Return whether a recipe casts by what it measures where its scaling state knows nothing."""
    return recipe.delayed() and recipe.measure_first


def gradient_of(call: Any, grads: tuple) -> tuple[Any, tuple, tuple]:
    """Plans of a backward whose gradient of the output arrives quantized, gradients and its forms.

    Where no GEMM reads it as it is, the plans of the call and the gradient in high precision.
    """
    recipe, grad = call.recipe, grads[0]
    if recipe is not None and recipe.backward_override is None and not call.traced:
        from transformer_engine.pytorch.tensor.recipes import forms_of, reads

        if reads(grad, call.plans.parts[-1].quantization, "gradient"):
            forms, bits = forms_of(grad, "gradient", True)
            plans = call.plans.for_gradient(bits)
            if plans is not None:
                return plans, grads, forms
    return call.plans, (grad.dequantize(), *grads[1:]), ()


def bind_quantizers(module: Any) -> None:
    """Let delayed scaling's quantizers of weights cast with the scales of the module's slots."""
    if not module.primary_weights_in_fp8:
        return
    for i, part in enumerate(module._linear_tensors()):
        for weight in filter(is_quantized, part.weights):
            _bind(weight._quantizer, module._slots, i)


def _bind(quantizer: Any, slots: Slots, part: int) -> None:
    """Let a quantizer of delayed scaling cast with the scale of a part's weight."""
    if not hasattr(quantizer, "amax") or getattr(quantizer, "_bound", None) is slots:
        return
    _check_shared(quantizer, slots)
    slot = slots.forward_slot + _SLOTS_OF_PART * part + 1
    with unseen():
        quantizer.scale = slots.forward_scale[slot : slot + 1]
        quantizer.amax = slots.forward_history[0, slot : slot + 1]
    quantizer.measure_first = slots.initial == 0.0  # whatever it was made for
    quantizer._bound = slots  # so that no other module gets them


def _check_shared(quantizer: Any, slots: Slots) -> None:
    """NotImplementedError where ranks that share a weight would have scales of their own for it."""
    group = getattr(quantizer, "amax_reduction_group", None)
    if group is None or torch.distributed.get_world_size(group) == 1:
        return
    *_, ranks = slots.key
    if ranks == 1 or not has_all(slots.group, group):
        raise NotImplementedError(
            "quantized_model_init: a weight that ranks share by fully_shard has one scale: "
            "DelayedScaling(reduce_amax=False), or an amax_reduction_group without all of these "
            "ranks, is not there for it: leave them out"
        )


# ---- calls that are found again ------------------------------------------------------------------


class QuantizedParameter(NamedTuple):
    """A quantized weight among the tensors of a call."""

    at: int  # its place among them, the input's being 0
    parameters: dict  # where it stands, under `name`
    name: str


def apart(places: Sequence) -> tuple[tuple, tuple[QuantizedParameter, ...]]:
    """Where the plain parameters of a call stand, and its quantized weights.

    `places` are those of all, as of `call_key.call_key`.
    """
    held = [
        QuantizedParameter(at + 1, *place)
        for at, place in enumerate(places)
        if place is not None and is_quantized(place[0].get(place[1]))
    ]
    ours = {one.at - 1 for one in held}
    return tuple(None if i in ours else place for i, place in enumerate(places)), tuple(held)


def filled(
    key: tuple | None, tensors: tuple, held: tuple[QuantizedParameter, ...], fp8: bool
) -> tuple[tuple | None, tuple]:
    """Key and tensors of a call, with the quantized weights among them.

    (None, ()) where the call has to be decided by itself: without FP8, or where a weight is none of
    that kind any more. What is decided by is the class of a quantizer and of a tensor, not values.
    """
    if key is None or not fp8:
        return None, ()
    tensors, facts = list(tensors), []
    for at, parameters, name in held:
        weight = parameters.get(name)
        if not is_quantized(weight) or weight.device != tensors[0].device:
            return None, ()
        quantizer = weight._quantizer
        if getattr(quantizer, "_bound", None) is None and hasattr(quantizer, "amax"):
            return None, ()  # it is not bound to the module's scales yet
        tensors[at] = weight
        kinds = type(weight), type(quantizer), weight.dtype, weight.requires_grad
        facts.append((*kinds, *weight._kind()))
    return (key, *facts), tuple(tensors)


def forms_held(
    modules: Sequence, parts: Sequence, caches: list, recipe: Recipe, tensors: tuple
) -> None:
    """Put what is read of quantized weights in the place of caches, those of each part in turn.

    `tensors` are all of the call: without one that has a gradient no backward follows.
    """
    from transformer_engine.pytorch.tensor.recipes import forms_of

    at = 0
    columns = torch.is_grad_enabled() and not is_backward_wide(recipe)
    columns = columns and any(t is not None and t.requires_grad for t in tensors)
    with unseen():  # as in `given_forms`
        for _, own in zip(modules, parts, strict=True):
            for part in own:
                if is_quantized(part.weights[0]):
                    caches[at], _ = forms_of(part.weights[0], "weight", columns)
                at += 1


# ---- construction --------------------------------------------------------------------------------


def init_now(state: RegionState) -> QuantizedInit | None:
    """How a module that is made now keeps its weights; None: in high precision."""
    init = state.quantized_init
    return None if init is None else init._replace(gradients=torch.is_grad_enabled())


def quantize_weights(module: Any, names: Sequence[str], init: QuantizedInit) -> None:
    """Make parameters of a module quantized ones, as far as they have memory and are not yet.

    Weights stay as they are whose layer casts them not, or by a quantizer that keeps no tensor.
    """
    recipe = module._resolved(init.recipe, False)
    if recipe is None:  # no quantizer of the module casts
        return
    known = None if custom_quantizers.is_custom(recipe) else quantization_of(recipe)
    quantization = custom_quantizers.of_parts(recipe, known, len(module.LINEARS))
    for name in names:
        parameter = module._parameters.get(name)
        if parameter is None or parameter.is_meta or is_quantized(local_of(parameter)):
            continue
        ranks, group = _shard_group(module, name, parameter)
        values = local_of(parameter).detach()
        part = next(i for i, prefix in enumerate(module.LINEARS) if name.startswith(prefix))
        quantizer = _weight_quantizer(
            recipe, quantization[part], part, parameter.device, init.gradients
        )
        if quantizer is None:
            continue
        made = _quantized_part(quantizer, values, group)
        if not is_quantized(made):
            continue
        _refuse_padding(module, name, parameter, made, ranks)
        if local_of(parameter) is not parameter:
            kept = torch.nn.Parameter(parameter.detach(), requires_grad=parameter.requires_grad)
            kept._local_tensor, made = made, kept
        else:
            made = torch.nn.Parameter(made, requires_grad=parameter.requires_grad)
            made.__dict__.update(parameter.__dict__)
        if init.preserve:
            _preserve(made, parameter.detach().cpu())
        setattr(module, name, made)


def _quantized_part(quantizer: Any, values: Tensor, group: Any) -> Any:
    """Quantize a weight, or a part that a group shares: with the amax of all parts, always."""
    reduces = group is not None and hasattr(quantizer, "reduce_over")
    if reduces:
        quantizer.reduce_over(group)
    with torch.no_grad():
        made = quantizer.quantize(values)
    if group is not None and is_quantized(made):
        made._quantizer._of_part = True
        if reduces:
            made._quantizer.reduce_over(group)
    return made


def _shard_group(module: Any, name: str, parameter: Tensor) -> tuple[int, Any]:
    """Number of ranks that share a weight's rows, and their group; (1, None) of a whole weight.

    NotImplementedError for a weight that is sharded along several dims of a mesh.
    """
    if local_of(parameter) is parameter:
        return 1, None
    mesh = parameter.device_mesh
    dims = [at for at, placement in enumerate(parameter.placements) if not placement.is_replicate()]
    if len(dims) > 1 or any(parameter.placements[at].dim != 0 for at in dims):
        raise NotImplementedError(
            f"{type(module).__name__}: quantized_model_init: {name} is placed as "
            f"{parameter.placements}: give fully_shard a mesh that shards the rows along one dim, "
            "or make this module outside of quantized_model_init"
        )
    return (mesh.size(dims[0]), mesh.get_group(dims[0])) if dims else (1, None)


def _refuse_padding(module: Any, name: str, parameter: Tensor, made: Any, ranks: int) -> None:
    """Refuse a sharded weight of uneven parts, which FSDP2 pads, where the codes are not alone.

    FSDP2 takes nothing but lines of all values of a part that is padded.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

    rows, columns = parameter.shape
    whole_lines = type(made) is Float8Tensor and columns % ALIGNMENT == 0
    if rows % ranks == 0 or whole_lines:
        return
    raise NotImplementedError(
        f"{type(module).__name__}: quantized_model_init: {name} of {rows} rows over {ranks} ranks "
        f"as a {type(made).__name__} is not there yet: its rows must be a multiple of the ranks "
        "(or it has one scale, and columns in a multiple of 16), or make this module outside of "
        "quantized_model_init"
    )


def _weight_quantizer(
    recipe: Recipe, quantization: Quantization, part: int, device: torch.device, gradients: bool
) -> Any:
    """Quantizer of the weight of a part, for its parameter; None where it keeps no tensor.

    Row-wise alone where no backward reads the other form, or turns squares to have it; `gradients`
    is as of `QuantizedInit`.
    """
    from transformer_engine.pytorch.tensor.recipes import format_of

    own = custom_quantizers.weight_quantizer(recipe, part)
    if own is not None:
        made, row_wise = custom_quantizers.keeping(own), not gradients
    else:
        row, cast = format_of(quantization.weight), quantization.weight
        made = None if row is None else row.make(cast, device, measures_first(recipe))
        wide = quantization.backward != _core.BACKWARD_QUANTIZED
        row_wise = not gradients or wide or bool(cast.options & _core.CAST_TILES_2D)
    if row_wise and made is not None:
        made.set_usage(columnwise=False)
    return made


def _preserve(parameter: Any, value: Tensor) -> None:
    """Keep the first values with a parameter, under the names that programs ask by."""
    parameter._high_precision_init_val = value
    parameter.get_high_precision_init_val = MethodType(_get_init_val, parameter)
    parameter.clear_high_precision_init_val = MethodType(_clear_init_val, parameter)


def _get_init_val(parameter: Any) -> Tensor | None:
    """The values that a parameter began with, in high precision on the CPU; None once cleared."""
    return getattr(parameter, "_high_precision_init_val", None)


def _clear_init_val(parameter: Any) -> None:
    """Let them go."""
    if hasattr(parameter, "_high_precision_init_val"):
        del parameter._high_precision_init_val


def converted(function: Callable) -> Callable:
    """A function of `torch.nn.Module._apply` that keeps quantized parameters quantized.

    A conversion to another dtype changes their nominal one, not a value.
    """

    def run(tensor: Tensor) -> Tensor:
        made = function(tensor)
        if not is_quantized(tensor) or is_quantized(made):
            return made
        with torch.no_grad():
            there = tensor.detach().to(made.device)
            return there._like(dtype=made.dtype)

    return run
