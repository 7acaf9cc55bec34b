"""Facts of the machine and the engine of a benchmark, for its result line."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hookline.core.frontend.llm import LLM
    from hookline.core.kv_cache.groups import CacheGroups


ENGINE_FACTS = ("kernels", "captured", "scheduler", "block_size", "num_blocks", "cache_groups", "vocab_size", "overlap")
"""Keys of `describe_engine`'s facts besides the device."""


def revision() -> str | None:
    """The commit's hash, with "-dirty" if files were changed since; None without a clone or without git."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def first_token_s(llm: LLM) -> float:
    """Seconds from the start of this process to the first token, which this draws."""
    from hookline.core.sampling_params import SamplingParams
    from hookline.core.util.start_phases import process_age_s

    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True))
    started = process_age_s()
    llm.generate([[4, 5, 6]], SamplingParams(max_tokens=8, ignore_eos=True))
    return started


def peak_memory(llm: LLM) -> dict[str, float | None]:
    """Most memory so far, in GiB: reserved on the GPU, resident in this process."""
    import resource

    import torch

    on_gpu = llm.device.type == "cuda" and llm.engine.executor.is_here
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "peak_memory_gib": round(torch.cuda.max_memory_reserved(llm.device) / 2**30, 2) if on_gpu else None,
        "peak_host_memory_gib": round(resident / 2**30, 2),
    }


def describe(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that was measured, and the versions and the commit of the code."""
    from importlib.metadata import version

    from hookline.core.config.settings import ENGINE_KEYS
    from hookline.core.sweep.results import FORMAT

    measured = ENGINE_KEYS if tree.get("url") is None else ("url", "client")
    config = {key: tree.get(key) for key in (*measured, "workload", "slo", "repeats")}
    if isinstance(config["workload"], Mapping) and not config["workload"].get("classes"):
        config["workload"] = {key: value for key, value in config["workload"].items() if key != "classes"}
    versions = {name: version(name) for name in ("hookline", "torch")}
    return {"format": FORMAT, "revision": revision(), "versions": versions, "config": config}


def describe_engine(llm: LLM) -> dict[str, Any]:
    """The device, and the values that the engine chose for the configuration on this machine."""
    import torch

    sees_gpu = llm.device.type == "cuda" and torch.cuda.is_available()  # Ray's ranks may have GPUs on other machines
    count = torch.get_num_threads()
    threads = f"{llm.device.type}, {count} thread{'s' * (count != 1)}"
    limits = llm.engine.limits
    return {
        "device": torch.cuda.get_device_name(llm.device) if sees_gpu else threads,
        "kernels": llm.kernels_name,
        "captured": llm.captured,
        "scheduler": llm.config.scheduler.name,
        "block_size": limits.plan.block_size,
        "num_blocks": limits.plan.num_blocks,
        "cache_groups": group_facts(llm.engine.groups),
        "vocab_size": limits.vocab_size,
        "overlap": limits.overlap,
        "start_phases_s": {name: round(seconds, 3) for name, seconds in llm.start_phases_s.items()},
    }


def group_facts(groups: CacheGroups) -> dict[str, Any]:
    """A model's windows, and whether it has states: a simulation of a recorded run schedules requests by these."""
    return {"windows": list(groups.windows), "has_states": groups.has_states}
