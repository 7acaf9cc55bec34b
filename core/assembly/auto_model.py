"""model=auto: chooses the model plugin for a checkpoint by its config.json, before anything is built.

Plugins are compared by the architectures that they registered. A plugin is imported only to ask whether it opens a file
that core cannot read, or whether it accepts a checkpoint that it claims where another plugin could serve it, too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hookline.core.checkpoint.checkpoint import Checkpoint, resolve_model
from hookline.core.checkpoint.locate import is_hub_id
from hookline.core.checkpoint.wrapped import causal_architecture
from hookline.core.config.settings import Config, option_with
from hookline.core.contracts import ModelConfig
from hookline.core.errors import PASSES, CheckpointError, ConfigError, PluginError
from hookline.core.plugin.claims import claimant, claimant_of_rest, is_claimed
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import unavailable
from hookline.core.plugin.registry import AUTO, MODEL, Entry

_log = logging.getLogger("hookline")


def with_model(config: Config, host: PluginHost) -> tuple[Config, Checkpoint | None]:
    """The configuration with a model in place of model=auto, and its checkpoint if that was opened for it.

    Which model it is, and why, is logged.

    Raises: CheckpointError if the checkpoint cannot be had; PluginError if no model claims it, or two do.
    """
    if config.model.entry is not None:
        return config, None
    asked: ModelConfig = config.model.config
    opener, checkpoint = _opener(asked, host), None
    if opener is None:
        checkpoint = resolve_model(asked, host=host)
        opener = _serving(*claimant(host, _architectures(checkpoint, host)), host, asked, checkpoint)
    entry, why = opener
    if checkpoint is not None and checkpoint.wrapper:
        why += f", for the language model alone of {checkpoint.wrapper[0]}"
    _log.info("model=%s takes '%s': %s", AUTO, entry.name, why)
    return replace(config, model=option_with(entry, asked)), checkpoint


def _serving(entry: Entry, why: str, host: PluginHost, asked: ModelConfig, checkpoint: Checkpoint) -> tuple[Entry, str]:
    """The model that claims a checkpoint, or if that refuses this config.json a model that takes all; and why.

    Raises: ConfigError with the reasons of both models, if the second refuses it, too.
    """
    rest = claimant_of_rest(host)
    if rest is None or rest is entry or (first := _refusal(entry, checkpoint)) is None:
        return entry, why
    second = _refusal(rest, checkpoint)
    if second is None:
        return rest, f"model={entry.name} claims the checkpoint's architecture and does not serve it ({first})"
    reason = first.partition(" does not support ")[2]
    raise ConfigError(first if reason and second.endswith(reason) else f"{first}; {second}")


def _refusal(entry: Entry, checkpoint: Checkpoint) -> str | None:
    """Why a model refuses a config.json; None if it takes it, or if its plugin fails, which is told later."""
    try:
        entry.load().spec(checkpoint.config)
    except ConfigError as error:
        return str(error)
    except PASSES:
        raise
    except Exception as error:
        _log.debug("model '%s' was not asked about a checkpoint: %s", entry.name, error)
    return None


def _architectures(checkpoint: Checkpoint, host: PluginHost) -> list[str]:
    """The architectures that its config.json names; beside towers, the whole's and its language model's.

    If no model claims any of these, transformers is asked, which takes a second.
    """
    named = checkpoint.config.get("architectures")
    found = [one for one in named if isinstance(one, str)] if isinstance(named, list | tuple) else []
    if checkpoint.wrapper is None:
        return found
    found += checkpoint.wrapper
    own = None if is_claimed(host, found) else causal_architecture(checkpoint.config)
    return found if own is None else [*found, own]


def _opener(asked: ModelConfig, host: PluginHost) -> tuple[Entry, str] | None:
    """The one model that opens a checkpoint which is a file, e.g. GGUF; None for folders and hub ids.

    Raises: PluginError if several do.
    """
    reference = asked.checkpoint
    path = Path(reference).expanduser()
    if not reference or path.is_dir() or (is_hub_id(reference) and not path.is_file()):
        return None
    found = list(_openers(asked, host))
    if len(found) > 1:
        both = " and ".join(map(str, found))
        names = " or ".join(f"model={entry.name}" for entry in found)
        raise PluginError(f"model=auto: {both} open {reference}; choose {names}")
    return (found[0], f"it opens {reference}") if found else None


def _openers(asked: ModelConfig, host: PluginHost) -> Iterator[Entry]:
    for entry in host.registry.of_kind(MODEL):
        if unavailable(entry.needs):
            continue
        try:
            model_class = entry.load()
            if hasattr(model_class, "open_checkpoint") and model_class.open_checkpoint(
                option_with(entry, asked).config
            ):
                yield entry
        except CheckpointError as error:
            _log.debug("model '%s' does not open %s: %s", entry.name, asked.checkpoint, error)
        except PluginError as error:
            _log.warning("%s", error)
