"""A server under many streams at once, some of them left early, some read slowly: is anything lost, doubled, left over?

Run `python tools/drill_serve.py --streams 1000 --seconds 600`. The engine is made up and says beforehand what each
stream must bring; processes, sockets and the step loop are real. Prints one line of figures and exits with 1 if any of
them is not as it must be. Linux only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path

from hookline.core.testing.fakes import completion

ROOT = Path(__file__).resolve().parents[1]
SERVER = "from hookline.core.testing.serving import main; main()"
VOCAB_SIZE = 1000
BLOCKED_S = 0.05
"""Longest that an event loop may be kept from its other work."""
GROWTH_MIB = 32
"""By how much a process may be larger at the end than when it was warm."""
SAMPLE_S = 2.0


class Drill:
    """Clients of one server; what they found is in `counts`, mistakes in `faults`."""

    def __init__(self, port: int, arguments: argparse.Namespace) -> None:
        self.port, self.arguments = port, arguments
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._random = random.Random(arguments.seed)
        self._ends_s = time.monotonic() + arguments.seconds

    async def client(self) -> None:
        """Ask for one stream after the other."""
        while time.monotonic() < self._ends_s:
            kind = self._random.random()
            try:
                await self._stream(leaves=kind < 1 / 3, is_slow=1 - kind < self.arguments.slow)
            except (OSError, asyncio.IncompleteReadError, ValueError) as error:
                self.faults.append(f"a stream broke off: {error!r}")

    async def _stream(self, *, leaves: bool, is_slow: bool) -> None:
        seed, prompt = self._random.randrange(2**31), [self._random.randrange(VOCAB_SIZE) for _ in range(8)]
        num_tokens = self._random.randrange(2, self.arguments.tokens)
        leaves_after = self._random.randrange(1, num_tokens) if leaves else None
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 14 if is_slow else 1 << 16)
        try:
            writer.write(request(prompt, seed, num_tokens))
            found, is_done, num_chunks = list[int](), False, 0
            async for line in reader:
                if not line.startswith(b"data: "):
                    continue
                if line.startswith(b"data: [DONE]"):
                    is_done = True
                    break
                event = json.loads(line[6:])
                if "error" in event:
                    self.faults.append(f"a stream brought an error: {event['error']['message']}")
                    return
                found += event["choices"][0].get("token_ids") or []
                num_chunks += 1
                self.counts["chunks"] += 1
                if leaves_after is not None and num_chunks >= leaves_after:
                    self.counts["left"] += 1
                    return
                if is_slow:
                    await asyncio.sleep(0.05)
            self.counts["whole"] += 1
            self.counts["slow"] += is_slow
            if not is_done:
                self.faults.append("a stream ended without [DONE]")
            elif found != completion(seed, prompt, num_tokens, VOCAB_SIZE):
                self.faults.append(f"a stream of {num_tokens} tokens brought {len(found)}, or others")
        finally:
            writer.transport.abort()

    async def run(self) -> None:
        """All clients, until the time is over."""
        await asyncio.gather(*(self.client() for _ in range(self.arguments.streams)))


def request(prompt: list[int], seed: int, num_tokens: int) -> bytes:
    """A request for a stream of tokens, as it goes over the wire."""
    asked = {"prompt": prompt, "max_tokens": num_tokens, "seed": seed, "ignore_eos": True}
    body = json.dumps({**asked, "stream": True, "return_token_ids": True, "temperature": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: here\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def children(pid: int) -> list[int]:
    """Processes that this one started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def memory_mib(pid: int) -> float:
    """What a process holds of its own."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(port: int) -> dict[str, float]:
    """What the server says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/load", timeout=30) as response:
        found: dict[str, float] = json.load(response)
    return found


async def sample(port: int, pids: list[int], memory: list[list[float]], blocked_s: list[float]) -> None:
    """Note the processes' memory, and the longest that the event loop was blocked so far, again and again."""
    while True:
        await asyncio.sleep(SAMPLE_S)
        memory.append([memory_mib(pid) for pid in pids])
        blocked_s.append((await asyncio.to_thread(load, port))["event_loop_blocked_s"])


def wait_until_idle(port: int, patience_s: float = 10.0) -> dict[str, float]:
    """The server's load once nothing runs, or when patience is over."""
    deadline = time.monotonic() + patience_s
    while True:
        now = load(port)
        is_idle = now["num_running"] == now["num_waiting"] == 0 and now["num_free_blocks"] == now["num_blocks"]
        if is_idle or time.monotonic() > deadline:
            return now
        time.sleep(0.1)


def drill(arguments: argparse.Namespace) -> list[str]:
    """Run it; returns what was not as it must be."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mock = {"exact": True, "step_s": arguments.step_s, "vocab_size": VOCAB_SIZE}
    environ = {**os.environ, "HOOKLINE_MOCK": json.dumps(mock), "PYTHONPATH": str(ROOT)}
    options = [f"serve.port={port}", f"serve.processes={arguments.processes}", "serve.access_log=false"]
    server = subprocess.Popen([sys.executable, "-c", SERVER, *options], env=environ, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        assert " at http" in server.stdout.readline(), "the server did not start"
        pids, memory = [server.pid, *children(server.pid)], list[list[float]]()
        blocked_s: list[float] = []
        found = Drill(port, arguments)

        async def run() -> None:
            sampler = asyncio.ensure_future(sample(port, pids, memory, blocked_s))
            await found.run()
            sampler.cancel()

        started_s = time.monotonic()
        asyncio.run(run())
        seconds = time.monotonic() - started_s
        end = wait_until_idle(port)
    finally:
        server.send_signal(signal.SIGTERM)
        exit_code = server.wait(60)
        server.stdout.close()
    warm = memory[len(memory) // 3]
    growth = max(one - before for one, before in zip(memory[-1], warm, strict=True))
    figures = {
        **found.counts,
        "seconds": round(seconds, 1),
        "chunks_s": round(found.counts["chunks"] / seconds),
        "event_loop_blocked_s": end["event_loop_blocked_s"],
        "of_it_at_the_start_s": blocked_s[0],
        "memory_growth_mib": round(growth, 1),
        "memory_mib": [round(one) for one in memory[-1]],
    }
    print(json.dumps(figures))
    faults = [f"{one} ({count} times)" for one, count in Counter(found.faults).most_common(5)]
    if end["num_running"] or end["num_waiting"] or end["num_free_blocks"] != end["num_blocks"]:
        faults.append(f"left over: {end}")
    if end["event_loop_blocked_s"] > BLOCKED_S:
        faults.append(f"an event loop was blocked for {end['event_loop_blocked_s']} s")
    if growth > GROWTH_MIB:
        faults.append(f"a process grew by {growth:.1f} MiB")
    if exit_code:
        faults.append(f"the server ended with exit code {exit_code}")
    return faults


def main() -> int:
    """Read the command line, drill, and say what was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000, help="streams at once")
    parser.add_argument("--seconds", type=float, default=60, help="how long further ones are begun")
    parser.add_argument("--tokens", type=int, default=100, help="most tokens of a stream")
    parser.add_argument("--slow", type=float, default=0.05, help="part of the streams that are read slowly")
    parser.add_argument("--processes", type=int, default=1, help="front ends")
    parser.add_argument("--step-s", type=float, default=0.02, help="seconds that a step takes at least")
    parser.add_argument("--seed", type=int, default=0)
    faults = drill(parser.parse_args())
    for fault in faults:
        print(f"fault: {fault}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
