"""Streamed chunks a second of one front end, with an engine that only makes tokens up: `python tools/bench_serve.py`.

The front end is pinned to one core, the engine's process and this client to another. The figure by the wall is the
smaller of what either core can do, as long as the engine's steps are short enough to keep the front end busy. Where
other programs use the cores as well, look at the chunks per second of each core's own time. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SERVER = "from hookline.core.testing.serving import main; main()"
WARM_S = 2.0
PAUSE_S = 0.01
"""Between two looks of the client, so that it reads several chunks at once."""


class Load:
    """Streams that are always open: whoever ends is followed by another one."""

    def __init__(self, port: int, num_streams: int) -> None:
        self._port, self._epoll, self._open = port, select.epoll(), dict[int, socket.socket]()
        asked = {"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True, "temperature": 1}
        body = json.dumps(asked).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._buffer = bytearray(1 << 18)
        self.num_chunks = 0
        for _ in range(num_streams):
            self._start()

    def _start(self) -> None:
        one = socket.create_connection(("127.0.0.1", self._port))
        one.sendall(self._request)
        one.setblocking(False)
        self._open[one.fileno()] = one
        self._epoll.register(one, select.EPOLLIN)

    def run(self, seconds: float) -> None:
        """Read for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for number, _ in self._epoll.poll(1):
                self._read(number)
            time.sleep(PAUSE_S)

    def _read(self, number: int) -> None:
        size = self._open[number].recv_into(self._buffer)
        self.num_chunks += self._buffer.count(b"data: {", 0, size)
        if not size or self._buffer.find(b"[DONE]", max(0, size - 64), size) >= 0:
            self._epoll.unregister(number)
            self._open.pop(number).close()
            self._start()


def children(pid: int) -> dict[str, int]:
    """Processes of the server, by what they run."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                words = (entry / "cmdline").read_text().split("\0")
                found[next(one for one in words if one.endswith("main"))] = int(entry.name)
        except (OSError, StopIteration):
            continue
    return found


def cpu_s(pid: int) -> float:
    """What a process has computed, in seconds."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def measure(num_streams: int, seconds: float, step_s: float) -> dict[str, float]:
    """Start a server, load it, and say how fast its front end was."""
    mock = {"step_s": step_s, "low": 256}
    environ = {**os.environ, "HOOKLINE_MOCK": json.dumps(mock), "PYTHONPATH": str(ROOT)}
    options = ["serve.port=0", "serve.processes=1", "serve.access_log=false", "engine.max_model_len=8192"]
    server = subprocess.Popen([sys.executable, "-c", SERVER, *options], env=environ, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert " at http" in line, "the server did not start"
        processes = children(server.pid)
        front = next(pid for target, pid in processes.items() if "front_main" in target)
        cores = sorted(os.sched_getaffinity(0))
        for pid in (0, *processes.values()):
            os.sched_setaffinity(pid, {cores[0]} if pid == front else {cores[-1]})
        load = Load(int(line.rpartition(":")[2].removesuffix("/v1\n")), num_streams)
        load.run(WARM_S)
        engine = next(pid for target, pid in processes.items() if "engine_main" in target)
        before, started_s = load.num_chunks, time.monotonic()
        busy_before_s = cpu_s(front), cpu_s(engine), time.process_time()
        load.run(seconds)
        busy_s = cpu_s(front), cpu_s(engine), time.process_time()
        chunks, wall_s = load.num_chunks - before, time.monotonic() - started_s
        front_s, engine_s, client_s = (end - begin for begin, end in zip(busy_before_s, busy_s, strict=True))
    finally:
        server.send_signal(signal.SIGTERM)
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        server.stdout.close()
    return {
        "chunks_s": round(chunks / wall_s),
        "chunks_per_front_end_second": round(chunks / front_s),
        "chunks_per_second_of_engine_and_client": round(chunks / (engine_s + client_s)),
        "front_end_cores": round(front_s / wall_s, 2),
        "engine_cores": round(engine_s / wall_s, 2),
        "client_cores": round(client_s / wall_s, 2),
    }


def main() -> None:
    """Read the command line and print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument(
        "--step-s", type=float, default=0.0004, help="seconds of a step, which brings each stream a token"
    )
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.streams, arguments.seconds, arguments.step_s)))


if __name__ == "__main__":
    main()
