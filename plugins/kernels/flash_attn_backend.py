"""kernels=flash_attn: attention by the flash-attn package, everything else by the Triton kernels.

The only module that imports flash_attn. Its paged cache wants blocks of a multiple of 256 tokens.
Legend: T tokens, B requests, H heads, K kv heads, E head dim, N cache blocks, S block size.
"""

from __future__ import annotations

from typing import Any

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch
from hookline.plugins.kernels.triton_backend import TritonKernels


class FlashAttnKernels(TritonKernels):
    """flash-attn 2: `flash_attn_varlen_func` for prefill rows, `flash_attn_with_kvcache` for decode rows."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)

    def prepare(self, batch: Batch) -> None:
        """Sum up the context lengths of the prefill rows, as flash-attn wants them.

        Device: no host sync; nothing at all for decode rows.
        """
        if batch.num_requests > batch.num_decodes:
            key_starts = torch.zeros(batch.num_requests - batch.num_decodes + 1, dtype=torch.int32, device=self._device)
            torch.cumsum(batch.context_lens_B[batch.num_decodes :], 0, dtype=torch.int32, out=key_starts[1:])
            batch.scratch["key_starts"] = key_starts
            batch.scratch["query_starts"] = batch.query_starts_B1[batch.num_decodes :] - batch.num_decodes

    @property
    def _device(self) -> torch.device:
        return self.spec.device

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels.attend. `prepare` must have seen this batch."""
        rows = batch.num_decodes
        if batch.num_requests == rows:
            return self._decode_rows(q_THE, kv_2NSKE, batch, form)
        prefill_THE = self._prefill_rows(q_THE[rows:], kv_2NSKE, batch, form)
        if not rows:
            return prefill_THE
        return torch.cat([self._decode_rows(q_THE[:rows], kv_2NSKE, batch, form), prefill_THE])

    def _options(self, batch: Batch, form: AttentionForm) -> dict[str, Any]:
        """Arguments of both functions of the package for a form; window_size: tokens before and after a query."""
        return {
            "softmax_scale": self.spec.scale if form.scale is None else form.scale,
            "causal": True,
            "window_size": (-1, -1) if batch.window is None else (batch.window - 1, 0),
            "softcap": form.softcap or 0.0,
        }

    def _decode_rows(self, q_BHE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm) -> Tensor:
        rows = batch.num_decodes
        out: Tensor = flash_attn_with_kvcache(
            q_BHE[:, None], kv_2NSKE[0], kv_2NSKE[1], cache_seqlens=batch.context_lens_B[:rows],
            block_table=batch.block_table_BM[:rows], **self._options(batch, form),
        )  # fmt: skip
        return out[:, 0]

    def _prefill_rows(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm) -> Tensor:
        out: Tensor = flash_attn_varlen_func(
            q_THE, kv_2NSKE[0], kv_2NSKE[1],
            cu_seqlens_q=batch.scratch["query_starts"], cu_seqlens_k=batch.scratch["key_starts"],
            max_seqlen_q=batch.max_query_len, max_seqlen_k=batch.max_context_len,
            block_table=batch.block_table_BM[batch.num_decodes :], **self._options(batch, form),
        )  # fmt: skip
        return out
