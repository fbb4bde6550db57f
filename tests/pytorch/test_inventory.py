# SPDX-License-Identifier: Apache-2.0
"""Every public name of NVIDIA Transformer Engine 2.20.2 is here, or on the list of absent names.

tests/data/names.json has the names and arguments (tools/inventory.py). A name that is here takes
the same arguments in the same order with the same defaults. `name_differences.py` has what differs
on purpose, with its reason.
"""

import ast
import fnmatch
import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from pytorch.name_differences import DIFFERENCES, SAME_DEFAULTS

LISTED = json.loads((Path(__file__).parents[1] / "data/names.json").read_text())
KINDS = inspect.Parameter


def is_absent(value):
    return (inspect.getdoc(value) or "").startswith("Not built yet")


def parameters(arguments):
    """Return [(name, kind, default)]; the default is () where there is none, ... for any."""
    spec = ast.parse(f"def f({arguments}): ...").body[0].args
    found = [(a.arg, KINDS.POSITIONAL_ONLY) for a in spec.posonlyargs]
    found += [(a.arg, KINDS.POSITIONAL_OR_KEYWORD) for a in spec.args]
    defaults = [()] * (len(found) - len(spec.defaults))
    defaults += [ast.literal_eval(node) for node in spec.defaults]
    found = [(*entry, default) for entry, default in zip(found, defaults, strict=True)]
    if spec.vararg:
        found.append((spec.vararg.arg, KINDS.VAR_POSITIONAL, ()))
    for argument, node in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        found.append((argument.arg, KINDS.KEYWORD_ONLY, ast.literal_eval(node) if node else ()))
    if spec.kwarg:
        found.append((spec.kwarg.arg, KINDS.VAR_KEYWORD, ()))
    return found


def is_same(name, default, mine):
    """Whether two defaults of an argument are the same, or mean it."""
    if (name, default) in SAME_DEFAULTS:
        default = SAME_DEFAULTS[name, default]
    return mine == default and type(mine) is type(default)


def differing(name, arguments, built):
    """Yield what of a call by the listed arguments `built`, the object here, would not take."""
    if built is getattr(torch.Tensor, name, None):
        return  # PyTorch's own
    ours = inspect.signature(built).parameters
    positional = [
        p.name for p in ours.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if positional[:1] == ["self"]:
        del positional[0]
    place = 0
    for name, kind, default in parameters(arguments):
        if kind in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD):
            continue  # what is passed on is not known
        if kind != KINDS.KEYWORD_ONLY:
            found = positional[place] if place < len(positional) else None
            place += 1
            if found != name:
                yield f"argument {place} is {found}, not {name}"
                continue
        elif name not in ours:
            yield f"it has no {name}"
            continue
        mine = ours[name].default
        if default != () and mine is KINDS.empty:
            yield f"{name} is required"
        elif default not in ((), ...) and not is_same(name, default, mine):
            yield f"{name}={mine!r}, not {default!r}"
    listed = {name for name, *_ in parameters(arguments)}
    for name, parameter in ours.items():
        needed = parameter.default is KINDS.empty and parameter.kind not in (
            KINDS.VAR_POSITIONAL,
            KINDS.VAR_KEYWORD,
        )
        if needed and name not in listed | {"self"}:
            yield f"{name} is required, and not listed"


def told(path, found):
    text = "; ".join(found)
    return [(path, text)] if text else []


def compare(path, listed, holder, name):
    """Yield (path, problem) of a listed name of a module or class."""
    path = f"{path}.{name}"
    try:
        built = getattr(holder, name)
    except AttributeError:
        classes = getattr(holder, "__mro__", ())
        if any(name in vars(each).get("__annotations__", ()) for each in classes):
            return  # every instance has it
        yield path, "missing"
        return
    if is_absent(built) or listed is None:
        return
    if isinstance(listed, dict):
        if not isinstance(built, type):
            yield path, "is no class"
            return
        for member, arguments in listed.items():
            yield from compare(path, arguments, built, member)
    elif name == "__init__":
        # how it is made is what programs see, whether by __init__, __new__ or a metaclass
        yield from told(path, differing(name, listed, holder))
    elif not callable(built):
        yield path, "is no function"
    else:
        if inspect.isfunction(built) and isinstance(holder, type):
            is_static = isinstance(inspect.getattr_static(holder, name), staticmethod)
            built = built if is_static else built.__get__(object())
        yield from told(path, differing(name, listed, built))


def problems(module):
    """Yield (path, problem) of a listed module."""
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError:
        yield module, "missing"
        return
    for name, listed in LISTED[module].items():
        yield from compare(module, listed, found, name)


def allowed(path):
    return [p for p in DIFFERENCES if fnmatch.fnmatchcase(path, p)]


@pytest.mark.parametrize("module", LISTED)
def test_names_and_arguments(module):
    found = [f"{path}: {text}" for path, text in problems(module) if not allowed(path)]
    assert not found, "\n".join(found)


def test_every_difference_is_one():
    """An entry of the list of differences goes when its name has come."""
    used = {
        pattern for module in LISTED for path, _ in problems(module) for pattern in allowed(path)
    }
    assert used == DIFFERENCES.keys()
