"""What is to be measured and tested on a machine with a GPU, as named checks, each within a budget of seconds.

    python -m tools.card CHECK [--budget SECONDS] [--out FOLDER] [KEY=VALUE ...]

A check runs other tools one after the other, each in a process of its own, and ends those that run when the
budget is spent. What they say goes to FOLDER/CHECK.log; a table comes last, and FOLDER/CHECK.json has all figures.
KEY=VALUE are overrides for the tools' engines. With --small a check is a matter of seconds on a CPU and its figures
mean nothing. This package imports the standard library alone, so that it runs beside whatever hookline is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from tools.card.checks import CHECKS
from tools.card.jobs import ROOT, Job, run_job, run_jobs
from tools.card.tables import markdown


def machine() -> dict[str, Any]:
    """Where this runs: the card, and which hookline the tools find."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        card = "no GPU"
    look = "import importlib.util; print(importlib.util.find_spec('hookline').origin)"
    found = subprocess.run([sys.executable, "-P", "-c", look], stdout=subprocess.PIPE, text=True, check=False)
    where = found.stdout.strip()
    return {"card": card, "cpus": os.cpu_count(), "hookline": where, "python": sys.version.split()[0]}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    listed = "; ".join(f"{name}: {check.help} ({check.budget_s} s)" for name, check in CHECKS.items())
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("check", choices=CHECKS, help=listed)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="for engines; of the check tests: files")
    parser.add_argument("--budget", type=float, help="seconds")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "card")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="tiny loads and the bundled checkpoint")
    parser.add_argument("--turns", type=int, help="how often variants take turns")
    parser.add_argument("--before", type=Path, help="workloads: a wheel, or a folder with tools/, to compare with")
    parser.add_argument("--tokenizer", type=Path, help="grammars: a folder, whose vocabulary the grammars are for")
    parser.add_argument("--shapes", nargs="+", help="decode and shapes: presets, in place of all")
    parser.add_argument("--batches", type=int, default=1000, help="invariance: random batches")
    parser.add_argument("--from", dest="first", help="tests: the file to go on with")
    return parser.parse_intermixed_args(arguments)


def main(arguments: Sequence[str] | None = None, run: Callable[[Job, float, TextIO], None] = run_job) -> int:
    """Run a check; 0 if all of its jobs were done. run: what runs a job."""
    options = parsed(arguments)
    check, out = CHECKS[options.check], options.out
    budget_s, begun = check.budget_s if options.budget is None else options.budget, time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(out / f"{options.check}.log", "w", buffering=1) as log:
        options.scratch = Path(folder)
        jobs = check.jobs(options)
        run_jobs(jobs, budget_s, log, run)
    rows, facts = check.table(jobs), machine()
    seconds = round(time.monotonic() - begun, 1)
    told = [{key: value for key, value in asdict(job).items() if key not in ("root", "lines")} for job in jobs]
    for job, one in zip(jobs, told, strict=True):
        one["records"] = job.records
    found = {"check": options.check, "machine": facts, "budget_s": budget_s, "seconds": seconds}
    (out / f"{options.check}.json").write_text(json.dumps({**found, "table": rows, "jobs": told}, indent=1) + "\n")
    left = [job.label for job in jobs if job.status != "done"]
    print(f"\n{options.check}: {seconds} of {budget_s:g} s; {facts}; not done: {', '.join(left) or 'none'}")
    print(markdown(rows))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
