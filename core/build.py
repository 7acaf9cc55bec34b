"""From a validated configuration to an engine: choose, check what fits, load, size the memory, allocate.

The only place that knows all four kinds at once. What does not fit is refused before any weight is loaded.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from core.block_pool import BlockPool
from core.checkpoint import Checkpoint, resolve_model
from core.config import Config, Option
from core.contracts import AttentionSpec, Limits, Model, ModelSpec, Runtime
from core.engine import Engine, EngineLimits
from core.errors import ConfigError, PluginError
from core.graphs import graph_sizes
from core.memory import allocate_cache, count_blocks
from core.needs import Facts, choose_kernels, unmet
from core.observers import Observers
from core.parallel import Ranks
from core.plugin_host import PluginHost
from core.registry import Entry
from core.state import RequestTable
from core.weights import load_checkpoint, random_weights
from core.worker import Worker

logger = logging.getLogger("hookline")
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Built:
    """An engine, and what the text side needs to know of its checkpoint."""

    engine: Engine
    checkpoint: Checkpoint
    device: torch.device
    kernels_name: str


def build_engine(config: Config, host: PluginHost) -> Built:
    """Make the engine a configuration describes.

    Raises: PluginError, ConfigError, CheckpointError or CapacityError, each with the cause and the fix.
    """
    model_class = chosen(config.model).load()
    checkpoint = resolve_model(config.model.config)
    spec: ModelSpec = model_class.spec(checkpoint.config)
    device = pick_device(config.device)
    facts = Facts(
        device=device.type,
        dtype=pick_dtype(config.dtype, checkpoint, device),
        compute_capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        block_size=config.engine.block_size,
        head_dim=spec.head_dim,
        num_ranks=config.tp,
    )
    for option in (config.model, config.sampler, config.scheduler):
        refuse_unmet(chosen(option), facts)
    kernels_entry = choose_kernels(host, config.kernels.name, facts)
    ranks = Ranks()
    attention = attention_spec(config, spec, ranks, facts, device, kernels_entry)
    kernels_config = config.kernels.config
    if kernels_config is None and kernels_entry.config is not None:
        kernels_config = kernels_entry.config()
    kernels = kernels_entry.load()(kernels_config, attention)
    with torch.inference_mode():
        model: Model = model_class(checkpoint.config, Runtime(device, attention.dtype, ranks, kernels))
        load_weights(model, checkpoint, config)
    graph_safe = kernels_entry.needs.graph_safe and chosen(config.sampler).needs.graph_safe
    use_graphs = config.engine.cuda_graphs and device.type == "cuda" and graph_safe
    worker = build_worker(config, spec, attention, model, kernels, ranks, use_graphs)
    engine = assemble(config, host, worker, spec, attention, checkpoint)
    return Built(engine, checkpoint, device, kernels_entry.name)


def chosen(option: Option) -> Entry:
    """The entry of an option that names one."""
    assert option.entry is not None, f"{option.name} names no entry"
    return option.entry


def refuse_unmet(entry: Entry, facts: Facts) -> None:
    """Raise PluginError if the entry's needs are not met."""
    reasons = unmet(entry.needs, facts)
    if reasons:
        raise PluginError(f"{entry.kind} '{entry.name}' of {entry.origin} does not fit: {'; '.join(reasons)}")


def pick_device(name: str) -> torch.device:
    """The device a name means; "auto" is the first GPU if there is one.

    Raises: ConfigError if it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: no CUDA device is usable here; use device=cpu")
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        if device.index >= torch.cuda.device_count():
            raise ConfigError(f"device={name}: only {torch.cuda.device_count()} CUDA devices are here")
    return device


def pick_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> str:
    """Name of the dtype to compute in; "auto" is float32 on a CPU and the checkpoint's own on a GPU."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
    return str(stored).removeprefix("torch.")


def attention_spec(
    config: Config, spec: ModelSpec, ranks: Ranks, facts: Facts, device: torch.device, kernels: Entry
) -> AttentionSpec:
    """Attention sizes of one rank."""
    engine = config.engine
    return AttentionSpec(
        num_heads=spec.num_heads // ranks.size,
        num_kv_heads=max(1, spec.num_kv_heads // ranks.size),
        head_dim=spec.head_dim,
        block_size=engine.block_size or max(DEFAULT_BLOCK_SIZE, kernels.needs.block_size_multiple),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=min(engine.max_model_len, spec.max_position),
        device=device,
        dtype=getattr(torch, facts.dtype),
    )


def load_weights(model: Model, checkpoint: Checkpoint, config: Config) -> None:
    """Fill the parameters from the checkpoint, or at random."""
    if config.model.config.weights == "random":
        random_weights(model.weight_targets(), config.seed)
        return
    assert checkpoint.folder is not None
    load_checkpoint(checkpoint.folder, model.weight_targets())


def build_worker(
    config: Config,
    spec: ModelSpec,
    attention: AttentionSpec,
    model: Model,
    kernels: Any,
    ranks: Ranks,
    use_graphs: bool,
) -> Worker:
    """Size the KV cache, put a rank together and capture its decode graphs."""
    sampler_entry = chosen(config.sampler)
    sampler = sampler_entry.load()(config.sampler.config)

    def worker(num_blocks: int) -> Worker:
        max_blocks = -(-attention.max_model_len // attention.block_size)
        table = RequestTable(attention.max_num_seqs, max_blocks, attention.block_size, num_blocks, attention.device)
        cache = allocate_cache(spec.num_layers, num_blocks, attention)
        shards = sampler_entry.needs.vocabulary_shards
        return Worker(
            model, kernels, sampler, table, cache, ranks=ranks, vocab_size=spec.vocab_size, shards_vocabulary=shards
        )

    rehearsals = [lambda: worker(1).rehearse(attention)]
    if use_graphs:
        rehearsals.append(lambda: worker(1).rehearse_decode(attention))
    ready = worker(count_blocks(config.engine, spec.num_layers, attention, rehearsals))
    if use_graphs:
        ready.capture(graph_sizes(attention.max_num_seqs), attention.max_model_len)
    return ready


def assemble(
    config: Config,
    host: PluginHost,
    worker: Worker,
    spec: ModelSpec,
    attention: AttentionSpec,
    checkpoint: Checkpoint,
) -> Engine:
    """The engine around a worker."""
    num_blocks = worker.num_blocks
    limits = EngineLimits(
        plan=Limits(
            max_num_seqs=attention.max_num_seqs,
            max_num_batched_tokens=attention.max_num_batched_tokens,
            max_model_len=attention.max_model_len,
            block_size=attention.block_size,
            num_blocks=num_blocks,
        ),
        vocab_size=spec.vocab_size,
        stall_timeout_s=config.engine.stall_timeout_s,
        eos_token_ids=frozenset(checkpoint.eos_token_ids),
        seed=config.seed,
    )
    if limits.max_len < attention.max_model_len:
        logger.warning("the KV cache holds %d tokens, so no request gets longer than that", limits.max_len)
    scheduler_entry = chosen(config.scheduler)
    return Engine(
        scheduler_entry.load()(config.scheduler.config),
        worker,
        BlockPool(num_blocks, attention.block_size, caching=config.engine.prefix_caching),
        limits,
        policy=scheduler_entry.name,
        observers=Observers(host.manager),
    )
