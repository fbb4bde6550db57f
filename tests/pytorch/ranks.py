# SPDX-License-Identifier: Apache-2.0
"""Processes of one group that wait for functions to run: a test costs no start of its own."""

import contextlib
import io
import socket
import subprocess
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection

import processes
import pytest
import torch
import torch.distributed as dist

LIMIT = 120  # seconds for one function
GROUPS = [  # (device, ranks) of the groups that a test runs on
    pytest.param(("cpu", 2), id="gloo-2"),
    pytest.param(("cuda", 1), id="nccl-1", marks=pytest.mark.gpu),
    pytest.param(("cuda", 2), id="nccl-2", marks=pytest.mark.multigpu),
]
FOUR = [
    pytest.param(("cpu", 4), id="gloo-4"),
    pytest.param(("cuda", 4), id="nccl-4", marks=pytest.mark.multigpu(4)),
]
FOUR_TOO = [*GROUPS, *FOUR]
"""For a test that takes `ranks` by ``parametrize(..., indirect=True)``."""
ONE_TOO = [pytest.param(("cpu", 1), id="gloo-1"), *FOUR_TOO]
"""The same for a test of what one rank does differently."""


def _packed(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _unpacked(data):
    return torch.load(io.BytesIO(data), weights_only=False)


def serve(rank, size, device, folder):
    """Run functions, as rank `rank` of a group, until there are no more."""
    import transformer_engine.pytorch as te

    connection = Client(f"{folder}/{rank}")
    torch.set_num_threads(1)
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    if device == "npu":
        from devices import npu, npu_group

        npu.register()
        npu_group.register()
        npu.set_device(rank)
        backend = "cpu:gloo,npu:npucl"
    store = f"file://{folder}/store"
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group(backend, store, rank=rank, world_size=size, timeout=limit)
    with contextlib.suppress(EOFError):  # the tests are over
        while True:
            function, arguments = _unpacked(connection.recv_bytes())
            te.reset()
            try:
                answer = (function(*arguments), None)
            except BaseException:  # whatever it is, the test has to know
                answer = (None, traceback.format_exc())
            connection.send_bytes(_packed(answer))
    dist.destroy_process_group()


class Ranks:
    """The processes of a group.

    Parameters
    ----------
    device : str
        "cpu" (gloo), "cuda" (one GPU each, NCCL) or "npu" (one test device each, two at most).
    size : int
        Number of processes.
    """

    def __init__(self, device, size):
        self.device, self.size = device, size
        self._processes = []

    def _start(self):
        self._folder = tempfile.TemporaryDirectory()
        folder = self._folder.name
        with contextlib.ExitStack() as stack:
            waiting = []
            for rank in range(self.size):
                waiting.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
                waiting[-1].bind(f"{folder}/{rank}")
                waiting[-1].listen()
                waiting[-1].settimeout(LIMIT)
                arguments = rank, self.size, self.device, folder
                program = f"from pytorch.ranks import serve\nserve(*{arguments})"
                fresh = self.device == "cuda"
                self._processes.append(processes.start(program, fresh=fresh))
            self._connections = [Connection(one.accept()[0].detach()) for one in waiting]

    def run(self, function, *arguments):
        """Run ``function(device, *arguments)`` in every process; return the results by rank.

        The function is one of a module; arguments and results are what `torch.save` takes.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send_bytes(_packed((function, (self.device, *arguments))))
        results, faults = [], []
        for rank, connection in enumerate(self._connections):
            # One that waits for a rank that failed never answers.
            if not connection.poll(5 if faults else LIMIT):
                faults.append(f"rank {rank} did not answer")
                continue
            result, fault = _unpacked(connection.recv_bytes())
            results.append(result)
            if fault is not None:
                faults.append(f"rank {rank}:\n{fault}")
        if faults:
            self.close()  # they may stand in the middle of a collective
            raise AssertionError("\n".join(faults))
        return results

    def close(self):
        """End the processes, if there are any."""
        if not self._processes:
            return
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10, check=False)
        self._processes = []
        self._folder.cleanup()
