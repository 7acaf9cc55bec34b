"""The configuration keys of a conversation, in addition to an engine's keys, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hookline.core.config.schema import build, check_keys
from hookline.core.config.settings import ENGINE_KEYS, Config, EngineKeys, validate
from hookline.core.errors import ConfigError, shown
from hookline.core.plugin.host import PluginHost
from hookline.core.sampling_params import SamplingParams
from hookline.core.serve.parsers import Parser, chosen_parsers


@dataclass(frozen=True)
class ChatConfig:
    """The system message of a conversation, its chat template's arguments, and how its answers are read."""

    system: str | None = None
    """The system message, which says how to answer; None: there is none."""
    reasoning_parser: Any = None
    """The parser that tells reasoning from the answer, as serve.reasoning_parser: a terminal shows reasoning faintly, a
    pipe gets none. None: all is the answer."""
    template: Any = None
    """Arguments of the chat template, e.g. chat.template.enable_thinking=false."""


@dataclass(frozen=True)
class ChatKeys(EngineKeys):
    """Root keys of a conversation, beside the kinds."""

    chat: ChatConfig = field(default_factory=ChatConfig)
    """See ChatConfig."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Sampling parameters of every answer; max_tokens is null here, so that an answer may take all the room left."""


@dataclass(frozen=True)
class ChatRun:
    """A validated conversation."""

    config: Config
    params: SamplingParams
    system: str | None
    template: Mapping[str, Any]
    parser: Parser | None
    """The parser of reasoning; None: all is the answer."""


def validate_chat(tree: Mapping[str, Any], host: PluginHost) -> ChatRun:
    """Check a composed tree.

    Raises: ConfigError, PluginError or RequestError naming the key, the value and the fix.
    """
    check_keys(tree, (*ENGINE_KEYS, "chat", "sampling"))
    config = validate({key: tree[key] for key in ENGINE_KEYS if key in tree}, host)
    chat: ChatConfig = build(ChatConfig, tree.get("chat") or {}, "chat")
    parser = chosen_parsers(chat.reasoning_parser, None, lambda: host, "chat").reasoning
    if not isinstance(chat.template or {}, Mapping):
        raise ConfigError(f"chat.template={shown(chat.template)} is not a mapping; write chat.template.NAME=VALUE")
    params = SamplingParams.of(tree.get("sampling") or {})
    if params.n != 1:
        raise ConfigError(f"sampling.n={params.n}: a conversation goes on from one answer; leave sampling.n out")
    from hookline.core.requests.step_extensions import InstalledExtensions  # brings numpy

    InstalledExtensions.of(host.registry, settings=config.extension_options).check(params)
    if parser is not None and parser.keeps_special_tokens:
        params = replace(params, skip_special_tokens=False)
    return ChatRun(config, params, chat.system, chat.template or {}, parser)
