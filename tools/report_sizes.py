# SPDX-License-Identifier: Apache-2.0
"""Print the files and functions that exceed the size guidance. Guidance, not a gate: exits with 0.

Split a file where it holds two concepts, never to please a counter.
"""

import ast

from ctext import ROOT, functions

FILES = {".c": 600, ".cu": 500, ".cuh": 500, ".h": 250, ".py": 600}
TEST_FILE, BUILD_FILE, C_FUNCTION, PYTHON_FUNCTION = 500, 300, 80, 60
FOLDERS = ("csrc", "transformer_engine", "tests", "tools", "examples", "benchmarks")


def list_functions(path, text):
    """Yield (name, line, length) of the functions of a file.

    Of Python the lines of the body: an interface makes signature and docstring as long as it is.
    """
    if path.suffix != ".py":
        for name, line, body in functions(text):
            yield name, line, body.count("\n") + 1
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0]
            yield node.name, node.lineno, node.end_lineno - first.lineno + 1


def main():
    """Walk the tree."""
    paths = [p for d in FOLDERS for p in (ROOT / d).glob("**/*") if p.suffix in FILES]
    for path in sorted(paths) + [ROOT / "setup.py"]:
        name, text = path.relative_to(ROOT), path.read_text()
        guide = TEST_FILE if name.parts[0] == "tests" else FILES[path.suffix]
        guide = BUILD_FILE if path.name == "setup.py" else guide
        lines = text.count("\n")
        if lines > guide:
            print(f"size: {name}: {lines} lines, guidance {guide}")
        guide = PYTHON_FUNCTION if path.suffix == ".py" else C_FUNCTION
        for function, line, length in list_functions(path, text):
            if length > guide:
                print(f"size: {name}:{line}: {function}: {length} lines, guidance {guide}")


if __name__ == "__main__":
    main()
