"""One rank's worker from what was chosen: load its part of the model, size the memory, allocate, capture.

The same for the only rank and for each of several; knows no processes.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hookline.core.assembly.choice import Choice, chosen
from hookline.core.checkpoint.load import load_checkpoint, load_source, random_weights
from hookline.core.contracts import Kernels, Model, ProcessorSpec, Runtime
from hookline.core.distributed.peer_ranks import with_copies, with_exchange
from hookline.core.errors import CapacityError
from hookline.core.plugin.blame import Blaming
from hookline.core.requests.logits_processing import Processing
from hookline.core.step.captured import graph_sizes, prompt_shapes
from hookline.core.worker.logits_pipeline import Pipeline
from hookline.core.worker.memory import GIB, allocate_cache, count_blocks
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.worker import Worker

EXTRA_BYTES_PER_LOGIT = 16
"""Logits as they are and in float32, counts of tokens, and a float32 scratch for scores."""

_NO_HOST_MEMORY = (
    "this machine's memory does not suffice while starting; lower engine.max_num_seqs, engine.max_model_len or "
    "engine.max_num_batched_tokens, or take a smaller model"
)


def build_worker(choice: Choice, processing: Processing) -> Worker:
    """The worker of the rank that `choice` is about; the other ranks have to build theirs at the same time.

    processing: the logits processors that are installed, the same on every rank.

    Raises: CheckpointError, ConfigError or CapacityError, each with the cause and the fix.
    """
    if choice.device.type == "cuda":
        torch.cuda.set_device(choice.device)  # kernels are launched on the current device
    try:
        kernels = make_kernels(choice)
        ranks = with_exchange(choice.ranks, kernels, choice.attention, choice.spec.hidden_size)
        choice = replace(choice, ranks=with_copies(ranks, choice.attention, choice.spec.hidden_size))
        return make_worker(choice, load_model(choice, kernels), kernels, processing)
    except torch.OutOfMemoryError as error:
        raise CapacityError(_out_of_memory(choice, error)) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise CapacityError(f"{_NO_HOST_MEMORY}: {str(error).partition('DefaultCPUAllocator: ')[2]}") from error


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


def make_worker(choice: Choice, model: Model, kernels: Kernels, processing: Processing) -> Worker:
    """Size the KV cache, put the rank together and capture its graphs."""
    attention = choice.attention
    sampler_entry = chosen(choice.config.sampler)
    sampler = sampler_entry.load()(choice.config.sampler.config)
    blaming = blaming_in_steps(choice, processing)

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
            blaming=blaming,
        )

    limits = attention.max_num_seqs, attention.max_num_batched_tokens, attention.max_model_len
    shapes = prompt_shapes(*limits) if choice.captures_prompts else []
    rehearsals = [lambda: worker(1).rehearse(attention)]
    if choice.uses_graphs:
        rehearsals += [lambda: worker(1).rehearse_graphs(attention, shapes), lambda: rehearse_extra_draws(choice)]
    num_blocks = count_blocks(choice.config.engine, choice.spec.num_layers, attention, rehearsals)
    ready = worker(choice.ranks.smallest(num_blocks))
    if choice.uses_graphs:
        sizes = graph_sizes(attention.max_num_seqs)
        ready.capture(attention, sizes, shapes, shares_prefixes=choice.shares_prefixes)
    return ready


def blaming_in_steps(choice: Choice, processing: Processing) -> Blaming:
    """Says whose code failed in a step, and what else took part: wrong results of one may only show in another."""
    entries = [chosen(choice.config.model), choice.kernels, chosen(choice.config.sampler)]
    part = ", ".join(f"{entry.kind}={entry.name}" for entry in entries)
    return Blaming([*entries, *(stage.entry for stage in processing.stages)], f"during a step with {part}")


def rehearse_extra_draws(choice: Choice) -> None:
    """Hold what graphs with logits processors and scores take, which are captured only when a request needs them."""
    num_logits = choice.attention.max_num_seqs * choice.spec.vocab_size
    torch.empty(num_logits * EXTRA_BYTES_PER_LOGIT, dtype=torch.uint8, device=choice.device)


def processor_spec(choice: Choice) -> ProcessorSpec:
    """Sizes for the logits processors; the last row of theirs is for padding."""
    sizes = choice.attention
    return ProcessorSpec(sizes.max_num_seqs + 1, choice.spec.vocab_size, sizes.max_model_len, sizes.device)


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
