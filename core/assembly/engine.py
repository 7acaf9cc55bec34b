"""Builds an engine from a validated configuration: resolves it, starts the ranks, makes scheduler, block pool, engine.

The only module that uses all kinds of plugins. `core.assembly.resolve` refuses plugins that do not fit.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch

from hookline.core.assembly.poolers import make_poolers
from hookline.core.assembly.rank_main import MAIN, task_of
from hookline.core.assembly.rank_parts import entries_in_steps
from hookline.core.assembly.remote_ranks import place_of, placed, start_all_ranks
from hookline.core.assembly.resolve import ResolvedConfig, chosen, resolve
from hookline.core.assembly.speculation import make_speculation
from hookline.core.assembly.worker import build_worker
from hookline.core.checkpoint.checkpoint import Checkpoint
from hookline.core.checkpoint.headless import why_no_generation
from hookline.core.config.job_folder import job_folder
from hookline.core.config.settings import Config, chosen_entries
from hookline.core.contracts import Limits
from hookline.core.distributed.process_group import LOOPBACK, behind_secret, connect
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.engine.engine import Engine
from hookline.core.errors import CapacityError, Interrupted, RankError
from hookline.core.executor.links import LocalLinks
from hookline.core.executor.monitor import STEP_TIMEOUTS, Timeouts
from hookline.core.executor.multiproc import MultiprocExecutor
from hookline.core.executor.placed import Placement
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.snapshots import Snapshots
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import choose_grammars
from hookline.core.plugin.observers import Observers, make_observers
from hookline.core.plugin.registry import Entry
from hookline.core.requests.admission import EngineLimits
from hookline.core.requests.pooling import Poolers
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.requests.structured_output import GrammarChoice, StructuredOutput
from hookline.core.step.captured import joining
from hookline.core.step.executor import SizedExecutor
from hookline.core.util.garbage import unsearched
from hookline.core.util.start_phases import StartPhases
from hookline.core.util.tracebacks import forget_locals
from hookline.core.worker.worker import Worker

SMALL_HIDDEN_SIZE = 1024
"""Models below this hidden size compute on one thread: their matrices are too small to be worth splitting."""
logger = logging.getLogger("hookline")
MIN_LEN = 2
"""Tokens of the shortest request: one of its prompt and one of its completion."""


@dataclass(frozen=True)
class Built:
    """An engine with its resolved configuration."""

    engine: Engine
    resolved: ResolvedConfig
    phases: StartPhases
    """The seconds that the parts of the start took so far."""


def build_engine(
    config: Config,
    host: PluginHost,
    *,
    is_command: bool = False,
    checkpoint: Checkpoint | None = None,
    on_resolved: Callable[[ResolvedConfig, StructuredOutput], None] | None = None,
) -> Built:
    """Make the engine that a configuration describes. The configuration must name a model, not model=auto.

    is_command: whether the process is one of our commands, so that we may set its number of threads. checkpoint: the
    model's, if it was opened already. on_resolved: called before the weights are loaded, with the resolved
    configuration and the engine's grammars.

    Raises: PluginError, ConfigError, CheckpointError, CapacityError or RankError, each with the cause and the fix, and
    none keeps the model or its cache in memory.
    """
    phases = StartPhases("imports and configuration" if is_command else None)
    blaming = Blaming(chosen_entries(config, host), "while starting")
    with _keeping_nothing(), unsearched(), blaming, placed(config, host) as placement:
        with phases.part("checkpoint and choice"):
            observers = Observers(host.manager, make_observers(config.observers))
            resolved = resolve(config, host, place=place_of(placement), checkpoint=checkpoint)
        installed = InstalledExtensions.of(host.registry, resolved.facts, config.extension_options)
        structured_output = make_structured_output(resolved, host)
        if on_resolved is not None:
            on_resolved(resolved, structured_output)
        num_threads = num_cpu_threads(resolved, is_command=is_command)
        if num_threads is not None:
            torch.set_num_threads(num_threads)  # the processes of further ranks are told their part of it
        poolers = make_poolers(resolved, host.registry)
        executor = build_executor(resolved, installed, phases, poolers.entries, placement)
        if num_threads is not None:
            torch.set_num_threads(max(1, num_threads // resolved.ranks.num_all))
        try:
            engine = assemble(resolved, observers, executor, installed, structured_output, poolers)
            return Built(engine, resolved, phases)
        except BaseException:
            executor.close()  # else its processes and its memory would stay until Python ends
            raise


@contextmanager
def _keeping_nothing() -> Iterator[None]:
    """Around a start: frees its memory when it fails, even if the caller keeps the error and its traceback."""
    try:
        yield
    except BaseException as error:
        forget_locals(error)
        gc.collect()  # objects in reference cycles
        with suppress(RuntimeError):  # of a device that computes nothing any more
            torch.cuda.empty_cache()
        raise


def build_executor(
    resolved: ResolvedConfig,
    installed: InstalledExtensions,
    phases: StartPhases | None = None,
    poolers: Sequence[Entry] = (),
    placement: Placement | None = None,
) -> SizedExecutor:
    """Make the executor: this process, a group with this process as rank 0, or ranks in other processes."""
    if placement is not None or resolved.config.engine.rank_0 == "apart":
        return start_all_ranks(resolved, timeouts(resolved), phases, placement)
    start = build_worker if resolved.ranks.num_all == 1 else start_ranks
    return start(resolved, installed, phases, poolers)


def make_structured_output(resolved: ResolvedConfig, host: PluginHost) -> StructuredOutput:
    """The grammars of an engine. Their back end is chosen when a request first needs one."""

    def _choose() -> GrammarChoice:
        return GrammarChoice(*choose_grammars(host, resolved.config.grammars))

    return StructuredOutput(_choose, resolved.spec.vocab_size)


def eos_token_ids(resolved: ResolvedConfig) -> frozenset[int]:
    """The checkpoint's end-of-sequence tokens, without ids outside the model's vocabulary."""
    return frozenset(one for one in resolved.checkpoint.eos_token_ids if one < resolved.spec.vocab_size)


def assemble(
    resolved: ResolvedConfig,
    observers: Observers,
    executor: SizedExecutor,
    installed: InstalledExtensions,
    structured_output: StructuredOutput | None = None,
    poolers: Poolers | None = None,
) -> Engine:
    """Make the engine over its executor.

    Raises: CapacityError if the KV cache has no room for a request of MIN_LEN tokens.
    """
    attention, config, groups = resolved.attention, resolved.config, resolved.groups
    plan = Limits(
        max_num_seqs=attention.max_num_seqs,
        max_num_batched_tokens=attention.max_num_batched_tokens,
        max_model_len=attention.max_model_len,
        block_size=attention.block_size,
        num_blocks=executor.num_blocks,
        max_blocks_per_token=groups.num_groups,
        joining=joining(resolved.prompt_shapes),
    )
    timeout_s, vocab_size = config.engine.stall_timeout_s, resolved.spec.vocab_size
    limits = EngineLimits(
        plan,
        vocab_size,
        timeout_s,
        eos_token_ids(resolved),
        seed=config.seed,
        overlap=resolved.overlaps,
        max_queued_requests=config.engine.max_queued_requests,
        max_queued_tokens=config.engine.max_queued_tokens,
        tag_keys=config.engine.tag_keys,
        extensions=installed,
        poolers=Poolers() if poolers is None else poolers,
        taps=resolved.taps,
        no_generation=why_no_generation(resolved.checkpoint.config),
        sampling_defaults=resolved.checkpoint.sampling_defaults,
        max_position=resolved.spec.max_position,
        num_cache_tokens=groups.longest(
            plan.num_blocks, plan.block_size, plan.max_num_batched_tokens, plan.max_model_len
        ),
    )
    if limits.max_len < MIN_LEN:
        raise CapacityError(
            f"no room for a request: {plan.max_blocks_per_token} groups of this model's layers share "
            f"{plan.num_blocks} blocks of {plan.block_size} tokens, which hold {limits.max_len} tokens of one; raise "
            "engine.num_blocks, or give the KV cache more memory"
        )
    if limits.max_len < plan.max_model_len:
        logger.warning("the KV cache holds %d tokens, so no request gets longer than that", limits.max_len)
    snapshots = None
    if num_snapshots := resolved.num_snapshots(plan.num_blocks):
        snapshots, mib = Snapshots(num_snapshots), resolved.snapshot_bytes / 2**20
        logger.info(
            "states are saved for prefixes: %d snapshots of %.2f MiB, %.0f MiB in all, beside the KV cache",
            *(num_snapshots, mib, num_snapshots * mib),
        )
    scheduler = chosen(config.scheduler)
    speculation = make_speculation(resolved, limits, structured_output, executor)
    return Engine(
        scheduler.load()(config.scheduler.config),
        executor,
        BlockPool(plan.num_blocks, plan.block_size, caching=resolved.caches_prefixes, snapshots=snapshots),
        limits,
        policy=scheduler.name,
        origin=str(scheduler.origin),
        names={entry.kind: str(entry) for entry in entries_in_steps(resolved)},
        observers=observers,
        model_name=resolved.checkpoint.reference,
        shares_prefixes=resolved.shares_prefixes,
        job_folder=job_folder(),
        late=structured_output,
        groups=groups,
        decoding=speculation,
    )


def start_ranks(
    resolved: ResolvedConfig,
    installed: InstalledExtensions,
    phases: StartPhases | None = None,
    poolers: Sequence[Entry] = (),
) -> MultiprocExecutor:
    """Start the other ranks, build this process's worker meanwhile, and wait until all are ready.

    Raises: RankError naming the rank that failed; what `build_worker` raises if this process failed.
    """
    phases = phases or StartPhases()
    links = LocalLinks(resolved.ranks.num_all, MAIN, task_of(resolved), timeouts(resolved))
    built: Worker | LocalRanks = resolved.ranks
    monitor = links.monitor
    try:
        with phases.part("further ranks"):
            links.meet({"host": LOOPBACK, "port": links.store.port})
            built = ranks = connect(
                behind_secret(links.store, links.secret), resolved.ranks, resolved.device, links.heartbeat
            )
        monitor.release = ranks.abort
        with monitor.starting(), monitor.interrupter.region():
            built = worker = build_worker(replace(resolved, ranks=ranks), installed, phases, poolers)
        with phases.part("further ranks"):
            monitor.wait_until_all("ready")
    except BaseException as error:
        if isinstance(error, RankError | Interrupted):
            error = monitor.verdict(error)
        if isinstance(error, CapacityError):
            error = RankError(f"rank 0 of {resolved.ranks.num_all} (this process) failed while starting: {error}")
        monitor.fail("rank 0 (this process) failed while starting")
        links.close()
        built.close()  # else its memory would stay for as long as the error does
        raise error from None
    return MultiprocExecutor(worker, links)


def timeouts(resolved: ResolvedConfig) -> Timeouts:
    """The time limits that ranks are watched by.

    Several GPUs show progress often, by marks between collectives, so all of them together get no longer than a single
    late one. On a CPU a large step may go without progress on all ranks, and a single GPU has no marks, so these get
    STEP_TIMEOUTS times as long. So does a stage, which shows none while it computes a micro-batch.
    """
    engine = resolved.config.engine
    has_marks = resolved.device.type == "cuda" and resolved.ranks.num_all > 1
    all_s = engine.step_timeout_s * (1 if has_marks else STEP_TIMEOUTS)
    step_s = engine.step_timeout_s if resolved.ranks.num_stages == 1 else all_s
    return Timeouts(engine.rank_timeout_s, step_s, all_s, engine.start_timeout_s)


def num_cpu_threads(resolved: ResolvedConfig, *, is_command: bool) -> int | None:
    """Threads of all ranks together; None leaves torch's number as it is. engine.cpu_threads states the rule: a small
    model takes longer to synchronise many threads than to compute.

    is_command: whether the process is one of our commands, in which no other code has set the number.
    """
    asked, num_ranks = resolved.config.engine.cpu_threads, resolved.ranks.num_all
    if resolved.device.type != "cpu":
        return None
    if asked is not None or not is_command:
        return asked
    now = torch.get_num_threads()
    is_small = resolved.spec.hidden_size < SMALL_HIDDEN_SIZE and "OMP_NUM_THREADS" not in os.environ
    if not is_small or now <= num_ranks:
        return now
    logger.info("computing on %d of %d CPU threads, as the model is small; engine.cpu_threads=N sets N", num_ranks, now)
    return num_ranks
