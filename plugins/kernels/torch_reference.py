"""Kernels in plain torch, for any device: the reference for tests of other kernels, and the kernels for CPUs.

Values that are the same for every layer of a step are computed once, in `prepare` or by the first layer that needs
them, and kept in batch.scratch: on a CPU, calls into torch take most of the time of a small model's step.
Legend: T tokens, D hidden, O output features, F half of gate and up, H heads, K kv heads, E head dim, R rotated values
of a head, N blocks, S block size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from hookline.core.contracts import PLAIN_ATTENTION, AttentionForm, AttentionSpec, Batch, Kernels, QKNorm, Rope
from hookline.plugins.kernels.attention.torch_attention import attend_rows, plan_rows, put_rows

RopeRows = tuple[Tensor, Tensor]
"""Cosines, and sines with their signs, of a step's positions: (T, 1, R) each."""


class TorchKernels(Kernels):
    """Implements core.contracts.Kernels. Slots that a query may not see do not affect it, even if they hold NaN."""

    def __new__(cls, config: Any, spec: AttentionSpec) -> TorchKernels:
        """An object of `batch_invariant_class` if the spec has batch_invariant set."""
        return super().__new__(cls.batch_invariant_class() if spec.batch_invariant else cls)

    @classmethod
    def batch_invariant_class(cls) -> type[TorchKernels]:
        """The class for AttentionSpec.batch_invariant. It extends this one, whose paths so need no branch for it."""
        from hookline.plugins.kernels.invariant.torch_kernels import InvariantTorchKernels

        return InvariantTorchKernels

    def __init__(self, config: Any, spec: AttentionSpec) -> None:
        self.spec = spec
        self.num_qk_heads = spec.num_heads + spec.num_kv_heads
        self._eps: dict[float, Tensor] = {}

    def rms_norm(self, x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See Kernels."""
        if x_TD.is_cuda and x_TD.dtype == weight_D.dtype:
            return functional.rms_norm(x_TD, weight_D.shape, weight_D, eps)
        return self._normalise(x_TD.float(), eps).mul_(weight_D).to(x_TD.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """See Kernels."""
        residual_TD.add_(x_TD)
        return self.rms_norm(residual_TD, weight_D, eps), residual_TD

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """See Kernels."""
        return functional.linear(x_TD, weight_OD, bias_O)

    def linear_silu_mul(self, x_TD: Tensor, gate_up_weight_FD: Tensor) -> Tensor:
        """See Kernels."""
        return self.silu_mul(functional.linear(x_TD, gate_up_weight_FD))

    def silu_mul(self, gate_up_TF: Tensor) -> Tensor:
        """See Kernels."""
        gate_TF, up_TF = gate_up_TF.chunk(2, -1)
        return functional.silu(gate_TF).mul_(up_TF)

    def qk_norm_rope(
        self, q_THE: Tensor, k_TKE: Tensor, positions_T: Tensor, rope: Rope | None, norm: QKNorm | None
    ) -> tuple[Tensor, Tensor]:
        """See Kernels."""
        rows = _rope_rows(rope, positions_T) if rope else None
        heads_TXE = self._norm_rope(torch.cat((q_THE, k_TKE), 1).float(), q_THE.shape[1], rows, norm).to(q_THE.dtype)
        return heads_TXE[:, : q_THE.shape[1]], heads_TXE[:, q_THE.shape[1] :]

    def write_kv(self, k_TKE: Tensor, v_TKE: Tensor, kv_2NSKE: Tensor, slot_mapping_T: Tensor) -> None:
        """See Kernels."""
        for slots_NKE, new_TKE in zip(kv_2NSKE.flatten(1, 2), (k_TKE, v_TKE), strict=False):  # one if of keys alone
            put_rows(slots_NKE, slot_mapping_T, new_TKE)

    def qk_norm_rope_write(
        self, qkv_TC: Tensor, kv_2NSKE: Tensor, batch: Batch, rope: Rope | None, norm: QKNorm | None
    ) -> Tensor:
        """See Kernels."""
        num_heads = self.spec.num_heads
        qkv_TYE = qkv_TC.view(qkv_TC.shape[0], -1, self.spec.head_dim)
        qk_TXE, v_TKE = qkv_TYE[:, : self.num_qk_heads], qkv_TYE[:, self.num_qk_heads :]
        rows = _cached_rope_rows(rope, batch) if rope else None
        qk_TXE = self._norm_rope(qk_TXE.float(), num_heads, rows, norm).to(qkv_TC.dtype)
        self.write_kv(qk_TXE[:, num_heads:], v_TKE, kv_2NSKE, batch.slot_mapping_T)
        return qk_TXE[:, :num_heads]

    def prepare(self, batch: Batch) -> None:
        """See Kernels. Plans the rows that every layer attends with."""
        batch.scratch["rows"] = plan_rows(batch, self.spec)

    def attend(self, q_THE: Tensor, kv_2NSKE: Tensor, batch: Batch, form: AttentionForm = PLAIN_ATTENTION) -> Tensor:
        """See Kernels."""
        return attend_rows(q_THE, kv_2NSKE, batch.scratch["rows"], self.spec, form)

    def _normalise(self, x_TD: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) in a new tensor; twice as fast on a CPU as functional.rms_norm."""
        if eps not in self._eps:
            self._eps[eps] = torch.tensor(eps, device=x_TD.device)
        length_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True)
        return x_TD * torch.addcmul(self._eps[eps], length_T1, length_T1, value=1 / x_TD.shape[-1]).rsqrt_()

    def _norm_rope(self, qk_TXE: Tensor, num_heads: int, rows: RopeRows | None, norm: QKNorm | None) -> Tensor:
        """Normalise and rotate query and key heads together, in float32; may overwrite qk_TXE."""
        if norm:
            qk_TXE = self._normalise(qk_TXE, norm.eps)
            qk_TXE[:, :num_heads].mul_(norm.q_weight_E)
            qk_TXE[:, num_heads:].mul_(norm.k_weight_E)
        if rows:
            cos_T1R, sin_T1R = rows
            width = cos_T1R.shape[-1]
            rotated_TXR = qk_TXE if width == qk_TXE.shape[-1] else qk_TXE[..., :width]
            swapped_TXR = rotated_TXR.roll(width // 2, -1)
            rotated_TXR.mul_(cos_T1R).addcmul_(swapped_TXR, sin_T1R)
        return qk_TXE


def _cached_rope_rows(rope: Rope, batch: Batch) -> RopeRows:
    """Layers that share a rope table share its rows of this step."""
    cache: dict[int, RopeRows] = batch.scratch.setdefault("rope_rows", {})
    if id(rope) not in cache:
        cache[id(rope)] = _rope_rows(rope, batch.positions_T)
    return cache[id(rope)]


def _rope_rows(rope: Rope, positions_T: Tensor) -> RopeRows:
    """Cosine for both halves of the rotated values, and sine with the sign of each half's partner."""
    cos_T1F, sin_T1F = rope.table_PE.index_select(0, positions_T).unsqueeze(1).chunk(2, -1)
    return torch.cat((cos_T1F, cos_T1F), -1), torch.cat((-sin_T1F, sin_T1F), -1)
