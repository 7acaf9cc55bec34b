"""The tables of the checks: what their tools said, as rows of cells. A figure that is missing is a dash."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from tools.card.jobs import Job

SIX = ("single", "batch32", "mixed256", "short1024", "shared_prefix", "prefill")
INVARIANT = ("single", "batch32", "mixed256")
STRUCTURED = ("batch32", "batch32_json", "batch32_records")
Row = list[str]
_HOST = re.compile(r"(\w+) +(\d+) decoding, +(\d+) waiting: +([\d.]+) us a step")


def start_table(jobs: list[Job]) -> list[Row]:
    """A column for each start: seconds of its phases, and what was compiled."""
    phases = [job.record("start_phases_s").get("start_phases_s", {}) for job in jobs]
    names = dict.fromkeys(name for one in phases for name in one)
    return [
        ["seconds", *labels_of(jobs)],
        ["ready", *(cell(sum(one.values()) or None, 1) for one in phases)],
        *([name, *(cell(one.get(name), 1) for one in phases)] for name in names),
        ["kernels", *(said(job, "engine start: ").partition("; ")[2] or "–" for job in jobs)],
        ["compiled again although ahead", *(said(job, "again although compiled ahead, ") or "none" for job in jobs)],
        ["late work", *(late_work(job) for job in jobs)],
    ]


def workloads_table(jobs: list[Job]) -> list[Row]:
    """A row for each workload, and for what a step costs the host at each number of requests."""
    labels = list(dict.fromkeys(labels_of(jobs)))
    rows = [["tokens/s; first run", *labels, *compared(labels), "decode step of the last: host, device ms"]]
    for name in SIX:
        found = [best(jobs, label, name) for label in labels]
        cells = [f"{cell(speed(one))}; {ratio(speed(one, 'first'), speed(one))}" for one in found]
        step = ((found[-1].get("metrics", {}) or {}).get("step_times") or {}).get("decode", {})
        times = f"{cell(step.get('host_ms'), 3)}, {cell(step.get('device_ms'), 3)}"
        rows.append([name, *cells, *compared([speed(one) for one in found]), times])
    told = {(job.label, match[1], match[2], match[3]): float(match[4]) for job, match in _host_lines(jobs)}
    for place in dict.fromkeys(key[1:] for key in told):
        us = [told.get((label, *place)) for label in labels]
        name = "host, us: {} {} decoding, {} waiting".format(*place)
        rows.append([name, *(cell(one, 1) for one in us), *compared(us), ""])
    return rows


def _host_lines(jobs: list[Job]) -> list[tuple[Job, re.Match[str]]]:
    return [(job, match) for job in jobs for line in job.lines if (match := _HOST.fullmatch(line))]


def compared(cells: Sequence[Any]) -> Row:
    """The last beside the first, if there are several; of labels the title."""
    if len(cells) < 2:
        return []
    is_title = isinstance(cells[0], str)
    return [f"{cells[-1]} / {cells[0]}" if is_title else ratio(cells[-1], cells[0])]


def grammars_table(jobs: list[Job]) -> list[Row]:
    """A column for each way of filling masks; a turn's ratio is to plain completions in the same process."""
    labels = list(dict.fromkeys(labels_of(jobs)))
    rows = [["output tok/s of each turn (of batch32 beside it)", *labels]]
    for name in STRUCTURED:
        turns = [_beside_plain(label, jobs, name) for label in labels]
        rows.append([name, *("; ".join(one) or "–" for one in turns)])
    return rows


def _beside_plain(label: str, jobs: list[Job], name: str) -> Iterable[str]:
    for job in (one for one in jobs if one.label == label):
        found, plain = best([job], label, name), best([job], label, "batch32")
        if found:
            yield f"{cell(speed(found))} ({ratio(speed(found), speed(plain))})"


def decode_table(jobs: list[Job]) -> list[Row]:
    """A row for each model."""
    rows = [["decode step", "device ms", "floor ms", "floor / device", "GB", "first run ms", "late work"]]
    for job in jobs:
        one = job.record("floor_ms")
        parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in one.get("bytes", {}).items()) or job.status
        ms, floor_ms, first_ms = one.get("device_ms"), one.get("floor_ms"), one.get("first_device_ms")
        rows.append([job.label, cell(ms, 2), cell(floor_ms, 2), ratio(floor_ms, ms), parts, cell(first_ms, 2)])
        rows[-1].append(late_work(job))
    return rows


def shapes_table(jobs: list[Job]) -> list[Row]:
    """A row for each shape and workload; of an open loop, first tokens and the time per token."""
    rows = [["shape", "output tok/s", "first run", "decode step: device ms", "ms: first token p50, p99", "per token"]]
    for job in jobs:
        found = [one for one in job.records if "metrics" in one]
        for one in found:
            metrics, is_open = one["metrics"], one["name"] == "poisson"
            waits = [_percentiles_ms(metrics, key) if is_open else "" for key in ("ttft_s", "tpot_s")]
            step = (metrics.get("step_times") or {}).get("decode", {})
            cells = cell(speed(one)), ratio(speed(one, "first"), speed(one)), cell(step.get("device_ms"), 3)
            rows.append([f"{job.label} {one['name']}", *cells, *waits])
        if not found:
            rows.append([job.label, job.status, "", "", "", ""])
    return rows


def _percentiles_ms(metrics: dict[str, Any], key: str) -> str:
    found = metrics.get(key) or {}
    return ", ".join(cell(1000 * found[one] if one in found else None, 1) for one in ("p50", "p99"))


def invariance_table(jobs: list[Job]) -> list[Row]:
    """A row for each workload, then the tests' outcome, and what each way of making batches had in it."""
    rows = [["output tok/s", "off", "on", "on / off"]]
    for name in INVARIANT:
        found = [speed(best(jobs, label, name)) for label in ("off", "on")]
        rows.append([name, *map(cell, found), *compared(found)])
    told = [line.lstrip(".") for job in jobs for line in job.lines if " preemptions, " in line]
    return [
        *rows,
        *([f"tests: {row[0]}", *row[1:4]] for row in tests_table(jobs)),
        *([one, "", "", ""] for one in told),
    ]


def serving_table(jobs: list[Job]) -> list[Row]:
    """A row for each load: of AsyncLLM's the first run, of first minutes both parts."""
    rows = [["ms", "first token p50, p99", "between tokens p50, p99", "p99 of 20 s / after", "late work"]]
    for job in jobs:
        if minute := job.record("first_20_s"):
            early, after = minute["first_20_s"], minute["after"]
            waits = f"20 s: {early['p50']}, {early['p99']}; after: {after['p50']}, {after['p99']}"
            rows.append([job.label, waits, "", ratio(early["p99"], after["p99"]), late_work(job)])
        elif open_loop := job.record("first").get("first"):
            waits, gaps = (f"{open_loop[key][0]}, {open_loop[key][2]}" for key in ("ttft_ms", "gap_ms"))
            rows.append([f"AsyncLLM {job.label}", waits, gaps, "", ""])
        else:
            rows.append([job.label, job.status, "", "", ""])
    return rows


def tests_table(jobs: list[Job]) -> list[Row]:
    """A row for each file and for each failed test."""
    rows = [["file", "passed", "failed", "skipped", "not run", "seconds"]]
    for job in jobs:
        found = {one["file"]: one for one in job.records if "file" in one}
        unknown = {"passed": 0, "failed": [], "skipped": 0, "seconds": 0}
        for name, number in job.record("files").get("files", {}).items():
            one = found.pop(name, {**unknown, "left": number})
            rows += _file_rows(name, one)
        for name, one in found.items():  # which have no tests here
            rows += _file_rows(name, one)
    return rows


def _file_rows(name: str, one: dict[str, Any]) -> list[Row]:
    counts = (one["passed"], len(one["failed"]), one["skipped"], one["left"], one["seconds"])
    return [[name, *map(str, counts)], *([f"FAILED {test}", *[""] * 5] for test in one["failed"])]


def labels_of(jobs: list[Job]) -> list[str]:
    return [job.label for job in jobs]


def best(jobs: list[Job], label: str, name: str) -> dict[str, Any]:
    """The record of a variant's fastest run of a workload; {} if there is none."""
    found = [one for job in jobs if job.label == label for one in job.records if one.get("name") == name]
    return max((one for one in found if "metrics" in one), key=lambda one: speed(one) or 0, default={})


def speed(record: dict[str, Any], run: str = "metrics") -> float | None:
    """Tokens per second: of the best repetition, or of the `first` one."""
    kind = "prompt_tok_s" if record.get("name") == "prefill" else "output_tok_s"
    found: float | None = record.get(run, {}).get(kind)
    return found


def said(job: Job, words: str) -> str:
    """What follows these words in what a tool said; empty if it did not say them."""
    return next((line.partition(words)[2] for line in job.lines if words in line), "")


def late_work(job: Job) -> str:
    """What was compiled, loaded or captured after the engine was ready."""
    counts = job.record("late_work").get("late_work")
    if counts is None:
        return "–"
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "none"


def cell(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def ratio(value: float | None, other: float | None) -> str:
    return "–" if value is None or not other else f"{value / other:.3f}"


def markdown(rows: list[Row]) -> str:
    head, *others = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *others))
