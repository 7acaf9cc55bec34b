"""Puts one rank's worker together: its runner with request table, cache and step extensions.

While memory is measured, a worker is made several times with different numbers of blocks; parts that do not depend on
that number are made once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hookline.core.assembly.cache_scales import cache_scales
from hookline.core.assembly.poolers import rank_codec, rank_poolers
from hookline.core.assembly.resolve import ResolvedConfig, chosen
from hookline.core.assembly.stages import stage_of
from hookline.core.contracts import ExtensionSpec, Kernels, Model, RecurrentState, RequestFacts, StateTensor, TokenTexts
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.errors import CapacityError, ConfigError, HooklineError, RequestError, StepFault
from hookline.core.layers import FinalNorm
from hookline.core.plugin.blame import Blaming
from hookline.core.plugin.registry import Entry
from hookline.core.requests.scores import rounded_logprobs
from hookline.core.requests.step_extensions import InstalledExtensions
from hookline.core.sampling_params import SamplingParams
from hookline.core.step.executor import tapped_after
from hookline.core.tokenizer.codec import token_texts
from hookline.core.worker.request_table import LayerStates, RequestTable, state_form
from hookline.core.worker.runner.model_runner import PLAIN, Extras, ModelRunner
from hookline.core.worker.runner.step_extensions import RankExtensions
from hookline.core.worker.runner.token_masks import token_masks
from hookline.core.worker.stages.worker import StageWorker
from hookline.core.worker.startup.memory import GIB, MIN_BLOCKS, allocate_cache, block_bytes
from hookline.core.worker.step_checks import StepChecks
from hookline.core.worker.worker import Worker

logger = logging.getLogger("hookline")


class RankParts:
    """The parts of the rank that `resolved` is about.

    Raises: ConfigError if a layer's state cannot be split among the ranks.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        model: Model,
        kernels: Kernels,
        installed: InstalledExtensions,
        poolers: Sequence[Entry] = (),
    ) -> None:
        self._resolved, self._model, self._kernels = resolved, model, kernels
        self._installed, self._poolers = installed, poolers
        self._sampler = chosen(resolved.config.sampler).load()(resolved.config.sampler.config)
        self._blaming = blaming_in_steps(resolved, installed)
        self._states = make_states(resolved)
        self._cache_scales = cache_scales(resolved)
        self._taps = resolved.taps
        self._prepared = prepared_draws(resolved, installed, partial(rank_token_texts, resolved))

    def worker(self, num_blocks: int) -> Worker:
        """Make the worker with a KV cache of `num_blocks` blocks."""
        resolved, runner = self._resolved, self._runner(num_blocks)
        links, is_host = resolved.ranks.links, resolved.ranks.number == 0
        if links is None:
            return Worker(
                runner,
                is_host=is_host,
                blaming=self._blaming,
                prepared=self._prepared,
                keeps_states=resolved.keeps_states,
            )
        first_layers = stage_of(resolved.config, resolved.spec, 0).layers(resolved.spec.num_layers)
        return StageWorker(
            runner,
            resolved.stage,
            links,
            resolved.attention,
            resolved.spec.hidden_size,
            is_host=is_host,
            blaming=self._blaming,
            kept={tapped_after(layer): layer for layer in sorted(self._taps) if layer not in first_layers},
            prepared=self._prepared,
        )

    def _runner(self, num_blocks: int) -> ModelRunner:
        resolved, attention = self._resolved, self._resolved.attention
        runner = ModelRunner(
            self._model,
            self._kernels,
            self._sampler,
            self._table(num_blocks),
            allocate_cache(resolved.num_places, num_blocks, attention),
            ranks=resolved.ranks,
            vocab_size=resolved.spec.vocab_size,
            shards_vocabulary=chosen(resolved.config.sampler).needs.vocabulary_shards,
            extensions=self._extensions(),
            checks=StepChecks(
                {entry.kind: str(entry) for entry in entries_in_steps(resolved)}, attention, resolved.spec
            ),
            groups=resolved.groups,
            batch_invariant=attention.batch_invariant,
            first_layer=resolved.stage.first_layer,
            cache_scales=self._cache_scales,
            late=token_masks(resolved.spec.vocab_size, self._kernels, attention.device),
        )
        runner.readers.add(rank_poolers(resolved, self._poolers, runner))
        return runner

    def _table(self, num_blocks: int) -> RequestTable:
        attention, groups = self._resolved.attention, self._resolved.groups
        max_blocks = -(-attention.max_model_len // attention.block_size)
        if self._states is not None:
            self._states.make_slots(self._resolved.num_snapshots(num_blocks))
        sizes = attention.max_num_seqs, max_blocks, attention.block_size, num_blocks, attention.device
        return RequestTable(*sizes, windows=groups.windows, states=self._states, is_by_layer=groups.is_by_layer)

    def beside_snapshots(self, num_blocks: int) -> int:
        """The number of blocks left when the snapshots of states take their part of the memory for `num_blocks` blocks.

        A GPU's memory was measured with the fixed number of snapshots allocated already, a CPU's without them.
        Raises: CapacityError if too few blocks are left.
        """
        resolved, states = self._resolved, self._states
        if states is None or not resolved.num_places or not resolved.num_snapshots(0):
            return num_blocks
        size, row_bytes = block_bytes(resolved.num_places, resolved.attention), states.row_bytes
        fixed = resolved.num_snapshots(0) * row_bytes if resolved.device.type == "cpu" else 0
        left = ((num_blocks + 1) * size - fixed) * resolved.blocks_per_snapshot
        count = left // (size * resolved.blocks_per_snapshot + row_bytes) - 1
        if count < MIN_BLOCKS:
            raise CapacityError(
                f"no room for a KV cache beside {resolved.num_snapshots(0)} snapshots of states, {row_bytes / GIB:.3f} "
                "GiB each; give the cache more memory, or set engine.prefix_caching=false"
            )
        return count

    def _extensions(self) -> RankExtensions:
        token_texts_of_rank = partial(rank_token_texts, self._resolved)
        spec = replace(extension_spec(self._resolved), logits_of=self._logits_of)
        own_layers = self._resolved.stage.layers(self._resolved.spec.num_layers)
        return RankExtensions(self._installed.stages, spec, token_texts_of_rank, own_layers, self._taps)

    def _logits_of(self, stream_XD: Tensor) -> Tensor:
        """See ExtensionSpec."""
        return stream_logits(self._model, self._resolved.ranks, self._resolved.spec.vocab_size, stream_XD)


def make_states(resolved: ResolvedConfig) -> LayerStates | None:
    """The recurrent states of this rank's layers; None if none of its layers keeps one.

    Raises: ConfigError if one cannot be split among the ranks.
    """
    layers = {
        index: {name: _state_form(resolved, index, name, tensor) for name, tensor in layer.tensors}
        for index, layer in enumerate(resolved.spec.cache_layers)
        if isinstance(layer, RecurrentState) and index in resolved.stage.layers(resolved.spec.num_layers)
    }
    sizes = resolved.attention
    return LayerStates(layers, sizes.max_num_seqs, sizes.device) if layers else None


def _state_form(
    resolved: ResolvedConfig, layer: int, name: str, tensor: StateTensor
) -> tuple[tuple[int, ...], torch.dtype]:
    num_ranks = resolved.ranks.size
    if tensor.split_dim is not None and tensor.shape[tensor.split_dim] % num_ranks:
        raise ConfigError(
            f"tp={num_ranks} does not divide dimension {tensor.split_dim} of the state '{name}' of layer {layer}, "
            f"which is {tensor.shape}"
        )
    return state_form(tensor, resolved.attention.dtype, num_ranks)


def blaming_in_steps(resolved: ResolvedConfig, installed: InstalledExtensions) -> Blaming:
    """Makes errors in steps name the plugin whose code failed, and the step's other plugins, which may be the cause."""
    entries = entries_in_steps(resolved)
    part = ", ".join(f"{entry.kind}={entry.name}" for entry in entries)
    all_entries = [*entries, *(stage.entry for stage in installed.stages)]
    return Blaming(all_entries, f"during a step with {part}", kind=StepFault)


def entries_in_steps(resolved: ResolvedConfig) -> list[Entry]:
    """The plugin entries whose code runs in every step."""
    return [chosen(resolved.config.model), resolved.kernels, chosen(resolved.config.sampler)]


def extension_spec(resolved: ResolvedConfig) -> ExtensionSpec:
    """Sizes for the step extensions; their last row is for padding."""
    sizes, spec = resolved.attention, resolved.spec
    return ExtensionSpec(
        sizes.max_num_seqs + 1,
        spec.vocab_size,
        sizes.max_model_len,
        sizes.device,
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        dtype=sizes.dtype,
    )


def stream_logits(model: Model, ranks: LocalRanks, vocab_size: int, stream_XD: Tensor) -> Tensor:
    """The logits (X, V) float32 of rows of the residual stream, by the model's last norm and its head.

    Raises: RequestError if the model has neither a FinalNorm of hookline.core.layers nor the method of NormsStreams.
    """
    norm = next((one for one in vars(model).values() if isinstance(one, FinalNorm)), getattr(model, "final_norm", None))
    if norm is None:
        raise RequestError(
            "the model has neither a hookline.core.layers.FinalNorm nor a method final_norm, by which logits of inner "
            "layers are computed; use another model"
        )
    return ranks.all_gather_last(model.logits(norm(stream_XD)))[:, :vocab_size].float()


def rank_token_texts(resolved: ResolvedConfig) -> TokenTexts | None:
    """The tokenizer for this rank's extensions."""
    return token_texts(rank_codec(resolved), resolved.spec.vocab_size)


def prepared_draws(
    resolved: ResolvedConfig,
    installed: InstalledExtensions,
    load_tokenizer: Callable[[], TokenTexts | None] = lambda: None,
) -> list[Extras]:
    """The kinds of draws to make ready: by the checkpoint's own parameters, and by each of engine.prepared_sampling.

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
    """The extensions and log-probabilities that the first draw of a request with these parameters needs."""
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
