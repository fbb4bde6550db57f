# SPDX-License-Identifier: Apache-2.0
"""Install the package, editable, into the environment that make made; say how to run the examples.

`python tools/editable_install.py [--say]`, with the interpreter of the environment, after a build.
An environment that make did not make belongs to its user: it is left as it is. With `--say` nothing
is installed: it prints the commands that run the examples.
"""

import json
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from environment import MARK, ROOT

INSTALL = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-build-isolation"]
# A path, not a finder: finders come after the packages of the interpreter underneath, and one of
# these may have our name.
INSTALL += ["--config-settings", "editable_mode=compat", "-e"]
EXAMPLES = {
    "examples/readme_linear.py": "one layer, one step in FP8",
    "examples/quickstart.py": "one Transformer layer, built five ways",
    "examples/train_gpt.py --help": "the demo on other texts and sizes",
}


def is_ours():
    """Tell whether make made this environment, and for this very folder."""
    config = Path(sys.prefix, "pyvenv.cfg")
    here = config.exists() and config.resolve().is_relative_to(ROOT)
    return here and MARK in config.read_text(encoding="utf-8")


def is_installed():
    """Tell whether the package is installed here, editable, from this very folder."""
    try:
        said = metadata.distribution("transformer_engine").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return False
    origin = json.loads(said or "{}")
    editable = origin.get("dir_info", {}).get("editable", False)
    return editable and origin["url"] == ROOT.as_uri()


def say():
    """Print the commands that run the examples with this interpreter."""
    python = Path(sys.executable)
    python = python.relative_to(ROOT) if python.is_relative_to(ROOT) else python
    prefix = shlex.quote(str(python))
    print()
    if is_installed():
        print(f"transformer_engine is installed in {Path(sys.prefix).name}. Run the examples with")
    else:
        print(f"{sys.prefix} was left as it is. Run the examples with")
        prefix = f"PYTHONPATH=. {prefix}"
    for command, purpose in EXAMPLES.items():
        print(f"    {prefix} {command}  # {purpose}")
    if not is_installed():
        command = shlex.join([str(python), *INSTALL[:3], "--no-build-isolation", "-e", "."])
        print(f"or, to do without PYTHONPATH, install the package first:\n    {command}")
    elif is_ours():
        print(f"or, after `. {Path(sys.prefix).name}/bin/activate`, with `python` alone")


def main():
    """Install once, or say."""
    if "--say" in sys.argv[1:]:
        say()
    elif is_ours() and not is_installed():
        subprocess.run([sys.executable, *INSTALL[:3], "-q", *INSTALL[3:], str(ROOT)], check=True)
        print(f"installed transformer_engine, editable, into {Path(sys.prefix).name}", flush=True)


if __name__ == "__main__":
    main()
