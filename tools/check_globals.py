# SPDX-License-Identifier: Apache-2.0
"""Check that the objects of csrc/python hold no writable globals.

State lives in the module, so that an interpreter can hold it twice. Writable data is left to the
tables that the API demands: module definition, methods, slots, members, type specs and the keyword
lists of PyArg_ParseTupleAndKeywords (`names` or `keywords`).
"""

import re
import subprocess

from ctext import ROOT, finish

TABLES = re.compile(
    r"(?:^|_)(?:def|module|methods|slots|specs?|members|getset|names|keywords)(?:\.\d+)?$"
)
WRITABLE = re.compile(r"^(?:\.data(?!\.rel\.ro)|\.bss|\.tbss|\.tdata|\*COM\*)")


def find_writable(path):
    """Yield the names of an object's writable data symbols."""
    listing = subprocess.run(
        ["nm", "-f", "sysv", str(path)], capture_output=True, text=True, check=True
    )
    for line in listing.stdout.splitlines():
        fields = [field.strip() for field in line.split("|")]
        if len(fields) == 7 and WRITABLE.match(fields[6]) and not TABLES.search(fields[0]):
            yield fields[0]


def main():
    """Check the objects of the build folders that exist."""
    objects = sorted(ROOT.glob("build/obj-*/python/*.o"))
    if not objects:
        finish(["build/obj-*/python: no objects, run `make build` first"])
    current = [o for o in objects if (ROOT / "csrc/python" / f"{o.stem}.c").exists()]
    finish(
        [f"{o.relative_to(ROOT)}: writable global {n}" for o in current for n in find_writable(o)]
    )


if __name__ == "__main__":
    main()
