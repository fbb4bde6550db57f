# SPDX-License-Identifier: Apache-2.0
"""How the libraries of the test device are built: once, by one process, or not at all."""

import threading

import pytest
from devices import build, process


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CACHE", tmp_path)
    return tmp_path


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")


@pytest.mark.usefixtures("cache", "no_compiler")
def test_without_a_compiler(monkeypatch):
    """Tests are left out, but where CI has to run them; then they fail."""
    monkeypatch.delenv("CI", raising=False)
    assert process.missing() == "the test device needs a C++ compiler"
    monkeypatch.setenv("CI", "true")
    assert process.missing() is None
    with pytest.raises(build.NoCompilerError, match="needs a C\\+\\+ compiler"):
        build.load("npu_device")


def test_several_at_once(cache, monkeypatch):
    """One builds, while the others wait for it."""
    built, waiting = [], threading.Barrier(4)

    def made(name, folder):
        built.append(name)
        (folder / f"{name}.so").touch()

    def ask():
        waiting.wait()
        found.append(build.build("npu_device"))

    monkeypatch.setattr(build, "_run", made)
    found = []
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert built == ["npu_device"] and len(set(found)) == 1 and found[0].parent.parent == cache


def test_other_sources_are_built_anew(cache, monkeypatch, tmp_path):
    first = build.folder()
    monkeypatch.setattr(build, "FLAGS", [*build.FLAGS, "-DOTHER"])
    assert build.folder() != first and build.folder().parent == cache


def test_what_does_not_compile(cache, tmp_path, monkeypatch):
    (tmp_path / "wrong.cpp").write_text("int main( {}\n")
    monkeypatch.setitem(build.SOURCES, "wrong", [str(tmp_path / "wrong.cpp")])
    with pytest.raises(RuntimeError, match="(?s)wrong was not built:.*error"):
        build.build("wrong")
