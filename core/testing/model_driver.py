"""Runs a model without an engine, over the plain kernels, and checks what it asks of `attend` on the way.

Legend: T tokens of a step, D hidden, C = (H + 2K) * E, E head dim, P positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hookline.core.checkpoint.load import random_weights
from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    ModelSpec,
    QKNorm,
    Rope,
    Runtime,
    SlidingWindow,
    WeightTarget,
)
from hookline.core.distributed.partition import head_parts
from hookline.core.distributed.ranks import LocalRanks
from hookline.core.testing.batches import Row, make_batch
from hookline.core.testing.checks import PoisonedMemory, check, check_form, check_unchanged
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
    """One rank of a model with random weights, and a cache with room for some sequences."""

    def __init__(
        self,
        model_class: Any,
        hf_config: Mapping[str, Any],
        ranks: LocalRanks | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        self.spec: ModelSpec = model_class.spec(hf_config)
        self.ranks = ranks or LocalRanks()
        self.attention = attention_spec(self.spec, self.ranks, dtype, torch.device(device))
        self.kernels = PlainKernels(None, self.attention)
        with PoisonedMemory(), torch.inference_mode():
            runtime = Runtime(self.attention.device, dtype, self.ranks, self.kernels)
            self.model = model_class(hf_config, runtime)
        self.targets: Mapping[str, WeightTarget] = self.model.weight_targets()
        fill(self.targets)
        self.blocks_each = -(-self.attention.max_model_len // BLOCK_SIZE)
        shape = (2, self.spec.num_layers, NUM_SEQUENCES * self.blocks_each, BLOCK_SIZE)
        sizes = (self.attention.num_kv_heads, self.spec.head_dim)
        self.cache = torch.zeros(*shape, *sizes, dtype=dtype, device=device)
        self.attended: list[int] = []

    def batch(self, chunks: Sequence[Chunk]) -> Batch:
        """The batch of these chunks; those of one token that come first are decodes."""
        num_decodes = 0
        while num_decodes < len(chunks) and chunks[num_decodes].start and len(chunks[num_decodes].tokens) == 1:
            num_decodes += 1
        token_ids_T = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        rows = [self._row(chunk) for chunk in chunks]
        return make_batch(rows, self.attention, num_decodes=num_decodes, token_ids_T=token_ids_T)

    def _row(self, chunk: Chunk) -> Row:
        context = chunk.start + len(chunk.tokens)
        blocks = [chunk.sequence + NUM_SEQUENCES * column for column in range(-(-context // BLOCK_SIZE))]
        return Row(context, len(chunk.tokens), tuple(blocks))

    @torch.inference_mode()
    def hidden(self, batch: Batch, rows_N: Tensor | None = None) -> Tensor:
        """The model's hidden states (T, D) of a batch, checked; or (N, D), if it computes the wanted rows alone."""
        given, self.attended = replace(batch, token_ids_T=batch.token_ids_T.clone()), []
        given = replace(given, positions_T=batch.positions_T.clone())
        hidden_TD: Tensor = self.model.forward(given.token_ids_T, given.positions_T, self.attend_of(batch, rows_N))
        check_unchanged("token_ids_T, which forward was given,", batch.token_ids_T, given.token_ids_T)
        check_unchanged("positions_T, which forward was given,", batch.positions_T, given.positions_T)
        num_rows = batch.num_tokens if rows_N is None or len(hidden_TD) == batch.num_tokens else len(rows_N)
        check_form("what forward returns", hidden_TD, (num_rows, self.spec.hidden_size), self.attention.dtype)
        wanted = list(range(self.spec.num_layers))
        check(self.attended == wanted, f"forward called attend for layers {self.attended} and must for {wanted}")
        return hidden_TD

    @torch.inference_mode()
    def logits(self, *chunks: Chunk, batch: Batch | None = None) -> Tensor:
        """Logits (T, V) of every token of the chunks, of this rank's part of the vocabulary."""
        hidden_TD = self.hidden(batch or self.batch(chunks))
        logits_TV: Tensor = self.model.logits(hidden_TD.clone())
        columns = -(-self.spec.vocab_size // self.ranks.size)
        check_form("what logits returns", logits_TV, (len(hidden_TD), columns), self.attention.dtype)
        return logits_TV

    def attend_of(self, batch: Batch, rows_N: Tensor | None = None) -> Any:
        """What forward is given: `core.contracts.Attend` that checks how it is called, and wants these rows."""

        def attend(
            layer: int,
            qkv_TC: Tensor,
            rope: Rope | None,
            norm: QKNorm | None = None,
            form: AttentionForm = PLAIN_ATTENTION,
        ) -> Tensor:
            check(0 <= layer < self.spec.num_layers, f"attend was called for layer {layer} of {self.spec.num_layers}")
            self.attended.append(layer)
            self._check_attend(batch, qkv_TC, rope, norm)
            self._check_form(form)
            cache = self.spec.cache_layers[layer]
            window = cache.num_tokens if isinstance(cache, SlidingWindow) else None
            seen = batch if window is None else replace(batch, window=window)
            q_THE = self.kernels.qk_norm_rope_write(qkv_TC, self.cache[:, layer], seen, rope, norm)
            return self.kernels.attend(q_THE, self.cache[:, layer], seen, form).flatten(1)

        attend.rows_N = rows_N  # type: ignore[attr-defined]
        return attend

    def _check_attend(self, batch: Batch, qkv_TC: Tensor, rope: Rope | None, norm: QKNorm | None) -> None:
        sizes, head_dim = self.attention, self.spec.head_dim
        width = (sizes.num_heads + 2 * sizes.num_kv_heads) * head_dim
        check_form("qkv_TC, which attend was given,", qkv_TC, (batch.num_tokens, width), sizes.dtype)
        if rope is not None:
            width = rope.table_PE.shape[-1]
            fits = width % 2 == 0 and 0 < width <= head_dim
            check(fits, f"rope.table_PE has {width} columns and must have an even number up to head_dim={head_dim}")
            check_form("rope.table_PE", rope.table_PE, (len(rope.table_PE), width), torch.float32)
            enough = len(rope.table_PE) >= self.spec.max_position
            check(enough, f"rope.table_PE has {len(rope.table_PE)} rows for max_position={self.spec.max_position}")
        for weight_E in (norm.q_weight_E, norm.k_weight_E) if norm else ():
            check_form("a weight of QKNorm", weight_E, (head_dim,), weight_E.dtype)

    def _check_form(self, form: AttentionForm) -> None:
        unsaid = sorted(form.features - self.spec.attention_features)
        check(not unsaid, f"attend was given {', '.join(unsaid)}, which ModelSpec.attention does not name")
        if form.sinks_H is not None:
            check_form(
                "sinks_H, which attend was given,", form.sinks_H, (self.attention.num_heads,), form.sinks_H.dtype
            )


def attention_spec(spec: ModelSpec, ranks: LocalRanks, dtype: torch.dtype, device: torch.device) -> AttentionSpec:
    """The sizes of one rank's kernels."""
    heads, kv_heads = head_parts(spec.num_heads, spec.num_kv_heads, ranks)
    limits = (NUM_SEQUENCES, 512, min(spec.max_position, 64))
    return AttentionSpec(heads.size, kv_heads.size, spec.head_dim, BLOCK_SIZE, *limits, device, dtype)


def fill(targets: Mapping[str, WeightTarget], seed: int = 0) -> None:
    """Random weights in which everything counts: norms are not one, biases not zero. Ranks of any number agree."""
    random_weights({name: replace(target, init="normal") for name, target in targets.items()}, seed)
    with torch.inference_mode():
        for target in targets.values():
            if target.view is not None:
                target.view.mul_(AMPLITUDE).add_(float(target.init == "ones"))


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
