"""Ray Data against LLM.generate: the same prompts through both, alternately, with processes killed in the middle.

`python tools/drill_ray_data.py rows=20000 tokens=16 kills=2 rounds=1`: each row must come exactly once and without an
error, its tokens those of LLM.generate; then the rates. Wall times on a machine that others use say little:
the processor time of the engine's processes is printed beside them, killed ones included and their starts not, and
that of all other processes of the Ray session.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

WORDS = "import os def class return self for in if else print range len open file read write None True not".split()
DEFAULTS = {"rows": 20_000, "tokens": 16, "kills": 2, "rounds": 1, "block": 256, "seed": 0}
STARTS = "HOOKLINE_DRILL_STARTS"


def prompts_of(count: int) -> list[str]:
    draw = random.Random(1)
    return [" ".join(draw.choices(WORDS, k=draw.randint(4, 24))) for _ in range(count)]


def sampling_of(settings: dict[str, int]) -> dict[str, Any]:
    return {"max_tokens": settings["tokens"], "ignore_eos": True, "temperature": 0.0}


def by_llm(settings: dict[str, int]) -> dict[str, Any]:
    from hookline import LLM, SamplingParams

    prompts, params = prompts_of(settings["rows"]), SamplingParams(**sampling_of(settings))
    with LLM() as llm:
        llm.generate(prompts[:8], params)
        start, used = time.monotonic(), time.process_time()
        outputs = llm.generate(prompts, params)
        wall, cpu = time.monotonic() - start, time.process_time() - used
    texts = {str(number): output.text for number, output in enumerate(outputs)}
    return {"wall_s": wall, "busy_s": wall, "cpu_s": cpu, "texts": texts}


class Processes(threading.Thread):
    """Looks at the processes below this one: their processor time, and those that hold an engine, to be killed."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.cpu_s: dict[int, float] = {}
        self.engine_cpu_s: dict[int, float] = {}
        self.engines: list[int] = []
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(1.0):
            self.look()

    def look(self) -> None:
        import psutil

        engines = []
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                times = process.cpu_times()
                self.cpu_s[process.pid] = times.user + times.system
                if "Generate" in " ".join(process.cmdline()) and process.pid != os.getpid():
                    engines.append(process.pid)
                    self.engine_cpu_s[process.pid] = self.cpu_s[process.pid]
            except psutil.Error:
                continue
        self.engines = engines


def by_ray(settings: dict[str, int], kills: int) -> dict[str, Any]:
    import pyarrow as pa
    import ray

    from hookline.data import Generate

    class TimedGenerate(Generate):
        def __init__(self, *arguments: Any, **named: Any) -> None:
            start = time.monotonic()
            super().__init__(*arguments, **named)
            with open(os.environ[STARTS], "a") as file:
                file.write(f"{start} {time.monotonic()} {time.process_time()}\n")

    with tempfile.TemporaryDirectory(prefix="ray_drill_", dir="/tmp") as folder:
        starts = Path(folder) / "starts"
        environ = {STARTS: str(starts), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=100_000_000,
            _temp_dir=folder,
            runtime_env={"env_vars": environ},
            log_to_driver=False,
        )
        processes = Processes()
        processes.start()
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            table = pa.table({"id": list(range(settings["rows"])), "prompt": prompts_of(settings["rows"])})
            slices = [table.slice(at, settings["block"]) for at in range(0, table.num_rows, settings["block"])]
            options = Generate.options(sampling=sampling_of(settings))
            processes.look()
            used, start = sum(processes.cpu_s.values()), time.monotonic()
            answered = ray.data.from_arrow(slices).map_batches(TimedGenerate, **options)
            draw = random.Random(settings["seed"])
            edges = [(one + draw.uniform(0.1, 0.9)) * settings["rows"] / max(kills, 1) for one in range(kills)]
            seen: Counter[int] = Counter()
            texts, errors, killed = {}, [], []
            for batch in answered.iter_batches(batch_size=None, batch_format="pyarrow"):
                for row in batch.to_pylist():
                    seen[row["id"]] += 1
                    texts[str(row["id"])] = row["text"]
                    errors += [row["error"]] if row["error"] is not None else []
                if edges and sum(seen.values()) >= edges[0] and processes.engines:
                    edges.pop(0)
                    killed.append(processes.engines[0])
                    os.kill(killed[-1], signal.SIGKILL)
            end = time.monotonic()
            processes.look()
            each = [tuple(map(float, line.split())) for line in starts.read_text().splitlines()]
        finally:
            processes.ends.set()
            processes.join()
            ray.shutdown()
    return {
        "wall_s": end - start,
        "busy_s": end - each[0][1],
        "starts_s": [ready - begun for begun, ready, _ in each],
        "cpu_s": sum(processes.engine_cpu_s.values()) - sum(used for _, _, used in each),
        "other_cpu_s": sum(processes.cpu_s.values()) - sum(processes.engine_cpu_s.values()) - used,
        "killed": len(killed),
        "once": sum(count == 1 for count in seen.values()),
        "twice": sum(count > 1 for count in seen.values()),
        "errors": errors[:3],
        "texts": texts,
    }


def child(settings: dict[str, int], way: str) -> dict[str, Any]:
    """One way in a process of its own."""
    given = [f"{name}={value}" for name, value in settings.items()]
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        environ["PYTHONPATH"] = str(Path(__file__).resolve().parents[1])
        command = [sys.executable, __file__, *given, f"way={way}", f"out={file.name}"]
        subprocess.run(command, env=environ, check=True)
        found: dict[str, Any] = json.load(file)
    return found


def main() -> int:
    given = dict(one.split("=", 1) for one in sys.argv[1:])
    settings = {name: int(given.get(name, default)) for name, default in DEFAULTS.items()}
    if (way := given.get("way")) is not None:
        found = by_llm(settings) if way == "llm" else by_ray(settings, settings["kills"] if way == "killed" else 0)
        Path(given["out"]).write_text(json.dumps(found))
        return 0
    rows, is_good = settings["rows"], True
    for _ in range(settings["rounds"]):
        reference = {}
        for way in ("llm", "ray", "killed"):
            one = child(settings, way)
            texts = one.pop("texts")
            if way == "llm":
                reference = one | {"texts": texts}
            one["same"] = sum(texts.get(number) == text for number, text in reference["texts"].items())
            one["rows_s"], one["cpu_ms_row"] = rows / one["busy_s"], 1e3 * one["cpu_s"] / rows
            one["of_llm"] = one["rows_s"] / (rows / reference["busy_s"])
            one["cpu_of_llm"] = one["cpu_s"] / reference["cpu_s"]
            is_good &= way == "llm" or (one["once"] == rows and not one["twice"] and not one["errors"])
            print(way, json.dumps({key: round(x, 4) if isinstance(x, float) else x for key, x in one.items()}))
    print("each row exactly once" if is_good else "ROWS ARE MISSING OR DOUBLE")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
