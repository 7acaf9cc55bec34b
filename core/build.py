"""From a validated configuration to an engine: choose, start the ranks, put the scheduler and the pool around them.

The only place that puts all four kinds together. What does not fit was refused by `core.choose` before this.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

from core.admission import EngineLimits
from core.block_pool import BlockPool
from core.choose import Choice, choose, chosen
from core.config import Config
from core.contracts import Limits
from core.engine import Engine, Executor
from core.observers import Observers, make_observers
from core.plugin_blame import Blaming, chosen_entries
from core.plugin_host import PluginHost
from core.processing import Processing
from core.rank_worker import build_worker

logger = logging.getLogger("hookline")


class SizedExecutor(Executor, Protocol):
    """An executor that says how large its KV cache turned out."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can hold."""
        ...


@dataclass(frozen=True)
class Built:
    """An engine, and what it was made of."""

    engine: Engine
    choice: Choice


def build_engine(config: Config, host: PluginHost) -> Built:
    """Make the engine a configuration describes.

    Raises: PluginError, ConfigError, CheckpointError, CapacityError or RankError, each with the cause and the fix.
    """
    with Blaming(chosen_entries(config, host), "while starting"):
        observers = Observers(host.manager, make_observers(config.observers))
        choice = choose(config, host)
        processing = Processing.of(host.registry, choice.facts)
        executor = build_executor(choice, processing)
        try:
            return Built(assemble(choice, observers, executor, processing), choice)
        except BaseException:
            executor.close()  # else its processes and its memory would stay until Python ends
            raise


def build_executor(choice: Choice, processing: Processing) -> SizedExecutor:
    """What computes the steps: this process alone, or with tp > 1 a group of which it is rank 0."""
    if choice.ranks.size == 1:
        return build_worker(choice, processing)
    from core.rank_group import start_ranks

    return start_ranks(choice, processing)


def assemble(choice: Choice, observers: Observers, executor: SizedExecutor, processing: Processing) -> Engine:
    """The engine around its executor."""
    attention, config = choice.attention, choice.config
    plan = Limits(
        max_num_seqs=attention.max_num_seqs,
        max_num_batched_tokens=attention.max_num_batched_tokens,
        max_model_len=attention.max_model_len,
        block_size=attention.block_size,
        num_blocks=executor.num_blocks,
    )
    timeout_s, vocab_size = config.engine.stall_timeout_s, choice.spec.vocab_size
    eos = frozenset(one for one in choice.checkpoint.eos_token_ids if one < vocab_size)  # others are never drawn
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
        executor,
        BlockPool(plan.num_blocks, plan.block_size, caching=config.engine.prefix_caching),
        limits,
        policy=scheduler.name,
        origin=str(scheduler.origin),
        observers=observers,
        model_name=choice.checkpoint.reference,
        shares_prefixes=choice.shares_prefixes,
    )
