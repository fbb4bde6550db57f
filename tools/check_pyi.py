# SPDX-License-Identifier: Apache-2.0
"""Check that transformer_engine/_core.pyi says what the built extension has.

Names in both directions; for functions and methods the parameters that the signature line of the C
docstring gives: names, kinds and which of them are optional. Its other part is _core_names.pyi,
which the build writes (operator_stubs.py).
"""

import ast
import inspect
import sys

from ctext import ROOT, finish
from operator_stubs import NAME, OTHER


def describe_stub(node):
    """Return [(name, kind, optional)] of a function of the stub."""
    spec, kinds = node.args, inspect.Parameter
    positional = [(a.arg, kinds.POSITIONAL_ONLY) for a in spec.posonlyargs]
    positional += [(a.arg, kinds.POSITIONAL_OR_KEYWORD) for a in spec.args]
    first = len(positional) - len(spec.defaults)
    found = [(name, kind, i >= first) for i, (name, kind) in enumerate(positional)]
    if spec.vararg:
        found.append((spec.vararg.arg, kinds.VAR_POSITIONAL, False))
    for argument, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True):
        found.append((argument.arg, kinds.KEYWORD_ONLY, default is not None))
    if spec.kwarg:
        found.append((spec.kwarg.arg, kinds.VAR_KEYWORD, False))
    return [entry for entry in found if entry[0] not in ("self", "cls")]


def describe_built(function):
    """Return the same of a built function, None where its docstring has no signature line."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return None
    empty = inspect.Parameter.empty
    found = [(p.name, p.kind, p.default is not empty) for p in parameters]
    return [entry for entry in found if entry[0] not in ("self", "module")]


def spell(entries):
    """Return a description as text."""
    return ", ".join(f"{n} ({k.description}{', optional' * o})" for n, k, o in entries)


def compare(where, nodes, built):
    """Return the differences between the definitions of a stub and a built module or class."""
    stub, problems = {}, []
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            stub[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            stub[node.target.id] = node
    # A class that the module lacks serves the stub's own annotations (a TypedDict, say).
    helpers = {n for n, node in stub.items() if isinstance(node, ast.ClassDef)}
    names = {n for n in vars(built) if not n.startswith("_")}
    public = {n for n in stub if not n.startswith("_")}
    problems += [f"{where}{n}: in the stub only" for n in sorted(public - names - helpers)]
    problems += [f"{where}{n}: not in the stub" for n in sorted(names - public)]
    for name in sorted(names & public):
        node, value = stub[name], getattr(built, name)
        if isinstance(node, ast.ClassDef):
            problems += compare(f"{where}{name}.", node.body, value)
        elif isinstance(node, ast.FunctionDef) and callable(value):
            said, stubbed = describe_built(value), describe_stub(node)
            if said is None:
                problems.append(f"{where}{name}: its docstring lacks the signature line")
            elif said != stubbed:
                problems.append(f"{where}{name}: C has {spell(said)}; the stub {spell(stubbed)}")
    return problems


def main():
    """Compare the stub with the extension in place."""
    sys.path.insert(0, str(ROOT))
    import transformer_engine._core as core

    nodes = [n for path in (OTHER, OTHER.with_name(NAME)) for n in ast.parse(path.read_text()).body]
    finish(compare("", nodes, core))


if __name__ == "__main__":
    main()
