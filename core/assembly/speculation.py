"""Makes the drafter of an engine, and shows it the model: its sizes, its checkpoint's tensors for a head, its draws.

A head is built whole in the engine's process, on the device of rank 0 and beside that rank's part of the model.
Legend: N rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hookline.core.assembly.resolve import ResolvedConfig, chosen, config_of, refuse, refuse_unmet
from hookline.core.assembly.worker import finish_weights, kernels_of, make_kernels, runtime_of
from hookline.core.checkpoint.checkpoint import Checkpoint, resolve
from hookline.core.checkpoint.dequantised import with_dequantised
from hookline.core.checkpoint.load import load_checkpoint, random_weights
from hookline.core.checkpoint.stacked_experts import as_named
from hookline.core.contracts import (
    WHOLE_MODEL,
    DrafterSpec,
    HeadAttention,
    ModelSpec,
    Runtime,
    Sampler,
    SamplingBatch,
    WeightTarget,
)
from hookline.core.distributed.ranks import ALONE
from hookline.core.errors import CapacityError, CheckpointError
from hookline.core.layers.quantized import QuantizedWeights
from hookline.core.plugin.needs import unfit_kernels
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.structured_output import StructuredOutput
from hookline.core.speculation.rank import draft_on_device
from hookline.core.speculation.speculation import Speculation
from hookline.core.step.executor import SizedExecutor
from hookline.core.worker.graphs.cuda_graph import GraphPool, record
from hookline.core.worker.startup.late_work import not_late
from hookline.core.worker.startup.memory import allocate_cache
from hookline.core.worker.worker import Worker

logger = logging.getLogger("hookline")


def make_speculation(
    resolved: ResolvedConfig,
    limits: EngineLimits,
    structured_output: StructuredOutput | None,
    executor: SizedExecutor,
) -> Speculation | None:
    """The drafts of an engine; None without a drafter.

    Raises: PluginError, if its model keeps states of all tokens before or hidden states are asked for: then a wrong
    draft could not be taken back.
    """
    option, plan = resolved.config.drafter, limits.plan
    if option.entry is None:
        return None
    refuse_unmet(option.entry, resolved.facts)
    if resolved.groups.has_states:
        told = "layers of this model keep a state, from which a wrong draft cannot be taken back; leave the drafter out"
        refuse(option.entry, [told])
    if resolved.config.engine.taps:
        told = "engine.taps is set, and observers would get hidden states of wrong drafts; leave the drafter out"
        refuse(option.entry, [told])
    facts, target = resolved.facts, TargetModel(resolved, plan.num_blocks)
    spec = DrafterSpec(limits.vocab_size, plan.max_num_seqs, plan.max_model_len, facts.device, facts.dtype, target)
    try:
        with not_late():
            drafter = option.entry.load()(option.config, spec)
            on_device = isinstance(executor, Worker) and draft_on_device(executor, drafter, str(option.entry))
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"drafter '{option.name}' does not fit into the GPU's memory beside the model and its KV cache; lower "
            "engine.memory_fraction"
        ) from error
    logger.info(
        "drafter '%s': up to %d drafts for a request in a step; steps with drafts %s",
        *(option.name, drafter.k, "overlap where the device drafts" if on_device else "do not overlap"),
    )
    return Speculation(
        drafter,
        str(option.entry),
        limits.extensions,
        limits.vocab_size,
        structured_output,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        weighs_costs=resolved.uses_graphs,
        on_device=on_device,
    )


class TargetModel:
    """Implements hookline.core.contracts.DraftTarget. Allocates nothing before it is asked to.

    num_blocks: of the model's KV cache; None: as many as the most and longest requests hold.
    """

    def __init__(self, resolved: ResolvedConfig, num_blocks: int | None = None) -> None:
        model = chosen(resolved.config.model)
        self._resolved, self._opened, self._num_blocks = resolved, dict[str, Checkpoint](), num_blocks
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
            stored, factory = opened.stored, self.runtime.weights
            if not checkpoint and isinstance(factory, QuantizedWeights) and not factory.from_floats:
                stored = with_dequantised(stored, targets, factory.quantization, factory.form)
            else:
                stored = as_named(stored, targets)
            load_checkpoint(opened.folder, targets, stored={name: stored[name] for name in targets if name in stored})
        if not checkpoint:
            finish_weights(self.runtime)

    @torch.inference_mode()
    def attention(self, spec: ModelSpec, num_rows: int, num_ahead: int) -> HeadAttention:
        """See DraftTarget: the model's kernels, and room for as many tokens as its own cache has."""
        resolved, sizes = self._resolved, self._resolved.attention
        head_dim = spec.head_dim if spec.value_dim is None else None
        facts = replace(resolved.facts, head_dim=head_dim, attention=spec.attention_features, kv_dtype=None)
        refuse(resolved.kernels, unfit_kernels(resolved.kernels.needs, facts))
        own = replace(
            sizes,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            value_dim=spec.value_dim,
            kv_dtype=None,
            max_num_seqs=num_rows,
            max_model_len=sizes.max_model_len + num_ahead,
        )
        num_blocks = sizes.max_num_seqs * -(-own.max_model_len // own.block_size)
        if self._num_blocks is not None:  # and for each request the block that it fills, and those ahead
            own_blocks = sizes.max_num_seqs * (1 + -(-num_ahead // own.block_size))
            num_blocks = min(num_blocks, self._num_blocks + own_blocks)
        kernels = kernels_of(resolved, own)
        return HeadAttention(own, kernels, allocate_cache(1, num_blocks, own)[:, 0])

    def sample(self, logits_NV: Tensor, params: SamplingBatch) -> Tensor:
        """See DraftTarget."""
        return self._sampler.sample(logits_NV, params)

    @property
    def captures(self) -> bool:
        """See DraftTarget."""
        return self._resolved.uses_graphs

    def capture(self, step: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """See DraftTarget."""
        graph, written = record(step, self._pool, self._resolved.device, nullcontext())
        return graph.replay, written

    @cached_property
    def _pool(self) -> GraphPool:
        return GraphPool()

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
