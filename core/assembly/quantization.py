"""Chooses the quantization that reads a checkpoint, and makes the weight factory for a rank's model."""

from __future__ import annotations

import logging
from dataclasses import replace

from hookline.core.checkpoint.checkpoint import Checkpoint
from hookline.core.checkpoint.safetensors_files import MXFP4, UNQUANTISED, quantisation
from hookline.core.checkpoint.stacked_experts import dtypes_by_matrix
from hookline.core.config.settings import Config
from hookline.core.contracts import Quantization, StoredForm
from hookline.core.errors import CheckpointError, ConfigError, PluginError
from hookline.core.plugin.host import PluginHost
from hookline.core.plugin.needs import unavailable
from hookline.core.plugin.registry import QUANTIZATION, Entry

_log = logging.getLogger("hookline")


def with_quantization(config: Config, host: PluginHost, checkpoint: Checkpoint) -> Config:
    """The configuration with the quantization that a checkpoint calls for in place of quantization=auto.

    Raises: CheckpointError if no installed quantization reads it; PluginError if two do; ConfigError if the one named
    in the configuration does not.
    """
    asked, stated = config.quantization, checkpoint.quantization
    method = None if stated is None else str(stated.get("quant_method") or stated.get("mode") or "unknown")
    if asked.entry is not None:
        _refuse_other(asked.entry, method, checkpoint.reference)
        return config
    if method is None or method == MXFP4:
        return config
    entry = _claimant(host, method, checkpoint)
    assert entry.config is not None
    _log.info("quantization=auto takes '%s': the checkpoint has quant_method %s", entry.name, method)
    option = replace(asked, entry=entry, config=entry.config(dequantize=asked.config.dequantize))
    return replace(config, quantization=option)


def make_quantization(config: Config, checkpoint: Checkpoint) -> Quantization | None:
    """The quantization of a configuration; None if weights are plain.

    Raises: ConfigError for what the checkpoint states and the quantization does not read.
    """
    option = config.quantization
    if option.entry is None:
        return None
    is_random = config.model.config.weights == "random"
    dtypes = {} if is_random else dtypes_by_matrix(checkpoint.stored)
    quantization: Quantization = option.entry.load()(option.config, StoredForm(checkpoint.quantization, dtypes))
    return quantization


def _claimant(host: PluginHost, method: str, checkpoint: Checkpoint) -> Entry:
    entries = [one for one in host.registry.of_kind(QUANTIZATION) if one.methods]
    found = [one for one in entries if method in one.methods]
    usable = [one for one in found if not unavailable(one.needs)]
    best = [one for one in usable if one.priority == max(other.priority for other in usable)]
    if len(best) > 1:
        both = " and ".join(map(str, best))
        names = " or ".join(f"quantization={one.name}" for one in best)
        raise PluginError(f"quantization=auto: {both} read quant_method {method}; choose {names}")
    if best:
        return best[0]
    told = quantisation({"quantization_config": checkpoint.quantization})
    assert told is not None
    lacking = [f"{one.name} does, and {'; '.join(unavailable(one.needs))}" for one in found]
    read = ", ".join(sorted({name for one in entries for name in one.methods})) or "none"
    why = "; ".join(lacking) or f"installed ones read: {read}"
    raise CheckpointError(
        f"{checkpoint.reference} is quantised ({told[1]}), which no quantization here reads ({why}); {UNQUANTISED}"
    )


def _refuse_other(entry: Entry, method: str | None, reference: str) -> None:
    if not entry.methods or method in entry.methods:
        return
    reads = f"quantization={entry.name} reads quant_method {' or '.join(entry.methods)}"
    if method is None:
        raise ConfigError(
            f"{reads}, and {reference} is not quantised; leave out quantization=, or take one that quantises while "
            "loading: quantization=fp8"
        )
    raise ConfigError(f"{reads}, and {reference} has {method}; leave out quantization=")
