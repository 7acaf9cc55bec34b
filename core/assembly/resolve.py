"""Resolves a configuration before a weight is loaded: checkpoint, device, dtype, kernels, sizes.

The needs of plugins are compared with the facts of this machine and model; plugins that do not fit are refused. No
memory is allocated.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from hookline.core.assembly.model_contract import stated_spec
from hookline.core.assembly.quantization import make_quantization, with_quantization
from hookline.core.assembly.stages import layer_counts, refuse_uncut, stage_of
from hookline.core.checkpoint.checkpoint import Checkpoint, resolve_model
from hookline.core.checkpoint.checkpoint import resolve as resolve_checkpoint
from hookline.core.config.settings import KV_DTYPES, Config, EngineConfig
from hookline.core.contracts import (
    AttentionSpec,
    Kernels,
    ModelConfig,
    ModelSpec,
    Quantization,
    RecurrentState,
    Stage,
    is_offered,
)
from hookline.core.distributed.partition import head_parts
from hookline.core.distributed.ranks import ALONE, LocalRanks
from hookline.core.errors import CheckpointError, ConfigError, PluginError
from hookline.core.kv_cache.groups import CacheGroups, keeps_tokens
from hookline.core.plugin.blame import breach
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import Facts, choose_kernels, unmet, unmet_invariance
from hookline.core.plugin.registry import LOCAL, Entry, Option
from hookline.core.step.captured import (
    PromptShape,
    captured_prompt_tokens,
    graph_sizes,
    prompt_shapes,
    token_sizes,
)
from hookline.core.worker.request_table import state_form
from hookline.core.worker.startup.memory import block_bytes

_log = logging.getLogger("hookline")
MIN_SNAPSHOTS = 16
"""Fewest slots for copies of recurrent states."""
SAVED_TOKENS, MAX_SAVED = 64, 512
"""Of models without keys and values: tokens of a block, at whose end states are saved, and most blocks of a request."""


@dataclass(frozen=True)
class ResolvedConfig:
    """A configuration with all automatic values decided, from which an engine is built."""

    config: Config
    checkpoint: Checkpoint
    spec: ModelSpec
    attention: AttentionSpec
    groups: CacheGroups
    """The groups of layers that share blocks of the KV cache."""
    kernels: Entry
    ranks: LocalRanks
    facts: Facts
    """The facts of machine and model with which the needs of all plugins were compared."""
    plugins: tuple[str, ...]
    """The plugins that this process finds (PluginHost.description); the other ranks' processes must find the same."""
    quantization: Quantization | None = None
    """How weights are stored in few bits; None: they are plain."""
    drafter_layers: tuple[int, ...] = ()
    """The layers after which the drafter reads the residual stream, ascending."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers whose residual stream each step has beside its draws, for observers or the drafter."""
        return self.config.engine.taps or self.drafter_layers

    @property
    def keeps_states(self) -> bool:
        """Whether hidden states stay on the device: if they are for a drafter, in whose process rank 0 computes."""
        engine = self.config.engine
        return bool(self.drafter_layers) and engine.executor == LOCAL and engine.rank_0 == "here"

    @property
    def stage(self) -> Stage:
        """The stage of this rank, with its layers."""
        return stage_of(self.config, self.spec, self.ranks.stage)

    @property
    def num_places(self) -> int:
        """Layers that a block of this rank's KV cache has room for."""
        return self.groups.num_places_of(self.stage.layers(self.spec.num_layers))

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.attention.device

    @property
    def uses_graphs(self) -> bool:
        """Whether decode steps are captured as CUDA graphs; steps with prompts may be, too."""
        graph_safe = self.kernels.needs.graph_safe and chosen(self.config.sampler).needs.graph_safe
        wants_graphs = self.config.engine.cuda_graphs and not (self.taps and self.config.pp > 1)
        return wants_graphs and self.device.type == "cuda" and graph_safe

    @property
    def captures_prompts(self) -> bool:
        """Whether small steps with prompts are captured as well.

        For a model with states not unless the kernels offer its operations: the plain ones ask the host for lengths,
        which a captured step does not have. Not for a model that itself asks for them.
        """
        if not self.uses_graphs or self.config.pp > 1 or self.taps or not self.kernels.needs.graph_prefill:
            return False
        if any(isinstance(layer, RecurrentState) and layer.lengths_on_host for layer in self.spec.layers):
            return False
        return not self.groups.has_states or _computes_states(self.kernels.load())

    @property
    def captures_at_once(self) -> bool:
        """Whether steps are captured without a run before, if one of another size was captured already.

        Not with several ranks, whose collectives are set up for a size in ways of their own.
        """
        entries = self.kernels, chosen(self.config.model), chosen(self.config.sampler)
        return self.config.tp == self.config.pp == 1 and all(entry.needs.sizes_alike for entry in entries)

    @property
    def captured_prompt_tokens(self) -> int:
        """Tokens of the largest captured step of prompts."""
        stated = self.config.engine.captured_prompt_tokens
        if stated is not None:
            return stated
        return captured_prompt_tokens(self.spec.num_layers, self.spec.hidden_size, self.config.tp)

    @property
    def prompt_shapes(self) -> list[PromptShape]:
        """The shapes of steps with prompts for which graphs are captured."""
        if not self.captures_prompts:
            return []
        sizes = self.attention
        limits = sizes.max_num_seqs, sizes.max_num_batched_tokens, sizes.max_model_len
        return prompt_shapes(*limits, self.captured_prompt_tokens, self.config.engine.joined_decodes)

    @property
    def decode_sizes(self) -> list[int]:
        """Rows of the decodes that have graphs of their own, ascending."""
        return graph_sizes(self.attention.max_num_seqs) if self.uses_graphs and not self.taps else []

    @property
    def token_sizes(self) -> list[int]:
        """Tokens of the steps for which graphs are captured in which every token is a row: with drafts or with taps."""
        is_needed, sizes = self.config.drafter.entry is not None or bool(self.taps), self.attention
        if not is_needed or not self.uses_graphs or self.config.pp > 1:
            return []
        return token_sizes(sizes.max_num_seqs, sizes.max_num_batched_tokens)

    @property
    def caches_prefixes(self) -> bool:
        """Whether requests find the prefixes that earlier ones computed."""
        return self.config.engine.prefix_caching

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the recurrent states of one request, of all layers and ranks."""
        forms = (
            state_form(tensor, self.attention.dtype, 1)
            for layer in self.spec.cache_layers
            if isinstance(layer, RecurrentState)
            for _, tensor in layer.tensors
        )
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)

    @property
    def blocks_per_snapshot(self) -> int:
        """Blocks for each snapshot of states, so that snapshots take a fifth of the cache's memory.

        Counted of the whole model, so that all ranks and stages have as many.
        """
        whole = replace(self.attention, num_kv_heads=self.spec.num_kv_heads)
        return max(1, -(-4 * self.snapshot_bytes // max(1, block_bytes(self.groups.num_places, whole))))

    def num_snapshots(self, num_blocks: int) -> int:
        """Slots for copies of states beside so many blocks: none where no prefix is cached or no layer has a state."""
        if not (self.caches_prefixes and self.groups.has_states):
            return 0
        if not self.groups.num_places:  # blocks take no memory: a quarter of what the states of running requests take
            return MIN_SNAPSHOTS + self.attention.max_num_seqs // 4
        return MIN_SNAPSHOTS + num_blocks // self.blocks_per_snapshot

    @property
    def shares_prefixes(self) -> bool:
        """Whether kernels are told which decodes share a prefix; not if batch-invariant, as it reorders their sums."""
        if self.config.engine.batch_invariant:
            return False
        is_told = self.kernels.needs.shared_prefix and self.caches_prefixes
        return is_told and self.groups.is_plain and not self.groups.has_states

    @property
    def overlaps(self) -> bool:
        """Whether a step is launched before the tokens of the last one are known."""
        overlap = self.config.engine.overlap
        return self.device.type == "cuda" if overlap is None else overlap


@dataclass(frozen=True)
class Place:
    """Where a rank computes, if it is another process's, perhaps on another machine."""

    device: torch.device
    compute_capability: tuple[int, int] | None = None
    """None on a CPU."""


def resolve(
    config: Config, host: PluginHost, rank: int = 0, place: Place | None = None, *, checkpoint: Checkpoint | None = None
) -> ResolvedConfig:
    """Decide what a configuration means on this machine, for one of its ranks.

    place: where that rank computes; None: on this machine. checkpoint: the model's, if it was opened already.

    Raises: PluginError, ConfigError or CheckpointError with the reason and the fix.
    """
    model_class = chosen(config.model).load()
    if checkpoint is None or hasattr(model_class, "open_checkpoint"):
        checkpoint = _opened(config.model, model_class, host)
    config = with_quantization(config, host, checkpoint)
    spec = stated_spec(chosen(config.model), model_class, checkpoint.config)
    if (last := max(config.engine.taps or (), default=0)) >= spec.num_layers:
        raise ConfigError(f"engine.taps names layer {last}; this model's layers are 0 to {spec.num_layers - 1}")
    ranks = LocalRanks.numbered(rank, config.tp, config.pp)
    place = place or place_here(config.device, ranks)
    device = place.device
    facts = Facts(
        device=device.type,
        dtype=pick_dtype(config.dtype, checkpoint, device),
        compute_capability=place.compute_capability,
        block_size=config.engine.block_size,
        head_dim=spec.head_dim if spec.value_dim is None else None,
        num_ranks=config.tp,
        num_stages=config.pp,
        attention=spec.attention_features,
        batch_invariant=config.engine.batch_invariant,
        kv_dtype=kv_dtype_of(config.engine, spec),
    )
    for option in (config.model, config.sampler, config.scheduler, config.quantization):
        if option.entry is not None:
            refuse_unmet(option.entry, facts)
    quantization = make_quantization(config, checkpoint)
    for option in (config.model, config.sampler):
        refuse(chosen(option), unmet_invariance(chosen(option).needs, facts))
    kernels = choose_kernels(host, config.kernels.name, facts)
    attention = attention_spec(config, spec, ranks, facts, device, kernels)
    refuse_uncut(config, model_class)
    counts = layer_counts(config.pp, spec.num_layers, config.engine.pp_layers)  # raises what does not fit
    groups = CacheGroups.of(spec, attention.max_model_len, counts)  # raises what the spec has wrong
    return ResolvedConfig(
        config,
        checkpoint,
        spec,
        attention,
        groups,
        kernels,
        ranks,
        facts,
        tuple(host.description),
        quantization=quantization,
        drafter_layers=drafter_layers(config.drafter, spec),
    )


def drafter_layers(option: Option, spec: ModelSpec) -> tuple[int, ...]:
    """The layers after which a drafter reads the residual stream, ascending.

    Raises: the drafter's error for a model that it does not fit; PluginError for layers that do not exist.
    """
    if option.entry is None:
        return ()
    found = option.entry.load().reads_layers(option.config, spec, config_of)
    if set(found) - set(range(spec.num_layers)):
        raise PluginError(
            breach(
                option.entry, "reads_layers", f"it returned {list(found)}; the layers are 0 to {spec.num_layers - 1}"
            )
        )
    return tuple(sorted(set(found)))


def config_of(checkpoint: str) -> Mapping[str, Any]:
    """The config.json of a checkpoint, a folder or a hub id. Raises: CheckpointError."""
    return resolve_checkpoint(checkpoint).config


def _opened(option: Option, model_class: type, host: PluginHost) -> Checkpoint:
    """The checkpoint that a model's option asks for."""
    model: ModelConfig = option.config
    if not model.checkpoint and model.weights == "checkpoint" and not hasattr(model_class, "open_checkpoint"):
        raise CheckpointError(f"model={option.name} needs model.checkpoint=...: a folder, or a hub id (owner/name)")
    return resolve_model(model, model_class, host)


def chosen(option: Option) -> Entry:
    """The plugin entry that an option names; it must name one."""
    assert option.entry is not None, f"{option.name} names no entry"
    return option.entry


def refuse_unmet(entry: Entry, facts: Facts) -> None:
    """Raise PluginError if the entry's needs are not met, or if it cannot be loaded: both before any weight is."""
    refuse(entry, unmet(entry.needs, facts))
    entry.load()


def refuse(entry: Entry, reasons: list[str]) -> None:
    """Raise PluginError if there is a reason why the entry does not fit."""
    if reasons:
        raise PluginError(f"{entry.kind} '{entry.name}' of {entry.origin} does not fit: {'; '.join(reasons)}")


def place_here(name: str, ranks: LocalRanks = ALONE) -> Place:
    """The place of a rank on this machine, on the device that `pick_device` finds for it."""
    device = pick_device(name, ranks)
    return Place(device, torch.cuda.get_device_capability(device) if device.type == "cuda" else None)


def pick_device(name: str, ranks: LocalRanks = ALONE) -> torch.device:
    """The device that a name means for a rank; "auto" is a GPU if there is one. Rank r has the r-th GPU from it on.

    Raises: ConfigError if the device of one of the ranks does not exist.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name}: no CUDA device is usable here; use device=cpu")
    if device.type == "cuda":
        first, count = device.index or 0, torch.cuda.device_count()
        if first >= count:
            raise ConfigError(f"device={name}: only {count} CUDA devices are here")
        if first + ranks.num_all > count:
            asked = f"tp={ranks.size}" if ranks.num_stages == 1 else f"tp={ranks.size} with pp={ranks.num_stages}"
            many = "as many" if ranks.num_stages == 1 else f"{ranks.num_all}"
            raise ConfigError(f"{asked} needs {many} CUDA devices from cuda:{first} on; {count} are here")
        device = torch.device("cuda", first + ranks.number)
    return device


def pick_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> str:
    """Name of the dtype to compute in; "auto" is float32 on a CPU and the checkpoint's own on a GPU."""
    if name != "auto":
        return name
    if device.type == "cpu":
        return "float32"
    stored = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype") or "bfloat16"
    return str(stored).removeprefix("torch.")


def kv_dtype_of(engine: EngineConfig, spec: ModelSpec) -> str | None:
    """Name of the torch dtype that engine.kv_dtype asks for; None: the model's own.

    Raises: ConfigError if the model has no keys and values that could be stored in another one.
    """
    found = KV_DTYPES[engine.kv_dtype]
    if found is not None and (spec.value_dim is not None or not keeps_tokens(spec)):
        kept = "states" if spec.value_dim is None else f"latent keys, of which its values are {spec.value_dim} numbers"
        raise ConfigError(
            f"engine.kv_dtype={engine.kv_dtype} stores keys beside values, and this model's layers keep {kept}; leave "
            "engine.kv_dtype out"
        )
    return found


def attention_spec(
    config: Config, spec: ModelSpec, ranks: LocalRanks, facts: Facts, device: torch.device, kernels: Entry
) -> AttentionSpec:
    """The sizes and limits of attention on one rank."""
    engine = config.engine
    heads, kv_heads = head_parts(spec.num_heads, spec.num_kv_heads, ranks)
    max_model_len = min(engine.max_model_len, spec.max_position)
    if max_model_len < engine.max_model_len != EngineConfig.max_model_len and ranks.number == 0:
        _log.warning(
            "engine.max_model_len=%d counts as %d: the checkpoint has no more positions",
            *(engine.max_model_len, max_model_len),
        )
    return AttentionSpec(
        num_heads=heads.size,
        num_kv_heads=kv_heads.size,
        head_dim=spec.head_dim,
        block_size=engine.block_size or _block_size(spec, max_model_len, kernels, caching=engine.prefix_caching),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=max_model_len,
        device=device,
        dtype=getattr(torch, facts.dtype),
        batch_invariant=engine.batch_invariant,
        value_dim=spec.value_dim,
        kv_dtype=None if facts.kv_dtype is None else getattr(torch, facts.kv_dtype),
    )


def _computes_states(kernels: type[Kernels]) -> bool:
    """Whether kernels have the operations of layers with states, so that layers need not compute them plainly."""
    return is_offered(kernels.short_convolution) and is_offered(kernels.gated_delta_rule)


def _block_size(spec: ModelSpec, max_model_len: int, kernels: Entry, *, caching: bool) -> int:
    """Tokens of a block: the kernels' preference. If no layer keeps tokens, one block stands for a whole request, or
    with prefix caching for the number of tokens after which states are saved.
    """
    needs = kernels.needs
    if keeps_tokens(spec):
        return needs.preferred_block_size
    size = max(SAVED_TOKENS, -(-max_model_len // MAX_SAVED)) if caching else max_model_len
    return -(-size // needs.block_size_multiple) * needs.block_size_multiple
