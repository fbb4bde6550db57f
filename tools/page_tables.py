# SPDX-License-Identifier: Apache-2.0
"""Tables in docs that are made from the package: what the scripts that make them share."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def keep(page, script, table, part=""):
    """Write a table into its page, between the comments that name its script.

    Parameters
    ----------
    page, script : str
        Paths from the root.
    table : str
        The table in Markdown; cells are separated by ``|``, which inside of them is escaped.
    part : str
        Which of several tables of one script it is.

    Returns
    -------
    int
        An exit status: with --check nothing is written, and it is 1 where the page is not up to
        date.
    """
    begin = f"<!-- table{part and ' of ' + part}: made by {script} -->\n"
    end = "<!-- end of the table -->\n"
    path = ROOT / page
    text = path.read_text(encoding="utf-8")
    before, rest = text.split(begin)
    wanted = f"{before}{begin}\n{table}\n{end}{rest.split(end, 1)[1]}"
    if text == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{page} is not up to date: run python {script}")
        return 1
    path.write_text(wanted, encoding="utf-8")
    return 0


def rows(head, body):
    """Return a table in Markdown of a head and rows of cells."""
    lines = ([cell.replace("|", "\\|") for cell in line] for line in (head, *body))
    first, *rest = ("|" + "".join(f" {c} |" if c else " |" for c in line) + "\n" for line in lines)
    return first + "|" + "---|" * len(head) + "\n" + "".join(rest)
