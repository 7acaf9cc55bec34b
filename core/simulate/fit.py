"""Fits a cost model to a benchmark's records: smooth curves by weighted non-negative least squares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hookline.core.bench.files import STEPS, read_recording
from hookline.core.bench.recorder import Recording
from hookline.core.bench.step_counts import StepCounts
from hookline.core.errors import ConfigError
from hookline.core.simulate.cost import (
    CAPTURED,
    DECODE,
    KINDS_OF_STEPS,
    MIXED,
    PREFILL,
    CostModel,
    Curve,
    HostCost,
    StepShapes,
)
from hookline.core.step.captured import MOST_MIXED
from hookline.core.sweep.job_status import DONE
from hookline.core.sweep.results import RESULTS, read_results
from hookline.core.util.process import called_as

Column = np.ndarray[Any, Any]
NUM_REWEIGHTINGS = 4
OUTLIER = 1.0
"""Errors larger than this many times the prediction count less."""
SMOOTHNESS = 1e-3
"""Weight of equal slopes of neighbouring segments relative to the steps; decides where there are no steps."""


def knots_around(tokens: Column) -> list[int]:
    """Powers of two around the measured sizes."""
    low, high = int(tokens.min()), int(tokens.max())
    powers = [1 << power for power in range(32)]
    return [one for one in powers if one * 2 > low and one < high * 2] or [powers[0]]


def segments(tokens: Column, knots: Sequence[int]) -> Column:
    """The basis of a piecewise linear curve, (steps, knots): 1, and the tokens within each segment between two knots.

    The last segment has no end.
    """
    ends = [*knots[1:-1], np.inf]
    parts = [np.clip(tokens - start, 0, end - start) for start, end in zip(knots, ends, strict=False)]
    return np.stack([np.ones(len(tokens)), *parts[: len(knots) - 1]], axis=1).astype(np.float64)


def smoothness(knots: Sequence[int], scale_s: float) -> Column:
    """Rows whose residual is zero if neighbouring slopes are equal."""
    rows = np.zeros((max(len(knots) - 2, 0), len(knots)))
    for row in range(len(rows)):
        width = knots[row + 1] - knots[row]
        rows[row, row + 1], rows[row, row + 2] = -width, width
    return rows * SMOOTHNESS / scale_s


def block_diagonal(blocks: Sequence[Column], width: int) -> Column:
    """Rows of all blocks, each in columns of its own; `width` columns in all."""
    rows, column = [], 0
    for block in blocks:
        rows.append(np.pad(block, ((0, 0), (column, width - column - block.shape[1]))))
        column += block.shape[1]
    return np.concatenate(rows)


def curve_through(knots: Sequence[int], found: Column) -> Curve:
    """The curve whose first value and slopes are the coefficients of `segments`."""
    widths = np.diff(knots)
    seconds = found[0] + np.concatenate([[0.0], np.cumsum(found[1:] * widths)])
    return Curve([float(knot) for knot in knots], [float(value) for value in seconds])


def solve(matrix: Column, seconds: Column, extra: Column) -> Column:
    """Non-negative least squares of relative errors, reweighted so that outliers count less.

    extra: rows whose product with the coefficients should be zero.
    Raises: ConfigError if SciPy is not there.
    """
    nnls = _nnls()
    scale = np.maximum(np.abs(matrix).max(0), 1e-30)
    extra = extra * np.sqrt(len(seconds))
    found, expected, trust = np.zeros(matrix.shape[1]), np.maximum(seconds, 1e-9), np.ones(len(seconds))
    for _ in range(NUM_REWEIGHTINGS):
        weights = trust / expected
        rows = np.concatenate([matrix * weights[:, None], extra]) / scale
        wanted = np.concatenate([seconds * weights, np.zeros(len(extra))])
        # The triangle has the same solution as all rows, and only as many rows as columns.
        triangle: Column = np.asarray(np.linalg.qr(np.column_stack([rows, wanted]), mode="r"))
        found = nnls(triangle[:, :-1], triangle[:, -1], maxiter=1000)[0] / scale
        expected = np.maximum(matrix @ found, 1e-9)
        trust = np.sqrt(np.minimum(1, OUTLIER / np.maximum(np.abs(seconds / expected - 1), 1e-9)))
    return np.asarray(found)


def _nnls() -> Any:
    try:
        from scipy.optimize import nnls
    except ImportError:
        raise ConfigError("fit= needs SciPy: pip install 'hookline[simulate]'") from None
    return nnls


MANY = 10
"""Fewest steps for a mean."""
ATTENTION = {
    "prefill_pair_s": "prefill_pairs",
    "context_token_s": "own_tokens",
    "shared_token_s": "decode_shared_tokens",
}
"""Coefficients of a cost model, and the columns that they multiply."""
LAUNCH_BOUND = 1.5
"""A step that is not captured and takes the device less than this many launch times is limited by the host."""
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
"""Keys of the engine's configuration that the shapes of its steps depend on."""
SAME = ("device", "kernels", "block_size")
"""Facts that all jobs of a fit must have in common, besides the model."""


@dataclass(frozen=True)
class Measured:
    """A finished benchmark: its result line and its recording."""

    result: Mapping[str, Any]
    recording: Recording


def read_measured(folder: Path) -> list[Measured]:
    """The benchmarks in a sweep's folder, or the single benchmark whose `result` and `records` lie there.

    Raises: ConfigError if there is no finished benchmark of a real machine with its steps.
    """
    done = [record for record in read_results(folder) if record["status"] == DONE and not record.get("simulated")]
    places = [(record, folder / record["folder"]) for record in done if record["folder"] is not None]
    found = [Measured(record, read_recording(place)) for record, place in places if (place / STEPS).is_file()]
    if not found:
        raise ConfigError(
            f"fit={folder} holds no finished benchmark with {RESULTS} and {STEPS}; make one with "
            f"{called_as('bench')} records={folder} result={folder / RESULTS}"
        )
    return found


def fit_cost(measured: Sequence[Measured]) -> CostModel:
    """The model that fits all steps of some benchmarks best.

    Raises: ConfigError if they ran on different machines or models, or decoded or prefilled nothing.
    """
    _check_alike(measured)
    steps = _Steps.of(measured)
    if not (steps.prompts.any() and (~steps.prompts).any()):
        raise ConfigError("a fit needs steps that decode and steps that prefill; record another workload, too")
    decode, prompt, attention = _fit_device(steps)
    cost = CostModel(
        decode,
        prompt,
        prefill_pair_s=attention["prefill_pair_s"],
        context_token_s=attention["context_token_s"],
        shared_token_s=attention["shared_token_s"],
        gap_s=_gap_s(measured),
        **_captures(measured[0].result),
        host=_fit_host(steps),
    )
    return replace(cost, origin={**_origin(measured), "range": _range(steps), "residuals": _residuals(cost, steps)})


def _check_alike(measured: Sequence[Measured]) -> None:
    for name in (*SAME, "model"):
        values = [one.result["config"]["model"] if name == "model" else one.result[name] for one in measured]
        if any(value != values[0] for value in values):
            other = next(value for value in values if value != values[0])
            raise ConfigError(f"a fit takes benchmarks of one {name}; these have {values[0]!r} and {other!r}")


def _captures(result: Mapping[str, Any]) -> dict[str, Any]:
    """CostModel.captured. Where records do not tell, all small steps on a GPU were captured."""
    is_likely = not str(result["device"]).startswith("cpu") and result["config"]["engine"].get("cuda_graphs", True)
    captured = result.get("captured", {"decodes": is_likely, "prompts": True})
    return {
        "captures": captured["decodes"],
        "captures_prompts": captured["prompts"],
        "captured_prompt_tokens": captured.get("prompt_tokens", MOST_MIXED),
        "captured_joined_decodes": captured.get("joined_decodes", 0),
    }


@dataclass(frozen=True)
class _Steps:
    """The steps of all benchmarks that computed something, in columns.

    kind, num_tokens, is_captured: of their shapes. seconds: of the device. launch_s, before_s: of the host.
    """

    counts: Sequence[StepCounts]
    columns: Mapping[str, Column]
    shapes: Sequence[Any]

    @classmethod
    def of(cls, measured: Iterable[Measured]) -> _Steps:
        """The steps of these benchmarks, one benchmark after the other."""
        tables = [_columns(one) for one in measured]
        columns = {name: np.concatenate([columns[name] for _, columns, _ in tables]) for name in tables[0][1]}
        counts = [one for counts, _, _ in tables for one in counts]
        return cls(counts, columns, [one for _, _, shapes in tables for one in shapes])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @property
    def prompts(self) -> Column:
        """Marks steps with prompts."""
        return self["prefill_tokens"] > 0

    def of_kind(self, kind: str) -> Column:
        """Marks steps of a kind."""
        return np.array([shape.kind == kind for shape in self.shapes])

    def launch_bound(self) -> Column:
        """Marks steps that took the device as long as the host launched them."""
        is_captured = np.array([shape.is_captured for shape in self.shapes])
        return ~is_captured & (self["seconds"] < LAUNCH_BOUND * self["launch_s"])


def _columns(one: Measured) -> tuple[list[StepCounts], dict[str, Column], list[Any]]:
    steps = one.recording.steps
    own = {name: column[steps["prefill_tokens"] + steps["decode_rows"] > 0] for name, column in steps.items()}
    shared = own.setdefault("decode_shared_tokens", np.zeros_like(own["decode_rows"]))
    names = StepCounts._fields
    counts = [StepCounts(*values) for values in zip(*(own[name].tolist() for name in names), strict=True)]
    engine = one.result["config"]["engine"]
    made = StepShapes.of(*(engine[limit] for limit in LIMITS), **_captures(one.result))
    shapes = [made.shape(count) for count in counts]
    own["num_tokens"] = np.array([shape.num_tokens for shape in shapes], dtype=np.int64)
    own["own_tokens"] = own["decode_context_tokens"] - shared
    own["seconds"] = np.where(np.isnan(own["device_s"]), own["busy_s"], own["device_s"])
    own["before_s"] = own["plan_s"] + own["dispatch_s"] + own["commit_s"]
    own["launch_s"] = np.maximum(own["host_s"] - own["before_s"], 0)
    return counts, own, shapes


def _fit_device(steps: _Steps) -> tuple[Curve, Curve, dict[str, float]]:
    """Both curves and the coefficients of ATTENTION: one problem, as the kinds of steps have attention in common."""
    is_shown, blocks, smooth, all_knots = ~steps.launch_bound(), [], [], []
    if not (is_shown & steps.prompts).any():  # then only the host's time was measured
        is_shown |= steps.prompts
    for chosen in (~steps.prompts, steps.prompts):
        knots = knots_around(steps["num_tokens"][chosen & is_shown])
        blocks.append(segments(steps["num_tokens"], knots) * chosen[:, None])
        smooth.append(smoothness(knots, float(np.median(steps["seconds"][chosen]))))
        all_knots.append(knots)
    attention = np.stack([steps[name] for name in ATTENTION.values()], axis=1).astype(np.float64)
    matrix = np.concatenate([*blocks, attention], axis=1)
    found = solve(matrix[is_shown], steps["seconds"][is_shown], block_diagonal(smooth, matrix.shape[1]))
    middle, last = len(all_knots[0]), len(found) - len(ATTENTION)
    decode, prompt = curve_through(all_knots[0], found[:middle]), curve_through(all_knots[1], found[middle:last])
    return decode, prompt, dict(zip(ATTENTION, map(float, found[last:]), strict=True))


def _fit_host(steps: _Steps) -> HostCost:
    """Seconds of the host before the launch, and of the launch by kind of step."""
    names = ("decode_rows", "prefill_chunks", "prefill_tokens")
    before_s = steps["before_s"]
    matrix = np.stack([np.ones(len(before_s)), *(steps[name] for name in names)], axis=1).astype(np.float64)
    step_s, row_s, chunk_s, token_s = map(float, solve(matrix, before_s, np.zeros((0, matrix.shape[1]))))
    kinds = {kind: steps.of_kind(kind) for kind in KINDS_OF_STEPS}
    launches = {kind: _launch_s(steps, chosen) for kind, chosen in kinds.items() if chosen.any()}
    for kind, likely in ((PREFILL, MIXED), (MIXED, PREFILL), (CAPTURED, DECODE)):
        launches.setdefault(kind, launches.get(likely, 0.0))
    return HostCost(step_s, row_s, chunk_s, token_s, launches)


def _launch_s(steps: _Steps, chosen: Column) -> float:
    """The mean of a kind without outliers. If all of its steps are large, the device's queue was full and the host
    waited while launching; the value is then that of the shortest ones.
    """
    bound = chosen & steps.launch_bound()
    if any(steps.shapes[place].is_captured for place in np.flatnonzero(chosen)[:1]) or bound.sum() >= MANY:
        seconds = steps["launch_s"][bound if bound.any() else chosen]
        return float(seconds[seconds <= 3 * np.median(seconds)].mean())
    return float(np.quantile(steps["launch_s"][chosen], 0.1))


def _gap_s(measured: Sequence[Measured]) -> float:
    """Seconds that the device waits before a decode that was launched while the step before ran; 0 if there is none."""
    gaps: list[Column] = []
    for one in measured:
        steps = one.recording.steps
        is_ahead = steps["start_s"][1:] < steps["end_s"][:-1]
        decodes = (steps["prefill_tokens"] == 0) & (steps["decode_rows"] > 0)
        gaps.append(steps["idle_s"][1:][is_ahead & decodes[1:] & decodes[:-1]])
    known = np.concatenate(gaps)
    known = known[~np.isnan(known)]
    return float(np.median(known)) if len(known) else 0.0


def _origin(measured: Sequence[Measured]) -> dict[str, Any]:
    """The origin of the model, and what a simulation assumes by default."""
    first = measured[0].result
    sizes = [one.recording.num_blocks for one in measured]
    names = ("device", "kernels", "block_size", "cache_groups", "vocab_size", "overlap", "revision", "versions")
    keys = ("model", "sampler", "kernels", "tp", "pp", "dtype", "device")
    config = {key: first["config"].get(key) for key in keys}
    return {
        **{name: first.get(name) for name in names},
        "num_blocks": int(np.median(sizes)),
        "config": {**config, "engine": first["config"]["engine"]},
        "jobs": [list(one.result.get("overrides", ())) for one in measured],
    }


def _range(steps: _Steps) -> dict[str, dict[str, int]]:
    """For each curve the number of its steps, and the least and most tokens of a step."""
    curves = {"decode": steps["num_tokens"][~steps.prompts], "prompt": steps["num_tokens"][steps.prompts]}
    return {
        name: {"steps": len(tokens), "least": int(tokens.min()), "most": int(tokens.max())}
        for name, tokens in curves.items()
    }


def _residuals(cost: CostModel, steps: _Steps) -> dict[str, dict[str, float]]:
    """For each kind of step its count, the mean error of a step, and the error of their sum, in percent."""
    pairs = zip(steps.counts, steps.shapes, strict=True)
    device_s = np.array([cost.device_s(counts, shape) for counts, shape in pairs])
    launch_s = np.array([0.0 if shape.is_captured else cost.launch_s(shape) for shape in steps.shapes])
    expected, seconds = np.maximum(device_s, launch_s), np.maximum(steps["seconds"], 1e-9)
    found = {}
    for kind in KINDS_OF_STEPS:
        chosen = steps.of_kind(kind)
        if chosen.any():
            errors = expected[chosen] / seconds[chosen] - 1
            found[kind] = {
                "steps": int(chosen.sum()),
                "mean_error_percent": round(100 * float(np.abs(errors).mean()), 2),
                "sum_error_percent": round(100 * float(expected[chosen].sum() / seconds[chosen].sum() - 1), 2),
            }
    return found
