"""The `attend` that a driven model's forward gets: it checks each call, and keeps the layers' caches and states.

Legend: T tokens of a step, B sequences of it, C = (H + 2K) * E, H heads, K kv heads, E head dim, P positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    Kernels,
    LayerCache,
    ModelSpec,
    NoCache,
    QKNorm,
    RecurrentState,
    Rope,
    SharedCache,
    SlidingWindow,
    StateRows,
)
from hookline.core.testing.checks import check, check_form
from hookline.core.worker.request_table import state_form
from hookline.core.worker.step_checks import attend_fault, attend_width

ATTENDS = "attention"
KEEPS_STATE = "a state"


@dataclass
class DrivenBatch(Batch):
    """A batch, and of each of its rows the sequence and how many of its tokens came before, on the host."""

    sequences: Sequence[int] = ()
    starts: Sequence[int] = ()


class DrivenStates:
    """The recurrent states of some sequences, with a copy after each chunk, so that a chunk can be repeated."""

    def __init__(self, spec: ModelSpec, attention: AttentionSpec, num_sequences: int, num_ranks: int) -> None:
        self.layers: dict[int, dict[str, Tensor]] = {}
        for index, layer in enumerate(spec.cache_layers):
            if isinstance(layer, RecurrentState):
                forms = [(name, *state_form(tensor, attention.dtype, num_ranks)) for name, tensor in layer.tensors]
                self.layers[index] = {
                    name: torch.zeros(num_sequences + 1, *shape, dtype=dtype, device=attention.device)
                    for name, shape, dtype in forms
                }
        self._kept: dict[tuple[int, int], list[Tensor]] = {}

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all states."""
        return [tensor for named in self.layers.values() for tensor in named.values()]

    def recall(self, batch: DrivenBatch) -> None:
        """Restore the states before these chunks."""
        for sequence, start in zip(batch.sequences, batch.starts, strict=True):
            kept = (
                self._kept.get((sequence, start), [None] * len(self.tensors)) if start else [None] * len(self.tensors)
            )
            for tensor, value in zip(self.tensors, kept, strict=True):
                tensor[sequence] = 0 if value is None else value

    def keep(self, batch: DrivenBatch) -> None:
        """Copy the states after these chunks."""
        ends = batch.context_lens_host
        assert ends is not None
        for sequence, end in zip(batch.sequences, ends.tolist(), strict=True):
            self._kept[sequence, end] = [tensor[sequence].clone() for tensor in self.tensors]


class CheckedAttend:
    """`hookline.core.contracts.Attend` over the plain kernels. called: (layer, ATTENDS or KEEPS_STATE) of each call.

    kv_layers: the cache of each layer, also of layers that share one or have none. lengths_on_host: whether states come
    with lengths on the host; in a captured step with prompts they do not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        attention: AttentionSpec,
        kernels: Kernels,
        kv_layers: Sequence[Tensor],
        states: Mapping[int, Mapping[str, Tensor]],
        batch: Batch,
        rows_N: Tensor | None = None,
        *,
        lengths_on_host: bool = True,
    ) -> None:
        self.spec, self.attention, self.kernels, self.kv_layers = spec, attention, kernels, kv_layers
        self.lengths_on_host = lengths_on_host
        self.layer_states, self.batch, self.rows_N = states, batch, rows_N
        self.called: list[tuple[int, str]] = []
        sequences = batch.sequences if isinstance(batch, DrivenBatch) else ()
        starts = batch.starts if isinstance(batch, DrivenBatch) else ()
        self.sequences_B = torch.tensor(sequences, dtype=torch.int64, device=attention.device)
        self.is_new_B = torch.tensor([start == 0 for start in starts], device=attention.device)

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend."""
        self._call(layer, ATTENDS)
        cache = self.spec.cache_layers[layer]
        self._check(cache, qkv_TC, rope, norm, form)
        owner = cache.layer if isinstance(cache, SharedCache) else layer
        seen, kv_2NSKE = self._seen(self.spec.cache_layers[owner]), self.kv_layers[owner]
        if owner == layer:
            q_THE = self.kernels.qk_norm_rope_write(qkv_TC, kv_2NSKE, seen, rope, norm)
        else:
            q_THE = qkv_TC.reshape(len(qkv_TC), -1, self.spec.head_dim)
            no_keys_TKE = q_THE.new_zeros(len(q_THE), *kv_2NSKE.shape[-2:])
            q_THE, _ = self.kernels.qk_norm_rope(q_THE, no_keys_TKE, seen.positions_T, rope, norm)
        return self.kernels.attend(q_THE, kv_2NSKE, seen, form).flatten(1)

    def states(self, layer: int) -> StateRows:
        """See Attend."""
        self._call(layer, KEEPS_STATE)
        batch = self.batch
        return StateRows(
            self.layer_states[layer],
            self.sequences_B,
            batch.query_starts_B1,
            self.is_new_B,
            batch.num_decodes,
            batch.max_query_len,
            batch.query_starts_host if self.lengths_on_host else None,
        )

    def _call(self, layer: int, what: str) -> None:
        check(0 <= layer < self.spec.num_layers, f"attend was called for layer {layer} of {self.spec.num_layers}")
        kept = kept_by(self.spec.cache_layers[layer])
        check(kept == what, f"forward wants {what} of layer {layer}, which has {kept or 'none'} by ModelSpec.layers")
        self.called.append((layer, what))

    def _seen(self, cache: LayerCache) -> Batch:
        return replace(self.batch, window=cache.num_tokens) if isinstance(cache, SlidingWindow) else self.batch

    def _check(
        self, cache: LayerCache, qkv_TC: Tensor, rope: Rope | None, norm: QKNorm | None, form: AttentionForm
    ) -> None:
        sizes, num_tokens = self.attention, self.batch.num_tokens
        width = attend_width(sizes, cache)
        check_form("qkv_TC, which attend was given,", qkv_TC, (num_tokens, width), sizes.dtype)
        if rope is not None:
            enough = len(rope.table_PE) >= self.spec.max_position
            check(enough, f"rope.table_PE has {len(rope.table_PE)} rows for max_position={self.spec.max_position}")
        fault = attend_fault(sizes, self.spec, cache, num_tokens, qkv_TC, rope, norm, form)
        check(not fault, f"attend was given {fault}")


def kept_by(cache: LayerCache) -> str:
    """How a layer uses attend: ATTENDS, KEEPS_STATE, or "" if it does not."""
    if isinstance(cache, RecurrentState):
        return KEEPS_STATE
    return "" if isinstance(cache, NoCache) else ATTENDS
