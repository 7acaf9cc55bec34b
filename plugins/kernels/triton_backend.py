"""kernels=triton: the Triton kernels behind the Kernels contract, for CUDA cards from compute capability 8.0.

Decides per step which kernels run on which rows; the kernels themselves live in the packages beside this file. What
they don't cover comes from the plain torch reference. Legend: T tokens, B requests, D hidden, O output features, F
feed-forward, H heads, K kv heads, E head dim, N cache blocks, S block size, C = (H + 2K) * E.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import triton
from torch import Tensor

from hookline.core.contracts import (
    PLAIN_ATTENTION,
    AttentionForm,
    AttentionSpec,
    Batch,
    PeerMemory,
    QKNorm,
    Rope,
    StateRows,
    StepShape,
)
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
from hookline.plugins.kernels.experts import triton_experts, triton_few_experts, triton_routing
from hookline.plugins.kernels.norms import triton_gates, triton_norms, triton_rotary
from hookline.plugins.kernels.products import cublaslt, triton_thin
from hookline.plugins.kernels.products.triton_product import Kind, fitting_tiling, product
from hookline.plugins.kernels.products.triton_wide import (
    WideScratch,
    empty_with_room,
    fitting_wide_tiling,
    wide_product,
)
from hookline.plugins.kernels.recurrent import triton_recurrent
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.kernels.triton_exchange import TritonExchange
from hookline.plugins.kernels.triton_launch import WIDE_GROUP, fuses_decode, triggers_late

MOST_DEEP_OUTPUTS = 5120
_PROMPT_TOKENS = tuple(1 << exponent for exponent in range(15))
_CONTEXTS = (1024, 2048)
"""Sizes of prompts and their contexts among which each choice of prefill tiles is found."""
One = TypeVar("One")


def first_of_each(many: Iterable[One], choice: Callable[[One], object]) -> list[One]:
    """The first of those that have the same choice."""
    found: dict[object, One] = {}
    for one in many:
        found.setdefault(choice(one), one)
    return list(found.values())


def is_deep(num_rows: int, num_out: int, width: int) -> bool:
    """Whether a product is faster with a bias, even one of zeros, for which torch takes cuBLASLt (docs/log.md).

    It cuts a product of many input and few output features along the input, by 9 to 18 % faster on an H200.
    """
    most_rows = 128 if width > 12288 else 112
    return 64 < num_rows <= most_rows and num_out <= MOST_DEEP_OUTPUTS and width >= 8192


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


class TritonKernels(TorchKernels):
    """Triton for norms, SiLU·mul, RoPE, cache writes, attention, experts and the products of few rows.

    Scratch space is allocated once, for `spec.max_num_seqs` decode rows, so its addresses hold in every CUDA graph.
    """

    own_row_counts = (1, 2, 3, 4, 5, 16, 24, 32, 64, 104, 128, 256, 257)
    """Thin products have a kernel for each number of rows; of the others, and of norms, these are the last rows of a
    choice, or the first."""

    @classmethod
    def batch_invariant_class(cls) -> type[TorchKernels]:
        """See TorchKernels."""
        from hookline.plugins.kernels.invariant.triton_kernels import InvariantTritonKernels

        return InvariantTritonKernels

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self._decode_scratch = DecodeScratch.make(
            spec.max_num_seqs, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.device
        )
        self._scratch_of_window: dict[int, DecodeScratch] = {}
        self._plain_scoring = Scoring.of(spec.scale)
        self._shared_partials = make_shared_partials(
            spec.max_num_seqs, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            spec.dtype, self._decode_scratch.card, spec.device,
        )  # fmt: skip
        self._wide_scratch = WideScratch.make(spec.device)
        self._no_bias = torch.zeros(MOST_DEEP_OUTPUTS, dtype=spec.dtype, device=spec.device)
        self._cublaslt = cublaslt.cublaslt(spec.device)
        self._aside = SideStream(spec.device) if spec.device.type == "cuda" else None

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See Kernels.rms_norm."""
        return triton_norms.rms_norm(x_TD, weight_D, eps)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels.add_rms_norm; overwrites both inputs."""
        return triton_norms.add_rms_norm(x_TD, residual_TD, weight_D, eps)

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Kernels.linear; a few rows take the thin product, a few hundred the narrow or the wide one."""
        if triton_thin.fits(x_TD, weight_OD):
            return triton_thin.thin_linear(x_TD, weight_OD, bias_O)
        out_TO = self._own_product(Kind.PLAIN, x_TD, weight_OD, bias_O)
        return self._general_product(x_TD, weight_OD, bias_O) if out_TO is None else out_TO

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels.linear_silu_mul; one launch for up to 128 rows."""
        if triton_thin.fits(x_TD, gate_up_weight_FD):
            return triton_thin.thin_linear(x_TD, gate_up_weight_FD, None, silu=True)
        out_TF = self._own_product(Kind.SILU, x_TD, gate_up_weight_FD, None)
        return self.silu_mul(self._general_product(x_TD, gate_up_weight_FD, None)) if out_TF is None else out_TF

    def linear_add_rms_norm(
        self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, residual_TO: Tensor, norm_weight_O: Tensor,
        eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Kernels.linear_add_rms_norm; for a few hundred rows the norm adds up the parts of the product."""
        is_thin = triton_thin.fits(x_TD, weight_OD)
        parts_PTO = None if is_thin else self._own_product(Kind.PARTS, x_TD, weight_OD, bias_O)
        if parts_PTO is None:
            return self.add_rms_norm(self.linear(x_TD, weight_OD, bias_O), residual_TO, norm_weight_O, eps)
        return triton_norms.add_parts_rms_norm(parts_PTO, residual_TO, norm_weight_O, eps)

    def _own_product(self, kind: Kind, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor | None:
        """The product by the narrow or the wide kernel; None where the general one is faster."""
        tiling = fitting_tiling(kind, x_TD, weight_OD)
        if tiling is not None:
            return product(kind, x_TD, weight_OD, bias_O, tiling)
        wide = fitting_wide_tiling(kind, x_TD, weight_OD)
        return None if wide is None else wide_product(kind, x_TD, weight_OD, bias_O, wide, self._wide_scratch)

    def _general_product(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """The product by cuBLASLt or torch."""
        if bias_O is not None:
            return super().linear(x_TD, weight_OD, bias_O)
        if self._cublaslt is not None and cublaslt.fits(x_TD, weight_OD):
            out_TO = self._cublaslt.linear(x_TD, weight_OD)
            if out_TO is not None:
                return out_TO
        takes_zeros = x_TD.dtype == self._no_bias.dtype and is_deep(len(x_TD), *weight_OD.shape)
        return super().linear(x_TD, weight_OD, self._no_bias[: len(weight_OD)] if takes_zeros else None)

    def add_parts_rms_norm(
        self, parts_PTD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float, out_TD: Tensor
    ) -> None:
        """See Kernels.add_parts_rms_norm; one launch."""
        triton_norms.add_parts_rms_norm(parts_PTD, residual_TD, weight_D, eps, out_TD)

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels.silu_mul."""
        return triton_gates.gated_mul(gate_up_TF)

    def gelu_tanh_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels.gelu_tanh_mul; one launch."""
        return triton_gates.gated_mul(gate_up_TF, gelu=True)

    def norm_add_rms_norm(
        self, x_TD: Tensor, inner_weight_D: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.norm_add_rms_norm; one launch."""
        return triton_norms.norm_add_rms_norm(x_TD, inner_weight_D, residual_TD, weight_D, eps)

    def rms_norm_silu_mul(self, x_THE: Tensor, weight_E: Tensor, eps: float, gate_THE: Tensor) -> Tensor:
        """See Kernels.rms_norm_silu_mul; one launch."""
        return triton_norms.rms_norm_silu_mul(x_THE, weight_E, eps, gate_THE)

    def sigmoid_mul(self, x_TD: Tensor, gate_TG: Tensor, added_TD: Tensor | None = None) -> Tensor:
        """See Kernels.sigmoid_mul; one launch."""
        return triton_gates.sigmoid_mul(x_TD, gate_TG, added_TD)

    def delta_gates(
        self, beta_TH: Tensor, decay_TH: Tensor, log_rate_H: Tensor, decay_bias_H: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.delta_gates; one launch."""
        return triton_gates.delta_gates(beta_TH, decay_TH, log_rate_H, decay_bias_H)

    def route_experts(self, logits_TX: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
        """See Kernels.route_experts; one launch."""
        return triton_routing.route_experts(logits_TX, top_k, normalise)

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels.expert_mlp; a few tokens as they come, others grouped by expert on the device."""
        if triton_few_experts.fits(expert_TA, len(down_XDF)):
            return triton_few_experts.few_expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)
        return triton_experts.expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def clamped_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, gate_up_bias_XF: Tensor,
        down_XDF: Tensor, down_bias_XD: Tensor | None, alpha: float, limit: float,
    ) -> Tensor:  # fmt: skip
        """See Kernels.clamped_expert_mlp; as expert_mlp."""
        if triton_few_experts.fits(expert_TA, len(down_XDF)):
            return triton_few_experts.few_expert_mlp(
                x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, gate_up_bias_XF=gate_up_bias_XF,
                down_bias_XD=down_bias_XD, alpha=alpha, limit=limit,
            )  # fmt: skip
        weights = gate_up_XFD, gate_up_bias_XF, down_XDF, down_bias_XD
        return triton_experts.clamped_expert_mlp(x_TD, expert_TA, weight_TA, *weights, alpha, limit)

    def short_convolution(self, x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, states: StateRows) -> Tensor:
        """See Kernels.short_convolution."""
        return triton_recurrent.short_convolution(x_TC, weight_CW, state_RCP, states)

    def gated_delta_rule(
        self,
        q_TKE: Tensor,
        k_TKE: Tensor,
        v_THF: Tensor,
        log_decay_TH: Tensor,
        beta_TH: Tensor,
        state_RHEF: Tensor,
        states: StateRows,
    ) -> Tensor:
        """See Kernels.gated_delta_rule; prompts in chunks."""
        given = q_TKE, k_TKE, v_THF, log_decay_TH, beta_TH
        return triton_recurrent.gated_delta_rule(*given, state_RHEF, states)

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """See Kernels.qk_norm_rope_write; one launch."""
        return triton_rotary.qk_norm_rope_write(qkv_TC, kv_2NSKE, batch.positions_T, batch.slot_mapping_T, rope, norm)

    def exchange(self, peers: PeerMemory) -> TritonExchange:
        """See core.contracts.Exchange."""
        return TritonExchange(peers, self._wide_scratch)

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
        """What kernels of so many decodes are compiled for."""
        spec, card = self.spec, self._decode_scratch.card
        group = spec.num_heads // spec.num_kv_heads
        shared = shared_tiling(num_rows * group, spec.num_kv_heads, spec.head_dim, spec.dtype, card)
        return (
            decode_tiling(num_rows, spec.num_kv_heads, spec.head_dim, spec.dtype, card),
            triggers_late(num_rows, is_large=group >= WIDE_GROUP), fuses_decode(num_rows, group),
            num_rows <= FEW_ROWS, replace(shared, max_parts=0),
        )  # fmt: skip

    def _prefill_tiling(self, num_tokens: int, max_context_len: int, window: int | None = None) -> PrefillTiling:
        spec, card = self.spec, self._decode_scratch.card
        group = spec.num_heads // spec.num_kv_heads
        longest = max_context_len if window is None else min(max_context_len, window)
        tiling = prefill_tiling(num_tokens, longest, spec.num_heads, group, spec.head_dim, spec.dtype, card)
        return tiling if group <= tiling.block_m else replace(tiling, block_m=triton.next_power_of_2(group))

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
        if type(self).prepare is TritonKernels.prepare:
            batch.scratch.update(prepared.scratch)
        else:
            self.prepare(batch)

    def _prepare_decode(self, batch: Batch) -> _DecodeStep:
        spec, rows = self.spec, batch.num_decodes
        tiling = decode_tiling(rows, spec.num_kv_heads, spec.head_dim, spec.dtype, self._decode_scratch.card)
        shared_lens_B, shared = batch.shared_lens_B if batch.window is None else None, None
        if shared_lens_B is not None:
            queries = rows * spec.num_heads // spec.num_kv_heads
            card = self._decode_scratch.card
            shared = shared_tiling(queries, spec.num_kv_heads, spec.head_dim, spec.dtype, card)
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
