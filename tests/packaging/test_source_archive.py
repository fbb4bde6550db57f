# SPDX-License-Identifier: Apache-2.0
"""The source archive: what is in it, what it says of itself, and that it builds and installs.

The objects of this folder go along, so that building it compiles what changed and no more; they
count as current only if every file that they were made of is in the archive.
"""

import email
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from markdown_pages import ROOT, links

import transformer_engine

OUTER = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "V")  # of the make that runs these tests
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in OUTER}
ENVIRONMENT |= {"TE_CUDA": "0", "TE_SANITIZE": ""}
NOT_SHIPPED = {".gitignore"}

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or shutil.which(os.environ.get("CC", "cc")) is None,
    reason="needs the source tree and a C compiler",
)


def run(*command, cwd, **variables):
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={**ENVIRONMENT, **variables},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Make the archive."""
    scratch = tmp_path_factory.mktemp("archive")
    (scratch / "info").mkdir()
    info = ["egg_info", "-e", scratch / "info"]
    (ROOT / "build").mkdir(exist_ok=True)
    with open(ROOT / "build/sdist.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # it lays the files out in this folder: one at a time
        run(sys.executable, "setup.py", "-q", *info, "sdist", "-d", scratch, cwd=ROOT)
    return next(scratch.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def source(archive):
    """Unpack it beside itself, with the objects of this folder."""
    safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # CPython 3.11.4
    with tarfile.open(archive) as packed:
        packed.extractall(archive.parent, **safely)
    folder = archive.parent / archive.name.removesuffix(".tar.gz")
    if (ROOT / "build/obj-cpu").exists():
        shutil.copytree(ROOT / "build/obj-cpu", folder / "build/obj-cpu")
    return folder


def test_it_holds_what_git_holds(source):
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("this folder is no clone")
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    tracked = {name for name in tracked if (ROOT / name).exists()} - NOT_SHIPPED
    assert {name for name in tracked if not (source / name).exists()} == set()


def test_it_holds_what_its_pages_name(source):
    for page in [source / "README.md", source / "CONTRIBUTING.md", *source.glob("docs/*.md")]:
        text = page.read_text(encoding="utf-8")
        local = [link for link in links(text) if not re.match(r"[a-z]+:|#", link)]
        named = re.findall(r"(?:examples|tests|docs|benchmarks|tools|csrc)/[\w./-]*\w", text)
        for name in local:
            assert (page.parent / name.partition("#")[0]).exists(), f"{page.name} links to {name}"
        assert [name for name in named if not (source / name).exists()] == [], page.name


def test_nothing_that_was_built_is_in_it(archive):
    with tarfile.open(archive) as packed:
        names = packed.getnames()
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc"))]
    assert not [name for name in names if "/build/" in name]


def test_it_builds_by_make(source):
    said = run("make", "build", f"PYTHON={sys.executable}", cwd=source)
    assert (source / "transformer_engine/_core.abi3.so").exists()
    assert len([line for line in said.splitlines() if line.startswith("native code")]) == 1
    again = run("make", "build", f"PYTHON={sys.executable}", cwd=source)
    assert again.splitlines()[-1] == "native code, no CUDA (TE_CUDA=0): up to date"


def test_the_build_shows_its_commands_when_asked(source):
    build = sys.executable, "setup.py", "-q", "build_ext", "--inplace"
    run(*build, cwd=source)
    (source / "csrc/core/status.c").touch()
    said = run(*build, cwd=source, V="1")
    commands = [line for line in said.splitlines() if "-o" in line or " -c " in line]
    assert len(commands) == 1 and "csrc/core/status.c" in commands[0]
    assert said.splitlines()[-1].startswith("1 files compiled in ")


def test_it_installs_without_a_network_and_says_what_it_is(source, tmp_path):
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-build-isolation"]
    run(sys.executable, *install, "--target", tmp_path, ".", cwd=source)
    assert (tmp_path / "transformer_engine/_core.abi3.so").exists()
    headers = {path.name for path in (source / "csrc/include").iterdir()}
    assert {path.name for path in (tmp_path / "transformer_engine/include").iterdir()} == headers
    ask = "from transformer_engine.plugin import get_include; print(get_include())"
    said = run(sys.executable, "-c", ask, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert said.strip() == str(tmp_path / "transformer_engine/include")
    metadata = email.message_from_string(
        next(tmp_path.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    )
    assert metadata["Name"] == "transformer_engine"
    assert metadata["Version"] == transformer_engine.__version__
    assert metadata["License"] == "Apache-2.0"
    assert metadata["Author"] == "The transformer_engine authors"
    packed = email.message_from_string((source / "PKG-INFO").read_text(encoding="utf-8"))
    assert metadata["Home-page"] == packed["Home-page"] != ""
    assert any(path.name == "LICENSE" for path in tmp_path.glob("*.dist-info/**/*"))


@pytest.mark.parametrize("origin, address", [
    ("https://git.example.org/group/engine.git", "https://git.example.org/group/engine"),
    ("https://user:key@git.example.org:8443/engine/", "https://git.example.org:8443/engine"),
    ("http://git.example.org/engine", "http://git.example.org/engine"),
    ("git@git.example.org:group/engine.git", "https://git.example.org/group/engine"),
    ("ssh://git@git.example.org/group/engine", "https://git.example.org/group/engine"),
    ("../engine", None),
    ("", None),
])  # fmt: skip
def test_home_page_is_where_the_clone_came_from(tmp_path, origin, address):
    if shutil.which("git") is None:
        pytest.skip("there is no git")
    clone = tmp_path / "clone"
    (clone / "transformer_engine").mkdir(parents=True)
    for name in ("setup.py", "pyproject.toml", "README.md", "transformer_engine/__init__.py"):
        shutil.copy(ROOT / name, clone / name)
    run("git", "init", "-q", cwd=clone)
    if origin:
        run("git", "remote", "add", "origin", origin, cwd=clone)
    run(sys.executable, "setup.py", "-q", "dist_info", "-o", tmp_path, cwd=clone)
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text(encoding="utf-8")
    found = email.message_from_string(metadata)["Home-page"]
    assert found == (address or Path(clone).as_uri())
