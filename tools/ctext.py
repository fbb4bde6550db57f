# SPDX-License-Identifier: Apache-2.0
"""Functions of the checkers of C files: blanking comments and strings, finding functions."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOKEN = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL)


def blank(text, strings=True):
    """Return C text with comments (and strings) replaced by spaces, lines kept."""

    def spaces(match):
        token = match[0]
        keep = token[0] in "\"'" and not strings
        return token if keep else re.sub(r"[^\n]", " ", token)

    return TOKEN.sub(spaces, text)


def functions(text):
    """Yield (name, first line, body) of each function of clang-formatted C text."""
    clean = blank(text)
    for match in re.finditer(
        r"^[^\s#}][^;{}=]*?\b(\w+)\([^;{}]*\)\s*\{\n.*?^\}", clean, re.M | re.S
    ):
        yield match[1], clean.count("\n", 0, match.start()) + 1, match[0]


def finish(problems):
    """Print the problems and exit with what they amount to."""
    for problem in problems:
        print(problem)
    sys.exit(1 if problems else 0)
