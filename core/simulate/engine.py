"""A simulated engine: the real engine, scheduler and block pool, around an executor that only takes virtual time.

Values that the machine would decide, such as the number of KV blocks, come from the configuration or from the machine
of the cost model. Settings that change the speed and differ from the measured ones are refused. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from hookline.core.config.job_folder import job_folder
from hookline.core.config.settings import Config, EngineConfig, chosen_entries, validate
from hookline.core.contracts import DrafterSpec, Limits
from hookline.core.engine.engine import Engine
from hookline.core.errors import ConfigError, shown
from hookline.core.kv_cache.block_pool import BlockPool
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.observers import Observers, make_observers
from hookline.core.plugin.presets import preset_values
from hookline.core.plugin.registry import AUTO
from hookline.core.requests.admission import EngineLimits
from hookline.core.simulate.cost import CostModel, StepShapes
from hookline.core.simulate.executor import BlankExecutor, run_on
from hookline.core.speculation.speculation import Speculation

VOCAB_SIZE = 1 << 30
"""Vocabulary size for a cost model without one; any token of a trace is valid then."""
OF_THE_MACHINE = ("model", "sampler", "kernels", "tp", "pp", "dtype", "device")
"""Root keys that only change the cost of a step."""
ENGINE_OF_THE_MACHINE = ("memory_fraction", "cpu_cache_gib", "cpu_threads", "cuda_graphs", "pp_layers")
FREE = ("weights", "tokenizer", "chat")
"""Fields of a model that do not change its speed."""


def simulated_engine(config: Config, cost: CostModel, host: PluginHost) -> Engine:
    """The engine that a configuration describes, on a virtual clock.

    Raises: ConfigError if neither the configuration nor the cost model's origin says how large the pool is.
    """
    engine, origin = config.engine, cost.origin
    block_size, num_blocks = _pool_size(engine, origin)
    groups = cache_groups(origin)
    cost = as_configured(cost, engine)
    sizes = engine.max_num_seqs, engine.max_num_batched_tokens, engine.max_model_len
    plan = Limits(
        *sizes,
        block_size=block_size,
        num_blocks=num_blocks,
        max_blocks_per_token=groups.num_groups,
        joining=StepShapes.of(*sizes, **cost.captured).joining,
    )
    vocab_size = int(origin.get("vocab_size") or VOCAB_SIZE)
    limits = EngineLimits(
        plan,
        vocab_size,
        engine.stall_timeout_s,
        seed=config.seed,
        overlap=bool(origin.get("overlap", False)) if engine.overlap is None else engine.overlap,
        max_queued_requests=engine.max_queued_requests,
        max_queued_tokens=engine.max_queued_tokens,
        tag_keys=engine.tag_keys,
        num_cache_tokens=groups.longest(plan.num_blocks, block_size, plan.max_num_batched_tokens, plan.max_model_len),
    )
    entry = config.scheduler.entry
    assert entry is not None, "a scheduler is always chosen by name"
    with Blaming(chosen_entries(config, host), "while starting"):
        simulated = Engine(
            entry.load()(config.scheduler.config),
            BlankExecutor(vocab_size, config.seed),
            BlockPool(plan.num_blocks, block_size, caching=engine.prefix_caching and not groups.has_states),
            limits,
            policy=entry.name,
            origin=str(entry.origin),
            observers=Observers(host.manager, make_observers(config.observers)),
            model_name="simulated",
            job_folder=job_folder(),
            shares_prefixes=_shares_prefixes(config, groups, origin, host),
            groups=groups,
            decoding=pretended_drafts(config, limits),
        )
    run_on(simulated, cost)
    return simulated


def pretended_drafts(config: Config, limits: EngineLimits) -> Speculation | None:
    """The drafts of a simulated engine: of a drafter that pretends how many of them are right; None without a drafter.

    Raises: ConfigError for a drafter whose drafts have to be right, since a simulation has no text.
    """
    option, plan = config.drafter, limits.plan
    if option.entry is None:
        return None
    made = option.entry.load()
    if made.pretended_length is None:
        raise ConfigError(
            f"drafter={option.name}: a simulation has no text that drafts could be right about; take drafter=synthetic "
            "drafter.length=TOKENS, the tokens that a request keeps of a step in the mean"
        )
    drafter = made(option.config, DrafterSpec(limits.vocab_size, plan.max_num_seqs, plan.max_model_len))
    return Speculation(
        drafter,
        str(option.entry),
        limits.extensions,
        limits.vocab_size,
        max_num_batched_tokens=limits.plan.max_num_batched_tokens,
    )


def cache_groups(origin: Mapping[str, Any]) -> CacheGroups:
    """The groups of layers of the measured model, without their layers; older cost models do not say, and have one."""
    facts = origin.get("cache_groups") or {}
    return CacheGroups(tuple(facts.get("windows", (None,))), (), 0, (), bool(facts.get("has_states", False)))


def _pool_size(engine: EngineConfig, origin: Mapping[str, Any]) -> tuple[int, int]:
    """The block size and the number of blocks: as set, or else as many as hold the measured cache."""
    measured_size = int(origin.get("block_size") or 0)
    measured_tokens = int(origin.get("num_blocks") or 0) * measured_size
    block_size = engine.block_size or measured_size
    missing = [] if block_size else ["engine.block_size"]
    if not (engine.num_blocks or measured_tokens):
        missing.append("engine.num_blocks")
    if missing:
        raise ConfigError(f"{' and '.join(missing)} must be set: the cost model does not say what the machine had")
    return block_size, engine.num_blocks or max(1, measured_tokens // block_size)


def as_configured(cost: CostModel, engine: EngineConfig) -> CostModel:
    """The cost model of an engine that captures steps with prompts as this configuration says."""
    tokens, joined = engine.captured_prompt_tokens, min(cost.captured_joined_decodes, engine.joined_decodes)
    if tokens is not None:
        cost = replace(cost, captured_prompt_tokens=tokens)
    return replace(cost, captured_joined_decodes=joined)


def _shares_prefixes(config: Config, groups: CacheGroups, origin: Mapping[str, Any], host: PluginHost) -> bool:
    if not (config.engine.prefix_caching and groups.is_plain) or config.engine.batch_invariant:
        return False
    name = origin.get("kernels")
    entry = host.registry.find("kernels", str(name)) if name else None
    return entry is not None and entry.needs.shared_prefix


def check_machine(tree: Mapping[str, Any], config: Config, cost: CostModel, host: PluginHost) -> None:
    """Refuse settings of the machine other than the measured ones: their speed is not known.

    tree: as composed, and config: as validated. A key at its default means the measured machine's value.
    Raises: ConfigError naming the key, its value and the measured value.
    """
    origin, default = cost.origin, validate({}, host)
    measured = {"pp": 1, **origin.get("config", {})}
    for key in OF_THE_MACHINE:
        if getattr(config, key) != getattr(default, key):
            _refuse_other(key, tree[key], measured.get(key), _came_to(key, measured.get(key), origin), host)
    for key in ENGINE_OF_THE_MACHINE:
        if getattr(config.engine, key) != getattr(default.engine, key):
            _refuse_other(f"engine.{key}", tree["engine"][key], measured.get("engine", {}).get(key), None, host)


def _came_to(key: str, measured: Any, origin: Mapping[str, Any]) -> str | None:
    """The value that `auto` had on the measured machine; None if the cost model does not say."""
    if key == "kernels":
        return str(origin["kernels"]) if origin.get("kernels") else None
    device = origin.get("device")
    if measured != AUTO or key not in ("device", "dtype") or not device:
        return None
    is_cpu = str(device).startswith("cpu")
    if key == "device":
        return "cpu" if is_cpu else "cuda"
    return "float32" if is_cpu else None  # a GPU takes the checkpoint's, which is not recorded


def _refuse_other(key: str, value: Any, measured: Any, came_to: str | None, host: PluginHost) -> None:
    if _what_counts(value) == _what_counts(measured) or (came_to and _name(value) == came_to):
        return
    fix = f"leave {key} out, or fit a model to benchmarks with it"
    if measured is None:
        raise ConfigError(f"{key}={_name(value)}: the cost model does not say what it was measured with; {fix}")
    asked, other = f"{key}={_name(value)}", _name(measured)
    if isinstance(value, Mapping) and isinstance(measured, Mapping) and _name(value) == _name(measured):
        asked, other = (
            f"{key}={_option(key, one, host)}{_fields(key, one, value, measured)}" for one in (value, measured)
        )
    elif _name(measured) == AUTO:
        other = f"auto, {f'which was {came_to}' if came_to else 'and does not say what auto was there'}"
    raise ConfigError(f"{asked}: the cost model was not measured with it but with {other}; {fix}")


def _option(kind: str, value: Mapping[str, Any], host: PluginHost) -> Any:
    """The preset with these values, or the option's own checkpoint or name."""
    found: list[tuple[int, str]] = []
    for preset in host.presets:
        if preset.kind != kind:
            continue
        with suppress(ConfigError):  # a preset that is broken was not chosen
            base, values = preset_values(preset, host.presets)
            if base == value.get("name") and all(value.get(name) == one for name, one in values.items()):
                found.append((len(values), preset.name))
    return max(found)[1] if found else _name(value)


def _fields(kind: str, of: Mapping[str, Any], value: Mapping[str, Any], measured: Mapping[str, Any]) -> str:
    """The fields in which two configurations of an option differ, with their values in `of`."""
    names = [name for name in {**value, **measured} if value.get(name) != measured.get(name) and name not in FREE]
    return f" ({', '.join(f'{kind}.{name}={shown(of.get(name))}' for name in names)})"


def _what_counts(value: Any) -> Any:
    return {key: one for key, one in value.items() if key not in FREE} if isinstance(value, Mapping) else value


def _name(value: Any) -> Any:
    """An option's checkpoint or name; a plain value itself."""
    return value.get("checkpoint") or value.get("name") if isinstance(value, Mapping) else value
