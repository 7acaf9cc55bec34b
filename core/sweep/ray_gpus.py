"""Jobs of a sweep on Ray: each gets as many GPUs as its engine has ranks, on one node, if the cluster has any.

Hydra's launcher gives all jobs of a sweep the same resources. So the task of a job, which knows the job, starts another
task with the GPUs and waits for it. Does not import Ray, so that sweeps without it do not need it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from hookline.core.errors import one_short_line
from hookline.core.plugin.registry import LOCAL
from hookline.core.sweep.job_status import FAILED

Run = Callable[..., dict[str, Any]]
"""Runs a job to its end and returns its status, its error and its exit code."""


def on_gpus(run: Run, tree: Mapping[str, Any]) -> Run:
    """The function that runs a job of a composed tree: `run` in a Ray task with the job's GPUs if this is a task
    without any. On a cluster without GPUs, or for a job that needs none, it is `run` itself.
    """
    ray = sys.modules.get("ray")
    wanted = num_gpus(tree)
    if ray is None or not wanted or not ray.is_initialized():
        return run
    context = ray.get_runtime_context()
    if context.get_task_id() is None or context.get_assigned_resources().get("GPU"):
        return run
    most = max((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), default=0)
    if not most:
        return run
    if wanted > most:
        need = f"the job needs {wanted} GPUs (tp * pp) on one node"
        error = f"{need}, and no node of the Ray cluster has more than {most:g}"
        return lambda *_: {"status": FAILED, "error": error, "exit_code": None}

    def _run_there(*arguments: Any) -> dict[str, Any]:
        task = ray.remote(num_cpus=0, num_gpus=wanted, max_retries=0)(run)
        # Not ray.get: during its wait, Ray would start the tasks of all other jobs of the sweep.
        try:
            found: dict[str, Any] = task.remote(*arguments).future().result()
        except ray.exceptions.RayError as error:  # a lost node fails this job, not the sweep
            found = {"status": FAILED, "error": f"Ray lost the job: {one_short_line(error)}", "exit_code": None}
        return found

    return _run_there


def num_gpus(tree: Mapping[str, Any]) -> int:
    """GPUs of a job's engine: one for each rank; none on a CPU, or if a plugin finds them for the engine. Invalid
    values are refused by the job's own process.
    """
    engine = tree.get("engine") or {}
    if tree.get("device") == "cpu" or (isinstance(engine, Mapping) and engine.get("executor", LOCAL) != LOCAL):
        return 0
    each = [tree.get(name, 1) for name in ("tp", "pp")]
    return each[0] * each[1] if all(isinstance(one, int) and one >= 1 for one in each) else 1
