# SPDX-License-Identifier: Apache-2.0
"""Write the table of absent names into docs/names.md.

Reads transformer_engine/common/absent_names.py by its path, so that nothing has to be built or
installed. With --check nothing is written, and the exit status says whether the page is up to date.
"""

import runpy
import sys

from page_tables import ROOT, keep, rows


def _names(feature):
    """Return the cell of names: each under its home module."""
    homes, seen = {}, set()
    for module, name in feature.listed():
        if name not in seen:
            homes.setdefault(module, []).append(name)
        seen.add(name)
    lines = [f"`{m}`: " + ", ".join(f"`{n}`" for n in sorted(homes[m])) for m in homes]
    for path in feature.partly.split():
        module, _, name = path.rpartition(".")
        lines.append(f"`{module}`: `{name}` (in part)")
    return "<br>".join(lines)


def table():
    """Return the table in Markdown."""
    features = runpy.run_path(str(ROOT / "transformer_engine/common/absent_names.py"))["FEATURES"]
    return rows(
        ("", "what is missing", "instead", "names"),
        ((f.title, f.reason, f.instead, _names(f)) for f in features),
    )


if __name__ == "__main__":
    sys.exit(keep("docs/names.md", "tools/names_table.py", table()))
