# SPDX-License-Identifier: Apache-2.0
"""Run clang-tidy over the host C files, in parallel, each with the flags of the build.

The wheel of clang-tidy brings none of the compiler's own headers: gcc's serve, but for
<stdatomic.h> and <omp.h> (tools/tidy has them) and those of the intrinsics (a file that includes
them is left to gcc's warnings). csrc/cuda is left to gcc too: it needs the vendors' headers.
The static analyzer makes at most 40,000 states of a function, in a fourth of the time that its own
bound of 225,000 takes; that one holds with `--deep`.
"""

import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor

from ctext import ROOT

GROUPS = ("core", "cpu", "layer", "python")
BOUND = ["-Xclang", "-analyzer-config", "-Xclang", "max-nodes=40000"]


def compiler_headers():
    """Return the folder of the C compiler's own headers (stddef.h and the like)."""
    query = [os.environ.get("CC", "cc"), "-print-file-name=include"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()


def main():
    """Check the files named, or all of them; exit with 1 where one has an error."""
    flags = ["-std=c11", "-fopenmp", "-Icsrc/include", "-Icsrc", "-DPy_LIMITED_API=0x030b0000"]
    for folder in (str(ROOT / "tools/tidy"), compiler_headers(), sysconfig.get_path("include")):
        flags += ["-isystem", folder]
    named = [word for word in sys.argv[1:] if word != "--deep"]
    if len(named) == len(sys.argv[1:]):
        flags += BOUND
    paths = named or [
        str(p.relative_to(ROOT)) for g in GROUPS for p in sorted((ROOT / "csrc" / g).glob("*.c"))
    ]
    paths = [p for p in paths if "mmintrin.h>" not in (ROOT / p).read_text()]

    def check(path):
        command = ["clang-tidy", "--quiet", path, "--", *flags]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(check, paths))
    for result in results:
        if result.stdout:
            print(result.stdout.strip())
    failed = [p for p, r in zip(paths, results, strict=True) if r.returncode != 0]
    print(f"clang-tidy: {len(paths)} files, {len(failed)} with errors {' '.join(failed)}".strip())
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
