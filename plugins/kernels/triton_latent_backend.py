"""TritonKernels for models whose values are a part of their keys: attention and cache writes are others.

Legend: as in triton_backend.py, F head dim of the values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, QKNorm, Rope, StepShape
from hookline.plugins.kernels.attention.triton_absorbed import heads_linear, latent_queries_keys
from hookline.plugins.kernels.attention.triton_latent import LatentTiling, latent_attention, rope_write
from hookline.plugins.kernels.attention.triton_latent_decode import (
    LatentDecodeTiling,
    LatentScratch,
    latent_decode_attention,
    merge_block,
    num_parts,
)
from hookline.plugins.kernels.attention.triton_prefill import query_tiles, query_tiles_on_device
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.kernels.triton_attention import first_of_each
from hookline.plugins.kernels.triton_backend import TritonKernels
from hookline.plugins.kernels.triton_card import Card
from hookline.plugins.kernels.triton_launch import triggers_late


class LatentTritonKernels(TritonKernels):
    """The kernels that TritonKernels makes for a spec with value_dim. Each row reads a shared prefix by itself."""

    def _make_scratch(self, spec: AttentionSpec) -> None:
        self._card = Card.of(spec.device)
        self._decodes = LatentDecodeTiling.of(spec.num_heads, spec.dtype, self._card)
        self._prompts = LatentTiling.of(spec.num_heads, spec.dtype, self._card)
        size = max(rows * self._parts(rows) for rows in range(1, spec.max_num_seqs + 1)) * spec.num_heads
        partial_XF = torch.empty(size, spec.out_dim, dtype=torch.float32, device=spec.device)
        self._scratch = LatentScratch(partial_XF, torch.empty(size, 2, dtype=torch.float32, device=spec.device))

    def _parts(self, num_rows: int) -> int:
        return num_parts(num_rows, self._decodes, self.spec.num_heads, self.spec.max_model_len, self._card)

    def step_shapes(self) -> Sequence[StepShape]:
        """See Kernels.step_shapes: one for each variant of the kernels of decodes, alone and beside a prompt."""
        counts = first_of_each(range(1, self.spec.max_num_seqs + 1), self._decode_choice)
        return [StepShape(rows, tokens) for rows in counts for tokens in (0, 1)]

    def _decode_choice(self, num_rows: int) -> object:
        """The variants of the kernels that attend with `num_rows` decodes, as a value to compare."""
        parts = self._parts(num_rows)
        merged = merge_block(num_rows, self.spec.num_heads, self.spec.out_dim) if parts > 1 else 0
        return parts, triggers_late(num_rows), merged

    def prepare(self, batch: Batch) -> None:
        """See Kernels: the query tiles of prompts, from the host's lengths or in a captured step from the device's."""
        tokens, rows = self._prompts.tokens, batch.num_decodes
        batch.scratch["tiles"] = None
        if batch.num_requests == rows:
            return
        if batch.query_starts_host is None or batch.context_lens_host is None:
            tiles_W2 = query_tiles_on_device(batch.query_starts_B1, batch.num_tokens - rows, rows, tokens)
        else:
            tiles = torch.from_numpy(query_tiles(batch.query_starts_host, batch.context_lens_host, rows, tokens))
            if self.spec.device.type == "cuda":
                tiles = tiles.pin_memory()  # from torch's caching allocator, which keeps it until the copy is done
            tiles_W2 = tiles.to(self.spec.device, non_blocking=True)
        batch.scratch["tiles"] = tiles_W2

    def prepare_alike(self, batch: Batch, prepared: Batch) -> None:
        """See Kernels; no launch."""
        batch.scratch.update(prepared.scratch)

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """See Kernels."""
        if rope is None or norm is not None:
            return TorchKernels.qk_norm_rope_write(self, qkv_TC, kv_2NSKE, batch, rope, norm)
        return rope_write(qkv_TC, kv_2NSKE, batch.positions_T, batch.slot_mapping_T, rope)

    def qkv_attend(
        self,
        qkv_TC: Tensor,
        kv_2NSKE: Tensor,
        batch: Batch,
        rope: Rope | None,
        norm: QKNorm | None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Kernels; decodes alone are rotated and written where they attend."""
        spec, is_plain = self.spec, norm is None and batch.num_decodes == batch.num_requests
        if is_plain and rope is not None and rope.table_PE.shape[1] == spec.head_dim - spec.out_dim:
            qk_THE = qkv_TC.view(len(qkv_TC), spec.num_heads + 1, spec.head_dim)
            return self._attend_decodes(qk_THE, kv_2NSKE, batch, form, self._out_like(qkv_TC), rope)
        return self.attend(self.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm), kv_2NSKE, batch, form)

    def latent_queries_keys(
        self, q_THC: Tensor, latent_TE: Tensor, keys_HPL: Tensor, norm_weight_L: Tensor, eps: float,
        interleaved: bool,
    ) -> Tensor:  # fmt: skip
        """See Kernels; one launch."""
        return latent_queries_keys(q_THC, latent_TE, keys_HPL, norm_weight_L, eps, interleaved)

    def heads_linear(self, x_THI: Tensor, weight_HOI: Tensor) -> Tensor:
        """See Kernels; one launch."""
        return heads_linear(x_THI, weight_HOI)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels: prompts by their tiles, decodes in parts."""
        out_THF, tiles_W2 = self._out_like(q_THE), batch.scratch["tiles"]
        if tiles_W2 is not None and len(tiles_W2):
            latent_attention(
                q_THE, kv_2NSKE, batch.block_table_BM, batch.query_starts_B1, batch.context_lens_B, tiles_W2,
                self._scoring(form), out_THF, self._prompts, batch.window,
            )  # fmt: skip
        return self._attend_decodes(q_THE, kv_2NSKE, batch, form, out_THF) if batch.num_decodes else out_THF

    def _out_like(self, x: Tensor) -> Tensor:
        return x.new_empty(len(x), self.spec.num_heads, self.spec.out_dim)

    def _attend_decodes(
        self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm, out_THF: Tensor,
        rope: Rope | None = None,
    ) -> Tensor:  # fmt: skip
        rows = batch.num_decodes
        latent_decode_attention(
            q_THE, kv_2NSKE, batch.block_table_BM, batch.context_lens_B, rows, self._scoring(form), out_THF,
            self._decodes, self._parts(rows), self._scratch, batch.window, rope,
        )  # fmt: skip
        return out_THF
