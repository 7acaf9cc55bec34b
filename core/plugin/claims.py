"""Chooses the model entry for a checkpoint with model=auto: the entry that claims the checkpoint's architectures.

A model claims architectures when it is registered; "*" claims the architectures that no other model claims. Imports no
plugin and no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from hookline.core.errors import PluginError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import unavailable
from hookline.core.plugin.registry import MODEL, Entry

REST = "*"
"""The claim of every architecture that no other model claims."""

HEADLESS = ("ForSequenceClassification", "Model")
"""Suffixes of the names of architectures without a language-model head."""


def bringing_checkpoint(host: PluginHost) -> Entry | None:
    """The first model whose config has a checkpoint by default; None if there is none."""
    for entry in host.registry.of_kind(MODEL):
        if getattr(entry.config, "checkpoint", ""):
            return entry
    return None


def claimant(host: PluginHost, architectures: Sequence[str]) -> tuple[Entry, str]:
    """The model that serves a checkpoint of these architectures, and the reason, for the log.

    Raises: PluginError naming both if two claim it and neither is registered with replace=True, or if none claims it.
    """
    usable = [entry for entry in host.registry.of_kind(MODEL) if not unavailable(entry.needs)]
    for architecture in dict.fromkeys([*architectures, *map(with_head, architectures)]):
        if found := _only([entry for entry in usable if architecture in entry.architectures], architecture):
            return found, f"it claims {architecture}"
    named = ", ".join(architectures) or "a checkpoint that names no architecture"
    if found := _only([entry for entry in usable if REST in entry.architectures], named):
        return found, f"no other model that is installed claims {named}"
    names = ", ".join(host.registry.names(MODEL)) or "none"
    raise PluginError(f"model=auto: no model that is installed claims {named}; name one of: {names}")


def is_claimed(host: PluginHost, architectures: Sequence[str]) -> bool:
    """Whether a model claims one of these by name."""
    usable = [entry for entry in host.registry.of_kind(MODEL) if not unavailable(entry.needs)]
    return any(not set(entry.architectures).isdisjoint(architectures) for entry in usable)


def claimant_of_rest(host: PluginHost) -> Entry | None:
    """The only usable model with the claim "*"; None if there is none, or several."""
    usable = [entry for entry in host.registry.of_kind(MODEL) if not unavailable(entry.needs)]
    found = [entry for entry in usable if REST in entry.architectures]
    return found[0] if len(found) == 1 else None


def with_head(architecture: str) -> str:
    """The architecture with a language-model head, by transformers' names: Qwen3Model -> Qwen3ForCausalLM."""
    body = next((architecture.removesuffix(one) for one in HEADLESS if architecture.endswith(one)), None)
    return architecture if body is None else f"{body}ForCausalLM"


def _only(claims: list[Entry], architecture: str) -> Entry | None:
    openly = [entry for entry in claims if entry.replaces]
    chosen = openly if len(claims) > 1 and len(openly) == 1 else claims
    if len(chosen) > 1:
        both = " and ".join(map(str, chosen))
        names = " or ".join(f"model={entry.name}" for entry in chosen)
        raise PluginError(f"model=auto: {both} claim {architecture}; choose {names}")
    return chosen[0] if chosen else None
