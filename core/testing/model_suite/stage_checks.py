"""Checks that a model with `runs_in_stages` can be cut into stages, with the results of the whole model.

Legend: T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import ModelSpec, SharedCache, Stage, WeightTarget
from hookline.core.testing.checks import check, check_close, check_form
from hookline.core.testing.model_suite.checked_attend import kept_by
from hookline.core.testing.model_suite.driver import Chunk, ModelDriver


def check_stages(model_class: Any, hf_config: Mapping[str, Any], chunk: Chunk, device: str, tolerance: float) -> None:
    """Check cuts between all layers, and before the last one; each stage must have its layers and tensors alone.

    A cut between a layer and the layer whose cache it shares is left out.

    Raises: AssertionError naming the fault.
    """
    whole = ModelDriver(model_class, hf_config, device=device)
    whole_TV, num_layers = whole.logits(chunk), whole.spec.num_layers
    for counts in ([1] * num_layers, [num_layers - 1, 1]):
        if is_parting(whole.spec, counts):
            continue
        ends = list(accumulate(counts))
        stages = [Stage(index, len(counts), end - counts[index], end) for index, end in enumerate(ends)]
        drivers = [ModelDriver(model_class, hf_config, device=device, stage=stage) for stage in stages]
        check_tensors(whole.targets, [driver.targets for driver in drivers])
        logits_TV = _logits(stages, drivers, chunk)
        check_close(f"logits of stages of {counts} layers", logits_TV, whole_TV, tolerance)


def is_parting(spec: ModelSpec, layer_counts: Sequence[int]) -> bool:
    """Whether stages with these numbers of layers separate a layer from the one whose cache it shares."""
    stage_of = [stage for stage, count in enumerate(layer_counts) for _ in range(count)]
    shared = [(index, one.layer) for index, one in enumerate(spec.cache_layers) if isinstance(one, SharedCache)]
    return any(stage_of[index] != stage_of[owner] for index, owner in shared)


@torch.inference_mode()
def _logits(stages: Sequence[Stage], drivers: Sequence[ModelDriver], chunk: Chunk) -> Tensor:
    stream_TD: Tensor | None = None
    for stage, driver in zip(stages, drivers, strict=True):
        batch = driver.batch([chunk])
        attend: Any = driver.attend_of(batch)
        attend.stream_TD = stream_TD
        stream_TD = driver.model.forward(batch.token_ids_T, batch.positions_T, attend)
        called, caches = sorted({layer for layer, _ in attend.called}), driver.spec.cache_layers
        mine = [layer for layer in stage.layers(len(caches)) if kept_by(caches[layer])]
        check(called == mine, f"stage {stage.index} called attend for layers {called} and has {mine}")
        shape = (batch.num_tokens, driver.spec.hidden_size)
        check_form("what forward of a stage returns", stream_TD, shape, driver.attention.dtype)
    logits_TV: Tensor = drivers[-1].model.logits(stream_TD)
    return logits_TV


def check_tensors(whole: Mapping[str, WeightTarget], parts: Sequence[Mapping[str, WeightTarget]]) -> None:
    """Every tensor is read by one stage; by the first and the last if these share it; names of others are known."""
    for name, target in whole.items():
        holders = [index for index, part in enumerate(parts) if name in part and part[name].view is not None]
        allowed = [[0], [len(parts) - 1], [0, len(parts) - 1], *([index] for index in range(len(parts)))]
        if target.view is not None:
            check(holders in allowed, f"{name} is read by stages {holders} of {len(parts)}")
        for index, part in enumerate(parts):
            ignored = tuple(one[:-1] for one in part if one.endswith("*"))
            check(name in part or name.startswith(ignored), f"stage {index} does not know {name}, which is not its own")
