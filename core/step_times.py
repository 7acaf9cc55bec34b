"""Where the time of many steps went, by kind of step: on the host, on the device, and the device waiting for the host.

Knows columns of numbers, one entry per step, and nothing of engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Column = np.ndarray[Any, Any]
TIMES = ("host_s", "device_s", "idle_s")


def times_by_kind(steps: Mapping[str, Column]) -> dict[str, Any]:
    """Means in milliseconds for decode, prefill and mixed steps, as far as there are any, and `decode_idle_percent`.

    steps: columns prefill_tokens and decode_rows, and host_s, device_s and idle_s as in core.engine.StepStats.
    decode_idle_percent: of the time from the end of a decode step to the end of the next one, if that is a decode step
    too, the part that the device waited; None without such a pair.
    """
    decodes, prefills = steps["decode_rows"] > 0, steps["prefill_tokens"] > 0
    kinds = {"decode": decodes & ~prefills, "prefill": prefills & ~decodes, "mixed": decodes & prefills}
    found: dict[str, Any] = {name: _means(steps, chosen) for name, chosen in kinds.items() if chosen.any()}
    return {**found, "decode_idle_percent": _idle_percent(steps, kinds["decode"])}


def _means(steps: Mapping[str, Column], chosen: Column) -> dict[str, float]:
    means = {f"{name.removesuffix('_s')}_ms": round(1000 * float(steps[name][chosen].mean()), 4) for name in TIMES}
    return {"steps": int(chosen.sum()), **means}


def _idle_percent(steps: Mapping[str, Column], decodes: Column) -> float | None:
    follows = decodes[1:] & decodes[:-1]
    idle_s, device_s = steps["idle_s"][1:][follows].sum(), steps["device_s"][1:][follows].sum()
    return round(100 * float(idle_s / (idle_s + device_s)), 2) if follows.any() else None


def time_lines(times: Mapping[str, Any]) -> list[str]:
    """The means as lines of text."""
    lines = [
        f"{kind + ' step':24} host {means['host_ms']:.3f} ms, device {means['device_ms']:.3f} ms, "
        f"idle before it {means['idle_ms']:.3f} ms (means of {means['steps']})"
        for kind, means in times.items()
        if isinstance(means, Mapping)
    ]
    if times["decode_idle_percent"] is not None:
        lines.append(f"{'device idle, decodes':24} {times['decode_idle_percent']} % between one and the next")
    return lines
