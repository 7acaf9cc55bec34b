"""The `attend` that core hands to a model's forward: the kernels, bound to a step's batches and to the layers' cache.

Legend: T tokens of a step, H heads, K kv heads, E head dim, C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    Batch,
    Kernels,
    QKNorm,
    Rope,
    StateRows,
)
from hookline.core.errors import StepFault
from hookline.core.kv_cache.groups import CacheGroups
from hookline.core.layers.stage import StageEnds
from hookline.core.worker.request_table import GroupedBatch, LayerStates


@dataclass(frozen=True)
class PagedAttention(StageEnds):
    """`core.contracts.Attend` for one step of a model with full attention everywhere: one batch for all layers."""

    kernels: Kernels
    kv_layers: Sequence[Tensor]
    batch: Batch
    rows_N: Tensor | None = None
    progress: list[int] = field(default_factory=lambda: [0])
    """A list of one number, the calls so far, which all steps of a runner share."""

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend."""
        self.progress[0] += 1
        out_THE = written_and_attended(self.kernels, qkv_TC, self.kv_layers[layer], self.batch, rope, norm, form)
        return out_THE.reshape(qkv_TC.shape[0], -1)

    def states(self, layer: int) -> StateRows:
        """See Attend."""
        raise StepFault(f"the model asks for the state of layer {layer}, which keeps none by its spec.layers")


@dataclass(frozen=True)
class GroupedAttention(StageEnds):
    """`core.contracts.Attend` for one step of a model whose layers keep different caches: a batch for each group.

    kv_places: the cache of each place of a block, which layers of different groups use. is_new_B: see StateRows.
    """

    kernels: Kernels
    kv_places: Sequence[Tensor]
    groups: CacheGroups
    batches: Sequence[Batch]
    rows_N: Tensor | None
    progress: list[int]
    layer_states: LayerStates | None = None
    rows_B: Tensor | None = None
    is_new_B: Tensor | None = None

    def __call__(
        self,
        layer: int,
        qkv_TC: Tensor,
        rope: Rope | None,
        norm: QKNorm | None = None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Attend."""
        self.progress[0] += 1
        place = self.groups.places[layer]
        if place is None:
            raise StepFault(
                f"the model calls attend for layer {layer}, which has no keys and values by its spec.layers"
            )
        batch, kv_2NSKE = self.batches[place[0]], self.kv_places[place[1]]
        if self.groups.writes[layer]:
            out_THE = written_and_attended(self.kernels, qkv_TC, kv_2NSKE, batch, rope, norm, form)
        else:
            forms = () if form is PLAIN_ATTENTION else (form,)
            q_THE = queries(self.kernels, qkv_TC, kv_2NSKE, batch, rope, norm)
            out_THE = self.kernels.attend(q_THE, kv_2NSKE, batch, *forms)
        return out_THE.reshape(qkv_TC.shape[0], -1)

    def states(self, layer: int) -> StateRows:
        """See Attend."""
        layers, batch = self.layer_states.layers if self.layer_states is not None else {}, self.batches[0]
        if layer not in layers or self.rows_B is None or self.is_new_B is None:
            raise StepFault(f"the model asks for the state of layer {layer}, which keeps none by its spec.layers")
        self.progress[0] += 1
        return StateRows(
            layers[layer],
            self.rows_B,
            batch.query_starts_B1,
            self.is_new_B,
            batch.num_decodes,
            batch.max_query_len,
            batch.query_starts_host,
        )


def grouped_attention(
    kernels: Kernels,
    kv_places: Sequence[Tensor],
    groups: CacheGroups,
    batch: Batch,
    rows_N: Tensor | None,
    progress: list[int],
    layer_states: LayerStates | None,
) -> GroupedAttention:
    """Let the kernels prepare the batches of a step's groups, and bind kernels and batches."""
    assert isinstance(batch, GroupedBatch), "the request table was made for a single group"
    batches = [batch, *batch.others]
    prepared: dict[int | None, Batch] = {}
    for one in batches:
        if one.window in prepared:
            kernels.prepare_alike(one, prepared[one.window])
        else:
            kernels.prepare(one)
            prepared[one.window] = one
    is_new_B = None if layer_states is None else batch.context_lens_B == batch.query_starts_B1.diff()
    return GroupedAttention(kernels, kv_places, groups, batches, rows_N, progress, layer_states, batch.rows_B, is_new_B)


def written_and_attended(
    kernels: Kernels,
    qkv_TC: Tensor,
    kv_2NSKE: Tensor,
    batch: Batch,
    rope: Rope | None,
    norm: QKNorm | None,
    form: AttentionForm,
) -> Tensor:
    """The result of `Kernels.qkv_attend`; by two calls if rows attend to keys that other rows write in this step."""
    forms = () if form is PLAIN_ATTENTION else (form,)
    if not batch.repeats_requests:
        return kernels.qkv_attend(qkv_TC, kv_2NSKE, batch, rope, norm, *forms)
    q_THE = kernels.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm)
    return kernels.attend(q_THE, kv_2NSKE, batch, *forms)


def queries(
    kernels: Kernels, q_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
) -> Tensor:
    """The queries (T, H, E) of a layer that has no keys of its own, normalised and rotated."""
    num_kv_heads, head_dim = kv_2NSKE.shape[-2:]
    q_THE = q_TC.reshape(len(q_TC), -1, head_dim)
    no_keys_TKE = q_THE.new_zeros(len(q_TC), num_kv_heads, head_dim)
    return kernels.qk_norm_rope(q_THE, no_keys_TKE, batch.positions_T, rope, norm)[0]
