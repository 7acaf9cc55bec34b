"""Device time of a decode step beside the time in which the card could read and write the bytes of that step.

    python tools/bench_decode.py model=gemma3_4b model.weights=random
    python tools/bench_decode.py --rows 32 --prompt 512 --tokens 128 model=qwen3_8b model.weights=random
    python tools/bench_decode.py --kernels model=qwen3_8b model.weights=random   # and what each kernel adds to a step

The floor counts weights (of an embedding that is no head, and of experts, what the rows need), the keys and values that
queries see, and recurrent states, which are read and written. Further arguments are overrides of conf/bench.yaml.

A kernel that is launched early waits inside for the one before it, so its own duration holds that wait. --kernels
counts what each adds behind the end of all that began before it; times in which nothing runs are idle.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile

from hookline import SamplingParams
from hookline.core.bench.command import make_load, run_load
from hookline.core.bench.facts import describe, describe_engine, first_token_s
from hookline.core.bench.metrics import summarise
from hookline.core.bench.settings import BenchKeys
from hookline.core.bench.slo import Slo
from hookline.core.bench.workload import WorkloadConfig
from hookline.core.checkpoint.checkpoint import resolve_model
from hookline.core.cli.command import guarded
from hookline.core.config.compose import compose
from hookline.core.config.settings import ENGINE_KEYS, validate
from hookline.core.contracts import FullAttention, ModelSpec, RecurrentState, SharedCache, SlidingWindow, WeightTarget
from hookline.core.engine.engine import Engine
from hookline.core.frontend.llm import LLM
from hookline.core.plugin.host import PluginHost
from hookline.core.util.garbage import settled

TRACED_STEPS = 32
BYTES_PER_S = 4.2e12
"""What an H200 reads."""
IDLE = "(nothing)"
NAME_WIDTH = 72


def step_bytes(
    model: Any, hf_config: Mapping[str, Any], rows: int, context: float, dtype: torch.dtype
) -> dict[str, float]:
    """Bytes of a decode step of so many rows that see `context` tokens: of weights, keys and values, and states."""
    spec: ModelSpec = type(model).spec(hf_config)
    seen = sum(_seen(spec, layer, context) for layer in range(spec.num_layers))
    is_latent = spec.value_dim is not None  # values are part of the keys
    states = (_state_bytes(one, dtype) for one in spec.cache_layers if isinstance(one, RecurrentState))
    with FakeTensorMode(allow_non_fake_inputs=True):  # quantised ones are allocated anew, and the cache has the memory
        targets = model.weight_targets()
    return {
        "weights": weight_bytes(targets, hf_config, rows),
        "cache": rows * seen * (2 - is_latent) * spec.num_kv_heads * spec.head_dim * dtype.itemsize,
        "states": rows * sum(states),
    }


def weight_bytes(targets: Mapping[str, WeightTarget], hf_config: Mapping[str, Any], rows: int) -> float:
    """Bytes of the weights that so many tokens need: all, but for rows of an embedding, and experts nobody chose."""
    found: dict[tuple[int, int, int], tuple[str, int]] = {}
    for name, target in targets.items():
        for view in (one.view for one in target.pieces if one.view is not None):
            # A storage may have experts that every token takes beside those it chooses.
            place = view.untyped_storage()._cdata, int(view.storage_offset()), view.nbytes
            found.setdefault(place, (name, view.nbytes))
    is_tied = not any("lm_head" in name for name, _ in found.values())
    total = 0.0
    for name, num_bytes in found.values():
        if "embed_tokens" in name and not is_tied:
            continue
        total += num_bytes * (_chosen(hf_config, rows) if ".experts." in name else 1)
    return total


def _chosen(hf_config: Mapping[str, Any], rows: int) -> float:
    """The share of experts that some of these tokens take, if each takes any as likely as another."""
    counts = (hf_config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    num_experts = next(filter(None, counts), 1)
    num_chosen = hf_config.get("num_experts_per_tok") or hf_config.get("top_k_experts") or num_experts
    return 1 - (1 - num_chosen / num_experts) ** rows


def _seen(spec: ModelSpec, layer: int, context: float) -> float:
    """Tokens whose keys and values a query of this layer sees."""
    kept = spec.cache_layers[layer]
    if isinstance(kept, SharedCache):
        return _seen(spec, kept.layer, context)
    if isinstance(kept, SlidingWindow):
        return min(context, kept.num_tokens)
    return context if isinstance(kept, FullAttention) else 0


def _state_bytes(state: RecurrentState, dtype: torch.dtype) -> int:
    """Of one request in one layer, read and written."""
    sizes = ((tensor.shape, getattr(torch, tensor.dtype) if tensor.dtype else dtype) for _, tensor in state.tensors)
    return 2 * sum(torch.Size(shape).numel() * kind.itemsize for shape, kind in sizes)


@dataclass
class Added:
    """launches: how many. added_us: beyond the end of what began before. own_us: from each one's begin to its end."""

    launches: int = 0
    added_us: float = 0.0
    own_us: float = 0.0


def added_times(spans: Iterable[tuple[str, float, float]]) -> dict[str, Added]:
    """By name, the largest first, of (name, begin, end) in microseconds; IDLE for gaps. They sum up to the whole."""
    found: dict[str, Added] = {}
    reached: float | None = None

    def count(name: str, added_us: float, own_us: float) -> None:
        one = found.setdefault(name, Added())
        one.launches, one.added_us, one.own_us = one.launches + 1, one.added_us + added_us, one.own_us + own_us

    for name, begin, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        reached = begin if reached is None else reached
        if begin > reached:
            count(IDLE, begin - reached, begin - reached)
        count(name, max(0.0, end - max(begin, reached)), end - begin)
        reached = max(reached, end)
    return dict(sorted(found.items(), key=lambda item: -item[1].added_us))


def traced_decodes(engine: Engine, device: torch.device, prompts: list[list[int]], num_steps: int) -> dict[str, Added]:
    """Times of so many steps in which all of these requests decode; they end then.

    On a CPU what is traced are torch's operations.
    Raises: ValueError if they never decode together.
    """
    most = engine.limits.plan.max_model_len
    params = [SamplingParams(temperature=0.6, max_tokens=most - len(one), ignore_eos=True) for one in prompts]
    ids = [engine.add(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    before = engine.last_stats  # of a run before this one
    while engine.last_stats is before or not _all_decode(engine, len(prompts)):
        if not engine.has_work:
            raise ValueError(f"{len(prompts)} requests never decoded in one step: raise engine.max_num_seqs")
        engine.step()
    _finish(device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as trace:
        for _ in range(num_steps):
            engine.step()
            if not _all_decode(engine, len(prompts)):
                raise ValueError(f"{len(prompts)} requests do not go on decoding in one step: they need more blocks")
        _finish(device)
    engine.abort(ids)
    while engine.has_work:
        engine.step()
    events = [event for event in trace.events() if (event.device_type.name == "CUDA") == on_gpu]
    return added_times((event.name, event.time_range.start, event.time_range.end) for event in events)


def _all_decode(engine: Engine, num_requests: int) -> bool:
    stats = engine.last_stats
    return stats is not None and stats.num_decode_tokens == num_requests and not stats.num_prefill_tokens


def table(found: dict[str, Added], num_steps: int) -> list[str]:
    """Lines: of each kernel and a step, how often it was launched, what it added, its own duration, its share."""
    whole_us = sum(one.added_us for one in found.values())
    lines = [f"{'kernel':{NAME_WIDTH}} launches   added us     own us  share"]
    for name, one in found.items():
        each = f"{one.launches / num_steps:8.1f} {one.added_us / num_steps:10.1f} {one.own_us / num_steps:10.1f}"
        lines.append(f"{name[:NAME_WIDTH]:{NAME_WIDTH}} {each} {100 * one.added_us / whole_us:5.1f}%")
    return [*lines, f"{'a step':{NAME_WIDTH}} {'':8} {whole_us / num_steps:10.1f}"]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run(options: argparse.Namespace, arguments: list[str]) -> int:
    host = PluginHost.load()
    tree = compose(arguments, host, BenchKeys, "bench")[0].tree
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    lengths: dict[str, Any] = {"prompt_len": [options.prompt] * 2, "output_len": [options.tokens] * 2}
    workload = WorkloadConfig(num_prompts=options.rows, **lengths)
    with LLM.from_config(config, host) as llm, settled():
        first_token_s(llm)
        runs = [summarise(run_load(llm.engine, workload, repetition), Slo()) for repetition in range(tree["repeats"])]
        decodes = [one["step_times"]["decode"] for one in runs]
        runner: Any = llm.engine.executor
        model, dtype = runner.runner.model, runner.runner.kv_layers[0].dtype
        hf_config = resolve_model(llm.config.model.config, type(model)).config
        context = options.prompt + options.tokens / 2  # the first token is the prompts' step's
        num_bytes = step_bytes(model, hf_config, options.rows, context, dtype)
        first, best = decodes[0]["device_ms"], min(one["device_ms"] for one in decodes)
        floor_ms = 1000 * sum(num_bytes.values()) / BYTES_PER_S
        found = {"rows": options.rows, "context": context, "device_ms": best, "first_device_ms": first}
        found |= {"floor_ms": round(floor_ms, 3), "bytes": num_bytes, "late_work": dict(llm.engine.late_work)}
        if options.kernels:
            load = make_load(workload, llm.engine.limits.vocab_size, tree["repeats"])
            prompts = [list(request.tokens) for request in load.requests]
            device, num_steps = runner.runner.kv_layers[0].device, min(TRACED_STEPS, options.tokens - 8)
            times = traced_decodes(llm.engine, device, prompts, num_steps)
            found["kernels"] = {name: asdict(one) for name, one in times.items()}
            print(*table(times, num_steps), sep="\n")
        print(json.dumps({**describe(tree), **describe_engine(llm), **found}))
    parts = " + ".join(f"{name} {size / 1e9:.2f}" for name, size in num_bytes.items())
    print(f"{options.rows} rows that see {context:g} tokens: {parts} GB at {BYTES_PER_S / 1e12} TB/s")
    print(f"{floor_ms:.3f} ms, device {best:.3f} ms a step ({100 * floor_ms / best:.1f} %), first run {first:.3f}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that each request asks for")
    parser.add_argument("--kernels", action="store_true", help="trace some steps: what each kernel adds to them")
    options, arguments = parser.parse_known_args()
    if options.kernels and options.tokens < 16:
        parser.error("--kernels needs --tokens 16 or more")
    return guarded(partial(run, options), arguments)


if __name__ == "__main__":
    sys.exit(main())
