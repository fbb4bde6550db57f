# SPDX-License-Identifier: Apache-2.0
"""Fetch the CUDA library headers to build against: `fetch_cuda_headers.py FOLDER`.

The headers come inside the wheels of the libraries (900 MB, of which 1 MB stays).
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEELS = ("nvidia-cublas==13.1.1.3", "nvidia-cudnn-cu13==9.19.0.56")


def main():
    """Download each wheel and unpack its include folder."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in WHEELS:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
            subprocess.run([*fetch, wheel], check=True)
            for path in Path(scratch).glob("*.whl"):
                with zipfile.ZipFile(path) as archive:
                    for name in archive.namelist():
                        if "/include/" in name and not name.endswith("/"):
                            out = folder / name.split("/include/", 1)[1]
                            out.parent.mkdir(parents=True, exist_ok=True)
                            out.write_bytes(archive.read(name))
        print(f"unpacked the headers of {wheel}")


if __name__ == "__main__":
    main()
