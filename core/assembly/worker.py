"""Builds one rank's worker: loads its part of the model, sizes its memory, allocates the KV cache, captures graphs.

It is the same for a single rank and for each of several.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from hookline.core.assembly.compiler_child import end_early
from hookline.core.assembly.exported_kernels import use_exported
from hookline.core.assembly.kernel_build import AWAITED, hash_compiler_aside, stamp_ahead, start_build, variants_ahead
from hookline.core.assembly.model_contract import stated_targets
from hookline.core.assembly.rank_parts import RankParts
from hookline.core.assembly.resolve import ResolvedConfig, chosen
from hookline.core.checkpoint.dequantised import with_dequantised
from hookline.core.checkpoint.headless import fitted
from hookline.core.checkpoint.load import (
    BytesRead,
    load_checkpoint,
    load_source,
    memory_of,
    random_weights,
    refuse_other_sizes,
)
from hookline.core.checkpoint.safetensors_files import StoredTensor, renamed
from hookline.core.checkpoint.stacked_experts import as_named, dtypes_by_matrix
from hookline.core.checkpoint.ties import TIED, unlike_head, untied, with_either_stored
from hookline.core.config.settings import MAX_COUNT
from hookline.core.contracts import AttentionSpec, Kernels, Model, Runtime, WeightTarget
from hookline.core.distributed.peer_ranks import with_copies, with_exchange
from hookline.core.distributed.process_group import in_order
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CapacityError, CheckpointError
from hookline.core.layers.quantized import QuantizedWeights
from hookline.core.plugin.registry import Entry
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.step.captured import PromptShape
from hookline.core.util.start_phases import StartPhases
from hookline.core.worker.startup.late_work import LateWork, logger
from hookline.core.worker.startup.memory import GIB, count_blocks
from hookline.core.worker.worker import Worker

EXTRA_BYTES_PER_LOGIT = 16
"""Bytes that draws with extensions or scores take for each logit: it in its own dtype and in float32, counts of tokens,
and float32 scratch for scores."""

_OUT_OF_RESOURCES = "OutOfResources", "triton.runtime.errors"
"""Name and module of the error by which Triton refuses to load a kernel; it may not be installed."""
_NO_HOST_MEMORY = (
    "this machine's memory does not suffice while starting; lower engine.max_num_seqs, engine.max_model_len or "
    "engine.max_num_batched_tokens, or take a smaller model"
)


def build_worker(
    resolved: ResolvedConfig,
    installed: InstalledExtensions,
    phases: StartPhases | None = None,
    poolers: Sequence[Entry] = (),
) -> Worker:
    """Build the worker of the rank that `resolved` is for; the other ranks have to build theirs at the same time.

    installed: the step extensions that are installed, the same on every rank; poolers: likewise. phases: notes how
    long the parts of the start take.

    Raises: CheckpointError, ConfigError or CapacityError, each with the cause and the fix.
    """
    phases, build = phases or StartPhases(), None
    try:
        with phases.part("device and kernels"):
            if resolved.device.type == "cuda":
                torch.cuda.set_device(resolved.device)  # kernels are launched on the current device
            if resolved.ranks.links is not None:
                resolved.ranks.links.smallest(0)  # links allocate memory; do it before free memory is measured
            kernels = make_kernels(resolved)
            hashing = hash_compiler_aside(resolved)
            if hashing is not None:
                use_exported(resolved.config.engine.kernel_cache)
            stamp = stamp_ahead(resolved)
            build = start_build(resolved, stamp)
            resolved = replace(resolved, ranks=summing_ranks(resolved, kernels))
        with phases.part("weights"):
            read = BytesRead()
            with phases.counting(read.__str__):
                model = load_model(resolved, kernels, read)
            if read.memory_bytes:
                phases.notes.append(f"weights take {read.memory_bytes / 1e9:.3g} GB")
            if hashing is not None:
                hashing.join()
        if build is None:
            return make_worker(resolved, model, kernels, installed, phases, poolers, variants_ahead(stamp))
        with build.awaited(phases):
            worker = make_worker(resolved, model, kernels, installed, phases, poolers, build.variants)
        with phases.part(AWAITED):
            told, build = build.finish(), None
        phases.notes.append(told or "kernels compiled as they were needed")
        return worker
    except torch.OutOfMemoryError as error:
        raise CapacityError(_out_of_memory(resolved, error)) from error
    except RuntimeError as error:
        if "DefaultCPUAllocator" not in str(error):
            raise
        raise CapacityError(f"{_NO_HOST_MEMORY}: {str(error).partition('DefaultCPUAllocator: ')[2]}") from error
    except Exception as error:
        told = _too_large_a_kernel(resolved, error)
        if told is None:
            raise
        raise CapacityError(told) from error
    finally:
        end_early()  # of a start that did not get as far as to need it
        if build is not None:
            build.end()


def make_kernels(resolved: ResolvedConfig) -> Kernels:
    """Make the kernels object of this rank."""
    # A step whose decodes compute several tokens has a row for each token.
    num_rows = max(resolved.attention.max_num_seqs, *resolved.token_sizes, 0)
    return kernels_of(resolved, replace(resolved.attention, max_num_seqs=num_rows))


def kernels_of(resolved: ResolvedConfig, spec: AttentionSpec) -> Kernels:
    """Make the chosen kernels for these sizes."""
    config = resolved.config.kernels.config
    if config is None and resolved.kernels.config is not None:
        config = resolved.kernels.config()
    kernels: Kernels = resolved.kernels.load()(config, spec)
    return kernels


def summing_ranks(resolved: ResolvedConfig, kernels: Kernels) -> LocalRanks:
    """The ranks with the fastest collectives they have; if batch-invariant, with sums independent of other rows."""
    if resolved.attention.batch_invariant:
        return in_order(resolved.ranks)
    ranks = with_exchange(resolved.ranks, kernels, resolved.attention, resolved.spec.hidden_size)
    return with_copies(ranks, resolved.attention, resolved.spec.hidden_size)


def runtime_of(resolved: ResolvedConfig, kernels: Kernels) -> Runtime:
    """The Runtime that this rank's model is built with."""
    sizes = resolved.attention
    return Runtime(
        resolved.device,
        sizes.dtype,
        resolved.ranks,
        kernels,
        resolved.config.model.config,
        stage=resolved.stage,
        batch_invariant=sizes.batch_invariant,
        weights=weights_of(resolved),
        max_model_len=sizes.max_model_len,
    )


def weights_of(resolved: ResolvedConfig) -> QuantizedWeights | None:
    """The factory of the weights of one model; None if they are plain."""
    config, quantization = resolved.config, resolved.quantization
    if quantization is None:
        return None
    is_random = config.model.config.weights == "random"
    return QuantizedWeights(
        quantization,
        {} if is_random else dtypes_by_matrix(resolved.checkpoint.stored),
        from_floats=is_random or resolved.checkpoint.quantization is None,
        dequantises=config.quantization.config.dequantize,
        kernels=resolved.kernels.name,
    )


def load_model(resolved: ResolvedConfig, kernels: Kernels, read: BytesRead | None = None) -> Model:
    """Build this rank's model and load its weights from the checkpoint, or draw them at random. read: counts them."""
    checkpoint, is_random = resolved.checkpoint, resolved.config.model.config.weights == "random"
    with torch.inference_mode():
        if not is_random:
            refuse_other_sizes(checkpoint.reference, checkpoint.shapes(), resolved.spec)
        runtime = runtime_of(resolved, kernels)
        model, targets = build_model(resolved, runtime, checkpoint.config)
        if is_random:
            random_weights(targets, resolved.config.seed)
            finish_weights(runtime)
            return model
        stored, targets = matched(resolved, model, targets)
        if _has_own_head(resolved, targets, stored):
            del model, targets  # else both models would be in memory
            runtime = runtime_of(resolved, kernels)
            model, targets = build_model(resolved, runtime, untied(checkpoint.config))
            stored, targets = matched(resolved, model, targets)
            if _has_own_head(resolved, targets, stored):
                raise CheckpointError(
                    f"checkpoint {checkpoint.reference} stores a head that differs from its embedding, and "
                    f"{chosen(resolved.config.model)} uses the embedding as the head whatever {TIED} says"
                )
        targets = with_either_stored(targets, stored)
        if checkpoint.source is not None:
            load_source(checkpoint.reference, checkpoint.source, targets, read)
        else:
            assert checkpoint.folder is not None
            if isinstance(runtime.weights, QuantizedWeights) and not runtime.weights.from_floats:
                whole, weights = _stored(resolved, model), runtime.weights
                stored = with_dequantised(whole, targets, weights.quantization, weights.form)
            load_checkpoint(checkpoint.folder, targets, stored=stored, read=read)
        if read is not None:
            read.memory_bytes = memory_of(targets)
        finish_weights(runtime)
    return model


def finish_weights(runtime: Runtime) -> None:
    """Make quantised weights ready for products, once a model's targets are filled."""
    if isinstance(runtime.weights, QuantizedWeights):
        runtime.weights.finish()


def build_model(
    resolved: ResolvedConfig, runtime: Runtime, hf_config: Mapping[str, Any]
) -> tuple[Model, Mapping[str, WeightTarget]]:
    """A rank's model without its weights, and the targets into which they are loaded."""
    entry = chosen(resolved.config.model)
    model: Model = entry.load()(hf_config, runtime)
    return model, stated_targets(entry, model)


def matched(
    resolved: ResolvedConfig, model: Model, targets: Mapping[str, WeightTarget]
) -> tuple[Mapping[str, Any], Mapping[str, WeightTarget]]:
    """The checkpoint's tensors (of its files, or shapes from its source) and the model's targets, by the same names."""
    checkpoint = resolved.checkpoint
    if checkpoint.source is not None:
        shapes = checkpoint.source.shapes()
        return shapes, fitted(targets, checkpoint.config, shapes)
    stored = _stored(resolved, model)
    if checkpoint.folder is not None and hasattr(model, "targets_for"):
        shapes = {name: one.shape for name, one in stored.items()}
        targets = stated_targets(chosen(resolved.config.model), model, shapes)
    targets = fitted(targets, checkpoint.config, stored)
    return as_named(stored, targets), targets


def _stored(resolved: ResolvedConfig, model: Model) -> Mapping[str, StoredTensor]:
    """The tensors of the checkpoint's files, by the model's names."""
    checkpoint = resolved.checkpoint
    if checkpoint.folder is None or not hasattr(model, "tensor_name"):
        return checkpoint.stored
    return renamed(checkpoint.folder, checkpoint.stored, model.tensor_name)


def _has_own_head(resolved: ResolvedConfig, targets: Mapping[str, WeightTarget], stored: Mapping[str, Any]) -> bool:
    """Whether the checkpoint stores a head of its own although its config.json says that the embedding is the head.

    transformers serves the stored head then, and so do we, with a warning. All ranks find the same.
    """
    checkpoint = resolved.checkpoint
    head = unlike_head(targets, stored, checkpoint.source, resolved.ranks)
    has_own = not _smallest(resolved, int(head is None))
    if has_own and resolved.ranks.number == 0:
        logger.warning(
            "checkpoint %s stores a head that differs from its embedding, though its config.json has %s=true; the "
            "stored head is served, as transformers does; model.hf_overrides.%s=false ends this warning",
            *(checkpoint.reference, TIED, TIED),
        )
    return has_own


def make_worker(
    resolved: ResolvedConfig,
    model: Model,
    kernels: Kernels,
    installed: InstalledExtensions,
    phases: StartPhases | None = None,
    poolers: Sequence[Entry] = (),
    ahead: Collection[str] = (),
) -> Worker:
    """Size the KV cache, make the worker, capture its graphs and warm it up. ahead: see LateWork."""
    phases, parts = phases or StartPhases(), RankParts(resolved, model, kernels, installed, poolers)
    shapes = resolved.prompt_shapes
    compiled = LateWork(is_late=False, ahead=ahead)
    compiled.begin()
    with phases.part("memory rehearsal"):
        num_blocks = _num_blocks(resolved, parts, shapes)
    with phases.part("KV cache"):
        worker = parts.worker(_smallest(resolved, num_blocks))
    try:
        _make_ready(resolved, worker, shapes, phases)
    except BaseException:
        if resolved.ranks.num_all == 1:  # others may still be writing into memory that they share with this one
            worker.close()  # frees its memory, whatever still refers to it
        raise
    compiled.end()
    _tell_of_compiles(compiled, phases)
    worker.late_compiles.begin()
    return worker


def _make_ready(resolved: ResolvedConfig, worker: Worker, shapes: Sequence[PromptShape], phases: StartPhases) -> None:
    """Capture the worker's graphs and warm it up."""
    if resolved.device.type == "cuda":
        with phases.part("warm-up"):
            worker.prepare_draws(resolved.attention)
    if resolved.uses_graphs:
        with phases.part("graphs"):
            worker.capture(
                resolved.attention,
                resolved.decode_sizes,
                shapes,
                shares_prefixes=resolved.shares_prefixes,
                token_sizes=resolved.token_sizes,
                at_once=resolved.captures_at_once,
            )
    if resolved.device.type == "cuda":
        with phases.part("warm-up"):
            worker.warm_up(resolved.attention, shares_prefixes=resolved.shares_prefixes)


def _num_blocks(resolved: ResolvedConfig, parts: RankParts, shapes: Sequence[PromptShape]) -> int:
    """The number of blocks that fit this rank's memory besides its largest steps, which are run to measure them."""
    if resolved.groups.num_places and not resolved.num_places:
        return MAX_COUNT  # a stage without keys and values: other stages decide how many blocks there are
    attention = resolved.attention
    rehearsals = [lambda: parts.worker(1).profile_run(attention)]
    if resolved.uses_graphs:
        rehearsals.append(lambda: parts.worker(1).profile_graphs(attention, shapes, resolved.token_sizes))
        rehearsals.append(lambda: _profile_extra_sampling(resolved))
    count = count_blocks(resolved.config.engine, resolved.num_places, attention, rehearsals)
    return count if resolved.config.engine.num_blocks is not None else parts.beside_snapshots(count)


def _profile_extra_sampling(resolved: ResolvedConfig) -> None:
    """Allocate as much as graphs with step extensions and scores take, which are captured when first needed."""
    num_rows = max(resolved.attention.max_num_seqs, *resolved.token_sizes, 0)
    num_logits = num_rows * resolved.spec.vocab_size
    torch.empty(num_logits * EXTRA_BYTES_PER_LOGIT, dtype=torch.uint8, device=resolved.device)


def _smallest(resolved: ResolvedConfig, num_blocks: int) -> int:
    """The smallest of all ranks' numbers of blocks."""
    ranks, links = resolved.ranks, resolved.ranks.links
    num_blocks = ranks.smallest(num_blocks)
    return num_blocks if links is None else links.smallest(num_blocks)


def _tell_of_compiles(compiled: LateWork, phases: StartPhases) -> None:
    """Note the kernels that a start compiled, and log kernels that were compiled twice."""
    if any(compiled.counts.values()):
        phases.notes.append(str(compiled))
    if compiled.compiled_twice is not None:
        logger.warning("%s", compiled.compiled_twice)


def _too_large_a_kernel(resolved: ResolvedConfig, error: BaseException | None) -> str | None:
    """The error text of a Triton kernel that needs more than the card has; None if that is not the error's cause."""
    while error is not None and (type(error).__name__, type(error).__module__) != _OUT_OF_RESOURCES:
        error = error.__cause__
    if error is None:
        return None
    asked: Any = error
    bytes_of = "bytes of " if "memory" in asked.name else ""
    return (
        f"kernels={resolved.kernels.name}: a kernel needs {asked.required:,} {bytes_of}{asked.name} for a program, and "
        f"this card has {asked.limit:,}; choose kernels=torch"
    )


def _out_of_memory(resolved: ResolvedConfig, error: torch.OutOfMemoryError) -> str:
    """The error text: the failed allocation, the free memory, and the keys to lower."""
    free, total = torch.cuda.mem_get_info(resolved.device)
    cause = str(error).partition(". GPU")[0].partition("\n")[0]
    engine = resolved.config.engine
    return (
        f"the GPU's memory does not suffice while starting: {cause}; {free / GIB:.2f} of {total / GIB:.2f} GiB are "
        f"free now. Lower engine.max_num_batched_tokens={engine.max_num_batched_tokens} or "
        f"engine.max_num_seqs={engine.max_num_seqs}, free the GPU, or take a smaller model"
    )
