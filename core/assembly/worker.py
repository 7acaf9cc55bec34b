"""Builds one rank's worker: load its part of the model, size the memory, allocate, capture.

The same for the only rank and for each of several; knows no processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from hookline.core.assembly.poolers import pooler_makers
from hookline.core.assembly.resolve import ResolvedConfig, chosen
from hookline.core.checkpoint.headless import fitted
from hookline.core.checkpoint.load import load_checkpoint, load_source, random_weights, refuse_other_sizes
from hookline.core.checkpoint.locate import locate
from hookline.core.contracts import Kernels, Model, ProcessorSpec, Runtime, TokenTexts
from hookline.core.distributed.peer_ranks import with_copies, with_exchange
from hookline.core.errors import CapacityError, StepFault
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.registry import Entry
from hookline.core.requests.logits_processing import Processing
from hookline.core.step.captured import graph_sizes, prompt_shapes
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.codec_texts import token_texts
from hookline.core.worker.layer_taps import LayerTaps
from hookline.core.worker.logits_pipeline import Pipeline
from hookline.core.worker.memory import GIB, allocate_cache, count_blocks
from hookline.core.worker.model_runner import ModelRunner
from hookline.core.worker.pooling import PooledStates
from hookline.core.worker.request_table import RequestTable
from hookline.core.worker.step_checks import StepChecks
from hookline.core.worker.worker import Worker

EXTRA_BYTES_PER_LOGIT = 16
"""The logits in their own dtype and in float32, counts of tokens, and float32 scratch for scores."""

_NO_HOST_MEMORY = (
    "this machine's memory does not suffice while starting; lower engine.max_num_seqs, engine.max_model_len or "
    "engine.max_num_batched_tokens, or take a smaller model"
)


def build_worker(resolved: ResolvedConfig, processing: Processing, poolers: Sequence[Entry] = ()) -> Worker:
    """The worker of the rank that `resolved` is about; the other ranks have to build theirs at the same time.

    processing: the logits processors that are installed, the same on every rank; poolers: likewise.

    Raises: CheckpointError, ConfigError or CapacityError, each with the cause and the fix.
    """
    if resolved.device.type == "cuda":
        torch.cuda.set_device(resolved.device)  # kernels are launched on the current device
    try:
        kernels = make_kernels(resolved)
        ranks = with_exchange(resolved.ranks, kernels, resolved.attention, resolved.spec.hidden_size)
        resolved = replace(resolved, ranks=with_copies(ranks, resolved.attention, resolved.spec.hidden_size))
        return make_worker(resolved, load_model(resolved, kernels), kernels, processing, poolers)
    except torch.OutOfMemoryError as error:
        raise CapacityError(_out_of_memory(resolved, error)) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise CapacityError(f"{_NO_HOST_MEMORY}: {str(error).partition('DefaultCPUAllocator: ')[2]}") from error


def make_kernels(resolved: ResolvedConfig) -> Kernels:
    """The kernels object of this rank."""
    config = resolved.config.kernels.config
    if config is None and resolved.kernels.config is not None:
        config = resolved.kernels.config()
    kernels: Kernels = resolved.kernels.load()(config, resolved.attention)
    return kernels


def load_model(resolved: ResolvedConfig, kernels: Kernels) -> Model:
    """The model with its weights, from the checkpoint or at random."""
    option, checkpoint = resolved.config.model, resolved.checkpoint
    with torch.inference_mode():
        if option.config.weights != "random":
            refuse_other_sizes(checkpoint.reference, checkpoint.shapes(), resolved.spec)
        runtime = Runtime(resolved.device, resolved.attention.dtype, resolved.ranks, kernels, option.config)
        model: Model = chosen(option).load()(checkpoint.config, runtime)
        if option.config.weights == "random":
            random_weights(model.weight_targets(), resolved.config.seed)
        elif checkpoint.source is not None:
            load_source(checkpoint.reference, checkpoint.source, fitted(model.weight_targets(), checkpoint))
        else:
            assert checkpoint.folder is not None
            load_checkpoint(checkpoint.folder, fitted(model.weight_targets(), checkpoint), stored=checkpoint.stored)
    return model


def make_worker(
    resolved: ResolvedConfig, model: Model, kernels: Kernels, processing: Processing, poolers: Sequence[Entry] = ()
) -> Worker:
    """Size the KV cache, put the rank together and capture its graphs."""
    attention = resolved.attention
    sampler_entry = chosen(resolved.config.sampler)
    sampler = sampler_entry.load()(resolved.config.sampler.config)
    blaming = blaming_in_steps(resolved, processing)

    def worker(num_blocks: int) -> Worker:
        max_blocks = -(-attention.max_model_len // attention.block_size)
        runner = ModelRunner(
            model,
            kernels,
            sampler,
            RequestTable(attention.max_num_seqs, max_blocks, attention.block_size, num_blocks, attention.device),
            allocate_cache(resolved.spec.num_layers, num_blocks, attention),
            ranks=resolved.ranks,
            vocab_size=resolved.spec.vocab_size,
            shards_vocabulary=sampler_entry.needs.vocabulary_shards,
            pipeline=Pipeline(processing.stages, processor_spec(resolved), partial(rank_token_texts, resolved)),
            checks=StepChecks({entry.kind: str(entry) for entry in entries_in_steps(resolved)}),
        )
        num_rows, device = attention.max_num_seqs + 1, attention.device
        runner.pooled_states = PooledStates(pooler_makers(resolved, poolers, runner), num_rows, device)
        if resolved.config.engine.taps:
            runner.tap = LayerTaps(resolved.config.engine.taps)
        return Worker(runner, blaming=blaming)

    limits = attention.max_num_seqs, attention.max_num_batched_tokens, attention.max_model_len
    shapes = prompt_shapes(*limits) if resolved.captures_prompts else []
    rehearsals = [lambda: worker(1).profile_run(attention)]
    if resolved.uses_graphs:
        rehearsals += [lambda: worker(1).profile_graphs(attention, shapes), lambda: profile_extra_sampling(resolved)]
    num_blocks = count_blocks(resolved.config.engine, resolved.spec.num_layers, attention, rehearsals)
    ready = worker(resolved.ranks.smallest(num_blocks))
    if resolved.uses_graphs:
        sizes = graph_sizes(attention.max_num_seqs)
        ready.capture(attention, sizes, shapes, shares_prefixes=resolved.shares_prefixes)
    return ready


def blaming_in_steps(resolved: ResolvedConfig, processing: Processing) -> Blaming:
    """Says whose code failed in a step, and what else took part: wrong results of one may only show in another."""
    entries = entries_in_steps(resolved)
    part = ", ".join(f"{entry.kind}={entry.name}" for entry in entries)
    everybody = [*entries, *(stage.entry for stage in processing.stages)]
    return Blaming(everybody, f"during a step with {part}", kind=StepFault)


def entries_in_steps(resolved: ResolvedConfig) -> list[Entry]:
    """Whose code every step runs."""
    return [chosen(resolved.config.model), resolved.kernels, chosen(resolved.config.sampler)]


def profile_extra_sampling(resolved: ResolvedConfig) -> None:
    """Hold what graphs with logits processors and scores take, which are captured only when a request needs them."""
    num_logits = resolved.attention.max_num_seqs * resolved.spec.vocab_size
    torch.empty(num_logits * EXTRA_BYTES_PER_LOGIT, dtype=torch.uint8, device=resolved.device)


def processor_spec(resolved: ResolvedConfig) -> ProcessorSpec:
    """Sizes for the logits processors; the last row of theirs is for padding."""
    sizes = resolved.attention
    return ProcessorSpec(sizes.max_num_seqs + 1, resolved.spec.vocab_size, sizes.max_model_len, sizes.device)


def rank_token_texts(resolved: ResolvedConfig) -> TokenTexts | None:
    """The tokenizer for this rank's processors."""
    checkpoint, reference = resolved.checkpoint, resolved.config.model.config.tokenizer
    folder, source = (locate(reference), None) if reference else (checkpoint.folder, checkpoint.source)
    return token_texts(Codec(folder, source=source), resolved.spec.vocab_size)


def _out_of_memory(resolved: ResolvedConfig, error: torch.OutOfMemoryError) -> str:
    """What was being allocated, what was free, and which keys to lower."""
    free, total = torch.cuda.mem_get_info(resolved.device)
    cause = str(error).partition(". GPU")[0].partition("\n")[0]
    engine = resolved.config.engine
    return (
        f"the GPU's memory does not suffice while starting: {cause}; {free / GIB:.2f} of {total / GIB:.2f} GiB are "
        f"free now. Lower engine.max_num_batched_tokens={engine.max_num_batched_tokens} or "
        f"engine.max_num_seqs={engine.max_num_seqs}, free the GPU, or take a smaller model"
    )
