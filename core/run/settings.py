"""What a command-line run is: a Config, the prompts with their sampling parameters, and where the results go.

Made once from the composed tree, before anything is loaded, so that a mistake in the last key costs no start-up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hookline.core.config.schema import check_keys
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineKeys, validate
from hookline.core.errors import ConfigError, RequestError
from hookline.core.frontend.profiling import Profile, ProfileKeys
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS
from hookline.core.request_info import INFO_KEYS, RequestInfo
from hookline.core.run.prompts import Line, check_any_good, read_prompts
from hookline.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class RunKeys(ProfileKeys, EngineKeys):
    """Root keys of a run, beside the kinds: their defaults are what a composed tree holds unless something is said."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of every prompt; lines of a .jsonl file may set their own."""
    priority: int = 0
    """Of every prompt, for schedulers that heed it; lower is more urgent. Lines may set their own, of the next three
    too."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """What to call the requests by, e.g. tags.tenant=acme; at most 8. A line's tags are added to these."""
    deadline_s: float | None = None
    """Seconds after its arrival by which each should be done: a wish that schedulers may heed."""
    cache_salt: str | None = None
    """At most 256 characters: only prefixes of requests with the same salt are found in the cache."""
    prompt: str | None = None
    """One prompt, raw text."""
    prompts: list[str] | None = None
    """Several, e.g. prompts='["a", "b"]'."""
    prompts_file: str | None = None
    """.txt: one a line; .jsonl: objects with prompt, messages or prompt_token_ids."""
    output: str | None = None
    """file.jsonl; None prints text."""
    usage: bool = False
    """Say on standard error how many tokens and how long it took."""


RUN_KEYS = (*KINDS, *(one.name for one in fields(RunKeys)))
"""All root keys of a run."""


@dataclass(frozen=True)
class RunConfig:
    """A validated run.

    params: one for each prompt. infos: for each, its INFO_KEYS as they were given. output: a .jsonl file; None prints
    text. usage: say what it took. profile: the steps to trace; None traces none. refused: why lines of a prompts file
    are no prompts, by their places among all that was asked for.
    """

    config: Config
    prompts: list[Any]
    params: list[SamplingParams]
    infos: list[Mapping[str, Any]]
    output: Path | None = None
    usage: bool = False
    profile: Profile | None = None
    refused: Mapping[int, str] = field(default_factory=dict)


def validate_run(tree: Mapping[str, Any], host: PluginHost, stdin: Callable[[], str | None] | None = None) -> RunConfig:
    """Check a composed tree and read its prompts.

    Raises: ConfigError, PluginError or RequestError naming the key, the value and the fix.
    """
    check_keys(tree, RUN_KEYS)
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    sampling = tree.get("sampling") or {}
    if not isinstance(sampling, Mapping):
        raise ConfigError(f"sampling={sampling!r} is not a mapping of sampling parameters")
    output, profile = _checked_output(tree.get("output")), Profile.of(tree)
    infos = {key: tree[key] for key in INFO_KEYS if tree.get(key) is not None}
    RequestInfo.validated(**infos, tag_keys=config.engine.tag_keys)
    sampled = SamplingParams.of(sampling)
    lines = read_prompts(tree, sampled, stdin, infos)
    usage = tree.get("usage", False)
    if not isinstance(usage, bool):
        raise ConfigError(f"usage={usage!r} is not a bool")
    from hookline.core.requests.logits_processing import (
        Processing,  # brings numpy, which a mistake above need not wait for
    )

    processing = Processing.of(host.registry, settings=config.processors)
    processing.check(sampled)
    lines = [_checked(line, processing.check) for line in lines]
    check_any_good(lines)
    good = [line for line in lines if not line.error]
    return RunConfig(
        config,
        [line.prompt for line in good],
        [line.params for line in good],
        [line.info for line in good],
        output,
        usage,
        profile,
        {place: line.error for place, line in enumerate(lines) if line.error},
    )


def _checked(line: Line, check: Callable[[SamplingParams], None]) -> Line:
    """The line, refused if its own parameters cannot be."""
    if not line.place or line.error:
        return line
    try:
        check(line.params)
    except RequestError as error:
        return line.refused(error)
    return line


def _checked_output(value: Any) -> Path | None:
    if value is None:
        return None
    path = Path(str(value))
    if path.suffix != ".jsonl":
        raise ConfigError(f"output={value}: the name must end in .jsonl; leave output out to print text")
    if path.is_dir():
        raise ConfigError(f"output={value} is a folder; name a file")
    if not path.parent.is_dir():
        raise ConfigError(f"output={value}: the folder {path.parent} does not exist; make it first")
    if not os.access(path.parent, os.W_OK):
        raise ConfigError(f"output={value}: the folder {path.parent} cannot be written to")
    return path
