"""Serves requests of all kinds on a card that is not there, and says what would have failed or waited there.

What a GPU alone runs is not run by tests on a CPU otherwise: the start with its graphs and warm-up, and launches, which
may not wait for the device. A process of its own, since it pretends to have a card.
Questions (tests/asked_script.py): a list of configurations, each the overrides of `python -m core.run`, and whether
whoever sends numbers to the card waits for it.
"""

from __future__ import annotations

import importlib
import traceback
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from hookline import LLM, PoolingParams, SamplingParams, StructuredOutputs
from hookline.core.assembly import worker as assembly
from hookline.core.config.compose import compose
from hookline.core.engine.engine import Engine
from hookline.core.plugin.host import PluginHost
from hookline.core.prebuild.dry_run import unloaded_model
from hookline.core.prebuild.pretended import CARDS, pretended
from hookline.core.run.settings import RunKeys, validate_run
from hookline.core.worker import request_table
from hookline.core.worker.worker import Worker
from tests.asked_script import answer_all
from tests.launched_kernels import IMPORTED

GREEDY = {"temperature": 0.0, "ignore_eos": True}
KINDS: list[dict[str, Any]] = [
    {},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "presence_penalty": 0.1},
    {"logprobs": 2},
    {"logprobs": 0, "prompt_logprobs": 3},
    {"min_tokens": 3, "stop_token_ids": (7,)},
    {"logit_bias": {3: 1.0}, "bad_words": ("x", "import os")},
    {"structured_outputs": StructuredOutputs(regex="(.|\\n){0,40}")},
]


class Watched(TorchFunctionMode):
    """Notes copies that would wait for a card, and those between tensors of unlike sizes."""

    is_ready = is_launching = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "copy_":
            assert torch.broadcast_shapes(args[0].shape, args[1].shape) == args[0].shape, "a copy of another size"
            self.check(args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2]))
        if name == "numpy":
            assert not (self.is_launching and args[0].is_cuda), "numpy() of a tensor on the card"
            return np.zeros(tuple(args[0].shape), dtype=str(args[0].dtype).removeprefix("torch."))
        found = func(*args, **kwargs)
        if name in ("to", "cuda", "cpu"):
            self.check(found, args[0], kwargs.get("non_blocking", False))
        return found

    def check(self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> None:
        assert not (self.is_launching and to.device != source.device and not non_blocking), (
            "a copy that waits for the card"
        )


@contextmanager
def watching_launches(watched: Watched) -> Any:
    """Watch what workers do while they launch steps."""
    inner = {name: getattr(Worker, name) for name in ("launch", "release")}

    def outer(name: str) -> Any:
        def call(*args: Any) -> Any:
            watched.is_launching = watched.is_ready
            try:
                return inner[name](*args)
            finally:
                watched.is_launching = False

        return call

    for name in inner:
        setattr(Worker, name, outer(name))
    try:
        yield
    finally:
        for name, method in inner.items():
            setattr(Worker, name, method)


def joining_faults(engine: Engine, prompts: list[list[int]]) -> list[str]:
    """What is wrong when plain requests arrive one in each step, so that others decode then."""
    outputs, num_joined = [], 0
    for prompt in [*prompts, *prompts]:
        engine.add(prompt, SamplingParams(max_tokens=8, **GREEDY))
        outputs += engine.step()
        last = engine.last_stats
        num_joined += last is not None and last.num_prefill_tokens > 0 and last.num_decode_tokens > 0
    while engine.has_work:
        outputs += engine.step()
    faults = [one.error for one in outputs if one.error]
    joins = engine.limits.plan.joining.max_decodes > 0
    return [*faults, "no decode joined a prompt"] if joins and not num_joined else faults


def serve(overrides: list[str], host: PluginHost, watched: Watched) -> list[str]:
    """The faults of one engine: errors of its requests, with the place."""
    given = ["device=cuda", "engine.num_blocks=512", *overrides]
    config = validate_run(compose(given, host, RunKeys)[0].tree, host).config
    longest = (config.engine.max_model_len or 0) - 12
    prompts = [list(range(1, 3 + 7 * index))[:longest] for index in range(len(KINDS))]
    faults = []
    with LLM.from_config(config, host) as llm:
        for kinds in (KINDS, KINDS, [{}] * 3, KINDS[:3] * 3, KINDS[-1:] * 2):
            params = [SamplingParams(max_tokens=8, **GREEDY, **kind) for kind in kinds]
            outputs = llm.generate((prompts * 2)[: len(kinds)], params)
            faults += [f"{kind}: {one.error}" for kind, one in zip(kinds, outputs, strict=True) if one.error]
            pooling = [PoolingParams(kind, normalize=kind == "mean") for kind in ("last", "mean", "cls")]
            faults += [one.error for one in llm.embed(prompts[:3], pooling) if one.error]
            watched.is_ready = True  # the first of each kind made processors, poolers and graphs
        faults += joining_faults(llm.engine, prompts)
    watched.is_ready = False
    return faults


def faults_of(configurations: list[list[str]], waits: bool) -> list[list[str]]:
    """The faults of each."""
    host, watched, found = PluginHost.load(), Watched(), []
    if waits:
        request_table.on_device = lambda array, device: torch.from_numpy(array).to(device)
    assembly.load_model = lambda resolved, kernels, read: unloaded_model(resolved, kernels)
    with pretended(CARDS["h200"], lambda *_: None), watched, watching_launches(watched):
        for overrides in configurations:
            try:
                faults = serve(overrides, host, watched)
            except BaseException as error:
                faults = ["".join(traceback.format_exception(error))[-2500:]]
                watched.is_ready = False
            found.append(faults)
    return found


if __name__ == "__main__":
    for name in IMPORTED:
        importlib.import_module(name)
    answer_all(faults_of)
