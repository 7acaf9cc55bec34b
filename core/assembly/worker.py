"""Builds one rank's worker: load its part of the model, size the memory, allocate, capture.

The same for the only rank and for each of several; knows no processes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hookline.core.assembly.kernel_build import stamp_ahead, start_build, variants_ahead
from hookline.core.assembly.poolers import pooler_makers
from hookline.core.assembly.resolve import ResolvedConfig, chosen
from hookline.core.assembly.stages import stage_of
from hookline.core.checkpoint.headless import fitted
from hookline.core.checkpoint.load import load_checkpoint, load_source, random_weights, refuse_other_sizes, renamed
from hookline.core.checkpoint.locate import locate
from hookline.core.config.settings import MAX_COUNT
from hookline.core.contracts import Kernels, Model, ProcessorSpec, RecurrentState, Runtime, StateTensor, TokenTexts
from hookline.core.distributed.ordered_ranks import in_order
from hookline.core.distributed.peer_ranks import with_copies, with_exchange
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CapacityError, ConfigError, StepFault
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.registry import Entry
from hookline.core.requests.logits_processing import Processing
from hookline.core.step.captured import graph_sizes, prompt_shapes
from hookline.core.tokenizer.codec import Codec
from hookline.core.tokenizer.codec_texts import token_texts
from hookline.core.util.start_phases import StartPhases
from hookline.core.worker.late_work import LateWork, logger
from hookline.core.worker.layer_taps import LayerTaps
from hookline.core.worker.logits_pipeline import Pipeline
from hookline.core.worker.memory import GIB, allocate_cache, count_blocks
from hookline.core.worker.model_runner import ModelRunner
from hookline.core.worker.pooling import PooledStates
from hookline.core.worker.request_table import LayerStates, RequestTable
from hookline.core.worker.stage_taps import StageTaps
from hookline.core.worker.stage_worker import StageWorker
from hookline.core.worker.step_checks import StepChecks
from hookline.core.worker.worker import Worker

EXTRA_BYTES_PER_LOGIT = 16
"""The logits in their own dtype and in float32, counts of tokens, and float32 scratch for scores."""

_NO_HOST_MEMORY = (
    "this machine's memory does not suffice while starting; lower engine.max_num_seqs, engine.max_model_len or "
    "engine.max_num_batched_tokens, or take a smaller model"
)


def build_worker(
    resolved: ResolvedConfig,
    processing: Processing,
    phases: StartPhases | None = None,
    poolers: Sequence[Entry] = (),
) -> Worker:
    """The worker of the rank that `resolved` is about; the other ranks have to build theirs at the same time.

    processing: the logits processors that are installed, the same on every rank; poolers: likewise. phases: told what
    the start takes.

    Raises: CheckpointError, ConfigError or CapacityError, each with the cause and the fix.
    """
    phases, build = phases or StartPhases(), None
    try:
        with phases.part("device and kernels"):
            if resolved.device.type == "cuda":
                torch.cuda.set_device(resolved.device)  # kernels are launched on the current device
            if resolved.ranks.links is not None:
                resolved.ranks.links.smallest(0)  # so that links have their memory before what is left is counted
            kernels = make_kernels(resolved)
            stamp = stamp_ahead(resolved)
            build = start_build(resolved, stamp)
            resolved = replace(resolved, ranks=summing_ranks(resolved, kernels))
        with phases.part("weights"):
            model = load_model(resolved, kernels)
        if build is not None:
            with phases.part("kernels compiled ahead"):
                told, build = build.wait(), None
            phases.notes.append(told or "kernels compiled as they were needed")
        return make_worker(resolved, model, kernels, processing, phases, poolers, variants_ahead(stamp))
    except torch.OutOfMemoryError as error:
        raise CapacityError(_out_of_memory(resolved, error)) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise CapacityError(f"{_NO_HOST_MEMORY}: {str(error).partition('DefaultCPUAllocator: ')[2]}") from error
    finally:
        if build is not None:
            build.end()


def make_kernels(resolved: ResolvedConfig) -> Kernels:
    """The kernels object of this rank."""
    config = resolved.config.kernels.config
    if config is None and resolved.kernels.config is not None:
        config = resolved.kernels.config()
    kernels: Kernels = resolved.kernels.load()(config, resolved.attention)
    return kernels


def summing_ranks(resolved: ResolvedConfig, kernels: Kernels) -> LocalRanks:
    """The ranks with the fastest ways of summing up, or with the one whose sums do not depend on the rows."""
    if resolved.attention.batch_invariant:
        return in_order(resolved.ranks)
    ranks = with_exchange(resolved.ranks, kernels, resolved.attention, resolved.spec.hidden_size)
    return with_copies(ranks, resolved.attention, resolved.spec.hidden_size)


def runtime_of(resolved: ResolvedConfig, kernels: Kernels) -> Runtime:
    """What this rank's model is built with."""
    sizes = resolved.attention
    return Runtime(
        resolved.device,
        sizes.dtype,
        resolved.ranks,
        kernels,
        resolved.config.model.config,
        stage=resolved.stage,
        batch_invariant=sizes.batch_invariant,
    )


def load_model(resolved: ResolvedConfig, kernels: Kernels) -> Model:
    """The model with its weights, from the checkpoint or at random."""
    option, checkpoint = resolved.config.model, resolved.checkpoint
    with torch.inference_mode():
        if option.config.weights != "random":
            refuse_other_sizes(checkpoint.reference, checkpoint.shapes(), resolved.spec)
        model: Model = chosen(option).load()(checkpoint.config, runtime_of(resolved, kernels))
        if option.config.weights == "random":
            random_weights(model.weight_targets(), resolved.config.seed)
        elif checkpoint.source is not None:
            load_source(checkpoint.reference, checkpoint.source, fitted(model.weight_targets(), checkpoint))
        else:
            assert checkpoint.folder is not None
            stored = checkpoint.stored
            if hasattr(model, "tensor_name"):
                stored = renamed(checkpoint.folder, stored, model.tensor_name)
            load_checkpoint(checkpoint.folder, fitted(model.weight_targets(), checkpoint), stored=stored)
    return model


def make_worker(
    resolved: ResolvedConfig,
    model: Model,
    kernels: Kernels,
    processing: Processing,
    phases: StartPhases | None = None,
    poolers: Sequence[Entry] = (),
    ahead: Collection[str] = (),
) -> Worker:
    """Size the KV cache, put the rank together, capture its graphs and warm it up. ahead: as for LateWork."""
    attention, phases = resolved.attention, phases or StartPhases()
    sampler_entry = chosen(resolved.config.sampler)
    sampler = sampler_entry.load()(resolved.config.sampler.config)
    blaming = blaming_in_steps(resolved, processing)
    groups, states, stage, links = resolved.groups, make_states(resolved), resolved.stage, resolved.ranks.links
    taps = resolved.config.engine.taps or ()

    def worker(num_blocks: int) -> Worker:
        max_blocks = -(-attention.max_model_len // attention.block_size)
        sizes = attention.max_num_seqs, max_blocks, attention.block_size, num_blocks, attention.device
        runner = ModelRunner(
            model,
            kernels,
            sampler,
            RequestTable(*sizes, windows=groups.windows, states=states, is_by_layer=groups.is_by_layer),
            allocate_cache(resolved.num_places, num_blocks, attention),
            ranks=resolved.ranks,
            vocab_size=resolved.spec.vocab_size,
            shards_vocabulary=sampler_entry.needs.vocabulary_shards,
            pipeline=Pipeline(processing.stages, processor_spec(resolved), partial(rank_token_texts, resolved)),
            checks=StepChecks({entry.kind: str(entry) for entry in entries_in_steps(resolved)}),
            groups=groups,
            batch_invariant=attention.batch_invariant,
            first_layer=stage.first_layer,
        )
        num_rows, device = attention.max_num_seqs + 1, attention.device
        runner.pooled_states = PooledStates(pooler_makers(resolved, poolers, runner), num_rows, device)
        own = [layer for layer in taps if layer in stage.layers(resolved.spec.num_layers)]
        if own:
            runner.tap = LayerTaps(own)
        if links is None:
            return Worker(runner, blaming=blaming)
        is_host, hidden_size = resolved.ranks.number == 0, resolved.spec.hidden_size
        stage_taps = make_stage_taps(resolved, links, runner.tap) if taps else None
        options: dict[str, Any] = {"is_host": is_host, "blaming": blaming, "taps": stage_taps}
        return StageWorker(runner, stage, links, attention, hidden_size, **options)

    limits = attention.max_num_seqs, attention.max_num_batched_tokens, attention.max_model_len
    shapes = prompt_shapes(*limits, resolved.captured_prompt_tokens) if resolved.captures_prompts else []
    rehearsals = [lambda: worker(1).profile_run(attention)]
    if resolved.uses_graphs:
        rehearsals += [lambda: worker(1).profile_graphs(attention, shapes), lambda: profile_extra_sampling(resolved)]
    compiled = LateWork(is_late=False, ahead=ahead)
    compiled.begin()
    with phases.part("memory rehearsal"):
        num_blocks = MAX_COUNT  # of a stage without keys and values: the others say how many there are
        if resolved.num_places or not groups.num_places:
            num_blocks = count_blocks(resolved.config.engine, resolved.num_places, attention, rehearsals)
    with phases.part("KV cache"):
        num_blocks = resolved.ranks.smallest(num_blocks)
        ready = worker(num_blocks if links is None else links.smallest(num_blocks))
    if resolved.uses_graphs:
        sizes = graph_sizes(attention.max_num_seqs)
        with phases.part("graphs"):
            ready.capture(attention, sizes, shapes, shares_prefixes=resolved.shares_prefixes)
    if resolved.device.type == "cuda":
        with phases.part("warm-up"):
            ready.warm_up(attention, shares_prefixes=resolved.shares_prefixes)
    compiled.end()
    if any(compiled.counts.values()):
        phases.notes.append(str(compiled))
    if compiled.compiled_twice is not None:
        logger.warning("%s", compiled.compiled_twice)
    ready.late.begin()
    return ready


def make_stage_taps(resolved: ResolvedConfig, links: Any, own: LayerTaps | None) -> StageTaps:
    """How hidden states behind layers get from this rank's stage to the first one."""
    num_layers, stage = resolved.spec.num_layers, resolved.stage
    firsts = stage_of(resolved.config, resolved.spec, 0).layers(num_layers)
    behind = [layer for layer in resolved.config.engine.taps or () if layer not in firsts]
    before = [] if stage.is_first else [layer for layer in behind if layer < stage.first_layer]
    sizes = resolved.spec.hidden_size, resolved.device
    return StageTaps(stage, links, own, before, behind, *sizes)


def make_states(resolved: ResolvedConfig) -> LayerStates | None:
    """The states of the layers that keep one, on this rank; None if it has no such layer.

    Raises: ConfigError if one cannot be split among the ranks.
    """
    layers = {
        index: {name: _state_form(resolved, index, name, tensor) for name, tensor in layer.tensors}
        for index, layer in enumerate(resolved.spec.cache_layers)
        if isinstance(layer, RecurrentState) and index in resolved.stage.layers(resolved.spec.num_layers)
    }
    sizes = resolved.attention
    return LayerStates(layers, sizes.max_num_seqs, sizes.device) if layers else None


def _state_form(
    resolved: ResolvedConfig, layer: int, name: str, tensor: StateTensor
) -> tuple[tuple[int, ...], torch.dtype]:
    shape, num_ranks = list(tensor.shape), resolved.ranks.size
    if tensor.split_dim is not None:
        if shape[tensor.split_dim] % num_ranks:
            raise ConfigError(
                f"tp={num_ranks} does not divide dimension {tensor.split_dim} of the state '{name}' of "
                f"layer {layer}, which is {tensor.shape}"
            )
        shape[tensor.split_dim] //= num_ranks
    return tuple(shape), getattr(torch, tensor.dtype) if tensor.dtype else resolved.attention.dtype


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
    """Sizes for the logits processors; their last row is for padding."""
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
