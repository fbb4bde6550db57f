# SPDX-License-Identifier: Apache-2.0
"""Write the table of environment variables into docs/environment.md.

Reads transformer_engine/common/config.py by its path, so that nothing has to be built or installed.
With --check nothing is written, and the exit status says whether the page is up to date.
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


def table():
    """Return the table in Markdown."""
    path = ROOT / "transformer_engine/common/config.py"
    variables = runpy.run_path(str(path), run_name="config")["TABLE"]
    return rows(("variable", "accepts", "default", "what it does"), map(_variable, variables))


if __name__ == "__main__":
    sys.exit(keep("docs/environment.md", "tools/environment_table.py", table()))
