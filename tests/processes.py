# SPDX-License-Identifier: Apache-2.0
"""Run Python programs in processes of their own, as children of one that has imported torch.

`start` sends a program to a server, which forks a child for it: this saves the import of torch,
most of the time of a short program. The child begins as a new interpreter does that has imported
torch (and numpy), and nothing of this package; variables, folder, arguments and files are its own.

Fork only goes well where nothing has run yet. The server imports and no more: no thread and no
parallel loop of OpenMP has begun in it, which it checks, and CUDA was never asked. Programs that
use CUDA, and those that are about imports or about variables read before the program begins, ask
for a new interpreter: ``fresh=True``.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import types
from pathlib import Path

READ_BEFORE = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "CUDA_VISIBLE")
"""Beginnings of the variables that Python, torch and its libraries read when they begin."""
SET_LATER = {"PYTHONPATH", "OMP_NUM_THREADS"}
"""Those of them that a child takes over."""


# ---- of the tests --------------------------------------------------------------------------------


def start(code, *arguments, folder=None, path=(), input="", fresh=False, **variables):
    """Begin to run a program; return its `Process`.

    Parameters
    ----------
    code : str or Path
        A program, which may be indented; or the file of one.
    *arguments : object
        Its arguments: ``sys.argv[1:]``, as text.
    folder : path, optional
        The current folder of the process, by default that of the test.
    path : sequence of path
        Folders to import from first.
    input : str
        Standard input.
    fresh : bool
        Start a new interpreter instead of a child of the server.
    **variables : str
        Variables of the environment beside those of the test.

    Raises
    ------
    ValueError
        A variable has another value than the server was started with, and is read at the start.
    """
    search = os.pathsep.join(map(str, (*path, *sys.path)))
    environment = {**os.environ, **variables, "PYTHONPATH": search}
    argv = [str(code) if isinstance(code, Path) else "-c", *map(str, arguments)]
    text = code.read_text() if isinstance(code, Path) else textwrap.dedent(code)
    if not fresh:
        _server().check(environment)
    files = [tempfile.TemporaryFile() for _ in range(3)]  # noqa: SIM115 - Process closes them
    files[0].write(input.encode())
    files[0].seek(0)
    if fresh:
        command = [sys.executable, argv[0], *([] if isinstance(code, Path) else [text]), *argv[1:]]
        made = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=files[0], stdout=files[1], stderr=files[2]
        )
        return Process(argv, files, made.wait, made.kill)
    request = {"argv": argv, "code": text, "environment": environment,
               "folder": str(folder or os.getcwd())}  # fmt: skip
    return Process(argv, files, *_server().start(request, files))


def run(code, *arguments, limit=120, check=True, **options):
    """Run a program to its end: `start` and `Process.wait` in one."""
    return start(code, *arguments, **options).wait(limit, check)


class Process:
    """A program that runs."""

    def __init__(self, argv, files, wait, kill):
        self._argv, self._files, self._wait, self.kill = argv, files, wait, kill

    def wait(self, limit=120, check=True):
        """Wait for its end; return what it printed, as `subprocess.CompletedProcess`.

        Parameters
        ----------
        limit : float
            Seconds after which the process is killed, and `subprocess.TimeoutExpired` raised.
        check : bool
            The program must end with status 0: AssertionError, with what it said.
        """
        with contextlib.ExitStack() as stack:
            for file in self._files:
                stack.enter_context(file)
            try:
                status = self._wait(limit)
            except subprocess.TimeoutExpired:
                self.kill()
                self._wait(None)
                raise
            for file in self._files:
                file.seek(0)
            texts = [file.read().decode() for file in self._files[1:]]
        assert not check or status == 0, "\n".join([f"exit status {status}", *texts])
        return subprocess.CompletedProcess(self._argv, status, *texts)


class _Server:
    """A server of this process, which ends with it."""

    def __init__(self):
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._variables = _read_before(os.environ)
        self._ended = {}  # status by pid
        # OpenBLAS, which numpy brings, starts threads when it is loaded, unless it is to have one.
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join(sys.path)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
        theirs.close()
        atexit.register(self.close)

    def check(self, environment):
        differing = self._variables.items() ^ _read_before(environment).items()
        if differing:
            raise ValueError(f"{dict(differing)} would come too late: use fresh=True")

    def start(self, request, files):
        """Return what waits for the end of a child, and what kills it."""
        with tempfile.TemporaryFile() as file:
            file.write(json.dumps(request).encode())
            file.seek(0)
            socket.send_fds(self._socket, [b"start"], [one.fileno() for one in (file, *files)])
            kind, pid = self._receive(None)
            while kind != "started":
                kind, pid = self._receive(None)
        return functools.partial(self._wait, pid), functools.partial(self._kill, pid)

    def _wait(self, pid, limit):
        end = None if limit is None else time.monotonic() + limit
        while pid not in self._ended:
            left = None if end is None else max(end - time.monotonic(), 0.001)
            try:
                self._receive(left)
            except TimeoutError:
                raise subprocess.TimeoutExpired(f"process {pid}", limit) from None
        return self._ended[pid]

    def _kill(self, pid):
        if pid not in self._ended:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _receive(self, limit):
        """Return ("started", pid) or ("ended", pid), which is noted."""
        self._socket.settimeout(limit)
        answer = self._socket.recv(100)
        if not answer:
            raise RuntimeError(f"the fork server ended with status {self._process.wait()}")
        kind, pid, *status = json.loads(answer)
        self._ended.pop(pid, None)
        if kind == "ended":
            self._ended[pid] = status[0]
        return kind, pid

    def close(self):
        self._socket.close()
        self._process.wait()


@functools.cache
def _server():
    return _Server()


def _read_before(environment):
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ_BEFORE) and name not in SET_LATER
    }


# ---- of the server -------------------------------------------------------------------------------


def _serve(connection):
    """Fork a child for each request; return its request, in the child alone."""
    children, poll = {}, select.poll()  # pids by the descriptors that tell of their ends
    poll.register(connection, select.POLLIN)
    while True:
        for ready, _ in poll.poll():
            if ready in children:
                pid = children.pop(ready)
                poll.unregister(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                _tell(connection, "ended", pid, status)
                continue
            message, files, *_ = socket.recv_fds(connection, 100, 4)
            if not message:
                os._exit(0)
            pid = os.fork()
            if pid == 0:
                for descriptor in (connection.detach(), *children):
                    os.close(descriptor)
                return _take(*files)
            for file in files:
                os.close(file)
            descriptor = os.pidfd_open(pid)
            children[descriptor] = pid
            poll.register(descriptor, select.POLLIN)
            _tell(connection, "started", pid)


def _tell(connection, *message):
    with contextlib.suppress(BrokenPipeError):  # the tests have ended
        connection.send(json.dumps(message).encode())


def _take(request, *standard):
    """Take over the three standard files; return the request."""
    for number, file in enumerate(standard):
        os.dup2(file, number)
        os.close(file)
    with open(request) as file:
        return json.load(file)


def _begin(request):
    """Give this process what an interpreter is started with; return its main module."""
    import numpy
    import torch

    numpy.random.seed()
    os.environ.clear()
    os.environ.update(request["environment"])
    threads = int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads()))
    if threads != torch.get_num_threads():  # which also starts them
        torch.set_num_threads(threads)
    os.chdir(request["folder"])
    sys.argv = request["argv"]
    file = None if sys.argv[0] == "-c" else sys.argv[0]
    sys.path[:] = os.environ["PYTHONPATH"].split(os.pathsep)
    if not sys.flags.safe_path:
        sys.path.insert(0, "" if file is None else str(Path(file).parent))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if file is not None:
        main.__file__ = file
    return main


def _main():
    import torch  # noqa: F401 - the children have it

    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit("the import of torch started threads: no process can be forked from here")
    import gc

    gc.collect()
    gc.freeze()  # the children leave these pages as they are
    request = _serve(socket.socket(fileno=int(sys.argv[1])))
    main = _begin(request)
    name = main.__dict__.get("__file__", "<string>")
    exec(compile(request["code"], name, "exec"), main.__dict__)


if __name__ == "__main__":
    _main()
