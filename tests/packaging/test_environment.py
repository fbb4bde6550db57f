# SPDX-License-Identifier: Apache-2.0
"""The environments of make: what they say before a download, and where the package is installed."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_pages import ROOT

pytestmark = pytest.mark.skipif(
    not (ROOT / "setup.py").exists() or importlib.util.find_spec("ensurepip") is None,
    reason="needs the source tree, and a Python that makes virtual environments",
)


@pytest.fixture(scope="module")
def environment():
    """Import tools/environment.py."""
    spec = importlib.util.spec_from_file_location("environment", ROOT / "tools/environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_size_of_a_download_is_said(environment, monkeypatch, capsys):
    pins = list(environment.read_group("demo").values())
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", pin) for pin in pins)
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    rest = environment.count_megabytes([pin for pin in pins if pin != torch])
    assert environment.count_megabytes([torch]) == 3000
    assert environment.count_megabytes([torch], cpu=True) == 200
    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(environment, "has_gpu", lambda: False)
    environment.announce(pins, ".venv", environment.torch_index())
    said = capsys.readouterr().out
    assert f"about {200 + rest:,} MB" in said and f"{3000 + rest:,} MB in all" in said
    assert environment.CPU_INDEX in said and "make TORCH_INDEX= takes" in said
    monkeypatch.setenv("TORCH_INDEX", "")
    assert environment.torch_index() == ""
    monkeypatch.delenv("TORCH_INDEX")
    monkeypatch.setattr(environment, "has_gpu", lambda: True)
    environment.announce(pins, ".venv", environment.torch_index())
    said = capsys.readouterr().out
    assert environment.CPU_INDEX not in said and f"about {3000 + rest:,} MB" in said
    without = [pin for pin in pins if pin != torch]
    environment.announce(without, ".venv", environment.CPU_INDEX)
    said = capsys.readouterr().out
    assert environment.CPU_INDEX not in said and f"about {rest:,} MB" in said


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("gpu", [True, False])
def test_where_torch_comes_from(environment, gpu, answers, tmp_path, monkeypatch, capsys):
    """Without a GPU its CPU index, and pip's own where that one does not answer."""
    ran = []

    def run_pip(python, *words):
        ran.append(list(words))
        return 0 if answers or "--index-url" not in words else 1

    monkeypatch.delenv("TORCH_INDEX", raising=False)
    monkeypatch.setattr(environment, "has_gpu", lambda: gpu)
    monkeypatch.setattr(environment, "run_pip", run_pip)
    environment.install("python3", ["torch==1", "numpy==2"], tmp_path)
    if gpu:
        assert ran == [["torch==1", "numpy==2"]]
        return
    assert ran[0][:3] == ["torch==1", "--index-url", environment.CPU_INDEX]
    assert ran[1:] == [["numpy==2"] if answers else ["torch==1", "numpy==2"]]
    assert ("has not answered" in capsys.readouterr().out) is not answers


def test_failing_pip_is_reported(environment, tmp_path, capsys):
    failing = tmp_path / "python3"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(SystemExit, match="lacks packages"):
        environment.install(str(failing), ["tqdm==4.70.1"], tmp_path)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Copy what an editable install needs, and have a build that compiles one empty module."""
    folder = tmp_path_factory.mktemp("clone")
    package = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("transformer_engine", "tools", "examples"):
        shutil.copytree(ROOT / name, folder / name, ignore=package)
    for name in ("pyproject.toml", "README.md", "tests/constraints.txt"):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    return folder


@pytest.fixture(scope="module")
def ours(clone, environment, tmp_path_factory):
    """Make an environment on top of this one, below which lies another package of our name."""
    below = tmp_path_factory.mktemp("below") / "other-packages"
    (below / "transformer_engine").mkdir(parents=True)
    (below / "transformer_engine/__init__.py").write_text("__version__ = 'another'\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(below))
        environment.make_environment(sys.executable, clone / ".venv")
        environment.add_packages_of(sys.executable, clone / ".venv")
    return clone / ".venv/bin/python3"


def run(*command, cwd):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=clean, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(said):
    """Return the indented lines: commands, without their comments."""
    lines = [line for line in said.splitlines() if line.startswith("    ")]
    return [shlex.split(line, comments=True) for line in lines]


def test_ours_gets_the_package(clone, ours, tmp_path):
    where = "import transformer_engine as t; print(t.__file__, t.__version__)"
    assert run(ours, "-c", where, cwd=tmp_path).split()[-1] == "another"
    said = run(ours, "tools/editable_install.py", cwd=clone)
    assert "installed transformer_engine, editable, into .venv" in said
    assert Path(run(ours, "-c", where, cwd=tmp_path).split()[0]).is_relative_to(clone)
    assert run(ours, "tools/editable_install.py", cwd=clone) == ""  # once
    told = commands(run(ours, "tools/editable_install.py", "--say", cwd=clone))
    assert told and all(program == ".venv/bin/python3" for program, *_ in told)
    assert all((clone / file).is_file() for _, file, *_ in told)


def test_that_of_another_folder_is_left_as_it_is(clone, ours, tmp_path):
    before = sorted((clone / ".venv").rglob("*.pth"))
    for name in ("tools", "transformer_engine"):
        shutil.copytree(clone / name, tmp_path / name)
    assert run(ours, "tools/editable_install.py", cwd=tmp_path) == ""
    assert sorted((clone / ".venv").rglob("*.pth")) == before
    assert "was left as it is" in run(ours, "tools/editable_install.py", "--say", cwd=tmp_path)


def test_another_one_is_left_as_it_is(clone, tmp_path):
    theirs = tmp_path / "theirs"
    run(sys.executable, "-m", "venv", "--without-pip", theirs, cwd=tmp_path)
    before = sorted(theirs.rglob("*"))
    python = theirs / "bin/python3"
    assert run(python, "tools/editable_install.py", cwd=clone) == ""
    said = run(python, "tools/editable_install.py", "--say", cwd=clone)
    assert sorted(theirs.rglob("*")) == before
    *examples, install = commands(said)
    assert examples and all(words[0] == "PYTHONPATH=." for words in examples)
    assert Path(examples[0][1]).parent == python.parent
    assert install[1:4] == ["-m", "pip", "install"] and install[-2:] == ["-e", "."]
