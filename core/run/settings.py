"""The settings of a command-line run: a Config, the prompts with their sampling parameters, and the output file.

Made once from the composed tree, before anything is loaded, so that a mistake in the last key costs no start-up.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hookline.core.config.schema import build, check_keys
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineKeys, validate
from hookline.core.errors import ConfigError, RequestError, shown
from hookline.core.frontend.profiling import Profile, ProfileKeys
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS
from hookline.core.pooling_params import CLASSIFY, EMBED, PoolingParams
from hookline.core.request_options import LINE_KEYS, RequestOptions
from hookline.core.run.prompts import PromptLine, Prompts, check_any_good, read_prompts
from hookline.core.sampling_params import SamplingParams
from hookline.core.util.files import check_writable, path_of
from hookline.core.util.ranges import bounded

GENERATE = "generate"
TASKS = (GENERATE, EMBED, CLASSIFY)
"""Values of the key `task`."""


@dataclass(frozen=True)
class VectorKeys:
    """How vectors are made, beside the option pooler."""

    normalize: bool | None = None
    """Scale vectors to length 1; None: as the checkpoint says."""
    dimensions: int | None = bounded(None, 1)
    """Keep this many of the first numbers."""


@dataclass(frozen=True)
class RunKeys(ProfileKeys, EngineKeys):
    """Root keys of a run, beside the kinds: their defaults are what a composed tree holds unless something is said."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of every prompt; lines of a .jsonl file may set their own."""
    priority: int = 0
    """Of every prompt; lower is more urgent, and only some schedulers use it. Lines of a .jsonl file may set their own,
    as of the next three keys."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Labels of the requests, e.g. tags.tenant=acme; at most 8. A line's tags are added to these."""
    deadline_s: float | None = None
    """Seconds after its arrival by which each request should be done. Only some schedulers use it."""
    cache_salt: str | None = None
    """At most 256 characters: only prefixes of requests with the same salt are found in the cache."""
    prompt: str | None = None
    """A single prompt, raw text."""
    prompts: list[str] | None = None
    """Several, e.g. prompts='["a", "b"]'."""
    prompts_file: str | None = None
    """.txt: one a line; .jsonl: objects with prompt, messages or prompt_token_ids."""
    output: str | None = None
    """file.jsonl; None prints text. With vectors, file.npy too: one row for each prompt, NaN if it was refused."""
    task: str = GENERATE
    """generate; embed or classify: a vector of each prompt, by the option pooler."""
    pooling: VectorKeys = field(default_factory=VectorKeys)
    """Of every prompt's vector."""
    usage: bool = False
    """Write to standard error how many tokens the run had, and how long it took."""


RUN_KEYS = (*KINDS, *(one.name for one in fields(RunKeys)))
"""All root keys of a run."""


@dataclass(frozen=True)
class RunConfig:
    """A validated run.

    lines: its prompts; lines with an error are refused. output: a .jsonl file; None prints text. usage: print tokens
    and times. profile: the steps to trace; None traces none. pooling: of vectors; None generates text.
    """

    config: Config
    lines: Prompts
    output: Path | None = None
    usage: bool = False
    profile: Profile | None = None
    pooling: PoolingParams | None = None


def validate_run(tree: Mapping[str, Any], host: PluginHost, stdin: Callable[[], str | None] | None = None) -> RunConfig:
    """Check a composed tree and read its prompts.

    Raises: ConfigError, PluginError or RequestError naming the key, the value and the fix.
    """
    check_keys(tree, RUN_KEYS)
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    sampling = tree.get("sampling") or {}
    if not isinstance(sampling, Mapping):
        raise ConfigError(f"sampling={sampling!r} is not a mapping of sampling parameters")
    pooling, sampled = _pooling(tree), SamplingParams.of(sampling)
    _refuse_unused(sampled, pooling)
    output, profile = _checked_output(tree.get("output"), has_vectors=pooling is not None), Profile.of(tree)
    given = {key: tree[key] for key in LINE_KEYS if tree.get(key) is not None}
    RequestOptions(**given).checked(config.engine.tag_keys)
    lines = read_prompts(tree, sampled, stdin, given)
    usage = tree.get("usage", False)
    if not isinstance(usage, bool):
        raise ConfigError(f"usage={usage!r} is not a bool")
    from hookline.core.requests.step_extensions import (
        InstalledExtensions,  # brings numpy, which a mistake above need not wait for
    )

    installed = InstalledExtensions.of(host.registry, settings=config.extension_options)
    installed.check(sampled)
    lines = [_checked(line, installed.check, config.engine.tag_keys, pooling) for line in lines]
    check_any_good(lines)
    return RunConfig(config, lines, output, usage, profile, pooling)


def _refuse_unused(params: SamplingParams, pooling: PoolingParams | None) -> None:
    if pooling is not None and params != SamplingParams():
        raise ConfigError(f"sampling.* is for task={GENERATE}; task={pooling.task} draws no token")


def _checked(
    line: PromptLine,
    check: Callable[[SamplingParams], None],
    tag_keys: Collection[str] | None,
    pooling: PoolingParams | None,
) -> PromptLine:
    """The line; with an error if its own sampling parameters or options are invalid."""
    if not line.place or line.error:
        return line
    try:
        _refuse_unused(line.params, pooling)
        check(line.params)
        RequestOptions(**line.options).checked(tag_keys)
    except (ConfigError, RequestError) as error:
        return line.refused(error)
    return line


def _pooling(tree: Mapping[str, Any]) -> PoolingParams | None:
    task, keys = tree.get("task", GENERATE), tree.get("pooling") or {}
    if task not in TASKS:
        raise ConfigError(f"task={shown(task)} is not one of {', '.join(TASKS)}")
    if not isinstance(keys, Mapping):
        raise ConfigError(f"pooling={keys!r} is not a mapping; write pooling.dimensions=...")
    found = build(VectorKeys, keys, "pooling")
    if task == GENERATE and found != VectorKeys():
        raise ConfigError(f"pooling.* is for task={EMBED}; a completion has no vector")
    return None if task == GENERATE else PoolingParams(None, found.normalize, found.dimensions, task)


def _checked_output(value: Any, *, has_vectors: bool) -> Path | None:
    if value is None:
        return None
    path = path_of(value)
    suffixes = (".jsonl", ".npy") if has_vectors else (".jsonl",)
    if path.suffix not in suffixes:
        raise ConfigError(
            f"output={value}: the name must end in {' or '.join(suffixes)}; leave output out to print text"
        )
    check_writable(path, "output")
    return path
