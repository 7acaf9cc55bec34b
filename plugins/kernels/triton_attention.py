"""How the rows of a step are attended with by Triton kernels: cut in `prepare`, attended with in every layer.

Scratch space is allocated once, for `spec.max_num_seqs` decode rows, so its addresses hold in every CUDA graph.
Legend: as in triton_backend.py; W query tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, QKNorm, Rope, StepShape
from hookline.core.distributed.side_stream import SideStream
from hookline.plugins.kernels.attention.triton_decode import Newest, decode_attention
from hookline.plugins.kernels.attention.triton_forms import Scoring
from hookline.plugins.kernels.attention.triton_prefill import (
    PrefillTiling,
    prefill_attention,
    prefill_tiling,
    query_tiles,
    query_tiles_on_device,
)
from hookline.plugins.kernels.attention.triton_schedule import (
    FEW_ROWS,
    DecodeScratch,
    DecodeTiling,
    decode_tiling,
    schedule_decode,
)
from hookline.plugins.kernels.attention.triton_shared_prefix import (
    SharedTiling,
    make_shared_partials,
    shared_prefix_attention,
    shared_tiling,
)
from hookline.plugins.kernels.products.triton_wide import empty_with_room
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.kernels.triton_launch import WIDE_GROUP, fuses_decode, triggers_late

_PROMPT_TOKENS = tuple(1 << exponent for exponent in range(15))
_CONTEXTS = (1024, 2048)
"""Sizes of prompts and their contexts among which each choice of prefill tiles is found."""
One = TypeVar("One")


def first_of_each(many: Iterable[One], choice: Callable[[One], object]) -> list[One]:
    """The first item for each value of `choice`."""
    found: dict[object, One] = {}
    for one in many:
        found.setdefault(choice(one), one)
    return list(found.values())


@dataclass
class _DecodeStep:
    """How this step's decode rows are cut; `shared_lens_B` and `shared` are None without a shared prefix."""

    num_items: int
    scratch: DecodeScratch
    tiling: DecodeTiling
    shared_lens_B: Tensor | None
    shared: SharedTiling | None


@dataclass
class _PrefillStep:
    """This step's query tiles."""

    tiles_W2: Tensor
    tiling: PrefillTiling


class TritonAttention(TorchKernels):
    """Triton for attention, by the work lists of each step."""

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self._plain_scoring = Scoring.of(spec.scale)
        self._aside = SideStream(spec.device) if spec.device.type == "cuda" else None
        self._make_scratch(spec)

    def _make_scratch(self, spec: AttentionSpec) -> None:
        self._decode_scratch = DecodeScratch.make(
            spec.max_num_seqs, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.device
        )
        self._scratch_of_window: dict[int, DecodeScratch] = {}
        self._shared_partials = make_shared_partials(
            spec.max_num_seqs, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            spec.dtype, self._decode_scratch.card, spec.device,
        )  # fmt: skip

    def step_shapes(self) -> Sequence[StepShape]:
        """See Kernels.step_shapes: one for each way that decodes beside prompts are cut, and prompts are."""
        spec = self.spec
        decodes = first_of_each(range(1, spec.max_num_seqs + 1), self._decode_choice)
        sizes = [(tokens, context) for context in _CONTEXTS for tokens in _PROMPT_TOKENS]
        prompts = first_of_each(sizes, lambda size: self._prefill_tiling(*size))
        kinds = [(tokens, is_shared) for tokens in (0, 1) for is_shared in (False, True)]
        return [
            *(StepShape(rows, tokens, is_shared=is_shared) for rows in decodes for tokens, is_shared in kinds),
            *(StepShape(num_tokens=tokens, context_len=context) for tokens, context in prompts),
        ]

    def _decode_choice(self, num_rows: int) -> object:
        """The variants of the kernels that attend with `num_rows` decodes, as a value to compare."""
        spec, card = self.spec, self._decode_scratch.card
        group = spec.num_heads // spec.num_kv_heads
        shared = shared_tiling(num_rows * group, spec.num_kv_heads, spec.head_dim, spec.dtype, card)
        return (
            decode_tiling(num_rows, spec.num_kv_heads, spec.head_dim, spec.dtype, card, group, spec.kv_dtype),
            triggers_late(num_rows, is_large=group >= WIDE_GROUP), fuses_decode(num_rows, group),
            num_rows <= FEW_ROWS, replace(shared, max_parts=0), num_rows > 1,  # one row shares no prefix
        )  # fmt: skip

    def _prefill_tiling(self, num_tokens: int, max_context_len: int, window: int | None = None) -> PrefillTiling:
        spec, card = self.spec, self._decode_scratch.card
        group = spec.num_heads // spec.num_kv_heads
        longest = max_context_len if window is None else min(max_context_len, window)
        return prefill_tiling(num_tokens, longest, spec.num_heads, group, spec.head_dim, spec.dtype, card)

    def prepare(self, batch: Batch) -> None:
        """Cut the decode rows on the device, and the query tiles on the host, or on the device in a captured step.

        Device: one launch if there are decode rows, one small copy or launch if there are prefill rows; no host sync.
        A captured step must capture this call too, for the cuts follow the lengths at replay.
        """
        batch.scratch["decode"] = self._prepare_decode(batch) if batch.num_decodes else None
        has_prefill = batch.num_requests > batch.num_decodes
        batch.scratch["prefill"] = self._prepare_prefill(batch) if has_prefill else None

    def prepare_alike(self, batch: Batch, prepared: Batch) -> None:
        """See Kernels.prepare_alike; no launch: work lists name rows and positions, not blocks. A subclass's may."""
        if type(self).prepare is TritonAttention.prepare:
            batch.scratch.update(prepared.scratch)
        else:
            self.prepare(batch)

    def _prepare_decode(self, batch: Batch) -> _DecodeStep:
        spec, rows, card = self.spec, batch.num_decodes, self._decode_scratch.card
        group = spec.num_heads // spec.num_kv_heads
        tiling = decode_tiling(rows, spec.num_kv_heads, spec.head_dim, spec.dtype, card, group, spec.kv_dtype)
        shared_lens_B, shared = batch.shared_lens_B if batch.window is None else None, None
        if shared_lens_B is not None:
            shared = shared_tiling(rows * group, spec.num_kv_heads, spec.head_dim, spec.dtype, card)
            shared_lens_B = shared_lens_B[:rows]
        scratch = self._scratch_for(batch.window)
        num_items = schedule_decode(
            batch.context_lens_B[:rows], scratch, spec.num_kv_heads, tiling, shared_lens_B,
            shared.tile if shared else 1, shared.max_parts if shared else 1, batch.window,
        )  # fmt: skip
        return _DecodeStep(num_items, scratch, tiling, shared_lens_B, shared)

    def _scratch_for(self, window: int | None) -> DecodeScratch:
        """The scratch whose work list is that of these batches, for a step prepares all its batches before it begins.

        A window's first step is none that is captured, so its list lies outside every graph's memory.
        """
        if window is None:
            return self._decode_scratch
        if window not in self._scratch_of_window:
            items_W8 = torch.empty_like(self._decode_scratch.items_W8)
            self._scratch_of_window[window] = replace(self._decode_scratch, items_W8=items_W8)
        return self._scratch_of_window[window]

    def _prepare_prefill(self, batch: Batch) -> _PrefillStep:
        spec, num_tokens = self.spec, batch.num_tokens - batch.num_decodes
        tiling = self._prefill_tiling(num_tokens, batch.max_context_len, batch.window)
        tokens_a_tile = tiling.block_m // (spec.num_heads // spec.num_kv_heads)
        if batch.query_starts_host is None or batch.context_lens_host is None:
            tiles_W2 = query_tiles_on_device(batch.query_starts_B1, num_tokens, batch.num_decodes, tokens_a_tile)
            return _PrefillStep(tiles_W2, tiling)
        tiles = torch.from_numpy(
            query_tiles(batch.query_starts_host, batch.context_lens_host, batch.num_decodes, tokens_a_tile)
        )
        if spec.device.type == "cuda":
            tiles = tiles.pin_memory()  # from torch's caching allocator, which keeps it until the copy is done
        return _PrefillStep(tiles.to(spec.device, non_blocking=True), tiling)

    def qkv_attend(
        self,
        qkv_TC: Tensor,
        kv_2NSKE: Tensor,
        batch: Batch,
        rope: Rope | None,
        norm: QKNorm | None,
        form: AttentionForm = PLAIN_ATTENTION,
    ) -> Tensor:
        """See Kernels.qkv_attend; one launch for decode rows alone that share no prefix, where that is faster."""
        step: _DecodeStep | None = batch.scratch.get("decode")
        group = self.spec.num_heads // self.spec.num_kv_heads
        fuses = batch.num_requests == batch.num_decodes and fuses_decode(batch.num_decodes, group)
        if step is None or step.shared is not None or not fuses:
            forms = () if form is PLAIN_ATTENTION else (form,)
            q_THE = self.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch, rope, norm)
            return self.attend(q_THE, kv_2NSKE, batch, *forms)
        spec = self.spec
        out_THE = empty_with_room(len(qkv_TC), spec.num_heads, spec.head_dim, like=qkv_TC)
        decode_attention(
            qkv_TC.reshape(len(qkv_TC), -1, spec.head_dim), kv_2NSKE, batch.block_table_BM, step.num_items,
            step.scratch, self._scoring(form), out_THE, step.tiling, newest=Newest(batch.context_lens_B, rope, norm),
            has_window=batch.window is not None,
        )  # fmt: skip
        return out_THE

    def _scoring(self, form: AttentionForm) -> Scoring:
        return self._plain_scoring if form is PLAIN_ATTENTION else Scoring.of(self.spec.scale, form)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels.attend. `prepare` must have seen this batch.

        In a captured step prompts are computed beside the decodes, which leave most of the arithmetic units idle.
        """
        out_THE, scoring = empty_with_room(*q_THE.shape, like=q_THE), self._scoring(form)
        rows, has_prefill = batch.num_decodes, batch.scratch["prefill"] is not None
        joined = None
        if rows and has_prefill and self._aside is not None and torch.cuda.is_current_stream_capturing():
            joined = self._aside(lambda: self._prefill(q_THE, kv_2NSKE, batch, scoring, out_THE))
        elif has_prefill:
            self._prefill(q_THE, kv_2NSKE, batch, scoring, out_THE)
        if rows:
            self._decode(q_THE[:rows], kv_2NSKE, batch, scoring, out_THE[:rows])
        if joined is not None:
            joined()
        return out_THE

    def _prefill(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, scoring: Scoring, out_THE: Tensor) -> None:
        step: _PrefillStep = batch.scratch["prefill"]
        prefill_attention(
            q_THE, kv_2NSKE, batch.block_table_BM, batch.query_starts_B1, batch.context_lens_B, step.tiles_W2,
            scoring, out_THE, step.tiling, batch.window,
        )  # fmt: skip

    def _decode(self, q_BHE: Tensor, kv_2NSKE: Tensor, batch: Batch, scoring: Scoring, out_BHE: Tensor) -> None:
        step: _DecodeStep = batch.scratch["decode"]
        if step.shared is not None:
            shared_prefix_attention(
                q_BHE, kv_2NSKE, batch.block_table_BM, step.scratch, self._shared_partials, scoring, step.shared
            )
        decode_attention(
            q_BHE, kv_2NSKE, batch.block_table_BM, step.num_items, step.scratch, scoring, out_BHE, step.tiling,
            step.shared_lens_B, self._shared_partials, has_window=batch.window is not None,
        )  # fmt: skip
