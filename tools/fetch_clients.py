# SPDX-License-Identifier: Apache-2.0
"""Fill build/clients with what no environment can hold, a folder `NAME-VERSION` for each.

`python tools/fetch_clients.py TEST...`, with the interpreter of the environment `clients`, and the
tests that are going to run: a package that tests/constraints.txt says to be for other test files
is not fetched. Of one under [apart] the wheel is unpacked, for processes that have the folder in
PYTHONPATH: there are several versions of it, or it must not be there for the others. Of one under
[sources] it is the source archive, which has the package's own tests.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from environment import ROOT, count_megabytes, find_missing, read_notes, read_pins

HEADINGS = ("apart", "sources")


def folder_of(pin):
    """Return where a package lies."""
    return ROOT / "build/clients" / pin.replace("==", "-")


def is_for(pin, tests):
    """Tell whether one of these tests (paths of files, folders, or tests in files) needs it."""
    paths = [ROOT / test.partition("::")[0] for test in tests]
    names = re.findall(r"test_\w+\.py", read_notes()[pin])
    return any(p.name == name or any(p.rglob(name)) for p in paths for name in names)


def find_wanted(python, tests):
    """Return (heading, pin) of what these tests need and is not there."""
    return [
        (heading, pin)
        for heading in HEADINGS
        for pin in read_pins(heading)
        if is_for(pin, tests) and not folder_of(pin).exists()
        if heading == "sources" or find_missing(python, [pin.split("==")[0]])
    ]


def download(python, heading, pin, scratch):
    """Download a package; return the folder that it is unpacked in."""
    fetch = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", str(scratch), pin]
    if heading == "apart":
        of_python = re.search(r"wheel of Python ([\d.]+)", read_notes()[pin])
        other = ["--python-version", of_python[1]] if of_python else []
        subprocess.run([*fetch, "--only-binary", ":all:", *other], check=True)
        shutil.unpack_archive(next(scratch.glob("*.whl")), scratch / "all", "zip")
        return scratch / "all"
    plain = ["--no-build-isolation", "--no-binary", pin.split("==")[0]]
    subprocess.run([*fetch, *plain], check=True)
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # CPython 3.11.4
    shutil.unpack_archive(next(scratch.glob("*.tar.gz")), scratch / "all", **safely)
    return next((scratch / "all").iterdir())


def main():
    """Say what comes, and fetch it."""
    wanted = find_wanted(sys.executable, sys.argv[1:])
    if wanted:
        pins = [pin for _, pin in wanted]
        size = count_megabytes(pins)
        print(f"build/clients gets {' '.join(pins)}: about {size:,} MB", flush=True)
    for heading, pin in wanted:
        folder = folder_of(pin)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = download(sys.executable, heading, pin, Path(scratch))
            made.rename(folder)  # whole at once: tests may look for it meanwhile


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError:
        sys.exit("a client package is not there: see what pip said above, and make again")
    except KeyboardInterrupt:
        sys.exit(130)
