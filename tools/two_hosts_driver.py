"""What tools/drill_two_hosts.py runs in its hosts: `two_hosts_driver.py WHAT ARGUMENTS`, the arguments as JSON.

Says what happens in lines of JSON, each with the time by the machine's clock.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray

from hookline import LLM, AsyncLLM, SamplingParams
from hookline.core.util.ray_cluster import connected_ray

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
NUM_CALLERS = 4


def say(**what: Any) -> None:
    """One line to the drill, in one piece: other threads print, too."""
    print(json.dumps({"at": time.time(), **what}) + "\n", end="", flush=True)


def arguments(given: dict[str, Any], executor: str = "ray") -> dict[str, Any]:
    """What LLM takes: each rank gets two of its node's three CPUs, so that no two ranks share a node."""
    engine = {"executor": executor, "num_blocks": 400, "cpu_threads": 4, **given.pop("engine", {})}
    return {"device": "cpu", "engine": engine, **given}


def places(llm: LLM) -> list[str]:
    """The nodes of an engine's ranks, as Ray calls them."""
    return [place.host for place in llm.engine.executor.links.placement.places]  # type: ignore[attr-defined]


def tokens(llm: LLM) -> list[list[int]]:
    """Of all prompts, greedily."""
    return [list(output.token_ids) for output in llm.generate(PROMPTS, GREEDY)]


def start(given: dict[str, Any]) -> None:
    """Start an engine with ranks on two hosts, and say its tokens, or why not."""
    began = time.monotonic()
    with LLM(**arguments(given)) as llm:
        say(event="ready", seconds=time.monotonic() - began, places=places(llm))
        began = time.monotonic()
        found = tokens(llm)
        say(event="tokens", tokens=found, seconds=time.monotonic() - began)
        began = time.monotonic()
    say(event="closed", seconds=time.monotonic() - began)


def alone(given: dict[str, Any]) -> None:
    """The tokens of one rank, without Ray."""
    with LLM(**arguments(given, "local")) as llm:
        say(event="tokens", tokens=tokens(llm))


def together(given: dict[str, Any]) -> None:
    """Two engines at once: one cut inside of its layers, and one between them, with one CPU for each rank."""
    with LLM(**arguments({"tp": 2})) as one, LLM(**arguments({"pp": 2, "engine": {"cpu_threads": 2}})) as other:
        say(event="ready", places=[*places(one), *places(other)])

        with ThreadPoolExecutor() as pool:
            say(event="tokens", tokens=list(pool.map(tokens, (one, other))))


def serve(given: dict[str, Any]) -> None:
    """Callers that ask until they are told that it is over."""

    async def call(llm: AsyncLLM, number: int) -> None:
        num_answers = 0
        try:
            while True:
                await llm.generate([number + 1, 2, 3], LONG)
                num_answers += 1
        except Exception as error:
            say(event="told", caller=number, num_answers=num_answers, text=str(error))

    async def run() -> None:
        llm = AsyncLLM(**arguments(given))
        say(event="ready", places=places(llm.llm))
        await asyncio.gather(*(call(llm, number) for number in range(NUM_CALLERS)))
        began = time.monotonic()
        await llm.aclose()
        say(event="closed", seconds=time.monotonic() - began)

    asyncio.run(run())


def reserved(given: dict[str, Any]) -> None:
    """What is reserved in the cluster: placement groups, and CPUs of nodes that are there, once nothing is."""
    connected_ray("the drill")
    until = time.monotonic() + given["patience_s"]
    while True:
        groups = sum(one["state"] != "REMOVED" for one in ray.util.placement_group_table().values())
        taken = ray.cluster_resources().get("CPU", 0) - ray.available_resources().get("CPU", 0)
        if (not groups and not taken) or time.monotonic() > until:
            break
        time.sleep(0.2)
    say(event="reserved", groups=groups, cpus=taken)


def nodes(given: dict[str, Any]) -> None:
    """Wait until so many nodes are there."""
    connected_ray("the drill")
    while (count := sum(node["Alive"] for node in ray.nodes())) != given["count"]:
        time.sleep(0.2)
    say(event="nodes", count=count)


def data(given: dict[str, Any]) -> None:
    """Answer a data set by one engine on each host; each row says which."""
    from hookline.data import Generate

    class Here(Generate):
        async def __call__(self, batch: Any) -> Any:
            table = await super().__call__(batch)
            host = ray.util.get_node_ip_address()
            return table.append_column("host", [[host] * table.num_rows])

    connected_ray("the drill")
    ray.data.DataContext.get_current().enable_progress_bars = False
    prompts = [{"id": number, "prompt_token_ids": PROMPTS[number % len(PROMPTS)]} for number in range(given["rows"])]
    sampling = {"temperature": 0, "max_tokens": GREEDY.max_tokens, "ignore_eos": True}
    engine = {"device": "cpu", "engine": {"max_num_seqs": 8, "num_blocks": 400}}
    options = Generate.options(engine, concurrency=2, sampling=sampling, batch_size=4, num_cpus=2)
    rows = ray.data.from_items(prompts, override_num_blocks=given["rows"] // 4).map_batches(Here, **options).take_all()
    with LLM(**arguments({}, "local")) as llm:
        expected = [output.text for output in llm.generate(PROMPTS, GREEDY)]
    say(
        event="rows",
        ids=sorted(row["id"] for row in rows),
        equal=sum(row["text"] == expected[row["id"] % len(PROMPTS)] for row in rows),
        hosts={host: sum(row["host"] == host for row in rows) for host in {row["host"] for row in rows}},
        errors=sorted({row["error"] for row in rows if row["error"]}),
    )


def ask(given: dict[str, Any]) -> None:
    """Ask servers in turn, once all answer, for so many seconds; say who answered, and how late at most."""
    import httpx

    body = {"prompt": "def f(", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    replicas: dict[str, int] = {}
    faults: dict[str, int] = {}
    slowest_s = 0.0
    with httpx.Client(timeout=60) as client:

        def answer(url: str) -> httpx.Response | None:
            try:
                return client.post(f"{url}/v1/completions", json=body)
            except httpx.HTTPError as error:
                fault = f"{url}: {type(error).__name__}"
                faults[fault] = faults.get(fault, 0) + 1
                return None

        for url in given["urls"]:
            while (there := answer(url)) is None or there.status_code != 200:
                time.sleep(0.2)
        faults.clear()
        say(event="ready")
        until = time.monotonic() + given["seconds"]
        while (asked := time.monotonic()) < until:
            for url in given["urls"]:
                if (there := answer(url)) is not None:
                    name = there.headers.get("x-hookline-replica", f"status {there.status_code}")
                    replicas[name] = replicas.get(name, 0) + 1
                slowest_s = max(slowest_s, time.monotonic() - asked)
                asked = time.monotonic()
    say(event="asked", answers=replicas, faults=faults, slowest_s=round(slowest_s, 1))


def stop_serving(given: dict[str, Any]) -> None:
    """End all of Ray Serve."""
    from ray import serve as ray_serve

    connected_ray("the drill")
    ray_serve.shutdown()
    say(event="stopped")


def main() -> None:
    """Do what the command line says."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    what, given = sys.argv[1], json.loads(sys.argv[2])
    cases = {one.__name__: one for one in (start, alone, together, serve, reserved, nodes, data, ask, stop_serving)}
    try:
        cases[what](given)
    except Exception as error:
        say(event="failed", kind=type(error).__name__, text=str(error))
        sys.exit(1)


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])
    main()
