"""The poolers of an engine: the installed plugins, the checkpoint's own settings, and how a rank constructs one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor

from hookline.core.assembly.resolve import ResolvedConfig
from hookline.core.checkpoint.embedding_files import pooling_defaults
from hookline.core.checkpoint.load import random_weights
from hookline.core.checkpoint.locate import locate
from hookline.core.checkpoint.safetensors_files import open_file
from hookline.core.contracts import Pooler, PoolerSpec, WeightTarget
from hookline.core.errors import CheckpointError
from hookline.core.plugin.registry import Entry
from hookline.core.requests.pooling import Poolers
from hookline.core.requests.prompt_readers import FIRST_PLUGIN
from hookline.core.tokenizer.codec import Codec
from hookline.core.worker.results.pooling import RankPooler
from hookline.core.worker.runner.model_runner import ModelRunner


def make_poolers(resolved: ResolvedConfig, entries: Iterable[Entry]) -> Poolers:
    """The poolers that requests can use."""
    chosen, checkpoint = resolved.config.pooler.entry, resolved.checkpoint
    return Poolers(
        entries,
        resolved.facts,
        chosen=None if chosen is None else chosen.name,
        defaults=pooling_defaults(checkpoint.folder, checkpoint.config),
        hidden_size=resolved.spec.hidden_size,
    )


def rank_poolers(resolved: ResolvedConfig, entries: Sequence[Entry], runner: ModelRunner) -> dict[int, RankPooler]:
    """The rank's poolers by their indices as readers, which are the same on every rank."""
    spec = PoolerSpec(
        hidden_size=resolved.spec.hidden_size,
        vocab_size=resolved.spec.vocab_size,
        device=resolved.device,
        hf_config=resolved.checkpoint.config,
        model=RankPoolerModel(resolved, runner.whole_logits),
    )
    num_rows = resolved.attention.max_num_seqs + 1
    return {
        FIRST_PLUGIN + index: RankPooler(
            str(entry),
            partial(_make, resolved, entry, spec),
            partial(_reads_all_tokens, entry),
            num_rows,
            resolved.device,
        )
        for index, entry in enumerate(entries)
    }


def _make(resolved: ResolvedConfig, entry: Entry, spec: PoolerSpec) -> Pooler:
    """Make a pooler: the chosen one with the configuration's values, any other with its defaults."""
    option = resolved.config.pooler
    is_chosen = option.entry is not None and option.entry.name == entry.name
    config = option.config if is_chosen else entry.config() if entry.config is not None else None
    pooler: Pooler = entry.load()(config, spec)
    return pooler


def _reads_all_tokens(entry: Entry) -> bool:
    return bool(entry.load().reads_all_tokens)


class RankPoolerModel:
    """`core.contracts.PoolerModel` on one rank."""

    def __init__(self, resolved: ResolvedConfig, whole_logits: Callable[[Tensor], Tensor]) -> None:
        self._resolved, self._whole_logits = resolved, whole_logits

    def weight(self, name: str, shape: Sequence[int]) -> Tensor:
        """See PoolerModel."""
        resolved, checkpoint = self._resolved, self._resolved.checkpoint
        weight = torch.empty(tuple(shape), dtype=torch.float32, device=resolved.device)
        if resolved.config.model.config.weights == "random":
            random_weights({name: WeightTarget.whole(weight)}, resolved.config.seed)
            return weight
        found = checkpoint.shapes().get(name)
        if found != tuple(shape):
            what = "does not have" if found is None else f"has {list(found)} as"
            raise CheckpointError(
                f"checkpoint {checkpoint.reference} {what} {name}, of {list(shape)}: the pooler needs it"
            )
        if checkpoint.source is not None:
            return weight.copy_(checkpoint.source.read(name)[...])
        checkpoint.stored[name].check(name)
        with open_file(checkpoint.stored[name].path) as file:
            return weight.copy_(file.get_tensor(name))

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See PoolerModel."""
        return self._whole_logits(hidden_BD.to(self._resolved.attention.dtype))

    def token_ids(self, text: str) -> list[int]:
        """See PoolerModel."""
        return self._codec.encode_text(text, add_special_tokens=False)

    @cached_property
    def _codec(self) -> Codec:
        return rank_codec(self._resolved)


def rank_codec(resolved: ResolvedConfig) -> Codec:
    """A tokenizer for plugins of this rank: that of model.tokenizer, else the checkpoint's."""
    checkpoint, reference = resolved.checkpoint, resolved.config.model.config.tokenizer
    folder, source = (locate(reference), None) if reference else (checkpoint.folder, checkpoint.source)
    return Codec(folder, source=source)
