# SPDX-License-Identifier: Apache-2.0
"""Check who may know whom: by folder, and without a circle of headers or of files.

In csrc a folder includes headers of its own, of csrc/include and of the folders in LAYERS. Calls
between the files of a folder are read from the objects (`make build`), so that a file can be
understood after those that it calls. In transformer_engine/pytorch a folder imports from those
before it in FOLDERS, also inside of functions; what stands beside them are paths that programs
import, which no folder needs but for LEAVES.
"""

import ast
import re
import subprocess

from ctext import ROOT, blank, finish

CSRC = ROOT / "csrc"
LAYERS = {
    "include": (),
    "core": ("include",),
    "cpu": ("include", "core"),
    "cuda": ("include", "core"),
    "layer": ("include", "core"),
    "xla": ("include", "core"),
    "python": ("include", "xla"),
}

PACKAGE = "transformer_engine"
PYTORCH = f"{PACKAGE}.pytorch."
FOLDERS = "torchside execution scaling_state tensor module attention layer optimizers tools".split()
LEAVES = ("constants", "torch_version")


def includes(path):
    """Yield the files of csrc that a file includes, relative to csrc."""
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', blank(path.read_text(), False), re.M):
        for folder in (path.parent, CSRC, CSRC / "include", CSRC / "cuda" / "kernels"):
            if (folder / name).exists():
                yield str((folder / name).resolve().relative_to(CSRC))
                break


def include_edges():
    """Return {file: files that it includes} of csrc."""
    paths = sorted(path for path in CSRC.rglob("*") if path.suffix in (".c", ".h", ".cu", ".cuh"))
    return {str(path.relative_to(CSRC)): set(includes(path)) for path in paths}


def current_object(source):
    """Return the object of a C file that was made from it as it is, or None."""
    name = source.relative_to(CSRC).with_suffix(".o")
    made = source.stat().st_mtime
    objects = [path for path in ROOT.glob(f"build/obj-*/{name}") if path.stat().st_mtime > made]
    return max(objects, key=lambda path: path.stat().st_mtime, default=None)


def call_edges(folder):
    """Return {file: files of the folder whose functions or data it uses}."""
    defined, used = {}, {}
    for source in sorted((CSRC / folder).glob("*.c")):
        path, name = current_object(source), str(source.relative_to(CSRC))
        if path is None:
            continue
        said = subprocess.run(["nm", "-P", "-g", path], capture_output=True, text=True, check=True)
        used[name] = set()
        for symbol, kind, *_ in map(str.split, said.stdout.splitlines()):
            if kind == "U":
                used[name].add(symbol)
            else:
                defined[symbol] = name
    edges = {name: {defined[s] for s in symbols & defined.keys()} for name, symbols in used.items()}
    return {name: to - {name} for name, to in edges.items()}


def find_cycle(edges):
    """Return the files of one circle, each with the next, or None."""
    left = dict(edges)
    while ends := [name for name, to in left.items() if not to & left.keys()]:
        for name in ends:
            del left[name]
    path = sorted(left)[:1]
    while path and path[-1] not in path[:-1]:
        path.append(min(left[path[-1]] & left.keys()))
    return path[path.index(path[-1]) :] if path else None


# ---- Python --------------------------------------------------------------------------------------


def modules():
    """Return {module: path} of the Python package."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path, known):
    """Yield the modules among `known` that a file imports, but for those that types alone need."""
    tree = ast.parse(path.read_text())
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in set(ast.walk(tree)) - skipped:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                if name in known or node.module in known:
                    yield name if name in known else node.module


def import_edges():
    """Return {module: modules that it imports} of the Python package."""
    known = modules()
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def folder_of(module):
    """Return the folder of FOLDERS that a module is in, else the module relative to PYTORCH."""
    parts = module.removeprefix(PYTORCH).split(".")
    return parts[0] if parts[0] in FOLDERS else ".".join(parts)


def out_of_order(edges):
    """Yield a problem for each import against the order of FOLDERS."""
    for name, to in edges.items():
        folder = folder_of(name)
        if not name.startswith(PYTORCH) or folder not in FOLDERS:
            continue
        before = FOLDERS[: FOLDERS.index(folder) + 1]
        for other in sorted(to):
            if other.startswith(f"{PACKAGE}.plugin"):
                yield f"{name}: imports {other}: plug-ins register with execution.overrides"
            elif other.startswith(PYTORCH) and folder_of(other) not in (*before, *LEAVES):
                yield f"{name}: imports {other}: {folder} comes before {folder_of(other)}"


def bound_twice(path):
    """Yield a problem for each name that a module binds twice at its top level."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = [getattr(node, "name", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in filter(None, names):
            if name in found:
                yield f"{path.relative_to(ROOT)}: {name} is bound twice"
            found.add(name)


def main():
    """Check the includes of csrc and the calls between its objects; the imports of the package."""
    headers, problems = include_edges(), []
    for name, to in headers.items():
        folder = name.split("/")[0]
        for other in sorted(to):
            known = other.split("/")[0]
            if known != folder and known not in LAYERS[folder]:
                problems.append(f"csrc/{name}: includes {other}: csrc/{folder} knows no {known}")
    for what, graph in [("include", headers), *(("call", call_edges(name)) for name in LAYERS)]:
        if cycle := find_cycle(graph):
            problems.append(f"csrc: a circle of {what}s: {' -> '.join(cycle)}")
    for path in modules().values():
        problems += bound_twice(path)
    edges = import_edges()
    problems += out_of_order(edges)
    if cycle := find_cycle(edges):
        problems.append(f"{PACKAGE}: a circle of imports: {' -> '.join(cycle)}")
    finish(problems)


if __name__ == "__main__":
    main()
