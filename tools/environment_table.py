# SPDX-License-Identifier: Apache-2.0
"""Write the tables of environment variables into docs/environment.md.

Reads files of transformer_engine/common by their paths, so that nothing has to be built or
installed. With --check nothing is written, and the exit status says whether the page is up to date.
"""

import runpy
import sys

from page_tables import ROOT, keep, rows


def _variable(variable):
    """Return the cells of a variable."""
    names = "<br>".join(f"`{name}`" for name in (variable.name, *variable.aliases))
    default = variable.default
    if isinstance(default, bool):  # 1 is no True
        shown = "on" if default else "off"
    else:
        shown = "-" if default in (None, "", ()) else f"`{default}`"
    return names, variable.accepted, shown, variable.doc


def _read(name):
    """Return what a file of transformer_engine/common defines."""
    return runpy.run_path(str(ROOT / f"transformer_engine/common/{name}.py"), run_name=name)


def table():
    """Return the table of variables that are read, in Markdown."""
    return rows(
        ("variable", "accepts", "default", "what it does"), map(_variable, _read("config")["TABLE"])
    )


def table_of_unread(entries):
    """Return a table of variables that are not read, in Markdown."""
    return rows(
        ("variable", "what it is for there", "here", "nothing is said of"),
        (
            (
                "<br>".join(f"`{name}`" for name in entry.names.split()),
                entry.what,
                entry.instead,
                ", ".join(f"`{value}`" for value in entry.same.split()),
            )
            for entry in entries
        ),
    )


def main():
    """Write or check the tables; return an exit status."""
    page, script, unread = "docs/environment.md", "tools/environment_table.py", "unread_variables"
    done = [keep(page, script, table())]
    for part in ("RUN", "BUILD", "ELSEWHERE"):
        done.append(keep(page, script, table_of_unread(_read(unread)[part]), part))
    return max(done)


if __name__ == "__main__":
    sys.exit(main())
