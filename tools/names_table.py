# SPDX-License-Identifier: Apache-2.0
"""Write the table of absent names into docs/names.md.

Reads transformer_engine/common/absent_names.py by its path, so that nothing has to be built or
installed. With --check nothing is written, and the exit status says whether the page is up to date.
"""

import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/names.md"
BEGIN, END = "<!-- table: made by tools/names_table.py -->\n", "<!-- end of the table -->\n"


def _names(feature):
    """Return the cell of names: each under its home module."""
    seen, lines = set(), []
    for module, names in feature.names:
        fresh = [name for name in names.split() if name not in seen]
        seen.update(fresh)
        if fresh:
            lines.append(f"`{module}`: " + ", ".join(f"`{name}`" for name in sorted(fresh)))
    for path in feature.partly.split():
        module, _, name = path.rpartition(".")
        lines.append(f"`{module}`: `{name}` (in part)")
    return "<br>".join(lines)


def table():
    """Return the table in Markdown."""
    features = runpy.run_path(str(ROOT / "transformer_engine/common/absent_names.py"))["FEATURES"]
    rows = ["| | what is missing | instead | names |", "|---|---|---|---|"]
    for feature in features:
        cells = (feature.title, feature.reason, feature.instead, _names(feature))
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows) + "\n"


def page(text):
    """Return the text of the page with the table as it must be."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main():
    """Write the page, or say whether it is up to date."""
    text = PAGE.read_text()
    wanted = page(text)
    if text == wanted:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.relative_to(ROOT)} is not up to date: run python tools/names_table.py")
        return 1
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
