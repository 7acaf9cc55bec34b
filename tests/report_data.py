"""Sweeps as a benchmark leaves them, made up: for tests of what reads them."""

import numpy as np

from hookline.core.bench.files import write_recording
from hookline.core.bench.metrics import summarise
from hookline.core.bench.recorder import COUNTS, STATES, TIMES, Recording, RequestRecord
from hookline.core.bench.slo import Slo
from hookline.core.sweep.results import append_line

NO_SLO = {"ttft_s": None, "tpot_s": None, "e2e_s": None}


def make_recording(seed=0, num_requests=12, num_tokens=20, pace_s=0.01, num_blocks=64, tags=({},)):
    """Every request gets one token a step; arrivals are spread over the first steps. tags: of the requests, in turn."""
    draw = np.random.default_rng(seed)
    gaps_s = draw.uniform(0.5, 1.5, num_tokens) * pace_s
    end_s = np.cumsum(gaps_s)
    arrivals = np.sort(draw.uniform(0, end_s[0] / 2, num_requests))
    requests = [
        RequestRecord(
            float(arrival), 16, num_tokens, finish_reason="length", start_s=float(arrival),
            first_token_s=float(end_s[0]), finish_s=float(end_s[-1]), tags=dict(tags[place % len(tags)]),
        )
        for place, arrival in enumerate(arrivals)
    ]  # fmt: skip
    steps = {name: np.zeros(num_tokens, dtype=np.int64) for name in (*COUNTS, *STATES)}
    steps |= {name: np.full(num_tokens, np.nan) for name in TIMES}
    steps |= {"start_s": end_s - gaps_s, "end_s": end_s, "busy_s": gaps_s}
    steps["num_drawn"] = steps["running"] = np.full(num_tokens, num_requests)
    steps["waiting"] = np.linspace(5, 0, num_tokens).astype(np.int64)
    steps["free_blocks"] = np.linspace(num_blocks, 8, num_tokens).astype(np.int64)
    drawn = np.tile(np.arange(num_requests), num_tokens)
    none = np.empty(0, dtype=np.int64)
    return Recording(float(end_s[-1]), num_blocks, 16, requests, steps, drawn, none, none)


def make_job(folder, number, overrides=(), config=None, recording=None, own=None, **facts):
    """Append a job's line to a sweep, and write what was recorded of it. own: its folder; None: named by its number."""
    own = own or str(number)
    (folder / own).mkdir(parents=True, exist_ok=True)
    record = {
        "format": 1, "job": number, "key": f"key{number}", "folder": own, "overrides": list(overrides),
        "started_at": "2026-11-21T08:00:00+00:00", "wall_s": 2.5, "status": "done", "error": None, "exit_code": 0,
    }  # fmt: skip
    if config is not None:
        slo, workload = {"slo": NO_SLO}, {"workload": {"num_prompts": 12}}
        record |= {"config": {**slo, **workload, **config}, "versions": {"hookline": "0.1.0", "torch": "2.13"}}
    if recording is not None:
        write_recording(recording, folder / own)
        record |= {"device": "a device", "kernels": "plain", "metrics": summarise(recording, Slo(ttft_s=1))}
    append_line(folder / "results.jsonl", {**record, **facts})


def failed(status="failed", error="it broke", exit_code=2):
    """The facts of a job that failed."""
    return {"status": status, "error": error, "exit_code": exit_code}


def make_sweep(folder):
    """Two policies by two limits that end, a policy that raises, and one that is killed before it says anything."""
    folder.mkdir()
    for number in range(4):
        policy, limit = ("first", "second")[number // 2], (2, 8)[number % 2]
        limits = {"max_num_seqs": limit, "block_size": None}
        config = {"scheduler": {"name": policy, f"of_{policy}": 7}, "engine": limits}
        overrides = [f"scheduler={policy}", f"engine.max_num_seqs={limit}"]
        make_job(folder, number, overrides, config, make_recording(number, pace_s=0.01 * (number + 1)))
    config = {"scheduler": {"name": "raising"}, "engine": {"max_num_seqs": 2, "block_size": None}}
    make_job(folder, 4, ["scheduler=raising", "engine.max_num_seqs=2"], config, **failed(error="ValueError: no mind"))
    killed = failed("killed", "killed by SIGKILL", -9)
    make_job(folder, 5, ["scheduler=killed", "engine.max_num_seqs=2"], **killed)
    return folder
