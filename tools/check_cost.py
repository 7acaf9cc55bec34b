"""How well simulations fitted to some jobs of a recorded sweep predict the others: a table, and the largest errors.

python tools/check_cost.py FOLDER: for each group of jobs that share a value of KEY (workload, by default, with its
request rate), fits to the records of all other groups and predicts the group's jobs. No GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hookline.core.cli.command import guarded
from hookline.core.simulate.command import predict
from hookline.core.simulate.cost import CostModel
from hookline.core.simulate.fit import Measured, fit_cost, read_measured
from hookline.core.sweep.results import read_results

FIGURES = ("output_tok_s", "ttft_s", "itl_s", "e2e_s")


def workload_of(result: Mapping[str, Any]) -> str:
    """The kind of load: the name of its preset."""
    return next((one.partition("=")[2] for one in result["overrides"] if one.startswith("workload=")), "smoke")


def label(result: Mapping[str, Any]) -> str:
    config = result["config"]
    rate = config["workload"].get("request_rate")
    rate = f" {rate:g}/s" if rate else ""
    return f"{workload_of(result)}{rate}, {result['scheduler']}, {config['engine']['max_num_seqs']}"


def figure(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics[name]["p50"] if isinstance(metrics[name], Mapping) else metrics[name])


def compare(cost: CostModel, results: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    rows = []
    for result in results:
        guess = predict(cost, result["config"], result["num_blocks"])
        ratios = [figure(guess, name) / figure(result["metrics"], name) for name in FIGURES]
        cells = [f"{figure(result['metrics'], name):.6g} -> {figure(guess, name):.6g}" for name in FIGURES[:2]]
        percent = " | ".join(f"{100 * ratio - 100:+.1f}" for ratio in ratios)
        print(f"| {label(result)} | {' | '.join(cells)} | {percent} |", flush=True)
        rows.append([abs(ratio - 1) for ratio in ratios])
    return rows


def worst(title: str, rows: Sequence[Sequence[float]]) -> None:
    columns = list(zip(*rows, strict=True))
    largest = ", ".join(f"{name} {100 * max(column):.1f}" for name, column in zip(FIGURES, columns, strict=True))
    print(f"{title}: {len(rows)} predictions, largest errors in percent: {largest}\n")


def run(arguments: list[str]) -> int:
    folder = Path(arguments[0] if arguments else "docs/reports/h200_qwen3_0_6b")
    measured = read_measured(folder)
    results = [one for one in read_results(folder) if one["status"] == "done" and not one.get("simulated")]
    print("| job | output tok/s | ttft p50 | " + " | ".join(f"{name} %" for name in FIGURES) + " |")
    worst("fitted to all records", compare(fit_cost(measured), results))
    leave_out("workload left out", workload_of, measured, results)
    leave_out("policy left out", lambda result: str(result["scheduler"]), measured, results)
    return 0


def leave_out(
    title: str,
    group_of: Callable[[Mapping[str, Any]], str],
    measured: Sequence[Measured],
    results: Sequence[Mapping[str, Any]],
) -> None:
    """Predict each group from the records of the others."""
    rows = []
    for group in dict.fromkeys(map(group_of, results)):
        others = [one for one in measured if group_of(one.result) != group]
        print(f"fitted to {len(others)} records, none of {group}:")
        rows += compare(fit_cost(others), [result for result in results if group_of(result) == group])
    worst(title, rows)


if __name__ == "__main__":
    sys.exit(guarded(run, None))
