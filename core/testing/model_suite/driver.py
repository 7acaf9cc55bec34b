"""Runs a model without an engine, over the plain kernels, and checks its calls of `attend`.

Legend: T tokens of a step, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.checkpoint.load import random_weights
from hookline.core.contracts import WHOLE_MODEL, AttentionSpec, Batch, ModelSpec, Runtime, Stage, WeightTarget
from hookline.core.distributed.partition import head_parts
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.testing.batches import Row, make_batch
from hookline.core.testing.checks import PoisonedMemory, check, check_form, check_unchanged
from hookline.core.testing.model_suite.checked_attend import (
    ATTENDS,
    KEEPS_STATE,
    CheckedAttend,
    DrivenBatch,
    DrivenStates,
    kept_by,
)
from hookline.core.testing.plain_kernels import PlainKernels

BLOCK_SIZE = 4
NUM_SEQUENCES = 8
AMPLITUDE = 10.0
"""random_weights draws so small that a layer hardly matters; the driver multiplies by this."""


@dataclass(frozen=True)
class Chunk:
    """The next tokens of sequence `sequence`, of which `start` are in the cache."""

    sequence: int
    start: int
    tokens: Sequence[int]


class ModelDriver:
    """A rank of a model with random weights, and a cache with room for some sequences."""

    def __init__(
        self,
        model_class: Any,
        hf_config: Mapping[str, Any],
        ranks: LocalRanks | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        stage: Stage = WHOLE_MODEL,
    ) -> None:
        self.lengths_on_host = True
        self.spec: ModelSpec = model_class.spec(hf_config)
        self.ranks = ranks or LocalRanks()
        self.attention = attention_spec(self.spec, self.ranks, dtype, torch.device(device))
        self.kernels = PlainKernels(None, self.attention)
        with PoisonedMemory(), torch.inference_mode():
            runtime = Runtime(self.attention.device, dtype, self.ranks, self.kernels, stage=stage)
            self.model = model_class(hf_config, runtime)
        self.targets: Mapping[str, WeightTarget] = self.model.weight_targets()
        fill(self.targets)
        self.blocks_each = -(-self.attention.max_model_len // BLOCK_SIZE)
        shape = (self.attention.num_cached, self.spec.num_layers, NUM_SEQUENCES * self.blocks_each, BLOCK_SIZE)
        sizes = (self.attention.num_kv_heads, self.spec.head_dim)
        self.cache = torch.zeros(*shape, *sizes, dtype=dtype, device=device)
        self.states = DrivenStates(self.spec, self.attention, NUM_SEQUENCES, self.ranks.size)

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """The batch of these chunks; leading chunks of one token, behind cached ones, are decodes."""
        num_decodes = 0
        while num_decodes < len(chunks) and chunks[num_decodes].start and len(chunks[num_decodes].tokens) == 1:
            num_decodes += 1
        token_ids_T = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        rows = [self._row(chunk) for chunk in chunks]
        batch = make_batch(rows, self.attention, num_decodes=num_decodes, token_ids_T=token_ids_T)
        sequences, starts = [chunk.sequence for chunk in chunks], [chunk.start for chunk in chunks]
        return DrivenBatch(**vars(batch), sequences=sequences, starts=starts)

    def _row(self, chunk: Chunk) -> Row:
        context = chunk.start + len(chunk.tokens)
        blocks = [chunk.sequence + NUM_SEQUENCES * column for column in range(-(-context // BLOCK_SIZE))]
        return Row(context, len(chunk.tokens), tuple(blocks))

    @torch.inference_mode()
    def hidden(self, batch: Batch, rows_N: Tensor | None = None) -> Tensor:
        """The model's hidden states (T, D) of a batch, checked; or (N, D), if it computes the wanted rows alone."""
        given, attend = replace(batch, token_ids_T=batch.token_ids_T.clone()), self.attend_of(batch, rows_N)
        given = replace(given, positions_T=batch.positions_T.clone())
        hidden_TD: Tensor = self.model.forward(given.token_ids_T, given.positions_T, attend)
        check_unchanged("token_ids_T, which forward was given,", batch.token_ids_T, given.token_ids_T)
        check_unchanged("positions_T, which forward was given,", batch.positions_T, given.positions_T)
        num_rows = batch.num_tokens if rows_N is None or len(hidden_TD) == batch.num_tokens else len(rows_N)
        check_form("what forward returns", hidden_TD, (num_rows, self.spec.hidden_size), self.attention.dtype)
        self._check_calls(attend.called)
        if isinstance(batch, DrivenBatch):
            self.states.keep(batch)
        return hidden_TD

    def _check_calls(self, called: Sequence[tuple[int, str]]) -> None:
        kept = [kept_by(layer) for layer in self.spec.cache_layers]
        wanted = [layer for layer, what in enumerate(kept) if what == ATTENDS]
        attended = [layer for layer, what in called if what == ATTENDS]
        check(attended == wanted, f"forward called attend for layers {attended} and must for {wanted}")
        stated = sorted({layer for layer, what in called if what == KEEPS_STATE})
        wanted = [layer for layer, what in enumerate(kept) if what == KEEPS_STATE]
        check(stated == wanted, f"forward asked for the states of layers {stated} and must for {wanted}")

    @torch.inference_mode()
    def logits(self, *chunks: Chunk, batch: Batch | None = None) -> Tensor:
        """Logits (T, V) of every token of the chunks, of this rank's part of the vocabulary."""
        hidden_TD = self.hidden(batch or self.batch(chunks))
        logits_TV: Tensor = self.model.logits(hidden_TD.clone())
        columns = -(-self.spec.vocab_size // self.ranks.size)
        check_form("what logits returns", logits_TV, (len(hidden_TD), columns), self.attention.dtype)
        return logits_TV

    def attend_of(self, batch: Batch, rows_N: Tensor | None = None) -> CheckedAttend:
        """The `hookline.core.contracts.Attend` for a forward: it checks how it is called. rows_N: the wanted rows.

        The states of the batch's sequences are reset to their values before it.
        """
        if isinstance(batch, DrivenBatch):
            self.states.recall(batch)
        layers = [self.cache[:, layer] for layer in range(self.spec.num_layers)]
        given = self.spec, self.attention, self.kernels, layers, self.states.layers, batch, rows_N
        return CheckedAttend(*given, lengths_on_host=self.lengths_on_host)


def attention_spec(spec: ModelSpec, ranks: LocalRanks, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    """The sizes of one rank's kernels."""
    heads, kv_heads = head_parts(spec.num_heads, spec.num_kv_heads, ranks)
    limits = (NUM_SEQUENCES, 512, min(spec.max_position, 64))
    sizes = heads.size, kv_heads.size, spec.head_dim, BLOCK_SIZE, *limits, device, dtype
    return AttentionSpec(*sizes, value_dim=spec.value_dim)


def fill(targets: Mapping[str, WeightTarget], seed: int = 0) -> None:
    """Random weights in which everything counts: norms are not one, biases not zero. Ranks of any number agree.

    Weights that are integers, as quantised ones are, stay as they were drawn.
    """
    random_weights({name: replace(target, init="normal") for name, target in targets.items()}, seed)
    with torch.inference_mode():
        for piece in (piece for target in targets.values() for piece in target.pieces):
            assert piece.view is not None
            if piece.view.is_floating_point():
                stored = piece.view / piece.times - piece.add
                piece.view.copy_((stored * AMPLITUDE + piece.add + float(piece.init == "ones")) * piece.times)


def stored_weights(targets: Mapping[str, WeightTarget]) -> dict[str, Tensor]:
    """The checkpoint's tensors that would fill these targets, of a single rank, with their current values."""
    weights = {}
    for name, target in targets.items():
        if target.view is not None:
            unset = torch.nan if target.view.is_floating_point() else 0
            weights[name] = target.view.new_full(target.shape, unset)
            for piece in target.pieces:
                assert piece.view is not None
                piece.cut(weights[name]).copy_(piece.view / piece.times - piece.add)
    return weights


def tensors_with_nan(holder: Any, path: str = "model", depth: int = 6) -> list[str]:
    """Paths of the tensors inside an object's attributes, lists and dicts that hold NaN."""
    if isinstance(holder, Tensor):
        return [path] if holder.is_floating_point() and bool(holder.isnan().any()) else []
    if depth == 0 or isinstance(holder, type | str | PlainKernels):
        return []
    if isinstance(holder, list | tuple):
        children = [(f"{path}[{index}]", child) for index, child in enumerate(holder)]
    elif isinstance(holder, dict):
        children = [(f"{path}[{key!r}]", child) for key, child in holder.items()]
    else:
        children = [(f"{path}.{name}", child) for name, child in getattr(holder, "__dict__", {}).items()]
    return [found for name, child in children for found in tensors_with_nan(child, name, depth - 1)]
