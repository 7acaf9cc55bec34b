"""Ranks as processes that are forked from one which has imported torch and Hookline, in place of started Pythons.

For tests of what ranks compute: the imports of a rank take three seconds of a core. Each rank is a process of its own
all the same, with the same sockets, shared memory, environment and folder, and runs what a started Python would run;
that it is started so is seen by tests/test_ranks.py, tests/test_rank_failures.py and all that run commands.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

IMPORTED = ("torch", "hookline.core.assembly.rank_main", "hookline.core.assembly.engine")
MOST_BYTES = 1 << 20
"""Of a request: it has the environment and the path of modules."""


class Forker:
    """The process that ranks are forked from; started when the first is asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._ours, self._theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)

    def start(self, command: Sequence[str], pass_fds: Sequence[int], **_: Any) -> ForkedRank:
        """In place of subprocess.Popen, for the commands of `python_command`."""
        fds = [2, *pass_fds]
        told = {"argv": ["-c", *command[4:]], "code": command[3], "fds": fds}
        answer = self._ask({**told, "environ": dict(os.environ), "folder": os.getcwd()}, fds)
        return ForkedRank(self, answer["pid"], command)

    def reap(self, pid: int) -> int:
        """The exit code of a rank that has ended, as Popen has it."""
        return int(self._ask({"reap": pid}, ())["code"])

    def close(self) -> None:
        """End it; ranks that are left end as their engines do."""
        self._ours.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait(60)

    def _ask(self, request: dict[str, Any], fds: Sequence[int]) -> dict[str, Any]:
        with self._lock:
            if self._process is None:
                command = [sys.executable, "-m", "tests.forked_ranks", str(self._theirs.fileno())]
                environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                self._process = subprocess.Popen(command, env=environ, pass_fds=(self._theirs.fileno(),))
            socket.send_fds(self._ours, [json.dumps(request).encode()], list(fds))
            answer: dict[str, Any] = json.loads(self._ours.recv(MOST_BYTES))
            return answer


class ForkedRank:
    """What `Child` needs of a Popen."""

    def __init__(self, forker: Forker, pid: int, command: Sequence[str]) -> None:
        self.pid, self.args = pid, command
        self.returncode: int | None = None
        self._forker, self._ended = forker, os.pidfd_open(pid)

    def poll(self) -> int | None:
        """See Popen."""
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        """See Popen."""
        code = self._look(None if timeout is None else timeout * 1000)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def kill(self) -> None:
        """See Popen."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _look(self, most_ms: float | None) -> int | None:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._ended, select.POLLIN)
            if ended.poll(most_ms):
                self.returncode = self._forker.reap(self.pid)
                os.close(self._ended)
        return self.returncode


def serve(asked: socket.socket) -> None:
    """Fork what is asked for until the other end is closed."""
    while True:
        message, fds, _, _ = socket.recv_fds(asked, MOST_BYTES, 16)
        if not message:
            return
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            asked.send(json.dumps({"code": os.waitstatus_to_exitcode(status)}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            asked.close()
            be_rank(request, fds)
        for fd in fds:
            os.close(fd)
        asked.send(json.dumps({"pid": pid}).encode())


def be_rank(request: dict[str, Any], fds: list[int]) -> None:
    """Have the files under the numbers that the engine's process has them by, and run the rank's command."""
    code: Any = 1
    try:
        place_files(fds, request["fds"])
        os.environ.clear()
        os.environ.update(request["environ"])
        os.chdir(request["folder"])
        sys.argv[:] = request["argv"]
        gc.enable()
        exec(request["code"], {"__name__": "__main__"})
    except SystemExit as ending:
        code = ending.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))


def place_files(fds: Sequence[int], numbers: Sequence[int]) -> None:
    """Move open files to these numbers, standard output to that of errors, and leave nothing on standard input."""
    above = max(*fds, *numbers) + 1
    for place, fd in enumerate(fds):
        os.dup2(fd, above + place)
        os.close(fd)
    for place, number in enumerate(numbers):
        os.dup2(above + place, number)
        os.close(above + place)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    serve(socket.socket(fileno=int(sys.argv[1])))
