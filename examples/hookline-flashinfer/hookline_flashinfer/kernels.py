"""kernels=flashinfer: attention by FlashInfer's wrapper for a paged cache, everything else by the Triton kernels.

The only module that imports flashinfer. Its wrapper is planned on the host: once a step where the host knows the
lengths, and once per batch size for decodes in a CUDA graph, without splitting a context, so that the plan holds
whatever the lengths are at replay. Legend: B rows, H heads, E head dim, N cache blocks, S block size, K kv heads.
"""

from __future__ import annotations

from itertools import cycle

import torch
from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch
from hookline.plugins.kernels import TritonKernels
from hookline_flashinfer import FlashInferConfig
from hookline_flashinfer.pages import DevicePages, host_pages

STEPS_IN_FLIGHT = 3
"""More than the engine ever has: a plan's pinned memory must not change before its step has read it."""
CAPTURED_INTS = 1 << 20
"""Bytes for the plan of a captured batch: a few numbers a row."""


class FlashInferKernels(TritonKernels):
    """Chunks, decodes and both together in one call: to FlashInfer a decode is a chunk of one token."""

    def __init__(self, config: FlashInferConfig | None, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        config = config or FlashInferConfig()
        self.workspace = torch.zeros(config.workspace_mib << 20, dtype=torch.uint8, device=spec.device)
        self.wrappers = cycle([self._wrapper() for _ in range(STEPS_IN_FLIGHT)])
        self.captured: dict[tuple[int, int], tuple[DevicePages, BatchPrefillWithPagedKVCacheWrapper]] = {}

    def prepare(self, batch: Batch) -> None:
        """Plan the step, or bring the pages of a captured one up to date; `attend` finds the wrapper."""
        captured = batch.context_lens_host is None
        batch.scratch["flashinfer"] = self._follow(batch) if captured else self._planned(batch)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels.attend. `prepare` must have seen this batch; the form is plain, for no other is declared."""
        wrapper: BatchPrefillWithPagedKVCacheWrapper = batch.scratch["flashinfer"]
        out_THE = torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device)
        wrapper.run(q_THE, (kv_2NSKE[0], kv_2NSKE[1]), out=out_THE, enable_pdl=False)
        return out_THE

    def _planned(self, batch: Batch) -> BatchPrefillWithPagedKVCacheWrapper:
        pages = host_pages(batch.context_lens_host, batch.block_table_BM.shape[1], self.spec.block_size)
        places = torch.from_numpy(pages.places).to(self.spec.device, non_blocking=True)
        wrapper = next(self.wrappers)
        self._plan(
            wrapper,
            torch.from_numpy(batch.query_starts_host),
            torch.from_numpy(pages.starts_B1),
            batch.block_table_BM.flatten().index_select(0, places),
            torch.from_numpy(pages.last_lens_B),
        )
        return wrapper

    def _follow(self, batch: Batch) -> BatchPrefillWithPagedKVCacheWrapper:
        """A batch inside a graph, or the rehearsal before it is captured, which plans."""
        size = (batch.num_requests, batch.block_table_BM.shape[1])
        if size in self.captured:
            pages, wrapper = self.captured[size]
            pages.update(batch.context_lens_B, batch.block_table_BM)
            return wrapper
        pages = DevicePages(*size, self.spec.block_size, self.spec.device)
        pages.update(batch.context_lens_B, batch.block_table_BM)
        self.captured[size] = pages, self._planned_for_ever(pages)
        return self.captured[size][1]

    def _planned_for_ever(self, pages: DevicePages) -> BatchPrefillWithPagedKVCacheWrapper:
        wrapper = self._wrapper()
        wrapper.reset_workspace_buffer(
            self.workspace, torch.zeros(CAPTURED_INTS, dtype=torch.uint8, device=self.spec.device)
        )
        # The wrapper keeps these very tensors, which `update` then writes to.
        self._plan(
            wrapper, pages.query_starts_B1, pages.starts_B1, pages.blocks, pages.last_lens_B, disable_split_kv=True
        )
        return wrapper

    def _wrapper(self) -> BatchPrefillWithPagedKVCacheWrapper:
        return BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa2")

    def _plan(
        self, wrapper: BatchPrefillWithPagedKVCacheWrapper, *layout: Tensor, disable_split_kv: bool = False
    ) -> None:
        spec = self.spec
        wrapper.plan(
            *layout,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.block_size,
            causal=True,
            sm_scale=spec.scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.dtype,
            disable_split_kv=disable_split_kv,
        )
