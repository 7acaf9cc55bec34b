"""Ranks, and jobs of sweeps, forked from a process that has imported what they import, for tests of what they compute.

A new interpreter takes seconds to import torch, and as many again for transformers. How these processes start and end
is asked by tests that leave them as they are.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import IO, Any, NoReturn
from unittest.mock import patch

from hookline.core.executor import peer
from hookline.core.sweep import job_process
from hookline.core.util.child_python import python_command

IMPORTED = (
    "hookline.core.assembly.rank_main",
    "hookline.core.assembly.worker",
    "hookline.core.distributed.process_group",
    "hookline.core.plugin.host",
    "transformers.modeling_utils",
)
"""Imported before the first fork."""
HIGH = 512
"""No file descriptor that a fork is given has so high a number."""
STANDARD_ERROR = 2
NUMBER = 32
"""More bytes than a number has that is told."""


class Origin:
    """The process whose forks become ranks and jobs."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A library that starts threads when it is imported would lack them in a fork.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            command = python_command(f"{__name__}:serve", str(theirs.fileno()))
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environ)

    def close(self) -> None:
        """End it. Its forks go on until their engines end them."""
        self._requests.close()
        self._process.wait()

    def start(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> Fork:
        """For subprocess.Popen as `peer` calls it: a fork does what this command of `python_command` would do."""
        fds = {1: STANDARD_ERROR, STANDARD_ERROR: STANDARD_ERROR} | {fd: fd for fd in pass_fds}
        return self._fork(command, fds, os.getcwd(), os.environ)

    def run(
        self,
        command: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        input: bytes,
        stdout: IO[bytes],
        timeout: float | None,
        **_: Any,
    ) -> subprocess.CompletedProcess[bytes]:
        """For subprocess.run as `job_process` calls it, in the same way."""
        with tempfile.TemporaryFile() as given:
            given.write(input)
            given.seek(0)
            fds = {0: given.fileno(), 1: stdout.fileno(), STANDARD_ERROR: stdout.fileno()}
            fork = self._fork(command, fds, cwd, env)
        try:
            return subprocess.CompletedProcess(command, fork.wait(timeout))
        except subprocess.TimeoutExpired:
            fork.kill()
            fork.wait()
            raise

    def _fork(self, command: Sequence[str], fds: Mapping[int, int], cwd: str, env: Mapping[str, str]) -> Fork:
        """fds: those of this process, by their numbers there."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path, target, *arguments = command[command.index("-c") + 2 :]
        request = {"path": json.loads(path), "target": target, "arguments": arguments, "fds": [*fds]}
        request |= {"folder": cwd, "environ": dict(env)}
        with theirs:
            socket.send_fds(self._requests, [json.dumps(request).encode()], [theirs.fileno(), *fds.values()])
        return Fork(command, ours)


class Fork:
    """A fork, with what is used of subprocess.Popen. told: its pid and then its exit code come from there."""

    def __init__(self, command: Sequence[str], told: socket.socket) -> None:
        self.args, self._told = command, told
        self.returncode: int | None = None
        self._reading = threading.Lock()  # threads that watch a rank and the one that ends it wait at once
        weakref.finalize(self, told.close)
        self.pid = int(self._next())

    def _next(self) -> bytes:
        found = self._told.recv(NUMBER)
        assert found, "the process that is forked has ended"
        return found

    def poll(self) -> int | None:
        """See subprocess.Popen."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See subprocess.Popen."""
        if self.returncode is None:
            if not select.select([self._told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._reading:
                if self.returncode is None:
                    self.returncode = int(self._next())
        return self.returncode

    def kill(self) -> None:
        """See subprocess.Popen."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@contextmanager
def forked_ranks(origin: Origin) -> Iterator[None]:
    """Meanwhile the ranks of engines are forks of the origin."""
    names = {name: getattr(subprocess, name) for name in ("DEVNULL", "TimeoutExpired")}
    with patch.object(peer, "subprocess", SimpleNamespace(Popen=origin.start, **names)):
        yield


@contextmanager
def forked_jobs(origin: Origin) -> Iterator[None]:
    """Meanwhile the jobs of sweeps that this process runs are forks of the origin."""
    names = {name: getattr(subprocess, name) for name in ("STDOUT", "TimeoutExpired")}
    with patch.object(job_process, "subprocess", SimpleNamespace(run=origin.run, **names)):
        yield


def serve() -> NoReturn:
    """Fork for each request of the socket whose file descriptor is the argument, until it is closed."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks below
    while True:
        data, fds, *_ = socket.recv_fds(requests, 2**20, HIGH)
        if not data:
            os._exit(0)  # libraries that never end in a rank have nothing to say here
        if os.fork() == 0:
            requests.close()
            _watch(json.loads(data), *fds)
        for fd in fds:
            os.close(fd)


def _watch(request: Any, told_fd: int, *given: int) -> NoReturn:
    """Fork what is asked for, and tell its pid and how it ends, as subprocess.Popen does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    told = socket.socket(fileno=told_fd)
    if (pid := os.fork()) == 0:
        told.close()
        _become(request, given)
    for fd in given:
        os.close(fd)
    told.send(str(pid).encode())
    _, status = os.waitpid(pid, 0)
    told.send(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _become(request: Any, given: Sequence[int]) -> NoReturn:
    """Be what `python_command` starts. given: the file descriptors of the request, under other numbers."""
    code = 1
    try:
        out_of_the_way = [fcntl.fcntl(fd, fcntl.F_DUPFD, HIGH) for fd in given]
        for fd in given:
            os.close(fd)
        for fd, number in zip(out_of_the_way, request["fds"], strict=True):
            os.dup2(fd, number)
            os.close(fd)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environ"])
        sys.path[:], sys.argv[1:] = request["path"], request["arguments"]
        module, _, function = request["target"].partition(":")
        code = getattr(importlib.import_module(module), function)()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
