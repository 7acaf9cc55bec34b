"""Which kinds of draws an engine makes ready before its first request, besides plain ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.contracts import RequestFacts, TokenTexts
from hookline.core.engine.step_builder import rounded_logprobs
from hookline.core.errors import HooklineError
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.sampling_params import SamplingParams
from hookline.core.worker.runner.model_runner import PLAIN, Extras

logger = logging.getLogger("hookline")


def prepared_draws(
    resolved: ResolvedConfig,
    installed: InstalledExtensions,
    load_tokenizer: Callable[[], TokenTexts | None] = lambda: None,
) -> list[Extras]:
    """What draws need of requests that leave all to the checkpoint, and of those in engine.prepared_sampling.

    Each kind once; none where nothing is compiled or captured. Parameters that this engine would refuse are left out.
    The same on all ranks. load_tokenizer: for extensions that read texts.
    """
    if resolved.device.type != "cuda":
        return []
    installed = InstalledExtensions(installed.stages)  # the engine's own has no tokenizer yet, and must not keep that
    installed.use_tokenizer(load_tokenizer)
    kinds = (_kind(resolved, installed, given) for given in ({}, *resolved.config.engine.prepared_sampling))
    return [kind for kind in dict.fromkeys(kinds) if kind != PLAIN]


def _kind(resolved: ResolvedConfig, installed: InstalledExtensions, given: Mapping[str, Any]) -> Extras:
    """What the first draw of a request with these parameters needs."""
    try:
        params = SamplingParams(**given).resolved(resolved.checkpoint.sampling_defaults)
        assert params.temperature is not None
        facts = RequestFacts(1, params.temperature, frozenset(), resolved.spec.vocab_size, params.logprobs is not None)
        extensions = installed.prepare(params, facts).used(0)
    except HooklineError as error:
        logger.info("draws with %s are not made ready: %s", dict(given) or "the checkpoint's defaults", error)
        return PLAIN
    num_logprobs = -1 if params.logprobs is None else rounded_logprobs(params.logprobs)
    return Extras(extensions, min(num_logprobs, resolved.spec.vocab_size))
