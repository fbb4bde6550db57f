# SPDX-License-Identifier: Apache-2.0
"""Build of the one native extension, of the C library and of the device images.

setuptools packages the result but does not drive the compiler: here every source file is a `Job`
(a command with inputs and one output) and jobs run in parallel and only when an input changed. The
same objects make `transformer_engine/_core.abi3.so` (`build_ext`) and the C library in both forms
(`library`). Environment: `TE_CUDA`, `TE_CUDA_ARCHS`, `TE_WERROR`, `TE_SANITIZE`, `TE_LINEINFO`,
`TE_FL_SKIP_CUDA`, `CC`, `CFLAGS`, `LDFLAGS`, `V`; CONTRIBUTING.md explains them.
"""

import fcntl
import functools
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import setuptools
from setuptools import Command, Distribution as _Distribution, Extension, setup
from setuptools.command.build_ext import build_ext as _build_ext
from setuptools.command.build_py import build_py as _build_py

os.chdir(Path(__file__).resolve().parent)  # relative paths keep the objects free of machine paths
CC = shlex.split(os.environ.get("CC") or "cc")
WERROR = os.environ.get("TE_WERROR", "0") == "1"
SANITIZE = os.environ.get("TE_SANITIZE", "")
LINEINFO = os.environ.get("TE_LINEINFO", "0") == "1"
VERBOSE = os.environ.get("V", "0") == "1"
BUILD = Path("build/sanitize" if SANITIZE else "build")
GROUPS = ("core", "cpu", "layer", "xla", "python")  # always; csrc/cuda where its headers are
KERNEL_DIRS = ("csrc/cuda/kernels", "csrc/cuda/device", "csrc/include", "csrc")
# Machine code for the GPUs known today, PTX (compute_) of a portable level for later ones.
ARCHS = os.environ.get("TE_CUDA_ARCHS") or "sm_80;sm_89;sm_90a;compute_90"
SYSTEM_LIBS = ["-ldl", "-lm", "-lpthread"]


@dataclass
class Job:
    """One command: makes `out` from the files of its depfile (written by the compiler)."""

    out: Path
    command: list

    def __post_init__(self):
        self.depfile, self.stamp = self.out.with_suffix(".d"), self.out.with_suffix(".cmd")

    def is_current(self):
        """Tell whether `out` was made by this very command from these very inputs."""
        try:
            if self.stamp.read_text() != shlex.join(self.command):
                return False
            made = self.out.stat().st_mtime_ns
            inputs = re.sub(r"\\\n", " ", self.depfile.read_text()).split(":", 1)[1].split()
            return all(os.stat(name).st_mtime_ns < made for name in inputs)
        except (OSError, IndexError):
            return False

    def run(self):
        """Run the command; return its report, or raise with what the compiler said."""
        started, scratch = time.time_ns(), self.out.with_suffix(".tmp" + self.out.suffix)
        command = [*self.command, "-MD", "-MF", str(self.depfile), "-o", str(scratch)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = (done.stdout + done.stderr).strip()
        if done.returncode != 0:
            raise SystemExit(f"{shlex.join(command)}\n{report}")
        os.utime(scratch, ns=(started, started))  # an input edited meanwhile is newer
        scratch.replace(self.out)
        self.stamp.write_text(shlex.join(self.command))
        return report


def run_jobs(jobs):
    """Bring the outputs of `jobs` up to date, in parallel, in the order given; count the stale."""
    stale = [job for job in jobs if not job.is_current()]
    for job in stale:
        job.out.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(job.run) for job in stale]
        try:
            for job, future in zip(stale, futures, strict=True):
                report = future.result()
                if VERBOSE:
                    print(shlex.join(job.command), flush=True)
                if report:  # a warning of the compiler is never kept back
                    print(f"\n{report}", flush=True)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return len(stale)


def write_if_changed(path, text):
    """Write a generated file, leaving its time alone where the text is the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def openmp_flags(notes):
    """Return the OpenMP flags where the compiler can link with them, or add a note."""
    probe = [*CC, "-fopenmp", "-shared", "-fPIC", "-x", "c", "-", "-o", os.devnull]
    if not shutil.which(CC[0]):
        raise SystemExit(f"no C compiler: there is no program {CC[0]!r}; install one, or set CC")
    if subprocess.run(probe, input="", text=True, capture_output=True, check=False).returncode == 0:
        return ["-fopenmp"]
    notes.append("one thread alone (OpenMP not found)")
    return ["-Wno-unknown-pragmas"]


def find_nvcc():
    """Return the path of nvcc and of its toolkit, each None where there is none that serves."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = shutil.which("nvcc", path=f"{home}/bin") if home else None
    nvcc = nvcc or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if nvcc and not home:  # a wrapper script may stand for nvcc: ask it where it lives
        dry = [nvcc, "--dryrun", "-x", "cu", "-E", os.devnull]
        said = subprocess.run(dry, capture_output=True, text=True, check=False).stderr
        top = re.search(r"^#\$ TOP=(.*)$", said, re.MULTILINE)
        home = os.path.realpath(top[1].strip()) if top else None
    return nvcc if shutil.which("g++") else None, home  # its host compiler


def why_no_cuda():
    """Return the variable that leaves the CUDA backend out, or ""."""
    skip = os.environ.get("TE_FL_SKIP_CUDA", "").strip() or "0"
    if skip not in ("0", "1"):
        raise SystemExit(f"TE_FL_SKIP_CUDA={skip}: expected 0 or 1")
    if os.environ.get("TE_CUDA", "") == "1" and skip == "1":
        raise SystemExit("TE_CUDA=1 and TE_FL_SKIP_CUDA=1: one of them has to go")
    if os.environ.get("TE_CUDA") == "0":
        return "TE_CUDA=0"
    return "TE_FL_SKIP_CUDA=1" if skip == "1" else ""


def find_cuda_headers(home):
    """Return the include folders that hold the CUDA headers, None where one is missing."""
    sites = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *sys.path]
    wheels = [d for s in dict.fromkeys(sites) for d in sorted(Path(s).glob("nvidia/*/include"))]
    toolkit = [Path(home, "include"), *Path(home).glob("targets/*/include")] if home else []
    folders, missing = [], []
    for header in ("cuda.h", "cublasLt.h", "cudnn.h"):
        candidates = [*toolkit, *wheels, Path("build/cuda-headers")]
        found = next((d for d in candidates if (d / header).exists()), None)
        folders.append(str(found)) if found else missing.append(header)
    if missing and os.environ.get("TE_CUDA") == "1":
        raise SystemExit(f"TE_CUDA=1 but {', '.join(missing)} not found; try `make cuda-headers`")
    return None if missing else list(dict.fromkeys(folders))


def flatten(path, seen):
    """Return the text of a device source with its own includes pasted in, once each."""
    text = [f'#line 1 "{path.name}"']
    for number, line in enumerate(path.read_text().splitlines(), 2):
        include = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
        if not include:
            text.append("" if re.match(r"\s*#\s*pragma\s+once", line) else line)
            continue
        folders = [path.parent, *map(Path, KERNEL_DIRS)]
        local = next((d / include[1] for d in folders if (d / include[1]).exists()), None)
        if local is None:
            raise SystemExit(f"{path}: cannot find its include {include[1]}")
        if local.resolve() not in seen:
            seen.add(local.resolve())
            text.append(flatten(local, seen))
        text.append(f'#line {number} "{path.name}"')
    return "\n".join(text)


@functools.cache
def compression(nvcc):
    """Return the flags that make nvcc compress device code well: a third of the bytes."""
    shown = subprocess.run([nvcc, "--version"], check=True, capture_output=True, text=True).stdout
    release = re.search(r"release (\d+)", shown)
    # Drivers that are too old to unpack it refuse images of this nvcc anyway.
    return ["--compress-mode=size"] if release and int(release[1]) >= 13 else []


def image_job(source, nvcc, folder):
    """Return the job that compiles one kernel family to a fat binary."""
    includes = [f"-I{d}" for d in KERNEL_DIRS]
    levels = [(a.replace("sm_", "compute_"), a) for a in re.split("[;, ]+", ARCHS)]
    archs = [f"-gencode=arch={virtual},code={real}" for virtual, real in levels]
    out = folder / f"{source.stem}.fatbin"
    flags = ["-fatbin", "-std=c++17", "-O3", *compression(nvcc), *archs, *includes]
    flags += ["-lineinfo"] if LINEINFO else []
    flags += ["-Werror", "all-warnings"] if WERROR else []
    return Job(out, [nvcc, *flags, str(source)])


def write_image_table(sources, folder, compiled):
    """Generate te_images.c, which embeds the images and sources; return its path."""
    blobs, rows = [], []

    def embed(symbol, path):
        blobs.append(f'".balign 64\\n{symbol}: .incbin \\"{path}\\"\\n.byte 0\\n"\n')
        rows.append(f"extern const unsigned char {symbol}[];")
        stat = path.stat()
        return f"{symbol}, {stat.st_size}", f"{stat.st_mtime_ns}"

    table, times = [], []  # the times are there because .incbin is in no depfile
    for source in sources:
        plain = folder / f"{source.stem}.cu"
        write_if_changed(plain, flatten(source, {source.resolve()}) + "\n")
        text, made = embed(f"te_source_{source.stem}", plain)
        image, made_image = "NULL, 0", ""
        if compiled:
            image, made_image = embed(f"te_image_{source.stem}", plain.with_suffix(".fatbin"))
        table.append(f'    {{"{source.stem}", {image}, (const char *){text}}},\n')
        times.append(f"{source.stem} {made} {made_image}")
    lines = [f"/* Generated by setup.py. {'; '.join(times)} */", '#include "cuda/images.h"']
    lines += rows
    if blobs:
        lines.append(f'__asm__(".section .rodata\\n"\n{"".join(blobs)}".previous\\n");')
    lines.append("const te_device_image te_device_images[] = {")
    lines.append(f"{''.join(table)}    {{NULL, NULL, 0, NULL, 0}},\n}};")
    lines.append(f"const int te_device_image_count = {len(sources)};\n")
    path = folder / "te_images.c"
    write_if_changed(path, "\n".join(lines))
    return path


def object_job(source, folder, extra):
    """Return the job that compiles one C file; its group may be held to strict C11."""
    group = source.parts[1] if source.parts[0] == "csrc" else "generated"
    out = folder / group / f"{source.stem}.o"
    flags = ["-std=c11", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *extra]
    flags += ["-Wall", "-Wextra", "-Icsrc/include", "-Icsrc"]
    if group in ("core", "cpu", "layer", "xla"):
        flags.append("-Wpedantic")
    if group == "core":  # dispatch: calls of its own and of the TLS resolver without stubs
        flags += ["-fno-plt", "-fno-semantic-interposition"]
    if group == "python":
        include = sysconfig.get_path("include")
        if not Path(include, "Python.h").exists():
            raise SystemExit(f"{include}/Python.h not found: install Python's development files")
        flags += ["-DPy_LIMITED_API=0x030b0000", "-isystem", include]
        flags.append("-Wno-unused-parameter")  # the signatures are those of CPython
    if SANITIZE:  # gcc's flow warnings are unreliable in instrumented code
        flags += ["-g", "-O1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all"]
    elif WERROR:
        flags.append("-Werror")
    user = shlex.split(os.environ.get("CFLAGS", ""))
    return Job(out, [*CC, *flags, *user, "-c", str(source)])


def print_unread():
    """Say which variables of NVIDIA Transformer Engine's build are set: they are not read here."""
    unread = runpy.run_path("transformer_engine/common/unread_variables.py")["BUILD"]
    for entry in unread:
        for name in sorted(set(entry.names.split()) & os.environ.keys()):
            print(entry.line(name, os.environ[name]), flush=True)


def build_objects(groups):
    """Compile the groups and what CUDA allows; return the objects and the flags to link with."""
    started, notes = time.monotonic(), []
    common = openmp_flags(notes) + ([f"-fsanitize={SANITIZE}"] if SANITIZE else [])
    nvcc, home = find_nvcc()
    unwanted = why_no_cuda()
    headers = None if unwanted else find_cuda_headers(home)
    if headers is None:
        notes.append(f"no CUDA ({unwanted or 'headers not found'})")
    elif nvcc is None:
        notes.append("device code as source alone (nvcc with g++ not found)")
    print_unread()
    ends = ":\n" if VERBOSE else ": "
    print("native code, " + ", ".join(notes or ["CPU and CUDA"]), end=ends, flush=True)
    folder = BUILD / ("obj-cpu" if headers is None else "obj-cuda")
    extra = common
    if headers is not None:
        groups = (*groups, "cuda")
        extra = [*common, "-DTE_WITH_CUDA=1", *(f for d in headers for f in ("-isystem", d))]
    sources = [s for g in groups for s in sorted(Path("csrc", g).glob("*.c"))]
    images = folder / "images"
    kernels = sorted(Path("csrc/cuda/kernels").glob("*.cu")) if headers else []
    jobs = [object_job(source, folder, extra) for source in sources]
    count = run_jobs([image_job(k, nvcc, images) for k in kernels if nvcc] + jobs)
    if headers is not None:
        table = object_job(write_image_table(kernels, images, nvcc is not None), folder, extra)
        count += run_jobs([table])
        jobs.append(table)
    took = f"{count} files compiled in {time.monotonic() - started:.1f} s"
    print(took if count else "up to date", flush=True)
    return [str(job.out) for job in jobs], common


def link(out, objects, flags):
    """Link a shared object beside its place and move it there, so that a running one survives."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = out.with_name(out.name + ".tmp")
    user = shlex.split(os.environ.get("LDFLAGS", ""))
    own = "-Wl,-Bsymbolic-functions"  # calls of public functions from within are direct
    command = [*CC, "-shared", own, "-o", str(scratch), *objects, *flags, *user, *SYSTEM_LIBS]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"cannot link {out}")
    scratch.replace(out)


def locked(function):
    """Let one build at a time use the build folder."""

    def run(*args):
        BUILD.mkdir(parents=True, exist_ok=True)
        with open(BUILD / ".lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return function(*args)

    return run


class build_ext(_build_ext):
    """Make the extension; setuptools knows its name, its place and nothing else."""

    @locked
    def build_extension(self, ext):
        objects, flags = build_objects(GROUPS)
        self.built = Path(self.get_ext_fullpath(ext.name))
        link(self.built, objects, flags)
        if not SANITIZE:  # which this interpreter could not load; the stub would be the same
            subprocess.run([sys.executable, "tools/operator_stubs.py", str(self.built)], check=True)

    def copy_extensions_to_source(self):
        super().copy_extensions_to_source()
        for stub in self.built.parent.glob("_core_*.pyi"):
            shutil.copy2(stub, "transformer_engine")


class build_py(_build_py):
    """Put the public headers into the package; in place they are found in csrc/include."""

    def run(self):
        super().run()
        if not getattr(self, "editable_mode", False):
            folder = Path(self.build_lib, "transformer_engine/include")
            folder.mkdir(parents=True, exist_ok=True)
            for header in sorted(Path("csrc/include").glob("*.h")):
                shutil.copy2(header, folder)


class library(Command):
    """Make libtransformer_engine.{a,so} from the objects of the extension, less csrc/python."""

    user_options = []
    initialize_options = finalize_options = lambda self: None

    @locked
    def run(self):
        objects, flags = build_objects([g for g in GROUPS if g != "python"])
        archive = BUILD / "libtransformer_engine.a"
        scratch = archive.with_name(archive.name + ".tmp")
        scratch.unlink(missing_ok=True)
        subprocess.run([os.environ.get("AR", "ar"), "rcs", str(scratch), *objects], check=True)
        scratch.replace(archive)  # while another process links with the old one
        flags = ["-Wl,-soname,libtransformer_engine.so", "-Wl,--no-undefined", *flags]
        link(BUILD / "libtransformer_engine.so", objects, flags)


def home_page():
    """Return the address that this folder was cloned from, or its own where there is none."""
    if Path("PKG-INFO").exists():  # an unpacked source archive
        found = re.search(r"^Home-page: (.+)$", Path("PKG-INFO").read_text(), re.MULTILINE)
        return found[1]
    origin = ""
    if shutil.which("git") and Path(".git").exists():
        ask = ["git", "--git-dir=.git", "config", "remote.origin.url"]
        origin = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    origin = re.sub(r"^(ssh://)?git@([^:/]+)[:/]", r"https://\2/", origin)
    web = re.fullmatch(r"(https?://)(?:[^@/]*@)?(.+?)(?:\.git)?/?", origin)  # without a user's key
    return web[1] + web[2] if web else Path.cwd().as_uri()


class Distribution(_Distribution):
    """The package, with its licence: no form of it in pyproject.toml suits all of setuptools."""

    def parse_config_files(self, *args, **kwargs):
        super().parse_config_files(*args, **kwargs)
        self.metadata.license = "Apache-2.0"


def check_setuptools():
    """Say what is too old: setuptools itself would speak of an unknown name, or command."""
    version = tuple(int(number) for number in re.findall(r"\d+", setuptools.__version__)[:2])
    makes_wheel = {"bdist_wheel", "dist_info", "editable_wheel"} & set(sys.argv)
    has_wheel = version >= (70, 1) or importlib.util.find_spec("wheel") is not None
    if version < (61, 0) or (makes_wheel and not has_wheel):
        raise SystemExit(
            f"setuptools {setuptools.__version__} is too old: 70.1 is needed, or 61 with the "
            "package wheel. Run: python -m pip install --upgrade setuptools"
        )


check_setuptools()
setup(
    distclass=Distribution,
    url=home_page(),
    ext_modules=[Extension("transformer_engine._core", [], py_limited_api=True)],
    cmdclass={"build_ext": build_ext, "build_py": build_py, "library": library},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
