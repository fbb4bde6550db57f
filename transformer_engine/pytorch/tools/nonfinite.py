# SPDX-License-Identifier: Apache-2.0
"""Where a NaN or an infinity comes from: the first module and tensor of a step that has one."""

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from transformer_engine.common.contexts import Context
from transformer_engine.pytorch.tools.counts import scales
from transformer_engine.pytorch.tools.skip import Skip, check_model
from transformer_engine.pytorch.torchside.modes import in_transform


class Finding(NamedTuple):
    """A tensor that is not finite."""

    phase: str  # "forward", "backward", or "state" for what `find_nonfinite` finds
    module: str  # its path; empty for the model itself
    kind: str  # its class
    tensor: str
    """The tensor of the module: "input x", "output", "parameter weight", "buffer table", "gradient
    of input x", "gradient of output", "gradient of parameter weight"."""
    nan: int  # how many of its values are NaN
    inf: int  # how many are infinite
    total: int  # how many there are
    index: tuple[int, ...]  # place of the first of them
    origin: bool  # all that the module had read was finite: the values were made here
    note: str  # where they come from, as far as can be told

    def __str__(self) -> str:
        where = f"{self.module} ({self.kind})" if self.module else f"the model ({self.kind})"
        return (
            f"{self.phase}: {self.tensor} of {where}: {self.nan} NaN and {self.inf} infinite of "
            f"{self.total} values, the first at {self.index}; {self.note}"
        )


class NonFiniteError(FloatingPointError):
    """Raised by `watch_finite`; ``finding`` is the `Finding`."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


# ---- tensors -------------------------------------------------------------------------------------


def _checkable(tensor: Any) -> bool:
    """Return whether its values can be looked at, and could be something else than finite."""
    return (
        isinstance(tensor, Tensor)
        and (tensor.is_floating_point() or tensor.is_complex())
        and tensor.dtype.itemsize > 1
        and tensor.layout is torch.strided
        and not tensor.is_meta
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _count(tensor: Tensor, allow_minus_inf: bool = False) -> tuple | None:
    """(NaN, infinite, values, index of the first), or None where all are finite.

    Additive masks are made of minus infinity, so that alone is allowed in what a module is given.
    """
    tensor = tensor.detach()
    bad = ~tensor.isfinite()
    if allow_minus_inf and not tensor.is_complex():
        bad &= ~tensor.isneginf()
    if not bool(bad.any()):
        return None
    nan = int(tensor.isnan().sum())
    first = bad.reshape(-1).to(torch.uint8).argmax()
    index = tuple(int(i) for i in torch.unravel_index(first, bad.shape)) if bad.dim() else ()
    return nan, int((~tensor.isfinite()).sum()) - nan, tensor.numel(), index


def _tensors(value: Any, label: str) -> Iterator[tuple[str, Tensor]]:
    """Tensors in nested containers, with a label each."""
    if _checkable(value):
        yield label, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{label}[{key!r}]")
    elif isinstance(value, list | tuple):
        for at, item in enumerate(value):
            yield from _tensors(item, f"{label}[{at}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name, None), f"{label}.{field.name}")


@functools.cache
def _argument_names(kind: type) -> tuple[str, ...]:
    """Names of the positional arguments of a forward."""
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(p.name for p in parameters if p.kind in positional)


def _inputs(module: Module, args: tuple, kwargs: dict) -> Iterator[tuple[str, Tensor]]:
    names = _argument_names(type(module))
    for at, value in enumerate(args):
        yield from _tensors(value, f"input {names[at] if at < len(names) else at}")
    for name, value in kwargs.items():
        yield from _tensors(value, f"input {name}")


def _own(module: Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(label, tensor, whether minus infinity is no finding) of parameters and buffers."""
    for name, parameter in module._parameters.items():
        if _checkable(parameter):
            yield f"parameter {name}", parameter, False
    for name, buffer in module._buffers.items():
        if _checkable(buffer):
            yield f"buffer {name}", buffer, True


# ---- what is there now ---------------------------------------------------------------------------


def find_nonfinite(model: Module) -> list[Finding]:
    """Look for values that are not finite in what a model holds now.

    These are parameters, their ``grad``, buffers (where minus infinity alone is none) and scaling
    state, in the order of the model; the list is empty where all is well.
    """
    check_model("find_nonfinite", model)
    findings = []

    def look(path: str, label: str, tensor: Tensor, here: bool, note: str, allow: bool) -> None:
        counted = _count(tensor, allow)
        if counted:
            module = model.get_submodule(path)
            findings.append(_finding("state", path, module, label, counted, here, note))

    for path, module in model.named_modules():
        for label, tensor, allow in _own(module):
            look(path, label, tensor, True, "it is there", allow)
            if _checkable(tensor.grad) and tensor.is_leaf:
                look(path, f"gradient of {label}", tensor.grad, False, "it is there", False)
    for name, scaling in scales(model).items():
        path, _, tensor = name.rpartition(".")
        amaxes = torch.tensor([scaling.scale, scaling.pending, *scaling.history])
        note = "a cast has met an infinite value; the scale stays until the history forgets it"
        look(path, f"scale and amaxes of {tensor}", amaxes, False, note, False)
    return findings


# ---- during a step -------------------------------------------------------------------------------


class _Role(NamedTuple):
    """Role of a tensor in a module."""

    path: str
    module: Module
    label: str
    reads: bool


class watch_finite(Context):  # noqa: N801 - reads as what it does, as `autocast`
    """Find the first tensor of a step that is not finite.

    Inside the ``with`` block every module of the model has its parameters, buffers and inputs
    looked at before its forward, its output after it, and the gradients of these as the backward
    makes them. The first one that is not finite is the `finding`; looking ends there. As all before
    it was finite, the values were made where it says. Forward and backward belong inside the block.

    Any `torch.nn` module is watched. Not looked at are code that `torch.compile` runs, tensors
    without memory of their own (meta tensors, sharded ones), and FP8 data. Minus infinity alone is
    no finding in inputs and buffers, since masks are made of it. Every look waits for the device;
    nothing is left behind when the block ends.

    Parameters
    ----------
    model : Module
        The model.
    skip : str, class, Module, callable, or iterable of these
        Modules that are not watched, with everything inside them; as of `convert`.
    raises : bool, default True
        Raise a `NonFiniteError` at the finding; False keeps it in `finding` and goes on.

    Attributes
    ----------
    finding : Finding or None
        The first tensor that is not finite.

    Raises
    ------
    TypeError
        `model` is no module, or `skip` holds something else.
    ValueError
        A path in `skip` is in no module of the model.
    """

    def __init__(self, model: Module, *, skip: Any = (), raises: bool = True) -> None:
        check_model("watch_finite", model)
        self._model = model
        self._skips = Skip("watch_finite", skip)
        self._skips.check([name for name, _ in model.named_modules(remove_duplicate=False)])
        self._raises = raises
        self._active = False
        self._handles: list = []
        self.finding: Finding | None = None

    def _enter(self) -> "watch_finite":
        from torch.utils.weak import WeakTensorKeyDictionary  # here: it takes a while to import

        self.finding = None
        self._roles: Any = WeakTensorKeyDictionary()
        self._undo_by(self._stop)
        self._active = True
        self._watch("", self._model, {})
        return self

    def _stop(self) -> None:
        self._active = False  # a hook that an interrupt keeps from being known looks at nothing
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._roles = None

    def _watch(self, path: str, module: Module, seen: dict[int, Module]) -> None:
        """Put hooks on a module and on those inside it, once each."""
        if id(module) in seen or self._skips.matches(path, module):
            return
        seen[id(module)] = module
        if not isinstance(module, torch.jit.ScriptModule):
            before = functools.partial(self._before, path)
            after = functools.partial(self._after, path)
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            ]
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad and _checkable(parameter):
                    role = _Role(path, module, f"parameter {name}", True)
                    hook = functools.partial(self._gradient, [role])
                    self._handles.append(parameter.register_hook(hook))
        for name, child in module._modules.items():
            if child is not None:
                self._watch(f"{path}.{name}" if path else name, child, seen)

    def _looking(self) -> bool:
        return (
            self._active
            and self.finding is None
            and not torch.compiler.is_compiling()
            and not in_transform()
        )

    def _found(self, finding: Finding) -> None:
        self.finding = finding
        if self._raises:
            raise NonFiniteError(finding)

    # ---- forward -------------------------------------------------------------------------------

    def _before(self, path: str, module: Module, args: tuple, kwargs: dict) -> None:
        """Look at what a module reads."""
        if not self._looking():
            return
        own = [(*each, True, "it was so before this call") for each in _own(module)]
        parent = path.rpartition(".")[0] or "the model"
        note = f"made between the modules, by the code of {parent} around this one"
        note = note if path else "the model was given it"
        given = [(*each, True, False, note) for each in _inputs(module, args, kwargs)]
        for label, tensor, allow, origin, note in (*own, *given):
            counted = _count(tensor, allow)
            if counted:
                self._found(_finding("forward", path, module, label, counted, origin, note))
                return
            if not origin:
                self._follow(tensor, _Role(path, module, label, True))

    def _after(self, path: str, module: Module, args: tuple, output: Any) -> None:
        """Look at what a module made."""
        if not self._looking():
            return
        for label, tensor in _tensors(output, "output"):
            counted = _count(tensor)
            if counted:
                note = "its inputs and parameters were finite"
                if any(child is not None for child in module._modules.values()):
                    note += ", and so was what the modules inside it made"
                self._found(_finding("forward", path, module, label, counted, True, note))
                return
            self._follow(tensor, _Role(path, module, label, False))

    # ---- backward ------------------------------------------------------------------------------

    def _follow(self, tensor: Tensor, role: _Role) -> None:
        """Look at the gradient of a tensor when it is known, once for all that read or make it."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return
        known = self._roles.get(tensor)
        # After a change in place it is another node of the graph, and another gradient.
        if known is not None and known[0] is tensor.grad_fn:
            known[1].append(role)
            return
        roles = [role]
        self._roles[tensor] = (tensor.grad_fn, roles)
        tensor.register_hook(functools.partial(self._gradient, roles))

    def _gradient(self, roles: list[_Role], grad: Tensor) -> None:
        """Look at a gradient."""
        if not self._looking() or not _checkable(grad):
            return
        counted = _count(grad)
        if counted:
            self._found(_backward_finding(roles, counted))


def _finding(
    phase: str, path: str, module: Module, label: str, counted: tuple, origin: bool, note: str
) -> Finding:
    return Finding(phase, path, type(module).__name__, label, *counted, origin, note)


def _backward_finding(roles: list[_Role], counted: tuple) -> Finding:
    """Name the module whose backward made a gradient.

    A module that reads the tensor did: what came into its backward was finite. A module around
    another one that reads the same tensor only hands it on.
    """
    readers = [r for r in roles if r.reads]
    readers = [r for r in readers if not any(_inside(o.path, r.path) for o in readers)]
    role = readers[0] if readers else roles[-1]
    note = "the gradients that came into its backward were finite"
    if not readers:  # the last one is the outermost that made it: nothing inside reads it
        note = "made by the loss, or by code after this module"
    others = sorted({r.path for r in readers} - {role.path})
    if others:
        note += f"; {', '.join(others)} read the same tensor, and the gradient is their sum"
    label = f"gradient of {role.label}"
    return _finding("backward", role.path, role.module, label, counted, bool(readers), note)


def _inside(path: str, other: str) -> bool:
    return path != other and (not other or path.startswith(other + "."))
