"""From a validated configuration to an engine: load, size the memory, allocate, capture.

The only place that puts all four kinds together. What does not fit was refused by `core.choose` before this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from core.admission import EngineLimits
from core.block_pool import BlockPool
from core.choose import Choice, choose, chosen
from core.config import Config
from core.contracts import Kernels, Limits, Model, ProcessorSpec, Runtime
from core.engine import Engine
from core.errors import CapacityError
from core.graphs import graph_sizes
from core.memory import GIB, allocate_cache, count_blocks
from core.observers import Observers, make_observers
from core.pipeline import Pipeline
from core.plugin_blame import blames_plugins
from core.plugin_host import PluginHost
from core.prefill_graphs import prefill_sizes
from core.processing import Processing
from core.state import RequestTable
from core.weights import load_checkpoint, load_source, random_weights
from core.worker import Worker

logger = logging.getLogger("hookline")
EXTRA_BYTES_PER_LOGIT = 16
"""Logits as they are and in float32, counts of tokens, and a float32 scratch for scores."""


@dataclass(frozen=True)
class Built:
    """An engine, and what it was made of."""

    engine: Engine
    choice: Choice


@blames_plugins
def build_engine(config: Config, host: PluginHost) -> Built:
    """Make the engine a configuration describes.

    Raises: PluginError, ConfigError, CheckpointError or CapacityError, each with the cause and the fix.
    """
    observers = Observers(host.manager, make_observers(config.observers))
    choice = choose(config, host)
    try:
        kernels = make_kernels(choice)
        model = load_model(choice, kernels)
        processing = make_processing(choice, host)
        worker = make_worker(choice, model, kernels, processing)
    except torch.OutOfMemoryError as error:
        raise CapacityError(_out_of_memory(choice, error)) from error
    return Built(assemble(choice, observers, worker, processing), choice)


def make_kernels(choice: Choice) -> Kernels:
    """The kernels object of this rank."""
    config = choice.config.kernels.config
    if config is None and choice.kernels.config is not None:
        config = choice.kernels.config()
    kernels: Kernels = choice.kernels.load()(config, choice.attention)
    return kernels


def load_model(choice: Choice, kernels: Kernels) -> Model:
    """The model with its weights, from the checkpoint or at random."""
    option, checkpoint = choice.config.model, choice.checkpoint
    with torch.inference_mode():
        runtime = Runtime(choice.device, choice.attention.dtype, choice.ranks, kernels)
        model: Model = chosen(option).load()(checkpoint.config, runtime)
        if option.config.weights == "random":
            random_weights(model.weight_targets(), choice.config.seed)
        elif checkpoint.source is not None:
            load_source(checkpoint.reference, checkpoint.source, model.weight_targets())
        else:
            assert checkpoint.folder is not None
            load_checkpoint(checkpoint.folder, model.weight_targets())
    return model


def make_processing(choice: Choice, host: PluginHost) -> Processing:
    """The logits processors that are installed: the same on every rank."""
    return Processing.of(host.registry, choice.facts)


def make_worker(choice: Choice, model: Model, kernels: Kernels, processing: Processing) -> Worker:
    """Size the KV cache, put the rank together and capture its graphs."""
    attention = choice.attention
    sampler_entry = chosen(choice.config.sampler)
    sampler = sampler_entry.load()(choice.config.sampler.config)

    def worker(num_blocks: int) -> Worker:
        max_blocks = -(-attention.max_model_len // attention.block_size)
        return Worker(
            model,
            kernels,
            sampler,
            RequestTable(attention.max_num_seqs, max_blocks, attention.block_size, num_blocks, attention.device),
            allocate_cache(choice.spec.num_layers, num_blocks, attention),
            ranks=choice.ranks,
            vocab_size=choice.spec.vocab_size,
            shards_vocabulary=sampler_entry.needs.vocabulary_shards,
            pipeline=Pipeline(processing.stages, processor_spec(choice)),
        )

    prefills = prefill_sizes(attention) if choice.captures_prefills else []
    rehearsals = [lambda: worker(1).rehearse(attention)]
    if choice.uses_graphs:
        rehearsals += [lambda: worker(1).rehearse_graphs(attention, prefills), lambda: rehearse_extra_draws(choice)]
    ready = worker(count_blocks(choice.config.engine, choice.spec.num_layers, attention, rehearsals))
    if choice.uses_graphs:
        sizes = graph_sizes(attention.max_num_seqs)
        ready.capture(attention, sizes, prefills, shares_prefixes=choice.shares_prefixes)
    return ready


def rehearse_extra_draws(choice: Choice) -> None:
    """Hold what graphs with logits processors and scores take, which are captured only when a request needs them."""
    num_logits = choice.attention.max_num_seqs * choice.spec.vocab_size
    torch.empty(num_logits * EXTRA_BYTES_PER_LOGIT, dtype=torch.uint8, device=choice.device)


def processor_spec(choice: Choice) -> ProcessorSpec:
    """Sizes for the logits processors; the last row of theirs is for padding."""
    sizes = choice.attention
    return ProcessorSpec(sizes.max_num_seqs + 1, choice.spec.vocab_size, sizes.max_model_len, sizes.device)


def assemble(choice: Choice, observers: Observers, worker: Worker, processing: Processing) -> Engine:
    """The engine around a worker."""
    attention, config = choice.attention, choice.config
    plan = Limits(
        max_num_seqs=attention.max_num_seqs,
        max_num_batched_tokens=attention.max_num_batched_tokens,
        max_model_len=attention.max_model_len,
        block_size=attention.block_size,
        num_blocks=worker.num_blocks,
    )
    eos = frozenset(choice.checkpoint.eos_token_ids)
    timeout_s, vocab_size = config.engine.stall_timeout_s, choice.spec.vocab_size
    limits = EngineLimits(
        plan,
        vocab_size,
        timeout_s,
        eos,
        seed=config.seed,
        overlap=choice.overlaps,
        max_queued_requests=config.engine.max_queued_requests,
        max_queued_tokens=config.engine.max_queued_tokens,
        processing=processing,
        sampling_defaults=choice.checkpoint.sampling_defaults,
    )
    if limits.max_len < plan.max_model_len:
        logger.warning("the KV cache holds %d tokens, so no request gets longer than that", limits.max_len)
    scheduler = chosen(config.scheduler)
    return Engine(
        scheduler.load()(config.scheduler.config),
        worker,
        BlockPool(plan.num_blocks, plan.block_size, caching=config.engine.prefix_caching),
        limits,
        policy=scheduler.name,
        observers=observers,
        model_name=choice.checkpoint.reference,
        shares_prefixes=choice.shares_prefixes,
    )


def _out_of_memory(choice: Choice, error: torch.OutOfMemoryError) -> str:
    """What was being allocated, what was free, and which keys to lower."""
    free, total = torch.cuda.mem_get_info(choice.device)
    cause = str(error).partition(". GPU")[0].partition("\n")[0]
    engine = choice.config.engine
    return (
        f"the GPU's memory does not suffice while starting: {cause}; {free / GIB:.2f} of {total / GIB:.2f} GiB are "
        f"free now. Lower engine.max_num_batched_tokens={engine.max_num_batched_tokens} or "
        f"engine.max_num_seqs={engine.max_num_seqs}, free the GPU, or take a smaller model"
    )
