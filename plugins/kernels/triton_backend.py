"""kernels=triton: the Triton kernels behind the Kernels contract, for CUDA cards from compute capability 8.0.

Decides per step which kernels run on which rows; the kernels are in the packages beside this file. Operations without
a Triton kernel come from the plain torch reference. Legend: T tokens, B requests, D hidden, O output features, F
feed-forward, H heads, K kv heads, E head dim, N cache blocks, S block size, C = (H + 2K) * E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hookline.core.contracts import (
    AttentionSpec,
    Batch,
    DecodeInputs,
    DeltaNet,
    DraftingRows,
    PeerMemory,
    QKNorm,
    RequestRows,
    Rope,
    StateRows,
)
from hookline.core.errors import ConfigError
from hookline.plugins.kernels import triton_request_rows
from hookline.plugins.kernels.experts import triton_experts, triton_few_experts, triton_routing
from hookline.plugins.kernels.norms import triton_gates, triton_norms, triton_rotary
from hookline.plugins.kernels.products import cublaslt, triton_thin
from hookline.plugins.kernels.products.triton_product import Kind, fitting_tiling, product
from hookline.plugins.kernels.products.triton_wide import WideScratch, fitting_wide_tiling, wide_product
from hookline.plugins.kernels.recurrent import triton_delta_net, triton_recurrent
from hookline.plugins.kernels.torch_reference import TorchKernels
from hookline.plugins.kernels.triton_exchange import TritonExchange
from hookline.plugins.kernels.triton_masks import mask_logits
from hookline.plugins.kernels.triton_quantized import TritonQuantized

MOST_DEEP_OUTPUTS = 5120
CONVERTS_E4M3 = (8, 9)
"""Lowest compute capability for which Triton converts from and to e4m3."""


def is_deep(num_rows: int, num_out: int, width: int) -> bool:
    """Whether a product is faster with a bias, even one of zeros, for which torch takes cuBLASLt (docs/log).

    It cuts a product of many input and few output features along the input, by 9 to 18 % faster on an H200.
    """
    most_rows = 128 if width > 12288 else 112
    return 64 < num_rows <= most_rows and num_out <= MOST_DEEP_OUTPUTS and width >= 8192


class TritonKernels(TritonQuantized):
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

    def __new__(cls, config: Any, spec: AttentionSpec) -> TorchKernels:  # type: ignore[misc]
        """Of the class for values that are a part of the keys, where the spec has these.

        Raises: ConfigError if these are to be computed alike in every batch, or for a cache in 8 bits on a card whose
        instructions do not convert them.
        """
        if spec.kv_dtype is not None and spec.device.type == "cuda":
            capability = torch.cuda.get_device_capability(spec.device)
            if capability < CONVERTS_E4M3:
                here, least = (".".join(map(str, one)) for one in (capability, CONVERTS_E4M3))
                raise ConfigError(
                    f"kernels=triton read a cache in e4m3 on cards from compute capability {least} on, and this one "
                    f"has {here}; leave engine.kv_dtype out, or take kernels=torch"
                )
        if spec.value_dim is None:
            return super().__new__(cls, config, spec)
        if spec.batch_invariant:
            raise ConfigError("kernels=triton do not compute latent attention alike in every batch; take kernels=torch")
        from hookline.plugins.kernels.triton_latent_backend import LatentTritonKernels

        return object.__new__(LatentTritonKernels)

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        super().__init__(config, spec)
        self._wide_scratch = WideScratch.make(spec.device)
        self._no_bias = torch.zeros(MOST_DEEP_OUTPUTS, dtype=spec.dtype, device=spec.device)
        self._cublaslt = cublaslt.cublaslt(spec.device)

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

    def linear_gelu_tanh_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels.linear_gelu_tanh_mul; one launch for a few rows."""
        if triton_thin.fits(x_TD, gate_up_weight_FD):
            return triton_thin.thin_linear(x_TD, gate_up_weight_FD, None, gelu=True)
        return self.gelu_tanh_mul(self.linear(x_TD, gate_up_weight_FD, None))

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
        self, x_TD: Tensor, inner_weight_D: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
        scale_1: Tensor | None = None, beside: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Kernels.norm_add_rms_norm; one launch."""
        return triton_norms.norm_add_rms_norm(x_TD, inner_weight_D, residual_TD, weight_D, eps, scale_1, beside)

    def norm_heads(
        self, x_TN: Tensor, head_dim: int, eps: float, places_C: Tensor, scale_C: Tensor, width: int
    ) -> Tensor:
        """See Kernels.norm_heads; one launch."""
        return triton_norms.norm_heads(x_TN, head_dim, eps, places_C, scale_C, width)

    def take_columns(self, x_TD: Tensor, places_N: Tensor) -> Tensor:
        """See Kernels.take_columns; one launch."""
        return triton_norms.take_columns(x_TD, places_N)

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

    def mask_logits(self, logits_NV: Tensor, masks_RW: Tensor, index_N: Tensor) -> Tensor:
        """See Kernels.mask_logits; one launch."""
        return mask_logits(logits_NV, masks_RW, index_N)

    def gather_decodes(self, rows_N: Tensor, requests: RequestRows) -> DecodeInputs:
        """See Kernels.gather_decodes; one launch."""
        return triton_request_rows.gather_decodes(rows_N, requests)

    def gather_tokens(self, inputs_3N: Tensor, requests: RequestRows) -> DecodeInputs:
        """See Kernels.gather_tokens; one launch."""
        return triton_request_rows.gather_tokens(inputs_3N, requests)

    def keep_tokens(self, rows_N: Tensor, tokens_N: Tensor, draw_position_N: Tensor, requests: RequestRows) -> None:
        """See Kernels.keep_tokens; one launch."""
        triton_request_rows.keep_tokens(rows_N, tokens_N, draw_position_N, requests)

    def lay_out_drafts(
        self, rows_B: Tensor, drafts_BK: Tensor, drafting: DraftingRows, requests: RequestRows, inputs_3G: Tensor
    ) -> None:
        """See Kernels.lay_out_drafts; one launch."""
        triton_request_rows.lay_out_drafts(rows_B, drafts_BK, drafting, requests, inputs_3G)

    def keep_drafts(
        self,
        rows_B: Tensor,
        inputs_3G: Tensor,
        drawn_G: Tensor,
        num_drafts: int,
        drafting: DraftingRows,
        requests: RequestRows,
    ) -> Tensor:
        """See Kernels.keep_drafts; one launch."""
        return triton_request_rows.keep_drafts(rows_B, inputs_3G, drawn_G, num_drafts, drafting, requests)

    def router_logits(self, x_TD: Tensor, weight_XD: Tensor) -> Tensor:
        """See Kernels.router_logits; one launch for few rows."""
        if triton_thin.fits_float32(x_TD, weight_XD):
            return triton_thin.thin_linear_float32(x_TD, weight_XD)
        return super().router_logits(x_TD, weight_XD)

    def route_experts(
        self, logits_TX: Tensor, top_k: int, normalise: bool, scale_X: Tensor | None = None, num_shared: int = 0
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.route_experts; one launch."""
        return triton_routing.route_experts(logits_TX, top_k, normalise, scale_X, num_shared)

    def expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels.expert_mlp; a few tokens as they come, others grouped by expert on the device."""
        if triton_few_experts.fits(expert_TA, len(down_XDF)):
            return triton_few_experts.few_expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)
        return triton_experts.expert_mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF)

    def shared_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
        shared_gate_up_FD: Tensor, shared_down_DF: Tensor, gate_T1: Tensor,
    ) -> Tensor:  # fmt: skip
        """See Kernels.shared_expert_mlp; for a few tokens in the launches of the others."""
        given = x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF
        has_its_own = type(self).expert_mlp is not TritonKernels.expert_mlp
        is_alike = triton_few_experts.is_alike(shared_gate_up_FD, shared_down_DF, gate_up_XFD, down_XDF)
        if has_its_own or not is_alike or not triton_few_experts.fits(expert_TA, len(down_XDF)):
            return super().shared_expert_mlp(*given, shared_gate_up_FD, shared_down_DF, gate_T1)
        shared = shared_gate_up_FD, shared_down_DF, gate_T1
        return triton_few_experts.few_expert_mlp(*given, shared=shared)

    def expert_mlp_add_rms_norm(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor,
        residual_TD: Tensor, norm_weight_D: Tensor, eps: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """See Kernels.expert_mlp_add_rms_norm; a few tokens' product adds up experts, others' norm."""
        given = x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF
        has_its_own = type(self).expert_mlp is not TritonKernels.expert_mlp  # a class that computes experts otherwise
        if has_its_own or triton_few_experts.fits(expert_TA, len(down_XDF)):
            return super().expert_mlp_add_rms_norm(*given, residual_TD, norm_weight_D, eps)
        parts_ATD = triton_experts.expert_outputs(*given).transpose(0, 1)
        return triton_norms.add_parts_rms_norm(parts_ATD, residual_TD.contiguous(), norm_weight_D, eps)

    def gelu_expert_mlp(
        self, x_TD: Tensor, expert_TA: Tensor, weight_TA: Tensor, gate_up_XFD: Tensor, down_XDF: Tensor
    ) -> Tensor:
        """See Kernels.gelu_expert_mlp; as expert_mlp."""
        is_few = triton_few_experts.fits(expert_TA, len(down_XDF))
        mlp = triton_few_experts.few_expert_mlp if is_few else triton_experts.expert_mlp
        return mlp(x_TD, expert_TA, weight_TA, gate_up_XFD, down_XDF, gelu=True)

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

    def short_convolution(
        self, x_TC: Tensor, weight_CW: Tensor, state_RCP: Tensor, states: StateRows, bias_C: Tensor | None = None
    ) -> Tensor:
        """See Kernels.short_convolution."""
        return triton_recurrent.short_convolution(x_TC, weight_CW, state_RCP, states, bias_C)

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

    def gated_delta_net(
        self, mixed_TC: Tensor, beta_TH: Tensor, decay_TH: Tensor, gate_THF: Tensor, net: DeltaNet, conv_RCP: Tensor,
        memory_RHEF: Tensor, states: StateRows,
    ) -> Tensor:  # fmt: skip
        """See Kernels.gated_delta_net; two launches for one decode, its operations one by one for other steps."""
        own, plain = type(self), TritonKernels
        has_its_own = (own.short_convolution, own.gated_delta_rule) != (plain.short_convolution, plain.gated_delta_rule)
        if len(mixed_TC) == 1 and states.num_decodes == 1 and not has_its_own:
            given = mixed_TC, beta_TH, decay_TH, gate_THF, net, conv_RCP, memory_RHEF
            return triton_delta_net.delta_net_of_one_token(*given, states)
        convolved_TC = self.short_convolution(mixed_TC, net.conv_CW, conv_RCP, states)
        (num_heads, key_dim, value_dim), num_tokens = memory_RHEF.shape[1:], len(mixed_TC)
        num_keys = (mixed_TC.shape[1] - num_heads * value_dim) // 2
        q_TC, k_TC, v_TC = convolved_TC.split_with_sizes([num_keys, num_keys, num_heads * value_dim], -1)
        q_TKE, k_TKE = (one.view(num_tokens, -1, key_dim) for one in (q_TC, k_TC))
        gates = self.delta_gates(beta_TH, decay_TH, net.log_rate_H, net.decay_bias_H)
        v_THF = v_TC.view(num_tokens, num_heads, value_dim)
        out_THF = self.gated_delta_rule(q_TKE, k_TKE, v_THF, *gates, memory_RHEF, states)
        return self.rms_norm_silu_mul(out_THF, net.norm_F, net.eps, gate_THF)

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """See Kernels.qk_norm_rope_write; one launch."""
        return triton_rotary.qk_norm_rope_write(
            qkv_TC, kv_2NSKE, batch.positions_T, batch.slot_mapping_T, rope, norm,
            is_ordered=self.spec.batch_invariant,
        )  # fmt: skip

    def exchange(self, peers: PeerMemory) -> TritonExchange:
        """See core.contracts.Exchange."""
        return TritonExchange(peers, self._wide_scratch)
