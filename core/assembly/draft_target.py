"""The model of an engine as drafters see it: its sizes, its checkpoint's tensors for a head, and its draws.

A head is built whole in the engine's process, on the device of rank 0 and beside that rank's part of the model.
Legend: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hookline.core.assembly.resolve import ResolvedConfig, chosen, config_of
from hookline.core.assembly.worker import finish_weights, make_kernels, runtime_of
from hookline.core.checkpoint.checkpoint import Checkpoint, resolve
from hookline.core.checkpoint.dequantised import with_dequantised
from hookline.core.checkpoint.load import load_checkpoint, random_weights
from hookline.core.checkpoint.stacked_experts import as_named
from hookline.core.contracts import WHOLE_MODEL, DraftRow, Runtime, Sampler, SamplingBatch, WeightTarget
from hookline.core.distributed.ranks import ALONE
from hookline.core.errors import CheckpointError
from hookline.core.layers.quantized import QuantizedWeights


class TargetModel:
    """Implements hookline.core.contracts.DraftTarget. Allocates nothing before it is asked to."""

    def __init__(self, resolved: ResolvedConfig) -> None:
        model = chosen(resolved.config.model)
        self._resolved, self._opened = resolved, dict[str, Checkpoint]()
        self.spec, self.model_class = resolved.spec, model.load()
        self.hf_config: Mapping[str, Any] = resolved.checkpoint.config
        self.checkpoint = resolved.checkpoint.reference
        self.is_random = resolved.config.model.config.weights == "random"

    def config_of(self, checkpoint: str) -> Mapping[str, Any]:
        """See DraftTarget."""
        return config_of(checkpoint)

    def shapes(self, checkpoint: str = "") -> Mapping[str, tuple[int, ...]]:
        """See DraftTarget."""
        return {} if self.is_random and not checkpoint else self._checkpoint(checkpoint).shapes()

    @cached_property
    def runtime(self) -> Runtime:
        """See DraftTarget."""
        made = runtime_of(self._resolved, make_kernels(self._resolved))
        return replace(made, ranks=ALONE, stage=WHOLE_MODEL)

    @torch.inference_mode()
    def fill(self, targets: Mapping[str, WeightTarget], checkpoint: str = "") -> None:
        """See DraftTarget."""
        if self.is_random and not checkpoint:
            random_weights(targets, self._resolved.config.seed)
        else:
            opened = self._checkpoint(checkpoint)
            if opened.folder is None or opened.source is not None:
                raise CheckpointError(f"heads of drafters are read from safetensors, which {opened.reference} is not")
            stored, factory = as_named(opened.stored, targets), self.runtime.weights
            if not checkpoint and isinstance(factory, QuantizedWeights) and not factory.from_floats:
                stored = with_dequantised(stored, targets, factory.quantization, factory.form)
            load_checkpoint(opened.folder, targets, stored={name: stored[name] for name in targets if name in stored})
        if not checkpoint:
            finish_weights(self.runtime)

    @torch.inference_mode()
    def draw(self, logits_NV: Tensor, rows: Sequence[DraftRow], ahead: int) -> list[int]:
        """See DraftTarget."""
        device = logits_NV.device
        asked = [row.params.temperature for row in rows]
        temperatures = [1.0 if temperature is None else temperature for temperature in asked]
        params = SamplingBatch(
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            torch.tensor([row.seed for row in rows], device=device),
            torch.tensor([len(row.tokens) + ahead - 1 for row in rows], device=device),
            all_greedy=not any(temperatures),
        )
        drawn: list[int] = self._sampler.sample(logits_NV.float(), params).tolist()
        return drawn

    @cached_property
    def _sampler(self) -> Sampler:
        option = self._resolved.config.sampler
        sampler: Sampler = chosen(option).load()(option.config)
        return sampler

    def _checkpoint(self, reference: str) -> Checkpoint:
        if not reference:
            return self._resolved.checkpoint
        if reference not in self._opened:
            self._opened[reference] = resolve(reference)
        return self._opened[reference]
