"""kernels=triton in batch-invariant mode: kernels that are the same for every batch, not the fastest for each.

Norms, rotations, cache writes and routing are TritonKernels', which compute each row independently. Products, experts
and attention are this package's; for decodes alone, attention includes the rotation.
Legend: as in triton_backend.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    QKNorm,
    Rope,
    StepShape,
)
from hookline.plugins.kernels.attention.triton_prefill import query_tiles, query_tiles_on_device
from hookline.plugins.kernels.invariant.triton_attention import (
    SEGMENT,
    AttentionTiling,
    Newest,
    Segments,
    attend_tiles,
    longest_first,
)
from hookline.plugins.kernels.invariant.triton_experts import clamped_expert_mlp, expert_mlp
from hookline.plugins.kernels.products.triton_product import Kind
from hookline.plugins.kernels.products.triton_row_product import RowScratch, row_product
from hookline.plugins.kernels.products.triton_wide import empty_with_room
from hookline.plugins.kernels.triton_backend import TritonKernels
from hookline.plugins.kernels.triton_card import Card

MOST_FUSED_ROWS = 32
"""Most decode rows whose rotation is faster inside attention; more programs than run at once would each delay the next
(docs/log)."""
PROGRAMS_PER_SM = 2
"""Decodes whose kv heads give fewer programs than this have a program for each segment."""


@dataclass
class _Tiles:
    """A step's query tiles: of its decodes, with how many programs each takes, and of its prompts."""

    decodes_W2: Tensor
    num_segments: int
    prompts_W2: Tensor | None


class InvariantTritonKernels(TritonKernels):
    """TritonKernels whose choices depend on weights and contexts alone, never on the rows of a step."""

    own_row_counts = (1, *range(16, 257, 16), 17, 257, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 8192)

    tiles_integers = False

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self._card = Card.of(spec.device)
        group = spec.num_heads // spec.num_kv_heads
        given = group, spec.head_dim, spec.dtype, self._card
        self._decode_tiling, self._tiling = (AttentionTiling.of(*given, decodes=decodes) for decodes in (True, False))
        self._tokens_a_tile = self._tiling.block_m // group
        most_split = min(spec.max_num_seqs, PROGRAMS_PER_SM * self._card.num_sms // spec.num_kv_heads)
        self._segments = Segments.make(most_split, spec.max_model_len, spec.num_heads, spec.head_dim, spec.device)
        self._parts = RowScratch.make(spec.device)
        rows_B = torch.arange(spec.max_num_seqs + 1, dtype=torch.int32, device=spec.device)
        self._decode_tiles_B2 = torch.stack((rows_B, torch.zeros_like(rows_B)), 1)

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Kernels.linear."""
        return row_product(x_TD, weight_OD, bias_O, scratch=self._parts)

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels.linear_silu_mul; one launch."""
        return row_product(x_TD, gate_up_weight_FD, None, silu=True)

    def linear_gelu_tanh_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels.linear_gelu_tanh_mul."""
        return self.gelu_tanh_mul(self.linear(x_TD, gate_up_weight_FD, None))

    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Kernels.linear_add_rms_norm."""
        return self.add_rms_norm(self.linear(x_TD, weight_OD, bias_O), residual_TO, norm_weight_O, eps)

    def router_logits(self, x_TD: Tensor, weight_XD: Tensor) -> Tensor:
        """See Kernels.router_logits."""
        return row_product(x_TD.float(), weight_XD, None)

    def _products_of_rounded(self, num_rows: int, then: Any) -> None:
        return None

    def _scaled_product(self, kind: Kind, x: Any, weight: Any, bias_O: Tensor | None) -> Tensor | None:
        is_silu, scratch = kind is Kind.SILU, None if kind is Kind.SILU else self._parts
        return row_product(x, weight.data_OD, bias_O, silu=is_silu, scratch=scratch, scales=weight.scales)

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels.expert_mlp."""
        return expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def gelu_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels.gelu_expert_mlp."""
        return expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, gelu=True)

    def quantized_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up: Any, down: Any
    ) -> Tensor:
        """See Kernels.quantized_expert_mlp."""
        scales = gate_up.scales, down.scales
        return expert_mlp(x_TD, expert_TA, weight_TA, gate_up.data_OD, down.data_OD, scales)

    def clamped_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
        down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float,
    ) -> Tensor:  # fmt: skip
        """See Kernels.clamped_expert_mlp."""
        weights = gate_up_XFD, gate_up_bias_XF, down_XDF, down_bias_XD
        return clamped_expert_mlp(x_TD, expert_TA, weight_TA, *weights, alpha, limit)

    def step_shapes(self) -> Sequence[StepShape]:
        """See Kernels.step_shapes: decodes whose segments have programs of their own, and others."""
        counts, contexts = (1, self.spec.max_num_seqs), (0, 2 * SEGMENT)
        return [StepShape(rows, tokens, length) for rows in counts for tokens in (0, 1) for length in contexts]

    def prepare(self, batch: Batch) -> None:
        """See Kernels.prepare.

        Device: one launch if there are many decodes, one small copy or launch if there are prompts; no host sync.
        """
        decodes, num_segments = batch.num_decodes, 1
        if batch.window is None:
            num_segments = self._segments.number(decodes, batch.max_context_len)
        decodes_W2 = self._decode_tiles_B2[:decodes]
        if decodes * self.spec.num_kv_heads > PROGRAMS_PER_SM * self._card.num_sms:  # they do not all run at once
            decodes_W2 = longest_first(batch.context_lens_B[:decodes])
        tiles_W2 = self._prompt_tiles(batch) if batch.num_requests > decodes else None
        batch.scratch["tiles"] = _Tiles(decodes_W2, num_segments, tiles_W2)

    def _prompt_tiles(self, batch: Batch) -> Tensor:
        decodes, tokens = batch.num_decodes, self._tokens_a_tile
        if batch.query_starts_host is None or batch.context_lens_host is None:
            return query_tiles_on_device(batch.query_starts_B1, batch.num_tokens - decodes, decodes, tokens)
        tiles_W2 = torch.from_numpy(query_tiles(batch.query_starts_host, batch.context_lens_host, decodes, tokens))
        device = self.spec.device
        return (tiles_W2.pin_memory() if device.type == "cuda" else tiles_W2).to(device, non_blocking=True)

    def qkv_attend(
        self,
        qkv_TC: Tensor,
        kv_2NSKE: Tensor,
        batch: Batch,
        rope: Rope | None,
        norm: QKNorm | None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Kernels.qkv_attend; one launch for few decode rows alone, where that is faster: it changes no bit."""
        spec, rows = self.spec, batch.num_decodes
        is_whole = rope is None or rope.table_PE.shape[1] == spec.head_dim
        if batch.num_requests > rows or not is_whole or rows > MOST_FUSED_ROWS:
            q_THE = self.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm)
            return self.attend(q_THE, kv_2NSKE, batch, form)
        q_THE = qkv_TC.new_empty(rows, spec.num_heads, spec.head_dim)
        return self._attend(q_THE, kv_2NSKE, batch, form, Newest(qkv_TC, rope, norm))

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels.attend. `prepare` must have seen this batch."""
        return self._attend(q_THE, kv_2NSKE, batch, form)

    def _attend(
        self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm, newest: Newest | None = None
    ) -> Tensor:
        tiles: _Tiles = batch.scratch["tiles"]
        out_THE = empty_with_room(*q_THE.shape, like=q_THE)
        scoring, tiling, segments = self._scoring(form), self._decode_tiling, self._segments
        decodes = tiles.decodes_W2, scoring, out_THE, tiling, segments, tiles.num_segments
        attend_tiles(q_THE, kv_2NSKE, batch, *decodes, newest)
        if tiles.prompts_W2 is not None:
            attend_tiles(q_THE, kv_2NSKE, batch, tiles.prompts_W2, scoring, out_THE, self._tiling, segments)
        return out_THE
