# SPDX-License-Identifier: Apache-2.0
"""Run what stands on standard input as one program: pieces of Python of a page, as JSON.

They share one namespace, which is that of `__main__`; errors name page and line.
"""

import json
import sys
import types


def main():
    """Run the pieces in their order."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    for piece in json.load(sys.stdin):
        code = compile("\n" * (piece["line"] - 1) + piece["text"], piece["path"], "exec")
        try:
            exec(code, module.__dict__)
        except Exception as error:
            if type(error).__name__ != piece["raises"]:
                raise
            piece["raises"] = ""
        if piece["raises"]:
            where = f"{piece['path']}:{piece['line']}"
            raise SystemExit(f"{where}: this block does not raise {piece['raises']}")


main()
