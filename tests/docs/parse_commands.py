# SPDX-License-Identifier: Apache-2.0
"""Let programs read their command lines, and stop there: `[[file, argument...]...]` as JSON.

A program that has no `argparse.ArgumentParser` runs as a whole.
"""

import argparse
import json
import runpy
import sys
from pathlib import Path

parse_args = argparse.ArgumentParser.parse_args


class Accepted(BaseException):
    """The program understood its arguments."""


def parse_and_stop(self, args=None, namespace=None):
    """Stand for `ArgumentParser.parse_args`."""
    parse_args(self, args, namespace)
    raise Accepted


def main():
    """Try every command; one that its program refuses ends this one."""
    argparse.ArgumentParser.parse_args = parse_and_stop
    before = list(sys.path)
    for command in json.load(sys.stdin):
        sys.argv, sys.path = command, [str(Path(command[0]).resolve().parent), *before]
        try:
            runpy.run_path(command[0], run_name="__main__")
        except Accepted:
            pass
        except SystemExit as end:  # of --help with 0
            if end.code not in (None, 0):
                print(f"refused: {command}", file=sys.stderr)
                raise


main()
