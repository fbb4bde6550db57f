# SPDX-License-Identifier: Apache-2.0
"""The C API from C: each program of this folder is compiled against the library and run.

A program includes only the public headers and passes by exiting with 0; 77 means that it can not
run here. Programs named `*_gpu.c` carry the mark `gpu`. With TE_SANITIZE set, library and programs
are instrumented.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZE = os.environ.get("TE_SANITIZE", "")
BUILD = ROOT / ("build/sanitize" if SANITIZE else "build")
CC = os.environ.get("CC", "cc")
SKIPPED = 77
STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{ROOT / 'csrc/include'}"]
STRICT += ["-Wno-format-truncation"]  # gcc guesses lengths, as its options are

pytestmark = pytest.mark.skipif(
    shutil.which(CC) is None or not (ROOT / "setup.py").exists(),
    reason="needs the source tree and a C compiler",
)


def run(*command, **options):
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, **options
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def library():
    status, said = run(sys.executable, "setup.py", "-q", "library")
    assert status == 0, said
    return BUILD / "libtransformer_engine.a"


def programs():
    for path in sorted(Path(__file__).parent.glob("*.c")):
        marks = [pytest.mark.gpu] if path.stem.endswith("_gpu") else []
        yield pytest.param(path, id=path.stem, marks=marks)


def run_program(library, program, *sources):
    """Compile and run; exit status and what it said."""
    _, undefined = run("nm", "-u", str(library))
    flags = ["-fopenmp"] if "GOMP_" in undefined else []
    flags += [f"-fsanitize={SANITIZE}", "-g"] if SANITIZE else []
    link = [*flags, str(library), "-ldl", "-lm", "-lpthread", "-o", str(program)]
    status, said = run(CC, "-std=c11", "-O1", *STRICT, *map(str, sources), *link)
    assert status == 0, said
    return run(str(program))


@pytest.mark.parametrize("source", list(programs()))
def test_program(source, library, tmp_path):
    status, said = run_program(library, tmp_path / source.stem, source)
    if status == SKIPPED:
        pytest.skip(said.strip())
    assert status == 0, said


@pytest.mark.skipif(shutil.which("localedef") is None, reason="makes a locale by localedef")
def test_texts_of_graphs_do_not_go_by_the_locale(library, tmp_path, monkeypatch):
    made = run("localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8"))
    if not (tmp_path / "de_DE.UTF-8").exists():
        pytest.skip(f"no sources of locales: {made}")
    monkeypatch.setenv("LOCPATH", str(tmp_path))
    source = Path(__file__).with_name("test_graph_text.c")
    status, said = run_program(library, tmp_path / "text", source)
    assert status == 0 and "texts in de_DE" in said, said


NO_MEMBARRIER = """
long syscall(long number, ...);
long syscall(long number, ...) { (void)number; return -1; }
"""


@pytest.mark.skipif(bool(SANITIZE), reason="the runtime of the sanitizers has a syscall of its own")
def test_backends_where_the_kernel_orders_no_stores(library, tmp_path):
    (tmp_path / "syscall.c").write_text(NO_MEMBARRIER)
    source = Path(__file__).with_name("test_backends.c")
    status, said = run_program(library, tmp_path / "fenced", source, tmp_path / "syscall.c")
    assert status == 0, said


def test_shared_library_exports_te_names_only(library):
    status, said = run("nm", "-D", "--defined-only", str(library.with_suffix(".so")))
    assert status == 0, said
    names = [line.split()[-1] for line in said.splitlines()]
    assert names and [n for n in names if not n.startswith("te_")] == []


@pytest.mark.skipif(bool(SANITIZE), reason="needs the sanitizer's runtime in the process")
def test_shared_library_loads(library):
    shared = ctypes.CDLL(str(library.with_suffix(".so")))
    shared.te_last_error.restype = ctypes.c_char_p
    assert isinstance(shared.te_last_error(), bytes)


PLUGIN = """#include <transformer_engine_plugin.h>
static const te_host_api *host;
static te_status run(void *self, te_context *context, const void *args, void *stream)
{
    (void)self, (void)context, (void)args, (void)stream;
    return TE_HOST_HAS(host, counters_read) ? TE_HOST_FAIL(host, TE_ERROR_DEVICE, "none") : TE_OK;
}
te_status te_plugin_init(const te_host_api *api, uint32_t abi)
{
    static const te_plugin_operator operators[] = {TE_PLUGIN_OPERATOR(fill, run, NULL, NULL, NULL)};
    const te_plugin_backend backend = {
        sizeof backend, TE_PLUGIN_ABI, TE_PLUGIN_VENDOR, "mine", "acme",
        TE_DEVICE_CPU, 0, operators, 1, NULL, NULL};
    TE_PLUGIN_REQUIRE(api, abi);
    host = api;
    return api->register_backend(&backend);
}
"""


@pytest.mark.parametrize("language", ["c", "c++"])
def test_plugins_in_both_languages(language, tmp_path):
    """The macros of the header, too, and of the library nothing but types."""
    source, plugin = tmp_path / "plugin.txt", tmp_path / "plugin.so"
    source.write_text(PLUGIN)
    standard = "-std=c11" if language == "c" else "-std=c++17"
    link = "-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-z,defs"
    status, said = run(CC, "-x", language, standard, *STRICT, *link, "-o", str(plugin), str(source))
    if language == "c++" and "cc1plus" in said:
        pytest.skip("no C++ compiler")
    assert status == 0, said
    status, said = run("nm", "-D", "--defined-only", str(plugin))
    assert status == 0 and [line.split()[-1] for line in said.splitlines()] == ["te_plugin_init"]


@pytest.mark.parametrize("header", ["transformer_engine.h", "transformer_engine_plugin.h"])
@pytest.mark.parametrize("language", ["c", "c++"])
def test_header_stands_alone(header, language, tmp_path):
    source = tmp_path / "header.txt"
    source.write_text(f"#include <{header}>\n")
    standard = "-std=c11" if language == "c" else "-std=c++17"
    status, said = run(CC, "-x", language, standard, *STRICT, "-fsyntax-only", str(source))
    if language == "c++" and "cc1plus" in said:
        pytest.skip("no C++ compiler")
    assert status == 0, said
