# SPDX-License-Identifier: Apache-2.0
"""``python -m transformer_engine.plugin``: which operators vendors have, and which are right.

``coverage`` prints and writes a table of operators, vendors, dtypes and recipes; ``check VENDOR``
ends with status 1 where an implementation of a vendor is wrong. Both find plug-ins as programs do:
by entry points and ``TE_FL_PLUGIN_MODULES``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m transformer_engine.plugin",
        description="Coverage and conformance of plug-ins. They are found by entry points and by "
        "TE_FL_PLUGIN_MODULES.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    both = argparse.ArgumentParser(add_help=False)
    both.add_argument("--device", default="cpu", help='type of device, "cpu" by default')
    both.add_argument("--op", action="append", default=[], help="this operator alone; repeatable")
    coverage = commands.add_parser(
        "coverage", parents=[both], help="operator x vendor x dtype x recipe, by conformance"
    )
    coverage.add_argument(
        "--vendor",
        action="append",
        default=[],
        help="this vendor, or impl_id such as default.native; all vendors by default",
    )
    coverage.add_argument("--markdown", type=Path, help="write the table to this file")
    coverage.add_argument("--json", type=Path, help="write the data to this file")
    check = commands.add_parser(
        "check", parents=[both], help="check all of a vendor; status 1 where one fails"
    )
    check.add_argument("vendor", help="a vendor, or impl_id such as default.native")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its status: 0, 1 where an implementation fails, 2 for wrong arguments."""
    given = _parser().parse_args(arguments)
    from transformer_engine.plugin.conformance import matrix

    checks = given.command == "check"
    try:
        vendors = [given.vendor] if checks else given.vendor or matrix.vendors()
        if not vendors:
            print("no plug-in has registered an implementation", file=sys.stderr)
            return 2
        tell = print if checks else lambda line: print(line, file=sys.stderr)
        found = matrix.matrix(given.device, vendors, given.op, tell, lacking=not checks)
    except (LookupError, RuntimeError) as error:  # no such vendor, or device
        print(error, file=sys.stderr)
        return 2
    if not checks:
        print(found)
        for path, text in ((given.markdown, found.to_markdown), (given.json, found.to_json)):
            if path is not None:
                path.write_text(text())
        return 0
    for cell in found.failed:
        print(f"failed: {cell.op_name} by {cell.impl_id}, {cell.dtype} {cell.recipe}: {cell.why}")
    passed = any(cell.passed for cell in found.cells)
    if not passed:
        print("no case passed", file=sys.stderr)
    return int(bool(found.failed) or not passed)


if __name__ == "__main__":
    sys.exit(main())
