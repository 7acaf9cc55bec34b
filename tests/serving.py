"""A server in processes of its own for tests, what its streams bring, and what is left of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[1]
START_S = 200.0
MOCK = "from hookline.core.testing.serving import main; main()"
REAL = "import sys; from hookline.core.serve.command import main; sys.exit(main())"


@dataclass
class Server:
    """A running server, its standard error, and every process that ever belonged to it."""

    process: subprocess.Popen[str]
    folder: Path
    """Where its files for a while are; empty once it has ended."""
    url: str = ""
    errors: list[str] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def children(self, of: int | None = None) -> dict[int, str]:
        """Processes below it, by their ids, with what they run."""
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                status = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(status[1]) == (self.process.pid if of is None else of) and status[0] != "Z":
                    words = (entry / "cmdline").read_text().split("\0")
                    found[int(entry.name)] = next((one for one in words if one.endswith("main")), "")
        self.seen |= set(found)
        return found

    def pid_of(self, what: str) -> int:
        """The process that runs `what`, e.g. front_main."""
        return next(pid for pid, target in self.children().items() if what in target)

    def ranks(self) -> dict[int, str]:
        """Processes below the engine's."""
        return self.children(self.pid_of("engine_main"))

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def stop(self, number: int = signal.SIGTERM, patience_s: float = 60.0) -> int:
        """Send a signal and wait for the end; returns the exit code."""
        for pid in [*self.children()]:
            self.children(pid)
        self.process.send_signal(number)
        return self.process.wait(patience_s)

    def left_over(self) -> list[str]:
        """What is still there of it: processes, files, its port."""
        found = [f"process {pid}" for pid in self.seen if is_alive(pid)]
        found += [str(path) for path in self.folder.iterdir()]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                found.append(f"port {self.port}")
        return found


def is_alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@contextmanager
def server(*arguments: str, mock: dict[str, Any] | None = None, **environ: str) -> Iterator[Server]:
    """A server that is ready; a made-up engine if `mock` has its options, else the bundled model."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": folder,
            "HOOKLINE_MOCK": json.dumps(mock),
        }
        command = [sys.executable, "-c", REAL if mock is None else MOCK, "serve.port=0", *arguments]
        process = subprocess.Popen(
            command,
            env={**os.environ, **variables, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running = Server(process, Path(folder))
        reader = threading.Thread(target=running.errors.extend, args=(process.stderr,), daemon=True)
        reader.start()
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            watchdog.cancel()
            assert " at http" in line, f"it did not start: {''.join(running.errors)}"
            running.url = line.rpartition(" at ")[2].strip().removesuffix("/v1")
            running.children()
            yield running
        finally:
            watchdog.cancel()
            for pid in running.children():
                running.children(pid)
            if process.poll() is None:
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(15)
            process.kill()
            for pid in filter(is_alive, running.seen):
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            reader.join(5)
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()


def wait_for(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """What a condition gives once it is true."""
    deadline = time.monotonic() + timeout_s
    while True:
        with suppress(httpx.TransportError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"it did not come true in {timeout_s:g} s"
        time.sleep(0.02)


@dataclass
class Stream:
    """What came of a streamed completion."""

    status: int = 0
    text: str = ""
    num_chunks: int = 0
    finish_reason: str | None = None
    error: str | None = None
    is_done: bool = False
    """Whether it ended with [DONE]."""
    is_broken: bool = False
    """Whether its connection ended early."""
    ended_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        return self.finish_reason is not None and self.is_done


async def follow(http: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> Stream:
    """Send a completion request and read its stream to its end, whatever that is."""
    try:
        async with http.stream("POST", "/v1/completions", json={"stream": True, **body}) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.error = (await response.aread()).decode()
            async for data in events(response):
                take(stream, data)
    except httpx.HTTPError:
        stream.is_broken = True
    stream.ended_s = time.monotonic()
    return stream


async def events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def take(stream: Stream, data: str) -> None:
    if data == "[DONE]":
        stream.is_done = True
        return
    event = json.loads(data)
    if "error" in event:
        stream.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        stream.num_chunks += 1
        stream.text += choice["text"]
        stream.finish_reason = choice["finish_reason"]


async def streams_of(
    server: Server, bodies: list[dict[str, Any]], then: Callable[[list[Stream]], Any] | None = None
) -> list[Stream]:
    """Follow streams; `then` is called once each of them has brought something."""
    found = [Stream() for _ in bodies]
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
        tasks = [asyncio.ensure_future(follow(http, *pair)) for pair in zip(bodies, found, strict=True)]
        while not all(one.num_chunks or task.done() for one, task in zip(found, tasks, strict=True)):
            await asyncio.sleep(0.01)
        if then is not None:
            await asyncio.to_thread(then, found)
        await asyncio.gather(*tasks)
    return found
