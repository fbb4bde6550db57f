# SPDX-License-Identifier: Apache-2.0
"""Layers in a graph of `torch.compile`: one operator per direction, as in eager mode.

While a graph is traced, `run` does what `LayerRunner.run` does in eager mode. The call is made
outside of the graph, by functions whose results are constants in it: which modules there are
(`places_in_graph`), and their plans (`call_in_graph`). A graph does not depend on what these read,
so `run` reads it as well: settings, parameters, main gradients and slots of each module, the
recipe, how attentions attend. A call of another kind goes by modules, and so does each of
`torch.export`.
"""

import copy
import itertools
import operator
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from transformer_engine import _core
from transformer_engine.common.operand_casts import Quantization
from transformer_engine.common.plans import CallPlans
from transformer_engine.common.recipe_base import Recipe
from transformer_engine.pytorch.attention import fp8
from transformer_engine.pytorch.attention.plan import spec_of
from transformer_engine.pytorch.execution import collectives, plan_ops
from transformer_engine.pytorch.execution.autograd import run_call, run_without_backward
from transformer_engine.pytorch.execution.thread_state import (
    current_state,
    in_region,
)
from transformer_engine.pytorch.module import quantized
from transformer_engine.pytorch.module.call import CallRun, LastCall, LayerCall, ModuleCall
from transformer_engine.pytorch.module.call_key import converted
from transformer_engine.pytorch.module.joined import JoinedRows, SplitTensors
from transformer_engine.pytorch.module.layer_call import Attending, LayerRunner
from transformer_engine.pytorch.module.layer_region import LayerRegion
from transformer_engine.pytorch.torchside.modes import (
    as_eager,
    autocast_dtype,
    beside_graph,
    exporting,
    in_transform,
    real_tensors,
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Found(NamedTuple):
    """A call of a layer: what is the same for layers of one kind."""

    plans: CallPlans
    label: str
    splits: tuple[SplitTensors, ...]
    dtypes: tuple[torch.dtype | None, ...]  # as of `ModuleCall`
    over_ranks: bool  # it has collectives, over the group of the layer


class _Kinds:
    """`_Found` by their names, as attributes: a trace reads a dict once, and no later entries."""


_FOUND = _Kinds()
"""What a graph reads becomes a condition of it: here one for all layers of a kind."""
_NAMES: dict[tuple, str] = {}
_COUNT = itertools.count(1)
_MOST = 256


# ---- what is traced ------------------------------------------------------------------------------


def constants(value: Any) -> Any:
    """Return a setting or an argument as functions outside of graphs take it.

    What is no plain value is told from None alone.
    """
    if value is None or isinstance(value, bool | str | torch.dtype):
        return value
    if isinstance(value, float):
        return plan_ops.as_constant(value)
    if isinstance(value, int):
        return operator.index(value)  # what differs from graph to graph becomes a symbol
    if isinstance(value, tuple | list):
        return tuple([constants(each) for each in value])
    return OBJECT


OBJECT = "an object"


def may_hold(inp: Tensor) -> bool:
    """Return whether the graph that is traced may have a layer as one call, by what is in force."""
    state = current_state()
    recipe = state.recipe if state.enabled else None
    return not (
        exporting()
        or in_transform()
        or type(inp) not in (Tensor, torch.nn.Parameter)
        or state.calibrating
        or (recipe is not None and recipe.custom())
    )


def run(layer: Any, inp: Tensor, given: tuple, ways: Sequence[Attending | None] = ()) -> Any:
    """Run a layer as one call in the graph that is traced, which `may_hold` it; its results.

    `given` are the arguments of the call as `constants`, of which ``_options_in_graph`` makes those
    of `LayerRunner.run`. `ways` are of each attention how it attends, None where `given` say it.
    None where the layer has to call its modules.
    """
    state = current_state()
    recipe = state.recipe if state.enabled else None
    places = layer._places_in_graph(given)
    facts, owners, parameters = _read(layer, places)
    if facts is None:
        return None
    identity, slots = "", []
    if recipe is not None:
        identity = repr(recipe)
        recipe.keep_for_graphs()
        cores = [way.core for way in ways if way is not None and way.core is not None]
        casts = [(one, recipe) for one in owners]
        casts += [(core, fp8.recipe_of(recipe, core)) for core in cores]
        slots = [
            one._slots_for(own, state.group, inp.device, True) if own.delayed() else None
            for one, own in casts
        ]
    measures = tuple([None if own is None else own.measures for own in slots])
    lead = tuple([1 if size == 1 else 2 for size in inp.shape[:-1]])
    like = inp.dtype, inp.device, inp.requires_grad, lead, operator.index(inp.shape[-1])
    joins = True  # a constant, whatever is symbolic
    if getattr(layer, "sequence_parallel", False) and not owners[0]._rows_join(inp):
        joins = False
    region = identity, state.measures, torch.is_grad_enabled(), joins
    name = layer._call_in_graph(
        like, region, given, tuple([_key_of(way) for way in ways]), (facts, measures)
    )
    if not name:
        return None
    found = getattr(_FOUND, name)
    attended = [tensor for way in ways if way is not None for tensor in way.tensors]
    tensors = (inp, *attended, *parameters)
    group = layer.tp_group.group_name if found.over_ranks else ""
    call = _GraphCall(found, slots or [None] * len(owners), group)
    if found.plans.reads_caches:
        parts = [one._linear_tensors() for one in owners]
        call.caches = [None] * sum([len(own) for own in parts])
        quantized.forms_held(owners, parts, call.caches, recipe, tensors)
    if found.plans.main_grads:
        call.weights = _weights_of(owners)
    records = found.plans.backward is not None
    call.updates_backward = found.plans.quantized and records and state.owes_update
    call.domain = state.domain
    if found.dtypes:
        tensors = converted(tensors, found.dtypes)
    out = (run_call if records else run_without_backward)(call, *tensors)
    if call.updates_backward:
        beside_graph(setattr, state, "owes_update", False)
    return out


def _key_of(way: Attending | None) -> tuple | None:
    """What plans depend on of how an attention attends."""
    if way is None:
        return None
    fields, *_, casts = way.key
    if casts is not None:
        casts = *casts.quantization.flat(), casts.fp8_gradient, casts.fp8_output
    tensors = [(each.dtype, each.requires_grad) for each in way.tensors]
    return constants(fields), constants(casts), way.draw is not None, tuple(tensors)


def _read(layer: Any, places: str) -> tuple[tuple | None, list, list]:
    """Read what a call depends on: settings, modules that have slots, and parameters.

    `places` are those of `places_in_graph`. None for the settings where a module has to be called.
    """
    if not places:
        return None, [], []
    facts: list = []
    modules: list = []
    of_parameters, count, *lines = places.split("\n")
    for line in lines:
        path, names, absent, without, planned = line.split("|")
        module = layer
        for name in path.split(".") if path else ():
            module = module._modules[name]
        if planned:
            facts.append(id(module))  # which makes the module itself a condition of the graph
        own = module.__dict__
        hooked = "forward" in own or any([len(getattr(module, hooks)) > 0 for hooks in _HOOKS])
        if hooked and module is not layer:
            return None, [], []
        facts += [constants(own.get(name)) for name in names.split(",")]
        facts += [module._modules.get(name) is None for name in absent.split(",") if name]
        facts += [module._parameters.get(name) is None for name in without.split(",") if name]
        modules.append(module)
    parameters: list = []
    for place in of_parameters.split(","):
        number, name = place.split(".")
        parameters.append(modules[int(number)]._parameters[name] if number else None)
    owners = modules[1 : 1 + int(count)]
    weights = _weights_of([one for one in owners if one.fuse_wgrad_accumulation])
    main = [getattr(one, "main_grad", None) for one in weights]
    if _share_a_base(main):
        return None, [], []
    facts += [getattr(into, "dtype", None) for into in main]
    facts += [bool(getattr(one, "overwrite_main_grad", False)) for one in weights]
    return tuple(facts), owners, parameters


def _share_a_base(tensors: list) -> bool:
    """Return whether some are views of one buffer.

    Of arguments in one storage that an operator writes to Inductor copies all but one, there and
    back.
    """
    bases = [getattr(tensor, "_base", None) for tensor in tensors]
    bases = [base for base in bases if base is not None]
    return any([base is other for i, base in enumerate(bases) for other in bases[:i]])


def _weights_of(modules: list) -> tuple[Tensor, ...]:
    """The weight of each linear layer; of one that is split the first part."""
    return tuple([part.weights[0] for one in modules for part in one._linear_tensors()])


class _GraphCall(LayerCall):
    """A call of a layer in a graph: chunks of the scaling state are given once."""

    traced = True

    def __init__(self, found: _Found, slots: list, group: str) -> None:
        ModuleCall.__init__(self, found.plans, None, found.label)
        self.splits = found.splits
        self._of_forward = _Chunks("forward", found.plans.forward_state, slots, group)
        self._of_backward = _Chunks("backward", found.plans.backward_state, slots, group)

    def _run_forward(self, given: tuple, own: ModuleCall | CallRun) -> tuple:
        return self._of_forward.run(self.plans.forward, given)

    def _run_backward(self, plans: CallPlans, given: tuple, packed: tuple, main: tuple) -> tuple:
        saved = packed[0] if packed else None
        return self._of_backward.run(plans.backward, given, saved, main)


class _Chunks:
    """The chunks that a plan of a direction is given, and which of them an argument is."""

    def __init__(self, way: str, links: tuple, slots: list, group: str) -> None:
        self.group = group
        self.numbers = tuple([getattr(own, f"{way}_slot", 0) for own in slots])
        self.scales: list[Tensor] = []
        self.histories: list[Tensor] = []
        places = []
        for what, of in links:
            known = self.scales if what == "scale" else self.histories
            places.append((what, _place_in(known, getattr(slots[of], f"{way}_{what}"))))
        behind = len(self.scales)
        self.places = tuple([at if what == "scale" else behind + at for what, at in places])

    def run(self, plan: Any, given: tuple, packed: Tensor | None = None, main: tuple = ()) -> tuple:
        """Run a plan; arguments and result as of `plan_ops.run_traced`, `main`: main gradients."""
        inputs, state, places = [*given, *self.scales], [*self.histories], self.places
        if main:
            begin = len(self.scales)
            places = (*places, *[begin + _place_in(state, tensor) for tensor in main])
        how = {"places": places, "group": self.group}
        return plan_ops.run_traced(plan.text, self.numbers, inputs, state, packed, **how)


def _place_in(known: list[Tensor], tensor: Tensor) -> int:
    """Place of a tensor among others, which it joins where it is none of them yet."""
    at = [i for i, other in enumerate(known) if other is tensor]
    if not at:
        known.append(tensor)
    return at[0] if at else len(known) - 1


# ---- what is done outside of the graph -----------------------------------------------------------


def places_in_graph(layer: Any, given: tuple) -> str:
    """Return where the modules of a layer stand, in lines; "" where it has to call them.

    In the first one are the parameters of a call, each the number of its module and its name; then
    how many modules have slots, which follow the layer; then of each module its path, its settings,
    modules and parameters that it could have, and whether it is a program's: its settings count.
    """
    with real_tensors(), as_eager():
        options = layer._options_in_graph(given)
        calls = None if options is None else LayerRunner.of(layer, options, {})
    if calls is None:
        return ""
    places = [*calls._places]
    for held in calls._quantized_parameters:
        places[held.at - 1] = held.parameters, held.name
    paths = {id(module): path for path, module in reversed([*layer.named_modules()])}
    modules = [layer, *calls.modules]
    modules += [each for each in calls._all if all(each is not other for other in modules)]
    numbers = {id(module._parameters): i for i, module in enumerate(modules)}
    parameters = [
        "." if place is None else f"{numbers[id(place[0])]}.{place[1]}" for place in places
    ]
    lines = []
    for module in modules:
        absent = [n for n in getattr(module, "_MAY_HAVE", ()) if module._modules.get(n) is None]
        without = [name for name, value in module._parameters.items() if value is None]
        names = ",".join(module._READ_BY_PLANS)
        planned = "planned" if getattr(module, "IS_PLANNED", False) else ""
        fields = paths[id(module)], names, ",".join(absent), ",".join(without), planned
        lines.append("|".join(fields))
    return "\n".join([",".join(parameters), str(len(calls.modules)), *lines])


def call_in_graph(
    layer: Any, like: tuple, region: tuple, given: tuple, ways: tuple, facts: tuple
) -> str:
    """Make the call of a layer; return its name, "" where the layer has to call its modules.

    Arguments are as `run` makes them; `facts` are read here from where they stand.
    """
    del facts
    dtype, device, wanted, lead, features = like
    identity, measures, gradients, joins = region
    state = copy.copy(current_state())
    state.enabled, state.calibrating = bool(identity), False
    state.recipe, state.measures = Recipe.kept_for_graphs(identity), measures
    with real_tensors(), as_eager(gradients), in_region(state):
        inp = torch.zeros(*lead, features, dtype=dtype, device=device).requires_grad_(wanted)
        options = layer._options_in_graph(given)
        try:
            region = LayerRegion(state, state.recipe, joins=joins)
            return _make(layer, inp, (options, ways), region)
        except (TypeError, ValueError, RuntimeError, NotImplementedError):
            return ""  # the module that refuses it says so


def _make(layer: Any, inp: Tensor, given: tuple, region: LayerRegion) -> str:
    options, ways = given
    state = region.state  # of no checkpoint: a graph is of none
    calls = LayerRunner.of(layer, options, {})
    first_microbatch = layer._first_microbatch(options)
    if calls is None or not layer._is_planned(inp, options):
        return ""
    if _core.tensors_of_call(inp, calls._places)[0] is None:  # some are of other classes
        return ""
    if first_microbatch is not None and state.enabled:  # caches of weights are in no graph
        return ""
    if calls._quantized_parameters and not state.enabled:  # they are read in high precision
        return ""
    attending = _attending_of(layer, calls, inp, options, ways)
    if attending is None:
        return ""
    kept_call = calls._make_call(layer, inp, (options, attending, first_microbatch), region)
    if kept_call is None:
        return ""
    call, plans = kept_call.call, kept_call.call.plans
    over_ranks = call.staged is not None
    if call.unused_pairs or (over_ranks and not _runs_by_group(layer, calls, call)):
        return ""
    if plans.defer or plans.writes_caches:
        return ""
    if plans.main_grads and plans.result_count > 1:  # behind an unused result they would not stay
        return ""
    for attributes, values in kept_call.remembered:
        ran = values["_last_call"]
        reason = None if ran.reason is None else "no FP8 was in force where it was compiled"
        attributes.update({**values, "_last_call": LastCall(ran.plans, reason)})
    return _name_of(plans, call, over_ranks)


def _runs_by_group(layer: Any, calls: LayerRunner, call: LayerCall) -> bool:
    """Return whether all that a call runs in Python are collectives over the layer's group."""
    group, staged = getattr(layer, "tp_group", None), call.staged
    if group is None or staged is None or staged.observer is not None:
        return False
    if any(getattr(module, "tp_group", group) is not group for module in calls.modules):
        return False
    return staged.functions.keys() <= collectives.functions_of_call(call.plans, group).keys()


def _attending_of(
    layer: Any, calls: LayerRunner, inp: Tensor, options: tuple, ways: tuple
) -> list[Attending] | None:
    """How each attention of a call attends; None where the layer has to call its modules.

    `ways` are those of `run`, as `_key_of` has made constants of them.
    """
    found = []
    for i, (module, (parameters, name)) in enumerate(calls._sites):
        way, attends = ways[i] if i < len(ways) else None, layer if module is None else module
        if way is None:
            dtype = autocast_dtype(inp.device.type) or parameters[name].dtype
            how = attends._attending(inp, options[i], dtype, None)
            if how is None or how.tensors or how.draw is not None or how.core is not None:
                return None
            found.append(how)
            continue
        fields, casts, draws, tensors = way
        if draws:
            return None
        core, cast = None, {}
        if casts is not None:
            core, names = attends._modules["core_attention"], ("fp8_gradient", "fp8_output")
            cast = dict(zip(names, casts[2:], strict=True))
            cast["quantization"] = Quantization.of_flat(*casts[:2])
        like = [
            torch.zeros(2, inp.shape[-1], dtype=dtype, device=inp.device).requires_grad_(grad)
            for dtype, grad in tensors
        ]
        spec = partial(spec_of, fields, **cast)
        found.append(Attending(fields, spec, tuple(like), None, None, core))
    return found


def _name_of(plans: CallPlans, call: LayerCall, over_ranks: bool) -> str:
    rows = [
        (one.weight.rows, None if one.bias is None else one.bias.rows, one.begin, one.part)
        for one in call.splits
    ]
    key = plans, call.label, tuple(rows), call.dtypes, over_ranks
    name = _NAMES.get(key)
    if name is None:
        if len(_NAMES) >= _MOST:
            _FOUND.__dict__.clear()
            _NAMES.clear()
        name = _NAMES[key] = f"kind_{next(_COUNT)}"
        splits = tuple(
            SplitTensors(JoinedRows(weight), None if bias is None else JoinedRows(bias), *at)
            for weight, bias, *at in rows
        )
        setattr(_FOUND, name, _Found(plans, call.label, splits, call.dtypes, over_ranks))
    return name
