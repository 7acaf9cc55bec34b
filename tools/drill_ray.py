"""Kills a node, an actor or the driver of an engine over Ray, at random moments, and looks who is told in time.

A script, not a test: two nodes of one CPU each on this machine, and for every trial a driver of its own, in which
several callers wait for tokens of an engine with tp=2. Each caller must be told within LIMIT_S, in one line that names
a rank; afterwards no process of a rank, no actor and no placement group may be left.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIMIT_S = 5.0
NUM_CALLERS = 4
NAMED = re.compile(r"rank \d of 2")
MEMORY = 100 * 2**20


def say(**what: Any) -> None:
    """One line to the drill, in one piece: other threads print, too."""
    print(json.dumps({"at": time.time(), **what}) + "\n", end="", flush=True)


def drive(address: str) -> None:
    """The driver: callers that ask until they are told that it is over."""
    import ray

    from hookline import AsyncLLM, SamplingParams

    ray.init(address=address, log_to_driver=False)
    say(event="connected")
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def call(llm: AsyncLLM, number: int) -> None:
        try:
            while True:
                await llm.generate([number + 1, 2, 3], params)
        except Exception as error:
            say(event="told", caller=number, text=str(error))

    async def serve() -> None:
        try:
            llm = AsyncLLM(device="cpu", tp=2, engine={"executor": "ray", "num_blocks": 400})
        except Exception as error:
            say(event="told", caller="start", text=str(error))
            return
        say(event="ready")
        await asyncio.gather(*(call(llm, number) for number in range(NUM_CALLERS)))
        await llm.aclose()

    asyncio.run(serve())
    say(event="closed")


class Drill:
    """A cluster of two nodes that can lose one."""

    def __init__(self, seed: int) -> None:
        from ray.cluster_utils import Cluster

        self.random = random.Random(seed)
        head = dict(num_cpus=0, object_store_memory=MEMORY, include_dashboard=False)
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self._add() for _ in range(2)]

    def _add(self) -> Any:
        return self.cluster.add_node(num_cpus=1, object_store_memory=MEMORY)

    def ranks(self) -> dict[int, str]:
        """Processes of our actors: their ids and states."""
        raylets = {
            info[0].process.pid for node in self.nodes for name, info in node.all_processes.items() if "raylet" in name
        }
        return {pid: state for pid, parent, state in _processes("ray::RankActor") if parent in raylets}

    def trial(self, number: int) -> str:
        """One engine that loses something; returns what was wrong, or nothing."""
        what = self.random.choice(["node", "actor", "driver"])
        in_start = self.random.random() < 0.25
        command = [sys.executable, __file__, "--drive", self.cluster.address]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert driver.stdout is not None
        self._await(driver, in_start)
        time.sleep(self.random.uniform(0.0, 5.0 if in_start else 3.0))
        ranks, killed = list(self.ranks()), time.time()
        self._kill(what, driver, ranks)
        told = [] if what == "driver" else [one for one in _events(driver) if one["event"] == "told"]
        driver.wait(60)
        faults = [
            f"{one['caller']} was told after {one['at'] - killed:.1f} s" for one in told if one["at"] - killed > LIMIT_S
        ]
        faults += [f"no rank is named: {one['text']}" for one in told if not NAMED.search(one["text"])]
        wanted = 0 if what == "driver" else 1 if in_start else NUM_CALLERS
        if len(told) < wanted:
            faults.append(f"{len(told)} of {wanted} callers were told")
        faults += self._left(ranks, killed)
        if what == "node":
            self.nodes = [node for node in self.nodes if node in self.cluster.list_all_nodes()] + [self._add()]
        slowest = max((one["at"] - killed for one in told), default=0.0)
        text = told[0]["text"][:150] if told else ""
        when = "while starting" if in_start else "while serving"
        fault = "; ".join(faults)
        print(f"{number:3} {what:6} {when}: told after {slowest:.2f} s; {fault or 'ok'}. {text}", flush=True)
        return fault

    def _await(self, driver: Any, in_start: bool) -> None:
        if in_start:
            while len(self.ranks()) < 2 and driver.poll() is None:
                time.sleep(0.05)
        else:
            assert any(one["event"] == "ready" for one in _events(driver)), "the engine started"

    def _kill(self, what: str, driver: Any, ranks: list[int]) -> None:
        if what == "driver":
            driver.kill()
        elif what == "actor":
            os.kill(self.random.choice(ranks), signal.SIGKILL)
        else:
            self.cluster.remove_node(self.random.choice(self.nodes), allow_graceful=False)

    def _left(self, ranks: list[int], killed: float) -> Iterator[str]:
        """What is there still, a while later."""
        import ray

        until = time.time() + 10
        while (
            left := [pid for pid in ranks if Path(f"/proc/{pid}").exists() and pid in self.ranks()]
        ) and time.time() < until:
            time.sleep(0.1)
        if left:
            yield f"processes {sorted(left)} are left"
        ray.init(address=self.cluster.address, log_to_driver=False)
        try:
            while groups := self._groups(ray):
                if time.time() > until:
                    yield f"placement groups are left: {groups}"
                    break
                time.sleep(0.2)
        finally:
            ray.shutdown()
        print(f"    nothing left {time.time() - killed:.1f} s later", flush=True)

    def _groups(self, ray: Any) -> list[str]:
        table = ray.util.placement_group_table()
        return [id_ for id_, one in table.items() if one["state"] != "REMOVED"]


def _events(driver: Any) -> Iterator[dict[str, Any]]:
    """What a driver says, until it ends; Ray prints beside it."""
    for line in iter(driver.stdout.readline, ""):
        if line.startswith('{"at"'):
            yield json.loads(line)


def _processes(name: str) -> Iterator[tuple[int, int, str]]:
    """Id, parent and state of the processes whose command line begins so; zombies are gone."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(name.encode()):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    yield int(folder.name), int(parent), state
        except OSError:
            continue


def main() -> None:
    """Drill as the command line says; exit code 1 if a trial went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", metavar="ADDRESS", help="be a driver; for the drill itself")
    given = parser.parse_args()
    if given.drive:
        drive(given.drive)
        return
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (Path(folder) / "ray").mkdir()  # Ray notes the address of its last cluster there, and does not make the folder
        os.environ |= {"RAY_TMPDIR": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        drill = Drill(given.seed)
        try:
            wrong = [fault for number in range(given.trials) if (fault := drill.trial(number))]
        finally:
            drill.cluster.shutdown()
    print(f"{given.trials - len(wrong)} of {given.trials} trials went well")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
