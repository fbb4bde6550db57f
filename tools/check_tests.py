# SPDX-License-Identifier: Apache-2.0
"""Check that tests take their tolerances from tests/tols.py, where each has its derivation.

A number given to atol, rtol, tol, abs, rel or max_error, or a small float on one side of `<`, is a
tolerance. A line that means something else says `# not a tolerance`.
"""

import ast

from ctext import ROOT, finish

KEYWORDS = {"atol", "rtol", "tol", "abs", "rel", "max_error"}
SMALL = 0.1  # a float nearer to zero than this, in a comparison, bounds an error


def is_number(node):
    """Tell whether a node is a non-zero number, whatever arithmetic of literals spells it."""
    if any(isinstance(n, ast.Name | ast.Call | ast.Attribute) for n in ast.walk(node)):
        return False
    numbers = [n.value for n in ast.walk(node) if isinstance(n, ast.Constant)]
    numbers = [n for n in numbers if isinstance(n, int | float) and not isinstance(n, bool)]
    return bool(numbers) and any(n != 0 for n in numbers)


def find_literals(tree):
    """Yield the nodes that spell out a tolerance."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in KEYWORDS and is_number(node.value):
            yield node.value
        elif isinstance(node, ast.Compare):
            for operator, right in zip(node.ops, node.comparators, strict=True):
                bounds = isinstance(operator, ast.Lt | ast.LtE)
                if bounds and isinstance(right, ast.Constant) and isinstance(right.value, float):
                    if 0 < abs(right.value) < SMALL:
                        yield right


def main():
    """Check every test file but the table itself."""
    problems = []
    for path in sorted(ROOT.glob("tests/**/*.py")):
        if path.name == "tols.py":
            continue
        text = path.read_text()
        for node in find_literals(ast.parse(text)):
            if "not a tolerance" not in text.splitlines()[node.lineno - 1]:
                said = ast.unparse(node)
                problems.append(f"{path.relative_to(ROOT)}:{node.lineno}: {said} is for tols.py")
    finish(problems)


if __name__ == "__main__":
    main()
