"""Ray Serve under streams while a replica is killed, the application updated and scaled: does anybody lose anything?

Run `python tools/drill_ray_serve.py`. It starts a Ray cluster of its own on this machine and serves the bundled
checkpoint on the CPU by `hookline.serve.ray:app`. Prints a line of figures for each part, and exits with 1 if a request
was lost that should not have been. Linux only; needs the extras ray and serve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

NAME = "ServeReplica:default:hookline"
"""What the processes of replicas are called."""
ENGINE = {"engine.num_blocks": 1024, "engine.max_model_len": 1024, "device": "cpu", "ray.num_cpus": 0.1}
PATIENCE_S = 240.0


@dataclass
class Stream:
    """What came of one streamed completion."""

    text: str = ""
    replica: str | None = None
    status: int = 0
    is_whole: bool = False
    fault: str = ""
    ended_s: float = 0.0


class Clients:
    """Clients of the server at `url`, each with its own session, which ask for the same completion again and again."""

    def __init__(self, url: str, num_tokens: int) -> None:
        self.url, self.body = url, {"prompt": "def f(", "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        limits = httpx.Limits(max_connections=None)
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits)

    async def stream(self, found: Stream, session: str) -> Stream:
        """One completion, from beginning to end."""
        headers = {"X-Session-Id": session}
        try:
            body = {**self.body, "stream": True}
            async with self.http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
                found.status, found.replica = response.status_code, response.headers.get("x-hookline-replica")
                async for line in response.aiter_lines():
                    take(found, line)
        except httpx.HTTPError as error:
            found.fault = found.fault or f"{type(error).__name__}: {error}"
        if not found.is_whole:
            found.fault = found.fault or f"status {found.status}, ended without [DONE]"
        found.ended_s = time.monotonic()
        return found

    async def at_once(self, count: int, then: Callable[[list[Stream]], Any] | None = None) -> list[Stream]:
        """So many streams; `then` is called in a thread when each has brought something."""
        found = [Stream() for _ in range(count)]
        tasks = [asyncio.ensure_future(self.stream(one, f"session-{n}")) for n, one in enumerate(found)]
        while not all(one.text or task.done() for one, task in zip(found, tasks, strict=True)):
            await asyncio.sleep(0.02)
        if then is not None:
            await asyncio.to_thread(then, found)
        await asyncio.gather(*tasks)
        return found

    async def until(self, work: Awaitable[Any], count: int) -> list[Stream]:
        """`count` clients, one stream of each after the other, for as long as some work takes, and a little longer."""
        found: list[Stream] = []
        task = asyncio.ensure_future(work)

        async def ask(number: int) -> None:
            while not task.done():
                found.append(await self.stream(Stream(), f"session-{number}"))
            found.append(await self.stream(Stream(), f"session-{number}"))

        await asyncio.gather(*(ask(number) for number in range(count)))
        await task
        return found


def take(found: Stream, line: str) -> None:
    """A line of a stream of events."""
    if line == "data: [DONE]":
        found.is_whole = not found.fault
    elif line.startswith("data: "):
        event = json.loads(line[6:])
        if "error" in event:
            found.fault = str(event["error"]["message"])
        else:
            found.text += event["choices"][0]["text"]


def replicas() -> list[int]:
    """Processes of replicas that this process started, by way of Ray."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit():
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                names[int(entry.name)] = (entry / "cmdline").read_text()
        except OSError:
            continue

    def is_ours(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sorted(pid for pid, name in names.items() if NAME in name and is_ours(pid))


def wait_for(condition: Callable[[], Any], what: str) -> float:
    """Seconds until it is true."""
    started_s = time.monotonic()
    while not condition():
        assert time.monotonic() < started_s + PATIENCE_S, f"{what} did not come in {PATIENCE_S:g} s"
        time.sleep(0.2)
    return time.monotonic() - started_s


def is_removed(folder: str) -> bool:
    """Remove a folder; returns whether it is gone, since those who still write may make it anew."""
    shutil.rmtree(folder, ignore_errors=True)
    return not Path(folder).exists()


class Drill:
    """The application on a running cluster, and what was wrong with it."""

    def __init__(self, url: str, arguments: argparse.Namespace) -> None:
        self.url, self.arguments = url, arguments
        self.faults: list[str] = []
        self.expected = ""

    def deploy(self, **options: Any) -> None:
        """Deploy the application, or another version of it; returns when it is ready."""
        from ray import serve

        from hookline.serve.ray import app

        given = {key.replace("__", "."): value for key, value in options.items()}
        serve.run(app({**ENGINE, **given}), blocking=False)

    def num_running(self) -> int:
        """Replicas that take requests."""
        from ray import serve

        deployment = serve.status().applications["default"].deployments["hookline"]
        return int(deployment.replica_states.get("RUNNING", 0))

    def check(self, part: str, streams: list[Stream]) -> Counter[str]:
        """Note which streams were lost or brought another text."""
        counts = Counter({"streams": len(streams)})
        for one in streams:
            if one.fault:
                self.faults.append(f"{part}: {one.fault}")
            elif one.text != self.expected:
                self.faults.append(f"{part}: another text of {len(one.text)} characters")
            else:
                counts["whole"] += 1
        return counts

    async def kill(self) -> dict[str, Any]:
        """Two replicas, many streams, one replica killed: those of the other must not notice."""
        self.deploy(ray__min_replicas=2)
        clients = Clients(self.url, self.arguments.tokens)
        first = await clients.stream(Stream(), "first")
        self.expected = first.text

        killed_s = 0.0

        def shoot(_: list[Stream]) -> None:
            nonlocal killed_s
            killed, killed_s = replicas()[0], time.monotonic()
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: self.num_running() == 1, "the end of the killed replica")

        streams = await clients.at_once(self.arguments.streams, shoot)
        broken = {one.replica for one in streams if one.fault}
        if len(broken) != 1:
            self.faults.append(f"streams of {len(broken)} replicas ended early, and one replica was killed")
        others = [one for one in streams if one.replica not in broken]
        counts = self.check("beside a killed replica", others)
        told_s = max(one.ended_s for one in streams if one.fault) - killed_s
        await asyncio.to_thread(wait_for, lambda: self.num_running() == 2, "another replica")
        again = self.check("after a kill", await clients.at_once(16))
        return {"part": "kill", "of_the_killed": len(streams) - len(others), "of_the_other": counts["streams"],
                "whole": counts["whole"], "told_s": round(told_s, 1), "then_whole": again["whole"]}  # fmt: skip

    async def update(self) -> dict[str, Any]:
        """Another version in the place of the first while clients ask: no request may be lost."""
        self.deploy(ray__min_replicas=2)  # changes nothing if that is what runs
        before, clients = replicas(), Clients(self.url, 32)
        self.expected = (await clients.stream(Stream(), "first")).text
        started_s = time.monotonic()
        work = asyncio.to_thread(self.deploy, ray__min_replicas=2, engine__max_num_seqs=128)
        streams = await clients.until(work, self.arguments.clients)
        seconds = time.monotonic() - started_s
        await asyncio.to_thread(wait_for, lambda: not set(before) & set(replicas()), "the old replicas' end")
        counts = self.check("rolling update", streams)
        names = {one.replica for one in streams}
        if len(names) < 4:
            self.faults.append(f"rolling update: answers came of {len(names)} replicas, and 4 were there in turn")
        return {"part": "update", "seconds": round(seconds, 1), "replicas": len(names), **counts}

    async def scale(self) -> dict[str, Any]:
        """A queue starts a replica, and when it is gone one ends, without a lost request."""
        fast = {"ray__upscale_delay_s": 1, "ray__downscale_delay_s": 4, "ray__look_back_s": 11}
        self.deploy(ray__min_replicas=1, ray__max_replicas=2, engine__max_num_seqs=8, **fast)
        await asyncio.to_thread(wait_for, lambda: len(replicas()) == 1, "one replica alone")
        clients = Clients(self.url, 200)
        self.expected = (await clients.stream(Stream(), "first")).text
        up = asyncio.to_thread(wait_for, lambda: self.num_running() == 2, "a second replica")
        started_s = time.monotonic()
        counts = self.check("scaling up", await clients.until(up, 32))
        up_s, started_s = time.monotonic() - started_s, time.monotonic()
        down = asyncio.to_thread(wait_for, lambda: len(replicas()) == 1, "one replica again")
        fewer = self.check("scaling down", await clients.until(down, 2))
        return {"part": "scale", "up_s": round(up_s, 1), "down_s": round(time.monotonic() - started_s, 1),
                "streams": counts["streams"] + fewer["streams"], "whole": counts["whole"] + fewer["whole"]}  # fmt: skip

    def run(self) -> None:
        """The parts that were asked for, one after the other."""
        for part in self.arguments.parts:
            figures = asyncio.run(getattr(self, part)())
            print(json.dumps(figures), flush=True)


def main() -> int:
    """Read the command line, drill, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200, help="at once when a replica is killed")
    parser.add_argument("--tokens", type=int, default=300, help="of each of these")
    parser.add_argument("--clients", type=int, default=16, help="while the application is updated")
    parser.add_argument("--parts", nargs="+", choices=("kill", "update", "scale"), default=("kill", "update", "scale"))
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray_drill_")
    ray.init(num_cpus=8, num_gpus=0, object_store_memory=100 * 2**20, include_dashboard=False,
             log_to_driver=False, _temp_dir=folder)  # fmt: skip
    drill = Drill(f"http://127.0.0.1:{port}", arguments)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        drill.run()
    finally:
        serve.shutdown()
        ray.shutdown()
        wait_for(lambda: is_removed(folder), "the end of Ray's files")
    for fault, count in Counter(drill.faults).most_common(8):
        print(f"fault: {fault} ({count} times)", file=sys.stderr)
    return 1 if drill.faults else 0


if __name__ == "__main__":
    sys.exit(main())
