# SPDX-License-Identifier: Apache-2.0
"""Write the tables of what is absent into docs/names.md (names) and docs/not_there.md (features).

Reads transformer_engine/common/absent_names.py by its path, so that nothing has to be built or
installed. With --check nothing is written, and the exit status says whether the pages are up to
date.
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


def tables():
    """Return the tables in Markdown: that of features with their names, and that without."""
    features = runpy.run_path(str(ROOT / "transformer_engine/common/absent_names.py"))["FEATURES"]
    head = ("", "what is missing", "instead")
    lines = [(f.title, f.reason, f.instead) for f in features]
    named = [(*line, _names(f)) for line, f in zip(lines, features, strict=True)]
    return rows((*head, "names"), named), rows(head, lines)


def main():
    """Write or check the tables; return an exit status."""
    script = "tools/names_table.py"
    names, features = tables()
    return max(keep("docs/names.md", script, names), keep("docs/not_there.md", script, features))


if __name__ == "__main__":
    sys.exit(main())
