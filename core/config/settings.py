"""The configuration as plain frozen dataclasses, and `validate`, which makes it from a tree once.

The same for the command line and for `LLM(...)`: an unknown key is an error, and no DictConfig gets past here. The
kinds and core's own keys, with their defaults, are stated here. Options and their fields come from plugins;
conf/config.yaml says which of them are chosen by default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hookline.core.config.schema import build, check_keys
from hookline.core.contracts import FromSamplingParams, ModelConfig, QuantizationConfig
from hookline.core.errors import ConfigError, RequestError, shown
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.claims import bringing_checkpoint
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.presets import default_options, preset_values
from hookline.core.plugin.registry import (
    AUTO,
    CHOSEN_KINDS,
    EXECUTOR,
    EXTENSION_KINDS,
    KINDS,
    LOCAL,
    MODEL,
    OBSERVER,
    POOLER,
    QUANTIZATION,
    Entry,
    ExtensionOption,
    Option,
)
from hookline.core.request_options import check_tag_key
from hookline.core.sampling_params import MAX_SEED, SamplingParams
from hookline.core.util.mappings import merge
from hookline.core.util.ranges import bounded, check_ranges

DTYPES = (AUTO, "float32", "bfloat16", "float16")
MAX_COUNT = 2**31 - 1
"""Largest size or limit of an engine: the device keeps sizes and indices as 32-bit integers."""
PLACES = ("here", "apart")
"""Values of engine.rank_0."""
KV_DTYPES = {AUTO: None, "fp8_e4m3": "float8_e4m3fn"}
"""Values of engine.kv_dtype, and the names of the torch dtypes that they mean; None: the model's."""
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and limits of an engine.

    Raises: ConfigError naming the key, the value and the allowed range.
    """

    max_num_seqs: int = bounded(512, 1, MAX_COUNT)
    """Most requests running at the same time."""
    max_num_batched_tokens: int = bounded(16384, 1, MAX_COUNT)
    """Most tokens computed in one step."""
    max_model_len: int = bounded(4096, 1, MAX_COUNT)
    """Longest request, in tokens of prompt and output."""
    memory_fraction: float = bounded(0.9, above=0, high=1)
    """Part of the GPU's memory that Hookline may use, above 0 and at most 1."""
    cpu_cache_gib: float = bounded(2.0, above=0)
    """Size of the KV cache on a CPU, in GiB."""
    cpu_threads: int | None = bounded(None, 1, MAX_COUNT)
    """CPU threads that compute, for all ranks together. None: as many as torch takes; for a command whose model has a
    hidden size below 1024, one for each rank unless OMP_NUM_THREADS is set, since more mostly wait for each other. The
    number holds for the whole process, so an engine made in Python changes it only if this is set. In commands,
    threads sleep while they wait unless OMP_WAIT_POLICY is set."""
    block_size: int | None = bounded(None, 1, MAX_COUNT)
    """Tokens per KV block; None takes what the kernels prefer."""
    num_blocks: int | None = bounded(None, 1, MAX_COUNT)
    """KV blocks; if layers cache different things, each block is of one group of layers. None: as many as fit."""
    kv_dtype: str = AUTO
    """Dtype of keys and values in the KV cache: auto, the model's, or fp8_e4m3, 8 bits: twice the tokens in the same
    memory, and attention that reads half as much. Scales are the checkpoint's k_scale and v_scale, else 1."""
    pp_layers: tuple[int, ...] | None = None
    """pp > 1: layers of each stage, e.g. [10, 9, 9]. None: as equal as possible; if layers are left over, the first
    stages have one more, since the last one has the head."""
    cuda_graphs: bool = True
    """Replay decodes and small prefills as CUDA graphs, where kernels and sampler allow it; no effect on a CPU.

    Steps with both are replayed too if max_num_batched_tokens is at most 512 and max_model_len at most 16,384, and
    otherwise as joined_decodes says.
    """
    captured_prompt_tokens: int | None = bounded(None, 0, MAX_COUNT)
    """Tokens of the largest step of prompts that is captured as a CUDA graph, padded to a few sizes. None: as many as a
    GPU computes in about the time that the host would take to launch the step: 1,280 for a model of 8 billion weights,
    4,096 for one of 0.6 billion. More of them make the start slower; 0 captures none."""
    joined_decodes: int = bounded(128, 0, 128)
    """Most requests that decode in the same CUDA graph as new prompts: they need not wait for the prompts' step, and
    weights are read once less; first tokens come a little later. So it is while no request has a grammar, or asks for
    scores of its prompt or for a vector. Up to 26 graphs more are captured for it; 0 captures none, and policies that
    put prompts first compute prompts alone. No effect with max_num_batched_tokens up to 512, where all mixed steps are
    captured."""
    prepared_sampling: tuple[Any, ...] = ({"temperature": 1.0, "top_p": 0.9},)
    """Sampling parameters of requests that a GPU is made ready for at the start, so that the first of them needs no
    compiler and no new CUDA graphs: a list of mappings with fields of SamplingParams, e.g. [{top_p: 0.9},
    {top_p: 0.9, logprobs: 5}]. Only the step extensions that they use matter (top_p, top_k and min_p use the same one),
    and logprobs, rounded up to 0, 1, 5, 10 or 20. A step needs those of all its requests together, so list mixtures,
    too. Always ready are plain requests and requests that leave all to the checkpoint's generation_config.json."""
    compile_ahead: bool = True
    """If kernels that the engine needs are not in their compiler's cache at its start, compile them in processes of
    their own, one for each core, while it goes on. hookline warm compiles them ahead of any start."""
    kernel_cache: str | None = None
    """A folder that `hookline warm export=FOLDER` wrote: kernels are taken from it before their compiler's own cache is
    asked. It may be read-only and lie anywhere, and is to be trusted as code is. A folder made with another version of
    Triton or Python is ignored, with a warning. None: no such folder."""
    freeze_gc: bool | None = None
    """When the engine is ready, collect garbage once. From then on until the engine is closed, leave all objects that
    exist then, yours too, out of full collections, which would stop steps for 0.1 s and more. Reference cycles among
    those objects are searched when an AsyncLLM has had nothing to do for a minute, every ten minutes from then on, and
    when another engine starts. None: true in an AsyncLLM, false in an LLM."""
    prepare_grammars: bool | None = None
    """Make the grammar back end, if one is installed, in a thread while the weights load. A vocabulary of 151k tokens
    takes it a second, half of which blocks all of Python. None: true in an AsyncLLM and a server, where this would
    interrupt streams later, and for a batch whose rows all ask for a form; elsewhere false: the first request with
    structured_outputs makes it."""
    overlap: bool | None = None
    """Plan and launch a step before the tokens of the previous one are known. None: true on a GPU."""
    prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt beginnings."""
    batch_invariant: bool = False
    """Give a request the same bits, its tokens and log-probabilities, whatever runs beside it, and whether its prompt
    is cut, preempted or found in the cache. Costs some speed; refused if a plugin in use does not declare it."""
    max_queued_requests: int | None = bounded(None, 1, MAX_COUNT)
    """Most waiting requests. Further ones are refused until some have started; LLM.generate waits until then. None: no
    limit."""
    max_queued_tokens: int | None = bounded(None, 1, MAX_COUNT)
    """Further requests are refused once the prompts of waiting requests have this many tokens. None: no limit."""
    tag_keys: tuple[str, ...] | None = None
    """The only keys that requests' tags may have, e.g. [tenant, class]; others are refused. None: any."""
    taps: tuple[int, ...] | None = None
    """Layers, from 0, after which observers get each step's hidden states (the hook on_hidden_states). Every step then
    copies them to the host, and steps with prompts are no CUDA graphs, with stages (pp) none is. None: no layer."""
    executor: Any = LOCAL
    """Where ranks compute: local, on this host, or where a plugin places them, by its name or as {name: ..., field:
    value}. ray makes them actors of a Ray cluster, each with a GPU, or with CPUs where no node has a GPU. The cluster
    is this process' own, else RAY_ADDRESS's, else a new one on this host. The engine's process needs no GPU then."""
    rank_0: str = "here"
    """With executor=local, where rank 0 computes: here, in the engine's own process, or apart, in a process of its own,
    as the further ranks do."""
    stall_timeout_s: float = bounded(30.0, above=0)
    """Seconds without progress after which a scheduler policy is stopped with an error: it keeps asking to wait while
    nothing is computed, or does not return from one call."""
    rank_timeout_s: float = bounded(4.5, above=0)
    """With several ranks: seconds without a sign of life from a rank's process until the engine ends with an error.
    Callers have the error up to half a second later."""
    step_timeout_s: float = bounded(4.5, above=0)
    """With several ranks: seconds that ranks wait for another one in a step, beyond the time they took themselves to
    get there, until the engine ends with an error; 12 times as long while all ranks of a CPU compute. Up to five
    minutes of compiling do not count. Raise it to stop a rank in a debugger. With one rank, a step that makes no
    progress is ended after 12 times as long."""
    start_timeout_s: float = bounded(300.0, above=0)
    """With several ranks: seconds that they wait for another one while they import, build or load, until the start ends
    with an error. Compiling does not count."""

    def __post_init__(self) -> None:
        check_ranges(EngineConfig, vars(self), "engine")
        check_one_of("engine.rank_0", self.rank_0, PLACES)
        check_one_of("engine.kv_dtype", self.kv_dtype, tuple(KV_DTYPES))
        if self.tag_keys is not None:
            object.__setattr__(self, "tag_keys", _checked_tag_keys(self.tag_keys))
        if self.taps is not None:
            object.__setattr__(self, "taps", tuple(self.taps))
            if any(layer < 0 for layer in self.taps) or len(set(self.taps)) < len(self.taps):
                raise ConfigError(f"engine.taps={list(self.taps)} must be different layers, from 0")
        for place, given in enumerate(self.prepared_sampling):
            _check_sampling(f"engine.prepared_sampling[{place}]", given)
        object.__setattr__(self, "prepared_sampling", tuple(self.prepared_sampling))
        if self.pp_layers is not None:
            object.__setattr__(self, "pp_layers", tuple(self.pp_layers))
            if any(count < 1 for count in self.pp_layers):
                raise ConfigError(f"engine.pp_layers={list(self.pp_layers)}: each stage must have at least 1 layer")
        if self.max_model_len == 1:
            raise ConfigError("engine.max_model_len=1 must be at least 2: a token of a prompt, and one of its answer")
        if self.num_blocks == self.block_size == 1:
            raise ConfigError(
                "engine.num_blocks=1 must be at least 2 with engine.block_size=1: a token of a prompt, and one of its "
                "answer"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"engine.max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"engine.max_num_seqs={self.max_num_seqs}: each running request computes a token a step"
            )


def check_one_of(key: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ConfigError if the value of a key is none of these words."""
    if value not in allowed:
        raise ConfigError(f"{key}={shown(value)} is not one of {', '.join(allowed)}")


def _check_sampling(key: str, given: Any) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{key}={shown(given)} must be a mapping of fields of SamplingParams")
    check_keys(given, (one.name for one in fields(SamplingParams)), key)
    try:
        SamplingParams(**given)
    except RequestError as error:
        raise ConfigError(f"{key}: {error}") from error


def _checked_tag_keys(keys: Sequence[str]) -> tuple[str, ...]:
    try:
        for key in keys:
            check_tag_key(key)
    except RequestError as error:
        raise ConfigError(f"engine.tag_keys={shown(list(keys))}: {error}") from error
    return tuple(keys)


@dataclass(frozen=True)
class EngineKeys:
    """Root keys that describe an engine, beside the kinds."""

    tp: int = bounded(1, 1)
    """Tensor-parallel ranks: one process each, on GPUs device, device + 1, ..."""
    pp: int = bounded(1, 1)
    """Pipeline-parallel stages of consecutive layers, each of tp ranks: tp * pp processes and GPUs."""
    seed: int = bounded(0, 0, MAX_SEED)
    """Seed of random weights, and of requests without their own seed."""
    dtype: str = AUTO
    """auto, float32, bfloat16 or float16."""
    device: str = AUTO
    """auto, cpu, cuda or cuda:N."""
    observers: tuple[Option, ...] = ()
    """Observers of the engine: names, or {name: ..., field: value}; hookline info lists them."""
    processors: Mapping[str, Any] = field(default_factory=dict)
    """Default arguments of logits processors, as processors.NAME.FIELD=VALUE; a request's own extra_args override them
    field by field. hookline info NAME lists the fields."""
    extensions: Mapping[str, Any] = field(default_factory=dict)
    """Settings of step extensions, as extensions.NAME.FIELD=VALUE: of the extension itself, or default arguments of all
    requests, which a request's own extra_args override field by field. hookline info NAME lists the fields."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Sizes and limits of the engine."""


@dataclass(frozen=True, kw_only=True)
class Config(EngineKeys):
    """Everything an engine is built from. Plain data: it can be pickled and sent to another process."""

    model: Option
    scheduler: Option
    sampler: Option
    kernels: Option = field(default_factory=Option)
    grammars: Option = field(default_factory=Option)
    pooler: Option = field(default_factory=Option)
    quantization: Option = field(default_factory=lambda: Option(None, QuantizationConfig()))
    drafter: Option = field(default_factory=Option)
    """auto: no drafts."""

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model, tp for each of the pp stages; on GPUs each has one of its own."""
        return self.tp * self.pp

    @property
    def extension_options(self) -> Mapping[str, ExtensionOption]:
        """The settings of step extensions of either kind, by the extension's name."""
        return {**self.processors, **self.extensions}

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ConfigError(f"{name}={shown(value)} is not an int")
        check_ranges(Config, vars(self))
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype={shown(self.dtype)} is not one of {', '.join(DTYPES)}")
        if not _DEVICE.fullmatch(str(self.device)):
            raise ConfigError(f"device={shown(self.device)} is not one of auto, cpu, cuda, cuda:N")


ENGINE_KEYS = (*KINDS, *(field.name for field in fields(EngineKeys)))
"""All root keys that describe an engine."""
LIMIT_KEYS = tuple(f"engine.{field.name}" for field in fields(EngineConfig))
"""Full keys of the engine's limits, which are often looked for in the scheduler."""
ROOT_KEYS = tuple(field.name for field in fields(EngineKeys))
"""The root keys besides the kinds of plugins; tp, dtype and device are often looked for in the engine."""


def validate(tree: Mapping[str, Any], host: PluginHost) -> Config:
    """Check a tree of plain values and choose the options; missing keys have their defaults.

    A kind's value is the name of an option or preset, or a mapping with `name` and the fields to set.
    Raises: ConfigError for keys and values; PluginError for a name that is not there or is broken.
    """
    check_keys(tree, ENGINE_KEYS)
    defaults, given = default_options(), dict(tree)
    options: dict[str, Any] = {kind: _option(kind, given.pop(kind, None), defaults.get(kind), host) for kind in KINDS}
    engine = _mapping("engine", given.pop("engine", None) or {})
    further: dict[str, Any] = {
        "observers": _observers(given.pop("observers", None), host),
        **{f"{kind}s": _extensions(kind, given.pop(f"{kind}s", None), host) for kind in EXTENSION_KINDS},
    }
    limits = build(EngineConfig, engine, "engine", ROOT_KEYS)
    chosen_executor(limits, host)
    return Config(**options, **further, engine=limits, **given)


def chosen_executor(engine: EngineConfig, host: PluginHost) -> Option | None:
    """The option that `engine.executor` names; None: ranks are processes of this host.

    Raises: ConfigError for a field or its value; PluginError for a name that is not there or is broken.
    """
    value, key = engine.executor, f"engine.{EXECUTOR}"
    if isinstance(value, str) and host.registry.find(EXECUTOR, value) is None:
        if value == LOCAL:
            return None
        raise host.unknown(EXECUTOR, value, [LOCAL])
    return option_of(EXECUTOR, value, host, key)


def _observers(value: Any, host: PluginHost) -> tuple[Option, ...]:
    """Names of observers, or mappings of a name and the fields to set."""
    if not isinstance(value, str | list | tuple | None):
        raise ConfigError(f"observers={shown(value)} is not a list of names, or of mappings with a name and fields")
    names = [value] if isinstance(value, str) else value or []
    options = tuple(_observer(one, host) for one in names)
    for option in options:
        if [other.name for other in options].count(option.name) > 1:
            raise ConfigError(f"observers names '{option.name}' twice")
    return options


def _observer(value: Any, host: PluginHost) -> Option:
    return option_of(OBSERVER, value, host, "observers")


def _extensions(kind: str, value: Any, host: PluginHost) -> dict[str, ExtensionOption]:
    """By name, the settings of each step extension, and its default arguments for requests."""
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"{kind}s={shown(value)} is not a mapping; write {kind}s.NAME.FIELD=VALUE")
    options = {}
    for name, fields_ in (value or {}).items():
        key, entry = f"{kind}s.{name}", host.choose(kind, str(name))
        given = _mapping(key, fields_ or {})
        if entry.config is None and entry.arguments is not None and issubclass(entry.arguments, FromSamplingParams):
            known = ", ".join(f"sampling.{one.name}" for one in fields(entry.arguments))
            raise ConfigError(f"{key}: its arguments are sampling parameters; set {known} in its place")
        schemas = [one for one in (entry.config, entry.arguments) if one is not None]
        check_keys(given, [one.name for schema in schemas for one in fields(schema)], key)
        made = [_built(entry, schema, _of_schema(schema, given), key) for schema in schemas]
        config = made[0] if entry.config is not None else None
        arguments = made[-1] if entry.arguments is not None and _of_schema(entry.arguments, given) else None
        options[entry.name] = ExtensionOption(entry, config, arguments)
    return options


def _of_schema(schema: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given values that are fields of this dataclass."""
    return {one.name: given[one.name] for one in fields(schema) if one.name in given}


def option_of(kind: str, value: Any, host: PluginHost, key: str) -> Option:
    """The option that a name stands for, or a mapping with `name` and the fields to set; `key` names it in errors.

    Raises: ConfigError for a field or its value; PluginError for a name that is not there or is broken.
    """
    values = {"name": value} if isinstance(value, str) else dict(_mapping(key, value))
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError(f"{key}: {shown(value)} has no name")
    entry = host.choose(kind, name)
    if entry.config is None:
        check_keys(values, (), f"{key}.{name}")
        return Option(entry)
    return _made(entry, values, f"{key}.{name}")


def _option(kind: str, value: Any, default: Any, host: PluginHost) -> Option:
    values = {"name": value} if isinstance(value, str) else dict(_mapping(kind, value or {}))
    name = values.pop("name", AUTO if default is None and kind in CHOSEN_KINDS else default)
    if not isinstance(name, str):
        raise ConfigError(f"{kind}.name={shown(name)} is not the name of an option")
    if kind == MODEL and name == AUTO:
        return _auto_model(values, host)
    if kind == QUANTIZATION and name == AUTO:
        return Option(None, build(QuantizationConfig, values, kind, LIMIT_KEYS))
    if kind in CHOSEN_KINDS and name == AUTO:
        check_keys(values, (), kind)
        return Option()
    option, preset_fields = _resolve(kind, name, host)
    entry = host.choose(kind, option)
    if entry.config is None:
        check_keys(values, (), kind, LIMIT_KEYS)
        return Option(entry)
    return _made(entry, merge(preset_fields, values), kind, LIMIT_KEYS)


def _auto_model(values: Mapping[str, Any], host: PluginHost) -> Option:
    """The model that brings a checkpoint if none is named; else an open option, for `core.assembly.auto_model`.

    Raises: ConfigError for a field or its value, or if no checkpoint is named and no model brings one.
    """
    asked: ModelConfig = build(ModelConfig, values, MODEL, LIMIT_KEYS)
    if asked.checkpoint or asked.random_shape:
        return Option(None, asked)
    entry = bringing_checkpoint(host)
    if entry is None:
        raise ConfigError("model=auto needs model.checkpoint=FOLDER, a hub id, or a model's name: model=NAME")
    return option_with(entry, asked)


def option_with(entry: Entry, asked: ModelConfig) -> Option:
    """A model's option with the fields that model=auto was given: all that differ from ModelConfig's defaults."""
    usual = ModelConfig()
    given = {one.name: getattr(asked, one.name) for one in fields(ModelConfig)}
    return _made(entry, {key: value for key, value in given.items() if value != getattr(usual, key)}, MODEL)


def _made(entry: Entry, values: Mapping[str, Any], prefix: str, elsewhere: Sequence[str] = ()) -> Option:
    assert entry.config is not None
    return Option(entry, _built(entry, entry.config, values, prefix, elsewhere))


def _built(entry: Entry, schema: type, values: Mapping[str, Any], prefix: str, elsewhere: Sequence[str] = ()) -> Any:
    with Blaming((), "while its fields are checked", otherwise=entry):
        return build(schema, values, prefix, elsewhere)


def _resolve(kind: str, name: str, host: PluginHost) -> tuple[str, dict[str, Any]]:
    presets = [preset for preset in host.presets if preset.kind == kind]
    found = next((preset for preset in presets if preset.name == name), None)
    if host.registry.find(kind, name) is None and found is None:
        core_choice = [AUTO] if kind in CHOSEN_KINDS else []
        raise host.unknown(kind, name, [*core_choice, *(preset.name for preset in presets)])
    return preset_values(found, presets) if found is not None else (name, {})


def _mapping(key: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        names = "the name of an option or " if key in KINDS else ""
        raise ConfigError(f"{key}={shown(value)} is not {names}a mapping of fields")
    return value


def chosen_entries(config: Config, host: PluginHost) -> Iterator[Entry]:
    """The entries of all plugins that an engine of this configuration may call."""
    single = config.model, config.scheduler, config.sampler, config.kernels, config.quantization, config.drafter
    options = *single, *config.observers
    for option in options:
        if option.entry is not None:
            yield option.entry
    executor = chosen_executor(config.engine, host)
    if executor is not None and executor.entry is not None:
        yield executor.entry
    if config.kernels.entry is None:
        yield from host.registry.of_kind("kernels")
    for kind in (*EXTENSION_KINDS, POOLER):
        yield from host.registry.of_kind(kind)
