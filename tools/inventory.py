# SPDX-License-Identifier: Apache-2.0
"""List the public names and signatures of a release of NVIDIA Transformer Engine.

    python tools/inventory.py WHEEL [SDIST]

WHEEL is the file of `pip download --no-deps transformer_engine==VERSION`. SDIST is the folder of
the unpacked `transformer_engine_torch`, for the names of the native module. Reads names, arguments
and defaults by `ast`, never what functions do, and writes tests/data/names.json, which
tests/pytorch/test_inventory.py compares with this package:

    {module: {name: null | "arguments" | {member: null | "arguments"}}}

null is something that is neither a function nor a class (of a class: an attribute or a property).
Arguments are as Python writes them, without annotations and `self`; a default that is no literal
is ``...``. Names of environment variables, strings that begin with ``NVTE_``, go to
tests/data/variables.txt, for tests/core/test_unread_variables.py.
"""

import ast
import json
import re
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "tests/data/names.json"
VARIABLES = ROOT / "tests/data/variables.txt"
PACKAGES = (
    "transformer_engine/pytorch/",
    "transformer_engine/common/",
    "transformer_engine/debug/",
)
LEFT_OUT = ("transformer_engine/common/CuTeDSL/", "transformer_engine/pytorch/setup.py")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def _public(name):
    return not name.startswith("_") or name in ("__init__", "__call__")


def _default(node):
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError):
        return ast.Constant(...)
    return node


def _arguments(spec, bound):
    """Return the arguments of a function as text; `bound`: without the first one."""
    for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg):
        if each is not None:
            each.annotation = each.type_comment = None
    if bound:
        del (spec.posonlyargs or spec.args)[0]
    spec.defaults = [_default(node) for node in spec.defaults]
    spec.kw_defaults = [node and _default(node) for node in spec.kw_defaults]
    return ast.unparse(spec)


def _decorators(node):
    return {ast.unparse(each).partition("(")[0] for each in node.decorator_list}


def _fields(node):
    """Return the arguments that a dataclass or named tuple takes, None for other classes."""
    named = "NamedTuple" in {ast.unparse(base).rpartition(".")[2] for base in node.bases}
    if not named and not {"dataclass", "dataclasses.dataclass"} & _decorators(node):
        return None
    fields = []
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and "ClassVar" not in ast.unparse(each.annotation):
            default = f"={ast.unparse(_default(each.value))}" if each.value else ""
            fields.append(each.target.id + default)
    return ", ".join(fields)


def _targets(node):
    """Return the names that a statement assigns."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    found = [n for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return [n.id for n in found if isinstance(n.ctx, ast.Store)]


def _members(node):
    """Return the public members of a class."""
    members = {}
    fields = _fields(node)
    for each in node.body:
        if isinstance(each, FUNCTIONS):
            how = _decorators(each)
            if any(name.endswith((".setter", ".deleter")) for name in how):
                continue
            is_value = any(name.endswith("property") for name in how)
            bound = "staticmethod" not in how
            members[each.name] = None if is_value else _arguments(each.args, bound)
        elif isinstance(each, ast.Assign | ast.AnnAssign) and (each.value or fields is not None):
            members.update(dict.fromkeys(_targets(each)))
    if fields is not None:
        members.setdefault("__init__", fields)
    return {name: members[name] for name in sorted(members) if _public(name)}


def _statements(body):
    """Yield the statements of a module, those under conditions too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def names_of(source, is_package):
    """Return the public names of a module; what it imports counts for packages alone."""
    names = {}
    for node in _statements(ast.parse(source).body):
        if isinstance(node, FUNCTIONS):
            names.setdefault(node.name, _arguments(node.args, bound=False))
        elif isinstance(node, ast.ClassDef):
            names.setdefault(node.name, _members(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for name in _targets(node):
                names.setdefault(name, None)
        elif isinstance(node, ast.ImportFrom) and is_package:
            if node.level or (node.module or "").startswith("transformer_engine"):
                for alias in node.names:
                    names.setdefault(alias.asname or alias.name, None)
    names.pop("*", None)
    return {name: names[name] for name in sorted(names) if _public(name)}


def native_names(sdist):
    """Return the functions of the native module, with None for arguments."""
    found = set()
    for path in Path(sdist).rglob("pybind.cpp"):
        found |= set(re.findall(r'\bm\.def\(\s*"(\w+)"', path.read_text(encoding="utf-8")))
    return dict.fromkeys(sorted(found))


def main():
    """Write the lists."""
    modules, variables = {}, set()
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        for path in sorted(wheel.namelist()):
            if not path.endswith(".py"):
                continue
            variables |= set(re.findall(r"[\"'](NVTE_\w+)[\"']", wheel.read(path).decode()))
            if not path.startswith(PACKAGES) or path.startswith(LEFT_OUT):
                continue
            parts = path.removesuffix(".py").split("/")
            is_package = parts[-1] == "__init__"
            module = ".".join(parts[:-1] if is_package else parts)
            modules[module] = names_of(wheel.read(path).decode(), is_package)
    if len(sys.argv) > 2:
        modules["transformer_engine_torch"] = native_names(sys.argv[2])
    VARIABLES.write_text("".join(f"{name}\n" for name in sorted(variables)), encoding="utf-8")
    OUT.write_text(json.dumps(modules, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
