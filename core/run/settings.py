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
from hookline.core.errors import ConfigError
from hookline.core.frontend.profiling import Profile, ProfileKeys
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.registry import KINDS
from hookline.core.run.prompts import read_prompts
from hookline.core.sampling_params import SamplingParams


@dataclass(frozen=True)
class RunKeys(ProfileKeys, EngineKeys):
    """Root keys of a run, beside the kinds: their defaults are what a composed tree holds unless something is said."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Of every prompt; lines of a .jsonl file may set their own."""
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

    params: one for each prompt. output: a .jsonl file; None prints text. usage: say what it took. profile: the steps to
    trace; None traces none.
    """

    config: Config
    prompts: list[Any]
    params: list[SamplingParams]
    output: Path | None = None
    usage: bool = False
    profile: Profile | None = None


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
    prompts = read_prompts(tree, SamplingParams.of(sampling), stdin)
    usage = tree.get("usage", False)
    if not isinstance(usage, bool):
        raise ConfigError(f"usage={usage!r} is not a bool")
    from hookline.core.requests.logits_processing import (
        Processing,  # brings numpy, which a mistake above need not wait for
    )

    processing = Processing.of(host.registry)
    for _, params in prompts:
        processing.check(params)
    each = [params for _, params in prompts]
    return RunConfig(config, [prompt for prompt, _ in prompts], each, output, usage, profile)


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
