# SPDX-License-Identifier: Apache-2.0
"""`convert`: swap the layers of a model for those of this package, and back."""

import sys
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from transformer_engine.pytorch.module.base import NativeModule
from transformer_engine.pytorch.module.layernorm import LayerNorm
from transformer_engine.pytorch.module.linear import Linear
from transformer_engine.pytorch.module.operands import DTYPES
from transformer_engine.pytorch.module.rmsnorm import RMSNorm
from transformer_engine.pytorch.tools.rmsnorms import named_like_one, recognise
from transformer_engine.pytorch.tools.skip import Skip, check_model
from transformer_engine.pytorch.torchside.modes import give_own_class

_BASE = frozenset(vars(Module()))
"""Attributes that every module has: parameters, buffers, children, hooks, training mode."""
_OWN_COPY = ("_parameters", "_buffers", "_modules")
"""Of these the new module gets a copy; of the others, hooks first, the very object: a handle that
removes a hook goes on working."""
_COUNTERPARTS = ((torch.nn.Linear, Linear), (torch.nn.LayerNorm, LayerNorm),
                 (torch.nn.RMSNorm, RMSNorm))  # fmt: skip


class Conversion(NamedTuple):
    """Fate of one module."""

    name: str  # its path in the model; empty for the model itself
    module: type  # its class
    target: type | None  # the class that it gets; None: it stays as it is
    reason: str | None  # why it stays


class _Found:
    """A module of a model, and everywhere it is."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.names: list[str] = []
        self.places: list[tuple[Module, str]] = []  # (parent, name in it)
        self.skipped = False


def convert(
    model: Module, *, skip: Any = (), strict: bool = False, to: str = "transformer_engine"
) -> Module:
    """Swap the linear layers and norms of a model for those of this package, in place.

    `torch.nn.Linear`, `torch.nn.LayerNorm` and `torch.nn.RMSNorm` become their namesakes here;
    so do the RMSNorm classes of other packages (``LlamaRMSNorm``, ``GemmaRMSNorm``,
    ``T5LayerNorm``, ...), recognised by trying what they compute. The new module has the very
    parameters of the old one: tied weights stay tied, an optimizer that was made before goes on
    working, and nothing is initialised, copied or moved. It keeps hooks and their handles, buffers,
    parametrizations, training mode and attributes. Subclasses are left alone, as their owner may
    read more of them than their forward. `convertible` says beforehand what becomes of each module.

    Parameters
    ----------
    model : Module
        The model, on the CPU, a CUDA device or the meta device.
    skip : str, class, Module, callable, or iterable of these
        Modules to leave as they are, with everything inside them: by path (``"lm_head"``, or a
        pattern such as ``"*.router"``), class (instances of subclasses too), as objects, or by
        ``f(path, module) -> bool``.
    strict : bool, default False
        Raise, before anything is changed, where a module that is not skipped looks convertible and
        is not.
    to : {"transformer_engine", "torch"}
        "torch" goes the other way: `Linear`, `LayerNorm` and `RMSNorm` of this package become
        those of `torch.nn`. Scaling state is left behind.

    Returns
    -------
    Module
        `model`; the new module where `model` itself is one of those that are swapped.

    Raises
    ------
    TypeError
        `model` is no module, or `skip` holds something else.
    ValueError
        A path in `skip` is in no module of the model; `to` is unknown; or with `strict` the modules
        that can not be converted, with the reasons.
    """
    plan = list(_plan(model, skip, to))
    left = [(found, made) for found, made in plan if isinstance(made, str)]
    if strict and left:
        lines = [
            f"  {found.names[0] or 'the model itself'} ({type(found.module).__qualname__}): {why}"
            for found, why in left
        ]
        raise ValueError(
            f"convert: strict=True, and {len(left)} modules can not be converted; nothing was "
            "changed. Name them in skip=, or give strict=False:\n" + "\n".join(lines)
        )
    swapped: dict[int, Module] = {}
    for found, made in plan:
        if isinstance(made, str):
            continue
        new = swapped[id(found.module)] = _swap(found.module, made)
        for parent, name in found.places:
            swapped.get(id(parent), parent)._modules[name] = new
    return swapped.get(id(model), model)


def convertible(
    model: Module, *, skip: Any = (), to: str = "transformer_engine"
) -> list[Conversion]:
    """List what `convert` does with a model, without doing it; arguments and errors as there.

    These are the modules that are swapped, and those that look like them and stay, with the reason;
    in the order of the model. Not those that `skip` names.
    """
    return [
        Conversion(name, type(found.module), *((None, made) if isinstance(made, str) else
                                               (type(made), None)))
        for found, made in _plan(model, skip, to)
        for name in found.names
    ]  # fmt: skip


# ---- which modules -------------------------------------------------------------------------------


def _plan(model: Any, skip: Any, to: str) -> Iterator[tuple[_Found, Module | str]]:
    """Yield each module of interest with an empty one of its new class, or the reason it stays."""
    check_model("convert", model)
    if to not in ("transformer_engine", "torch"):
        raise ValueError(f'convert: to={to!r}, expected "transformer_engine" or "torch"')
    counterpart = counterpart_of if to == "transformer_engine" else _to_torch
    skips = Skip("convert", skip)
    modules: dict[int, _Found] = {}
    _collect(modules, skips, ("", model), None, False)
    skips.check([name for found in modules.values() for name in found.names])
    for found in modules.values():
        if found.skipped:
            continue
        made = counterpart(found.module)
        if isinstance(made, Module) and any(_is_compiled(parent) for parent, _ in found.places):
            made = "it was compiled by itself (torch.compile): convert before"
        if made is not None:
            yield found, made


def _is_compiled(module: Module) -> bool:
    """Return whether `torch.compile` made a module, which calls one inside by another reference."""
    functions = sys.modules.get("torch._dynamo.eval_frame")
    return functions is not None and isinstance(module, functions.OptimizedModule)


def _collect(
    modules: dict[int, _Found],
    skips: Skip,
    named: tuple[str, Module],
    place: tuple[Module, str] | None,
    skipped: bool,
) -> None:
    """Enter a module and those inside of it; the parts of our own modules belong to these."""
    path, module = named
    found = modules.setdefault(id(module), _Found(module))
    found.names.append(path)
    if place is not None:
        found.places.append(place)
    skipped = skips.matches(path, module) or skipped
    found.skipped = found.skipped or skipped
    if _is_ours(module) or isinstance(module, torch.nn.utils.parametrize.ParametrizationList):
        return
    for name, child in module._modules.items():
        if child is not None:
            inner = f"{path}.{name}" if path else name
            _collect(modules, skips, (inner, child), (module, name), skipped)


def _is_ours(module: Module) -> bool:
    """Return whether its class, or one that it derives from, is of this package."""
    package = NativeModule.__module__.partition(".module")[0]
    return any(kind.__module__.startswith(package) for kind in type(module).__mro__)


# ---- what becomes of one -------------------------------------------------------------------------


def _plain_class(module: Module) -> type:
    """The class of a module; of one that `torch.nn.utils.parametrize` changed, the one before."""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return type(module).__bases__[0]
    return type(module)


def counterpart_of(module: Module) -> Module | str | None:
    """An empty module of this package in place of one; why there is none; None: no layer of ours.

    It is on the meta device: nothing is allocated, and no random number drawn.
    """
    if _is_ours(module):
        return None
    kind = _plain_class(module)
    for theirs, ours in _COUNTERPARTS:
        if kind is theirs:
            return _unfit(module) or _make_ours(module, ours)
        if isinstance(module, theirs):
            return (
                f"its class is a subclass of torch.nn.{theirs.__name__}, whose owner may rely on it"
            )
    if not named_like_one(module):
        return None
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "a parametrized module of another package"
    reason = _unfit(module)
    if reason is not None:
        return reason
    norm = recognise(module)
    if isinstance(norm, str):
        return norm
    weight = module._parameters["weight"]
    made = RMSNorm(
        weight.shape[0],
        eps=norm.eps,
        zero_centered_gamma=norm.zero_centered,
        device="meta",
        dtype=weight.dtype,
    )
    made.follows_input = norm.follows_input
    return made


def _unfit(module: Module) -> str | None:
    """Reason why a module of a fitting class is not swapped."""
    if "forward" in module.__dict__:
        return "its forward was replaced on the instance (by a hook of another package, say)"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "it was compiled by itself (Module.compile): convert before"
    tensors = dict(module.named_parameters())
    for name, tensor in tensors.items():
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            return f"{name} is a {type(tensor).__name__}: convert before the model is sharded"
        if tensor.dtype not in DTYPES:
            return f"{name} is {tensor.dtype}, not torch.float32, torch.float16 or torch.bfloat16"
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        return "its parameters differ in dtype"
    return None


def _has(module: Module, name: str) -> bool:
    """Return whether a module has a parameter, be it parametrized, or a tensor in its place."""
    parametrizations = module._modules.get("parametrizations")
    if parametrizations is not None and name in parametrizations:
        return True
    return getattr(module, name, None) is not None


def _make_ours(module: Module, ours: type) -> Module | str:
    dtype = next((tensor.dtype for tensor in module.parameters()), None)
    weight = module._parameters.get("weight")
    if ours is Linear:
        sizes = module.out_features, module.in_features
        if min(sizes) < 1:
            return f"its weight has no elements: {sizes}"
        if weight is not None and tuple(weight.shape) != sizes:
            return f"its weight is {tuple(weight.shape)}, where its features say {sizes}"
        bias = _has(module, "bias")
        return Linear(*reversed(sizes), bias=bias, params_dtype=dtype, device="meta")
    shape = tuple(module.normalized_shape)
    made = ours(shape, device="meta", dtype=dtype, **_norm_options(module, ours))
    made.follows_input = True  # as torch's: 16 bits stay 16 bits, whatever the weight
    return made


def _norm_options(module: Module, ours: type) -> dict[str, Any]:
    """Further arguments of the constructor of a norm, of torch's class and of ours."""
    options = {"eps": module.eps, "elementwise_affine": _has(module, "weight")}
    return options | ({"bias": _has(module, "bias")} if ours is LayerNorm else {})


def _to_torch(module: Module) -> Module | str | None:
    """An empty module of torch.nn in place of one of ours; else as of `counterpart_of`."""
    if not _is_ours(module):
        return None
    kind = _plain_class(module)
    theirs = next((theirs for theirs, ours in _COUNTERPARTS if ours is kind), None)
    if theirs is None:
        return (
            "torch.nn has no such module" if next(module.parameters(), None) is not None else None
        )
    dtype = next((tensor.dtype for tensor in module.parameters()), None)
    if kind is Linear:
        for name in ("fuse_wgrad_accumulation", "delay_wgrad_compute", "return_bias"):
            if getattr(module, name):
                return f"{name}=True"
        if module._split is not None:
            pieces = ", ".join(name for name, _ in module._split.pieces)
            return f"its weight is split into {pieces}"
        sizes = module.in_features, module.out_features
        return torch.nn.Linear(*sizes, module.use_bias, device="meta", dtype=dtype)
    if module.zero_centered_gamma:
        return "zero_centered_gamma=True: the factor of torch.nn's is gamma, not 1 + gamma"
    options = _norm_options(module, kind)
    return theirs(module.normalized_shape, device="meta", dtype=dtype, **options)


# ---- the swap ------------------------------------------------------------------------------------


def _swap(old: Module, new: Module) -> Module:
    """Give an empty module everything that an old one has besides its own settings."""
    settings = _settings(old)
    mine, theirs = new.__dict__, old.__dict__
    for name, value in theirs.items():
        if name in _OWN_COPY:
            mine[name] = type(value)(value)
        elif name in _BASE or not (name in mine or name in settings):
            mine[name] = value
    _settle_bias(old, new)
    for hook in mine["_load_state_dict_pre_hooks"].values():
        if getattr(hook, "with_module", False):
            hook.module = weakref.ref(new)
    if torch.nn.utils.parametrize.is_parametrized(new):
        # The class that torch makes for one instance holds the properties that stand for tensors.
        give_own_class(new)
        for name, member in vars(type(old)).items():
            if isinstance(member, property):
                setattr(type(new), name, member)
    return new


def _settings(module: Module) -> set[str]:
    """Attributes of one of our modules that are no concern of one of torch's."""
    if not _is_ours(module):
        return set()
    kind = _plain_class(module)
    return set(vars(kind(1, 1, device="meta") if kind is Linear else kind(1, device="meta")))


def _settle_bias(old: Module, new: Module) -> None:
    """Say "no bias" as the class of the new module does."""
    if isinstance(new, Linear):
        if not new.use_bias:
            new._parameters.pop("bias", None)
            like = next(new.parameters(), torch.empty(0))
            new.__dict__["bias"] = torch.empty(0, dtype=like.dtype, device=like.device)
    elif isinstance(old, Linear) and not old.use_bias:
        new.__dict__.pop("bias", None)
        new._parameters["bias"] = None
