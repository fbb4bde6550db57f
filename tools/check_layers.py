# SPDX-License-Identifier: Apache-2.0
"""Check who may know whom in csrc: by folder, and without a circle of headers or of files.

A folder includes headers of its own, of csrc/include and of the folders in LAYERS. Calls between
the files of a folder are read from the objects (`make build`), so that a file can be understood
after those that it calls.
"""

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
    "python": ("include",),
}


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


def main():
    """Check the includes of csrc, and the calls between its objects."""
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
    finish(problems)


if __name__ == "__main__":
    main()
